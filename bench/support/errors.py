"""The error that a user can act on."""


class UserError(Exception):
    """A request cannot be met. The message is one line; the command line prints it and exits with code 2."""

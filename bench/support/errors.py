"""The errors that a user can act on. The message is one line; the command line prints it and exits with code 2."""


class UserError(Exception):
    """A request cannot be met."""


class ConfigError(UserError):
    """The config cannot be run; the message names the valid choices."""


class Dense(ConfigError):
    """A setting of routers for a dense model."""

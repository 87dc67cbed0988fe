"""``steadymoe check``: what a loss from anywhere has to pass, a line each.

An algorithm's config comes in; findings go out, and nothing is written. The mathematical properties are computed here
alone: the tests of the shipped algorithms call the same functions.
"""

"""``steadymoe check``: check a loss property by property, a line each.

The mathematical properties are defined here alone; the tests of the built-in algorithms call the same functions.
"""

"""``steadymoe score``: one command that places an algorithm beside the recorded ones.

``standard`` says what is run, ``kept`` holds what was recorded, ``standing`` compares, ``page`` shows, and ``request``
does all of it from the words of the command.
"""

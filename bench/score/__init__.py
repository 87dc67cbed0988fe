"""``steadymoe score``: one command that places an algorithm beside the recorded ones; and the board of such scores.

``standard`` says what is run, ``kept`` holds what was recorded, ``standing`` compares, ``page`` shows, and ``request``
does all of it from the words of the command. ``entry`` is a score as a folder, ``submit`` writes it, ``board`` lists
entries, ``repeat`` runs one again; ``core_entries`` writes the entries of the suite's own algorithms.
"""

"""``steadymoe score``: compare an algorithm with the recorded ones, submit the score, verify submitted scores.

``standard`` defines the parts, ``plan`` what is run, ``baselines`` what was recorded, ``comparison`` the statistics,
``page`` the output. ``entry`` reads and writes a submitted score, ``board`` ranks entries, ``rerun`` repeats them.
"""

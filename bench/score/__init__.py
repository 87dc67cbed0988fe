"""``steadymoe score``: compare an algorithm with the recorded ones, submit the score, verify submitted scores.

``standard`` defines the parts and reads their recorded numbers, ``plan`` says what runs, ``comparison`` compares and
shows. ``entry`` reads and writes a submitted score, ``board`` ranks entries, ``rerun`` repeats them.
"""

"""``steadymoe score``: compare an algorithm with the recorded ones, submit the score, verify submitted scores.

``standard`` defines the dials and reads their recorded numbers, ``outcomes`` turns runs into scores. ``entry`` reads
and writes a submitted score, ``board`` ranks entries, ``rerun`` repeats them.
"""

"""``steadymoe score``: compare an algorithm with GRPO and GSPO, record the score, draw the board of recorded losses.

``standard`` defines the dials and reads their recorded numbers, ``outcomes`` turns runs into scores, ``recorded``
appends to the recorded numbers, ``board`` ranks the losses.
"""

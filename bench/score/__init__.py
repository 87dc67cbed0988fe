"""``steadymoe score``: what a loss tolerates with free and pinned routes and on the dense twin; the board of all.

``standard`` defines the sides and reads their recorded numbers, ``outcomes`` turns runs into scores, ``recorded``
appends to the recorded numbers, ``board`` ranks the losses.
"""

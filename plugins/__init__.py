"""The losses under the names by which other trainers' configurations choose them (docs/on_your_trainer.md).

Part of both builds, the suite's and the losses' alone, so it imports ``steadymoe.algorithms`` and the trainer itself.
"""

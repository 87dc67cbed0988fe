"""What is measured: every column's definition, and the arithmetic from tensors to numbers.

Tensors of a rollout or an update come in; scalars and counts by column go out. May import support, algorithms, models,
statistics and tasks.
"""

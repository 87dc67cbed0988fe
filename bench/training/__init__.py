"""Training: cold start, rollout, updates, evaluation, and what is measured of them.

A typed config, a model and a task come in; the rows of one step after another go out. ``columns`` defines every
column. The only files written here are checkpoints, cold starts and samples.
"""

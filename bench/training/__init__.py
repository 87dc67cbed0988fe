"""Training: cold start, rollout, updates, evaluation.

A typed config, a model and a task come in; the rows of one step after another go out. The only files written here are
checkpoints, cold starts and samples. This folder may import every folder left of it (docs/architecture.md), but from
``config`` only the schema.
"""

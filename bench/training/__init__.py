"""Training: cold start, rollout, updates, evaluation.

A typed config, a model and a task come in; the rows of one step after another go out. Nothing is written here but
checkpoints and cold starts. May import what stands left of it (docs/architecture.md), and of config the schema alone.
"""

"""The cost of a rollout step, compared with TRL and plain transformers: ``make speed``, or ``steadymoe speed``.

Overrides of the config come in; ``speed.json``, its tables and a figure go out. This folder may import every folder
left of it (docs/architecture.md), but not ``claims`` or the command line.
"""

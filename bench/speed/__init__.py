"""What a rollout step costs, beside TRL and plain transformers: ``make speed``, or ``steadymoe speed``."""

"""The arms that the study knows."""

from study import arms, gates
from study.recorded import Arm


def arms_in(value: object) -> list[Arm]:
    if isinstance(value, Arm):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [arm for part in parts for arm in arms_in(part)]


def known_arms() -> list[Arm]:
    """The arms of the study, of its gates and of what a seed buys."""
    named = [*vars(arms).items(), *vars(gates).items()]
    return [arm for name, value in named if name.isupper() for arm in arms_in(value)]

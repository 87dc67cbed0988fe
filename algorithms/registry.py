"""Algorithms by name: from the numbers of a YAML, or any config with a ``_target_``, to the loss that they describe."""

import dataclasses
import difflib
import importlib
import re
import sys
import traceback
import typing
from collections.abc import Mapping
from typing import Any

from steadymoe import conf
from steadymoe.algorithms.loss import PolicyLoss

# Where the equation of a loss was read; docs/algorithms.md says what each word means.
PROVENANCES = ("paper", "peer's code", "reconstruction")

# Field names of other trainers. Each is followed by the fields here that it may mean, in the order of trial.
_ELSEWHERE = {
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_ratio_low", "ratio_clip_min"), ("clip_low", "log_clip_low")),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "ratio_clip_max"), ("clip_high", "log_clip_high", "ratio_cap")),
    **dict.fromkeys(("clip_ratio_c", "delta", "ratio_clip_c"), ("dual_clip", "max_divergence", "max_kl", "ratio_cap")),
    **dict.fromkeys(("importance_sampling_level",), ("ratio",)),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), ("aggregation",)),
    "ratio_cap": ("clip_high",),
    "clip_low": ("log_clip_low", "max_divergence"),
    "clip_high": ("log_clip_high", "max_divergence", "ratio_cap"),
    "log_clip_low": ("clip_low",),
    "log_clip_high": ("clip_high",),
}


def names(presets: bool = False) -> list[str]:
    """Return the names of the algorithms that ship with the suite, sorted; ``presets`` adds the names of the presets.

    A preset, ``<algorithm>@<trainer>-<version>``, is an algorithm with the numbers of one trainer.
    """
    return [name for name in conf.names("algorithm") if presets or "@" not in name]


def provenance(name: str) -> str:
    """Return where the equation of a shipped algorithm or preset was read: one of ``PROVENANCES``.

    The docstring of an algorithm's module says it (``Provenance: paper.``); a preset is always a peer's code.
    Raises ValueError for an unknown name and for a docstring without such a line.
    """
    target = conf.read("algorithm", name)["loss"]["_target_"]
    if "@" in name:
        return "peer's code"
    module = importlib.import_module(target.rpartition(".")[0])
    found = re.search(rf"^Provenance: ({'|'.join(PROVENANCES)})\b", module.__doc__ or "", re.MULTILINE)
    if found is None:
        raise ValueError(f"{module.__name__} must say in its docstring: Provenance: {', '.join(PROVENANCES)}")
    return found[1]


def load(name: str, **overrides: Any) -> PolicyLoss:
    """Return the loss of one algorithm or preset by its name, with the numbers of its YAML; ``overrides`` replace some.

    A loss in a folder of STEADYMOE_PATH has a name, too. A mapping replaces fields of a host: ``load("rspo",
    host={"log_clip_low": 0.2})``. Raises ValueError for an unknown name, and the errors of ``build`` for an unknown or
    impossible number.
    """
    numbers: dict[str, Any] = conf.read("algorithm", name)["loss"]
    sys.path += [folder for folder in map(str, conf.named_folders()) if folder not in sys.path]
    for key, value in overrides.items():
        merges = isinstance(value, Mapping) and isinstance(numbers.get(key), Mapping)
        numbers[key] = numbers[key] | value if merges else value
    return build(numbers)


def build(config: Mapping[str, Any]) -> Any:
    """Return an object of the dataclass that ``_target_`` names; the other keys are its fields, mappings built first.

    Raises TypeError for a key that is no field of the class, with the field that was probably meant, and for a value
    of the wrong type. Raises ValueError for a class that cannot be found and for a number that the class refuses.
    """
    cls = class_of(config)
    kinds = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    values = {}
    for key, value in config.items():
        if key == "_target_":
            continue
        if key not in known:
            raise TypeError(f"{cls.__name__} has no {key!r}; {meant(key, known)}")
        is_class = isinstance(value, Mapping) and "_target_" in value
        values[key] = build(value) if is_class else _typed(cls.__name__, key, value, kinds[key])
    return cls(**values)


def class_of(config: Mapping[str, Any]) -> Any:
    """Return the dataclass that a config's ``_target_`` names. Raises ValueError if there is none."""
    if not isinstance(config, Mapping) or "_target_" not in config:
        raise ValueError(f"a _target_ must name a class; got {config!r}")
    target = str(config["_target_"])
    module, _, name = target.rpartition(".")
    try:
        cls: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"_target_ names no class: {target} ({error})") from error
    except Exception as error:  # the module itself is wrong; a SyntaxError already says in which line
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if isinstance(error, SyntaxError) else f", {last.filename}, line {last.lineno}"
        raise ValueError(f"_target_ names no class: {target} ({type(error).__name__}: {error}{place})") from error
    if not hasattr(cls, "__dataclass_fields__"):
        raise ValueError(f"_target_ must name a dataclass; {target} is none")
    return cls


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with every field of the class that it names: defaults for what it lacks, and 1.0 for a float's 1.

    A config without such a class stays as it is; ``build`` says why.
    """
    try:
        cls = class_of(config)
        kinds = typing.get_type_hints(cls)
    except (NameError, ValueError):
        return dict(config)
    given: dict[str, Any] = {}
    for key, value in config.items():
        is_float = type(value) in (int, float) and float in (kinds.get(key), *typing.get_args(kinds.get(key)))
        given[key] = complete(value) if isinstance(value, Mapping) else value + 0.0 if is_float else value  # no −0.0
    return _defaults(cls) | given


def minimal(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete config without the fields at their class's default: a new one changes no recorded hash."""
    usual = _defaults(class_of(config))
    own = {key: value for key, value in config.items() if key not in usual or usual[key] != value}
    return {key: minimal(value) if isinstance(value, Mapping) else value for key, value in own.items()}


def _defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass that a YAML could hold."""
    plain = (type(None), bool, int, float, str)
    return {each.name: each.default for each in dataclasses.fields(cls) if each.init and type(each.default) in plain}


def meant(key: str, known: list[str]) -> str:
    """Return the answer to an unknown field name: the field that was probably meant, and all fields."""
    near = [name for name in _ELSEWHERE.get(key, ()) if name in known] or difflib.get_close_matches(key, known)
    choice = f"did you mean {near[0]}? " if near else ""
    inside = "" if near or "host" not in known else "the host's own are host.…; "
    return f"{choice}{inside}its fields are {', '.join(known) if known else 'none'}"


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _typed(cls: str, key: str, value: Any, annotation: Any) -> Any:
    """``value`` if it is of the field's type, with 1 as 1.0 for a float. Raises TypeError otherwise."""
    allowed = typing.get_args(annotation) or (annotation,)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) in allowed or not set(allowed) & set(_KINDS):
        return value
    kinds = " or ".join("null" if kind is type(None) else _KINDS.get(kind, str(kind)) for kind in allowed)
    raise TypeError(f"{cls}: {key} must be {kinds}; got {value!r}")

"""The names in the configs: what a named config holds, and what could have been meant by a name that none holds."""

import dataclasses
import functools
import itertools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from steadymoe.algorithms import class_of, meant
from steadymoe.bench.config.identity import flatten
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.support import external
from steadymoe.bench.support.text import nearest

CONF = Path(__file__).parents[2] / "conf"

# A word that chooses one of the suite's configs, and does nothing else.
_CHOICE = re.compile(r"(?!hydra)\w+=[\w-]+")
# The command that prints every config of a group, and every key.
HELP = "`steadymoe run --help`"
_EXTRAS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}


def compose(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``hydra.compose`` makes of ``words``: our part as plain values, and config group → chosen name."""
    ours, merged = _composed(words, "ours")
    return OmegaConf.to_container(ours, resolve=True, throw_on_missing=True), dict(merged.choices)  # type: ignore[return-value]


def settings(words: Sequence[str]) -> DictConfig:
    """Return the whole config of ``words``, with Hydra's own part under ``hydra``."""
    return _composed(words, "whole")[0]


def reference_of(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the named configs as they stand, flattened: dotted key → value."""
    return _reference(tuple(words), external.versions())


@dataclass(frozen=True)
class _Merged:
    """Named configs as Hydra merges them, pickled: a copy is unpickled in a fifth of the time of a deepcopy."""

    whole: bytes
    ours: bytes
    """``whole`` without Hydra's own part."""
    choices: dict[str, Any]
    """Config group → chosen name."""


# Merged configs by the overrides that name them and the state of the user's configs.
_MERGED: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], _Merged] = {}


def _composed(words: Sequence[str], part: str) -> tuple[DictConfig, _Merged]:
    """Compose one config (``part`` is ``whole`` or ``ours``) and return it with the configs that it was merged from.

    Hydra takes a quarter of a second to read and merge the files. Here it does so once for each set of named configs;
    overrides that only change a value are then applied to a copy. Where this fails, Hydra says why.
    """
    parsed = [_parsed(word) for word in words]
    groups, searches = _groups(external.versions()), any(each.key_or_group == "hydra.searchpath" for each in parsed)
    not_changed = [f"{each.key_or_group}." for each in parsed if each.type is not OverrideType.CHANGE]

    def changes_value(override: Override) -> bool:
        key = f"{override.key_or_group}."
        # Where a key is also added or deleted, the order of the overrides counts.
        in_order = any(key.startswith(other) or other.startswith(key) for other in not_changed)
        if searches or in_order or override.package or override.is_hydra_override() or override.is_sweep_override():
            return False
        return "/" not in key and (override.key_or_group not in groups or isinstance(override.value(), dict))

    is_change = [changes_value(each) for each in parsed]
    merged = _merged(tuple(itertools.compress(words, [not each for each in is_change])))
    config: DictConfig = pickle.loads(getattr(merged, part))
    try:
        for each in itertools.compress(parsed, is_change):
            OmegaConf.update(config, each.key_or_group, each.value(), merge=True)
    except OmegaConfBaseException:
        hydra.compose("config", list(words))
        raise
    return config, merged


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


@functools.cache
def _groups(outside: tuple[tuple[str, int], ...]) -> frozenset[str]:
    """Return the config groups, also the user's; ``outside`` is the state of their configs."""
    return frozenset(GlobalHydra.instance().config_loader().list_groups(""))


def _merged(words: tuple[str, ...]) -> _Merged:
    """Merge the configs that ``words`` name; the same configs named in full are not merged a second time."""
    outside = external.versions()
    if (words, outside) not in _MERGED:
        whole = hydra.compose("config", list(words), return_hydra_config=True)
        ours = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        for config in (whole, ours):
            OmegaConf.set_struct(config, True)
        found = _Merged(pickle.dumps(whole), pickle.dumps(ours), dict(whole.hydra.runtime.choices))
        _MERGED[words, outside] = found
        if all(_CHOICE.fullmatch(word) for word in words):
            _MERGED.setdefault((tuple(in_full(found.choices)), outside), found)
    return _MERGED[words, outside]


def in_full(choices: Mapping[str, Any]) -> list[str]:
    """Return the overrides that choose every config of ``choices`` (config group → name), but none of Hydra's own."""
    chosen = {group: name for group, name in choices.items() if not group.startswith("hydra/") and name is not None}
    return [f"{group}={name}" for group, name in sorted(chosen.items())]


@functools.cache
def _reference(words: tuple[str, ...], outside: tuple[tuple[str, int], ...]) -> Mapping[str, Any]:
    return MappingProxyType(flatten(compose(words)[0]))


@contextmanager
def errors_in_one_line(words: Sequence[str]) -> Iterator[None]:
    """Hydra's errors, a dozen lines each, as one ConfigError line that names the choices."""
    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and name in _EXTRAS:
            raise ConfigError(f"{group}={name} needs its package: pip install 'steadymoe[{_EXTRAS[name]}]'") from error
        of_study = "; the reference study's experiments: steadymoe study list" if group == "experiment" else ""
        raise ConfigError(
            f"there is no {group} {name!r}; {nearest(name, error.options or [], HELP)}{of_study}"
        ) from error
    except OverrideParseException as error:
        key, _, value = str(error.override).partition("=")
        quoted = f"; a value with '=' needs quotes within quotes: '{key}=\"{value}\"'" if "=" in value else ""
        raise ConfigError(f"cannot read {error.override!r} as key=value{quoted}") from error
    except (HydraException, OmegaConfBaseException, ValueError, OverflowError) as error:
        message = " ".join(str(error).split())
        unknown = re.search(r"Could not override '([^']+)'", message)
        if unknown is None:
            raise ConfigError(message) from error
        raise ConfigError(f"there is no {unknown[1]!r} in the config; {_choices(unknown[1], words)}") from error


def _choices(unknown: str, words: Sequence[str]) -> str:
    """Return what could have been meant by a key that does not exist: its siblings, or the words most like it."""
    if unknown.startswith("hydra."):
        return "see `steadymoe run --info config` for Hydra's own settings"
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    named = (*groups, "hydra.searchpath")
    keys = list(reference_of([w for w in words if w.partition("=")[0] in named and "," not in w]))
    parent = unknown.rpartition(".")[0]
    siblings = [key for key in keys if parent and key.startswith(f"{parent}.") and not key.endswith("_target_")]
    if parent.startswith("algorithm.loss"):
        return _of_loss(unknown, words)
    if siblings:
        others = "; + adds a field that the YAML leaves out" if parent == "model.config" else ""
        return f"{nearest(unknown, siblings, HELP)}{others}"
    return nearest(unknown, sorted({*keys, *(key.partition(".")[0] for key in keys), *groups}), HELP)


def _of_loss(unknown: str, words: Sequence[str]) -> str:
    """Return what could have been meant by a field that the YAML of a loss, or of its host, does not have."""
    parent, _, name = unknown.rpartition(".")
    named = [word for word in words if word.partition("=")[0] in ("algorithm", "hydra.searchpath")]
    swept = [word for word in named if word.startswith("algorithm=") and set(word) & set(",(")]
    numbers: Any = compose([word for word in named if word not in swept])[0]
    for part in parent.split("."):
        numbers = numbers.get(part, {})
    known = [field.name for field in dataclasses.fields(class_of(numbers))]
    return f"+ adds a field that the YAML leaves out: +{unknown}" if name in known else meant(name, known)

"""The names in the configs: what a named config holds, and what could have been meant by a name that none holds."""

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
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
    """What ``hydra.compose`` makes of ``words``: our part as plain values, and config group → chosen name.

    Hydra reads and merges all files for every point of a sweep, a quarter of a second each. Here files are merged once
    for each set of named configs; Hydra's own function then sets the other words on a copy, as it does last of all.
    """
    named, others = _split(words)
    merged = _merged(named)
    ours = _with_others(merged.ours, others)
    return OmegaConf.to_container(ours, resolve=True, throw_on_missing=True), dict(merged.choices)  # type: ignore[return-value]


def settings(words: Sequence[str]) -> DictConfig:
    """What ``hydra.compose`` makes of ``words``: Hydra's own part, ``hydra.launcher`` and its like."""
    named, others = _split(words)
    whole: DictConfig = _with_others(_merged(named).whole, others).hydra
    return whole


def reference_of(words: Sequence[str]) -> Mapping[str, Any]:
    """The named configs as they stand, flattened: dotted key → value."""
    return _reference(tuple(words), external.versions())


@dataclass(frozen=True)
class _Merged:
    """Named configs as Hydra merges them. What is kept here is shared: change a copy."""

    whole: DictConfig
    ours: DictConfig
    """``whole`` without Hydra's own part."""
    choices: dict[str, Any]
    """Config group → chosen name."""


# What was merged, by the words that name configs and the configs of users as they were then.
_MERGED: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], _Merged] = {}


def _split(words: Sequence[str]) -> tuple[tuple[str, ...], list[Override]]:
    """The words that decide which files are merged and how, and the other words, parsed."""
    loader: Any = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    loader.validate_sweep_overrides_legal(overrides=parsed, run_mode=RunMode.RUN, from_shell=False)
    has_further = any(each.key_or_group == "hydra.searchpath" for each in parsed)

    def names(word: Override) -> bool:
        if has_further:  # groups of that folder are known to Hydra alone
            return True
        is_choice = loader.repository.group_exists(word.key_or_group) and not isinstance(word.value(), dict)
        return is_choice or word.is_hydra_override() or word.package is not None

    named = [names(each) for each in parsed]
    return (
        tuple(word for word, is_named in zip(words, named, strict=True) if is_named),
        [each for each, is_named in zip(parsed, named, strict=True) if not is_named],
    )


def _merged(words: tuple[str, ...]) -> _Merged:
    """The configs that ``words`` name; the same configs named in full are not merged a second time."""
    outside = external.versions()
    if (words, outside) not in _MERGED:
        whole = hydra.compose("config", list(words), return_hydra_config=True)
        ours = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        for config in (whole, ours):
            OmegaConf.set_struct(config, True)
        found = _Merged(whole, ours, dict(whole.hydra.runtime.choices))
        _MERGED[words, outside] = found
        if all(_CHOICE.fullmatch(word) for word in words):
            _MERGED.setdefault((tuple(in_full(found.choices)), outside), found)
    return _MERGED[words, outside]


def in_full(choices: Mapping[str, Any]) -> list[str]:
    """The words that choose every config of ``choices`` (config group → name), but none of Hydra's own."""
    chosen = {group: name for group, name in choices.items() if not group.startswith("hydra/") and name is not None}
    return [f"{group}={name}" for group, name in sorted(chosen.items())]


@functools.cache
def _reference(words: tuple[str, ...], outside: tuple[tuple[str, int], ...]) -> Mapping[str, Any]:
    return MappingProxyType(flatten(compose(words)[0]))


def _with_others(config: DictConfig, others: Sequence[Override]) -> DictConfig:
    """A copy of ``config`` with what is no choice of a config."""
    changed = copy.deepcopy(config)
    ConfigLoaderImpl._apply_overrides_to_config(list(others), changed)
    return changed


@contextmanager
def errors_in_one_line(words: Sequence[str]) -> Iterator[None]:
    """Hydra's errors, a dozen lines each, as one ConfigError line that names the choices."""
    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and name in _EXTRAS:
            raise ConfigError(f"{group}={name} needs its package: pip install 'steadymoe[{_EXTRAS[name]}]'") from error
        raise ConfigError(f"there is no {group} {name!r}; {nearest(name, error.options or [], HELP)}") from error
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
    """What could have been meant by a key that does not exist: its siblings, or the words most like it."""
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
    """What could have been meant by a field that the YAML of a loss, or of its host, does not have."""
    parent, _, name = unknown.rpartition(".")
    named = [word for word in words if word.partition("=")[0] in ("algorithm", "hydra.searchpath")]
    swept = [word for word in named if word.startswith("algorithm=") and set(word) & set(",(")]
    numbers: Any = compose([word for word in named if word not in swept])[0]
    for part in parent.split("."):
        numbers = numbers.get(part, {})
    known = [field.name for field in dataclasses.fields(class_of(numbers))]
    return f"+ adds a field that the YAML leaves out: +{unknown}" if name in known else meant(name, known)

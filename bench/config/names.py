"""The names in the configs: what a named config holds, and what could have been meant by a name that none holds."""

import dataclasses
import functools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from steadymoe.algorithms import class_of, meant
from steadymoe.bench.config.identity import flatten
from steadymoe.bench.config.schema import ConfigError
from steadymoe.bench.support import blame, external
from steadymoe.bench.support.text import nearest

CONF = Path(__file__).parents[2] / "conf"

# The command that prints every config of a group, and every key.
HELP = "`steadymoe run --help`"
_EXTRAS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}


def compose(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``hydra.compose`` makes of ``words``: our part as plain values, and config group → chosen name."""
    config = settings(words)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True), choices  # type: ignore[return-value]


def settings(words: Sequence[str]) -> DictConfig:
    """Return the whole config of ``words``, with Hydra's own part under ``hydra``.

    Hydra takes a quarter of a second to read and merge the files. If all other words are a plain ``key=value``, it does
    so once for each set of named configs, and the values are changed in a copy. If not, or if this fails, Hydra gets
    all words.
    """
    others = [word for word in words if not is_named(word)]
    if all(_changes_value(_parsed(word)) for word in others):
        config: DictConfig = pickle.loads(_merged(tuple(filter(is_named, words)), external.versions()))
        try:
            for each in map(_parsed, others):
                OmegaConf.update(config, each.key_or_group, each.value(), merge=True)
            return config
        except OmegaConfBaseException:
            pass  # Hydra says why
    return hydra.compose("config", list(words), return_hydra_config=True)


def reference_of(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the named configs as they stand, flattened: dotted key → value."""
    return _reference(tuple(words), external.versions())


def is_named(word: str) -> bool:
    """Return whether a word chooses a config by its name, or is for Hydra itself."""
    each = _parsed(word)
    if each.is_hydra_override():
        return True
    is_choice = each.key_or_group in _groups(external.versions()) and not isinstance(each.value(), dict)
    return is_choice and not each.is_delete()


def _changes_value(each: Override) -> bool:
    """Return whether an override changes one value, in whatever order it stands with the names of configs."""
    if each.type is not OverrideType.CHANGE or each.package or each.is_sweep_override():
        return False
    return "/" not in each.key_or_group and each.key_or_group not in _groups(external.versions())


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


@functools.cache
def _groups(outside: tuple[tuple[str, int], ...]) -> frozenset[str]:
    """Return the config groups, also the user's; ``outside`` is the state of their configs."""
    return frozenset(GlobalHydra.instance().config_loader().list_groups(""))


@functools.cache
def _merged(words: tuple[str, ...], outside: tuple[tuple[str, int], ...]) -> bytes:
    """Return the configs that ``words`` name, merged and pickled: unpickling is five times as fast as a deepcopy."""
    return pickle.dumps(hydra.compose("config", list(words), return_hydra_config=True))


@functools.cache
def _reference(words: tuple[str, ...], outside: tuple[tuple[str, int], ...]) -> Mapping[str, Any]:
    return MappingProxyType(flatten(compose(words)[0]))


@contextmanager
def errors_in_one_line(words: Sequence[str]) -> Iterator[None]:
    """Errors of Hydra, a dozen lines each, and of the classes that a config names, as one ConfigError line."""
    try:
        yield
    except ConfigError:
        raise
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
    except InstantiationException as error:
        raise ConfigError(_line(error.__cause__ or error)) from error
    except (HydraException, OmegaConfBaseException, TypeError, ValueError, OverflowError) as error:
        message = _line(error)
        unknown = re.search(r"Could not override '([^']+)'", message)
        if unknown is None:
            raise ConfigError(message) from error
        raise ConfigError(f"there is no {unknown[1]!r} in the config; {_choices(unknown[1], words)}") from error
    except (Exception, SystemExit) as error:  # a module that calls sys.exit() must not end the suite in silence
        if isinstance(error, Exception) and blame.users_code(error) is None:
            raise
        raise ConfigError(blame.sentence(error)) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


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

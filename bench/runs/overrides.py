"""Hydra overrides: the configs that they compose, the points of their sweeps, and one line for those that are wrong."""

import dataclasses
import functools
import itertools
import math
import os
import pickle
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, OverrideType, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from steadymoe import conf
from steadymoe.bench.runs.identity import OFF, flatten, is_name
from steadymoe.bench.support import blame, external, processes
from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.support.text import nearest

CONF = conf.ROOT

# The command that prints every config of a group, and every key.
_HELP = "`steadymoe run --help`"
_EXTRAS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}
# Each point is composed and checked, some hundredths of a second, before the first run begins.
MAX_POINTS = 10_000


class SearchPath(SearchPathPlugin):
    """The plugin through which Hydra learns of the configs outside the suite."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders' ``conf``, after the suite's own."""
        for folder in external.confs():
            search_path.append("steadymoe", f"file://{folder}")


@functools.cache
def add_rows() -> None:
    """Let this process compose the rows of the suite's tables, as if each were a file of its group."""
    store = ConfigStore.instance()
    for group in conf.groups():
        for name, row in conf.rows(group).items():
            store.store(group=group, name=name, node=row)
    # Hydra copies the store for each config that it composes, a fifth of the time, and again what it loads from it.
    vars(store)["__deepcopy__"] = lambda memo: store


def command_of(words: Sequence[str]) -> str:
    """Return the command that runs ``words``."""
    return shlex.join(["steadymoe", "run", *words])


def key_of(word: str) -> str:
    """Return the key of an override: ``seed`` of ``+seed=0``."""
    return word.partition("=")[0].lstrip("+~")


@contextmanager
def composing(words: Sequence[str] = ()) -> Iterator[None]:
    """Let Hydra compose, with the user's configs. Errors about ``words`` become a ConfigError of one line."""
    with errors_in_one_line(words):
        external.activate()
        add_rows()
        if SearchPath not in Plugins.instance().discover(SearchPathPlugin):
            Plugins.instance().register(SearchPath)
    started: AbstractContextManager[object] = nullcontext()
    if not GlobalHydra.instance().is_initialized():
        started = hydra.initialize_config_dir(str(CONF.resolve()), version_base="1.3")
    with started, errors_in_one_line(words):  # in this order: an error's hints are composed too
        yield


def compose(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of ``words`` as plain values, and config group → chosen name. In ``composing`` only.

    Raises ConfigError if a config is chosen by a path: what is chosen names the run's folder.
    """
    config = _composed(words)
    choices = {
        group: str(name)
        for group, name in config.hydra.runtime.choices.items()
        if not group.startswith("hydra/") and name is not None
    }
    for group, name in choices.items():
        if not is_name(name):
            hint = nearest(Path(name).stem, GlobalHydra.instance().config_loader().get_group_options(group), _HELP)
            raise ConfigError(f"{group} is chosen by its name, not by a path, got {name!r}; {hint}")
    with open_dict(config):
        del config["hydra"]
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True), choices  # type: ignore[return-value]


def reference(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the named configs of ``words`` as they stand, as plain values. In ``composing`` only."""
    return _reference(tuple(filter(_is_named, words)), external.versions())


def settings(words: Sequence[str]) -> DictConfig:
    """Return the config that all points of a sweep share, with Hydra's own part (launcher, folders) under ``hydra``."""
    with composing(words):
        return _settings(words)


def swept(words: Sequence[str]) -> list[str]:
    """Return the words that have several values."""
    with errors_in_one_line(words):
        return [word for word in words if _parsed(word).is_sweep_override()]


def points(words: Sequence[str], multirun: bool) -> list[list[str]]:
    """Return the overrides of each point of a sweep: all combinations of the values of swept overrides.

    In ``composing`` only.
    """
    values, hydra_config = _values(words, words), _settings(words).hydra
    _refuse_launcher(hydra_config.launcher)
    if not is_sweep(hydra_config, multirun):
        if several := swept(words):
            raise ConfigError(f"{several[0]} has several values: add -m to sweep over them")
        return [list(words)]
    parameters = [f"{key}={value}" for key, value in (hydra_config.sweeper.params or {}).items()]
    values = _values(parameters, words) | values  # an override of the command line replaces the experiment's
    if (count := math.prod(map(len, values.values()))) > MAX_POINTS:
        longest = max(values, key=lambda key: len(values[key]))
        raise ConfigError(f"a sweep may have at most {MAX_POINTS} runs, got {count}; split {longest}")
    return [list(point) for point in itertools.product(*values.values())]


def is_sweep(hydra_config: DictConfig, multirun: bool) -> bool:
    """Return whether a command makes a sweep: with ``-m`` (``multirun``), or because its experiment is one."""
    return multirun or hydra_config.mode == RunMode.MULTIRUN


def at_once(words: Sequence[str], multirun: bool) -> int | None:
    """Return how many runs the launcher of ``words`` makes at the same time; None where a cluster decides."""
    hydra_config = settings(words).hydra
    kind, jobs = str(hydra_config.runtime.choices["hydra/launcher"]), hydra_config.launcher.get("n_jobs")
    if not is_sweep(hydra_config, multirun):
        return 1
    if kind == "joblib":
        return jobs if jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + jobs)
    return 1 if kind == "basic" else None


def _values(overrides: Sequence[str], words: Sequence[str]) -> dict[str, list[str]]:
    """Return key → ``key=value`` for each value of its last override.

    Raises ConfigError for a sweep over nothing, over too much, and over experiments: each of them is a sweep of its
    own, with the other ``words``.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found = {}
    for each in parser.parse_overrides([_with_home(word) for word in overrides]):
        key, word = each.get_key_element(), each.input_line
        if not each.is_sweep_override():
            found[key] = [f"{key}={each.get_value_element_as_str()}"]
            continue
        values = each.value()
        if isinstance(values, IntervalSweep):
            raise ConfigError(f"{word} never ends; list values, {key}=1,2,3, or use range(first,end,step)")
        if isinstance(values, RangeSweep) and values.step == 0:
            raise ConfigError(f"{word} has a step of 0")
        # Hydra would make a list of a range to shuffle it.
        counted = values.range() if isinstance(values, RangeSweep) else each.sweep_string_iterator()
        if sum(1 for _ in itertools.islice(counted, MAX_POINTS + 1)) > MAX_POINTS:
            raise ConfigError(f"a sweep may have at most {MAX_POINTS} runs, got more; split {word}")
        found[key] = [f"{key}={value}" for value in each.sweep_string_iterator()]
        if not found[key]:
            raise ConfigError(f"{word} has no values to sweep over")
        if key == "experiment":
            others = [other for other in words if other != word]
            commands = [shlex.join(["steadymoe", "run", chosen, *others]) for chosen in found[key]]
            raise ConfigError(f"{word} names {len(commands)} sweeps; run them one by one: {'; '.join(commands)}")
    return found


def _refuse_launcher(launcher: DictConfig) -> None:
    """Raise ConfigError for what joblib would stop at with a traceback."""
    if not isinstance(launcher, DictConfig):
        raise ConfigError(f"a launcher is chosen by its name, hydra/launcher=joblib; got hydra.launcher={launcher}")
    if launcher.get("n_jobs") == 0:
        raise ConfigError("hydra.launcher.n_jobs must be a number of processes, or -1 for one on each core; got 0")
    if launcher.get("backend") not in (None, "loky"):
        raise ConfigError(f"hydra.launcher.backend must be loky, or left out; got {launcher.backend}")


def _settings(words: Sequence[str]) -> DictConfig:
    """Return the config of the words without several values, and without fields of groups that have several names."""
    several = swept(words)
    groups = {key_of(word) for word in several}
    return _composed([word for word in words if word not in several and key_of(word).split(".")[0] not in groups])


def _composed(words: Sequence[str]) -> DictConfig:
    """Return the whole config of ``words``, with Hydra's own part under ``hydra``. Raises ConfigError for a group
    without a name.

    Hydra takes a twentieth of a second to read and merge the files. If all other words are a plain ``key=value``, it
    does so once for each set of named configs, and the values are changed in a copy. If not, or if this fails, Hydra
    gets all words.
    """
    words = [_with_home(word) for word in words]
    for each in map(_parsed, words):
        _refuse_choice(each)
    others = [_parsed(word) for word in words if not _is_named(word)]
    if all(map(_changes_value, others)):
        config: DictConfig = pickle.loads(_merged(tuple(filter(_is_named, words)), external.versions()))
        try:
            for each in others:
                OmegaConf.update(config, each.key_or_group, each.value(), merge=True)
            return config
        except OmegaConfBaseException:
            pass  # Hydra says why
    return hydra.compose("config", words, return_hydra_config=True)


def _with_home(word: str) -> str:
    """Return an override with the user's folder for ``~``, which a shell leaves in ``key=~/folder``."""
    return re.sub(r"(?<=[=,])~(?=[/,@]|$)", lambda _: str(Path.home()), word)


def _refuse_choice(each: Override) -> None:
    """Raise ConfigError if an override gives a config group something other than one name."""
    group, value = each.key_or_group, each.value()
    if each.is_delete() or group not in _groups(external.versions()):
        return
    if each.is_add() and not each.is_force_add():
        raise ConfigError(f"{group} is already chosen; leave + out: {group}={value}")
    if isinstance(value, (list, bool, int, float)) or value is None:
        off = f"; {group}={OFF[group]} is the default" if value in (None, False) and OFF.get(group) else ""
        options = GlobalHydra.instance().config_loader().get_group_options(group)
        given = each.get_value_element_as_str()
        raise ConfigError(f"{group} takes one name, got {given}{off}; {nearest(given, options, _HELP)}")


def _is_named(word: str) -> bool:
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
    return OverridesParser.create().parse_overrides([_with_home(word)])[0]


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
    return MappingProxyType(compose(words)[0])


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
        own = "" if external.folders() else "; for your own, set STEADYMOE_PATH to its folder"
        raise ConfigError(f"there is no {group} {name!r}; {nearest(name, error.options or [], _HELP)}{own}") from error
    except OverrideParseException as error:
        key, _, value = str(error.override).partition("=")
        hint = f"; a value with '=' needs quotes within quotes: '{key}=\"{value}\"'" if "=" in value else ""
        if re.fullmatch(r"\w+\(.*\)", value):
            hint = "; values are swept as a,b,c, as range(first,end,step) or as glob(pattern)"
        raise ConfigError(f"cannot read {error.override!r} as key=value{hint}") from error
    except InstantiationException as error:
        raise ConfigError(_line(error.__cause__ or error)) from error
    except (HydraException, OmegaConfBaseException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(_plain(_line(error), words)) from error
    except BaseException as error:  # a module that calls sys.exit() must not end the suite in silence
        if processes.is_interrupt(error) or (isinstance(error, Exception) and blame.users_code(error) is None):
            raise
        raise ConfigError(blame.one_line(error)) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _plain(message: str, words: Sequence[str]) -> str:
    """Return a message of Hydra in the suite's words, if it is one of those that are easily provoked."""
    if unknown := re.search(r"Could not override '([^']+)'", message):
        inner = re.search(r"full_key: (\S+)", message)  # of algorithm={a:1} it is algorithm.a
        key = inner[1] if inner and inner[1].startswith(f"{unknown[1]}.") else unknown[1]
        group, _, field = key.partition(".")
        if key in _groups(external.versions()):
            return f"{key} takes one name, {key}=NAME, or some of its fields; see {_HELP}"
        chosen = next((word.partition("=")[2] for word in words if word.startswith(f"{group}=")), None)
        lacks = f"{group}={chosen} has no {field}" if field and chosen else f"there is no {key!r} in the config"
        return f"{lacks}; {_choices(key, words)}"
    if wrong := re.search(r"Error merging override (\S+)", message):
        key = key_of(wrong[1])
        return f"`{key}` cannot hold {wrong[1].partition('=')[2]}; see {_HELP} for its fields"
    if added := re.search(r"An item is already at '([^']+)'", message):
        return f"{added[1]} is already in the config; leave + out: {added[1]}=VALUE"
    return message


def _choices(unknown: str, words: Sequence[str]) -> str:
    """Return what could have been meant by a key that does not exist: its siblings, or the words most like it."""
    if unknown.startswith("hydra."):
        return "see `steadymoe run --info config` for Hydra's own settings"
    groups = conf.groups()
    named = (*groups, "hydra.searchpath")
    keys = list(flatten(reference([w for w in words if w.partition("=")[0] in named and "," not in w])))
    parent = unknown.rpartition(".")[0]
    siblings = [key for key in keys if parent and key.startswith(f"{parent}.") and not key.endswith("_target_")]
    if parent.startswith("algorithm.loss"):
        return _of_loss(unknown, words)
    if siblings:
        others = "; + adds a field that the YAML leaves out" if parent == "model.config" else ""
        return f"{nearest(unknown, siblings, _HELP)}{others}"
    return nearest(unknown, sorted({*keys, *(key.partition(".")[0] for key in keys), *groups}), _HELP)


def _of_loss(unknown: str, words: Sequence[str]) -> str:
    """Return what could have been meant by a field that the YAML of a loss, or of its host, does not have."""
    from steadymoe.algorithms import class_of, meant  # imports torch

    parent, _, name = unknown.rpartition(".")
    named = [word for word in words if word.partition("=")[0] in ("algorithm", "hydra.searchpath")]
    swept = [word for word in named if word.startswith("algorithm=") and set(word) & set(",(")]
    numbers: Any = compose([word for word in named if word not in swept])[0]
    for part in parent.split("."):
        numbers = numbers.get(part) if isinstance(numbers, Mapping) else None
    if not isinstance(numbers, Mapping) or "_target_" not in numbers:
        return f"{parent} has no fields"
    known = [field.name for field in dataclasses.fields(class_of(numbers))]
    return f"+ adds a field that the YAML leaves out: +{unknown}" if name in known else meant(name, known)

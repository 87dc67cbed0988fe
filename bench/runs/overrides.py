"""Hydra overrides: the configs that they compose, the points of their sweeps, and one line for those that are wrong."""

import functools
import itertools
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from steadymoe import conf
from steadymoe.bench import schema
from steadymoe.bench.runs.identity import is_name
from steadymoe.bench.support import blame, external, processes
from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.support.text import nearest

# The command that prints every config of a group, and every key.
_HELP = "`steadymoe run --help`"
_EXTRAS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}
# What one might type → the key that it means.
_MEANT = {
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("top_k", "num_experts_per_tok"), "model.config.num_experts_per_tok"),
    **dict.fromkeys(("num_experts", "n_experts"), "model.config.num_experts"),
}
# What Hydra would take and the suite does not → what to use.
_RESERVED = {
    **dict.fromkeys(("-cn", "--config-name"), "configs of your own are found by STEADYMOE_PATH: experiment=NAME"),
    **dict.fromkeys(("-cp", "--config-path", "-cd", "--config-dir"), "set STEADYMOE_PATH to a folder with a conf/"),
    **dict.fromkeys(("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"), "set results_dir"),
    **dict.fromkeys(("-sc", "--shell-completion"), "Hydra cannot complete subcommands"),
    "--hydra-help": "see `steadymoe run --info`",
    "hydra/sweeper": "list values, key=1,2,3, or use range(first,end,step); no search is built in",
}
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
    store.store(name="schema", node=schema.defaults())
    for group in conf.groups():
        for name, row in conf.rows(group).items():
            store.store(group=group, name=name, node=row)
    # Hydra copies the store for each config that it composes, a fifth of the time, and again what it loads from it.
    vars(store)["__deepcopy__"] = lambda memo: store


def command_of(args: Sequence[str]) -> str:
    """Return the command that runs ``args``."""
    return shlex.join(["steadymoe", "run", *args])


def key_of(arg: str) -> str:
    """Return the key of an override: ``seed`` of ``+seed=0``."""
    return arg.partition("=")[0].lstrip("+~")


def refuse_reserved(args: Sequence[str]) -> None:
    """Raise ConfigError for an argument that means another one, or that Hydra would take and the suite does not."""
    for arg in args:
        key, _, value = arg.lstrip("+~").partition("=")
        if key in _RESERVED:
            raise ConfigError(f"{key} is not supported: {_RESERVED[key]}")
        if key in _MEANT:
            raise ConfigError(f"there is no {key!r}; use {_MEANT[key]}={value}")
        if key == "experts" and value.isdigit():
            raise ConfigError(f"experts is how they are computed; their number is model.config.num_experts={value}")
        if arg.startswith("~"):
            raise ConfigError(f"{key} cannot be left out; give it a value")


@contextmanager
def composing(args: Sequence[str] = ()) -> Iterator[None]:
    """Let Hydra compose, with the user's configs. Errors about ``args`` become a ConfigError of one line."""
    refuse_reserved(args)
    with errors_in_one_line():
        external.activate()
        add_rows()
        if SearchPath not in Plugins.instance().discover(SearchPathPlugin):
            Plugins.instance().register(SearchPath)
    started: AbstractContextManager[object] = nullcontext()
    if not GlobalHydra.instance().is_initialized():
        started = hydra.initialize_config_dir(str(conf.ROOT.resolve()), version_base="1.3")
    with started, errors_in_one_line():
        yield


def compose(args: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of ``args`` as plain values, and config group → chosen name. In ``composing`` only.

    Raises ConfigError if a config is chosen by a path: what is chosen names the run's folder.
    """
    config = _composed(args)
    choices = {
        group: str(name)
        for group, name in config.hydra.runtime.choices.items()
        if not group.startswith("hydra/") and name is not None
    }
    for group, name in choices.items():
        if not is_name(name):
            raise ConfigError(f"{group} is chosen by its name, not by a path, got {name!r}; {_names_of(group, name)}")
    ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return OmegaConf.to_container(ours, resolve=True, throw_on_missing=True), choices  # type: ignore[return-value]


def reference(args: Sequence[str]) -> dict[str, Any]:
    """Return the named configs of ``args`` as they stand, as plain values. In ``composing`` only."""
    return compose([arg for arg in args if _parsed(arg).is_hydra_override() or _is_group(_parsed(arg))])[0]


def settings(args: Sequence[str]) -> DictConfig:
    """Return the config that all points of a sweep share, with Hydra's own part (launcher, folders) under ``hydra``.

    It lacks the args that have several values, and the fields of groups that have several names.
    """
    with composing(args):
        several = swept(args)
        groups = {key_of(arg) for arg in several}
        return _composed([arg for arg in args if arg not in several and key_of(arg).split(".")[0] not in groups])


def swept(args: Sequence[str]) -> list[str]:
    """Return the args that have several values."""
    with errors_in_one_line():
        return [arg for arg in args if _parsed(arg).is_sweep_override()]


def points(args: Sequence[str], multirun: bool) -> list[list[str]]:
    """Return the overrides of each point of a sweep: all combinations of the values of swept overrides.

    In ``composing`` only.
    """
    values, hydra_config = _values(args, args), settings(args).hydra
    _refuse_launcher(hydra_config.launcher)
    if not is_sweep(hydra_config, multirun):
        if several := swept(args):
            raise ConfigError(f"{several[0]} has several values: add -m to sweep over them")
        return [list(args)]
    parameters = [f"{key}={value}" for key, value in (hydra_config.sweeper.params or {}).items()]
    values = _values(parameters, args) | values  # an override of the command line replaces the experiment's
    if (count := math.prod(map(len, values.values()))) > MAX_POINTS:
        longest = max(values, key=lambda key: len(values[key]))
        raise ConfigError(f"a sweep may have at most {MAX_POINTS} runs, got {count}; split {longest}")
    return [list(point) for point in itertools.product(*values.values())]


def is_sweep(hydra_config: DictConfig, multirun: bool) -> bool:
    """Return whether a command makes a sweep: with ``-m`` (``multirun``), or because its experiment is one."""
    return multirun or hydra_config.mode == RunMode.MULTIRUN


def _values(overrides: Sequence[str], args: Sequence[str]) -> dict[str, list[str]]:
    """Return key → ``key=value`` for each value of its last override.

    Raises ConfigError for a sweep over nothing, over too much, and over experiments: each of them is a sweep of its
    own, with the other ``args``.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    found: dict[str, list[str]] = {}
    for each in parser.parse_overrides([_with_home(arg) for arg in overrides]):
        key, arg = each.get_key_element(), each.input_line
        if not each.is_sweep_override():
            place = str(arg if isinstance(each.value(), dict) else key)  # dictionaries of one group are merged
            found[place] = [f"{key}={each.get_value_element_as_str()}"]
            continue
        values = each.value()
        if isinstance(values, IntervalSweep):
            raise ConfigError(f"{arg} never ends; list values, {key}=1,2,3, or use range(first,end,step)")
        if isinstance(values, RangeSweep) and values.step == 0:
            raise ConfigError(f"{arg} has a step of 0")
        # Hydra would make a list of a range to shuffle it.
        counted = values.range() if isinstance(values, RangeSweep) else each.sweep_string_iterator()
        if sum(1 for _ in itertools.islice(counted, MAX_POINTS + 1)) > MAX_POINTS:
            raise ConfigError(f"a sweep may have at most {MAX_POINTS} runs, got more; split {arg}")
        found[key] = [f"{key}={value}" for value in each.sweep_string_iterator()]
        if not found[key]:
            raise ConfigError(f"{arg} has no values to sweep over")
        if key == "experiment":
            others = [other for other in args if other != arg]
            commands = [command_of([chosen, *others]) for chosen in found[key]]
            raise ConfigError(f"{arg} names {len(commands)} sweeps; run them one by one: {'; '.join(commands)}")
    return found


def _refuse_launcher(launcher: DictConfig) -> None:
    """Raise ConfigError for what joblib would stop at with a traceback."""
    if not isinstance(launcher, DictConfig):
        raise ConfigError(f"a launcher is chosen by its name, hydra/launcher=joblib; got hydra.launcher={launcher}")
    if launcher.get("n_jobs") == 0:
        raise ConfigError("hydra.launcher.n_jobs must be a number of processes, or -1 for one on each core; got 0")
    if launcher.get("backend") not in (None, "loky"):
        raise ConfigError(f"hydra.launcher.backend must be loky, or left out; got {launcher.backend}")


def _composed(args: Sequence[str]) -> DictConfig:
    """Return the whole config of ``args``, with Hydra's own part under ``hydra``; do not change it.

    A key that Hydra does not know is added: ``schema`` and the classes refuse it, and know what was meant.
    """
    for each in map(_parsed, args):
        _refuse_choice(each)
    forced = (f"++{arg}" if _sets_value(_parsed(arg)) else arg for arg in map(_with_home, args))
    return _by_hydra(tuple(forced), external.versions())


@functools.lru_cache
def _by_hydra(args: tuple[str, ...], outside: tuple[tuple[str, int], ...]) -> DictConfig:
    """Return what Hydra composes, a twentieth of a second; ``outside`` is the state of the user's configs."""
    return hydra.compose("config", list(args), return_hydra_config=True)


def _with_home(arg: str) -> str:
    """Return an override with the user's folder for ``~``, which a shell leaves in ``key=~/folder``."""
    return re.sub(r"(?<=[=,])~(?=[/,@]|$)", lambda _: str(Path.home()), arg)


def _refuse_choice(each: Override) -> None:
    group, value = each.key_or_group, each.value()
    if group not in _groups(external.versions()):
        return
    if each.is_add() and not each.is_force_add():
        raise ConfigError(f"{group} is already chosen; leave + out: {group}={value}")
    if isinstance(value, (list, bool, int, float)) or value is None:
        given = each.get_value_element_as_str()
        raise ConfigError(f"{group} takes one name, got {given}; {_names_of(group, given)}")


def _names_of(group: str, name: str) -> str:
    options = GlobalHydra.instance().config_loader().get_group_options(group)
    return nearest(Path(name).stem, options, _HELP)


def _is_group(each: Override) -> bool:
    return each.key_or_group in _groups(external.versions()) and not isinstance(each.value(), dict)


def _sets_value(each: Override) -> bool:
    is_hydras = each.is_hydra_override() or "/" in each.key_or_group or each.package
    return each.type is OverrideType.CHANGE and not is_hydras and not _is_group(each)


@functools.cache
def _parsed(arg: str) -> Override:
    return OverridesParser.create().parse_overrides([_with_home(arg)])[0]


@functools.cache
def _groups(outside: tuple[tuple[str, int], ...]) -> frozenset[str]:
    """Return the config groups, also the user's; ``outside`` is the state of their configs."""
    return frozenset(GlobalHydra.instance().config_loader().list_groups(""))


@contextmanager
def errors_in_one_line() -> Iterator[None]:
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
        raise ConfigError(f"cannot read {error.override!r}: {_line(error)}; see {_HELP}") from error
    except InstantiationException as error:
        raise ConfigError(_line(error.__cause__ or error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{_line(error)}; see {_HELP}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(_line(error)) from error
    except BaseException as error:  # a module that calls sys.exit() must not end the suite in silence
        if processes.is_interrupt(error) or (isinstance(error, Exception) and blame.users_code(error) is None):
            raise
        raise ConfigError(blame.one_line(error)) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())

"""From the words of a command line to checked runs: which configs, in which folders, under which hashes.

Everything is composed and checked here before Hydra launches anything, so that a wrong word is answered
in one line and touches nothing on disk.
"""

import functools
import itertools
import json
import operator
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig

from steadymoe.bench.config import branch, names
from steadymoe.bench.config.identity import (
    IMPLIED,
    OFF,
    axes_name,
    changes_numbers,
    config_hash,
    flatten,
    implied,
    is_name,
    short,
)
from steadymoe.bench.config.names import CONF, errors_in_one_line, reference_of
from steadymoe.bench.config.schema import ConfigError, RunConfig, read
from steadymoe.bench.config.validate import check
from steadymoe.bench.support import atomic_files, external
from steadymoe.bench.support.text import nearest

# How a sweep is launched is no part of a run: none of it stands in the command that makes that run again.
_OF_LAUNCHES = ("retry=", "hydra/launcher=", "hydra.launcher.", "+hydra.launcher.", "hydra.sweep.")
# Linux takes paths of 4095 bytes; what is left serves the names of the files in a run's folder.
_LONGEST_PATH = 3900
# Each point is composed and checked, some hundredths of a second, before the first run begins.
_MOST_POINTS = 10_000


@dataclass(frozen=True)
class Run:
    """One checked point of a sweep."""

    config: RunConfig
    plain: dict[str, Any]
    """The same config as plain values: what ``run.json`` keeps and hashes are made of."""
    choices: dict[str, str]
    """Config group → chosen name: ``algorithm``, ``model``, ``task``, …"""
    axes: dict[str, Any]
    """Every override that differs from the named configs, and every group that is not off (``correction``)."""
    folder: Path
    config_hash: str
    command: str
    words: tuple[str, ...]
    """The overrides that the run was composed of."""

    def save(self, path: Path) -> None:
        """Write the run to a JSON file, for the job that executes it."""
        atomic_files.write_json(path, vars(self) | {"config": None, "folder": str(self.folder)})

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read a run that ``save`` has written. Nothing is composed, and only types and bounds are checked again."""
        fields = json.loads(path.read_text())
        fields |= {"config": read(fields["plain"]), "folder": Path(fields["folder"]), "words": tuple(fields["words"])}
        return cls(**fields)


# `experiment=name` → the command that composes it, of experiments that are no file.
_COMMANDS: dict[str, tuple[str, ...]] = {}


def add_experiment(name: str, node: Mapping[str, Any], command: tuple[str, ...]) -> None:
    """Let this process compose ``experiment=name`` from ``node``, as if it were a file of ``conf/experiment``.

    ``command`` is what runs it elsewhere, in place of ``steadymoe run experiment=name``.
    """
    ConfigStore.instance().store(group="experiment", name=name, node=dict(node), package="_global_")
    _COMMANDS[f"experiment={name}"] = command


def command(words: Sequence[str]) -> str:
    """Return the command that runs ``words``."""
    chosen = next((word for word in words if word in _COMMANDS), None)
    program = ("steadymoe", "run") if chosen is None else _COMMANDS[chosen]
    return shlex.join([*program, *(word for word in words if word != chosen)])


def labels(runs: Sequence[Run]) -> list[str]:
    """Return short names for the runs of a sweep: algorithm, what else differs between them, and the seed."""
    parts = [{**run.choices, **run.axes} for run in runs]
    keys = dict.fromkeys(key for part in parts for key in part)
    differing = [key for key in keys if key == "algorithm" or len({str(part.get(key)) for part in parts}) > 1]
    values = {key: [part[key] for part in parts if key in part] for key in differing}

    def label(run: Run, part: Mapping[str, Any]) -> str:
        words = [
            str(part[key]) if key in run.choices else f"{key}={short(part[key], values[key])}"
            for key in differing
            if key in part
        ]
        return " ".join([*words, f"seed={run.config.seed}"])

    return [label(run, part) for run, part in zip(runs, parts, strict=True)]


def plan(words: Sequence[str], multirun: bool = False) -> list[Run]:
    """Return the runs that ``words`` (Hydra overrides) ask for, each checked. Raises ConfigError."""
    with _hydra(words):
        runs = [run(point) for point in _points(list(words), multirun)]
    if not runs:
        raise ConfigError("the sweep is empty: one of its arguments sweeps over nothing")
    seen: set[Path] = set()
    for each in runs:
        if each.folder in seen:
            raise ConfigError(f"two points of the sweep are the same run: {each.command}")
        seen.add(each.folder)
    return runs


def run(words: Sequence[str]) -> Run:
    """Compose and check one run from its overrides. Hydra must be initialised, as in ``plan``."""
    plain, choices = _named(words)
    _place(plain)
    reference = reference_of([word for word in words if names.is_named(word)])
    plain = _with_floats(plain, reference)
    config = read(plain)
    if derived := _derived(config, words):
        for key, number in derived.items():
            *groups, name = key.split(".")
            functools.reduce(dict.__getitem__, groups, plain)[name] = number
        config = read(plain)
    _needed(config, choices)
    flat = flatten(plain)
    check(config, flat, reference)
    no_axes = ("seed", *implied(plain))
    axes = {
        key: value
        for key, value in flat.items()
        if key not in no_axes and changes_numbers(key) and (key not in reference or reference[key] != value)
    }
    axes |= {group: choices[group] for group, off in OFF.items() if choices.get(group) != off}
    if config.start_from is not None:
        axes["start_from"] = branch.read(config.start_from).axis(Path(config.results_dir))
    parts = [choices["algorithm"], choices["model"], choices["task"]]
    folder = _folder(config, [*parts, axes_name(axes)])
    return Run(
        config=config,
        plain=plain,
        choices=choices,
        axes=axes,
        folder=folder,
        config_hash=config_hash(plain),
        command=external.prefix(choices, [str(v).rpartition(".")[0] for k, v in flat.items() if k.endswith("_target_")])
        + command([word for word in words if not word.startswith(_OF_LAUNCHES)]),
        words=tuple(words),
    )


def unchecked(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return one config, its values unchecked, and the chosen name of each group. Raises ConfigError."""
    with _hydra(words):
        several = swept(words)
        if several:
            raise ConfigError(f"{several[0]} has several values, and one config is asked for")
        return _named(words)


def _named(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the composed config as plain values, and the chosen name of each group. Raises ConfigError."""
    plain, chosen = names.compose(words)
    plain.pop("tuning", None)  # no part of a run; `tuning.overrides` reads it
    _refuse_paths(chosen)
    choices = {
        group: str(name) for group, name in chosen.items() if not group.startswith("hydra/") and name is not None
    }
    _sections(plain, choices)
    return plain, choices


def variants(of: Run, words: Mapping[str, Sequence[str]]) -> dict[str, Run]:
    """Return the run ``of`` with other words, by the keys of ``words``: a word replaces the run's own word of its key.

    Raises ConfigError.
    """
    runs = {}
    with _hydra():
        for key, given in words.items():
            replaced = {_key(word) for word in given}
            with errors_in_one_line(given):
                runs[key] = run([*(word for word in of.words if _key(word) not in replaced), *given])
    return runs


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _sections(plain: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Raise ConfigError where the YAML of an algorithm lacks a section that a run cannot do without."""
    algorithm = plain.get("algorithm")
    if "algorithm" not in choices or not isinstance(algorithm, Mapping):
        return
    for part in ("loss", "advantage"):
        if part not in algorithm and plain.get(part) is None:
            instead = ", or choose one: advantage=group_mean_std" if part == "advantage" else ""
            raise ConfigError(
                f"the YAML of algorithm {choices['algorithm']} has no section {part}; give it one with a _target_, "
                f"as conf/algorithm/grpo.yaml has{instead}"
            )


def _needed(config: RunConfig, choices: Mapping[str, str]) -> None:
    """Raise ConfigError where a preset is run without what it is only true with."""
    chosen = {"correction": choices.get("correction"), "updates_per_rollout": config.updates_per_rollout}
    needed = {key: value for key in chosen if (value := getattr(config.algorithm, key)) is not None}
    if any(chosen[key] != value for key, value in needed.items()):
        words = " ".join(f"{key}={value}" for key, value in needed.items())
        raise ConfigError(f"{choices['algorithm']} requires {words}")


def _refuse_paths(choices: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config is chosen by a path: what is chosen names the run's folder."""
    for group, name in choices.items():
        if group.startswith("hydra/") or name is None or is_name(str(name)):
            continue
        options = GlobalHydra.instance().config_loader().get_group_options(group)
        raise ConfigError(
            f"{group} is chosen by its name, not by a path, got {name!r}; "
            f"{nearest(Path(name).stem, options, names.HELP)}"
        )


def _folder(config: RunConfig, parts: Sequence[str]) -> Path:
    """Where a run is recorded: ``results_dir/runs/experiment/parts…/seed=…``. Raises ConfigError if it is elsewhere."""
    experiment = Path(config.results_dir).absolute() / "runs" / config.experiment_name
    folder = experiment.joinpath(*(part for part in parts if part), f"seed={config.seed}")
    if any(part in (".", "..") or "/" in part or "\0" in part for part in folder.parts[len(experiment.parts) - 2 :]):
        raise ConfigError(f"{folder} is not a folder below {experiment}")
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        raise ConfigError(f"results_dir makes paths of more than {_LONGEST_PATH} bytes: {folder}")
    return folder


def _place(plain: dict[str, Any]) -> None:
    """Make the paths of checkpoints absolute, so that one file is one arm."""
    for group in ("cold_start", "model"):
        fields = plain.get(group)
        if isinstance(fields, dict) and isinstance(path := fields.get("path"), str):
            fields["path"] = str(Path(path).expanduser().resolve())
    if isinstance(plain.get("start_from"), str):
        plain["start_from"] = branch.read(plain["start_from"]).text


def _derived(config: RunConfig, words: Sequence[str]) -> dict[str, int]:
    """Return the numbers that follow from ``updates_per_rollout`` and another number (``identity.IMPLIED``), by key."""
    updates, given = config.updates_per_rollout, {word.partition("=")[0].lstrip("+") for word in words}
    numbers = {}
    for key, source in IMPLIED.items():
        number, before = (operator.attrgetter(each)(config) for each in (source, key))
        if number is None:
            continue
        # A mini-batch is taken ``updates`` times for a rollout; what is counted in updates lasts so many rollouts.
        numbers[key] = number * updates if key == "rollout.prompts" else -(-number // updates)
        if key in given and before != numbers[key]:
            raise ConfigError(
                f"{source}={number} with updates_per_rollout={updates} means {key}={numbers[key]}, and {before} was "
                "given: leave one out"
            )
    return numbers


@contextmanager
def _hydra(words: Sequence[str] = ()) -> Iterator[None]:
    """Let Hydra compose, with the user's configs. Its errors about ``words`` become a ConfigError of one line."""
    with errors_in_one_line(words):
        external.activate(CONF)
    started: AbstractContextManager[object] = nullcontext()
    if not GlobalHydra.instance().is_initialized():
        started = hydra.initialize_config_dir(str(CONF.resolve()), version_base="1.3")
    with started, errors_in_one_line(words):  # in this order: an error's hints are composed too
        yield


def _points(words: list[str], multirun: bool) -> list[list[str]]:
    """Return the overrides of each point of a sweep: all combinations of the values of swept overrides."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = parser.parse_overrides(words)
    several = [each for each in parsed if each.is_sweep_override()]
    _refuse_size(several)
    for each in several:
        _refuse_sweep(each, words)
    hydra_config = names.settings([str(each.input_line) for each in parsed if each not in several]).hydra
    _refuse_launcher(hydra_config.launcher)
    if not is_sweep(hydra_config, multirun):
        if several:
            raise ConfigError(f"{several[0].input_line} sweeps over several values: add -m for a sweep")
        return [words]
    parameters = [f"{key}={value}" for key, value in (hydra_config.sweeper.params or {}).items()]
    # A later override of a key replaces an earlier one.
    last = {each.get_key_element(): each for each in parser.parse_overrides([*parameters, *words])}
    _refuse_size(last.values())
    values = [[f"{key}={value}" for value in _values(each)] for key, each in last.items()]
    return [list(point) for point in itertools.product(*values)]


def _values(override: Override) -> Iterable[str]:
    if override.is_sweep_override():
        return override.sweep_string_iterator()
    return [override.get_value_element_as_str()]


def _refuse_size(overrides: Iterable[Override]) -> None:
    """Raise ConfigError for a sweep of too many points, before any of them is made."""
    points = 1
    for each in overrides:
        values = each.value()
        # Hydra would make a list of a range to shuffle it.
        counted = values.range() if isinstance(values, RangeSweep) else _values(each)
        points *= sum(1 for _ in itertools.islice(counted, _MOST_POINTS + 1))
        if points > _MOST_POINTS:
            raise ConfigError(f"a sweep may have {_MOST_POINTS} runs, and this one has more; split {each.input_line}")


def _refuse_sweep(override: Override, words: Sequence[str]) -> None:
    """Raise ConfigError for a sweep over nothing, and for one over experiments: each of them is a sweep of its own."""
    word, values = override.input_line, list(_values(override))
    if not values:
        raise ConfigError(f"{word} sweeps over nothing: it has no values")
    if override.key_or_group == "experiment":
        others = [other for other in words if other != word]
        commands = [shlex.join(["steadymoe", "run", f"experiment={value}", *others]) for value in values]
        raise ConfigError(f"{word} names {len(values)} sweeps, each a command of its own: {'; '.join(commands)}")


def _refuse_launcher(launcher: DictConfig) -> None:
    """Raise ConfigError for what joblib would stop at with a traceback."""
    if launcher.get("n_jobs") == 0:
        raise ConfigError("hydra.launcher.n_jobs must be a number of processes, or -1 for one on each core; got 0")
    if launcher.get("backend") not in (None, "loky"):
        raise ConfigError(f"hydra.launcher.backend must be loky, or left out; got {launcher.backend}")


def swept(words: Sequence[str]) -> list[str]:
    """Return the words that have several values."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    return [word for word, each in zip(words, parsed, strict=True) if each.is_sweep_override()]


def settings(words: Sequence[str]) -> DictConfig:
    """Return the config that all points of a sweep share, with Hydra's own part (launcher, folders) under ``hydra``."""
    with _hydra(words):
        several = swept(words)
        return names.settings([word for word in words if word not in several])


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


def _with_floats(config: Mapping[str, Any], reference: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``config`` with 1 as 1.0 where the named configs have a float, so that both spellings are one run."""
    return {
        key: _with_floats(value, reference, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else float(value)
        if isinstance(reference.get(f"{prefix}{key}"), float) and type(value) is int
        else value
        for key, value in config.items()
    }

"""From command-line arguments to checked runs: their configs, folders and hashes.

Everything is composed and checked here before Hydra launches anything, so that a wrong word is answered
in one line and touches nothing on disk.
"""

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadymoe.bench.runs import identity, overrides, provenance
from steadymoe.bench.runs.identity import flatten, shortener
from steadymoe.bench.runs.overrides import key_of
from steadymoe.bench.runs.validate import check, check_names
from steadymoe.bench.schema import RunConfig, read
from steadymoe.bench.support import atomic_files, external, regular_files
from steadymoe.bench.support.errors import ConfigError, Dense

# How a sweep is launched is no part of a run: none of it stands in the command that makes that run again.
_LAUNCH_KEYS = ("retry=", "hydra/launcher=", "hydra.launcher.", "+hydra.launcher.", "hydra.sweep.")
# Linux takes paths of 4095 bytes; what is left serves the names of the files in a run's folder.
_LONGEST_PATH = 3900
# If the first points of a sweep, this many, are all refused, the others are not tried.
_HOPELESS = 100


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
    not_applicable: tuple[str, ...] = ()
    """Settings of routers that a dense model ignored; the config has them off."""

    def save(self, path: Path) -> None:
        """Write the run to a JSON file, for the job that executes it."""
        atomic_files.write_json(path, vars(self) | {"config": None, "folder": str(self.folder)})

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read a run that ``save`` has written. Nothing is composed, and only types and bounds are checked again."""
        fields = json.loads(path.read_text())
        fields |= {key: tuple(fields[key]) for key in ("words", "not_applicable")}
        fields |= {"config": read(fields["plain"]), "folder": Path(fields["folder"])}
        return cls(**fields)


def labels(runs: Sequence[Run]) -> list[str]:
    """Return short names for the runs of a sweep: algorithm, what else differs between them, and the seed."""
    parts = [{**run.choices, **run.axes} for run in runs]
    keys = dict.fromkeys(key for part in parts for key in part)
    differing = [key for key in keys if key == "algorithm" or len({str(part.get(key)) for part in parts}) > 1]
    label_of = {key: shortener(part[key] for part in parts if key in part) for key in differing}

    found = []
    for run, part in zip(runs, parts, strict=True):
        named = [key for key in differing if key in part]
        words = [str(part[key]) if key in run.choices else f"{key}={label_of[key](part[key])}" for key in named]
        found.append(" ".join([*words, f"seed={run.config.seed}"]))
    return found


def plan(words: Sequence[str], multirun: bool = False, left_out: list[str] | None = None) -> list[Run]:
    """Return the runs that ``words`` (Hydra overrides) ask for, each checked. Raises ConfigError.

    In a sweep that has models with experts, a dense one ignores what all points say of routers. A point that cannot be,
    although what is wrong in it could be by itself, is named in ``left_out``; without such a list it is an error.
    """
    runs: dict[int, Run] = {}
    refused: dict[int, ConfigError] = {}
    with overrides.composing(words):
        points = overrides.points(words, multirun)
        shared = set(points[0]).intersection(*points)
        for place, point in enumerate(points):
            try:
                runs[place] = _checked(point)
            except ConfigError as error:
                refused[place] = error
                if not isinstance(error, Dense) and (left_out is None or (not runs and len(refused) == _HOPELESS)):
                    raise next(iter(refused.values())) from None
        for place in [place for place, error in refused.items() if isinstance(error, Dense) and runs]:
            run_of_dense = _without_routers(points[place])
            if run_of_dense is not None and run_of_dense.folder not in {each.folder for each in runs.values()}:
                runs[place] = run_of_dense
                del refused[place]
        possible = {word for each in runs.values() for word in each.words}
        for place, reason in refused.items():
            others = [word for word in points[place] if word not in possible]
            if left_out is None or not runs or _is_wrong_alone(others):
                raise reason
            left_out.append(f"{' '.join(word for word in points[place] if word not in shared)}: {reason}")
    with provenance.unchanging():
        for each in runs.values():
            provenance.refuse_edited(each.plain)
    last = {each.folder: each for each in runs.values()}
    if again := next((each for each in runs.values() if last[each.folder] is not each), None):
        raise ConfigError(f"two points of the sweep are the same run: {again.command}")
    return [runs[place] for place in sorted(runs)]


def _checked(point: Sequence[str], ignored: Iterable[str] = ()) -> Run:
    with overrides.errors_in_one_line(point):
        return run(point, ignored)


def _without_routers(point: Sequence[str]) -> Run | None:
    """Return the run of a dense model that ignores what ``point`` says of routers; None if it cannot be even then."""
    from steadymoe.bench.runs import fits  # imports torch and transformers

    ignored = [word for word in point if key_of(word).split(".")[0] == "routing" or key_of(word) in fits.OF_ROUTERS]
    others = [word for word in point if word not in ignored]
    for more in ([], ["routing=off"]):  # an experiment may choose a routing
        try:
            return _checked([*others, *more], ignored)
        except ConfigError:
            pass
    return None


def _is_wrong_alone(words: Sequence[str]) -> bool:
    """Return whether words that no point can have are refused without the other words of a sweep, too."""
    try:
        if words:
            _checked(words)
    except ConfigError:
        return True
    return False


def run(words: Sequence[str], ignored: Iterable[str] = ()) -> Run:
    """Compose and check one run from its overrides, in ``overrides.composing``.

    A dense model ignores what its experiment says of routers, and the words ``ignored``, which are not in ``words``.
    """
    from steadymoe.bench.runs import fits  # imports torch and transformers

    plain, choices = overrides.compose(words)
    named = overrides.reference(words)
    provenance.code_hash(plain, imported=True)  # before the first import of what the config names
    plain, reference = _spelled(_with_absolute_paths(plain), named), flatten(named)
    check_names(flatten(plain), reference, ("optimizer.kind",))  # first: it decides which fields there are
    config, flat = read(plain), flatten(plain)
    numbers = _derived(flat, words)
    off = fits.of_routers(config.model, flat, set(map(key_of, words)))
    if numbers | off:
        for key, number in (numbers | off).items():
            *groups, name = key.split(".")
            functools.reduce(dict.__getitem__, groups, plain)[name] = number
        config, flat = read(plain), flatten(plain)
    _needed(config, choices)
    check(config, flat, reference)
    fits.check(config)
    check_names(flat, reference)
    axes = identity.axes(flat, reference | off, choices)
    return Run(
        config=config,
        plain=plain,
        choices=choices,
        axes=axes,
        folder=_folder(config, [choices["algorithm"], choices["model"], choices["task"], identity.axes_name(axes)]),
        config_hash=identity.config_hash(plain),
        command=external.prefix(choices, provenance.modules_of(plain)) + overrides.command_of(own(words)),
        words=tuple(words),
        not_applicable=tuple(sorted({*off, *map(key_of, ignored)})),
    )


def own(words: Sequence[str]) -> list[str]:
    """Return the words that belong to the run rather than to its launch."""
    return [word for word in words if not word.startswith(_LAUNCH_KEYS)]


def unchecked(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return one config, its values unchecked, and the chosen name of each group. Raises ConfigError."""
    if several := overrides.swept(words):
        raise ConfigError(f"{several[0]} has several values; give one")
    with overrides.composing(words):
        return overrides.compose(words)


def _needed(config: RunConfig, choices: Mapping[str, str]) -> None:
    """Raise ConfigError for an algorithm without an advantage, and a preset without what it is only true with."""
    if not config.used_advantage:
        raise ConfigError(
            f"the YAML of algorithm {choices['algorithm']} has no section advantage; add one with a _target_, as in "
            "conf/algorithm/grpo.yaml, or choose one: advantage=group_mean_std"
        )
    chosen = {"correction": choices.get("correction"), "updates_per_rollout": config.updates_per_rollout}
    needed = {key: value for key in chosen if (value := getattr(config.algorithm, key)) is not None}
    if any(chosen[key] != value for key, value in needed.items()):
        words = " ".join(f"{key}={value}" for key, value in needed.items())
        raise ConfigError(f"{choices['algorithm']} requires {words}")


def _folder(config: RunConfig, parts: Sequence[str]) -> Path:
    """Where a run is recorded: ``results_dir/runs/experiment/parts…/seed=…``. Raises ConfigError if it is elsewhere."""
    results = Path(config.results_dir).absolute()
    names = ("runs", config.experiment_name, *filter(None, parts), f"seed={config.seed}")
    folder = results.joinpath(*names)
    if any(name in (".", "..") or "/" in name or "\0" in name for name in names):
        raise ConfigError(f"{folder} is not a folder below {results}")
    if len(os.fsencode(folder)) > _LONGEST_PATH:
        raise ConfigError(f"results_dir makes paths of more than {_LONGEST_PATH} bytes: {folder}")
    try:
        return regular_files.refuse_links(folder, results)
    except regular_files.NotRegular as error:
        raise ConfigError(str(error)) from error


def _with_absolute_paths(plain: Mapping[str, Any]) -> dict[str, Any]:
    """``plain`` with absolute paths of checkpoints, so that one file is one arm, and without ``~``."""
    placed = dict(plain)
    for group in ("cold_start", "model"):
        fields = plain.get(group)
        if isinstance(fields, dict) and isinstance(path := fields.get("path"), str):
            placed[group] = fields | {"path": str(Path(path).expanduser().resolve())}
    if isinstance(plain.get("results_dir"), str):
        placed["results_dir"] = os.path.expanduser(plain["results_dir"])  # a Path would make "" the current folder
    return placed


def _derived(flat: Mapping[str, Any], words: Sequence[str]) -> dict[str, int]:
    """Return the numbers that follow from ``updates_per_rollout`` and another number (``IMPLIED``), by dotted key."""
    updates, given = flat["updates_per_rollout"], set(map(key_of, words))
    numbers = {}
    for key, source in identity.IMPLIED.items():
        if (number := flat[source]) is None:
            continue
        # A mini-batch is taken ``updates`` times for a rollout; what is counted in updates lasts so many rollouts.
        numbers[key] = number * updates if key == "rollout.prompts" else -(-number // updates)
        if key in given and flat[key] != numbers[key]:
            raise ConfigError(
                f"{source}={number} with updates_per_rollout={updates} means {key}={numbers[key]}, but {flat[key]} was "
                "given: leave one out"
            )
    return numbers


def _spelled(value: Any, like: Any) -> Any:
    """Return a config with each number in one spelling, so that all its spellings are one run.

    ``like`` is the same config as its named configs have it. A number is 0.0 for −0.0, and 1.0 for 1 where ``like`` has
    a float, or has null or nothing in a field that its class says to be a float. A number that equals the named
    configs' own is spelled as theirs.
    """
    if isinstance(value, Mapping):
        spelled = {}
        for key, each in value.items():
            other = like.get(key) if isinstance(like, Mapping) else None
            if other is None and type(each) is int and _is_float(value, key):
                other = float(each)
            spelled[key] = _spelled(each, other)
        return spelled
    if isinstance(value, list):
        others = like if isinstance(like, list) else []
        usual = next((each for each in others if isinstance(each, float)), None)
        return [_spelled(each, others[at] if at < len(others) else usual) for at, each in enumerate(value)]
    if type(value) is float and type(like) is int and value == like:
        return like
    if type(value) is float or (type(value) is int and type(like) is float):
        return float(value) + 0.0  # −0.0 + 0.0 is 0.0
    return value


def _is_float(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the class that ``config`` names, if any, says that a field is a float."""
    if "_target_" not in config:
        return False
    from steadymoe.algorithms.registry import float_fields  # imports torch

    return key in float_fields(config)

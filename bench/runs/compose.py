"""From command-line arguments to checked runs: their configs, folders and hashes, before Hydra launches anything."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from steadymoe.bench.runs import identity, overrides, provenance
from steadymoe.bench.runs.identity import flatten, shortener
from steadymoe.bench.runs.overrides import key_of
from steadymoe.bench.runs.validate import check
from steadymoe.bench.schema import RunConfig, read
from steadymoe.bench.support import external, files
from steadymoe.bench.support.errors import ConfigError, Dense

# How a sweep is launched is no part of a run: none of it stands in the command that makes that run again.
LAUNCH_KEYS = ("retry=", "hydra/launcher=", "hydra.launcher.", "+hydra.launcher.")
# A config group names what these fields choose: a run would be recorded under the name of another choice.
_FIXED_BY_GROUP = ("optimizer.kind", "routing.replay", "engine._target_", "engine.dtype")
# Linux takes paths of 4095 bytes; what is left serves the names of the files in a run's folder.
_LONGEST_PATH = 3900
# If the first points of a sweep, this many, are all refused, the others are not tried.
_HOPELESS = 100


@dataclass(frozen=True)
class Run:
    """One checked point of a sweep."""

    config: RunConfig
    choices: dict[str, str]
    """Config group → chosen name: ``algorithm``, ``model``, ``task``, …"""
    axes: dict[str, Any]
    """Every override that differs from the named configs, and every group that is not off (``correction``)."""
    folder: Path
    config_hash: str
    command: str
    args: tuple[str, ...]
    """The overrides that the run was composed of."""
    not_applicable: tuple[str, ...] = ()
    """Settings of routers that a dense model ignored; the config has them off."""

    @property
    def plain(self) -> dict[str, Any]:
        """The config as plain values: what ``run.json`` keeps and hashes are made of."""
        return plain(self.config)

    def save(self, path: Path) -> None:
        """Write the run to a JSON file, for the job that executes it."""
        files.write_json(path, vars(self) | {"config": self.plain, "folder": str(self.folder)})

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read a run that ``save`` has written. Nothing is composed, and only types and bounds are checked again."""
        fields = json.loads(path.read_text())
        fields |= {key: tuple(fields[key]) for key in ("args", "not_applicable")}
        return cls(**fields | {"config": read(fields["config"]), "folder": Path(fields["folder"])})


def plain(config: RunConfig) -> dict[str, Any]:
    """Return a config as plain values of JSON."""
    return json.loads(json.dumps(asdict(config)))


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


def plan(args: Sequence[str], multirun: bool = False, left_out: list[str] | None = None) -> list[Run]:
    """Return the runs that ``args`` (Hydra overrides) ask for, each checked. Raises ConfigError.

    In a sweep that has models with experts, a dense one ignores what all points say of routers. A point that cannot be,
    although what is wrong in it could be by itself, is named in ``left_out``; without such a list it is an error.
    """
    runs: dict[int, Run] = {}
    refused: dict[int, ConfigError] = {}
    arms: dict[tuple[str, ...], Run] = {}
    with overrides.composing(args):
        points = overrides.points(args, multirun)
        shared = set(points[0]).intersection(*points)
        for place, point in enumerate(points):
            try:
                runs[place] = _checked(point, arms)
            except ConfigError as error:
                refused[place] = error
                if not isinstance(error, Dense) and (left_out is None or (not runs and len(refused) == _HOPELESS)):
                    raise next(iter(refused.values())) from None
        for place in [place for place, error in refused.items() if isinstance(error, Dense) and runs]:
            run_of_dense = _without_routers(points[place])
            if run_of_dense is not None and run_of_dense.folder not in {each.folder for each in runs.values()}:
                runs[place] = arms[tuple(points[place])] = run_of_dense
                del refused[place]
        possible = {arg for each in runs.values() for arg in each.args}
        for place, reason in refused.items():
            others = [arg for arg in points[place] if arg not in possible]
            if left_out is None or not runs or _is_wrong_alone(others):
                raise reason
            left_out.append(f"{' '.join(arg for arg in points[place] if arg not in shared)}: {reason}")
    with provenance.unchanging():
        for each in arms.values():
            provenance.refuse_edited(each.plain)
    last = {each.folder: each for each in runs.values()}
    if again := next((each for each in runs.values() if last[each.folder] is not each), None):
        raise ConfigError(f"two points of the sweep are the same run: {again.command}")
    return [runs[place] for place in sorted(runs)]


def _checked(point: Sequence[str], arms: dict[tuple[str, ...], Run]) -> Run:
    """Return the run of a point. Points that differ in their seed alone are composed and checked once, in ``arms``."""
    arm = tuple(arg for arg in point if not arg.startswith("seed="))
    with overrides.errors_in_one_line():
        if arm not in arms:
            return arms.setdefault(arm, run(point))
        seeds = [arg.removeprefix("seed=") for arg in point if arg.startswith("seed=")]
        if len(seeds) != 1 or not seeds[0].isdecimal():
            return run(point)
        config = read(arms[arm].plain | {"seed": int(seeds[0])})
        return _located(replace(arms[arm], config=config, args=tuple(point)))


def _without_routers(point: Sequence[str]) -> Run | None:
    """Return the run of a dense model that ignores what ``point`` says of routers; None if it cannot be even then."""
    from steadymoe.bench.runs import fits  # imports torch and transformers

    ignored = [arg for arg in point if key_of(arg).split(".")[0] == "routing" or key_of(arg) in fits.ROUTER_SETTINGS]
    others = [arg for arg in point if arg not in ignored]
    for more in ([], ["routing=off"]):  # an experiment may choose a routing
        try:
            with overrides.errors_in_one_line():
                return run([*others, *more], ignored)
        except ConfigError:
            pass
    return None


def _is_wrong_alone(args: Sequence[str]) -> bool:
    """Return whether arguments that no point can have are refused without the other arguments of a sweep, too."""
    try:
        if args:
            with overrides.errors_in_one_line():
                run(args)
    except ConfigError:
        return True
    return False


def run(args: Sequence[str], ignored: Iterable[str] = ()) -> Run:
    """Compose and check one run from its overrides, in ``overrides.composing``.

    A dense model ignores what its experiment says of routers, and the arguments ``ignored``, which are not in ``args``.
    """
    from steadymoe.bench.runs import fits  # imports torch and transformers

    composed, choices = overrides.compose(args)
    provenance.code_hash(composed, imported=True)  # before the first import of what the config names
    named = _complete(overrides.reference(args))
    given = _complete(_with_absolute_paths(composed))
    flat, usual = flatten(given), flatten(named)
    if key := next((key for key in _FIXED_BY_GROUP if flat.get(key) != usual.get(key)), None):
        group = key.partition(".")[0]
        raise ConfigError(f"{key} cannot be overridden, because the {group} fixes it; choose another {group}")
    config = read(_typed(given, named))
    reference = flatten(plain(read(_typed(named, named))))
    off = fits.router_settings(config.model, flatten(plain(config)), set(map(key_of, args)))
    config = _with(config, off)
    _needed(config, choices)
    check(config)
    fits.check(config)
    return _located(
        Run(
            config=config,
            choices=choices,
            axes=identity.axes(flatten(plain(config)), reference | off, choices),
            folder=Path(),
            config_hash="",
            command="",
            args=tuple(args),
            not_applicable=tuple(sorted({*off, *map(key_of, ignored)})),
        )
    )


def _located(run: Run) -> Run:
    config, values = run.config, run.plain
    parts = [*(run.choices[group] for group in ("algorithm", "model", "task")), identity.axes_name(run.axes)]
    prefix = external.prefix(run.choices, provenance.modules_of(values))
    return replace(
        run,
        folder=_folder(config, parts),
        config_hash=identity.config_hash(values),
        command=prefix + overrides.command_of(own(run.args)),
    )


def own(args: Sequence[str]) -> list[str]:
    """Return the arguments that belong to the run rather than to its launch."""
    return [arg for arg in args if not arg.startswith(LAUNCH_KEYS)]


def unchecked(args: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return one config, its values unchecked, and the chosen name of each group. Raises ConfigError."""
    if several := overrides.swept(args):
        raise ConfigError(f"{several[0]} has several values; give one")
    with overrides.composing(args):
        return overrides.compose(args)


def _needed(config: RunConfig, choices: Mapping[str, str]) -> None:
    if not config.used_advantage:
        raise ConfigError(
            f"the YAML of algorithm {choices['algorithm']} has no section advantage; add one with a _target_, as in "
            "conf/algorithm/grpo.yaml, or choose one: advantage=group_mean_std"
        )
    chosen = {"correction": choices.get("correction"), "updates_per_rollout": config.updates_per_rollout}
    needed = {key: value for key in chosen if (value := getattr(config.algorithm, key)) is not None}
    if any(chosen[key] != value for key, value in needed.items()):
        settings = " ".join(f"{key}={value}" for key, value in needed.items())
        raise ConfigError(f"{choices['algorithm']} requires {settings}")


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
        return files.refuse_links(folder, results)
    except files.NotRegular as error:
        raise ConfigError(str(error)) from error


def _with_absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with absolute paths of checkpoints, so that one file is one arm, and without ``~``."""
    placed = dict(config)
    for group in ("cold_start", "model"):
        fields = config.get(group)
        if isinstance(fields, dict) and isinstance(path := fields.get("path"), str):
            placed[group] = fields | {"path": str(Path(path).expanduser().resolve())}
    if isinstance(config.get("results_dir"), str):
        placed["results_dir"] = os.path.expanduser(config["results_dir"])  # a Path would make "" the current folder
    return placed


def _with(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        change = {group: replace(getattr(config, group), **{name: value})} if group else {name: value}
        config = replace(config, **change)
    return config


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    from steadymoe.algorithms import complete  # imports torch

    config = identity.of_classes(config, complete)
    return {**config, "task": complete(config["task"])} if isinstance(config.get("task"), Mapping) else dict(config)


def _typed(config: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose model and task have the types of the named configs: 1 is 1.0 where they have a float."""
    return {**config, **{group: _like(config.get(group), named.get(group), group) for group in ("model", "task")}}


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


def _like(value: Any, usual: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        known = usual if isinstance(usual, Mapping) else {}
        return {name: _like(each, known.get(name), f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        items = usual if isinstance(usual, list) else []
        first = items[0] if items else None
        return [_like(each, items[at] if at < len(items) else first, key) for at, each in enumerate(value)]
    if type(value) is int and type(usual) is float:
        value = float(value)
    if type(value) is float and type(usual) is int and value == usual:
        value = usual
    if usual is not None and type(value) is not type(usual) and not key.endswith("_target_"):
        raise ConfigError(f"{key} must be {_KINDS.get(type(usual), type(usual).__name__)}; got {value!r}")
    return value + 0.0 if type(value) is float else value  # no −0.0

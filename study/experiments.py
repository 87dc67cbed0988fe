"""The experiments of the reference study, rows of ``experiments.yaml``: runs, arms, `make reference` and pages follow.

While `python -m study` runs, Hydra composes a row as it composes a file of ``conf/experiment``, which has what a user
runs.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from steadymoe import conf
from steadymoe.bench.runs import branch
from steadymoe.bench.runs.compose import ConfigError
from steadymoe.bench.runs.identity import OFF, flatten
from steadymoe.bench.runs.overrides import CONF, MAX_POINTS, add_experiment, errors_in_one_line
from study.recorded import Arm


@cache
def _groups() -> frozenset[str]:
    return frozenset(conf.groups())


@cache
def _parsed(*overrides: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each override, of a sweep that is too long only its first."""
    parser, values = OverridesParser.create(), {}
    for override in parser.parse_overrides(list(overrides)):
        is_sweep = override.is_sweep_override()
        texts = override.sweep_string_iterator() if is_sweep else [override.get_value_element_as_str()]
        key = override.key_or_group
        values[key] = tuple(
            parser.parse_override(f"{key}={text}").value() for text in itertools.islice(texts, MAX_POINTS)
        )
    return values


def _single(overrides: str) -> dict[str, Any]:
    return {key: value for key, (value,) in _parsed(*overrides.split()).items()}


@dataclass(frozen=True)
class Experiment:
    """A sweep of runs, or of audits: a row of ``experiments.yaml``, which describes the fields."""

    name: str
    purpose: str
    base: str | None
    """The experiment that it changes; its own name for a file of ``conf/experiment`` that runs as it is."""
    sweep: str = ""
    sets: str = ""
    also: Sequence[str] = ()
    audits: bool = False
    losses: Mapping[str, str] = field(default_factory=dict)

    @property
    def recorded_as(self) -> str:
        """The experiment's name in results."""
        return str(_single(self.sets).get("experiment_name", self.name))

    @property
    def trunk(self) -> str | None:
        """The experiment whose runs it begins from; None if it begins at cold starts."""
        start = _single(self.sets).get("start_from")
        return None if start is None else Path(str(start)).parts[2]  # results/runs/<experiment>/…

    def commands(self, overrides: Sequence[str] = ()) -> list[list[str]]:
        """Return the arguments of each of its sweeps; ``overrides`` replace the values of their keys.

        A sweep that fixes another value than ``overrides`` give, other than a seed, is left out, unless all do.
        Overrides of every key of a sweep mean that sweep alone, so the command of a run makes one run. Raises
        ConfigError.
        """
        name, commands = f"experiment={self.name}", []
        with errors_in_one_line(overrides):
            by_word = {word: _parsed(word) for word in overrides}
        given = {key: values for parsed in by_word.values() for key, values in parsed.items()}
        for also, sweep in self._sweeps():
            fixed = {key: values[0] for key, values in sweep.items() if len(values) == 1 and key != "seed"}
            if any(value not in given.get(key, (value,)) for key, value in fixed.items()):
                continue
            several = {key for key in fixed if len(given.get(key, ())) > 1}  # of which the sweep has one
            command = [name, *also.split(), *(word for word, parsed in by_word.items() if not several & parsed.keys())]
            if sweep.keys() <= given.keys() and not several:
                return [command]
            commands.append(command)
        return commands or [[name, *overrides]]

    @property
    def node(self) -> dict[str, Any]:
        """The config, as a file of ``conf/experiment`` would hold it."""
        sets = _single(self.sets)
        groups = [{f"override /{key}": value} for key, value in sets.items() if key in _groups()]
        params = dict(override.split("=", 1) for override in self.sweep.split())
        node: dict[str, Any] = {"defaults": [*([self.base] if self.base else []), *groups, "_self_"]}
        node |= {"experiment_name": self.name, "hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}}
        node |= {"audit": {"arms": dict(self.losses)}} if self.losses else {}
        for key, value in sets.items():
            if key not in _groups():
                *parents, name = key.split(".")
                inner = node
                for parent in parents:
                    inner = inner.setdefault(parent, {})
                inner[name] = value
        return node

    @property
    def runs(self) -> int:
        """The number of its runs or audits."""
        return sum(prod(map(len, values.values())) for _, values in self._sweeps())

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs, or the cold starts of its audits."""
        return self._swept["seed"]

    def values(self, key: str) -> tuple[Any, ...]:
        """Return the values that it sweeps over."""
        return self._swept[key]

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the overrides of each run, without its seed."""
        for _, sweep in self._sweeps():
            keys = [key for key in sweep if key != "seed"]
            for values in itertools.product(*(sweep[key] for key in keys)):
                yield dict(zip(keys, values, strict=True))

    def axes(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the axes of a run's folder (``compose.Run.axes``) from its overrides."""
        (named, groups), (sets, chosen) = _named(Path("config")), _named(Path("experiment") / self.name)
        groups = groups | chosen | {key: value for key, value in point.items() if key in groups}
        for group, name in groups.items():
            if name is not None:
                named = named | _named(Path(group) / name)[0]
        named = named | sets
        axes = {key: value for key, value in point.items() if key not in groups and named.get(key) != value}
        axes |= {group: groups[group] for group, off in OFF.items() if groups[group] != off}
        if named["start_from"]:
            axes["start_from"] = branch.read(named["start_from"].replace("${seed}", "0")).axis(Path("results"))
        return axes

    def _sweeps(self) -> list[tuple[str, dict[str, tuple[Any, ...]]]]:
        """Each sweep's overrides on top of ``sweep``, and its values by key."""
        return [(words, self._swept | _parsed(*words.split())) for words in ("", *self.also)]

    @property
    def _swept(self) -> dict[str, tuple[Any, ...]]:
        inherited = TABLE[self.base]._swept if self.base in TABLE and self.base != self.name else {}
        return inherited | _parsed(*self.sweep.split())


_ROWS: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")), resolve=True)
# Overrides by name, which rows share.
CONSTANTS: dict[str, str] = _ROWS.pop("constants")
# Experiments by the name of their part, which `python -m study run` takes too, and by their own.
PARTS = {
    part: tuple(Experiment(name, **{"base": name, **row}) for name, row in rows.items()) for part, rows in _ROWS.items()
}
TABLE = {row.name: row for rows in PARTS.values() for row in rows}


def register() -> None:
    """Let Hydra compose the table's experiments in this process."""
    for row in TABLE.values():
        if row.base != row.name:
            add_experiment(row.name, row.node, ("python", "-m", "study", "run", row.name))


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments with these names or in parts with these names; all without names. Raises ConfigError."""
    known = {name: (row,) for name, row in TABLE.items()} | PARTS
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no experiment {name!r} in the study; see: python -m study list")
    return [row for name in names or PARTS for row in known[name]]


def arm(label: str, experiment: str, algorithm: str, overrides: str = "") -> Arm:
    """Return the arm of an experiment with this algorithm and these of its overrides; of several, the plainest.

    Raises LookupError where the experiment has no such arm.
    """
    row, wanted = TABLE[experiment], {"algorithm": algorithm, **_single(overrides)}
    points = sorted((point for point in row.points() if wanted.items() <= point.items()), key=len)
    if not points or (len(points) > 1 and len(points[0]) == len(points[1])):
        raise LookupError(f"{label}: {len(points)} arms of {experiment} have {wanted}")
    return Arm(label, row.recorded_as, algorithm, row.axes(points[0]))


@cache
def _named(config: Path) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return what a named config sets, with its bases: dotted key → value, and config group → name."""
    group, name, prefix = config.parent.name, config.name, ""
    row = TABLE.get(name) if group == "experiment" else None
    if row is not None and row.base != row.name:
        node = row.node
    elif group in ("", "experiment"):
        node = OmegaConf.to_container(OmegaConf.load(CONF / f"{config}.yaml"), resolve=False)  # type: ignore[assignment]
    else:
        node = conf.read(group, name)
        prefix = "" if conf.text(group, name).startswith("# @package _global_") else f"{group}."
    values: dict[str, Any] = {}
    groups: dict[str, str | None] = {}
    for default in node.pop("defaults", ()):
        if isinstance(default, dict):
            groups |= {key.removeprefix("override /"): name for key, name in default.items() if "hydra/" not in key}
        elif default != "_self_":
            inherited, theirs = _named(config.parent / default)
            values, groups = values | inherited, groups | theirs
    node.pop("hydra", None)
    return values | flatten(node, prefix), groups

"""Figures: pure functions of tables; none reads the disk. Here their list: what each one needs, and its experiment."""

import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from steadymoe.bench.report import tolerances
from steadymoe.bench.report.figures import colours, curves, points, routing, style, tolerance
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.report.results import Results
from steadymoe.bench.support import external, processes
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, without_mathematics

__all__ = ["FIGURES", "CannotDraw", "DataFigure", "FigureSpec", "colours", "every", "find", "style"]


class CannotDraw(UserError):
    """A figure or its data do not exist; the message says what to do."""


@dataclass(frozen=True)
class FigureSpec:
    """One figure: its drawing function, the experiment with its data, and conditions on the joined ``steps``."""

    id: str
    name: str
    draw: Callable[..., DataFigure]
    """Takes the tables ``takes`` of ``Results.joined``. The first paragraph of its docstring is the caption."""
    experiment: str
    """A file of ``conf/experiment``."""
    varies: tuple[str, ...] = ()
    """Columns with at least two values."""
    varies_one: tuple[str, ...] = ()
    """Columns of which at least one has two values."""
    records: tuple[str, ...] = ()
    """Metrics that some run records."""
    only: tuple[str, ...] = ()
    """The only columns, besides the seed, in which runs may differ."""
    rule: Callable[[pd.DataFrame], str | None] = lambda steps: None
    """Another condition: returns what is missing, or None."""
    takes: tuple[str, ...] = ("steps",)
    of_experts: bool = False
    """Whether it is about experts: runs of dense models are left out, before anything is asked of the rest."""
    needs_own: bool = False
    """Whether it draws what only a user's own loss records, so that no run of the suite lacks it."""

    @property
    def caption(self) -> str:
        """Return what the figure shows, in a sentence."""
        return " ".join((self.draw.__doc__ or "").partition("\n\n")[0].split())

    def stem(self, experiment: str) -> str:
        """Return the name of the figure's files, without suffix."""
        return "-".join(dict.fromkeys([experiment, self.id, self.name]))

    def lacks(self, recorded: Results) -> str | None:
        """Return what was not recorded for this figure; None if nothing is missing."""
        data = self._tables(recorded)
        if absent := [name for name in self.takes if data[name].empty]:
            return f"the table {', '.join(absent)}"
        return next(self._missing(data["steps"]), None)

    def _missing(self, steps: pd.DataFrame) -> Iterator[str]:
        for key in self.varies:
            if steps[key].nunique() < 2:
                yield f"runs with 2 values of {key}"
        if self.varies_one and all(steps[key].nunique() < 2 for key in self.varies_one):
            yield f"runs with 2 values of {' or '.join(self.varies_one)}"
        if self.records and (unrecorded := set(self.records).difference(steps["metric"].unique())):
            yield f"runs that record {', '.join(name for name in self.records if name in unrecorded)}"
        if self.only and steps.groupby([*self.only], dropna=False)["arm"].nunique().max() > 1:
            yield f"runs that differ in nothing but {', '.join(self.only)} and the seed"
        if missing := self.rule(steps):
            yield missing

    def _tables(self, recorded: Results) -> dict[str, pd.DataFrame]:
        return (recorded.where(recorded.runs["experts"] > 0) if self.of_experts else recorded).joined

    def figure(self, recorded: Results) -> DataFigure:
        """Draw what was recorded, if it ``lacks`` nothing. A ``$`` in a name begins no formula."""
        data = self._tables(recorded)
        return self.draw(*(without_mathematics(data[name]) for name in self.takes))


def _needs(what: str, holds: Callable[[pd.DataFrame], bool]) -> Callable[[pd.DataFrame], str | None]:
    return lambda steps: None if holds(steps) else what


_one_engine = _needs(
    "runs of one engine, at several strengths", lambda steps: len(set(steps["engine"]) - {"exact"}) == 1
)
_one_model = _needs("runs of one model alone, at several depths", lambda steps: steps["model"].nunique() == 1)
_own_numbers = _needs("runs of a loss that reports numbers of its own", lambda steps: bool(curves.own_metrics(steps)))
_twins = _needs("runs of a model with experts and of one without", lambda steps: (steps["experts"] > 0).nunique() == 2)


# fmt: off
_LIST = [
    FigureSpec("overview", "overview", curves.overview, "quickstart", records=("reward",)),
    FigureSpec("fig01", "reward_compute", curves.reward_compute, "gspo",
               varies=("arm", "algorithm"), records=("reward",)),
    FigureSpec("fig02", "clip_fraction", points.clip_fraction, "gspo", records=("clip_fraction",)),
    FigureSpec("fig03", "replay", curves.replay, "gspo", varies=("routing",),
               records=("reward", "token_ratio_variance")),
    FigureSpec("fig05", "staleness_grid", curves.staleness_grid, "tolerance_staleness",
               varies=("updates_per_rollout", "algorithm")),
    FigureSpec("fig08", "ratio_distributions", routing.ratio_distributions, "gspo",
               rule=_twins, takes=("histograms",)),
    FigureSpec("fig10", "drift", routing.drift, "drift",
               varies_one=tuple(routing.AXES), records=("expert_change_rate",), of_experts=True),
    FigureSpec("fig11", "attribution", routing.attribution, "attribution",
               varies_one=tuple(routing.SIZES), records=("log_ratio_moment_free", "log_ratio_moment_pinned"),
               only=("algorithm", "routing", "engine", *routing.SIZES), rule=_one_model, of_experts=True),
    FigureSpec("fig14", "dose_response", points.dose_response, "dose",
               varies=("strength",), records=("reward", "rollout_kl_k3"),
               only=("algorithm", "routing", "correction", "model", "strength"), rule=_one_engine),
    FigureSpec("fig17", "tolerance", tolerance.over_dial, "tolerance", rule=tolerances.lacks),
    FigureSpec("fig18", "own_numbers", curves.own_numbers, "quickstart", rule=_own_numbers, needs_own=True),
]
# fmt: on
# By id, in the order of the paper.
FIGURES: dict[str, FigureSpec] = {spec.id: spec for spec in _LIST}


def every() -> dict[str, FigureSpec]:
    """Return the figures by id: the shipped ones, then a user's own.

    A user's own figures are the lists ``FIGURES`` of modules ``*figures.py`` in the folders of STEADYMOE_PATH. Raises
    CannotDraw for a module that cannot be used.
    """
    files = [path for folder in external.folders() for path in sorted(folder.glob("*figures.py"))]
    return FIGURES | _own(tuple((path, path.stat().st_mtime_ns) for path in files))


@cache
def _own(files: tuple[tuple[Path, int], ...]) -> dict[str, FigureSpec]:
    own: dict[str, FigureSpec] = {}
    external.make_importable()  # a module may import its neighbours
    for path, _ in files:  # a file that has changed is run again
        try:
            specs = runpy.run_path(str(path))["FIGURES"]
        except BaseException as error:  # a user's own code
            if processes.is_interrupt(error):
                raise
            raise CannotDraw(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from error
        for spec in specs:
            names = {name for known in (FIGURES | own).values() for name in (known.id, known.name)}
            if not isinstance(spec, FigureSpec) or {spec.id, spec.name} & names:
                raise CannotDraw(f"{path}: FIGURES must hold a FigureSpec with an unused id and name; got {spec!r}")
            own[spec.id] = spec
    return own


def find(words: Sequence[str]) -> list[FigureSpec]:
    """Return the figures with these ids or names. Raises CannotDraw for an unknown one."""
    known = every()
    names = {spec.name: spec for spec in known.values()} | known
    for word in words:
        if word not in names:
            raise CannotDraw(f"there is no figure {word!r}; {nearest(word, list(names), '`steadymoe report --list`')}")
    return [names[word] for word in words]

"""Claims that were fixed before their runs: an estimate, an interval and a verdict of each, as a table and a figure.

A claim (a row of ``results/claims.yaml``) is about a sum of *sides*: weight × a number of the runs that a side names by
columns of ``Results.runs`` or by dotted keys of the config (``experiment`` apart). The number is

- ``tolerance``: the logarithm of the learning rate, or of the strength of a mismatch, that its runs tolerate, on the
  threshold of GRPO's free runs of the same experiment and model (``statistics.tolerance``), shown as a ratio. ``dial``
  replaces each value by the mean of a column of ``steps`` in its runs' first rollouts, which the cold starts sample;
- ``accuracy``: sampled, at the last evaluation; ``gain``: that less the accuracy of the start;
- a column of ``steps``: its mean over the run; ``growth of`` a column: the mean of the last third of the run less that
  of the first.

The interval is Student's, with the standard error of a bootstrap over seeds; sides of one model share cold starts and
are resampled together, other models by themselves. Holm's correction is over all rows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import yaml
from pydantic import TypeAdapter
from scipy.stats import t as student  # type: ignore[attr-defined]  # made at run time

from steadymoe.bench.report import report_page
from steadymoe.bench.report import write as writer
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.report.folders import NUMBERS
from steadymoe.bench.report.results import Results
from steadymoe.bench.runs.identity import flatten
from steadymoe.bench.schema import ADDED
from steadymoe.bench.statistics import tolerance
from steadymoe.bench.statistics.comparisons import holm, is_decided
from steadymoe.bench.statistics.estimates import LEVEL, RESAMPLES, Estimate, half_of_draws, t_quantile
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import UserError

# Of draws without a number, a claim with more is open.
_MOST_UNKNOWN = (1 - LEVEL) / 2
_CAPTION = (
    "Estimates over seeds with a nominal 95 % interval: Student's, its standard error from a bootstrap. A claim is "
    "right if the estimate lies beyond the threshold on the claimed side (for equal, nearer to 0), wrong if on the "
    "other, both decided after Holm's correction over all claims; else, and before all planned seeds have run, it is "
    "open."
)
_OF_FIGURE = " Grey: the threshold. White inside: a bound, because runs tolerate more than their grid holds."
_OF_TABLE = (
    " > and <: a bound, because runs tolerate more than their grid holds. Decides: the smallest effect that the "
    "planned seeds decide. Repeated: the estimate where a decided claim was tried again, as the file of claims says."
)
# What is measured, and how often, may differ between the sides of a claim.
_MEASURING = ("collapse", "evaluation", "measure", "probe")
_PLACES = {"right": 2, "wrong": 1, "open": 0}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row: what is claimed, and what would decide it."""

    claim: str
    source: str
    metric: str
    sides: list[dict[str, str | float]]
    direction: Literal["above", "below", "equal"]
    threshold: float
    """A ratio for tolerances; with ``equal``, the most by which the sum may differ from 0."""
    smallest: float
    """The smallest effect beyond the threshold that the planned seeds decide, in the units of the threshold."""
    practice: str
    """One sentence for a practitioner."""
    seeds: int = 10
    """Planned: with fewer the verdict is open."""
    dial: str | None = None
    """A column of ``steps`` that measures the dial, such as the KL of a mismatch."""
    again: str | None = None
    """A suffix of experiments that repeat the sides': where their estimate lies on the other side, it is open."""

    @property
    def is_ratio(self) -> bool:
        """Whether the sides are logarithms."""
        return self.metric == "tolerance"


def read(path: Path) -> list[Claim]:
    """Return the claims of a YAML file. Raises UserError, in one line, for a file that holds none."""
    try:
        return TypeAdapter(list[Claim]).validate_python(yaml.safe_load(files.read_bytes(path)))
    except (OSError, ValueError, yaml.YAMLError) as error:  # pydantic's is a ValueError
        raise UserError(f"{path} holds no claims: {' '.join(str(error).split())[:200]}") from error


def judged(claims: list[Claim], results: Path) -> pd.DataFrame:
    """Return a row for each claim: estimate, low, high, n, p (Holm's), repeated, verdict.

    Raises UserError for a missing side.
    """
    recorded = cache(partial(_recorded, results))
    rows = [_measured(claim, recorded) for claim in claims]
    table = pd.DataFrame(rows).assign(repeated=np.nan)
    table["p"] = holm(table["p"].tolist())
    decided = [
        is_decided(p, n) and n >= claim.seeds for claim, p, n in zip(claims, table["p"], table["n"], strict=True)
    ]
    for place, claim in enumerate(claims):
        if claim.again is not None and decided[place]:
            sides = [side | {"experiment": f"{side['experiment']}{claim.again}"} for side in claim.sides]
            repeated = _measured(replace(claim, sides=sides), recorded)
            table.loc[place, "repeated"] = repeated["estimate"]
            decided[place] = bool(np.isfinite(repeated["estimate"])) and repeated["holds"] == rows[place]["holds"]
    table["verdict"] = np.where(decided, np.where(table["holds"], "right", "wrong"), "open")
    return table.drop(columns="holds")


class _Recorded(NamedTuple):
    """An experiment: ``facts`` has its runs and the numbers of their configs by dotted key; ``configs`` these alone."""

    whole: Results
    configs: pd.DataFrame
    facts: pd.DataFrame


def _recorded(results: Path, name: str) -> _Recorded:
    (whole,) = report_page.ended(results, name).values()
    texts = [ADDED | flatten(json.loads(text)) for text in whole.runs["config"]]
    configs = pd.DataFrame(texts, index=whole.runs.index)
    return _Recorded(whole, configs, whole.runs.join(configs[configs.columns.difference(whole.runs.columns)]))


@dataclass(frozen=True)
class _Side:
    """The runs of a side, and their numbers by value of the dial (rows) and seed.

    For a tolerance also the numbers of GRPO, and the starts.
    """

    model: str
    configs: pd.DataFrame
    own: pd.DataFrame
    reference: pd.DataFrame | None = None
    starts: pd.Series | None = None

    @property
    def seeds(self) -> pd.Index:
        """The seeds that all its runs have."""
        return self.own.columns if self.reference is None else self.own.columns.intersection(self.reference.columns)

    def numbers(self, seeds: pd.Index, draws_NS: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return its number in each draw of ``seeds``, (N,), nan where there is none; is the first a lower bound?

        Runs that never fall below the threshold tolerate at least the end of their grid.
        """
        if self.reference is None or self.starts is None:
            return self.own[seeds].to_numpy(float)[0, draws_NS].mean(-1), False
        starts_S = self.starts[seeds].to_numpy(float)
        (crossed_N,), gain_N = tolerance.in_draws([self.own[seeds]], self.reference[seeds], starts_S, draws_NS)
        crossed_N[gain_N <= 0] = np.nan  # GRPO gains nothing: there is no threshold
        return np.log(np.minimum(crossed_N, self.own.index[-1])), bool(np.isinf(crossed_N[0]))


def _measured(claim: Claim, recorded: Callable[[str], _Recorded]) -> dict[str, Any]:
    """Return estimate, interval, n, p against the threshold, and whether the estimate is on the claimed side."""
    sides = [_side(claim, side, recorded(str(side["experiment"]))) for side in claim.sides]
    _refuse_other_differences(claim, pd.concat([side.configs for side in sides]))
    seeds: dict[str, pd.Index] = {}
    for side in sides:
        seeds[side.model] = side.seeds.intersection(seeds.get(side.model, side.seeds))
    if (n := min(map(len, seeds.values()))) == 0:
        raise UserError(f"claim {claim.claim!r}: its sides share no seed")
    rng = np.random.default_rng(0)
    draws = {model: tolerance.draws(len(its), rng) for model, its in seeds.items()}
    weights = np.array([float(side["weight"]) for side in claim.sides])
    numbers, beyond = zip(*(side.numbers(seeds[side.model], draws[side.model]) for side in sides), strict=True)
    sums_N, signs = weights @ np.stack(numbers), set(np.sign(weights[list(beyond)]))
    estimate, known_N = sums_N[0], sums_N[1:][np.isfinite(sums_N[1:])]
    is_null = claim.direction == "equal"
    threshold = np.log(claim.threshold) if claim.is_ratio and not is_null else claim.threshold
    away = abs(estimate) - threshold if is_null else estimate - threshold
    half = p = np.nan
    # A lower bound below the threshold decides nothing, nor an upper bound above it, nor a sum of both.
    may_decide = n > 1 and np.isfinite(estimate) and (not signs or (not is_null and signs == {np.sign(away)}))
    if may_decide and len(known_N) >= (1 - _MOST_UNKNOWN) * RESAMPLES and np.ptp(known_N) > 0:
        half = half_of_draws(known_N, n)
        p = 2 * float(student.sf(abs(away) * t_quantile(LEVEL, n - 1) / half, n - 1))
    shown = np.exp if claim.is_ratio else np.asarray
    holds = away > 0 if claim.direction == "above" else away < 0
    ends = {"estimate": estimate, "low": estimate - half, "high": estimate + half}
    row = {"claim": claim.claim, "n": n, "p": p, "holds": holds} | {end: float(shown(ends[end])) for end in ends}
    return row | {"bound": "".join(">" if sign > 0 else "<" for sign in signs)}


def _side(claim: Claim, side: Mapping[str, Any], recorded: _Recorded) -> _Side:
    """Return the runs of a side. Raises UserError if there are none, or several values but no tolerance."""
    where, runs = {key: value for key, value in side.items() if key not in ("weight", "experiment")}, recorded.facts
    if unknown := set(where) - set(runs) | {"model"} - set(where):
        raise UserError(f"claim {claim.claim!r}: a side needs a model, and facts of runs; see {min(unknown)}")

    def chosen(keys: Mapping[str, Any]) -> pd.DataFrame:
        return runs[np.logical_and.reduce([runs[key] == value for key, value in keys.items()])]

    own = chosen(where)
    if own.empty:
        raise UserError(f"claim {claim.claim!r}: experiment {side['experiment']} has no run of {where}")
    configs = recorded.configs.loc[own.index]
    dial = "strength" if own["strength"].nunique() > 1 else "learning_rate"
    free = chosen(where | {"algorithm": tolerance.REFERENCE, "routing": "off"})
    read_from, one = ((own, free), [dial, "seed"]) if claim.is_ratio else ((own,), ["seed"])
    if any(its.duplicated(one).any() for its in read_from):
        raise UserError(f"claim {claim.claim!r}: choose one learning rate, one strength and one arm of {where}")
    steps = recorded.whole.steps
    starts = steps.query("metric == 'eval_accuracy' and step == 0").set_index("run")["value"]
    if not claim.is_ratio:
        numbers = _of_runs(claim, steps, own, starts)
        return _Side(where["model"], configs, numbers.groupby(own["seed"]).first().to_frame().T)
    if claim.dial is not None:
        first = steps[(steps["metric"] == claim.dial) & (steps["step"] == 1)].set_index("run")["value"]
        own, free = (
            its.assign(**{dial: first.reindex(its.index).groupby(its[dial]).transform("mean")}) for its in read_from
        )
    ours, theirs = (its.pivot(index=dial, columns="seed", values="eval_accuracy").dropna(axis=1) for its in (own, free))
    return _Side(where["model"], configs, ours, theirs, starts.reindex(free.index).groupby(free["seed"]).first())


def _of_runs(claim: Claim, steps: pd.DataFrame, runs: pd.DataFrame, starts: pd.Series) -> pd.Series:
    """Return the number of each run."""
    if claim.metric in ("accuracy", "gain"):
        return runs["eval_accuracy"].fillna(0.0) - (starts.reindex(runs.index) if claim.metric == "gain" else 0.0)
    _, growth, column = claim.metric.rpartition("growth of ")
    rows = steps[(steps["metric"] == column) & steps["run"].isin(runs.index)]
    if rows.empty:
        raise UserError(f"claim {claim.claim!r}: its runs have no column {column}")
    place = rows["step"] / rows.groupby("run")["step"].transform("max")
    if not growth:
        return rows.groupby("run")["value"].mean()
    parts = (rows[part].groupby("run")["value"].mean() for part in (place > 2 / 3, place <= 1 / 3))
    return next(parts) - next(parts)


def _refuse_other_differences(claim: Claim, configs: pd.DataFrame) -> None:
    """Raise UserError if ``configs``, of all runs of a claim, differ in a number that its sides do not name."""
    named = {key for side in claim.sides for key in side if len({each.get(key) for each in claim.sides}) > 1}
    named |= {"learning_rate", "strength"} if claim.is_ratio else set()
    fields = {NUMBERS.get(key, key) for key in named} | {"seed", *_MEASURING}
    fields |= {"cold_start", "optimizer.router_factor"} if "model" in named else set()  # a dense model has no routers
    for key in configs:
        is_named = any(f"{key}.".startswith(f"{field}.") for field in fields)
        if not is_named and configs[key].map(str).nunique() > 1:
            raise UserError(f"claim {claim.claim!r}: its sides also differ in {key}")


def write(path: Path, results: Path, formats: Sequence[str], to: Path) -> list[Path]:
    """Write table and figure of the claims in ``path``, by runs below ``results``, to ``to``; return the paths."""
    claims = read(path)
    rows = judged(claims, results)
    table = pd.DataFrame(
        {
            "claim": rows["claim"],
            "asked": [f"{claim.direction} {claim.threshold:g}" for claim in claims],
            "estimate": [f"{row.bound} {_estimate(row)}".strip() for row in rows.itertuples()],
            "decides": [claim.smallest for claim in claims],
            "n": [f"{n} of {claim.seeds}" for claim, n in zip(claims, rows["n"], strict=True)],
            "p": ["< 0.0001" if p < 1e-4 else f"{p:.4g}" for p in rows["p"].round(4)],
            "repeated": ["–" if np.isnan(number) else f"{number:.3g}" for number in rows["repeated"]],
            "verdict": rows["verdict"],
            "in practice, if right": [claim.practice for claim in claims],
        }
    )
    paths = writer.figure(to, path.stem, figure(claims, rows), "", formats)
    return paths + writer.table(to, f"{path.stem}-verdicts", table, _CAPTION + _OF_TABLE)


def _estimate(row: Any) -> Estimate:
    return Estimate(row.estimate, row.low, row.high, row.n)


def figure(claims: list[Claim], rows: pd.DataFrame) -> style.DataFigure:
    """Draw estimates and intervals, ratios apart from differences; a tick is the threshold."""
    ratio = np.array([claim.is_ratio for claim in claims])
    kinds = [kind for kind in (True, False) if (ratio == kind).any()]
    names = style.wrapped([f"{place}. {claim.claim}" for place, claim in enumerate(claims, start=1)], 2.4)
    heights = [style.height_of([name for name, its in zip(names, ratio, strict=True) if its == kind]) for kind in kinds]
    with style.figure_style():
        height = sum(heights) + 0.6
        drawn, axes = style.panels(len(kinds), 1, height, style.TWO_COLUMNS, height_ratios=heights)
        for axis, kind in zip(axes, kinds, strict=True):
            its: list[Any] = [
                each for each in zip(rows.itertuples(), claims, names, strict=True) if each[1].is_ratio == kind
            ]
            for place, (row, claim, _) in enumerate(its):
                look = colours.look(_PLACES[row.verdict])
                style.dot(axis, row.claim, place, _estimate(row), look, row.verdict, is_open=bool(row.bound))
                for line in {claim.threshold, -claim.threshold} if claim.direction == "equal" else {claim.threshold}:
                    axis.plot([line, line], [place - 0.3, place + 0.3], color="#777777", linewidth=0.8)
            style.named_rows(axis, [name for *_, name in its])
            axis.set_xlabel("ratio of what is tolerated" if kind else "difference, or share")
            if kind:
                axis.set_xscale("log")
        for verdict, place in _PLACES.items():
            look = colours.look(place)
            axes[0].plot([], [], linestyle="none", color=look.colour, label=verdict, **look.mark)
        return style.finish(drawn, axes[0], f"n = {style.span(rows['n'].tolist())}. {_CAPTION}{_OF_FIGURE}")

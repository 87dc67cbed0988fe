"""Gates of a setting. V8: does it measure learning, or only sharpening? V9: do experts matter there?

V9 reads GRPO with free and with pinned routes at several rates, and on the dense twin (``experiment=cell_search``):

    >>> from steadymoe import bench
    >>> gates.cells(bench.results("cell_search"))

Controls that learn nothing about the task show how much of a gain in sampled accuracy is mere sharpening: GRPO on
shuffled rewards (``rollout.shuffle_rewards=true``), and the loss of ``results/ruler/controls``, which lowers entropy
without reading a reward. For a new setting:

    steadymoe run experiment=NAME algorithm=grpo
    steadymoe run experiment=NAME algorithm=grpo rollout.shuffle_rewards=true experiment_name=controls
    STEADYMOE_PATH=results/ruler/controls steadymoe run experiment=NAME algorithm=sharpening \\
        optimizer.learning_rate=1e-6,4e-6,1.6e-5 experiment_name=controls

    >>> from steadymoe import bench
    >>> wide = [bench.results(name).wide("eval_accuracy", "eval_greedy") for name in ("NAME", "controls")]
    >>> gates.learns(*map(gates.ends, wide))
"""

import json
from math import isinf, nan
from typing import NamedTuple

import pandas as pd

from steadymoe.bench.report import tolerances
from steadymoe.bench.report.results import Results
from steadymoe.bench.statistics.tolerance import of_arm

LEAST_GAIN = 0.15
"""What GRPO gains in greedy accuracy at its best rate."""
MOST_SHARE = 0.25
"""What a control gains in sampled accuracy, as a share of what GRPO gains."""
# Gate V9, on each seed: with pinned routes GRPO tolerates at least so many times the rate; or from starts that match
# the dense twin gains at least so much more, sampled, each at its own best rate.
LEAST_COST, LEAST_GAP = 1.3, 0.1
# The most by which matched starts may be apart.
MATCHED, MATCHED_GREEDY = 0.03, 0.05


class Learning(NamedTuple):
    """What the gate measured; gains are over the cold start."""

    gain: float
    """Of GRPO at its best rate, sampled."""
    greedy_gain: float
    share: float
    """Of ``gain``: the largest gain of a control, sampled."""

    @property
    def passes(self) -> bool:
        """Return whether GRPO learns, and the controls do not."""
        return self.greedy_gain >= LEAST_GAIN and self.share <= MOST_SHARE


def ends(wide: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each run of ``results().wide("eval_accuracy", "eval_greedy")``: how it starts and ends."""
    runs = wide.groupby(["arm", "seed"])[["eval_accuracy", "eval_greedy"]]
    first = runs.first().set_axis(["start", "start_greedy"], axis=1)
    return first.join(runs.last().set_axis(["sampled", "greedy"], axis=1)).reset_index()


def learns(grpo: pd.DataFrame, controls: pd.DataFrame) -> Learning:
    """Measure the gate on tables of ``ends``: arms of GRPO at several rates, and arms of the controls."""
    best, control = (_gains(table).sort_values("gain").iloc[-1] for table in (grpo, controls))
    return Learning(float(best["gain"]), float(best["greedy_gain"]), float(control["gain"] / best["gain"]))


def _gains(table: pd.DataFrame) -> pd.DataFrame:
    gains = table.assign(gain=table["sampled"] - table["start"], greedy_gain=table["greedy"] - table["start_greedy"])
    return gains.groupby("arm")[["gain", "greedy_gain"]].mean()


def experts_matter(levels: pd.DataFrame, twins: pd.DataFrame) -> pd.DataFrame:
    """Measure gate V9: a row for each seed that the MoE has.

    ``levels`` are GRPO's on the MoE, ``twins`` on the dense twin (``report.tolerances.levels``). Columns: the starts,
    the best accuracies, routing_cost (the rate tolerated with pinned routes over that with free ones, each on the
    threshold of the free; a lower bound where ``beyond`` is true), gap (how much more the twin gains), matched, and
    whether the gate ``passes`` on this seed.
    """
    rows = []
    for seed, ours in levels.groupby("seed"):
        free = ours[ours["arm"] == "grpo"]
        pinned = next((arm for arm in set(ours["arm"]) if "pinned" in arm), None)
        tolerance = None if pinned is None else of_arm(ours, pinned)[0]
        moe = _at_best(free)
        its = pd.Series(nan, moe.index) if pinned is None else _at_best(ours[ours["arm"] == pinned])
        its_twin = twins[twins["seed"] == seed] if len(twins) else twins
        twin = _at_best(its_twin) if len(its_twin) else pd.Series(nan, moe.index)
        apart = abs(twin["start"] - moe["start"]), abs(twin["start_greedy"] - moe["start_greedy"])
        row = {"seed": seed, "start": moe["start"], "start_greedy": moe["start_greedy"]}
        row |= {"twin_start": twin["start"], "twin_start_greedy": twin["start_greedy"]}
        row |= {"free": moe["sampled"], "pinned": its["sampled"], "twin": twin["sampled"], "greedy": moe["greedy"]}
        row |= {"routing_cost": nan if tolerance is None else tolerance.ratio}
        row |= {"beyond": tolerance is not None and isinf(tolerance.crossing)}
        row |= {"gap": (twin["sampled"] - twin["start"]) - (moe["sampled"] - moe["start"])}
        row |= {"matched": apart[0] <= MATCHED and apart[1] <= MATCHED_GREEDY}
        rows.append(row | {"passes": row["routing_cost"] >= LEAST_COST or (row["matched"] and row["gap"] >= LEAST_GAP)})
    return pd.DataFrame(rows)


def cells(recorded: Results) -> pd.DataFrame:
    """Measure gate V9 in each cell of ``experiment=cell_search``: ``experts_matter`` by layers, fillers and experts.

    The twin of a cell has its layers and fillers; without one, its columns are nan.
    """
    tables, of_run = [], _dials(recorded)
    for (layers, fillers), its in of_run.groupby(["layers", "fillers"]):

        def levels(experts: int, its: pd.DataFrame = its) -> pd.DataFrame:
            chosen = recorded.where(recorded.runs.index.isin(its.index[its["experts"] == experts]))
            return tolerances.levels(chosen.joined["steps"])

        twins = levels(0) if 0 in set(its["experts"]) else pd.DataFrame()
        for experts in sorted(set(its["experts"]) - {0}):
            cell = pd.DataFrame({"layers": [layers], "fillers": [fillers], "experts": [experts]})
            tables.append(cell.merge(experts_matter(levels(experts), twins), how="cross"))
    return pd.concat(tables, ignore_index=True)


def sharpening(recorded: Results, controls: Results) -> pd.DataFrame:
    """Measure gate V8 in each cell that has controls: ``Learning`` by layers, fillers and experts."""
    of_grpo, rows = _dials(recorded)[recorded.runs["routing"] == "off"], []
    for cell, its in _dials(controls).groupby(["layers", "fillers", "experts"]):
        runs = of_grpo.index[(of_grpo == list(cell)).all(axis=1)]
        both = (recorded.where(recorded.runs.index.isin(runs)), controls.where(controls.runs.index.isin(its.index)))
        measured = learns(*(ends(each.wide("eval_accuracy", "eval_greedy")) for each in both))
        rows.append([*cell, *measured, measured.passes])
    return pd.DataFrame(rows, columns=["layers", "fillers", "experts", *Learning._fields, "passes"])


def _dials(recorded: Results) -> pd.DataFrame:
    """Return layers, fillers and experts of each run."""
    configs = recorded.runs["config"].map(json.loads)
    layers = configs.map(lambda each: each["model"]["config"]["num_hidden_layers"])
    fillers = configs.map(lambda each: each["task"]["fillers"])
    return pd.DataFrame({"layers": layers, "fillers": fillers, "experts": recorded.runs["experts"]})


def _at_best(runs: pd.DataFrame) -> pd.Series:
    """Return the run that ends highest."""
    return runs.sort_values("sampled").iloc[-1]

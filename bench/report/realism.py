"""How close runs come to real MoE models: recorded numbers next to the published ranges.

A new row is one entry of ``ROWS``: its gate, what it is, the range, the source, and a function from the steps of an arm
to one number per seed. It may read only columns that archives keep.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from steadymoe.bench.report import tables
from steadymoe.bench.runs.identity import flatten
from steadymoe.bench.statistics.comparisons import unpaired_ratio
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Bounds, Estimate, over_seeds
from steadymoe.bench.training import columns

CAPTION = (
    "Means over steps and seeds with a 95 % interval, next to the range published for real MoE models; factor: the "
    "number over the nearer end of the range. study/calibration.md has the sources. Quantities that were not recorded, "
    "or that have no published range for the algorithm or engine, are left out."
)
# Settings in which an MoE and its dense twin may differ (beginnings of their keys): those of routers and of experts.
_OF_EXPERTS = (
    *("routing.", "optimizer.router_factor", "cold_start.router_factor", "cold_start.aux_loss", "cold_start.z_loss"),
    *("model.config._target_", "model.config.intermediate_size", "model.config.first_k_dense_replace"),
    *("evaluation.permuted_routes", "experts", "seed"),
)


@dataclass(frozen=True)
class Row:
    """A quantity with the range published for real MoE models.

    A single published number is both ends; without one both are nan.
    """

    gate: str
    """The realism gate; empty without one."""
    what: str
    low: float
    high: float
    source: str
    by_seed: Callable[[pd.DataFrame], pd.Series]
    """From the long table of an arm's steps (seed, step, metric, value, responses) to one number per seed."""
    bounds: Bounds | None = (0.0, 1.0)
    """The ends of what the number can be."""
    query: str = ""
    """The runs that the range applies to, by ``algorithm`` and ``engine`` (``DataFrame.query``); empty for all."""

    def measure(self, steps: pd.DataFrame) -> Estimate:
        """Return the mean over seeds of an arm; n is 0 if its steps lack the columns."""
        return over_seeds(self.by_seed(steps).dropna().tolist(), bounds=self.bounds)

    def applies(self, runs: pd.DataFrame) -> bool:
        """Whether the range applies to the runs of an arm."""
        return not self.query or len(runs.query(self.query)) > 0


def response_length(steps: pd.DataFrame) -> pd.Series:
    """Return sampled tokens per response by seed, from the counts that archives keep; dropped groups count too."""
    counts = steps[steps["metric"].isin(("tokens_sampled", "prompts_sampled"))]
    sums = counts.groupby(["seed", "responses", "metric"])["value"].sum().unstack("metric").reset_index("responses")
    if not {"tokens_sampled", "prompts_sampled"} <= set(sums):
        return pd.Series(dtype=float)
    return sums["tokens_sampled"] / (sums["prompts_sampled"] * sums["responses"])


def over_dense(moe: pd.DataFrame, dense: pd.DataFrame) -> Estimate:
    """Return the token-ratio variance of an MoE over its dense twin's, median over steps; they share no cold start."""
    return unpaired_ratio(*(tables.run_numbers(steps, "token_ratio_variance", "median") for steps in (moe, dense)))


def ratio(steps: pd.DataFrame, above: str, below: str) -> pd.Series:
    """Return the mean over steps of one metric over the mean of another, by seed; nan where the divisor is 0."""
    return tables.run_numbers(steps, above, "mean") / tables.run_numbers(steps, below, "mean").replace(0.0, np.nan)


def _moment_times_length(steps: pd.DataFrame) -> pd.Series:
    return tables.run_numbers(steps, "log_ratio_moment_free", "mean") * response_length(steps)


def _mean(metric: str) -> Callable[[pd.DataFrame], pd.Series]:
    return partial(tables.run_numbers, metric=metric, how="mean")


_R3 = "R3, 2510.11370"
_KL, _MISMATCH = "KL of sampler from trainer (k3, nats)", "engine != 'exact'"
_GSPO = "GSPO, 2507.18071"
# fmt: off
ROWS = (
    Row("R1", "experts changed per update", 0.05, 0.15, f"{_GSPO}, 5.3: about 10 %", _mean("expert_change_per_update")),
    Row("R2", "tokens with a changed route in any layer", 0.5, 1.0, "most, in words",
        _mean("token_any_layer_change_rate")),
    Row("R3", _KL, 5e-4, 3e-3, f"{_R3}: 1.54e-3; MiMo-V2.6: 2.2e-3", _mean("rollout_kl_k3"),
        bounds=columns.bounds("rollout_kl_k3"), query=_MISMATCH),
    Row("R3", "routers whose set differs", 0.05, 0.15, f"{_R3}: about 10 % of routers",
        _mean("rollout_set_disagreement"), query=_MISMATCH),
    Row("R4", "clipped tokens", 0.0005, 0.005, f"{_GSPO}, figure 2: 0.0013", _mean("clip_fraction"),
        query="algorithm == 'grpo'"),
    Row("R4", "clipped tokens", 0.1, 0.4, f"{_GSPO}, figure 2: 0.15; verl #7356: 0.35 to 0.44", _mean("clip_fraction"),
        query="algorithm == 'gspo'"),
    Row("R6", "margin over spread of the router logits", 0.01, 0.02,
        "JustVugg/colibri #119: 0.011 GLM-5.2, 0.019 Qwen3.6-35B-A3B", _mean("router_margin_over_spread")),
    Row("R7", "response length (tokens)", 1e2, 1e5, "VESPO: up to 16k; MiMo-V2.6: mean 68k to 103k", response_length,
        bounds=POSITIVE),
    Row("R8", "routing's share of the log-ratio", 0.5, 1.0, f"most, in words: {_GSPO}, 5.3; {_R3}",
        partial(tables.routing_share, keys=[]), bounds=DIFFERENCE),
    Row("R9", "accuracy with routes permuted among tokens, over accuracy", 0.0, 0.5, "ours, not published",
        partial(ratio, above="eval_accuracy_permuted", below="eval_accuracy"), bounds=POSITIVE),
    Row("R10", "relative step of the routers over that of other weights", 0.3, 3.0, "ours, not published",
        partial(ratio, above="relative_step_routers", below="relative_step_others"), bounds=POSITIVE),
    Row("", "second moment of the token log-ratio, E[f²]", np.nan, np.nan, "–", _mean("log_ratio_moment_free"),
        bounds=POSITIVE),
    Row("", "response length times E[f²]", np.nan, np.nan, "–", _moment_times_length, bounds=POSITIVE),
    Row("", "share of E[f²] in the 0.1 % of tokens that moved most", np.nan, np.nan, "–",
        _mean("log_ratio_moment_top")),
    Row("", _KL, 8.4e-4, 8.4e-4, f"{_R3}: one engine twice", _mean("rollout_kl_k3"),
        bounds=columns.bounds("rollout_kl_k3"), query="engine == 'exact'"),
    Row("", "tokens whose route differs in any layer", 0.94, 0.984, f"{_R3}: 94 %; streams-rollout-market: 98.4 %",
        _mean("rollout_any_layer_disagreement"), query=_MISMATCH),
    Row("", "routers whose strongest expert differs", 0.051, 0.051, "streams-rollout-market: fp8 beside bf16, 30B-A3B",
        _mean("rollout_top1_disagreement"), query="engine == 'fp8'"),
    Row("", "tokens with a ratio beyond 2, F(2)", 6e-4, 9e-3, f"MiMo-V2.6, healthy; {_R3}: above 0.1 at collapse",
        _mean("rollout_extreme_share"), query=_MISMATCH),
    Row("", "effective sample size per token", 0.70, 0.95, "AIS: 0.95, later 0.70", _mean("ess")),
)
# Needs two arms, so it is not among ``ROWS``.
OVER_DENSE = Row("R5", "token-ratio variance, MoE over dense", 2.4, 2.4,
                 f"{_R3}: KL of sampler from trainer, 1.54e-3 over 6.4e-4", _mean("token_ratio_variance"))
# fmt: on


@dataclass(frozen=True)
class Realism:
    """A number of an arm next to the published range of its row."""

    row: Row
    setting: str
    """The standard setting that the arm stands for; empty in a report."""
    arm: str
    number: Estimate
    """n is 0 if nothing recorded it."""
    unit: str = "seeds"
    """What n counts."""

    @property
    def factor(self) -> float:
        """The number over the nearer end of the published range; 1 inside the range, nan without a number."""
        ours, low, high = self.number.mean, self.row.low, self.row.high
        if np.isnan([ours, low, high]).any():
            return np.nan
        return ours / low if ours < low else ours / high if ours > high else 1.0


def measure(data: Mapping[str, pd.DataFrame]) -> list[Realism]:
    """Compare every arm of an experiment (``archive.load``) with the published ranges, by gate; only what it recorded.

    R5 compares an arm with its dense twin (``is_twin``).
    """
    runs, measured = data["runs"], []
    if data["steps"].empty:
        return []
    read = data["steps"][["arm", "seed", "step", "metric", "value", "responses"]]
    steps = dict(iter(read.groupby("arm", observed=True)))
    ours = {str(arm): group for arm, group in runs.groupby("arm", observed=True) if arm in steps}
    firsts = {arm: group.iloc[0] for arm, group in ours.items()}
    of_model: dict[str, list[str]] = {}
    for arm, run in firsts.items():
        of_model.setdefault(run["model"], []).append(arm)
    fitting = {row.query: set(runs.query(row.query)["arm"]) for row in ROWS if row.query}
    for arm, run in firsts.items():
        twins = [name for name in of_model.get(f"dense_{run['model']}", ()) if is_twin(firsts[name], run)]
        measured += [Realism(OVER_DENSE, "", arm, over_dense(steps[arm], steps[name])) for name in twins]
        asked = [row for row in ROWS if arm in fitting.get(row.query, [arm])]
        measured += [Realism(row, "", arm, row.measure(steps[arm])) for row in asked]
    return sorted((each for each in measured if each.number.n), key=lambda each: int(each.row.gate[1:] or 99))


def is_twin(dense: pd.Series, moe: pd.Series) -> bool:
    """Return whether one of two ``runs`` is the dense twin of the other, whatever their seeds.

    The twin of a model is named ``dense_<model>``. The algorithm is the same, and so is every setting that both configs
    have, but for those of routers and experts.
    """
    if dense["model"] != f"dense_{moe['model']}" or dense["algorithm"] != moe["algorithm"]:
        return False
    ours, theirs = (flatten(json.loads(run["config"])) for run in (dense, moe))
    shared = (key for key in ours.keys() & theirs.keys() if not key.startswith(_OF_EXPERTS))
    return all(ours[key] == theirs[key] for key in shared)


def to_table(measured: Sequence[Realism]) -> pd.DataFrame:
    """Return the numbers as a table: gate, setting, what, measured on, here, n, published, factor, source."""
    rows = []
    for each in measured:
        recorded, is_published = each.number.n > 0, not np.isnan(each.row.low)
        rows.append(
            {"gate": each.row.gate or "–", "setting": each.setting, "what": each.row.what, "measured on": each.arm}
            | {"here": each.number if recorded else "not recorded"}
            | {"n": f"{each.number.n} {each.unit}" if recorded else "–"}
            | {"published": f"{each.row.low:g} to {each.row.high:g}" if is_published else "–"}
            | {"factor": f"{each.factor:.2g}" if is_published and recorded else "–", "source": each.row.source}
        )
    names = ["gate", "setting", "what", "measured on", "here", "n", "published", "factor", "source"]
    return pd.DataFrame(rows, columns=names)


def table(data: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the realism table of an experiment for the report; empty if nothing was recorded."""
    measured = measure(data)
    return to_table(measured).drop(columns="setting").assign(n=[each.number.n for each in measured])

"""Tables of small experiments for figures, and what a figure shows."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from steadymoe import conf
from steadymoe.bench.report.figures import style
from steadymoe.bench.report.folders import RUNS
from steadymoe.bench.report.results import Results

USUAL = {
    "experiment": "made",
    "algorithm": "grpo",
    "routing": "off",
    "correction": "off",
    "engine": "exact",
    "strength": 0.0,
    "optimizer": "adamw",
    "model": "micro",
    "moe_layers": 4,
    "experts": 8,
    "updates_per_rollout": 8,
    "minibatch_prompts": 4,
    "responses": 8,
    "learning_rate": 4e-4,
}


def long_table(
    values: dict[str, object], arms: list[dict[str, object]], seeds: int = 3, steps: int = 2
) -> pd.DataFrame:
    """Steps of each metric for each arm and seed; a value is a function of the arm and the seed, or of the step too."""
    rows = []
    for arm, seed, step in itertools.product(arms, range(seeds), range(1, steps + 1)):
        keys = USUAL | arm | {"arm": " ".join(map(str, arm.values())), "seed": seed, "step": step}
        rows += [keys | {"metric": name, "value": of(arm | {"step": step}, seed)} for name, of in values.items()]  # type: ignore[operator]
    return pd.DataFrame(rows)


def curve_table(curves: Mapping[str, Sequence[list[float]]], metric: str = "reward") -> pd.DataFrame:
    """Steps of one metric, from each arm's curve of each seed."""
    rows = [
        {"arm": arm, "seed": seed, "step": step, "metric": metric, "value": value}
        for arm, its in curves.items()
        for seed, curve in enumerate(its)
        for step, value in enumerate(curve, start=1)
    ]
    return pd.DataFrame(rows)


def arms(**axes: list[object]) -> list[dict[str, object]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def shown(figure: style.DataFigure, panel: int) -> dict[str, list[float]]:
    """What each line or row of marks of a panel shows, by its label."""
    handles, labels = figure.axes[panel].get_legend_handles_labels()
    lines = [handle.lines[0] if hasattr(handle, "lines") else handle for handle in handles]
    return {label: np.asarray(line.get_ydata()).tolist() for line, label in zip(lines, labels, strict=True)}


def said(figure: style.DataFigure) -> str:
    return " ".join(figure.caption.split())


# Presets too; the longest name has 40 characters.
NAMES = conf.names("algorithm")

# Few: each has a thin line.
SEEDS = 2

METRICS = (
    *("reward", "eval_accuracy", "tokens_sampled", "clip_fraction", "expert_change_rate", "token_ratio_variance"),
    *("rollout_kl_k3", "log_ratio_moment_free", "log_ratio_moment_changed", "log_ratio_moment_unchanged"),
    *("log_ratio_moment_pinned", "loss/hot", "loss/unsure"),
)

# What the runs of a figure vary besides the algorithm.
VARY: dict[str, dict[str, list[object]]] = {
    "fig03": {"routing": ["off", "r2"]},
    "fig05": {"updates_per_rollout": [4, 8, 16]},
    "fig10": {"updates_per_rollout": [4, 16], "learning_rate": [1e-4, 4e-4]},
    "fig11": {"moe_layers": [2, 4, 8]},
    "fig14": {"engine": ["router_noise"], "strength": [0.0, 0.5, 2.0]},
    "fig17": {"learning_rate": [1e-4, 2e-4, 4e-4]},
}


def value(metric: str, arm: dict[str, object], seed: int) -> float:
    """Return numbers that differ between arms, seeds and steps."""
    place = NAMES.index(str(arm["algorithm"])) + 0.1 * seed + 0.3 * float(str(arm.get("strength", 0)))
    share = 0.1 + 0.8 * (0.37 * place % 1) * (1 - 0.5 / float(str(arm["step"])))
    return {"tokens_sampled": 1e4 * share, "log_ratio_moment_free": 1.0}.get(metric, share)


def data(figure: str, names: list[str]) -> Results:
    """Return an experiment of these algorithms that has what ``figure`` varies."""
    vary = VARY.get(figure, {})
    values = {metric: lambda arm, seed, metric=metric: value(metric, arm, seed) for metric in METRICS}
    steps = long_table(values, arms(algorithm=names, **vary), seeds=SEEDS, steps=3)
    first = steps[(steps["metric"] == "eval_accuracy") & (steps["step"] == 1)].assign(step=0)
    steps = pd.concat([first, steps], ignore_index=True)
    counts = [
        {"arm": f"{name} {model}", "algorithm": name, "model": model, "seed": 0, "metric": metric, "bin": 20 + at}
        | {"count": 5 + at, "updates_per_rollout": 8, "minibatch_prompts": 4}
        for name, model in itertools.product(names, ("dense_micro", "micro"))
        for metric in ("token_ratio_histogram", "sequence_log_ratio_variance_histogram")
        for at in range(3)
    ]
    return results_of(steps, pd.DataFrame(counts))


def results_of(steps: pd.DataFrame, histograms: pd.DataFrame | None = None) -> Results:
    """Return joined tables as what an experiment, or several, recorded."""
    parts = [steps, pd.DataFrame(columns=["metric", "bin", "count"]) if histograms is None else histograms]
    facts = pd.concat(parts, ignore_index=True).reindex(columns=[*RUNS]).fillna(USUAL)
    facts["run"] = facts.groupby(["experiment", "arm", "seed"], sort=False).ngroup()
    long = [parts[0].assign(run=facts["run"][: len(steps)].to_numpy())[["run", "step", "metric", "value"]]]
    long += [parts[1].assign(run=facts["run"][len(steps) :].to_numpy())[["run", "metric", "bin", "count"]]]
    return Results(
        facts.drop_duplicates("run").set_index("run"), *long, pd.DataFrame(columns=["run", "prompt", "score"])
    )

"""Tables over seeds of ``Results``: summary, head to head, models, headline."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from steadymoe.bench.report import paper
from steadymoe.bench.statistics.comparisons import (
    DECIDED,
    MIN_TO_DECIDE,
    difference,
    is_decided,
    probability_of_improvement,
    ranking,
    win_rate,
)
from steadymoe.bench.statistics.estimates import INTERVAL, Estimate, over_seeds
from steadymoe.bench.statistics.tolerance import best_value
from steadymoe.bench.training import columns

# A table and its caption, by kind (``report_page.shown_tables``).
Shown = Mapping[str, tuple[pd.DataFrame, str]]

# Steps at the end of a run over which its final numbers are averaged.
LAST_STEPS = 5

# Column → (metric, one of ``NUMBERS``).
SUMMARY = {
    "start": ("reward", "first"),
    "final reward": ("reward", "last"),
    "final held-out accuracy": ("eval_accuracy", "end"),
    "final greedy accuracy": ("eval_greedy", "end"),
    "final pass@k": ("eval_pass", "end"),
    "best minus final reward": ("reward", "fall"),
    columns.short("expert_change_rate"): ("expert_change_rate", "median"),
    columns.short("expert_change_per_update"): ("expert_change_per_update", "mean"),
    columns.short("token_ratio_variance"): ("token_ratio_variance", "median"),
    columns.short("sequence_ratio_variance"): ("sequence_ratio_variance", "median"),
    columns.short("clip_fraction"): ("clip_fraction", "mean"),
    columns.short("norm_cut"): ("norm_cut", "mean"),
}
# The same for the table of models.
MODELS = {
    "gain": ("eval_accuracy", "rise"),
    columns.short("norm_cut"): ("norm_cut", "mean"),
    "step of routers": ("relative_step_routers", "mean"),
    "step of others": ("relative_step_others", "mean"),
    columns.short("expert_change_per_update"): ("expert_change_per_update", "mean"),
    columns.short("token_ratio_variance"): ("token_ratio_variance", "median"),
    columns.short("rollout_expert_disagreement"): ("rollout_expert_disagreement", "mean"),
    "final reward": ("reward", "last"),
}
# What a choice is called that does nothing.
OFF = {"off", "exact", "adamw"}
# Axes that the long tables have as columns, and those that follow from them, as an arm's name has them.
_WITH_COLUMN = {"routing", "correction", "engine", "optimizer", "strength", "updates_per_rollout", "minibatch_prompts"}
_WITH_COLUMN |= {"responses", "learning_rate", "optimizer.learning_rate", "num_hidden_layers", "num_experts"}
# Averaged over seeds on a logarithmic scale.
GEOMETRIC = ("token_ratio_variance", "sequence_ratio_variance")
CAPTION = (
    f"Mean over seeds (geometric mean for variances) with {INTERVAL}; n is the number of seeds. Numbers of a run: "
    "start is the reward of the first step, before any update, final reward is the mean of the last "
    f"{LAST_STEPS} steps, final held-out accuracy is the last evaluation, best minus final compares means over "
    f"{LAST_STEPS} steps, expert change and the variances are medians over steps, expert change per update, clip "
    "fraction and norm cut are means over steps. Collapsed: runs that collapsed or met a number that is not finite "
    "(– if the runs are too short for the rule). Median collapse step: over these runs. Falling: runs whose reward or "
    "entropy falls, or whose gradient norm explodes, too near the end to be judged. All runs are part of every mean; "
    "after a number that is not finite a run counts with a reward and an accuracy of 0."
)
MODELS_CAPTION = (
    f"Mean over seeds (geometric for the variance) with {INTERVAL}. Active parameters: those that one token uses. "
    "Tokens per expert: sampled tokens of an update that reach an expert, on average. Numbers of a run: gain is "
    "held-out accuracy at the end less that at the start; norm cut is the share of updates with a clipped gradient; "
    "steps are ‖ΔW‖/‖W‖ of an update; expert change per update is the mean over steps of the expert-change rate from "
    "before to after one gradient update; the variance is the median over steps; "
    "sampler–trainer disagreement is the mean over steps of the expert-change rate between the sampling forward and "
    "the training forward at the same weights; share of routing is 1 − E[(log r pinned)²] / E[(log r free)²] over all "
    f"updates; final reward is the mean of the last {LAST_STEPS} steps."
)


def _means(curve: pd.Series) -> pd.Series:
    return curve.rolling(min(LAST_STEPS, len(curve))).mean().dropna()


# A word for one number of a run → the number, from the run's curve in the order of the steps.
NUMBERS: dict[str, Callable[[pd.Series], Any]] = {
    "last": lambda curve: _means(curve).iloc[-1],
    "fall": lambda curve: (means := _means(curve)).max() - means.iloc[-1],
    "rise": lambda curve: curve.iloc[-1] - curve.iloc[0],
    "gain": lambda curve: _means(curve).iloc[-1] - curve.iloc[0],
    "first": lambda curve: curve.iloc[0],
    "end": lambda curve: curve.iloc[-1],
    "median": pd.Series.median,
    "mean": pd.Series.mean,
}


def run_numbers(steps: pd.DataFrame, metric: str, how: str, keys: Sequence[str]) -> pd.Series:
    """Return one of ``NUMBERS`` of each run that has the metric, by ``keys``, which tell one run from another."""
    chosen = steps.loc[steps["metric"] == metric, [*keys, "step", "value"]].sort_values("step")
    return chosen.groupby([*keys], observed=True)["value"].agg(NUMBERS[how])


def arm_names(rows: pd.DataFrame, keys: Sequence[str], dials: Collection[str] = _WITH_COLUMN) -> pd.Series:
    """Return the name of each row's arm by its algorithm and the ``keys`` that vary: the same for all values of a dial.

    A choice that is off has no word. A model stands without its key. Runs alike in all this that differ in another
    axis than the ``dials``, such as a clip or an advantage, have its words too: they are not averaged.
    """
    names = rows["algorithm"].astype(str)
    for key in [key for key in keys if rows[key].nunique() > 1]:
        values = rows[key].astype(str)
        names = names + (" " if key == "model" else f" {key}=") + values.where(~values.isin(OFF), "")
        names = names.str.removesuffix(f" {key}=")
    words = {arm: [word for word in arm.split(" ") if "=" in word] for arm in rows["arm"].unique()}
    own = {arm: [f" {word}" for word in words[arm] if word.partition("=")[0] not in {*dials, *keys}] for arm in words}
    further = rows["arm"].map({arm: "".join(own[arm]) for arm in own})
    names = names + further.where(further.groupby(names).transform("nunique") > 1, "")
    pairs = pd.DataFrame({"name": names, "algorithm": rows["algorithm"].astype(str)}).drop_duplicates("name")
    return names.map({name: paper.shown(name, algorithm) for name, algorithm in pairs.to_numpy().tolist()})


def _rewards(steps: pd.DataFrame, how: str) -> dict[str, pd.Series]:
    """Return arm → one number of every run's reward, by seed (a number that paired runs share)."""
    numbers = run_numbers(by_start(steps[steps["metric"] == "reward"]), "reward", how, ["arm", "seed"])
    return {str(arm): own.droplevel("arm") for arm, own in numbers.groupby("arm", observed=True)}


def summary(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per arm, the highest final reward first: n, collapses, the columns of ``SUMMARY`` with a number.

    ``runs`` has the columns of ``collapse.judged``.
    """
    measured = set(steps["metric"])
    numbers = {name: number for name, number in SUMMARY.items() if number[0] in measured}
    # A run that met a number that is not finite is judged, however short.
    judged = runs[(runs["judged_until"] > 0) | runs["collapsed_step"].notna()]
    found = judged[["collapsed_step", "falling_since"]].notna().set_axis(["collapsed", "falling"], axis=1).astype(float)
    counts = pd.DataFrame({"n": runs.groupby("arm").size()}).join(found.groupby(judged["arm"]).sum())
    counts.insert(2, "median collapse step", runs.groupby("arm")["collapsed_step"].median())
    table = counts.join(_estimates(steps, numbers))
    return table.loc[table["final reward"].map(lambda cell: -cell.mean).sort_values(kind="stable").index].reset_index()


def by_start(steps: pd.DataFrame) -> pd.DataFrame:
    """Return ``steps`` with a number in place of the seed that only runs of one seed and one cold start share.

    Only such runs are paired: a model and its dense twin begin elsewhere, and so do runs on another processor.
    """
    if "start" not in steps:
        return steps
    pairs = steps["seed"].astype(str) + " " + steps["start"].astype(str)
    return steps.assign(seed=pd.factorize(pairs)[0])


def starts_differ(steps: pd.DataFrame) -> bool:
    """Return whether some runs of one seed begin at different cold starts."""
    return "start" in steps and bool((steps.groupby("seed")["start"].nunique() > 1).any())


def models(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table of an experiment that compares models: one row per arm, sizes, ``MODELS``.

    Empty with one model, or if none has a router.
    """
    if runs["model"].nunique() < 2 or not (runs["experts"] > 0).any():
        return pd.DataFrame()
    shares = routing_share(steps, ["arm"]).groupby("arm").agg(list)
    by_arm = runs.groupby("arm")
    sizes = by_arm[["top_k", "experts", "updates_per_rollout"]].first()
    table = by_arm[["parameters", "active_parameters"]].first().astype(int)
    table.insert(0, "n", by_arm.size())
    routed = sizes["experts"] > 0
    of_all = sizes["top_k"].map("{:g}".format) + " of " + sizes["experts"].map("{:g}".format)
    table["experts"] = of_all.where(routed, "dense")
    a_step = steps[steps["metric"] == "tokens_sampled"].groupby("arm")["value"].mean()
    share = (sizes["top_k"] / sizes["experts"]).where(routed, 1.0)
    table["tokens per expert"] = (a_step / sizes["updates_per_rollout"] * share).round(1)
    table = table.join(_estimates(steps, MODELS))
    of_routing = pd.Series({arm: over_seeds(shares.get(arm, [])) for arm in table.index}, dtype=object)
    table.insert(table.shape[1] - 1, "share of routing", of_routing)  # before the final reward
    return table.reset_index().rename(columns=lambda name: str(name).replace("_", " "))


def routing_share(steps: pd.DataFrame, keys: list[str]) -> pd.Series:
    """Return 1 − E[(log r pinned)²] / E[(log r free)²] of each run, E over all of its updates, by ``keys`` and seed.

    The share is a ratio of the run's means, not the mean of the steps' shares: in most steps few tokens change their
    route, and the other steps carry the effect of routing. Runs without the moments (dense models) are left out.
    """
    means = run_means(steps, keys, ["log_ratio_moment_free", "log_ratio_moment_pinned"])
    return 1 - means["log_ratio_moment_pinned"] / means["log_ratio_moment_free"]


def run_means(steps: pd.DataFrame, keys: list[str], metrics: list[str]) -> pd.DataFrame:
    """Return each run's mean over steps, by ``keys`` and seed, a column per metric; of runs with all ``metrics``."""
    chosen = steps[steps["metric"].isin(metrics)]
    means = chosen.groupby([*keys, "seed", "metric"])["value"].mean().unstack("metric")
    return means.reindex(columns=metrics).dropna()


def _estimates(steps: pd.DataFrame, numbers: dict[str, tuple[str, str]]) -> pd.DataFrame:
    """Return an ``Estimate`` over the seeds of each arm (rows) for each of ``numbers``, which is like ``SUMMARY``."""
    arms = sorted(set(steps["arm"].astype(str)))
    table = pd.DataFrame(index=pd.Index(arms, name="arm"))
    for column, (metric, how) in numbers.items():
        values = run_numbers(steps, metric, how, ["arm", "seed"]).groupby("arm").agg(list)
        log, bounds = metric in GEOMETRIC, columns.bounds(metric)
        table[column] = pd.Series({arm: over_seeds(values.get(arm, []), log, bounds) for arm in arms}, dtype=object)
    return table


HEAD_TO_HEAD_CAPTION = (
    f"Every arm against the best arm (highest final reward), with {INTERVAL}. Runs of one seed that begin at one cold "
    "start are paired; arms without such seeds are compared by Welch's t, and their gains over the start stand next to "
    f"the levels. p: paired t test, or Welch's, Holm-corrected for all pairs of arms. {DECIDED} "
    "Better: P(arm > best) + P(equal)/2 over paired seeds (Clopper and Pearson's interval). Held-out wins: the share "
    "of held-out prompts that the arm answers better minus the share that the best arm answers better."
)


def head_to_head(steps: pd.DataFrame, evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return one row per arm except the best arm, the highest final reward first; empty for a single arm.

    ``steps`` and ``evaluations`` are those of ``Results.joined``.
    """
    finals, gained = _rewards(steps, "last"), _rewards(steps, "gain")
    ranked = ranking(finals)
    if len(ranked) < 2:
        return pd.DataFrame()
    best = ranked["arm"].iloc[0]
    answers = {arm: evaluations[evaluations["arm"] == arm] for arm in ranked["arm"]}
    rows = []
    for row in ranked[ranked["arm"] != best].to_dict("records"):
        arm = row["arm"]
        rows.append(
            {
                "arm": arm,
                "against": best,
                "n": row["difference"].n,
                "final reward, difference": row["difference"],
                **({"gain, difference": difference(gained[arm], gained[best])} if starts_differ(steps) else {}),
                "p (Holm)": row["p_corrected"],
                "better": probability_of_improvement(finals[arm], finals[best]),
                "held-out wins": win_rate(answers[arm], answers[best]),
            }
        )
    return pd.DataFrame(rows, dtype=object)  # counts stay whole beside nan


# Headline

# The most arms that a sentence names.
_MAX_NAMED = 4
# The words of an arm's name for its learning rate.
_RATE = r" (optimizer\.)?learning_rate=\S+"
# A lead of no more than this is rounding.
_LEVEL = 1e-9
HEADLINE_CAPTION = (
    "Mean over n seeds with a nominal 95 % interval. Differences are paired, seed by seed, where runs share a cold "
    "start. Collapsed: number of runs."
)
# Words of the page, besides those of ``outcome.TERMS``.
TERMS = {
    "arm": "Runs that differ in their seed alone.",
    "final reward": f"Mean reward of the last {LAST_STEPS} steps.",
    "interval": f"{INTERVAL[0].upper()}{INTERVAL[1:]}.",
    "decided": f"{DECIDED} p is that of Head to head: paired or Welch's t test, Holm-corrected for all pairs of arms, "
    "because the leading arm was picked by its result.",
}


def sentences(shown: Shown) -> list[str]:
    """Return who is ahead, by how much and whether that is decided, and which arms collapsed."""
    summary = shown["summary"][0]
    best = summary.set_index("arm", drop=False).loc[_best(shown)]
    lines = [f"{best['arm']} has the highest final reward: {best['final reward']}, n = {best['n']}."]
    if differences := _differences(shown):
        rows = shown["head_to_head"][0]
        decided = [row["arm"] for row in rows.to_dict("records") if is_decided(row["p (Holm)"], row["n"])]
        lines.append(_lead(rows.iloc[0]))
        if decided and rows["arm"].iloc[0] not in decided:
            lines.append(f"Its lead over {_named(decided, f'of the other {len(differences)} arms')} is decided.")
    if summary["collapsed"].isna().all():
        return [*lines, "The runs are too short for the rule of collapse."]
    lost = summary[summary["collapsed"] > 0].sort_values("collapsed", ascending=False, kind="stable")
    counts = [f"{row['arm']} ({row['collapsed']:.0f} of {row['n']})" for row in lost.to_dict("records")]
    in_all = f"arms, {lost['collapsed'].sum():.0f} of {summary['n'].sum()} runs"
    lines.append(f"Collapsed: {_named(counts, in_all)}." if counts else "No run collapsed.")
    if falling := int(summary["falling"].sum()):
        lines.append(f"{falling}{' more' if counts else ''} {'was' if falling == 1 else 'were'} falling at the end.")
    return lines


def knowledge_lost(steps: pd.DataFrame) -> list[str]:
    """Return a sentence on the arms that end below their start on every seed, decoded greedily; none for one seed.

    Sampled accuracy can fall with what the policy knows unharmed, because it falls with rising entropy.
    """
    runs = pd.DataFrame({how: run_numbers(steps, "eval_greedy", how, ("arm", "seed")) for how in ("first", "end")})
    by_arm = runs.assign(is_lower=runs["end"] < runs["first"]).groupby("arm")
    arms = by_arm.agg(first=("first", "mean"), end=("end", "mean"), is_lower=("is_lower", "all"), n=("first", "size"))
    lost = arms[arms["is_lower"] & (arms["n"] > 1)]
    if lost.empty:
        return []
    rates = steps["learning_rate"].unique()
    where = f"At a learning rate of {rates[0]:g} " if len(rates) == 1 else ""
    named = _named([f"{arm} ({row['first']:.2f} to {row['end']:.2f})" for arm, row in lost.iterrows()], "arms")
    verb = "ends" if len(lost) == 1 else "end"
    return [f"{where}{named} {verb} below the start on every seed, decoded greedily."]


def best_rates(steps: pd.DataFrame) -> list[str]:
    """Return a sentence on the learning rate at which each arm of a sweep over it ends best; none without a sweep."""
    ends = run_numbers(steps, *SUMMARY["final held-out accuracy"], ["arm", "learning_rate", "seed"]).reset_index()
    arms, found = ends["arm"].astype(str).str.replace(_RATE, "", regex=True), []
    for arm, its in ends.groupby(arms, sort=False):
        if its["learning_rate"].nunique() > 1:
            rate, end = best_value(its["learning_rate"], its["value"])
            found.append(f"{arm} {rate:g}" + (f" (the {end} of its grid: extend it)" if end else ""))
    return [f"Best learning rate by mean held-out accuracy at the end: {', '.join(found)}."] if found else []


def _lead(row: pd.Series) -> str:
    """Return how far the best arm is ahead of the next one, the arm of ``row``, and whether that is decided."""
    second, behind, n = f"{row['arm']}, the next arm", row["final reward, difference"], row["n"]
    if n == 0:
        return f"It shares no seed with {second}: not compared."
    lead = Estimate(-behind.mean, -behind.high, -behind.low, n)
    if not lead.mean > _LEVEL:
        return f"It is level with {second}, n = {n}."
    line = f"It leads {second}, by {lead}, n = {n}"
    if n < MIN_TO_DECIDE:
        few = ("one seed decides", "two seeds decide", "three seeds decide", "four seeds decide")[n - 1]
        return f"{line}{', on every seed' if row['better'].mean == 0 else ''}; {few} nothing."
    return f"{line}: {'' if is_decided(row['p (Holm)'], n) else 'not '}decided, p (Holm) = {row['p (Holm)']:.2g}."


def _named(arms: Sequence[str], counted: str) -> str:
    """Return the arms by name, or, if they are too many for a sentence, their number and ``counted``."""
    return ", ".join(arms) if len(arms) <= _MAX_NAMED else f"{len(arms)} {counted}"


def headline(shown: Shown) -> pd.DataFrame:
    """Return the columns that a reader looks for first; one row per arm, the highest final reward first."""
    differences = _differences(shown)
    first = shown["summary"][0].filter(["arm", "n", "final reward", "final held-out accuracy", "collapsed"])
    first.insert(3, f"less {_best(shown)}", [differences.get(arm, "–") for arm in first["arm"]])
    return first


def for_terminal(shown: Shown) -> pd.DataFrame:
    """Return five columns of the table that a reader looks for first."""
    if "tolerance" not in shown:
        first = headline(shown)
        return first[[name for name in map(str, first) if not name.startswith("less ")]]
    table = shown["tolerance"][0]
    dial = [name for name in map(str, table) if name.startswith(("× ", "best "))]
    # Of several settings each has a row of a loss, whose best value is then on the page alone.
    shown_first = ["setting", "loss", "n", dial[0]] if "setting" in table else ["loss", "n", *dial]
    return table[[*shown_first, "sampled at best"]]


def _best(shown: Shown) -> str:
    """Return the arm with the highest final reward of those that are ranked."""
    if "head_to_head" in shown:
        return str(shown["head_to_head"][0]["against"].iloc[0])
    return str(shown["summary"][0]["arm"].iloc[0])


def _differences(shown: Shown) -> dict[str, Estimate]:
    """Return arm → its final reward less the best arm's, the highest first."""
    rows = shown["head_to_head"][0] if "head_to_head" in shown else pd.DataFrame(columns=["arm"])
    return dict(zip(rows["arm"], rows.get("final reward, difference", ()), strict=True))

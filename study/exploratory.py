"""Exploratory numbers, part of no verdict: what was found, and what R2 does within a rollout."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd

from steadymoe.bench.report import tuning
from steadymoe.bench.statistics.comparisons import unpaired_ratio
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Bounds, Estimate, over_seeds
from study import arms
from study.arms import BEST, DIALLED, DRIFT, FRONTIER, GRPO, GSPO, GSPO_R2, OTHERS, PAPERS, PAPERS_R2, WIDE
from study.effects import RUN_METRICS, by_seed, factor, paired, routed
from study.gates import NOISY, realism
from study.recorded import NONE, Arm, Audited, Recorded

# Outcomes in mean reward, by the protocol's letters, as the two arms that are compared.
_IN_MEAN_REWARD: dict[str, tuple[Arm, Arm]] = {
    "1 a": (GSPO, PAPERS),
    "1 e": (BEST["gspo"], BEST["grpo"]),
    "3 a": (PAPERS_R2, PAPERS),
    "3 b": (GSPO_R2, GSPO),
    "10 a": (arms.SHIFT["grpo"], GRPO),
    "10 b": (arms.SHIFT["gspo"], GSPO),
    "15 a": (arms.FREEZE, PAPERS_R2),
    "15 b": (arms.BALANCED, PAPERS_R2),
    "16 c": (GSPO, WIDE),
}
STALE_RATE = 8e-4  # conf/experiment/stale.yaml
# GRPO at *long*, at twice the rate that the tuning chose.
_LONG_HIGH, _LONG_HIGH_R2 = (arms.ARMS[f"long, GRPO, lr 0.0004{replay}"] for replay in ("", " + R2"))
# R2 and free routes at the highest rate of claim 27.
_SLOWER = ("stale, GRPO + R2, lr 3e-4", "stale, GRPO, lr 3e-4")
# The rollouts that the tuning compared: the steps that count of 192 updates.
_TUNED_OVER = 7


def speed_and_level(study: Recorded) -> pd.DataFrame:
    """Return the differences of ``_IN_MEAN_REWARD`` in every outcome of ``effects.RUN_METRICS``."""
    return pd.DataFrame(
        [
            {"outcome": letter, "compared": f"{arm.label} less {over.label}"}
            | {of: paired(study, of, arm, over).estimate for of in RUN_METRICS}
            for letter, (arm, over) in _IN_MEAN_REWARD.items()
        ]
    )


def undecided_in_level(rows: pd.DataFrame, ends: Mapping[str, float] = MappingProxyType({"16 c": 0.05})) -> list[str]:
    """Return the outcomes of ``speed_and_level`` that mean reward decides, and no other column does.

    Intervals are compared with 0, or with the bound of an outcome in ``ends``, which claims a difference within it.
    """
    bounds = rows["outcome"].map(lambda outcome: ends.get(outcome, 0.0))
    is_open = rows[list(RUN_METRICS)].apply(
        lambda column: [number.low <= bound <= number.high for number, bound in zip(column, bounds, strict=True)]
    )
    chosen = ~is_open["mean reward"] & is_open.drop(columns="mean reward").all(axis=1)
    return rows.loc[chosen, "outcome"].tolist()


def found(study: Recorded) -> dict[str, Any]:
    """Return the numbers of the page's section "What was found". Raises NotRun if one of them was not recorded."""

    def reward(arm: Arm, over: Arm) -> Estimate:
        return paired(study, "mean reward", arm, over).estimate

    def accuracy(arm: Arm, over: Arm) -> Estimate:
        return paired(study, "held-out accuracy", arm, over).estimate

    leads = {
        (rate, updates): reward(FRONTIER["gspo", rate, updates], FRONTIER["grpo", rate, updates])
        for _, rate, updates in FRONTIER
    }
    ahead = [cell for cell, number in leads.items() if number.low > 0]
    others = [number.mean for cell, number in leads.items() if cell not in ahead]
    cells = [f"{leads[rate, n]} at {rate:.0e} and {n} updates".replace("e-0", "e-") for rate, n in ahead]
    wide, own = BEST["gspo"], BEST["gspo, own band"]
    moe, dense = (Audited("", name, "all") for name in ("study_audit", "study_audit_twin"))
    kl, length = study.numbers(NOISY, "rollout_kl_k3", "mean").mean(), study.response_length(NOISY).mean()
    (kl_factor,) = (
        each.factor for each in realism(study) if each.arm == NOISY.label and each.row.what.startswith("KL")
    )
    early = [study.mean_reward(arm, until=_TUNED_OVER) for arm in (wide, own)]
    rows = speed_and_level(study)
    return {
        "ahead": len(ahead),
        "cells": len(leads),
        "leads": " and ".join(cells),
        "others": f"{min(others):+.3f} to {max(others):+.3f}",
        "slower": reward(BEST["grpo"], GSPO),
        "tie": reward(own, BEST["grpo"]),
        "chosen": reward(wide, BEST["grpo"]),
        "tuned_over": _TUNED_OVER,
        "early": by_seed(early[0] - early[1], DIFFERENCE).estimate,
        "small": routed(study, tuple(DIALLED.values())).estimate,
        "share": by_seed(study.gradient(moe, "routing_share", DRIFT)).estimate,
        "stale": by_seed(study.routing_share(GRPO)).estimate,
        "ratio": unpaired_ratio(*(study.gradient(one, "token_ratio_variance", DRIFT) for one in (moe, dense))),
        "kl": f"{kl:.2f}",
        "kl_factor": f"{kl_factor:.0f}",
        "length": f"{length:.0f}",
        "kl_response": f"{kl * length:.1f}",
        "band": accuracy(GSPO, WIDE),
        "each_tuned": {
            of: paired(study, of, *(arms.STALE_BEST[name] for name in ("gspo", "grpo"))) for of in RUN_METRICS
        },
        "at_long": {name: accuracy(arm, arms.LONG_BEST["grpo"]) for name, arm in arms.LONG_BEST.items()},
        "at_long_like_for_like": {name: accuracy(arm, _LONG_HIGH) for name, arm in arms.LONG_BEST.items()},
        "higher_rate": accuracy(_LONG_HIGH, arms.LONG_BEST["grpo"]),
        "replayed_at_long": [accuracy(_LONG_HIGH_R2, over) for over in (arms.LONG_BEST["grpo"], _LONG_HIGH)],
        "tuning_at_long": _level_of_grpo(study),
        "at_stale": _tuned_at_stale(study),
        "order": f"{_rank_correlation(study):.2f}",
        "spread": {
            "high": reward(OTHERS["vespo"], OTHERS["sapo"]),
            "tuned": reward(arms.STALE_BEST["vespo"], arms.STALE_BEST["sapo"]),
        },
        "replayed": {
            rate: reward(arms.ARMS[f"stale, GRPO + R2, lr {rate}"], arms.ARMS[free])
            for rate, free in (("2e-4", "stale, GRPO, tuned"), ("3e-4", "stale, GRPO, lr 3e-4"))
        },
        "moved_slower": factor(*(_at(study, arms.ARMS[label], *_QUANTITIES[MOVED][:2]) for label in _SLOWER)).estimate,
        "slower_share": by_seed(study.routing_share(BEST["grpo"])).estimate,
        "at_selection": {
            name: accuracy(arms.SELECTION_BEST[name], arms.SELECTION_BEST["grpo"]) for name in ("gspo", "vespo")
        },
        "slow_lead": reward(arms.ARMS["GSPO, slow routers"], arms.ARMS["GRPO, slow routers"]),
        "speed": ", ".join(undecided_in_level(rows)),
        "rows": rows,
    }


def levels_over_rates(study: Recorded, experiment: str) -> pd.DataFrame:
    """Return ``tuning.table`` of an experiment, empty where nothing has run."""
    recorded = study.experiment(experiment)
    return tuning.table(recorded["runs"], recorded["steps"]) if len(recorded["runs"]) else pd.DataFrame()


def _level_of_grpo(study: Recorded) -> dict[float, str]:
    """The level of GRPO at each rate of ``long_tuning``."""
    rows = levels_over_rates(study, "long_tuning")
    rows = rows[rows["algorithm"] == "grpo"]
    return {rate: f"{level.mean:.3f}" for rate, level in zip(rows["learning rate"], rows[tuning.LEVEL], strict=True)}


def _tuned_at_stale(study: Recorded) -> str:
    """Held-out accuracy of each loss of ``STALE_BEST`` less GRPO's, the highest first, in words."""
    of = "held-out accuracy"
    leads = {
        arm.label.split(", ")[1]: paired(study, of, arm, arms.STALE_BEST["grpo"]).estimate
        for name, arm in arms.STALE_BEST.items()
        if name != "grpo"
    }
    return ", ".join(f"{label} {leads[label]}" for label in sorted(leads, key=lambda label: -leads[label].mean))


def tuned(study: Recorded) -> pd.DataFrame:
    """Return the table of tuned losses, highest at 7 tokens first, then the dense twin and the start.

    For both lengths of response: learning rate, held-out accuracy, and the same less GRPO's.
    """
    none: dict[str, Arm] = {}
    dense = {"dense twin, on policy": arms.LONG_ON_POLICY["dense"]}
    by_length = (("7 tokens", arms.STALE_BEST, none), ("61 tokens", arms.LONG_BEST, dense))
    ends = pd.Series({name: float(study.held_out(arm).mean()) for name, arm in arms.STALE_BEST.items()})
    ranked = ends.sort_values(ascending=False).index
    rows: dict[str, dict[str, Any]] = {name: {"loss": arms.STALE_BEST[name].label.split(", ")[1]} for name in ranked}
    for length, losses, beside in by_length:
        for name, arm in (losses | beside).items():
            (rate,) = study.tables([arm])["runs"]["learning_rate"].unique()
            row = rows.setdefault(name, {"loss": name})
            row[f"rate, {length}"] = f"{rate:.0e}".replace("e-0", "e-")
            row[f"accuracy, {length}"] = over_seeds(study.held_out(arm).tolist(), bounds=(0.0, 1.0))
            if name in losses and name != "grpo":
                row[f"less GRPO, {length}"] = paired(study, "held-out accuracy", arm, losses["grpo"]).estimate
    start = rows.setdefault("start", {"loss": "start, and frozen policy"})
    for length, losses, _ in by_length:
        first = study.numbers(losses["grpo"], "eval_accuracy", "first")
        start[f"accuracy, {length}"] = over_seeds(first.tolist(), bounds=(0.0, 1.0))
    return pd.DataFrame(list(rows.values())).fillna("–")


def _rank_correlation(study: Recorded) -> float:
    """Spearman's correlation of the levels at the rate of *stale* (``stale_tuning``) with those of ``STALE_BEST``."""
    rows = levels_over_rates(study, "stale_tuning")
    high = rows[rows["learning rate"] == STALE_RATE].set_index("algorithm")[tuning.LEVEL].map(lambda level: level.mean)
    best = pd.Series({name: float(study.held_out(arm).mean()) for name, arm in arms.STALE_BEST.items()})
    return float(high.corr(best, method="spearman"))


# --- what R2 does ----------------------------------------------------------------------------------------------------
# It forces the old policy's experts in the updates; the sampler then runs the experts that the routers choose.

# Free routes, and the same with R2.
PAIRS = ((PAPERS, PAPERS_R2), (GSPO, GSPO_R2))
# Quantity → its metric, the step (None: the mean over the probed steps, routers free before and after a rollout's
# updates), its bounds, and how R2 is compared with free routes.
LEFT, START, NEXT = "experts that left the old routes", "reward of rollout 1", "reward of rollout 2"
SEEN, MOVED = "token-ratio variance in the loss", "mean squared log-ratio of the sampled policy"
_QUANTITIES: dict[str, tuple[str, int | None, Bounds, str]] = {
    LEFT: ("expert_change_rate", 1, (0.0, 1.0), ""),
    START: ("reward", 1, (0.0, 1.0), ""),
    NEXT: ("reward", 2, (0.0, 1.0), "difference"),
    SEEN: ("token_ratio_variance", 1, POSITIVE, "ratio"),
    MOVED: ("log_ratio_moment_free", None, POSITIVE, "ratio"),
}


def replay(study: Recorded) -> pd.DataFrame:
    """Return a row for each quantity and arm: number, and for R2 its effect; empty unless all arms have run.

    ``effect`` is R2 less free routes or R2 over free routes, seed by seed; n is 0 where nothing is compared.
    """
    rows: list[dict[str, Any]] = []
    for free, replayed in PAIRS if all(study.has(arm) for pair in PAIRS for arm in pair) else ():
        for quantity, (metric, step, bounds, compared) in _QUANTITIES.items():
            without, numbers = (_at(study, arm, metric, step) for arm in (free, replayed))
            effect = NONE
            if compared == "difference":
                effect = by_seed(numbers - without, DIFFERENCE).estimate
            elif compared == "ratio":
                effect = factor(numbers, without).estimate
            rows += [
                {"quantity": quantity, "arm": arm.label, "routing": routing, "algorithm": arm.algorithm}
                | {"number": by_seed(values, bounds).estimate, "effect": effect if arm is replayed else NONE}
                for arm, routing, values in ((free, "free", without), (replayed, "R2", numbers))
            ]
    return pd.DataFrame(rows)


def _at(study: Recorded, arm: Arm, metric: str, step: int | None) -> pd.Series:
    """One number of a metric for each seed: at a step, or its mean over all."""
    return study.numbers(arm, metric, "mean") if step is None else study.at(arm, metric, step)


def replay_numbers(rows: pd.DataFrame) -> dict[str, str]:
    """Return the numbers of the page's paragraph on what R2 does, from ``replay``."""
    by_key: dict[Any, Any] = {(row.quantity, row.arm): row for row in rows.itertuples()}

    def mean(quantity: str, arm: Arm) -> str:
        return f"{by_key[quantity, arm.label].number.mean:.3g}"

    free, replayed = PAIRS[0]
    return {
        "arm": free.label,
        "left": f"{float(mean(LEFT, replayed)):.0%}",
        "seen": mean(SEEN, replayed),
        "seen_free": mean(SEEN, free),
        "moved": " and ".join(f"{by_key[MOVED, arm.label].effect} times ({arm.label})" for _, arm in PAIRS),
        "start": mean(START, free),
        "next": mean(NEXT, replayed),
        "next_free": mean(NEXT, free),
    }

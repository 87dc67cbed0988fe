"""Readings: one number of a model with its interval, and the published range beside it."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from steadymoe.bench.measurement import published
from steadymoe.bench.statistics import estimates
from steadymoe.bench.statistics.estimates import Estimate

# The heading of the readings of engines; each engine is a case.
ENGINES = "engines beside the trainer"
SHARE: estimates.Bounds = (0.0, 1.0)

# Key → the words of a reading; docs/calibration.md says what each means.
LABELS = {
    "expert_change": "experts changed",
    "set_change": "routers whose set changed",
    "token_change": "tokens with a change in any layer",
    "router_margin": "margin of the last chosen expert (logits)",
    "margin_over_spread": "margin over spread of the logits",
    "margin_over_spread_of_probabilities": "margin over spread of the probabilities",
    "top1_probability": "router's largest probability",
    "router_entropy": "entropy of a router, over log E",
    "router_confidence": "probability of the chosen experts",
    "load_entropy": "entropy of the load, over log E",
    "load_max_violation": "largest load over the mean load, less 1",
    "response_length": "response length (tokens)",
    "set_disagreement": "routers whose set differs from the trainer's",
    "token_disagreement": "tokens that differ in any layer",
    "top1_disagreement": "routers whose strongest expert differs",
    "kl_k3": "KL of sampler from trainer (k3, nats)",
    "f2": "tokens with a ratio beyond 2, F(2)",
    "routing_share": "routing's share of the log-ratio",
    "clip_share": "clipped tokens",
    "token_ratio_variance": "variance of the token ratio",
    "sequence_ratio_variance": "variance of the sequence ratio",
    "ess": "effective sample size per token",
    "noise_scale": "gradient noise scale (prompts)",
    "noise_over_signal": "gradient noise over signal of a mini-batch",
}


@dataclass(frozen=True)
class Reading:
    """One number of a model."""

    section: str
    """The heading that it stands under."""
    key: str
    """What is measured, one of ``LABELS``."""
    estimate: Estimate
    unit: str
    """What the interval's n counts: prompts, mini-batches, tokens."""
    of: str = ""
    """The case: an engine, a number of updates, the band of a paper."""

    @property
    def label(self) -> str:
        """What a table calls it."""
        return f"{LABELS[self.key]}, {self.of}" if self.of else LABELS[self.key]

    @property
    def row(self) -> dict[str, Any]:
        """The reading and the published range beside it, as plain values; nan where there is none."""
        known = published.beside(self.key, self.of)
        ours = self.estimate
        return {
            "section": self.section,
            "key": self.key,
            "of": self.of,
            "label": self.label,
            "mean": ours.mean,
            "low": ours.low,
            "high": ours.high,
            "n": ours.n,
            "unit": self.unit,
            "published_low": math.nan if known is None else known.low,
            "published_high": math.nan if known is None else known.high,
            "factor": math.nan if known is None else known.factor(ours.mean),
            "gate": "" if known is None else known.gate or "",
            "source": "" if known is None else known.source,
        }


def table(readings: Sequence[Reading]) -> pd.DataFrame:
    """The rows of all readings, in their order."""
    return pd.DataFrame([each.row for each in readings])


class Sums:
    """Means over tokens, as sums over clusters: each key has the sums of its values and of its tokens, by cluster."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(_zeros))

    def add(self, key: str, cluster: Hashable, mean: float, weight: float, of: str = "") -> None:
        """Add the mean of ``weight`` values of one cluster; a cluster may be added to several times."""
        part = self._parts[key, of][cluster]
        part[0] += mean * weight
        part[1] += weight

    def add_all(self, means: Mapping[str, float], cluster: Hashable, weight: float, of: str = "") -> None:
        """Add several means of the same values."""
        for key, mean in means.items():
            self.add(key, cluster, mean, weight, of)

    def estimate(self, key: str, of: str = "", bounds: estimates.Bounds | None = SHARE) -> Estimate:
        """The mean over all values with its interval over clusters."""
        parts = list(self._parts[key, of].values())
        return estimates.ratio_of_sums([top for top, _ in parts], [bottom for _, bottom in parts], bounds=bounds)

    def readings(self, section: str, unit: str, bounds: Mapping[str, estimates.Bounds | None]) -> list[Reading]:
        """The readings of every key, in the order of adding; a key without ``bounds`` is a share."""
        return [
            Reading(section, key, self.estimate(key, of, bounds.get(key, SHARE)), unit, of)
            for key, of in list(self._parts)
        ]


def _zeros() -> list[float]:
    return [0.0, 0.0]

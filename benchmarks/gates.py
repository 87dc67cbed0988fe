"""Gate V8: does a setting measure learning, or only sharpening?

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

from typing import NamedTuple

import pandas as pd

LEAST_GAIN = 0.15
"""What GRPO gains in greedy accuracy at its best rate."""
MOST_SHARE = 0.25
"""What a control gains in sampled accuracy, as a share of what GRPO gains."""


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

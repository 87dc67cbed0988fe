"""When a run counts as collapsed: one declared rule on its reward curve."""

from collections.abc import Sequence

import numpy as np


def collapsed_at(
    rewards: Sequence[float], window: int, reward_fraction: float, patience: int, least_reward: float
) -> int | None:
    """The step, from 1, at which reward collapsed, or None.

    Reward, averaged over the last ``window`` steps, lies below ``reward_fraction`` of the highest such
    average so far for ``patience`` steps in a row; the first of them is the step of the collapse. What never
    reached an average of ``least_reward`` cannot collapse: a handful of lucky answers is no height to fall from.
    """
    if len(rewards) < window:
        return None
    averages = np.convolve(rewards, np.ones(window) / window, mode="valid")
    best = np.maximum.accumulate(averages)
    below = (averages < reward_fraction * best) & (best >= least_reward)
    run_length = 0
    for index, is_below in enumerate(below):
        run_length = run_length + 1 if is_below else 0
        if run_length == patience:
            return index - patience + 1 + window
    return None

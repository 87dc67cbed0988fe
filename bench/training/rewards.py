"""From a task's scores to what is maximised: overlong responses punished, KL to the cold start subtracted.

Shapes: B responses, T response positions.
"""

from torch import Tensor

from steadymoe.bench.config.schema import Overlong


def overlong(lengths_B: Tensor, budget: int, penalty: float, buffer: float) -> Tensor:
    """What is subtracted for length, (B,): 0 up to (1 − buffer) · budget tokens, then linear, ``penalty`` at budget.

    Soft overlong punishment (DAPO, 2503.14476, eq. 13), with the buffer as a share of the ``budget`` of tokens
    that a response may have.
    """
    free = (1 - buffer) * budget
    return penalty * ((lengths_B - free) / (budget - free)).clamp(0, 1)


def shaped(scores_B: Tensor, mask_BT: Tensor, budget: int, punishment: Overlong, kl_BT: Tensor | None) -> Tensor:
    """The rewards that advantages are computed from, (B,).

    ``punishment`` holds the numbers of ``overlong``; ``kl_BT`` is what a KL term takes from
    each token, its coefficient included, or None.
    """
    rewards_B = scores_B
    if punishment.penalty > 0:
        rewards_B = rewards_B - overlong(mask_BT.sum(-1), budget, punishment.penalty, punishment.buffer)
    return rewards_B if kl_BT is None else rewards_B - (kl_BT * mask_BT).sum(-1)

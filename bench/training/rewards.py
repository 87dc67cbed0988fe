"""Rewards: a task's scores less a penalty for overlong responses and less the KL to the cold start.

Shapes: B responses, T response positions.
"""

from torch import Tensor

from steadymoe.bench.config.schema import Overlong


def overlong(lengths_B: Tensor, budget: int, penalty: float, buffer: float) -> Tensor:
    """The penalty for length, (B,): 0 up to (1 − buffer) · budget tokens, then linear, ``penalty`` at budget.

    Soft overlong punishment (DAPO, 2503.14476, eq. 13). ``budget`` is the largest length of a response in tokens;
    ``buffer`` is a share of it.
    """
    free = (1 - buffer) * budget
    return penalty * ((lengths_B - free) / (budget - free)).clamp(0, 1)


def shaped(scores_B: Tensor, mask_BT: Tensor, budget: int, punishment: Overlong, kl_BT: Tensor | None) -> Tensor:
    """The rewards for the advantages, (B,).

    ``punishment`` holds the numbers of ``overlong``. ``kl_BT`` is subtracted token by token: a KL term times its
    coefficient, or None.
    """
    rewards_B = scores_B
    if punishment.penalty > 0:
        rewards_B = rewards_B - overlong(mask_BT.sum(-1), budget, punishment.penalty, punishment.buffer)
    return rewards_B if kl_BT is None else rewards_B - (kl_BT * mask_BT).sum(-1)

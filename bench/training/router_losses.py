"""The auxiliary losses of routers, with their coefficients: in cold starts and in reinforcement."""

from torch import Tensor

from steadymoe.bench.training.forward import Forward, Sequences
from steadymoe.models.routing import load_balancing_loss, z_loss


def router_losses(now: Forward, sequences: Sequences, aux_coefficient: float, z_coefficient: float) -> Tensor | float:
    """The sum of the load-balancing loss and the router z-loss over all fed tokens, each times its coefficient.

    0 for a dense model, and where both coefficients are 0.
    """
    loss: Tensor | float = 0.0
    if now.executed_LBFK is None:
        return loss
    mask_N = sequences.route_mask_BF.flatten()
    if aux_coefficient > 0:
        executed_LNK = now.executed_LBFK.flatten(1, 2)
        loss = loss + aux_coefficient * load_balancing_loss(now.router_logits_LNE, executed_LNK, mask_N)
    if z_coefficient > 0:
        loss = loss + z_coefficient * z_loss(now.router_logits_LNE, mask_N)
    return loss

"""PR²'s evolution predictors (2606.00395): they predict a router's logits at the time of training on its tokens.

Shapes (docs/metrics.md): L MoE layers, B sequences, T response positions, E experts, H hidden, N response tokens.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadymoe.models.routing import routers


class RoutePredictor(nn.Module):
    """One linear map for each router, from its input to a change of its logits, (H, E); initially 0 (eq. 4)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        weights = [router.get_parameter("weight") for router in routers(model)]
        self.heads_LHE = nn.ParameterList([torch.zeros_like(weight_EH.T.contiguous()) for weight_EH in weights])

    def forward(self, inputs_LBTH: Tensor, old_logprobs_LBTE: Tensor, logprobs_LBTE: Tensor, mask_BT: Tensor) -> Tensor:
        """Σ_l E_t KL(current router ‖ prediction), a scalar; its gradient reaches the heads alone (eq. 7 and 8).

        The prediction is softmax(old logits + old input · head). ``inputs_LBTH`` and ``old_logprobs_LBTE`` come from
        the old policy, ``logprobs_LBTE`` from the current routers; all are constants. E_t averages over the response
        tokens, ``mask_BT``.
        """
        keep_BT, losses = mask_BT.bool(), []
        layers = zip(self.heads_LHE, inputs_LBTH, old_logprobs_LBTE, logprobs_LBTE, strict=True)
        for head_HE, inputs_BTH, old_BTE, now_BTE in layers:
            predicted_NE = (old_BTE[keep_BT] + inputs_BTH[keep_BT].float() @ head_HE).log_softmax(-1)
            now_NE = now_BTE[keep_BT].detach()
            losses.append((now_NE.exp() * (now_NE - predicted_NE)).sum(-1).mean())
        return torch.stack(losses).sum()

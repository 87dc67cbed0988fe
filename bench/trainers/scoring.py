"""What one forward of a micro-batch gives another trainer: log-probabilities, entropy, and routes at response tokens.

Shapes: B responses, S = W + T positions of prompt and response, N = B·S positions fed, F = S − 1, T response positions,
L MoE layers, E experts, K experts a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadymoe.bench.trainers.moments import Routes
from steadymoe.bench.training.forward import Sequences
from steadymoe.models.routing import Routed, log_softmax


@dataclass(frozen=True)
class Scored:
    """One forward of a micro-batch under the training arithmetic."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    aux_loss: Tensor | None
    routes: Routes | None
    """None for a dense model."""
    executed_LNK: Tensor | None
    """The experts that ran at every position fed, for replay."""


def routes_of(routed: Routed, shape: tuple[int, ...], width: int) -> Routes:
    """The routes of a forward that was fed all positions of ``shape``, (B, S), whose last ``width`` are responses."""

    def placed(values_LNX: Tensor) -> Tensor:
        return values_LNX.unflatten(1, shape)[:, :, :-1]  # the last position predicts nothing

    responses = [logits_NE.detach().unflatten(0, shape)[:, -width - 1 : -1] for logits_NE in routed.logits_LNE]
    return Routes(placed(routed.live_LNK), placed(routed.executed_LNK), log_softmax(torch.stack(responses)))


def sequences_of(inputs: Mapping[str, Any], rows: int) -> Sequences:
    """``rows`` sequences of a micro-batch, as the suite's own forward takes them; sequences with tokens come first."""
    tokens_BS = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask_BS = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    is_empty_B = ~inputs["completion_mask"].bool().any(-1)
    chosen_B = is_empty_B.int().argsort(stable=True)[:rows]
    return Sequences(tokens_BS[chosen_B], mask_BS[chosen_B], inputs["completion_ids"].shape[1])


def sampled_mask(inputs: Mapping[str, Any]) -> Tensor:
    """1 on the tokens that the policy sampled: response tokens that no tool wrote, (B, T)."""
    mask_BT: Tensor = inputs["completion_mask"]
    return mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT

"""The training forward: log-probabilities, entropy and routes of response tokens under a model's weights.

Shapes: B sequences, S positions of prompt and response together (prompts padded on the left, responses on
the right), T response positions, V vocabulary, L MoE layers, K experts a token, E experts, H hidden. Of a sequence the
first S − 1 positions are fed, since the last token predicts nothing: F = S − 1. A ``layout`` says how: P rows of X
positions. The last Y positions of a row are scored, M = P·Y in all.
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms.parts import dimensions, joined_by, rows
from steadymoe.bench.training import packing
from steadymoe.bench.training.packing import Layout, separate
from steadymoe.models.attention import in_two_parts
from steadymoe.models.routing import Routed, RouteRecorder, load_balancing_loss, log_softmax, z_loss
from steadymoe.models.selection import NO_ROUTE

# The largest mean difference of log-probabilities that another order of computation may make. A model that cannot share
# prompts differs by much more, also before it has learned.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses, padded to one rectangle."""

    tokens_BS: Tensor = field(metadata=dimensions("BS"))
    mask_BS: Tensor = field(metadata=dimensions("BS"))
    """1 on prompt and response tokens, 0 on padding on either side."""
    response_width: int = field(metadata=joined_by(lambda widths: widths[0]))
    """T: the last T of the S positions hold responses."""

    @property
    def response_mask_BT(self) -> Tensor:
        """1 on response tokens, the end token included."""
        return self.mask_BS[:, -self.response_width :]

    @property
    def route_mask_BF(self) -> Tensor:
        """Where a route exists: tokens that another one follows. The last sampled token was never fed."""
        return (self.mask_BS[:, :-1] & self.mask_BS[:, 1:]).bool()

    def rows(self, index: Tensor) -> "Sequences":
        """Return a part of the batch, with the same padding."""
        return rows(self, index)


@dataclass(frozen=True)
class Forward:
    """The outputs of a training forward for each response token and each position fed."""

    logprobs_BT: Tensor = field(metadata=dimensions("BT"))
    entropy_BT: Tensor = field(metadata=dimensions("BT"))
    routes_LBFK: Tensor | None = field(metadata=dimensions("LBFK"))
    """The routers' own choice, also where another was forced; ``NO_ROUTE`` where ``route_mask_BF`` is false; None
    for a dense model."""
    executed_LBFK: Tensor | None = field(metadata=dimensions("LBFK"))
    """The experts that ran; ``routes_LBFK`` unless routes were forced."""
    routed: tuple[tuple[Routed, Layout], ...] = field(
        default=(), metadata=joined_by(lambda parts: tuple(itertools.chain(*parts)))
    )
    """What the routers did with what was fed, of each forward that this one is joined of; none for a dense model."""
    top_logprobs_BTK: Tensor | None = field(default=None, metadata=dimensions("BTK"))
    """log-probabilities of the tokens that were asked for."""

    @property
    def router_logits_LNE(self) -> list[Tensor]:
        """Router logits of each layer over all B·F positions, with their gradient; empty for a dense model."""
        spread = [[layout.spread(logits_NE) for logits_NE in routed.logits_LNE] for routed, layout in self.routed]
        return [torch.cat(layer) for layer in zip(*spread, strict=True)]

    @property
    def router_logprobs_LBTE(self) -> Tensor:
        """log of the routers' softmax over all experts at the response tokens, without gradient.

        As in ``routing_drift``, the route of a response token is the route of the position before it. Each forward's
        softmax is computed by itself, so that joining forwards changes no bit.
        """
        return _joined([log_softmax(_of_responses(routed.logits_LNE, layout)) for routed, layout in self.routed])

    @property
    def router_inputs_LBTH(self) -> Tensor:
        """What the routers were given at the response tokens, without gradient."""
        return _joined([_of_responses(routed.inputs_LNH, layout) for routed, layout in self.routed])


@dataclass(frozen=True, kw_only=True)
class Extras:
    """How a training forward scores response tokens, and what it gives beside their log-probability and entropy."""

    top_tokens_BTK: Tensor | None = None
    """Tokens whose log-probabilities are wanted too."""
    entropy_gradient: bool = False
    """Whether gradients flow through the entropy."""
    routes: bool = True
    """Whether the routes are recorded."""
    kept_BTV: Tensor | None = None
    """Mask replay: the log-probabilities of response tokens are normalised over these tokens (bool); all for None. At
    least one at each position. The entropy and the log-probabilities of ``top_tokens_BTK`` stay those of the whole
    vocabulary."""
    temperature: float = 1.0
    """What the logits are divided by: log-probabilities and entropy are those of this temperature."""


PLAIN = Extras()


def _of_responses(values_LNX: Sequence[Tensor], layout: Layout) -> Tensor:
    return torch.stack([layout.of_responses(values_NX.detach()) for values_NX in values_LNX])


def _joined(parts_LBTX: list[Tensor]) -> Tensor:
    return parts_LBTX[0] if len(parts_LBTX) == 1 else torch.cat(parts_LBTX, 1)


def forward(
    model: PreTrainedModel,
    sequences: Sequences,
    precision: str,
    extras: Extras = PLAIN,
    forced_LBFK: Tensor | None = None,
    heads_LHE: Sequence[Tensor] | None = None,
    layout: Layout | None = None,
    gates_LBFK: Tensor | None = None,
    score_share: float | None = None,
) -> Forward:
    """Run the model over ``sequences``; gradients flow through all log-probabilities unless disabled outside.

    With ``forced_LBFK`` its experts run in place of the routers' own choice, except where it is ``NO_ROUTE``, and with
    ``gates_LBFK`` these gate weights in place of the routers' own, and with ``score_share`` only those of ``filtered``;
    with ``heads_LHE`` the experts that PR² predicts. ``layout`` is how the sequences are fed, a row each unless given;
    of routes that are forced on a shared prompt those of its first response count.
    """
    route_mask_BF = sequences.route_mask_BF
    if layout is None:
        layout = separate(sequences.tokens_BS, sequences.mask_BS, sequences.response_width)
    parts = layout.two_parts
    attending = nullcontext() if parts is None else in_two_parts(model.config)
    autocasting = autocast(sequences.tokens_BS.device.type, precision)
    with RouteRecorder(model, extras.routes) as recorder, autocasting, attending:
        forced, gates = (None if each is None else layout.fold(each) for each in (forced_LBFK, gates_LBFK))
        recorder.force(forced, gates, score_share)
        recorder.predict(heads_LHE, layout.fold_mask(route_mask_BF))
        logits_PYV = model(
            input_ids=layout.tokens_PX,
            attention_mask=layout.mask,
            position_ids=layout.positions_PX,
            use_cache=False,
            logits_to_keep=layout.scored,
            **({} if parts is None else {"two_parts": parts}),
        ).logits
        routed = recorder.take(layout.tokens_PX.numel())
    all_logprobs_MV = at_temperature(logits_PYV, extras.temperature).flatten(0, 1)
    targets_BT = sequences.tokens_BS[:, -sequences.response_width :]
    logprobs_BT = all_logprobs_MV[layout.scored_BT, targets_BT]
    if extras.kept_BTV is not None:
        left_BTV = all_logprobs_MV[layout.scored_BT].masked_fill(~extras.kept_BTV, -torch.inf)
        logprobs_BT = logprobs_BT - left_BTV.logsumexp(-1)
    with nullcontext() if extras.entropy_gradient else torch.no_grad():
        entropy_BT = -(all_logprobs_MV.exp() * all_logprobs_MV).sum(-1)[layout.scored_BT]
    top_BTK = None
    if extras.top_tokens_BTK is not None:
        top_BTK = all_logprobs_MV[layout.scored_BT[..., None], extras.top_tokens_BTK]
    if routed is None:
        return Forward(logprobs_BT, entropy_BT, None, None, (), top_BTK)

    def placed(indices_LNK: Tensor) -> Tensor:
        routes_LBFK = layout.spread(indices_LNK, 1).view(len(indices_LNK), *route_mask_BF.shape, -1)
        return routes_LBFK.masked_fill(~route_mask_BF[None, ..., None], NO_ROUTE)

    live_LBFK = placed(routed.live_LNK)
    executed_LBFK = live_LBFK if routed.executed_LNK is routed.live_LNK else placed(routed.executed_LNK)
    return Forward(logprobs_BT, entropy_BT, live_LBFK, executed_LBFK, ((routed, layout),), top_BTK)


def sharing_refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why a model cannot share prompts, in training and in decoding; None if it can.

    Decided once for a model and its copies, by its config, and by a forward of four made-up sequences with and without
    sharing. Each stands twice behind its prompt: if one response could see the other, or an attention had more inputs
    than keys and values (sinks), the two forwards would differ.
    """
    kept = vars(model)  # a copy of the model has it, too
    if "sharing_refusal" not in kept:
        kept["sharing_refusal"] = packing.refusal(model) or _apart(model)
    return cast(str | None, kept["sharing_refusal"])


@torch.no_grad()
def _apart(model: PreTrainedModel) -> str | None:
    index_BS = torch.arange(4 * 12, device=model.device).view(4, 12)
    mask_BS = (index_BS % 12 >= index_BS // 12).long()  # prompts of six tokens to three, then six of a response
    four = Sequences((index_BS * 7 + 3) % model.config.get_text_config().vocab_size, mask_BS, 6)
    rows_B = torch.arange(4, device=model.device).repeat(2)
    twice = four.rows(rows_B)
    fed = packing.shared(twice.tokens_BS, twice.mask_BS, twice.response_width, rows_B)
    plain, shared = (forward(model, twice, "fp32", Extras(routes=False), layout=each) for each in (None, fed))
    apart = float((plain.logprobs_BT - shared.logprobs_BT).abs().mean())
    return None if apart <= _TOLERANCE else f"log-probabilities would differ by {apart:.2g} on average"


def router_losses(
    now: Forward, sequences: Sequences, aux_coefficient: float, z_coefficient: float, per_layer: bool = False
) -> Tensor | float:
    """Return the sum of the load-balancing loss and the router z-loss over all fed tokens, each times its coefficient.

    ``per_layer`` balances every layer by itself. 0 for a dense model, and where both coefficients are 0.
    """
    loss: Tensor | float = 0.0
    if now.executed_LBFK is None:
        return loss
    mask_N = sequences.route_mask_BF.flatten()
    if aux_coefficient > 0:
        executed_LNK = now.executed_LBFK.flatten(1, 2)
        balance = load_balancing_loss(now.router_logits_LNE, executed_LNK, mask_N, per_layer)
        loss = loss + aux_coefficient * balance
    if z_coefficient > 0:
        loss = loss + z_coefficient * z_loss(now.router_logits_LNE, mask_N)
    return loss


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities over the last dimension, fp32; sampler and trainer share the arithmetic."""
    return (logits.float() if temperature == 1 else logits.float() / temperature).log_softmax(-1)


def autocast(device: str, precision: str) -> AbstractContextManager[object]:
    """bf16 arithmetic over fp32 weights for ``precision=bf16``; nothing for ``fp32``."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()

"""Columns as sums of moments, which add up over micro-batches and processes to the columns of a whole mini-batch.

The suite's own functions measure each part. A mean over tokens becomes a sum and a count; a variance becomes the
moments of r − 1 (``verl.ratio_moments``); a rate of expert change becomes counts of experts, so it does not depend
on the split at all. Only the percentile of γ has no moments: γ of each token is stored. Sums are fp64.

Shapes: B responses, S = W + T positions of prompt and response, T response positions, N response tokens, L MoE layers,
F = S − 1 positions fed, K experts a token, E experts, C = K + 1 counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.ops import kl_estimate, log_ratio, product_log_ratio
from steadymoe.bench.training import columns, routing_drift, token_metrics
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.step_rows import Measured, over_layers
from steadymoe.integrations.verl.ratio_moments import ratio_columns, ratio_sums
from steadymoe.models.routing import Routed, log_softmax

LOSS, ROUTER_KL, CHANGED_SLOTS_HISTOGRAM, ENTROPY = names("loss", "router_kl", "changed_slots_histogram", "entropy")
ROLLOUT_CHI2_SEQUENCE, TOKEN_ANY_LAYER_CHANGE_RATE = names("rollout_chi2_sequence", "token_any_layer_change_rate")
TOP1_CHANGE_RATE, ROUTER_MARGIN, ROUTER_CONFIDENCE = names("top1_change_rate", "router_margin", "router_confidence")
REFERENCE_KL, LOAD_MAX_VIOLATION = names("reference_kl", "load_max_violation")
CHANGE = names("expert_change_rate", "expert_set_change_rate")
REPLAY = names("replay_expert_disagreement", "replay_set_disagreement")

# What one part of a mini-batch or rollout adds to its columns. "max …" is pooled by the maximum; "each …", a number per
# token or response, is concatenated; everything else adds up. "mean <column>" is the sum of a mean over tokens,
# "layer <column>" the same in each layer, and "count <column>" a histogram.
Moments = dict[str, Tensor]
_LARGEST = [column.name for column in columns.UPDATE if column.over_updates == "largest"]
# The other columns of ``token_metrics.of_update`` that are means over tokens; a median, say, has no sum.
_MEANS = {*names("clip_fraction", "clip_fraction_low", "clip_fraction_high")}
_MEANS |= {*names("correction_weight", "correction_rejected", "loss_number")}


class Routes(NamedTuple):
    """The experts that the routers of one forward chose, and their probabilities, on the CPU or the model's device."""

    live_LBFK: Tensor
    """The routers' own choice, int16."""
    executed_LBFK: Tensor
    """The experts that ran."""
    logprobs_LBTE: Tensor
    """log of the routers' softmax over all experts at the positions that predict response tokens."""

    @classmethod
    def of(cls, routed: Routed, shape: tuple[int, ...], width: int) -> "Routes":
        """Arrange the routes of a forward over positions of ``shape``, (B, S); the last ``width`` are responses."""
        # The last position predicts nothing.
        live, executed = (values.unflatten(1, shape)[:, :, :-1] for values in (routed.live_LNK, routed.executed_LNK))
        logits = [logits_NE.detach().unflatten(0, shape)[:, -width - 1 : -1] for logits_NE in routed.logits_LNE]
        return cls(live, executed, log_softmax(torch.stack(logits)))


def pooled(parts: Sequence[Moments]) -> Moments:
    """Return the moments of the whole from the moments of its parts; a part without tokens may lack names."""
    whole = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if name.startswith("each "):
            whole[name] = torch.cat(values)
        else:
            whole[name] = torch.stack(values).amax(0) if name.startswith("max ") else torch.stack(values).sum(0)
    return whole


@torch.no_grad()
def update_moments(batch: Batch, output: LossOutput) -> Moments:
    """Return the moments of loss, entropy, ratios, clips and weights of a part of a mini-batch.

    Raises ValueError for a column that is neither made of ratios, nor a maximum, nor a known mean.
    """
    mask_BT = batch.mask_BT.bool()
    sums = {LOSS: output.loss.detach().double()}
    if not mask_BT.any():
        return sums
    numbers, histograms = token_metrics.of_update(batch, output)
    ratios = ratio_sums(batch)
    sums |= ratios | {f"max {name}": numbers.pop(name) for name in _LARGEST if name in numbers}
    sums[f"mean {ENTROPY}"] = batch.get("entropy_BT")[mask_BT].double().sum()
    means = numbers.keys() - ratio_columns(ratios).keys()
    if unknown := sorted(means - _MEANS):
        raise ValueError(f"{unknown[0]}: say in integrations/trl/moments.py how its parts add up")
    sums |= {f"mean {name}": numbers[name].double() * ratios["tokens"] for name in numbers if name in means}
    return sums | {f"count {name}": counts for name, counts in histograms.items()}


@torch.no_grad()
def routing_moments(old: Routes, now: Routes, mask_BT: Tensor, experts: int, replayed: bool) -> Moments:
    """Return how the routers' own choice changed from ``old`` to ``now`` on the response tokens of a part.

    ``replayed`` says whether routes were forced, so that experts ran that the routers did not choose.
    """
    if not mask_BT.any():
        return {}
    tokens = mask_BT.sum().double()
    top1_L = routing_drift.top1_change(old.live_LBFK, now.live_LBFK, old.logprobs_LBTE, now.logprobs_LBTE, mask_BT)
    shift = routing_drift.shift(old.logprobs_LBTE, now.logprobs_LBTE, old.live_LBFK, mask_BT)
    decision = routing_drift.decision(now.logprobs_LBTE, now.live_LBFK, mask_BT)
    sums = {
        "slots_LC": _slots(old.live_LBFK, now.live_LBFK, mask_BT),
        f"mean {TOKEN_ANY_LAYER_CHANGE_RATE}": routing_drift.any_layer(old.live_LBFK, now.live_LBFK, mask_BT).sum(),
        "load_LE": routing_drift.choices(now.live_LBFK, mask_BT, experts).double(),
        f"layer {TOP1_CHANGE_RATE}": top1_L.double() * tokens,
        f"layer {ROUTER_KL}": shift.kl_L.double() * tokens,
        f"layer {ROUTER_MARGIN}": decision.margin_L.double() * tokens,
        f"layer {ROUTER_CONFIDENCE}": decision.confidence_L.double() * tokens,
        "each gamma": shift.gamma_N,
    }
    if replayed:
        sums["slots_replay_LC"] = _slots(now.executed_LBFK, now.live_LBFK, mask_BT)
    return sums


def _slots(one_LBFK: Tensor, other_LBFK: Tensor, mask_BT: Tensor) -> Tensor:
    """Count the response tokens that have 0, 1, … K different experts in each layer, (L, C)."""
    layers = zip(one_LBFK.split(1), other_LBFK.split(1), strict=True)
    return torch.stack([routing_drift.change(one, other, mask_BT).slots_C for one, other in layers])


def update_columns(sums: Moments) -> Measured:
    """Return the columns of one update from the moments of the whole mini-batch."""
    if "tokens" not in sums:
        return Measured({LOSS: sums[LOSS]}, {}, {})
    overall = {LOSS: sums[LOSS]} | _named(sums, "max ") | ratio_columns(sums)
    overall |= {name: value / sums["tokens"] for name, value in _named(sums, "mean ").items()}
    histograms = _named(sums, "count ")
    if "slots_LC" not in sums:
        return Measured(overall, {}, histograms)
    layers = {name: value_L / sums["tokens"] for name, value_L in _named(sums, "layer ").items()}
    layers |= _change_rates(sums["slots_LC"], CHANGE)
    overall |= over_layers(layers)
    overall |= routing_drift.Shift(layers[ROUTER_KL], sums["each gamma"].double()).columns
    if "slots_replay_LC" in sums:
        overall |= over_layers(_change_rates(sums["slots_replay_LC"], REPLAY))
    layers |= routing_drift.load_of(sums["load_LE"]).columns
    histograms[CHANGED_SLOTS_HISTOGRAM] = sums["slots_LC"].sum(0)
    return Measured(overall, layers, histograms)


def _named(sums: Moments, prefix: str) -> Moments:
    return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}


def _change_rates(slots_LC: Tensor, rates: Sequence[str]) -> Moments:
    """Return the rates of expert change and of set change in each layer, (L,), from counts of different experts."""
    tokens_L, experts = slots_LC.sum(-1).double(), slots_LC.shape[1] - 1
    changed_L = (slots_LC * torch.arange(experts + 1, device=slots_LC.device)).sum(-1)
    return dict(zip(rates, (changed_L / (tokens_L * experts), 1 - slots_LC[:, 0] / tokens_L), strict=True))


@torch.no_grad()
def rollout_moments(
    mask_BT: Tensor,
    old_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor | None,
    reference_logprobs_BT: Tensor | None,
    old: Routes | None,
    experts: int,
) -> Moments:
    """Return moments of length, load, and of π_old's distance to the sampler and to the reference model, of a part.

    Tokens whose ``rollout_logprobs_BT`` are nan or infinite are left out of the distance to the sampler and counted.
    """
    is_token_BT = mask_BT.bool()
    sums = {"tokens": is_token_BT.sum().double(), "responses": is_token_BT.any(-1).sum().double()}
    if reference_logprobs_BT is not None:
        sums[f"mean {REFERENCE_KL}"] = (
            kl_estimate(old_logprobs_BT, reference_logprobs_BT, "k3")[is_token_BT].double().sum()
        )
    if rollout_logprobs_BT is not None:
        known_BT = is_token_BT & rollout_logprobs_BT.isfinite()
        sums["missing"] = (is_token_BT & ~known_BT).sum()
        sampler_BT = torch.where(known_BT, rollout_logprobs_BT, old_logprobs_BT)  # log-ratio 0 where missing
        product_B = product_log_ratio(log_ratio(old_logprobs_BT, sampler_BT).double(), known_BT)
        sums |= {"each old": old_logprobs_BT[known_BT].double(), "each sampler": sampler_BT[known_BT].double()}
        sums["each product"] = product_B[known_BT.any(-1)]
    if old is not None and is_token_BT.any():
        sums["load_LE"] = routing_drift.choices(old.live_LBFK, mask_BT, experts).double()
    return sums


def rollout_columns(sums: Moments) -> Measured:
    """Return the columns of a rollout that do not depend on rewards, from the moments of the whole rollout."""
    overall = {name: value / sums["tokens"] for name, value in _named(sums, "mean ").items()}
    if len(sums.get("each old", ())):
        old_1N, sampler_1N = sums["each old"][None], sums["each sampler"][None]
        overall |= token_metrics.of_mismatch(sampler_1N, old_1N, torch.ones_like(old_1N))
        overall[ROLLOUT_CHI2_SEQUENCE] = (2 * sums["each product"]).exp().mean() - 1
    if "load_LE" not in sums:
        return Measured(overall, {}, {})
    load = routing_drift.load_of(sums["load_LE"])
    overall |= over_layers(load.columns) | {LOAD_MAX_VIOLATION: load.max_violation_L.max()}
    return Measured(overall, load.columns, {})

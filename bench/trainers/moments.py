"""Columns as sums of moments, which add up over micro-batches and processes to the columns of a whole mini-batch.

The suite's own functions measure each part. A column that is a mean over tokens becomes a sum and a count; a variance
becomes the moments of r − 1, which lose no digit where the ratio r is 1; a rate of expert change becomes counts of
experts, so that it does not depend on the split at all. Only the percentile of γ has no moments: γ of each token is
kept, one number a token. Sums are fp64.

Shapes: B responses, T response positions, N response tokens, L MoE layers, F positions fed, K experts a token,
E experts, C = K + 1 counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.ops import kl_estimate, log_ratio, product_log_ratio, sequence_log_ratio
from steadymoe.bench.measurement import routing_drift, token_metrics
from steadymoe.bench.training.columns_of_step import Measured

_MISMATCH = ("gap", "rho", "rho²", "rho_sequence²", "extreme", "p", "q", "p²", "q²", "pq")


class Routes(NamedTuple):
    """What the routers of one forward chose, and how sure they were; on the CPU or the model's device."""

    live_LBFK: Tensor
    """The routers' own choice, int16."""
    executed_LBFK: Tensor
    """The experts that ran."""
    logprobs_LBTE: Tensor
    """log of the routers' softmax over all experts where they led to a response token."""


@dataclass(frozen=True)
class Moments:
    """What one part of a mini-batch or rollout adds to its columns."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    """One number a token, one part below the other."""

    def __or__(self, other: "Moments") -> "Moments":
        """Further moments of the same part."""
        return Moments(self.sums | other.sums, self.largest | other.largest, self.values | other.values)

    def cpu(self) -> "Moments":
        """The same on the CPU."""
        return Moments(*({name: each.cpu() for name, each in part.items()} for part in self._parts()))

    def _parts(self) -> tuple[dict[str, Tensor], ...]:
        return self.sums, self.largest, self.values


def pooled(parts: Sequence[Moments]) -> Moments:
    """The moments of the whole from the moments of its parts; a part without tokens may lack names."""

    def joined(of: Sequence[Mapping[str, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
        names = dict.fromkeys(name for part in of for name in part)
        return {name: join([part[name] for part in of if name in part]) for name in names}

    return Moments(
        joined([part.sums for part in parts], lambda values: torch.stack(values).sum(0)),
        joined([part.largest for part in parts], lambda values: torch.stack(values).amax(0)),
        joined([part.values for part in parts], torch.cat),
    )


@torch.no_grad()
def of_update(batch: Batch, output: LossOutput) -> Moments:
    """Loss, entropy, ratios, clips and weights of a part of a mini-batch."""
    mask_BT = batch.mask_BT.bool()
    sums = {"loss": output.loss.detach().double()}
    if not mask_BT.any():
        return Moments(sums)
    tokens = mask_BT.sum().double()
    numbers, histograms = token_metrics.of_update(batch, output)
    log_ratio_BT = log_ratio(batch.logprobs_BT, batch.get("old_logprobs_BT")).double()
    ratio_N = log_ratio_BT[mask_BT].expm1()
    ratio_B = sequence_log_ratio(log_ratio_BT, mask_BT)[mask_BT.any(-1)].expm1()
    sums |= {"tokens": tokens, "responses": mask_BT.any(-1).sum().double()}
    sums |= {"r": ratio_N.sum(), "r²": ratio_N.square().sum(), "s": ratio_B.sum(), "s²": ratio_B.square().sum()}
    sums["entropy"] = batch.get("entropy_BT")[mask_BT].double().sum()
    sums |= {f"mean {name}": numbers[name].double() * tokens for name in numbers if name not in _OF_MOMENTS}
    sums |= {f"count {name}": counts for name, counts in histograms.items()}
    return Moments(sums, {"token_ratio_max": numbers["token_ratio_max"]})


# What ``columns_of_update`` makes from moments; the other columns of ``token_metrics.of_update`` are means over tokens.
_OF_MOMENTS = ("token_ratio_mean", "token_ratio_max", "token_ratio_variance", "sequence_ratio_variance", "ess")


@torch.no_grad()
def of_routing(old: Routes, now: Routes, mask_BT: Tensor, experts: int, replayed: bool) -> Moments:
    """How the routers' own choice changed from ``old`` to ``now`` on the response tokens of a part of a mini-batch."""
    if not mask_BT.any():
        return Moments()
    tokens = mask_BT.sum().double()
    top1_L = routing_drift.top1_change(old.live_LBFK, now.live_LBFK, old.logprobs_LBTE, now.logprobs_LBTE, mask_BT)
    shift = routing_drift.shift(old.logprobs_LBTE, now.logprobs_LBTE, old.live_LBFK, mask_BT)
    decision = routing_drift.decision(now.logprobs_LBTE, now.live_LBFK, mask_BT)
    sums = {
        "slots_LC": _slots(old.live_LBFK, now.live_LBFK, mask_BT),
        "any_layer": routing_drift.any_layer(old.live_LBFK, now.live_LBFK, mask_BT).sum(),
        "load_LE": routing_drift.choices(now.live_LBFK, mask_BT, experts).double(),
        "layer top1_change_rate": top1_L.double() * tokens,
        "layer router_kl": shift.kl_L.double() * tokens,
        "layer router_margin": decision.margin_L.double() * tokens,
        "layer router_confidence": decision.confidence_L.double() * tokens,
    }
    if replayed:
        sums["slots_replay_LC"] = _slots(now.executed_LBFK, now.live_LBFK, mask_BT)
    return Moments(sums, values={"gamma": shift.gamma_N})


def _slots(one_LBFK: Tensor, other_LBFK: Tensor, mask_BT: Tensor) -> Tensor:
    """How many response tokens have 0, 1, … K experts that differ, in each layer, (L, C)."""
    layers = zip(one_LBFK.split(1), other_LBFK.split(1), strict=True)
    return torch.stack([routing_drift.change(one, other, mask_BT).slots_C for one, other in layers])


def columns_of_update(found: Moments) -> Measured:
    """The columns of one update from the moments of the whole mini-batch."""
    sums, overall = found.sums, {"loss": found.sums["loss"]}
    layers: dict[str, Tensor] = {}
    histograms: dict[str, Tensor] = {}
    if "tokens" not in sums:
        return Measured(overall, layers, histograms)
    tokens, responses = sums["tokens"], sums["responses"]
    mean, square = sums["r"] / tokens, sums["r²"] / tokens
    overall |= {
        "entropy": sums["entropy"] / tokens,
        "token_ratio_mean": 1 + mean,
        "token_ratio_max": found.largest["token_ratio_max"],
        "token_ratio_variance": _variance(mean, square),
        "sequence_ratio_variance": _variance(sums["s"] / responses, sums["s²"] / responses),
        "ess": (1 + mean).square() / (1 + 2 * mean + square),
    }
    overall |= {name[5:]: sums[name] / tokens for name in sums if name.startswith("mean ")}
    histograms |= {name[6:]: sums[name] for name in sums if name.startswith("count ")}
    if "slots_LC" not in sums:
        return Measured(overall, layers, histograms)
    changed = _changes(sums["slots_LC"])
    gamma = routing_drift.Shift(sums["layer router_kl"] / tokens, found.values["gamma"].double())
    of_layers = {name[6:]: sums[name] / tokens for name in sums if name.startswith("layer ")}
    overall |= gamma.columns | {name: values_L.mean() for name, values_L in of_layers.items()}
    overall |= {
        "expert_change_rate": changed["expert_L"].mean(),
        "expert_set_change_rate": changed["set_L"].mean(),
        "token_any_layer_change_rate": sums["any_layer"] / tokens,
    }
    if "slots_replay_LC" in sums:
        forced = _changes(sums["slots_replay_LC"])
        overall["replay_expert_disagreement"] = forced["expert_L"].mean()
        overall["replay_set_disagreement"] = forced["set_L"].mean()
    layers |= of_layers | {"expert_change_rate": changed["expert_L"], "expert_set_change_rate": changed["set_L"]}
    layers |= routing_drift.load_of(sums["load_LE"]).columns
    histograms["changed_slots_histogram"] = sums["slots_LC"].sum(0)
    return Measured(overall, layers, histograms)


def _changes(slots_LC: Tensor) -> dict[str, Tensor]:
    """The expert-change rate and the set-change rate of each layer, from counts of experts that differ."""
    tokens_L, experts = slots_LC.sum(-1).double(), slots_LC.shape[1] - 1
    differ_L = (slots_LC * torch.arange(experts + 1, device=slots_LC.device)).sum(-1)
    return {"expert_L": differ_L / (tokens_L * experts), "set_L": 1 - slots_LC[:, 0] / tokens_L}


def _variance(mean: Tensor, square: Tensor) -> Tensor:
    """The variance from the first and the second moment; never below 0."""
    return (square - mean.square()).clamp(min=0)


@torch.no_grad()
def of_rollout(
    mask_BT: Tensor,
    old_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor | None,
    reference_logprobs_BT: Tensor | None,
    old: Routes | None,
    experts: int,
) -> Moments:
    """Length, load, and the distance of π_old from the sampler and from the reference model, of a part of a rollout.

    Tokens whose ``rollout_logprobs_BT`` are nan or infinite are left out of the distance from the sampler and counted.
    """
    keep_BT = mask_BT.bool()
    sums = {"tokens": keep_BT.sum().double(), "responses": keep_BT.any(-1).sum().double()}
    largest = {}
    if reference_logprobs_BT is not None:
        sums["reference_kl"] = kl_estimate(old_logprobs_BT, reference_logprobs_BT, "k3")[keep_BT].double().sum()
    if rollout_logprobs_BT is not None:
        known_BT = keep_BT & rollout_logprobs_BT.isfinite()
        sums["missing"] = (keep_BT & ~known_BT).sum()
        if known_BT.any():
            gap_BT = log_ratio(old_logprobs_BT, rollout_logprobs_BT).double().masked_fill(~known_BT, 0.0)
            gap_N, p_N, q_N = gap_BT[known_BT], old_logprobs_BT[known_BT], rollout_logprobs_BT[known_BT]
            rho_N, p_N, q_N = gap_N.expm1(), p_N.double().exp(), q_N.double().exp()
            product_B = product_log_ratio(gap_BT, known_BT)[known_BT.any(-1)]
            of_gap = gap_N, rho_N, rho_N.square(), (2 * product_B).exp(), gap_N.abs() > math.log(2)
            moments = *of_gap, p_N, q_N, p_N.square(), q_N.square(), p_N * q_N
            sums |= {name: each.double().sum() for name, each in zip(_MISMATCH, moments, strict=True)}
            sums |= {"known": known_BT.sum().double(), "known_responses": known_BT.any(-1).sum().double()}
            largest["rollout_logprob_gap_max"] = gap_N.abs().max()
    if old is not None and keep_BT.any():
        sums["load_LE"] = routing_drift.choices(old.live_LBFK, mask_BT, experts).double()
    return Moments(sums, largest)


def columns_of_rollout(found: Moments) -> Measured:
    """The columns of a rollout that no reward enters, from the moments of the whole rollout."""
    sums, layers, overall = found.sums, {}, dict(found.largest)
    if "reference_kl" in sums:
        overall["reference_kl"] = sums["reference_kl"] / sums["tokens"]
    if "known" in sums:
        mean = {name: sums[name] / sums["known"] for name in _MISMATCH}
        spread = (_variance(mean["p"], mean["p²"]) * _variance(mean["q"], mean["q²"])).sqrt()
        overall |= {
            "rollout_kl_k1": -mean["gap"],
            "rollout_kl_k3": mean["rho"] - mean["gap"],
            "rollout_chi2_token": 2 * mean["rho"] + mean["rho²"],
            "rollout_chi2_sequence": sums["rho_sequence²"] / sums["known_responses"] - 1,
            "rollout_ess": (1 + mean["rho"]).square() / (1 + 2 * mean["rho"] + mean["rho²"]),
            "rollout_extreme_share": mean["extreme"],
            "rollout_probability_correlation": (mean["pq"] - mean["p"] * mean["q"]) / spread,
        }
    if "load_LE" in sums:
        load = routing_drift.load_of(sums["load_LE"])
        layers = load.columns
        overall |= {
            "load_entropy": load.entropy_L.mean(),
            "load_max_violation": load.max_violation_L.max(),
            "dead_experts": load.dead_L.mean(),
        }
    return Measured(overall, layers, {})

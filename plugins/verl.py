"""The losses as verl calls them: chosen by ``steadymoe/<name>``, with numbers in the name and metrics as sums.

verl hands a loss the log-probabilities under the policy and under the old policy, advantages, a mask, and the weights
of its own correction if it has one. Its configuration has no room for the numbers of other losses, so they stand in the
name: ``steadymoe/gspo/clip_low:1e-3/clip_high:2e-3``. verl averages the metrics of a loss over micro-batches of unequal
size, so the metrics here are sums and counts; ``columns`` makes the mean and the variance of the whole from their
averages. Importing this module needs torch and PyYAML alone, and no verl.

Shapes: B responses of a micro-batch, T response positions, N response tokens.
"""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput, PolicyLoss, load, names, ops

PREFIX = "steadymoe/"
# Settings of verl's own losses at their defaults (verl/trainer/config/actor/actor.yaml, 0.9.1).
_OF_VERLS_LOSSES = {
    **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    **{"tau_pos": 1.0, "tau_neg": 1.05},
}
# Our aggregation → verl's ``loss_agg_mode``.
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
_ACTOR = "actor_rollout_ref.actor"


@cache
def named(mode: str) -> PolicyLoss:
    """The loss of ``steadymoe/<name>/<field>:<value>/…``; a name is an algorithm or a preset.

    A value is JSON, or text where it is none; a field of a host is ``host.<field>``. Raises ValueError, in one line,
    for an unknown name, field or value, and for a loss that verl cannot feed.
    """
    name, *words = mode.removeprefix(PREFIX).split("/")
    overrides: dict[str, Any] = {}
    for word in words:
        key, colon, text = word.partition(":")
        outer, _, inner = key.partition(".")
        if not outer or not colon:
            raise ValueError(f"{mode}: a number follows the name as /field:value; got {word!r}")
        overrides[outer] = overrides.get(outer, {}) | {inner: _value(text)} if inner else _value(text)
    try:
        loss = load(name, **overrides)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{mode}: {error}") from error
    if (why := reason_against(loss)) is not None:
        raise ValueError(f"{mode}: {name} {why}")
    return loss


def reason_against(loss: PolicyLoss) -> str | None:
    """What a loss needs that verl does not hand over, as the rest of a sentence; None if verl can compute it."""
    traits = loss.traits
    if traits.whole_minibatch:
        return "needs the whole mini-batch at once, and verl splits it over GPUs and micro-batches"
    if traits.routes:
        return "reads the routers' probabilities, which verl hands to no loss"
    if traits.top_k:
        return f"reads the sampler's {traits.top_k} most likely tokens, which verl hands to no loss"
    zeros_BT = torch.zeros(2, 1)
    batch = Batch(logprobs_BT=zeros_BT, mask_BT=zeros_BT + 1, advantages_BT=zeros_BT, old_logprobs_BT=zeros_BT)
    try:
        loss(batch)
    except ValueError as error:
        instead = "; /anchor:old takes the old policy's" if getattr(loss, "anchor", None) == "rollout" else ""
        return f"cannot be computed from what verl hands over: {error}{instead}"
    return None


def settings(loss: PolicyLoss) -> dict[str, Any]:
    """Fields of verl's actor that must agree with a loss, because verl's KL and entropy terms read them."""
    host: Any = getattr(loss, "host", loss)
    fields = {"loss_agg_mode": _AGGREGATIONS[host.aggregation]}
    return fields | ({"loss_scale_factor": host.constant_length} if host.aggregation == "constant" else {})


def lines(mode: str) -> list[str]:
    """What chooses a loss on verl's command line. Raises ValueError as ``named`` does."""
    chosen = {"policy_loss.loss_mode": mode} | settings(named(mode))
    return [f"{_ACTOR}.{field}={value}" for field, value in chosen.items()]


def policy_loss(
    mode: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss ``mode`` of a micro-batch and its ``sums``, by the signature of verl's losses; tensors are (B, T).

    As verl's own losses, it is the micro-batch's part of the loss of the whole mini-batch, times the number of
    data-parallel processes, by which gradients are averaged. Raises ValueError, in one line, as ``named`` does, and for
    settings of verl that contradict the loss.
    """
    loss = named(mode)
    info: Mapping[str, Any] = {}
    if config is not None:
        _check_settings(mode, loss, loss_agg_mode, config)
        info = config.get("global_batch_info") or {}
    batch = Batch(
        logprobs_BT=log_prob,
        mask_BT=response_mask,
        advantages_BT=advantages,
        old_logprobs_BT=old_log_prob,
        weights_BT=rollout_is_weights,
        responses=info.get("global_batch_size"),
        tokens=info.get("batch_num_tokens"),
    )
    output = loss(batch)
    return output.loss * info.get("dp_size", 1), sums(batch, output)


@torch.no_grad()
def sums(batch: Batch, output: LossOutput) -> dict[str, float]:
    """What a micro-batch adds to the moments of the token ratio r and the sequence ratio s, and to the clipped tokens.

    ``ratio_1`` and ``ratio_2`` are Σ (r − 1) and Σ (r − 1)² over response tokens, which lose no digit where r is 1;
    ``sequence_ratio_1`` and ``sequence_ratio_2`` are the same sums of s over responses.
    """
    mask_BT = batch.mask_BT.bool()
    has_token_B = mask_BT.any(-1)
    log_ratio_BT = ops.log_ratio(batch.logprobs_BT, batch.get("old_logprobs_BT")).double()
    ratio_N = log_ratio_BT[mask_BT].expm1()
    ratio_B = ops.sequence_log_ratio(log_ratio_BT, mask_BT)[has_token_B].expm1()
    found = {
        "tokens": mask_BT.sum(),
        "responses": has_token_B.sum(),
        "ratio_1": ratio_N.sum(),
        "ratio_2": ratio_N.square().sum(),
        "sequence_ratio_1": ratio_B.sum(),
        "sequence_ratio_2": ratio_B.square().sum(),
    }
    clips = ("clipped_low", "clipped_high")
    found |= {name: output.metrics[f"{name}_BT"].sum() for name in clips if f"{name}_BT" in output.metrics}
    values = torch.stack([value.double() for value in found.values()]).tolist()  # one wait for the GPU
    return {PREFIX + name: value for name, value in zip(found, values, strict=True)}


def columns(logged: Mapping[str, float]) -> dict[str, float]:
    """The suite's columns (docs/metrics.md) from verl's averages of ``sums``; empty without them.

    Exact for the micro-batches of one update, however unequal. The updates of one step are pooled, and an update with
    more micro-batches than others weighs less.
    """
    prefix = next((each for each in ("actor/", "") if f"{each}{PREFIX}tokens" in logged), None)
    if prefix is None:
        return {}
    mean = {
        key.removeprefix(prefix + PREFIX): value for key, value in logged.items() if key.startswith(prefix + PREFIX)
    }
    if not mean["tokens"]:
        return {}
    first, second = mean["ratio_1"] / mean["tokens"], mean["ratio_2"] / mean["tokens"]
    of_s, of_s2 = (mean[f"sequence_ratio_{power}"] / mean["responses"] for power in (1, 2))
    found = {
        "token_ratio_mean": 1 + first,
        "token_ratio_variance": max(second - first**2, 0.0),
        "sequence_ratio_variance": max(of_s2 - of_s**2, 0.0),
        "ess": (1 + first) ** 2 / (1 + 2 * first + second),
    }
    if "clipped_low" in mean:
        low, high = (mean[f"clipped_{edge}"] / mean["tokens"] for edge in ("low", "high"))
        found |= {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
    return found


class Registry(dict[str, Any]):
    """verl's registry of losses, which makes a loss of ours with other numbers when it is asked for."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).startswith(PREFIX)

    def __missing__(self, name: str) -> Any:
        if not name.startswith(PREFIX):
            raise KeyError(name)
        named(name)  # an unknown name or number is refused here
        self[name] = partial(policy_loss, name)
        return self[name]


def register(core_algos: Any) -> None:
    """Add all algorithms and presets to the losses of the module ``verl.trainer.ppo.core_algos``.

    A loss that verl cannot feed is registered too, and says why when it is called. Raises AttributeError where that
    module keeps its losses elsewhere.
    """
    registry = Registry(core_algos.POLICY_LOSS_REGISTRY)
    for name in names(presets=True):
        registry[PREFIX + name] = partial(policy_loss, PREFIX + name)
    core_algos.POLICY_LOSS_REGISTRY = registry


def _check_settings(mode: str, loss: PolicyLoss, loss_agg_mode: str, config: Any) -> None:
    """Raise ValueError for settings of verl that the loss would drop, or that its KL and entropy terms lack."""
    for name, usual in _OF_VERLS_LOSSES.items():
        if config.get(name, usual) not in (usual, None):
            raise ValueError(
                f"{_ACTOR}.{name}={config.get(name)} belongs to verl's own losses; leave it out, and write numbers "
                f"into the name: {mode}/field:value"
            )
    given = {"loss_agg_mode": loss_agg_mode, "loss_scale_factor": config.get("loss_scale_factor")}
    for name, value in settings(loss).items():
        if given[name] != value:
            raise ValueError(
                f"{mode} needs {_ACTOR}.{name}={value}, which verl's KL and entropy terms read; got {given[name]}"
            )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

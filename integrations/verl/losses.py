"""Adapt the losses to verl 0.9: names with numbers (``steadymoe/gspo/clip_low:1e-3``), and metrics as sums.

verl passes a loss the log-probabilities under the policy and the old policy, advantages, a mask, and the weights of its
own correction. Its config has no room for the numbers of other losses, so they are part of the name. It averages
metrics over micro-batches of unequal size, so metrics are sums here, and ``columns`` computes means and variances of
the whole from their averages. Importing this module needs torch and PyYAML, and no verl.

Shapes: B responses of a micro-batch, T response positions.
"""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput, PolicyLoss, load, names
from steadymoe.integrations.verl import ratio_moments
from steadymoe.integrations.verl.requirements import missing

PREFIX = "steadymoe/"
# Settings of verl's own losses at their defaults (verl/trainer/config/actor/actor.yaml, 0.9.1).
_VERL_DEFAULTS = {
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
    """Return the loss of ``steadymoe/<name>/<field>:<value>/…``; a name is an algorithm or a preset.

    A value is JSON or else text; a field of a host is ``host.<field>``. Raises ValueError, in one line, for an unknown
    name, field or value, for a name without ``PREFIX``, and for a loss that verl cannot feed.
    """
    if not mode.startswith(PREFIX):  # verl has losses of its own, and a gspo among them
        raise ValueError(f"{mode}: the names of these losses begin with {PREFIX}, as {PREFIX}{mode}")
    name, *settings = mode.removeprefix(PREFIX).split("/")
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, colon, text = setting.partition(":")
        outer, _, inner = key.partition(".")
        if not outer or not colon:
            raise ValueError(f"{mode}: a number follows the name as /field:value; got {setting!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        overrides[outer] = overrides.get(outer, {}) | {inner: value} if inner else value
    try:
        loss = load(name, **overrides)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{mode}: {error}") from error
    if (reason := refusal(loss)) is not None:
        raise ValueError(f"{mode}: {name} {reason}")
    return loss


def refusal(loss: PolicyLoss) -> str | None:
    """Return what a loss needs and verl does not provide, as the end of a sentence; None if verl can compute it."""
    reason = missing(loss, {"old_logprobs_BT"}, is_split=True)
    if reason is not None and "rollout_logprobs_BT" in reason and getattr(loss, "anchor", None) == "rollout":
        reason += "; /anchor:old uses the old policy's"
    return reason


def settings(loss: PolicyLoss) -> dict[str, Any]:
    """Return the fields of verl's actor that must agree with a loss, because verl's KL and entropy terms read them."""
    host: Any = getattr(loss, "host", loss)
    fields = {"loss_agg_mode": _AGGREGATIONS[host.aggregation]}
    return fields | ({"loss_scale_factor": host.constant_length} if host.aggregation == "constant" else {})


def lines(mode: str) -> list[str]:
    """Return the arguments that choose a loss on verl's command line. Raises ValueError as ``named`` does."""
    fields = {"policy_loss.loss_mode": mode} | settings(named(mode))
    return [f"{_ACTOR}.{field}={value}" for field, value in fields.items()]


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
    """Return the loss ``mode`` of a micro-batch and its ``sums``; the signature is verl's, tensors are (B, T).

    As verl's own losses, the value is the micro-batch's part of the mini-batch's loss, times the number of
    data-parallel processes, which average gradients. Raises ValueError as ``named`` does, and for settings of verl that
    contradict the loss.
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
    """Return the ``ratio_sums`` of a micro-batch and its number of clipped tokens, under names for verl's log."""
    values = ratio_moments.ratio_sums(batch)
    for name in ("clipped_low", "clipped_high"):
        if f"{name}_BT" in output.metrics:
            values[name] = output.metrics[f"{name}_BT"].sum().double()
    numbers = torch.stack(list(values.values())).tolist()  # one wait for the GPU
    return {PREFIX + name: number for name, number in zip(values, numbers, strict=True)}


def columns(logged: Mapping[str, float]) -> dict[str, float]:
    """Return the suite's columns (docs/metrics.md) from verl's averages of ``sums``; empty without them.

    Exact for the micro-batches of one update, however unequal. The updates of one step are pooled, and an update with
    more micro-batches than others weighs less. Raises KeyError for a sum that is missing.
    """
    prefix = f"actor/{PREFIX}" if f"actor/{PREFIX}tokens" in logged else PREFIX
    means = {name.removeprefix(prefix): value for name, value in logged.items() if name.startswith(prefix)}
    if not means.get("tokens"):
        return {}
    ratios: dict[str, float] = ratio_moments.ratio_columns(means)
    if "clipped_low" in means:
        low, high = (means[name] / means["tokens"] for name in ("clipped_low", "clipped_high"))
        ratios |= {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
    return ratios


class Registry(dict[str, Any]):
    """verl's registry of losses, extended by names that carry numbers."""

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

    A loss that verl cannot feed is registered too, and raises ValueError with the reason when called. Raises
    AttributeError if the module keeps its losses elsewhere.
    """
    registry = Registry(core_algos.POLICY_LOSS_REGISTRY)
    for name in names(presets=True):
        registry[PREFIX + name] = partial(policy_loss, PREFIX + name)
    core_algos.POLICY_LOSS_REGISTRY = registry


def _check_settings(mode: str, loss: PolicyLoss, loss_agg_mode: str, config: Any) -> None:
    """Raise ValueError for settings of verl that the loss would drop, or that verl's KL and entropy terms lack."""
    for name, default in _VERL_DEFAULTS.items():
        if config.get(name, default) not in (default, None):
            raise ValueError(
                f"{_ACTOR}.{name}={config.get(name)} is a setting of verl's own losses; leave it out, and append "
                f"numbers to the name: {mode}/field:value"
            )
    given = {"loss_agg_mode": loss_agg_mode, "loss_scale_factor": config.get("loss_scale_factor")}
    for name, value in settings(loss).items():
        if given[name] != value:
            raise ValueError(
                f"{mode} needs {_ACTOR}.{name}={value}, which verl's KL and entropy terms read; got {given[name]}"
            )

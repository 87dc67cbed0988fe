"""The audit without a model: each loss's gradient with respect to the log-probabilities of a bundle.

Every loss of the suite is a function of the same log-probabilities, so ∂loss/∂log π_θ says what it asks of each token:
the backward through a model only follows. What one model makes of it, and how its tokens share weights, is not seen.

Shapes: B responses of a mini-batch, T response positions, N response tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import yaml
from scipy.stats import rankdata
from torch import Tensor

from steadymoe import algorithms
from steadymoe.algorithms import Batch, LossOutput, PolicyLoss
from steadymoe.algorithms.advantages import GroupMeanStd
from steadymoe.bench.bundles.bundle import BadBundle, Bundle
from steadymoe.bench.check.derivatives import gradient
from steadymoe.bench.config.names import CONF
from steadymoe.bench.report import tables
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Bounds, Estimate, mean_over_seeds

_ADVANTAGES = CONF / "advantage"
_SHARE: Bounds = (0.0, 1.0)
DECILES = tuple(f"mass_decile_{number}" for number in range(1, 11))
# The numbers of one loss on one mini-batch, and the ends of what each can be.
MEASURES: dict[str, Bounds] = {
    "without_gradient": _SHARE,
    "clip_low": _SHARE,
    "clip_high": _SHARE,
    "ess_tokens": _SHARE,
    "ess_sequences": _SHARE,
    "norm": POSITIVE,
    **dict.fromkeys(DECILES, _SHARE),
}
COSINE = "cosine"
_SHOWN = [name for name in MEASURES if name not in DECILES]


@dataclass(frozen=True)
class Audited:
    """Estimates over the mini-batches of a bundle."""

    by_loss: Mapping[str, Mapping[str, Estimate]]
    """Name of a loss → measure → estimate; a measure that the loss does not have is left out."""
    cosines: Mapping[tuple[str, str], Estimate]
    """Two losses → the cosine of their gradients."""


def losses(names: Sequence[str], bundle: Bundle, advantage: object = None) -> dict[str, PolicyLoss]:
    """The named losses with the numbers of their YAML.

    Raises BadBundle for an unknown name, one that stands twice, and a loss that reads what the bundle does not hold.
    """
    if len(set(names)) != len(names):
        raise BadBundle(f"an algorithm is named twice: {', '.join(names)}")
    (first, *_) = batches(bundle, advantage)
    found = {}
    for name in names:
        try:
            found[name] = algorithms.load(name)
        except ValueError as error:
            raise BadBundle(str(error)) from error
        try:
            gradient(found[name], first)
        except ValueError as error:
            raise BadBundle(f"{name}: {error}") from error
    return found


def advantage(name: str | None) -> object:
    """The advantage of ``conf/advantage/<name>.yaml``; None for None. Raises BadBundle for an unknown name."""
    if name is None:
        return None
    known = sorted(path.stem for path in _ADVANTAGES.glob("*.yaml"))
    if name not in known:
        raise BadBundle(f"unknown advantage {name!r}; choose from {', '.join(known)}")
    return algorithms.build(yaml.safe_load((_ADVANTAGES / f"{name}.yaml").read_text()))


def batches(bundle: Bundle, advantage: object = None) -> list[Batch]:
    """What a loss is given of each mini-batch. Raises BadBundle without log-probabilities of the current policy.

    ``advantage`` is an object of ``steadymoe.algorithms.advantages`` that makes advantages of the rewards; None for
    the bundle's own, or for GRPO's where it has none.
    """
    needed = "the log-probabilities of the current policy (at the old policy: a copy of old_logprobs_BT)"
    logprobs_BT, mask_BT = bundle.get("logprobs_BT", needed), bundle.mask_BT
    advantages_BT = _advantages(bundle, advantage)
    if not (advantages_BT * mask_BT).any():
        raise BadBundle("every advantage is 0: no loss has a gradient")
    optional = {
        name: getattr(bundle, name) for name in ("old_logprobs_BT", "rollout_logprobs_BT", "router_log_ratio_LBTK")
    }
    whole = Batch(
        logprobs_BT=logprobs_BT,
        mask_BT=mask_BT,
        advantages_BT=advantages_BT,
        groups_B=bundle.groups_B.long(),
        **optional,
    )
    return [_rows(whole, rows_M) for rows_M in bundle.rows_of_minibatches()]


def audit(bundle: Bundle, named: Mapping[str, PolicyLoss], advantage: object = None) -> Audited:
    """The measures of each loss, and the cosine of each two, with intervals over mini-batches (Student's t).

    Raises BadBundle for a loss whose gradient is not finite, or is 0 on every token of the bundle.
    """
    parts = batches(bundle, advantage)
    decile_BT = _deciles(bundle)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in named}
    pairs: dict[tuple[str, str], list[float]] = {pair: [] for pair in itertools.combinations(named, 2)}
    for batch, rows_M in zip(parts, bundle.rows_of_minibatches(), strict=True):
        gradients = {}
        for name, loss in named.items():
            found_BT, output = gradient(loss, batch)
            if not found_BT.isfinite().all():
                raise BadBundle(f"{name}: the gradient is not finite")
            gradients[name] = found_BT.double()
            for measure, value in measures(gradients[name], batch, output, decile_BT[rows_M]).items():
                found[name].setdefault(measure, []).append(value)
        for one, other in pairs:
            pairs[one, other].append(_cosine(gradients[one], gradients[other]))
    for name, numbers in found.items():
        if not any(numbers["norm"]):
            raise BadBundle(f"{name}: the gradient is 0 on every token of the bundle; leave it out")
    return Audited(
        {name: {key: _over(values, MEASURES[key]) for key, values in each.items()} for name, each in found.items()},
        {pair: _over(values, DIFFERENCE) for pair, values in pairs.items()},
    )


def measures(gradient_BT: Tensor, batch: Batch, output: LossOutput, decile_BT: Tensor) -> dict[str, float]:
    """The numbers of one loss on one mini-batch; nan where the gradient is 0 throughout.

    ``without_gradient``: the share of tokens whose gradient is 0. ``clip_low`` and ``clip_high``: the shares of tokens
    that the loss marks as clipped. ``ess_tokens``: (Σw)²/(N Σw²) of the weights w = |gradient / advantage| of tokens
    with an advantage; ``ess_sequences``: (ΣW)²/(B ΣW²) of the sums W of w over responses. ``norm``: the root of the
    summed squares. ``mass_decile_d``: the share of Σ|gradient| on the tokens in decile d of the old probability.
    """
    mask_BT = batch.mask_BT.bool()
    found_N = gradient_BT[mask_BT]
    numbers = {"without_gradient": float((found_N == 0).double().mean())}
    for end in ("low", "high"):
        if f"clipped_{end}_BT" in output.metrics:
            marks_BT = output.metrics[f"clipped_{end}_BT"].expand_as(mask_BT)
            numbers[f"clip_{end}"] = float(marks_BT[mask_BT].double().mean())
    has_BT = mask_BT & (batch.advantages_BT != 0)
    weights_BT = torch.where(has_BT, gradient_BT / batch.advantages_BT.double(), 0.0).abs()
    numbers["ess_tokens"] = _ess(weights_BT[has_BT])
    numbers["ess_sequences"] = _ess(weights_BT.sum(-1)[has_BT.any(-1)])
    numbers["norm"] = float(found_N.norm())
    total = float(found_N.abs().sum())
    by_decile = torch.zeros(10, dtype=torch.float64).index_add(0, decile_BT[mask_BT], found_N.abs()).tolist()
    return numbers | {name: mass / total if total else math.nan for name, mass in zip(DECILES, by_decile, strict=True)}


def table(audited: Audited) -> pd.DataFrame:
    """One row for each estimate: algorithm, other (of a cosine), measure, mean, low, high, n."""
    rows = [
        {"algorithm": name, "other": "", "measure": measure, **vars(estimate)}
        for name, each in audited.by_loss.items()
        for measure, estimate in each.items()
    ]
    rows += [
        {"algorithm": one, "other": other, "measure": COSINE, **vars(estimate)}
        for (one, other), estimate in audited.cosines.items()
    ]
    return pd.DataFrame(rows)


def text(audited: Audited) -> str:
    """The same for a terminal: measures of each loss, cosines, and means of the mass by decile."""
    none = Estimate(math.nan, math.nan, math.nan, 0)
    first = [
        {"algorithm": name} | {measure: str(each.get(measure, none)) for measure in _SHOWN}
        for name, each in audited.by_loss.items()
    ]
    last = [
        {"mass by decile of old probability": name}
        | {
            str(place): str(Estimate(each[key].mean, math.nan, math.nan, each[key].n))
            for place, key in enumerate(DECILES, start=1)
        }
        for name, each in audited.by_loss.items()
    ]
    parts = [tables.to_markdown(pd.DataFrame(first)), tables.to_markdown(pd.DataFrame(last))]
    if audited.cosines:
        pairs = [{"cosine of": f"{one}, {other}", "": str(each)} for (one, other), each in audited.cosines.items()]
        parts.insert(1, tables.to_markdown(pd.DataFrame(pairs)))
    return "\n\n".join(parts)


def _advantages(bundle: Bundle, advantage: object) -> Tensor:
    """(B, T): the bundle's own, or made of its rewards."""
    if advantage is None and bundle.advantages_BT is not None:
        return bundle.advantages_BT
    if advantage is None and bundle.responses < 2:
        raise BadBundle("groups of one response have no advantage of their own: the bundle needs advantages_BT")
    made = GroupMeanStd() if advantage is None else advantage
    assert callable(made)
    lengths_PG = bundle.mask_BT.sum(-1).view(-1, bundle.responses)
    try:
        advantages_PG = made(bundle.rewards_B.view(lengths_PG.shape), lengths_PG)
    except ValueError as error:
        raise BadBundle(str(error)) from error
    if not advantages_PG.isfinite().all():
        raise BadBundle(f"groups of {bundle.responses} responses are too few for this advantage: it is not finite")
    return advantages_PG.flatten()[:, None] * bundle.mask_BT


def _rows(whole: Batch, rows_M: Tensor) -> Batch:
    """The rows of one mini-batch."""
    changes = {}
    for each in whole.__dataclass_fields__.values():
        letters, values = each.metadata.get("dimensions"), getattr(whole, each.name)
        if letters and values is not None:
            changes[each.name] = values.index_select(letters.index("B"), rows_M)
    return Batch(**changes)


def _deciles(bundle: Bundle) -> Tensor:
    """The decile of each token's old probability among all tokens of the bundle, (B, T), 0 to 9; ties share one."""
    old_BT = bundle.rollout_logprobs_BT if bundle.old_logprobs_BT is None else bundle.old_logprobs_BT
    if old_BT is None:
        raise BadBundle("the bundle has no old_logprobs_BT and no rollout_logprobs_BT: it needs one")
    mask_BT = bundle.mask_BT.bool()
    ranks_N = rankdata(old_BT[mask_BT].numpy())
    decile_N = np.clip(np.floor((ranks_N - 0.5) / len(ranks_N) * 10), 0, 9)
    return torch.zeros_like(mask_BT, dtype=torch.long).masked_scatter(mask_BT, torch.from_numpy(decile_N).long())


def _ess(weights_N: Tensor) -> float:
    squares = float(weights_N.square().sum())
    return float(weights_N.sum()) ** 2 / (len(weights_N) * squares) if squares else math.nan


def _cosine(one_BT: Tensor, other_BT: Tensor) -> float:
    norms = float(one_BT.norm() * other_BT.norm())
    return float((one_BT * other_BT).sum()) / norms if norms else math.nan


def _over(values: Sequence[float], bounds: Bounds) -> Estimate:
    """The mean over the mini-batches that have the number."""
    return mean_over_seeds([value for value in values if not math.isnan(value)], bounds=bounds)

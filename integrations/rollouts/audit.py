"""The audit without a model: each loss's gradient with respect to the log-probabilities of a bundle.

Every loss of the suite is a function of the same log-probabilities, so ∂loss/∂log π_θ says how far it pushes each
token. Only the backward through a model is missing: tokens that share weights can help or hinder each other.

Shapes: B responses of a mini-batch, T response positions, N response tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from steadymoe import algorithms, conf
from steadymoe.algorithms import Batch, LossOutput, PolicyLoss
from steadymoe.algorithms.advantages import GroupMeanStd
from steadymoe.bench.check.derivatives import gradient
from steadymoe.bench.report import write
from steadymoe.bench.statistics.estimates import DIFFERENCE, POSITIVE, Bounds, Estimate, mean_over_seeds
from steadymoe.integrations.rollouts.bundle import BadBundle, Bundle

DECILES = tuple(f"mass_decile_{number}" for number in range(1, 11))
_SHOWN = ("without_gradient", "clip_low", "clip_high", "ess_tokens", "ess_sequences", "norm")
# The bounds of measures that are no share.
_BOUNDS: dict[str, Bounds] = {"norm": POSITIVE, "cosine": DIFFERENCE}


def losses(names: Sequence[str]) -> dict[str, PolicyLoss]:
    """Build the named losses with the numbers of their YAML. Raises BadBundle for an unknown or repeated name."""
    if len(set(names)) != len(names):
        raise BadBundle(f"an algorithm is named twice: {', '.join(names)}")
    try:
        return {name: algorithms.load(name) for name in names}
    except ValueError as error:
        raise BadBundle(str(error)) from error


def load_advantage(name: str | None) -> object:
    """Build the advantage of ``conf/advantage.yaml``; None for None. Raises BadBundle for an unknown name."""
    if name is None:
        return None
    try:
        return algorithms.build(conf.read("advantage", name))
    except ValueError as error:
        raise BadBundle(str(error)) from error


def batches(bundle: Bundle, advantage: object = None) -> list[Batch]:
    """Return what a loss receives of each mini-batch. Raises BadBundle if all advantages are 0.

    ``advantage`` (``steadymoe.algorithms.advantages``) makes advantages of the rewards. Without it they are the
    bundle's own, or GRPO's if it has none.
    """
    fields = {name: values for name, values in vars(bundle).items() if name not in ("rewards_B", "minibatches_B")}
    fields["advantages_BT"] = _advantages(bundle, advantage)
    if not (fields["advantages_BT"] * bundle.mask_BT).any():
        raise BadBundle("every advantage is 0: no loss has a gradient")
    return [
        Batch(**{name: values[rows_M] for name, values in fields.items() if values is not None})
        for rows_M in bundle.minibatches()
    ]


def audit(bundle: Bundle, named: Mapping[str, PolicyLoss], advantage: object = None) -> pd.DataFrame:
    """Measure each loss, and the cosine of each pair, with intervals over mini-batches (Student's t).

    Returns a row per estimate: algorithm, other (of a cosine), measure, mean, low, high, n. A mini-batch where a
    measure is undefined does not count. Raises BadBundle for a loss that reads what the bundle does not hold, and for
    a gradient that is not finite, or 0 on every token.
    """
    decile_BT = _deciles(bundle)
    values: dict[tuple[str, str, str], list[float]] = {}
    for batch, rows_M in zip(batches(bundle, advantage), bundle.minibatches(), strict=True):
        gradients = {}
        for name, loss in named.items():
            try:
                gradient_MT, output = gradient(loss, batch)
            except ValueError as error:
                raise BadBundle(f"{name}: {error}") from error
            if not gradient_MT.isfinite().all():
                raise BadBundle(f"{name}: the gradient is not finite")
            gradients[name] = gradient_MT.double()
            for measure, value in measures(gradients[name], batch, output, decile_BT[rows_M]).items():
                values.setdefault((name, "", measure), []).append(value)
        for one, other in itertools.combinations(named, 2):
            cosine = torch.cosine_similarity(gradients[one].flatten(), gradients[other].flatten(), 0, eps=0)
            values.setdefault((one, other, "cosine"), []).append(float(cosine))
    for name in named:
        if not any(values[name, "", "norm"]):
            raise BadBundle(f"{name}: the gradient is 0 on every token of the bundle; leave it out")
    rows = []
    for (name, other, measure), measured in values.items():
        known = [value for value in measured if not math.isnan(value)]
        estimate = mean_over_seeds(known, bounds=_BOUNDS.get(measure, (0.0, 1.0)))
        rows.append({"algorithm": name, "other": other, "measure": measure} | vars(estimate))
    return pd.DataFrame(rows).sort_values("other", key=lambda other: other != "", kind="stable", ignore_index=True)


def measures(gradient_BT: Tensor, batch: Batch, output: LossOutput, decile_BT: Tensor) -> dict[str, float]:
    """Return the numbers of one loss on one mini-batch; nan where the gradient is 0 throughout.

    ``without_gradient``: share of tokens with gradient 0. ``clip_low``, ``clip_high``: shares of tokens that the loss
    marks as clipped. ``ess_tokens``: (Σw)²/(N Σw²) of the weights w = |gradient / advantage| of tokens with an
    advantage; ``ess_sequences``: the same of the sums of w over responses. ``norm``: Euclidean.
    ``mass_decile_d``: share of Σ|gradient| on the tokens in decile d of the old probability.
    """
    mask_BT = batch.mask_BT.bool()
    gradient_N = gradient_BT[mask_BT]
    numbers = {"without_gradient": float((gradient_N == 0).double().mean())}
    for end in ("low", "high"):
        if f"clipped_{end}_BT" in output.metrics:
            clipped_BT = output.metrics[f"clipped_{end}_BT"].expand_as(mask_BT)
            numbers[f"clip_{end}"] = float(clipped_BT[mask_BT].double().mean())
    has_BT = mask_BT & (batch.advantages_BT != 0)
    weights_BT = torch.where(has_BT, gradient_BT / batch.advantages_BT.double(), 0.0).abs()
    numbers["ess_tokens"] = _ess(weights_BT[has_BT])
    numbers["ess_sequences"] = _ess(weights_BT.sum(-1)[has_BT.any(-1)])
    numbers["norm"] = float(gradient_N.norm())
    by_decile = torch.zeros(10, dtype=torch.float64).index_add(0, decile_BT[mask_BT], gradient_N.abs())
    return numbers | dict(zip(DECILES, (by_decile / gradient_N.abs().sum()).tolist(), strict=True))


def text(audited: pd.DataFrame) -> str:
    """Return an audit as Markdown tables: measures of each loss, cosines, and the mean mass by decile."""
    estimates = [str(Estimate(*row)) for row in audited[["mean", "low", "high", "n"]].itertuples(index=False)]
    is_pair, shown = audited["other"] != "", audited.assign(shown=estimates)
    wide = shown[~is_pair].pivot(index="algorithm", columns="measure", values="shown").fillna("–")
    wide = wide.loc[audited["algorithm"].unique()].reset_index()
    parts = [wide[["algorithm", *(name for name in _SHOWN if name in wide)]]]
    if is_pair.any():
        pairs = shown[is_pair]
        parts.append(pd.DataFrame({"cosine of": pairs["algorithm"] + ", " + pairs["other"], "": pairs["shown"]}))
    deciles = wide[["algorithm", *DECILES]].replace(r" \[.*", "", regex=True)  # without their intervals
    parts.append(deciles.set_axis(["mass by decile of old probability", *map(str, range(1, 11))], axis=1))
    return "\n\n".join(write.to_markdown(part) for part in parts)


def _advantages(bundle: Bundle, advantage: Any) -> Tensor:
    """Return the bundle's advantages, (B, T), or compute them from its rewards."""
    if advantage is None and bundle.advantages_BT is not None:
        return bundle.advantages_BT
    if advantage is None and bundle.responses < 2:
        raise BadBundle(
            "GRPO's advantage needs two responses or more per group; add a column advantages, or --advantage"
        )
    lengths_PG = bundle.mask_BT.sum(-1).view(-1, bundle.responses)
    try:
        advantages_PG = (advantage or GroupMeanStd())(bundle.rewards_B.view(lengths_PG.shape), lengths_PG)
    except ValueError as error:
        raise BadBundle(str(error)) from error
    if not advantages_PG.isfinite().all():
        raise BadBundle(f"groups of {bundle.responses} responses are too few for this advantage: it is not finite")
    return torch.as_tensor(advantages_PG.flatten()[:, None] * bundle.mask_BT)


def _deciles(bundle: Bundle) -> Tensor:
    """Return the decile of each token's old probability among all tokens, (B, T), 0 to 9; ties share one."""
    old_BT = bundle.rollout_logprobs_BT if bundle.old_logprobs_BT is None else bundle.old_logprobs_BT
    assert old_BT is not None  # bundle.read demands one of the two
    mask_BT = bundle.mask_BT.bool()
    ranks_N = rankdata(old_BT[mask_BT].numpy())
    decile_N = np.clip(np.floor((ranks_N - 0.5) / len(ranks_N) * 10), 0, 9)
    return torch.zeros_like(bundle.mask_BT).masked_scatter(mask_BT, torch.from_numpy(decile_N).long())


def _ess(weights_N: Tensor) -> float:
    squares = float(weights_N.square().sum())
    return float(weights_N.sum()) ** 2 / (len(weights_N) * squares) if squares else math.nan

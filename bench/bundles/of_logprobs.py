"""The audit without a model: each loss's gradient with respect to the log-probabilities of a bundle.

Every loss of the suite is a function of the same log-probabilities, so ∂loss/∂log π_θ says what it asks of each token:
the backward through a model only follows. What one model makes of it, and how its tokens share weights, is not seen.

Shapes: B responses of a mini-batch, T response positions, N response tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

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

DECILES = tuple(f"mass_decile_{number}" for number in range(1, 11))
SHOWN = ("without_gradient", "clip_low", "clip_high", "ess_tokens", "ess_sequences", "norm")
COSINE = "cosine"
# The ends of what a measure can be; of all others 0 and 1.
_BOUNDS: dict[str, Bounds] = {"norm": POSITIVE, COSINE: DIFFERENCE}


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
    known = {path.stem: path for path in sorted((CONF / "advantage").glob("*.yaml"))}
    if name not in known:
        raise BadBundle(f"unknown advantage {name!r}; choose from {', '.join(known)}")
    return algorithms.build(yaml.safe_load(known[name].read_text()))


def batches(bundle: Bundle, advantage: object = None) -> list[Batch]:
    """What a loss is given of each mini-batch. Raises BadBundle without log-probabilities of the current policy.

    ``advantage`` is an object of ``steadymoe.algorithms.advantages`` that makes advantages of the rewards; None for
    the bundle's own, or for GRPO's where it has none.
    """
    needed = "the log-probabilities of the current policy (at the old policy: a copy of old_logprobs_BT)"
    fields = {
        "logprobs_BT": bundle.get("logprobs_BT", needed),
        "mask_BT": bundle.mask_BT,
        "advantages_BT": _advantages(bundle, advantage),
        "groups_B": bundle.groups_B.long(),
        "old_logprobs_BT": bundle.old_logprobs_BT,
        "rollout_logprobs_BT": bundle.rollout_logprobs_BT,
        "router_log_ratio_LBTK": bundle.router_log_ratio_LBTK,
    }
    held: dict[str, Any] = {name: values for name, values in fields.items() if values is not None}
    if not (held["advantages_BT"] * bundle.mask_BT).any():
        raise BadBundle("every advantage is 0: no loss has a gradient")
    return [
        Batch(**{name: held[name].index_select(name.rpartition("_")[2].index("B"), rows_M) for name in held})
        for rows_M in bundle.rows_of_minibatches()
    ]


def audit(bundle: Bundle, named: Mapping[str, PolicyLoss], advantage: object = None) -> pd.DataFrame:
    """The measures of each loss, and the cosine of each two, with intervals over mini-batches (Student's t).

    A row for each estimate: algorithm, other (of a cosine), measure, mean, low, high, n. A mini-batch without a number
    is left out. Raises BadBundle for a loss whose gradient is not finite, or is 0 on every token of the bundle.
    """
    decile_BT = _deciles(bundle)
    found: dict[tuple[str, str, str], list[float]] = {}
    for batch, rows_M in zip(batches(bundle, advantage), bundle.rows_of_minibatches(), strict=True):
        gradients = {}
        for name, loss in named.items():
            found_BT, output = gradient(loss, batch)
            if not found_BT.isfinite().all():
                raise BadBundle(f"{name}: the gradient is not finite")
            gradients[name] = found_BT.double()
            for measure, value in measures(gradients[name], batch, output, decile_BT[rows_M]).items():
                found.setdefault((name, "", measure), []).append(value)
        for one, other in itertools.combinations(named, 2):
            value = float(torch.cosine_similarity(gradients[one].flatten(), gradients[other].flatten(), 0, eps=0))
            found.setdefault((one, other, COSINE), []).append(value)
    for name in named:
        if not any(found[name, "", "norm"]):
            raise BadBundle(f"{name}: the gradient is 0 on every token of the bundle; leave it out")
    rows = []
    for (name, other, measure), values in found.items():
        known = [value for value in values if not math.isnan(value)]
        over = mean_over_seeds(known, bounds=_BOUNDS.get(measure, (0.0, 1.0)))
        rows.append({"algorithm": name, "other": other, "measure": measure} | vars(over))
    return pd.DataFrame(rows).sort_values("other", key=lambda other: other != "", kind="stable", ignore_index=True)


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
    by_decile = torch.zeros(10, dtype=torch.float64).index_add(0, decile_BT[mask_BT], found_N.abs())
    return numbers | dict(zip(DECILES, (by_decile / found_N.abs().sum()).tolist(), strict=True))


def text(audited: pd.DataFrame) -> str:
    """The same for a terminal: measures of each loss, cosines, and means of the mass by decile."""
    estimates = [str(Estimate(*row)) for row in audited[["mean", "low", "high", "n"]].itertuples(index=False)]
    is_pair = audited["other"] != ""
    told = audited.assign(told=estimates)
    wide = told[~is_pair].pivot(index="algorithm", columns="measure", values="told").fillna("–")
    wide = wide.loc[audited["algorithm"].unique()].reset_index()
    deciles = wide[["algorithm", *DECILES]].replace(r" \[.*", "", regex=True)  # without their intervals
    parts = [wide[["algorithm", *(name for name in SHOWN if name in wide)]]]
    if is_pair.any():
        pairs = told[is_pair]
        parts.append(pd.DataFrame({"cosine of": pairs["algorithm"] + ", " + pairs["other"], "": pairs["told"]}))
    names = ["mass by decile of old probability", *map(str, range(1, 11))]
    return "\n\n".join(tables.to_markdown(part) for part in [*parts, deciles.set_axis(names, axis=1)])


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

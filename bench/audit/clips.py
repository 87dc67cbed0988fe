"""How much a clip takes, over the width of its band: of token ratios and of sequence ratios, measured and predicted.

The ratio is the present policy over an *anchor*: the old policy (the trainer's forward at the weights that sampled) or
the sampler. A clip takes a ratio below the band with a negative advantage, and above the band with a positive one (PPO,
1707.06347, eq. 7). The prediction sees the first four moments of the log-ratios alone (``clip_prediction``).

Shapes: M rows of a mini-batch, T response positions, N ratios.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from steadymoe.bench.audit.gradients import Arm, Frozen
from steadymoe.bench.measurement import clip_prediction
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds, ratio_of_sums

# Half the width of a symmetric band; at 1 and above the lower edge would clip nothing.
BANDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.3, 0.5, 0.9)
UNITS, ANCHORS = ("token ratio", "sequence ratio"), ("old policy", "sampler")
SIDES = ("low", "high")
MEASURED, PREDICTED = "clip_share", "predicted_clip_share"
_MOMENTS = ("mean", "variance", "skewness", "kurtosis")
# The interval of a share of sequences and of tokens is over mini-batches, whose responses share no prompt.
Found = Iterator[tuple[str, str, Estimate]]


def name(unit: str, anchor: str) -> str:
    """What stands in the column ``loss`` of an audit's table."""
    return f"{unit} to {anchor}"


def quantity(kind: str, side: str, band: float) -> str:
    """What stands in the column ``quantity``: ``clip_share_low 0.2``."""
    return f"{kind}_{side} {band:g}"


@torch.no_grad()
def estimates(arm: Arm, frozen: Frozen, forced_LBFK: Tensor | None) -> Found:
    """(``name``, ``quantity``, estimate) at the model's present weights.

    ``arm`` makes the forwards and has the old policy; signs are of a response's score less its group's mean. Shares are
    of all tokens (of all responses, for the sequence ratio). A prediction and a moment have no interval here.
    """
    rollout, old = frozen.rollout, frozen.old[arm.label]
    mask_BT = rollout.sequences.response_mask_BT.bool()
    scores_PR = rollout.scores_B.view(-1, arm.trainer.config.rollout.responses)
    differ_P1 = scores_PR.amax(-1, keepdim=True) > scores_PR.amin(-1, keepdim=True)  # a mean of equal scores may round
    sign_B = ((scores_PR - scores_PR.mean(-1, keepdim=True)).sign() * differ_P1).flatten()
    anchors = dict(zip(ANCHORS, (old.logprobs_BT, rollout.logprobs_BT), strict=True))
    ratios: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {
        (unit, anchor): [] for unit in UNITS for anchor in ANCHORS
    }
    for (part,) in frozen.minibatches:
        now = arm.learner.forwards(arm.trainer.model, rollout, part, forced_LBFK)
        mask_MT, sign_M = mask_BT[part.rows_M], sign_B[part.rows_M]
        for anchor, logprobs_BT in anchors.items():
            log_MT = (now.logprobs_BT - logprobs_BT[part.rows_M]).double().masked_fill(~mask_MT, 0.0)
            sign_MT = sign_M[:, None].expand_as(log_MT)
            ratios[UNITS[0], anchor].append((log_MT[mask_MT].cpu().numpy(), sign_MT[mask_MT].cpu().numpy()))
            mean_M = log_MT.sum(-1) / mask_MT.sum(-1)  # the log of GSPO's ratio: 2507.18071, eq. 7
            ratios[UNITS[1], anchor].append((mean_M.cpu().numpy(), sign_M.cpu().numpy()))
    for (unit, anchor), parts in ratios.items():
        for kind, estimate in _of_ratios(parts):
            yield name(unit, anchor), kind, estimate
    yield "all", "response_length", mean_over_seeds(mask_BT.sum(-1).double().tolist())


def _of_ratios(parts: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[str, Estimate]]:
    """The shares of one unit and anchor; ``parts`` are the log-ratios and signs, (N,) each, of every mini-batch."""
    log_N, sign_N = (np.concatenate(each) for each in zip(*parts, strict=True))
    moments = {sign: _moments(log_N[sign_N == sign]) for sign in (1.0, -1.0)}
    for place, moment in enumerate(_MOMENTS):
        whole = clip_prediction.measured(log_N)
        yield f"log_ratio_{moment}", Estimate([*vars(whole).values()][place], np.nan, np.nan, len(parts))
    share = {sign: float((sign_N == sign).mean()) for sign in moments}
    sizes = [len(log) for log, _ in parts]
    for band in BANDS:
        edges = {"low": np.log1p(-band), "high": np.log1p(band)}
        taken = {
            "low": [int(((log < edges["low"]) & (sign < 0)).sum()) for log, sign in parts],
            "high": [int(((log > edges["high"]) & (sign > 0)).sum()) for log, sign in parts],
        }
        of_band = clip_prediction.clip_share(moments[1.0], moments[-1.0], band, band, share[1.0], share[-1.0])
        for side, predicted in zip(SIDES, (of_band.low, of_band.high), strict=True):
            yield quantity(MEASURED, side, band), ratio_of_sums(taken[side], sizes, bounds=(0.0, 1.0))
            yield quantity(PREDICTED, side, band), Estimate(predicted, np.nan, np.nan, len(parts))


def _moments(log_N: np.ndarray) -> clip_prediction.Moments:
    """The moments of the log-ratios of one sign; a single value at 0 where no response has this sign."""
    return clip_prediction.measured(log_N if len(log_N) else np.zeros(1))

"""How sequences are fed to a model: a row each, or a row per prompt with all its responses behind it (shared prompts).

The G responses to a prompt begin with the same tokens, the prompt. In a shared row these tokens are computed once: a
response sees the prompt and itself (``models.attention``), and its positions count on from the prompt (Prefix Grouper,
2506.05433). If every layer attends to all earlier positions, sharing changes log-probabilities and gradients only by
rounding.

Shapes: B sequences, S = W + T positions of prompt and response, F = S − 1 positions fed for a sequence. A model is fed
P rows of X positions. The last Y positions of a row are scored: they predict tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.models.attention import TwoParts
from steadymoe.models.selection import NO_ROUTE

# Attention implementations that two parts of a row equal but for rounding.
_PLAIN = ("sdpa", "eager")


@dataclass(frozen=True)
class Layout:
    """The rows that a model is fed, and the place of each sequence in them."""

    tokens_PX: Tensor
    mask: Tensor
    """1 on real tokens, (P, X); of shared rows, the first of ``two_parts``."""
    positions_PX: Tensor
    scored: int
    """Y: the number of positions at the end of a row that predict tokens."""
    scored_BT: Tensor
    """For each response token, the index of the position that predicts it, among the P·Y scored positions."""
    fed_BF: Tensor | None = None
    """For each position of a sequence, its index among the P·X fed positions; None if the two are the same."""
    source_PX: Tensor | None = None
    """For each fed position, the index of the first of the B·F sequence positions that it stands for; −1 if there is
    none. None if fed positions and sequence positions are the same."""
    two_parts: TwoParts | None = None
    """How the positions of shared rows attend; None for a row per sequence."""

    def spread(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return values of the P·X fed positions, in dimension ``dim``, as values of the sequences' B·F positions."""
        return values if self.fed_BF is None else values.index_select(dim, self.fed_BF.flatten())

    def of_responses(self, values_NX: Tensor) -> Tensor:
        """Return values of the P·X fed positions, (P·X, …), at the predictors of the response tokens, (B, T, …)."""
        batch, width = self.scored_BT.shape
        if self.fed_BF is None:
            return values_NX.view(batch, -1, *values_NX.shape[1:])[:, -width:]
        return values_NX[self.fed_BF[:, -width:]]

    def fold(self, values_LBFK: Tensor) -> Tensor:
        """Return routes or gates of sequences, (L, B, F, K), as of fed positions, (L, P·X, K), or ``NO_ROUTE``."""
        flat_LNK = values_LBFK.flatten(1, 2)
        if self.source_PX is None:
            return flat_LNK
        source_N = self.source_PX.flatten()
        return flat_LNK[:, source_N].masked_fill((source_N < 0)[None, :, None], NO_ROUTE)

    def fold_mask(self, mask_BF: Tensor) -> Tensor:
        """Return a mask over positions of sequences, (B, F), as a mask over fed positions, (P·X,)."""
        if self.source_PX is None:
            return mask_BF.flatten()
        source_N = self.source_PX.flatten()
        return mask_BF.flatten()[source_N] & (source_N >= 0)


def positions(mask_BF: Tensor) -> Tensor:
    """Position ids that count real tokens only, so that padding on the left shifts nothing."""
    return (mask_BF.cumsum(-1) - 1).clamp(min=0)


def separate(tokens_BS: Tensor, mask_BS: Tensor, response_width: int, trim: bool = False) -> Layout:
    """Lay out a row for each sequence; ``trim`` leaves out the columns that are padding in every sequence."""
    left, own = _padding(mask_BS, response_width) if trim else (0, response_width - 1)
    batch, width, device = len(tokens_BS), tokens_BS.shape[1] - response_width, tokens_BS.device
    ends = width + own
    mask_BX = mask_BS[:, left:ends]
    step_T = torch.arange(response_width, device=device).clamp(max=own)
    scored_BT = torch.arange(batch, device=device)[:, None] * (own + 1) + step_T
    plain = Layout(tokens_BS[:, left:ends], mask_BX, positions(mask_BX), own + 1, scored_BT)
    length, fed = ends - left, tokens_BS.shape[1] - 1
    if length == fed:
        return plain
    columns_F = (torch.arange(fed, device=device) - left).clamp(0, length - 1)
    row_B1 = torch.arange(batch, device=device)[:, None]
    source_BX = row_B1 * fed + torch.arange(left, ends, device=device)
    return replace(plain, fed_BF=row_B1 * length + columns_F, source_PX=source_BX)


def shared(tokens_BS: Tensor, mask_BS: Tensor, response_width: int, groups_B: Tensor, trim: bool = False) -> Layout:
    """Lay out a row for each prompt: sequences with the same number in ``groups_B``, whose prompts must be equal.

    ``trim`` is as in ``separate``. Prompts are padded on the left. All rows have as many places as the prompt with most
    responses needs; the places that another prompt leaves empty are masked.
    """
    left, own = _padding(mask_BS, response_width) if trim else (0, response_width - 1)
    batch, width, device = len(tokens_BS), tokens_BS.shape[1] - response_width - left, tokens_BS.device
    fed = tokens_BS.shape[1] - 1
    row_B, slot_B, slots = _places(groups_B)
    rows, length = int(row_B.max()) + 1, width + slots * own

    column_F = torch.arange(fed, device=device) - left
    own_F = column_F.clamp(width, width + own - 1) if own else column_F.clamp(max=width - 1)
    column_BF = torch.where(column_F < width, column_F.clamp(min=0), own_F + slot_B[:, None] * own)
    fed_BF = row_B[:, None] * length + column_BF
    here_F = (column_F >= 0) & (column_F < width + own)
    source_N = torch.full((rows * length,), -1, device=device)
    index_BF = torch.arange(batch * fed, device=device).view(batch, fed)
    # From the last sequence to the first, so that a prompt's source is the first of its group.
    for index in range(slots - 1, -1, -1):
        of_slot_B = slot_B == index
        source_N[fed_BF[of_slot_B][:, here_F].flatten()] = index_BF[of_slot_B][:, here_F].flatten()
    source_PX = source_N.view(rows, length)

    there_PX = source_PX >= 0
    real_PX = mask_BS[:, :-1].flatten()[source_PX].bool() & there_PX
    scored, two_parts = 1 + slots * own, _two_parts(real_PX, width, slots, own)
    step_T = torch.arange(response_width, device=device).clamp(max=own)
    after_BT = torch.where(step_T == 0, 0, slot_B[:, None] * own + step_T)
    return Layout(
        tokens_PX=tokens_BS[:, :-1].flatten()[source_PX].masked_fill(~there_PX, 0),
        mask=two_parts.prompts_P1WW,
        positions_PX=positions(mask_BS[:, :-1]).flatten()[source_PX].masked_fill(~there_PX, 0),
        scored=scored,
        scored_BT=row_B[:, None] * scored + after_BT,
        fed_BF=fed_BF,
        source_PX=source_PX,
        two_parts=two_parts,
    )


def extents(
    tokens_BS: Tensor, mask_BS: Tensor, response_width: int, groups_B: Tensor, trim: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the number and the length of the rows that ``separate`` and ``shared`` would feed: (rows, X) each."""
    left, own = _padding(mask_BS, response_width) if trim else (0, response_width - 1)
    width = tokens_BS.shape[1] - response_width - left
    row_B, _, slots = _places(groups_B)
    return (len(tokens_BS), width + own), (int(row_B.max()) + 1, width + slots * own)


def _padding(mask_BS: Tensor, response_width: int) -> tuple[int, int]:
    """Return how many left columns are padding in all prompts, and the longest response's length less one."""
    prompts_S = mask_BS[:, : mask_BS.shape[1] - response_width].any(0)
    longest = int(mask_BS[:, -response_width:].sum(-1).max())
    return int(prompts_S.int().argmax()) if prompts_S.any() else 0, max(longest, 1) - 1


def _places(groups_B: Tensor) -> tuple[Tensor, Tensor, int]:
    """For each sequence, the row of its prompt and its number in this row; and the largest count of a row."""
    _, row_B = torch.unique(groups_B, return_inverse=True)
    order_B = row_B.argsort(stable=True)
    counts_P = row_B.bincount()
    begins_P = counts_P.cumsum(0) - counts_P
    slot_B = torch.empty_like(row_B)
    slot_B[order_B] = torch.arange(len(row_B), device=row_B.device) - begins_P[row_B[order_B]]
    return row_B, slot_B, int(counts_P.max())


def _two_parts(real_PX: Tensor, width: int, slots: int, own: int) -> TwoParts:
    """Return how positions attend: of the prompt to itself so far, of a response to its prompt and itself so far."""
    device = real_PX.device
    prompt_PW, own_BN = real_PX[:, :width], real_PX[:, width:].unflatten(1, (slots, own)).flatten(0, 1)
    seen_NN = torch.ones(own, own, dtype=torch.bool, device=device).tril()
    seen_BNW = prompt_PW.repeat_interleave(slots, 0)[:, None].expand(-1, own, -1)
    return TwoParts(causal(prompt_PW), additive(torch.cat([seen_BNW, seen_NN & own_BN[:, None]], -1)))


def causal(mask_PW: Tensor) -> Tensor:
    """Return the terms added to attention scores, (P, 1, W, W), if positions see the real ones so far."""
    width = mask_PW.shape[1]
    seen_WW = torch.ones(width, width, dtype=torch.bool, device=mask_PW.device).tril()
    # Padding attends to itself: a row of −∞ alone would have no softmax.
    own_WW = torch.eye(width, dtype=torch.bool, device=mask_PW.device)
    return additive((seen_WW & mask_PW.bool()[:, None]) | own_WW)


def additive(seen_PX: Tensor) -> Tensor:
    """Return the terms added to attention scores, (P, 1, Q, X), if queries see ``seen_PX``, (P, X) or (P, Q, X)."""
    seen_P1QX = (seen_PX if seen_PX.dim() == 3 else seen_PX[:, None]).bool()[:, None]
    return torch.zeros(seen_P1QX.shape, device=seen_PX.device).masked_fill_(~seen_P1QX, torch.finfo(torch.float32).min)


def refusal(model: PreTrainedModel) -> str | None:
    """Return the reason in a model's config why it cannot share prompts; None if there is none.

    The two parts know no sliding window, and a recurrent state would pass from one response to the next.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "a sliding window"
    if not model._supports_attention_backend:
        return "attention that the config does not choose"
    kind = config._attn_implementation
    return None if kind in _PLAIN else f"attention by {kind}"

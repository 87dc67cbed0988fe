"""Rollouts that another trainer recorded as a bundle: a JSONL or parquet file with one row for each response.

A row has lists of token ids, numbers for each response token, and a reward; docs/bundle.md names the columns. Rows of
one group may stand anywhere in the file. Nothing is guessed: a column that is missing, ragged or not finite is named,
with its row.

Shapes: B responses, W positions of a prompt, T response positions, F = W + T − 1, L MoE layers, K experts a token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadymoe.bench.bundles import recorded_rows
from steadymoe.bench.bundles.bundle import MOST, About, BadBundle, Bundle
from steadymoe.models.selection import NO_ROUTE

# The most bytes of the rectangle that the rows are padded to.
MOST_BYTES = 2**30
_OF_TOKENS = ("rollout_logprobs", "old_logprobs", "logprobs")
_ROUTES = ("rollout_routes", "old_routes")
_MASKS = ("mask", "prompt_mask", "response_mask")
COLUMNS = (
    *("prompt", "response", "tokens", *_MASKS),
    *("rewards", "groups", "minibatches", "advantages", *_OF_TOKENS, *_ROUTES),
)
# The names of other trainers' batches: TRL 1.16 (the dict of _generate_and_score_completions, to which rewards and
# groups have to be added) and verl 0.9 (DataProto).
TRAINERS: dict[str, dict[str, str]] = {
    "trl": {
        "prompt_ids": "prompt",
        "completion_ids": "response",
        "completion_mask": "response_mask",
        "sampling_per_token_logps": "rollout_logprobs",
        "old_per_token_logps": "old_logprobs",
        "per_token_logps": "logprobs",
        "groups_B": "groups",
    },
    "verl": {
        "prompts": "prompt",
        "responses": "response",
        "attention_mask": "mask",
        "token_level_scores": "rewards",
        "uid": "groups",
        "rollout_log_probs": "rollout_logprobs",
        "old_log_probs": "old_logprobs",
        "log_prob": "logprobs",
        "routed_experts": "rollout_routes",
    },
}


@dataclass(frozen=True)
class _Response:
    """One row of the file, without padding."""

    prompt: list[int]
    response: list[int]
    reward: float
    group: int | str
    minibatch: int
    numbers: dict[str, list[float]] = field(default_factory=dict)
    """Column → a number for each response token."""
    routes: dict[str, Tensor] = field(default_factory=dict)
    """Column → (positions − 1, L, K)."""


def names(trainer: str | None, given: str) -> dict[str, str]:
    """Their name → ours, of a trainer and of ``theirs=ours,…``. Raises BadBundle for a word that names no column."""
    found = dict(TRAINERS[trainer]) if trainer else {}
    for word in filter(None, given.split(",")):
        theirs, _, ours = (part.strip() for part in word.partition("="))
        if not theirs or ours not in COLUMNS:
            raise BadBundle(f"--map takes theirs=ours with ours one of {', '.join(COLUMNS)}; got {word!r}")
        found = {key: value for key, value in found.items() if value != ours} | {theirs: ours}
    return found


def convert(path: Path, about: About, renamed: Mapping[str, str] | None = None) -> tuple[Bundle, list[str]]:
    """The bundle of a file, and the columns that were left out. Raises BadBundle for what cannot become a bundle."""
    renamed = renamed or {}
    responses: list[_Response] = []
    used: set[str] | None = None
    left_out: list[str] = []
    for number, raw in recorded_rows.read(path):
        place = f"{path.name}, row {number}"
        row = _ours(raw, renamed, place)
        if used is None:
            _check_columns(set(row), place)
            used, left_out = set(row), [name for name in raw if renamed.get(name, name) not in COLUMNS]
        if set(row) != used:
            name = sorted(set(row) ^ used)[0]
            raise BadBundle(f"{place}: {'lacks' if name in used else 'has'} {name}, unlike row 1")
        if len(responses) == MOST["B"]:
            raise BadBundle(f"{path.name} has more than {MOST['B']} rows")
        responses.append(_response(row, place))
    if used is None:
        raise BadBundle(f"{path.name} has no rows")
    return _bundle(responses, used, about), left_out


def _ours(raw: Mapping[str, Any], renamed: Mapping[str, str], place: str) -> dict[str, Any]:
    """A row by our names, without the columns that no bundle holds."""
    row: dict[str, Any] = {}
    for theirs, value in raw.items():
        ours = renamed.get(theirs, theirs)
        if ours in row:
            raise BadBundle(f"{place}: two columns are {ours}; leave one out, or rename it with --map")
        if ours in COLUMNS:
            row[ours] = value
    return row


def _check_columns(there: set[str], place: str) -> None:
    """Raise BadBundle unless the columns of the first row suffice for a bundle."""
    told = "see docs/bundle.md, and --map theirs=ours for columns with other names"
    if "tokens" in there:
        if there & {"prompt", "response", "prompt_mask"}:
            raise BadBundle(f"{place}: has tokens and prompt or response; give tokens, or prompt and response")
        needed = ["response_mask", "rewards", "groups"]
    else:
        needed = ["prompt", "response", "rewards", "groups"]
    for name in needed:
        if name not in there:
            raise BadBundle(f"{place}: has no column {name}; {told}")
    if not there & set(_OF_TOKENS):
        raise BadBundle(f"{place}: has no log-probabilities, {', '.join(_OF_TOKENS)}; {told}")


def _response(row: Mapping[str, Any], place: str) -> _Response:
    """One row, checked, without its padding."""
    prompt, whole, begin, count = _split(row, place)
    response = whole[begin : begin + count]
    numbers = {name: _of_response(row, name, place, len(whole), begin, count) for name in _OF_TOKENS if name in row}
    if "advantages" in row:
        is_one = not isinstance(row["advantages"], list)
        values = [_number(row["advantages"], "advantages", place)] * count if is_one else None
        numbers["advantages"] = values or _of_response(row, "advantages", place, len(whole), begin, count)
    reward = row["rewards"]
    rewards = _numbers(reward, "rewards", place) if isinstance(reward, list) else [_number(reward, "rewards", place)]
    group = row["groups"]
    if not isinstance(group, str) and type(group) is not int:
        raise BadBundle(f"{place}: groups must be a whole number or a text; got {str(group)[:40]!r}")
    (minibatch,) = _whole([row.get("minibatches", 0)], "minibatches", place)
    positions = len(prompt) + count - 1
    routes = {name: _routes(row[name], positions, f"{place}: {name}") for name in _ROUTES if name in row}
    return _Response(prompt, response, math.fsum(rewards), group, minibatch, numbers, routes)


def _split(row: Mapping[str, Any], place: str) -> tuple[list[int], list[int], int, int]:
    """Prompt; the list in which the response stands; where in it the response begins; its length."""
    masks = {name: _mask(row[name], name, place) for name in _MASKS if name in row}
    if "tokens" in row:
        whole = _whole(row["tokens"], "tokens", place)
        real, marks = masks.get("mask", [1] * len(whole)), masks["response_mask"]
        _same_length(place, tokens=whole, mask=real, response_mask=marks)
        begin, count = _run(marks, "response_mask", place)
        if "mask" in row and any(real[begin + count :]):
            raise BadBundle(f"{place}: mask marks tokens behind the response")
        return [token for token, is_real in zip(whole[:begin], real, strict=False) if is_real], whole, begin, count
    prompt, whole = (_whole(row[name], name, place) for name in ("prompt", "response"))
    both = masks.get("mask", [1] * (len(prompt) + len(whole)))
    if len(both) != len(prompt) + len(whole):
        raise BadBundle(
            f"{place}: mask has {len(both)} values; prompt and response have {len(prompt)} and {len(whole)} tokens"
        )
    of_prompt = masks.get("prompt_mask", both[: len(prompt)])
    marks = masks.get("response_mask", both[len(prompt) :])
    _same_length(place, prompt=prompt, prompt_mask=of_prompt)
    _same_length(place, response=whole, response_mask=marks)
    begin, count = _run(marks, "the response's mask", place)
    if begin:
        raise BadBundle(f"{place}: the response's mask must begin with 1: responses are padded on the right")
    return [token for token, is_real in zip(prompt, of_prompt, strict=True) if is_real], whole, 0, count


def _of_response(row: Mapping[str, Any], name: str, place: str, width: int, begin: int, count: int) -> list[float]:
    """A number for each response token, of a column that has one for each of them, or for padding too."""
    values = row[name]
    if not isinstance(values, list) or len(values) not in (count, width):
        got = f"{len(values)} values" if isinstance(values, list) else repr(values)[:40]
        raise BadBundle(f"{place}: {name} must have a number for each of the {count} response tokens; got {got}")
    return _numbers(values if len(values) == count else values[begin : begin + count], name, place)


def _routes(values: Any, positions: int, place: str) -> Tensor:
    """(positions, L, K) of nested lists."""
    if not isinstance(values, list) or len(values) != positions:
        got = f"{len(values)} positions" if isinstance(values, list) else repr(values)[:40]
        raise BadBundle(
            f"{place} must be [positions − 1][layers][experts], {positions} positions: the last token is never fed; "
            f"got {got}"
        )
    try:
        made = torch.tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise BadBundle(f"{place} must be [positions − 1][layers][experts] of whole numbers, without gaps") from error
    if made.ndim != 3 or made.dtype != torch.int64:
        raise BadBundle(f"{place} must be [positions − 1][layers][experts] of whole numbers; got {tuple(made.shape)}")
    return made


def _bundle(responses: Sequence[_Response], used: set[str], about: About) -> Bundle:
    """The rows as one rectangle, groups together in the order of their first rows."""
    number = {group: index for index, group in enumerate(dict.fromkeys(each.group for each in responses))}
    ordered = sorted(responses, key=lambda each: number[each.group])
    width, longest = max(len(each.prompt) for each in ordered), max(len(each.response) for each in ordered)
    batch = len(ordered)
    if batch * (width + longest) * 4 > MOST_BYTES:
        raise BadBundle(f"{batch} rows padded to {width} + {longest} tokens are more than {MOST_BYTES} bytes")
    tokens_BS = torch.zeros(batch, width + longest, dtype=torch.long)
    mask_BS = torch.zeros_like(tokens_BS)
    floats = {name: torch.zeros(batch, longest) for name in (*_OF_TOKENS, "advantages") if name in used}
    for row, each in enumerate(ordered):
        begin, end = width - len(each.prompt), width + len(each.response)
        tokens_BS[row, begin:end] = torch.tensor([*each.prompt, *each.response])
        mask_BS[row, begin:end] = 1
        for name, values in each.numbers.items():
            floats[name][row, : len(values)] = torch.tensor(values)
    batches = sorted({each.minibatch for each in ordered})
    return Bundle(
        about=about,
        response_width=longest,
        tokens_BS=tokens_BS,
        mask_BS=mask_BS,
        groups_B=torch.tensor([number[each.group] for each in ordered]),
        rewards_B=torch.tensor([each.reward for each in ordered]),
        minibatches_B=torch.tensor([batches.index(each.minibatch) for each in ordered]),
        **{f"{name}_BT": values for name, values in floats.items()},
        **{f"{name}_LBFK": _placed(ordered, name, width, longest) for name in _ROUTES if name in used},
    )


def _placed(ordered: Sequence[_Response], name: str, width: int, longest: int) -> Tensor:
    """The routes of all rows, (L, B, F, K)."""
    layers, experts = ordered[0].routes[name].shape[1:]
    if layers * experts * len(ordered) * (width + longest) * 2 > MOST_BYTES:
        raise BadBundle(f"{name} padded to one rectangle are more than {MOST_BYTES} bytes; convert fewer rollouts")
    routes_LBFK = torch.full((layers, len(ordered), width + longest - 1, experts), NO_ROUTE)
    for row, each in enumerate(ordered):
        found = each.routes[name]
        if found.shape[1:] != (layers, experts):
            raise BadBundle(f"{name} have {layers} × {experts} experts a token in one row and other sizes in another")
        begin = width - len(each.prompt)
        routes_LBFK[:, row, begin : begin + len(found)] = found.transpose(0, 1)
    return routes_LBFK


def _run(marks: Sequence[int], what: str, place: str) -> tuple[int, int]:
    """Where the one run of 1 begins, and its length."""
    count = sum(marks)
    begin = marks.index(1) if count else 0
    if not count or not all(marks[begin : begin + count]):
        raise BadBundle(f"{place}: {what} must have one run of 1, the response; it has {'a hole' if count else 'none'}")
    return begin, count


def _same_length(place: str, **columns: Sequence[int]) -> None:
    if len({len(values) for values in columns.values()}) > 1:
        told = ", ".join(f"{name} has {len(values)}" for name, values in columns.items())
        raise BadBundle(f"{place}: columns that belong together differ in length: {told}")


def _mask(values: Any, name: str, place: str) -> list[int]:
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        raise BadBundle(f"{place}: {name} must be a list of 0 and 1")
    return [int(value) for value in values]


def _whole(values: Any, name: str, place: str) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**31 for value in values):
        raise BadBundle(f"{place}: {name} must hold whole numbers, at least 0")
    return values


def _numbers(values: Sequence[Any], name: str, place: str) -> list[float]:
    return [_number(value, name, place) for value in values]


def _number(value: Any, name: str, place: str) -> float:
    if type(value) not in (int, float) or not abs(value) < math.inf:
        raise BadBundle(f"{place}: {name} must hold finite numbers; got {str(value)[:40]}")
    return float(value)

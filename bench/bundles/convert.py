"""Rollouts that another trainer recorded as a bundle: a JSONL or parquet file with one row for each response.

A row has lists of token ids, numbers for each response token, and a reward; docs/bundle.md names the columns. Rows of
one group may stand anywhere in the file. Nothing is guessed: a column that is missing, ragged or not finite is named,
with its row.

Shapes: B responses, S positions in all, T response positions.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from steadymoe.bench.bundles.bundle import MOST, BadBundle, Bundle

# The most bytes of a file, of what a parquet file decodes to, and of the rectangle that the rows are padded to.
MOST_BYTES = 2**30
# The most bytes of texts that are decoded at once, and the most rows.
_TEXTS_AT_ONCE, _ROWS_AT_ONCE = 2**26, 256
_OF_TOKENS = ("rollout_logprobs", "old_logprobs", "logprobs")
_MASKS = ("mask", "prompt_mask", "response_mask")
COLUMNS = (
    *("prompt", "response", "tokens", *_MASKS),
    *("rewards", "groups", "minibatches", "advantages", *_OF_TOKENS),
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
    },
}


@dataclass(frozen=True)
class _Response:
    """One row of the file, without padding. Shapes: N tokens, T of them the response."""

    tokens_N: Tensor
    width: int
    """W: the number of tokens of the prompt."""
    group: int | str
    minibatch: int
    reward: float
    numbers: dict[str, Tensor]
    """Column → (T,)."""


def names(trainer: str | None, given: str) -> dict[str, str]:
    """Their name → ours, of a trainer and of ``theirs=ours,…``. Raises BadBundle for a word that names no column."""
    found = dict(TRAINERS[trainer]) if trainer else {}
    for word in filter(None, given.split(",")):
        theirs, _, ours = (part.strip() for part in word.partition("="))
        if not theirs or ours not in COLUMNS:
            raise BadBundle(f"--map takes theirs=ours with ours one of {', '.join(COLUMNS)}; got {word!r}")
        found = {key: value for key, value in found.items() if value != ours} | {theirs: ours}
    return found


def convert(
    path: Path,
    about: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> tuple[Bundle, list[str]]:
    """The bundle of a file, and the columns that were left out. Raises BadBundle for what cannot become a bundle."""
    renamed = renamed or {}
    responses: list[_Response] = []
    columns: set[str] = set()
    left_out: list[str] = []
    for number, row in enumerate(_rows(path, renamed), start=1):
        place, known = f"{path.name}, row {number}", dict[str, Any]()
        for theirs, value in row.items():
            name = renamed.get(theirs, theirs)
            if name in known:
                raise BadBundle(f"{place}: two columns are {name}; leave one out, or rename it with --map")
            if name in COLUMNS:
                known[name] = value
        if number == 1:
            _check_columns(set(known), place)
            columns, left_out = set(known), [name for name in row if renamed.get(name, name) not in COLUMNS]
        for name in sorted(set(known) ^ columns):
            raise BadBundle(f"{place}: {'has' if name in known else 'lacks'} {name}, unlike row 1")
        if number > MOST["B"]:
            raise BadBundle(f"{path.name} has more than {MOST['B']} rows")
        responses.append(_response(known, place))
    if not responses:
        raise BadBundle(f"{path.name} has no rows")
    return _bundle(responses, about or {}), left_out


def _rows(path: Path, renamed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of a file. Raises BadBundle for a file that is none, or too large."""
    if not path.is_file():
        raise BadBundle(f"there is no file {path}")
    if path.stat().st_size > MOST_BYTES:
        raise BadBundle(f"{path.name} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
    if path.suffix == ".jsonl":
        yield from _of_jsonl(path)
    elif path.suffix == ".parquet":
        try:
            yield from _of_parquet(path, renamed)
        except (pa.ArrowException, OSError) as error:
            told = " ".join(str(error).split())[:200]
            raise BadBundle(f"{path.name} is not a whole parquet file: {told}") from error
    else:
        raise BadBundle(f"{path.name} must be a file .jsonl or .parquet")


def _of_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(filter(bytes.strip, file), start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadBundle(f"{path.name}, row {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise BadBundle(f"{path.name}, row {number}: must be an object with named columns")
            yield row


def _of_parquet(path: Path, renamed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file; columns that no bundle holds are not decoded, and are None.

    A few bytes can encode a long run of one value, so neither the size of the file nor of its pages bounds what it
    decodes to: the number of values does, and of texts, which a dictionary repeats, what each batch holds.
    """
    too_large = BadBundle(f"{path.name} decodes to more than {MOST['B']} rows or {MOST_BYTES} bytes: take fewer rows")
    file = pq.ParquetFile(path)
    columns = [name for name in file.schema_arrow.names if renamed.get(name, name) in COLUMNS]
    parts = [
        part
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups))
        for part in map(group.column, range(group.num_columns))
        if part.path_in_schema.partition(".")[0] in columns
    ]
    texts = [part for part in parts if "BYTE_ARRAY" in part.physical_type]
    if any("." in part.path_in_schema for part in texts):
        raise BadBundle(f"{path.name}: {texts[0].path_in_schema.partition('.')[0]} must hold numbers")
    values = sum(max(8 * part.num_values, part.total_uncompressed_size) for part in parts)
    if file.metadata.num_rows > MOST["B"] or values > MOST_BYTES:
        raise too_large
    longest = max((part.total_uncompressed_size for part in texts), default=1)  # at least the longest text
    rows = min(_ROWS_AT_ONCE, 1 + _TEXTS_AT_ONCE // max(longest, 1))
    decoded = 0
    for batch in file.iter_batches(batch_size=rows, columns=columns):
        decoded += batch.nbytes
        if decoded > MOST_BYTES:
            raise too_large
        yield from (dict.fromkeys(file.schema_arrow.names) | row for row in batch.to_pylist())


def _check_columns(there: set[str], place: str) -> None:
    """Raise BadBundle unless the columns of the first row suffice for a bundle."""
    told = "see docs/bundle.md, and --map theirs=ours for columns with other names"
    if "tokens" in there and there & {"prompt", "response", "prompt_mask"}:
        raise BadBundle(f"{place}: has tokens and prompt or response; give tokens, or prompt and response")
    tokens = ("response_mask",) if "tokens" in there else ("prompt", "response")
    for name in (*tokens, "rewards", "groups"):
        if name not in there:
            raise BadBundle(f"{place}: has no column {name}; {told}")
    if not there & set(_OF_TOKENS):
        raise BadBundle(f"{place}: has no log-probabilities, {', '.join(_OF_TOKENS)}; {told}")


def _response(row: Mapping[str, Any], place: str) -> _Response:
    """One row, checked, without its padding."""
    if "tokens" in row:
        tokens_X = _values(row["tokens"], "tokens", place)
        width = len(tokens_X)
        real_X, marks_X = (_mask(row, name, place, width) for name in ("mask", "response_mask"))
    else:  # the same as one line of tokens
        prompt, response = (_values(row[name], name, place) for name in ("prompt", "response"))
        tokens_X, width = torch.cat([prompt, response]), len(response)
        parts = _mask(row, "mask", place, len(tokens_X)).split([len(prompt), width])
        of_prompt = _mask(row, "prompt_mask", place, len(prompt), parts[0])
        of_response = _mask(row, "response_mask", place, width, parts[1])
        real_X = torch.cat([of_prompt, of_response])
        marks_X = torch.cat([torch.zeros_like(of_prompt), of_response])
    at = marks_X.nonzero().flatten().tolist()
    if not at or at[-1] - at[0] + 1 != (count := len(at)):
        raise BadBundle(f"{place}: response_mask must have one run of 1; it has {'a hole' if at else 'none'}")
    begin = at[0]
    if real_X[begin + count :].any():
        raise BadBundle(f"{place}: mask marks tokens behind the response")
    tokens_N = torch.cat([tokens_X[:begin][real_X[:begin]], tokens_X[begin : begin + count]])
    numbers = {}
    for name in (*_OF_TOKENS, "advantages"):
        if name not in row:
            continue
        values = [row[name]] * count if name == "advantages" and not isinstance(row[name], list) else row[name]
        if not isinstance(values, list) or len(values) not in (count, width):
            got = f"{len(values)} values" if isinstance(values, list) else reprlib.repr(values)
            raise BadBundle(f"{place}: {name} must have a number for each of the {count} response tokens; got {got}")
        first = begin - (len(tokens_X) - width) if len(values) == width else 0
        numbers[name] = _values(values[first : first + count], name, place, torch.float32)
    rewards, group = row["rewards"], row["groups"]
    if not isinstance(group, str) and type(group) is not int:
        raise BadBundle(f"{place}: groups must be a whole number or a text; got {reprlib.repr(group)}")
    rewards = rewards if isinstance(rewards, list) else [rewards]
    return _Response(
        tokens_N=tokens_N,
        width=len(tokens_N) - count,
        group=group,
        minibatch=int(_values([row.get("minibatches", 0)], "minibatches", place)),
        reward=math.fsum(_values(rewards, "rewards", place, torch.float32).tolist()),
        numbers=numbers,
    )


def _values(value: Any, name: str, place: str, dtype: torch.dtype = torch.long) -> Tensor:
    """A list of finite numbers as a tensor of one dimension; whole numbers, at least 0, unless ``dtype`` is a float."""
    found, is_whole = _made(value), dtype == torch.long
    kinds = (torch.int64,) if is_whole else (torch.int64, torch.float32)
    fine = found is not None and found.ndim == 1 and (not len(found) or found.dtype in kinds)
    if found is None or not fine or not found.isfinite().all() or (is_whole and ((found < 0) | (found >= 2**31)).any()):
        what = "whole numbers, at least 0 and below 2^31" if is_whole else "finite numbers"
        raise BadBundle(f"{place}: {name} must hold {what}; got {reprlib.repr(value)}")
    return found.to(dtype)


def _mask(row: Mapping[str, Any], name: str, place: str, length: int, otherwise: Tensor | None = None) -> Tensor:
    """A column of 0 and 1 as (length,) bool; ``otherwise``, or all true, where there is none."""
    if name not in row:
        return torch.ones(length, dtype=torch.bool) if otherwise is None else otherwise
    found = _made(row[name])
    if found is None or found.shape != (length,) or not ((found == 0) | (found == 1)).all():
        raise BadBundle(f"{place}: {name} must be a list of 0 and 1 for {length} tokens; got {reprlib.repr(row[name])}")
    return found.bool()


def _made(value: Any) -> Tensor | None:
    """Nested lists of numbers as a tensor; None for anything else."""
    try:
        return torch.tensor(value) if isinstance(value, list) else None
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return None


def _bundle(responses: Sequence[_Response], about: Mapping[str, str]) -> Bundle:
    """The rows as one rectangle, groups together in the order of their first rows."""
    number = {group: index for index, group in enumerate(dict.fromkeys(each.group for each in responses))}
    ordered = sorted(responses, key=lambda each: number[each.group])
    width = max(each.width for each in ordered)
    longest = max(len(each.tokens_N) - each.width for each in ordered)
    if (size := len(ordered) * (width + longest) * 8) > MOST_BYTES:
        told = f"{len(ordered)} rows padded to {width} + {longest} tokens are {size} bytes"
        raise BadBundle(f"{told}; at most {MOST_BYTES} are converted")
    tokens_BS, mask_BS = torch.zeros(2, len(ordered), width + longest, dtype=torch.int32)
    for row, each in enumerate(ordered):
        begin = width - each.width
        tokens_BS[row, begin : begin + len(each.tokens_N)] = each.tokens_N
        mask_BS[row, begin : begin + len(each.tokens_N)] = 1
    batches = sorted({each.minibatch for each in ordered})
    return Bundle(
        response_width=longest,
        about=about,
        tokens_BS=tokens_BS,
        mask_BS=mask_BS,
        groups_B=torch.tensor([number[each.group] for each in ordered]),
        rewards_B=torch.tensor([each.reward for each in ordered]),
        minibatches_B=torch.tensor([batches.index(each.minibatch) for each in ordered]),
        **{
            f"{name}_BT": pad_sequence([each.numbers[name] for each in ordered], batch_first=True)
            for name in ordered[0].numbers
        },
    )

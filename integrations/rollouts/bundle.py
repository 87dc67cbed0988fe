"""Rollouts that another trainer recorded: a JSONL or parquet file with one row per response.

integrations/rollouts.md lists the columns. Rows of a group may stand anywhere in the file. Nothing is guessed: a column
that is missing, ragged or not finite is reported with its row.

Shapes: B responses in groups of G, T response positions, W positions of one row, with padding.
"""

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

from steadymoe.bench.support import regular_files
from steadymoe.bench.support.errors import UserError

# The most bytes of a file, of what a parquet file decodes to, and of the rectangle that rows are padded to.
MAX_ROWS, MAX_BYTES = 2**16, 2**30
# The most bytes of names of groups in one part of a parquet file, which a dictionary may repeat in every row.
_MAX_TEXT = 2**22
# A log-probability this far above 0 is 0: rounding of a logarithm of a sum.
_ROUNDING = 1e-5
_LOGPROBS = ("rollout_logprobs", "old_logprobs", "logprobs")
COLUMNS = ("prompt", "response", "response_mask", "rewards", "groups", "minibatches", "advantages", *_LOGPROBS)
_NEEDED = ("rewards", "groups", "logprobs", "old_logprobs or rollout_logprobs", "response or response_mask")
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
        "token_level_scores": "rewards",
        "uid": "groups",
        "rollout_log_probs": "rollout_logprobs",
        "old_log_probs": "old_logprobs",
        "log_prob": "logprobs",
    },
}


class BadBundle(UserError, ValueError):
    """A file holds no rollouts, or lacks what an audit needs; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Frozen rollouts: whole groups in neighbouring rows, 0 on padding, which is on the right."""

    mask_BT: Tensor
    """1 on response tokens, int64."""
    groups_B: Tensor
    """0, 1, … by group."""
    rewards_B: Tensor
    minibatches_B: Tensor
    """0, 1, … by mini-batch."""
    logprobs_BT: Tensor | None = None
    """log π_θ: the trainer's forward at the current weights."""
    old_logprobs_BT: Tensor | None = None
    """log π_old: the trainer's forward at the weights that sampled."""
    rollout_logprobs_BT: Tensor | None = None
    """log μ, as the sampling engine computed it."""
    advantages_BT: Tensor | None = None

    @property
    def responses(self) -> int:
        """G, the number of responses to each prompt."""
        return len(self.groups_B) // int(self.groups_B[-1] + 1)

    def minibatches(self) -> list[Tensor]:
        """Return the rows of each mini-batch, (M,) each."""
        return [(self.minibatches_B == number).nonzero().flatten() for number in self.minibatches_B.unique()]


def names(trainer: str | None, pairs: Sequence[str] = ()) -> dict[str, str]:
    """Map a trainer's column names to ours; ``pairs`` are ``ours=theirs``. Raises BadBundle for another column."""
    renamed = dict(TRAINERS[trainer]) if trainer else {}
    for pair in pairs:
        ours, _, theirs = (part.strip() for part in pair.partition("="))
        if not theirs or ours not in COLUMNS:
            raise BadBundle(f"--map takes ours=theirs with ours one of {', '.join(COLUMNS)}; got {pair!r}")
        renamed = {key: value for key, value in renamed.items() if value != ours} | {theirs: ours}
    return renamed


def read(path: Path, renamed: Mapping[str, str] | None = None) -> tuple[Bundle, list[str]]:
    """Return the rollouts of a file, and the columns that were ignored. Raises BadBundle."""
    renamed = renamed or {}
    responses: list[dict[str, Any]] = []
    columns: set[str] = set()
    ignored: list[str] = []
    for number, row in enumerate(_rows(path, renamed), start=1):
        try:
            known = _known(row, renamed)
            if number == 1:
                _check_columns(known)
                columns, ignored = set(known), [name for name in row if renamed.get(name, name) not in COLUMNS]
            for name in sorted(set(known) ^ columns):
                raise BadBundle(f"{'has' if name in known else 'lacks'} {name}, unlike row 1")
            if number > MAX_ROWS:
                raise BadBundle(f"a file may have at most {MAX_ROWS} rows")
            responses.append(_response(known))
        except BadBundle as error:
            raise BadBundle(f"{path.name}, row {number}: {error}") from error
    try:
        return _joined(responses), ignored
    except BadBundle as error:
        raise BadBundle(f"{path.name}: {error}") from error


def _rows(path: Path, renamed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. Raises BadBundle for a file of another kind, or one that is too large."""
    if not path.is_file():
        raise BadBundle(f"there is no file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise BadBundle(f"{path.name} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    if path.suffix == ".jsonl":
        yield from _rows_of_jsonl(path)
    elif path.suffix == ".parquet":
        try:
            yield from _rows_of_parquet(path, renamed)
        except (pa.ArrowException, OSError) as error:
            raise BadBundle(f"{path.name} cannot be read as parquet: {' '.join(str(error).split())[:200]}") from error
    else:
        raise BadBundle(f"{path.name} must be a .jsonl or .parquet file")


def _rows_of_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(filter(bytes.strip, file), start=1):
            try:
                row = regular_files.parse_json(line)
            except ValueError as error:
                raise BadBundle(f"{path.name}, row {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise BadBundle(f"{path.name}, row {number}: must be an object with named columns")
            yield row


def _rows_of_parquet(path: Path, renamed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file; ignored columns are not decoded, and are None.

    A few bytes can encode a long run of one value, so the size of the file does not bound what it decodes to. The
    number of values and the size of texts in its metadata do.
    """
    file = pq.ParquetFile(path)
    columns = [name for name in file.schema_arrow.names if renamed.get(name, name) in COLUMNS]
    size = 0
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        for part in map(group.column, range(group.num_columns)):
            name, _, inner = part.path_in_schema.partition(".")
            if name not in columns:
                continue
            size += max(8 * part.num_values, part.total_uncompressed_size)
            if "BYTE_ARRAY" in part.physical_type and (inner or part.total_uncompressed_size > _MAX_TEXT):
                raise BadBundle(f"{path.name}: {name} must hold numbers, or short texts as names of groups")
    if file.metadata.num_rows > MAX_ROWS or size > MAX_BYTES:
        raise BadBundle(f"{path.name} decodes to more than {MAX_ROWS} rows or {MAX_BYTES} bytes: take fewer rows")
    for batch in file.iter_batches(batch_size=256, columns=columns):
        yield from (dict.fromkeys(file.schema_arrow.names) | row for row in batch.to_pylist())


def _known(row: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns that are read, by our names."""
    known: dict[str, Any] = {}
    for theirs, value in row.items():
        name = renamed.get(theirs, theirs)
        if name in known:
            raise BadBundle(f"two columns are {name}; leave one out, or rename it with --map")
        if name in COLUMNS:
            known[name] = value
    return known


def _check_columns(columns: Mapping[str, Any]) -> None:
    """Raise BadBundle unless the columns of the first row are enough for an audit."""
    for needed in _NEEDED:
        if not any(name in columns for name in needed.split(" or ")):
            raise BadBundle(
                f"has no column {needed}; see integrations/rollouts.md, and --map ours=theirs for other names"
            )


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Check one row; return its group, prompt, minibatches, reward, length, and its numbers per token, (T,) each."""
    group, prompt = row["groups"], row.get("prompt")
    if not isinstance(group, str) and type(group) is not int:
        raise BadBundle(f"groups must be an integer or a string; got {reprlib.repr(group)}")
    rewards = row["rewards"] if isinstance(row["rewards"], list) else [row["rewards"]]
    tokens_W = _values(row["response"], "response") if "response" in row else None
    if tokens_W is None or "response_mask" in row:
        mask_W = _mask(row["response_mask"], tokens_W)
    else:
        mask_W = torch.ones_like(tokens_W)
    at = mask_W.nonzero().flatten().tolist()
    if not at or at[-1] - at[0] + 1 != len(at):
        raise BadBundle(f"response_mask must be 1 on one contiguous span; it has {'a gap' if at else 'no 1'}")
    numbers = {}
    for name in (*_LOGPROBS, "advantages"):
        if name not in row:
            continue
        values = [row[name]] * len(at) if name == "advantages" and not isinstance(row[name], list) else row[name]
        if not isinstance(values, list) or len(values) not in (len(at), len(mask_W)):
            got = f"{len(values)} values" if isinstance(values, list) else reprlib.repr(values)
            raise BadBundle(f"{name} must have a number for each of the {len(at)} response tokens; got {got}")
        if len(values) == len(mask_W):
            values = values[at[0] : at[-1] + 1]
        numbers[name] = _values(values, name, torch.float32)
        if name in _LOGPROBS:
            if (numbers[name] > _ROUNDING).any():
                raise BadBundle(f"{name} must be logarithms of probabilities, at most 0")
            numbers[name] = numbers[name].clamp(max=0.0)
    return {
        "group": group,
        "prompt": None if prompt is None else _values(prompt, "prompt").tolist(),
        "minibatches": int(_values([row.get("minibatches", 0)], "minibatches")),
        "reward": math.fsum(_values(rewards, "rewards", torch.float32).tolist()),
        "length": len(at),
        "numbers": numbers,
    }


def _values(value: Any, name: str, dtype: torch.dtype = torch.long) -> Tensor:
    """Return a list of finite numbers as a tensor; integers from 0 to 2^31 − 1 unless ``dtype`` is a float."""
    is_whole, values_X = dtype == torch.long, _tensor(value)
    kinds = (torch.int64,) if is_whole else (torch.int64, torch.float32)
    fine = values_X is not None and values_X.ndim == 1 and (not len(values_X) or values_X.dtype in kinds)
    low, high = (0, 2**31 - 1) if is_whole else (-math.inf, math.inf)
    if values_X is None or not fine or not (values_X.isfinite() & (values_X >= low) & (values_X <= high)).all():
        wanted = "integers from 0 to 2^31 − 1" if is_whole else "finite numbers"
        raise BadBundle(f"{name} must hold {wanted}; got {reprlib.repr(value)}")
    return values_X.to(dtype)


def _mask(value: Any, tokens_W: Tensor | None) -> Tensor:
    """Return a list of 0 and 1, as long as ``tokens_W`` if that is given, as (W,)."""
    mask_W = _tensor(value)
    fine = mask_W is not None and mask_W.ndim == 1 and (tokens_W is None or len(mask_W) == len(tokens_W))
    if mask_W is None or not fine or not ((mask_W == 0) | (mask_W == 1)).all():
        raise BadBundle(f"response_mask must be 0 and 1, as many as response has tokens; got {reprlib.repr(value)}")
    return mask_W


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.tensor(value) if isinstance(value, list) else None
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return None


def _joined(responses: Sequence[Mapping[str, Any]]) -> Bundle:
    """Pad all rows to one rectangle, groups together in the order of their first rows. Raises BadBundle."""
    if not responses:
        raise BadBundle("the file has no rows")
    groups: dict[int | str, list[Mapping[str, Any]]] = {}
    for row in responses:
        groups.setdefault(row["group"], []).append(row)
    size = len(next(iter(groups.values())))
    for group, rows in groups.items():
        if len(rows) != size:
            raise BadBundle(
                f"groups must have one size; {reprlib.repr(group)} has {len(rows)} responses, the first {size}"
            )
        for name in ("prompt", "minibatches"):
            if any(row[name] != rows[0][name] for row in rows):
                raise BadBundle(
                    f"the responses of a group must share {name}; those of group {reprlib.repr(group)} do not"
                )
    ordered = [row for rows in groups.values() for row in rows]
    lengths_B = torch.tensor([row["length"] for row in ordered])
    longest = int(lengths_B.max())
    if (needed := 8 * len(ordered) * longest) > MAX_BYTES:
        raise BadBundle(f"{len(ordered)} rows padded to {longest} tokens are {needed} bytes; at most {MAX_BYTES}")
    _, minibatches_B = torch.tensor([row["minibatches"] for row in ordered]).unique(return_inverse=True)
    return Bundle(
        mask_BT=(torch.arange(longest) < lengths_B[:, None]).long(),
        groups_B=torch.arange(len(groups)).repeat_interleave(size),
        rewards_B=torch.tensor([row["reward"] for row in ordered]),
        minibatches_B=minibatches_B,
        **{
            f"{name}_BT": pad_sequence([row["numbers"][name] for row in ordered], batch_first=True)
            for name in ordered[0]["numbers"]
        },
    )

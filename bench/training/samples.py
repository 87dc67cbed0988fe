"""Samples: a few prompts of every run with responses and their rewards, for what numbers do not show of a policy.

They stand in ``samples.jsonl`` in the run's folder, a line for each response. A file that is read back may come from
anybody: its size is bounded again, and a line that is no sample is left out.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadymoe.bench.support import files

if TYPE_CHECKING:
    from steadymoe.bench.tasks import Task
    from steadymoe.bench.training.sampling import Rollout

# From each sampled rollout: prompts, responses to each prompt, and characters of a prompt or response.
PROMPTS, RESPONSES, CHARACTERS = 4, 2, 200
# The most bytes that are read of one run: up to four bytes of UTF-8 for each character, and the keys.
_MAX_BYTES = 3 * PROMPTS * RESPONSES * (2 * 4 * CHARACTERS + 200)

# Beyond the largest number of a sample; nan is none.
_LARGEST = 2.0**63

Row = dict[str, Any]


def is_shown(step: int, steps: int) -> bool:
    """Return whether samples of the rollout of ``step`` are kept: the first, the middle and the last of ``steps``."""
    return step in (1, (steps + 1) // 2, steps)


def take(rollout: "Rollout", task: "Task", step: int, responses: int) -> list[Row]:
    """step, prompt, response, finished, reward of the first rows of a rollout with ``responses`` to each prompt."""
    from steadymoe.bench.tasks import decoded  # it imports transformers, which who reads samples need not wait for

    sequences, rows = rollout.sequences, []
    width = sequences.tokens_BS.shape[1] - sequences.response_width
    for index in range(len(sequences.tokens_BS)):
        if index // responses >= PROMPTS or index % responses >= RESPONSES:
            continue
        tokens, real = sequences.tokens_BS[index], sequences.mask_BS[index].bool()
        prompt, response = tokens[:width][real[:width]].tolist(), tokens[width:][real[width:]].tolist()
        text, finished = decoded(task.tokenizer, prompt, response)
        texts = str(task.tokenizer.decode(prompt)), text
        shortened = dict(zip(("prompt", "response"), map(_bounded, texts), strict=True))
        rows.append({"step": step} | shortened | {"finished": finished, "reward": rollout.scores_B[index].item()})
    return rows


def keep_until(folder: Path, step: int | None) -> None:
    """Before a run goes on after ``step``: remove the samples of later steps; for None remove all samples."""
    rows = [] if step is None else [row for row in read(folder) if row["step"] <= step]
    files.write(_path(folder), partial(Path.write_text, data="".join(map(_line, rows)), encoding="utf-8"))


def append(folder: Path, rows: list[Row]) -> None:
    """Add the samples of one step."""
    with files.replaceable(_path(folder)).open("a", encoding="utf-8") as file:
        file.write("".join(map(_line, rows)))


def read(folder: Path) -> list[Row]:
    """Return the samples of a run in their order; empty for a run without samples."""
    try:
        with files.opened(_path(folder)) as file:
            text = file.read(_MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = files.parse_json(line)
        except ValueError:  # torn by a kill, or no sample
            continue
        if isinstance(row, Mapping) and all(_is_a(row.get(key), kind) for key, kind in _KINDS.items()):
            texts = {key: _bounded(row[key]) for key in ("prompt", "response")}
            rows.append({key: row[key] for key in _KINDS} | texts)
    return rows


_KINDS: dict[str, Any] = {"step": int, "prompt": str, "response": str, "finished": bool, "reward": int | float}


def _is_a(value: Any, kind: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind in (str, bool) or (is_number and not abs(value) >= _LARGEST))


def _path(folder: Path) -> Path:
    return folder / "samples.jsonl"


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _bounded(text: str) -> str:
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"

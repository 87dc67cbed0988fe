"""Rollouts of another trainer, and the command that imports them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadymoe.integrations import command as integrations

Row = dict[str, Any]


def rollouts() -> list[Row]:
    """Six groups of four responses of 1 to 6 tokens, in three mini-batches."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(24):
        group, length = number // 4, int(generator.integers(1, 7))
        old = -3 * generator.random(length, dtype=np.float32) - 0.01
        rows.append(
            {
                "prompt": [5, 6, group],
                "response": generator.integers(0, 9, length).tolist(),
                "rewards": float(generator.integers(2)),
                "groups": f"prompt {group}",
                "minibatches": group % 3,
                "rollout_logprobs": (old * 1.01).tolist(),
                "old_logprobs": old.tolist(),
                "logprobs": (old * np.exp(0.3 * generator.normal(size=length))).tolist(),
            }
        )
    return rows


def jsonl(folder: Path, rows: list[Row]) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def steadymoe_integrations(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``steadymoe-integrations`` with these words."""
    monkeypatch.setattr(sys, "argv", ["steadymoe-integrations", *words])
    with pytest.raises(SystemExit) as stopped:
        integrations.main()
    return int(stopped.value.code or 0)

"""One number is one run: every spelling of a number gives one hash and one folder."""

from pathlib import Path

import pytest
from fixtures import write_all

from steadymoe.bench.runs import compose

# Two spellings of one run each.
SPELLINGS: list[tuple[list[str], list[str]]] = [
    (
        ["routing.aux_loss=-0.0", "algorithm.loss={clip_low: -0.0, clip_high: 1, dual_clip: 3}"],  # null in the YAML
        ["routing.aux_loss=0", "algorithm.loss={clip_low: 0, clip_high: 1.0, dual_clip: 3.0}"],
    ),
    (
        ["algorithm=opsm", "algorithm.loss.host.dual_clip=3", "correction=tis", "correction.ratio_cap=3"],
        ["algorithm=opsm", "algorithm.loss.host.dual_clip=3e0", "correction=tis", "correction.ratio_cap=3.0"],
    ),
    (
        ["task=weighted", "task={weights: [-0.0,1,2.5], nested: {many: [[-0.0]]}, whole: 3.0, share: -0.0}"],
        ["task=weighted", "task={weights: [0.0,1.0,2.5], nested: {many: [[0.0]]}, whole: 3, share: 0}"],
    ),
    (["task=weighted", "task.nested.many=[{a: -0.0}]"], ["task=weighted", "task.nested.many=[{a: 0.0}]"]),
    (["algorithm.loss.dual_clip=null"], ["algorithm.loss.aggregation=seq-mean-token-mean"]),  # as by default
]
TASK = """
_target_: my_spelled_tasks.Weighted
min_operands: 2
max_operands: 3
modulus: 10
spare_tokens: 1
version: 1
whole: 3
weights: [0.5, 0.5]
nested: {many: [[0.5]]}
share: null
"""
CODE = """
from dataclasses import dataclass
from typing import Any
from steadymoe.bench.tasks.chain import Chain

@dataclass(kw_only=True)
class Weighted(Chain):
    whole: int
    weights: list[float]
    nested: Any
    share: float | None
"""


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_spelling_of_a_number_does_not_change_a_run(
    one: list[str], other: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, {"conf/task/weighted.yaml": f"# Spelled.{TASK}", "my_spelled_tasks.py": CODE})
    monkeypatch.setenv("STEADYMOE_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (first,), (second,) = map(compose.plan, (one, other))
    assert (first.config_hash, first.folder) == (second.config_hash, second.folder)
    assert repr(first.plain) == repr(second.plain)

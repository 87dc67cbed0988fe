"""One number is one run: every spelling of a number gives one hash and one folder."""

from pathlib import Path

import pytest
from fixtures import write_all

from steadymoe.bench.runs import compose

# Two spellings of one run, and the words that both need.
SPELLINGS = [
    ("routing.aux_loss=-0.0", "routing.aux_loss=0", ()),
    ("algorithm.loss.clip_low=-0.0", "algorithm.loss.clip_low=0", ()),
    ("algorithm.loss.clip_high=1", "algorithm.loss.clip_high=1.0", ()),
    ("algorithm.loss.dual_clip=3", "algorithm.loss.dual_clip=3.0", ()),  # null in the YAML
    ("algorithm.loss.host.dual_clip=3", "algorithm.loss.host.dual_clip=3e0", ("algorithm=opsm",)),
    ("correction.ratio_cap=3", "correction.ratio_cap=3.0", ("correction=tis",)),
    ("task.weights=[-0.0,1,2.5]", "task.weights=[0.0,1.0,2.5]", ()),
    ("task.nested={many:[[-0.0]]}", "task.nested={many:[[0.0]]}", ()),
    ("task.nested.many=[{a: -0.0}]", "task.nested.many=[{a: 0.0}]", ()),
    ("task.whole=3.0", "task.whole=3", ()),
    ("task.share=-0.0", "task.share=0", ()),
    ("algorithm.loss.dual_clip=null", "algorithm.loss.aggregation=seq-mean-token-mean", ()),  # as by default
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


@pytest.mark.parametrize(("one", "other", "words"), SPELLINGS)
def test_spelling_of_a_number_does_not_change_a_run(
    one: str, other: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if one.startswith("task."):
        write_all(tmp_path, {"conf/task/weighted.yaml": f"# Spelled.{TASK}", "my_spelled_tasks.py": CODE})
        monkeypatch.setenv("STEADYMOE_PATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        words = ("task=weighted",)
    first, second = (compose.plan([*words, each])[0] for each in (one, other))
    assert (first.config_hash, first.folder) == (second.config_hash, second.folder)
    assert repr(first.plain) == repr(second.plain)

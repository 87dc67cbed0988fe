"""How experts are computed: back ends agree, one is chosen by name; what cannot be had is refused before training."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Said
from small_models import FAMILIES, forward_and_gradients, make, shipped
from small_runs import planned
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from steadymoe.bench.runs import compose, execute
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import cold_start
from steadymoe.models import megablocks


@pytest.mark.parametrize("name", FAMILIES)
def test_eager_and_grouped_mm_agree_in_forward_and_all_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    grouped_mm = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda *args: calls.append(1) or grouped_mm(*args))
    model = make(shipped(name))
    eager = forward_and_gradients(model, "eager")
    assert calls == []
    grouped = forward_and_gradients(model, "grouped_mm")
    assert calls
    assert {key for key in eager if ".experts." in key}
    for key in eager:
        assert (grouped[key] - eager[key]).norm() <= 1e-5 * eager[key].norm(), key
    assert eager.keys() == grouped.keys()


def test_bf16_applies_to_eager_experts_but_not_to_grouped_mm() -> None:
    model = make(shipped("micro"))
    experts = model.model.layers[0].mlp.experts
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(9, 64, generator=draw), torch.arange(18).view(9, 2) % 8, torch.rand(9, 2, generator=draw)

    def moved(name: str) -> float:
        model.set_experts_implementation(name)
        with torch.no_grad():
            exact = experts(*given)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return ((experts(*given) - exact).norm() / exact.norm()).item()

    assert moved("grouped_mm") == 0
    assert 1e-3 < moved("eager") < 2e-2


def test_requested_back_end_computes_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, task: Chain
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(cold_start, "load_or_make", lambda *_, **__: {})
    monkeypatch.setattr(
        execute, "Trainer", lambda model, *_: made.append(model.config._experts_implementation) or 1 / 0
    )
    model.save_pretrained(tmp_path / "checkpoint")
    task.tokenizer.save_pretrained(tmp_path / "checkpoint")
    given = [word for word in planned(tmp_path).command.split()[2:] if not word.startswith("model")]
    checkpoint = ["model=pretrained", f"model.path={tmp_path / 'checkpoint'}"]
    for words in (["experts=eager"], ["experts=grouped_mm"]):
        assert execute.execute(planned(tmp_path, *words)) == "failed"
        assert execute.execute(compose.plan([*given, *checkpoint, *words])[0]) == "failed"
    assert made == ["eager", "eager", "grouped_mm", "grouped_mm"]


@pytest.mark.parametrize(
    ("words", "installed", "message"),
    [
        (["experts=fast"], True, "`experts` must be 'grouped_mm', 'eager' or 'megablocks', got 'fast'"),
        (["experts=eager", "model=dense_micro"], True, "this model is dense: experts=eager would have no effect"),
        (["experts=megablocks"], True, "set TRITON_INTERPRET=1 in the environment"),
        (["experts=megablocks"], False, "not installed (no triton, stk, megablocks); `make megablocks` adds it"),
    ],
)
def test_unavailable_back_end_is_refused_before_training(
    words: list[str], installed: bool, message: str, monkeypatch: pytest.MonkeyPatch, refusal_of: Said
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    find_spec = importlib.util.find_spec
    theirs = ("triton", "stk", "megablocks")
    found = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: found if name in theirs else find_spec(name, *a))
    assert message in refusal_of(*words)


def test_torch_fallback_of_megablocks_ops_sorts_and_counts() -> None:
    keys = torch.tensor([2, 0, 2, 3, 0], dtype=torch.int32)
    ordered, order, sums = torch.empty_like(keys), torch.empty_like(keys), torch.empty(1, 5, dtype=torch.int32)
    megablocks._Supplied.sort(keys, 2, ordered, order)
    assert (ordered.tolist(), order.tolist()) == ([0, 0, 2, 2, 3], [1, 4, 0, 2, 3])
    counts = megablocks._Supplied.histogram(ordered, 5)
    megablocks._Supplied.inclusive_cumsum(counts[None], 1, sums)
    assert counts.tolist() == [2, 0, 2, 1, 0]
    assert sums.tolist() == [[2, 2, 4, 5, 5]]
    assert (counts.dtype, sums.dtype) == (torch.int32, torch.int32)

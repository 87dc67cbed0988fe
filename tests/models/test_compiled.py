"""Compiled layers say what layers that are not compiled say, and what cannot be compiled is refused.

torch's own tracer runs in every test. Where a test leaves out the C++ compiler (``traced``), the operations of a graph
run one by one: what is compared is what enters and leaves a graph.
"""

import copy
import functools
import os
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_execute import PROPORTIONAL, SMALL, planned
from test_execute import assert_same as assert_same_tables
from test_learner import trainer
from test_models import BUILT, shipped
from test_savings import assert_same
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.testing import assert_close
from transformers import PreTrainedModel, Qwen3MoeConfig

from steadymoe.bench.runs import record
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training import compiling, packing
from steadymoe.bench.training.forward import Forward, Sequences, forward
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.sampling import Decoding, Rollout, roll_out
from steadymoe.models import balancing, build, compiled
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE

# A machine without a C++ compiler runs what torch's tracer alone can show.
WITHOUT = compiled.reason_against(Qwen3MoeConfig, "grouped_mm", "cpu")
compiles = pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))
TRACED = functools.cache(lambda function: torch.compile(function, dynamic=True, fullgraph=True, backend="eager"))
PROMPTS = ["1+2=", "3-4+5=", "0+1-2+3=", "5+5=", "2-1="]


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled code of tests does not mix with the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs whose operations run one by one, without a C++ compiler."""
    monkeypatch.setattr(compiled, "_graph", TRACED)


def graphs() -> int:
    """How many graphs this process has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def twins(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model, and its copy with compiled layers."""
    other = copy.deepcopy(model)
    compiled.compile_layers(other)
    return model, other


def rolled(model: PreTrainedModel, task: Chain, responses: int = 3, gates: bool = True) -> Rollout:
    decoding = Decoding(top_k=3, gates=gates)
    return roll_out(model, task, PROMPTS, responses, torch.Generator().manual_seed(0), decoding)


def gradients(model: PreTrainedModel, sequences: Sequences, **given: Any) -> tuple[Forward, list[Tensor]]:
    made = forward(model, sequences, "fp32", **given)
    model.zero_grad()
    (made.logprobs_BT.square() * sequences.response_mask_BT).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    return made, [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def shared_prompts(sequences: Sequences) -> packing.Layout:
    """A row for each prompt of ``rolled``."""
    groups_B = torch.arange(len(PROMPTS)).repeat_interleave(len(sequences.tokens_BS) // len(PROMPTS))
    return packing.shared(sequences.tokens_BS, sequences.mask_BS, sequences.response_width, groups_B)


def assert_equal(ours: Forward, theirs: Forward, sequences: Sequences, tolerance: float = 1e-5) -> None:
    assert_close(ours.logprobs_BT, theirs.logprobs_BT, atol=tolerance, rtol=tolerance)
    assert_close(ours.entropy_BT, theirs.entropy_BT, atol=tolerance, rtol=tolerance)
    if theirs.routes_LBFK is None:
        assert ours.routes_LBFK is None
        return
    assert torch.equal(ours.routes_LBFK, theirs.routes_LBFK)
    assert torch.equal(ours.executed_LBFK, theirs.executed_LBFK)
    assert (ours.executed_LBFK is ours.routes_LBFK) == (theirs.executed_LBFK is theirs.routes_LBFK)
    real_N, real_BT = sequences.route_mask_BF.flatten(), sequences.response_mask_BT.bool()  # padding may say anything
    for one, other in zip(ours.router_logits_LNE, theirs.router_logits_LNE, strict=True):
        assert_close(one[real_N], other[real_N], atol=tolerance, rtol=tolerance)
    for name in ("router_inputs_LBTH", "router_logprobs_LBTE"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert_close(one[:, real_BT], other[:, real_BT], atol=tolerance, rtol=tolerance)


# --- the same numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["free", "forced", "recalled", "predicted", "biased"])
def test_routes_are_recorded_forced_and_predicted_in_a_graph_as_outside(
    traced: None, model: PreTrainedModel, task: Chain, how: str
) -> None:
    if how == "biased":
        balancing.install(model)
        for each in balancing.biases(model).values():
            each.copy_(torch.tensor([0.0, 0.5, 0.0, 0.9]))
    plain, other = twins(model)
    rollout, sampled = rolled(plain, task), rolled(other, task)
    assert_close(sampled.gates_LBFK, rollout.gates_LBFK, atol=1e-5, rtol=1e-5)
    assert torch.equal(sampled.sequences.tokens_BS, rollout.sequences.tokens_BS)
    assert torch.equal(sampled.routes_LBFK, rollout.routes_LBFK)
    assert_close(sampled.logprobs_BT, rollout.logprobs_BT, atol=1e-5, rtol=1e-5)
    routes_LBFK, given = rollout.routes_LBFK, {}
    if how == "predicted":
        generator = torch.Generator().manual_seed(1)
        shapes = [router.get_parameter("weight").T.shape for router in routers(model)]
        given = {"heads_LHE": [torch.randn(shape, generator=generator) for shape in shapes]}
    elif how != "free":
        moved_LBFK = routes_LBFK.roll(1, 0)  # each layer runs another layer's experts
        moved_LBFK = torch.where((moved_LBFK == NO_ROUTE).any(-1, keepdim=True), NO_ROUTE, moved_LBFK)
        moved_LBFK[:, ::3] = NO_ROUTE
        given = {"forced_LBFK": moved_LBFK}
        if how == "recalled":
            given["gates_LBFK"] = rollout.gates_LBFK.flip(-1)
    for layout in (None, shared_prompts(rollout.sequences)):
        theirs, expected = gradients(plain, rollout.sequences, layout=layout, **given)
        ours, made = gradients(other, rollout.sequences, layout=layout, **given)
        assert_equal(ours, theirs, rollout.sequences)
        if how != "free":
            assert (theirs.executed_LBFK != theirs.routes_LBFK).any()
        for one, another in zip(made, expected, strict=True):
            assert_close(one, another, atol=1e-5, rtol=1e-4)


@compiles
def test_one_graph_serves_all_layers_rows_and_lengths(
    traced: None, model: PreTrainedModel, task: Chain, tmp_path: Path
) -> None:
    first = graphs()
    made = trainer(tmp_path, "compile=true")
    before = graphs()
    assert 0 < before - first <= 10  # rows of sequences, and rows that share a prompt
    for step in range(1, 4):
        made.step(step)
    wide = rolled(made.model, task, responses=5, gates=False)  # as the run samples
    for rows in (2, 9, 25):
        gradients(made.model, wide.sequences.rows(torch.arange(rows)))
    assert graphs() == before


@pytest.mark.check
@compiles
def test_a_forward_and_its_gradients_by_the_cpp_compiler_are_torchs(model: PreTrainedModel, task: Chain) -> None:
    plain, other = twins(model)
    sequences = rolled(plain, task).sequences
    for layout in (None, shared_prompts(sequences)):
        (theirs, expected), (ours, made) = (gradients(each, sequences, layout=layout) for each in (plain, other))
        assert_equal(ours, theirs, sequences)
        assert ours.logprobs_BT.grad_fn is not None
        for one, another in zip(made, expected, strict=True):
            assert (one - another).norm() <= 1e-5 * another.norm()


@pytest.mark.parametrize("words", [["algorithm=gspo", "routing=r2"], ["routing=r3_gates"], ["model=dense_micro"]])
@compiles
def test_updates_with_compiled_layers_are_the_updates_without(traced: None, tmp_path: Path, words: list[str]) -> None:
    words = [*words, *PROPORTIONAL, "task.max_operands=4", "task.spare_tokens=3"]
    assert_same(trainer(tmp_path, *words, "compile=true"), trainer(tmp_path, *words))


# --- what is refused ---------------------------------------------------------------------------------


def test_what_cannot_be_compiled_is_refused_in_one_line(refusal_of: Callable[..., str]) -> None:
    assert "compile=true: GptOssConfig is none of the families" in refusal_of("compile=true", "model=gpt_oss_micro")
    assert "compile=true: experts=eager runs Python" in refusal_of("compile=true", "model=micro", "experts=eager")
    assert "compile=true: it was not compared with precision=bf16" in refusal_of("compile=true", "precision=bf16")
    assert "`compile` must be true or false" in refusal_of("compile=2")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no-such-compiler", "there is no no-such-compiler (the variable CXX names another)"),
        ("no-headers", "needs the headers of Python"),
        ("open", "others can write to"),
        ("file", "is no folder"),
    ],
)
@compiles
def test_a_machine_that_cannot_compile_says_why(
    refusal_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    value: str,
    message: str,
) -> None:
    home = tmp_path_factory.mktemp("home")
    (home / "open" / "steadymoe" / "compiled" / "1").mkdir(parents=True)
    (home / "open" / "steadymoe" / "compiled" / "1").chmod(0o777)
    (home / "file" / "steadymoe" / "compiled").mkdir(parents=True)
    (home / "file" / "steadymoe" / "compiled" / "1").write_text("")
    if value == "no-headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda _: str(home))
    else:
        monkeypatch.setenv(*(("CXX", value) if value == "no-such-compiler" else ("XDG_CACHE_HOME", str(home / value))))
    error = refusal_of("compile=true", "model=micro")
    assert error.startswith("steadymoe: compile=true: ")
    assert message in error


def test_compiled_code_is_kept_in_a_folder_of_the_users_own(
    traced: None, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "given"))
    compiled.compile_layers(model)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(compiled.cache_folder())
    assert tmp_path / "given" not in (compiled.cache_folder(), *compiled.cache_folder().parents)
    assert stat.S_IMODE(compiled.cache_folder().stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "error", [ImportError("file too short"), InductorError(RuntimeError("Failed to import"), None)]
)
@compiles
def test_code_that_cannot_be_used_is_compiled_again_in_a_new_folder(
    traced: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_all, calls = compiling._run_all, []

    def damaged_at_first(learner: Learner) -> None:
        calls.append(compiled.cache_folder().name)
        if len(calls) == 1:
            raise error
        run_all(learner)

    monkeypatch.setattr(compiling, "_run_all", damaged_at_first)
    trainer(tmp_path / "results", "compile=true").step(1)
    assert calls == ["1", "2"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(compiled.cache_folder())
    assert f"compiled code cannot be used ({type(error).__name__}); compiling again" in capsys.readouterr().err

    def damaged(_: Learner) -> None:
        raise ImportError("no such file")

    monkeypatch.setattr(compiling, "_run_all", damaged)
    with pytest.raises(ImportError):  # twice is no accident
        trainer(tmp_path / "results", "compile=true")


# --- what takes minutes ------------------------------------------------------------------------------

FAMILIES = [name for name in BUILT if "micro" in name or name in ("flat", "dense_flat")]


@pytest.mark.check
@pytest.mark.parametrize("name", FAMILIES)
@compiles
def test_a_family_is_compiled_if_it_is_the_same_compiled(name: str, task: Chain) -> None:
    """With the C++ compiler: sampling, forced routes and gradients of every family that is not refused."""
    config = shipped(name)
    refused = compiled.reason_against(build.config_class(config["_target_"]), "grouped_mm", "cpu")
    if refused is not None:
        pytest.skip(refused)
    plain, other = twins(build.build(config, task.tokenizer, 0, "cpu"))
    theirs, ours = rolled(plain, task), rolled(other, task)
    assert torch.equal(ours.sequences.tokens_BS, theirs.sequences.tokens_BS)
    assert_close(ours.logprobs_BT, theirs.logprobs_BT, atol=2e-5, rtol=2e-5)
    forced = None if theirs.routes_LBFK is None else theirs.routes_LBFK.flip(0)
    expected, expected_gradients = gradients(plain, theirs.sequences, forced_LBFK=forced)
    made, made_gradients = gradients(other, theirs.sequences, forced_LBFK=forced)
    assert_equal(made, expected, theirs.sequences, 2e-5)
    for one, another in zip(made_gradients, expected_gradients, strict=True):
        assert (one - another).norm() <= 1e-4 * another.norm()


def in_a_process(results: Path, cache: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "steadymoe.bench.cli", "run", *SMALL, f"results_dir={results}", "compile=true"]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.check
@compiles
def test_killed_runs_two_workers_of_one_empty_cache_and_damaged_code_change_no_bit(tmp_path: Path) -> None:
    """A run is the same to the bit whoever filled the cache, when it is killed and goes on, and after damage."""
    cache = tmp_path / "cache"
    both = [in_a_process(tmp_path / name, cache) for name in ("one", "two")]
    assert [each.wait() for each in both] == [0, 0]
    killed = in_a_process(tmp_path / "killed", cache)
    folder = planned(tmp_path / "killed", "compile=true").folder
    while not (folder / "checkpoint.safetensors").exists() and killed.poll() is None:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert record.status(folder) == "interrupted"
    assert in_a_process(tmp_path / "killed", cache).wait() == 0
    for file in cache.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    damaged = in_a_process(tmp_path / "damaged", cache)
    assert damaged.wait() == 0
    one, *others = (planned(tmp_path / name, "compile=true").folder for name in ("one", "two", "killed", "damaged"))
    for other in others:
        assert_same_tables(one, other)

"""Bundles: what is written is read again, whole, in a process without the model; a fault is answered in one line."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MICRO
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench.bundles import bundle as bundles
from steadymoe.bench.bundles import of_logprobs
from steadymoe.bench.bundles.bundle import MOST, BadBundle, Bundle
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.sampling import roll_out
from steadymoe.models import build

ROOT = Path(__file__).parents[2]
EVERY = ("grpo", "gspo", "dapo", "cispo", "reinforce")


def made(model: PreTrainedModel, task: Chain, prompts: int = 6, responses: int = 4) -> Bundle:
    """A rollout of a small model, its old policy, and the policy after the weights were disturbed."""
    texts = [f"{first}+3*2-1=" for first in range(prompts)]
    generator = torch.Generator().manual_seed(0)
    rollout = roll_out(model, task, texts, responses, generator)
    with torch.no_grad():
        old = forward(model, rollout.sequences, "fp32")
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        now = forward(model, rollout.sequences, "fp32")
    rewards_B = (torch.rand(prompts * responses, generator=generator) > 0.5).float()
    return Bundle(
        response_width=rollout.sequences.response_width,
        about={"made_by": "a test", "model": "micro"},
        tokens_BS=rollout.sequences.tokens_BS,
        mask_BS=rollout.sequences.mask_BS,
        groups_B=torch.arange(prompts * responses) // responses,
        rewards_B=rewards_B,
        minibatches_B=torch.arange(prompts * responses) // responses % 3,
        rollout_logprobs_BT=rollout.logprobs_BT,
        old_logprobs_BT=old.logprobs_BT,
        logprobs_BT=now.logprobs_BT,
    )


@pytest.fixture(scope="module")
def bundle(task: Chain) -> Bundle:
    torch.set_num_threads(1)
    return made(build.build(MICRO, task.tokenizer, 0, "cpu"), task)


def same(one: Bundle, other: Bundle) -> bool:
    return (
        one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(values, other.tensors[name]) for name, values in one.tensors.items())
        and one.response_width == other.response_width
    )


def test_what_is_written_is_read_again_and_has_the_same_bytes(bundle: Bundle, tmp_path: Path) -> None:
    bundles.write(bundle, tmp_path / "one")
    bundles.write(bundle, tmp_path / "two")
    again = bundles.read(tmp_path / "one")
    assert same(again, bundle)
    assert again.about == bundle.about
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert again.sizes == {"B": 24, "S": 8 + again.response_width, "T": again.response_width}
    assert again.responses == 4
    assert [len(rows) for rows in again.rows_of_minibatches()] == [8, 8, 8]


def test_any_trainer_writes_one_with_safetensors_alone(bundle: Bundle, tmp_path: Path) -> None:
    facts = {"response_width": bundle.response_width, "about": {}}
    save_file(bundle.tensors, tmp_path / "theirs", metadata={"steadymoe_bundle": json.dumps(facts)})
    assert same(bundles.read(tmp_path / "theirs"), bundle)


def test_a_new_process_without_the_model_gets_the_same_numbers(bundle: Bundle, tmp_path: Path) -> None:
    bundles.write(bundle, tmp_path / "bundle")
    here = of_logprobs.audit(bundle, of_logprobs.losses(EVERY, bundle))
    command = [sys.executable, "-m", "steadymoe.bench.cli", "bundle", "audit", str(tmp_path / "bundle")]
    command += ["--algorithms", ",".join(EVERY), "--csv", str(tmp_path / "audit.csv")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert (tmp_path / "audit.csv").read_text() == here.to_csv(index=False)


def test_nothing_is_overwritten(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(BadBundle, match="exists already; nothing is overwritten"):
        bundles.write(bundle, tmp_path / "mine")
    with pytest.raises(BadBundle, match="there is no folder"):
        bundles.write(bundle, tmp_path / "no" / "mine")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_bundle_that_is_too_large_is_not_written(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MOST_BYTES", 100)
    with pytest.raises(BadBundle, match="write fewer rollouts"):
        bundles.write(bundle, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [SafetensorError("I/O error: No space left on device (os error 28)"), OSError(28, "No space left on device")],
)
def test_a_full_disk_is_answered_in_one_line_and_leaves_nothing(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fills_up(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(bundles, "save_file", fills_up)
    with pytest.raises(BadBundle, match=r"bundle cannot be written: .*No space left on device"):
        bundles.write(bundle, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


# --- values ------------------------------------------------------------------------------------------


def put(values: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    changed = values.clone()
    changed[place] = value
    return changed


def holed(bundle: Bundle) -> Tensor:
    row = int(bundle.mask_BT.sum(-1).argmax())
    return put(bundle.mask_BS, (row, -bundle.response_width), 0)


def later(bundle: Bundle, first: int) -> Tensor:
    """1, but for the first token of the second row's prompt; token 0 is no padding."""
    place = int(bundle.mask_BS[1].argmax())
    factor = torch.ones_like(bundle.mask_BS)
    factor[:4, place] = 0 if first else 1
    factor[1, place] = 0
    return factor


def torn(bundle: Bundle) -> Tensor:
    return bundle.groups_B[torch.arange(24).roll(1)]


# What is wrong → the change, and the words of the answer.
FAULTS: dict[str, tuple[Callable[[Bundle], dict[str, object]], str]] = {
    "shape": (lambda b: {"rewards_B": b.rewards_B[:-1]}, r"rewards_B must have the shape \(B\) with B = 24"),
    "scalar": (lambda b: {"rewards_B": b.rewards_B[0]}, r"rewards_B must have the shape"),
    "no tensor": (lambda b: {"rewards_B": [1.0]}, "rewards_B must be a tensor; got list"),
    "no prompts": (lambda b: {"response_width": 99}, "tokens_BS must be .B, S. with S > response_width = 99"),
    "width": (lambda b: {"response_width": "4"}, "response_width must be a whole number"),
    "kind": (lambda b: {"tokens_BS": b.tokens_BS.float()}, "tokens_BS must hold whole numbers"),
    "kind of floats": (lambda b: {"rewards_B": b.groups_B}, "rewards_B must hold floating-point numbers"),
    "too large": (lambda b: {"tokens_BS": b.tokens_BS.long() + 2**40}, "tokens_BS must hold whole numbers that fit"),
    "mask of 2": (lambda b: {"mask_BS": b.mask_BS * 2}, "mask_BS must hold 0 and 1 alone"),
    "hole": (lambda b: {"mask_BS": holed(b)}, "mask_BS must be one run of 1 at the left end of each response"),
    "no prompt": (lambda b: {"mask_BS": put(b.mask_BS, (2, b.tokens_BS.shape[1] - b.response_width - 1), 0)}, "prompt"),
    "negative": (
        lambda b: {"tokens_BS": put(b.tokens_BS, (0, -b.response_width), -5)},
        "tokens_BS must hold token ids",
    ),
    "nan": (lambda b: {"logprobs_BT": put(b.logprobs_BT, (3, 0), float("nan"))}, "logprobs_BT must be finite.*row 3"),
    "above 0": (lambda b: {"old_logprobs_BT": put(b.old_logprobs_BT, (1, 0), 0.1)}, "at most 0; wrong in row 1"),
    "reward": (
        lambda b: {"rewards_B": put(b.rewards_B, (2,), float("inf"))},
        "rewards_B must be finite; wrong in row 2",
    ),
    "torn group": (
        lambda b: {"groups_B": torn(b)},
        "groups_B must be whole groups of one size, each in neighbouring rows",
    ),
    "short group": (lambda b: {"groups_B": put(b.groups_B, (3,), 99)}, "groups_B must be whole groups of one size"),
    "other prompt": (
        lambda b: {"groups_B": b.groups_B.div(2, rounding_mode="floor")},
        "groups_B must share a prompt; wrong in row 4",
    ),
    "shorter prompt": (
        lambda b: {"tokens_BS": b.tokens_BS * later(b, 1), "mask_BS": b.mask_BS * later(b, 0)},
        "groups_B must share a prompt; wrong in row 1",
    ),
    "torn by mini-batches": (lambda b: {"minibatches_B": put(b.minibatches_B, (1,), 2)}, "must hold whole groups"),
    "gap": (lambda b: {"minibatches_B": b.minibatches_B * 2}, "without a gap"),
    "a nested fact": (lambda b: {"about": {"model": {"name": "x"}}}, "about must map names to texts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_value_is_answered_in_one_line_with_its_field(bundle: Bundle, fault: str) -> None:
    change, words = FAULTS[fault]
    with pytest.raises(BadBundle, match=words) as refused:
        replace(bundle, **change(bundle))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_padding_is_0_whatever_was_there(bundle: Bundle) -> None:
    noisy = torch.where(bundle.mask_BT.bool(), bundle.logprobs_BT, float("nan"))
    assert same(replace(bundle, logprobs_BT=noisy), bundle)


# --- files -------------------------------------------------------------------------------------------


def facts_changed(path: Path, **changes: object) -> None:
    changed(path, lambda facts, tensors: facts.update(changes))


def changed(path: Path, change: Callable[[dict[str, object], dict[str, Tensor]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()[bundles.ENTRY])
    tensors = load_file(path)
    change(facts, tensors)
    save_file(tensors, path, metadata={bundles.ENTRY: json.dumps(facts)})


def other_metadata(path: Path, metadata: dict[str, str]) -> None:
    save_file(load_file(path), path, metadata=metadata)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda f: f.unlink(), "there is no file bundle"),
    "no facts": (lambda f: other_metadata(f, {"format": "pt"}), "must have an entry steadymoe_bundle"),
    "no JSON": (lambda f: other_metadata(f, {bundles.ENTRY: "{"}), "is not JSON"),
    "deep JSON": (lambda f: other_metadata(f, {bundles.ENTRY: "[" * 60000}), "is not JSON"),
    "a list": (lambda f: other_metadata(f, {bundles.ENTRY: "[]"}), "must have an entry steadymoe_bundle"),
    "strange fact": (lambda f: facts_changed(f, file="/etc"), "with response_width and about"),
    "width": (lambda f: facts_changed(f, response_width="4"), "response_width must be a whole number"),
    "about": (lambda f: facts_changed(f, about={"model": 3}), "about must map names to texts"),
    "cut": (lambda f: f.write_bytes(b"12"), "is not a safetensors file"),
    "torn": (lambda f: f.write_bytes(f.read_bytes()[:-9]), "is not a whole safetensors file"),
    "long header": (lambda f: f.write_bytes(struct.pack("<Q", 2**40) + b"{}"), "header has more than"),
    "short of its header": (lambda f: f.write_bytes(struct.pack("<Q", 2**16) + b"{}"), "not a whole safetensors file"),
    "strange field": (
        lambda f: changed(f, lambda facts, t: t.update(extra=torch.zeros(2))),
        "unknown field 'extra'; fields are tokens_BS, mask_BS",
    ),
    "needed field": (lambda f: changed(f, lambda facts, t: t.pop("rewards_B")), "there is no rewards_B; every bundle"),
    "type": (
        lambda f: changed(f, lambda facts, t: t.update(rewards_B=t["rewards_B"].double())),
        "rewards_B must be stored as F32; got F64",
    ),
    "value": (
        lambda f: changed(f, lambda facts, t: t.update(old_logprobs_BT=-t["old_logprobs_BT"])),
        "old_logprobs_BT must hold logarithms",
    ),
}


@pytest.fixture(scope="module")
def written(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "whole"
    bundles.write(bundle, path)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_answered_in_one_line_that_names_it(written: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "bundle"
    path.write_bytes(written.read_bytes())
    change, words = DAMAGES[damage]
    change(path)
    with pytest.raises(BadBundle, match=words) as refused:
        bundles.read(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_sizes_are_bounded_before_a_tensor_is_loaded(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "tensors_of", lambda path: pytest.fail("loaded"))
    with monkeypatch.context() as smaller:
        smaller.setitem(MOST, "B", 7)
        with pytest.raises(BadBundle, match="the size B must be between 1 and 7; got 24"):
            bundles.read(written)
    monkeypatch.setattr(bundles, "MOST_BYTES", 64)
    with pytest.raises(BadBundle, match="at most 64 are read"):
        bundles.read(written)


# --- the page ----------------------------------------------------------------------------------------


def test_the_page_documents_every_field() -> None:
    page = (ROOT / "docs" / "bundle.md").read_text().partition("\n## File format\n")[2].partition("\n## ")[0]
    for name, dtype in bundles.FIELDS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == f"({', '.join(name.rpartition('_')[2])})"
        assert cells[2] == bundles.DTYPES[dtype]
        assert cells[3] == ("yes" if name in bundles.NEEDED else "no")

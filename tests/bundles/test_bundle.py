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
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench.bundles import bundle_files, of_logprobs
from steadymoe.bench.bundles.bundle import MOST, About, BadBundle, Bundle, of_training
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import roll_out
from steadymoe.models import build
from steadymoe.models.selection import NO_ROUTE

ROOT = Path(__file__).parents[2]
EVERY = ("grpo", "gspo", "dapo", "cispo", "reinforce")


def made(model: PreTrainedModel, task: Chain, prompts: int = 6, responses: int = 4) -> Bundle:
    """A rollout of a small model, its old policy, and the policy after the weights were disturbed."""
    texts = [f"{first}+3*2-1=" for first in range(prompts)]
    generator = torch.Generator().manual_seed(0)
    rollout = roll_out(model, task, texts, responses, generator)
    with torch.no_grad():
        old = forward(model, rollout.sequences, "fp32")
        digest = bundle_files.model_sha256(model)
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        now = forward(model, rollout.sequences, "fp32")
    rewards_B = (torch.rand(prompts * responses, generator=generator) > 0.5).float()
    return of_training(
        About(made_by="a test", model="micro", model_sha256=digest, experts=4, task="chain", seed=0, staleness=1),
        replace(rollout, scores_B=rewards_B),
        OldPolicy(old.logprobs_BT, old.routes_LBFK, old.executed_LBFK, None, None, None, None),
        responses,
        now.logprobs_BT,
        torch.arange(prompts * responses) // responses % 3,
    )


@pytest.fixture(scope="module")
def bundle(task: Chain) -> Bundle:
    torch.set_num_threads(1)
    return made(build.build(MICRO, task.tokenizer, 0, "cpu"), task)


def same(one: Bundle, other: Bundle) -> bool:
    first, second = dict(one.tensors()), dict(other.tensors())
    return (
        first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
        and (one.about, one.response_width) == (other.about, other.response_width)
    )


def test_what_is_written_is_read_again_and_has_the_same_bytes(bundle: Bundle, tmp_path: Path) -> None:
    bundle_files.write(bundle, tmp_path / "one")
    bundle_files.write(bundle, tmp_path / "two")
    again = bundle_files.read(tmp_path / "one")
    assert same(again, bundle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    for name in (bundle_files.MANIFEST, bundle_files.TENSORS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert again.sizes == {"B": 24, "S": 8 + again.response_width, "T": again.response_width} | {
        "F": 7 + again.response_width,
        "L": 3,
        "K": 2,
    }
    assert again.responses == 4
    assert [len(rows) for rows in again.rows_of_minibatches()] == [8, 8, 8]


def test_a_new_process_without_the_model_gets_the_same_numbers(bundle: Bundle, tmp_path: Path) -> None:
    bundle_files.write(bundle, tmp_path / "bundle")
    here = of_logprobs.table(of_logprobs.audit(bundle, of_logprobs.losses(EVERY, bundle)))
    command = [sys.executable, "-m", "steadymoe.bench.cli", "bundle", "audit", str(tmp_path / "bundle")]
    command += ["--algorithms", ",".join(EVERY), "--csv", str(tmp_path / "audit.csv")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert (tmp_path / "audit.csv").read_text() == here.to_csv(index=False)


def test_nothing_is_overwritten(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(BadBundle, match="exists already; nothing is overwritten"):
        bundle_files.write(bundle, tmp_path / "mine")
    with pytest.raises(BadBundle, match="there is no folder"):
        bundle_files.write(bundle, tmp_path / "no" / "mine")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_write_that_fails_leaves_nothing(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_files, "MOST_BYTES", 100)
    with pytest.raises(BadBundle, match="write fewer rollouts"):
        bundle_files.write(bundle, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_the_model_that_sampled_is_known_and_another_is_refused(model: PreTrainedModel, bundle: Bundle) -> None:
    bundle_files.check_model(bundle, model)
    with torch.no_grad():
        next(model.parameters()).add_(1e-6)
    with pytest.raises(BadBundle, match="the bundle is of a model with model_sha256"):
        bundle_files.check_model(bundle, model)
    with pytest.raises(BadBundle, match="does not say which weights"):
        bundle_files.check_model(replace(bundle, about=About(made_by="x", model="y", experts=4)), model)


# --- values ------------------------------------------------------------------------------------------


def put(values: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    changed = values.clone()
    changed[place] = value
    return changed


def holed(bundle: Bundle) -> Tensor:
    row = int(bundle.mask_BT.sum(-1).argmax())
    return put(bundle.mask_BS, (row, -bundle.response_width), 0)


def unfed(bundle: Bundle) -> Tensor:
    row, place = (~bundle.sequences.route_mask_BF).nonzero()[-1].tolist()
    assert bundle.old_routes_LBFK is not None
    routes = bundle.old_routes_LBFK.clone()
    routes[:, row, place] = torch.tensor([0, 1], dtype=torch.int16)
    return routes


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
    "no prompts": (lambda b: {"response_width": 99}, "the size|must leave a place for prompts"),
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
    "above 0": (lambda b: {"old_logprobs_BT": put(b.old_logprobs_BT, (1, 0), 0.1)}, "at most 0; row 1"),
    "reward": (lambda b: {"rewards_B": put(b.rewards_B, (2,), float("inf"))}, "rewards_B must be finite; row 2"),
    "torn group": (lambda b: {"groups_B": torn(b)}, "a group is torn apart"),
    "short group": (lambda b: {"groups_B": put(b.groups_B, (3,), 99)}, "groups_B must be whole groups of one size"),
    "other prompt": (
        lambda b: {"groups_B": b.groups_B.div(2, rounding_mode="floor")},
        "groups_B must share a prompt; row 4",
    ),
    "shorter prompt": (
        lambda b: {"tokens_BS": b.tokens_BS * later(b, 1), "mask_BS": b.mask_BS * later(b, 0)},
        "groups_B must share a prompt; row 1",
    ),
    "torn by mini-batches": (lambda b: {"minibatches_B": put(b.minibatches_B, (1,), 2)}, "must hold whole groups"),
    "gap": (lambda b: {"minibatches_B": b.minibatches_B * 2}, "without a gap"),
    "expert": (
        lambda b: {"old_routes_LBFK": put(b.old_routes_LBFK, (1, 2, 8, 0), 4)},
        "old_routes_LBFK must name experts 0 to 3.*layer 1, row 2, position 8, place 0 names 4",
    ),
    "half a route": (lambda b: {"old_routes_LBFK": put(b.old_routes_LBFK, (0, 0, 8, 0), NO_ROUTE)}, "all K experts"),
    "twice": (
        lambda b: {"old_routes_LBFK": torch.where(b.old_routes_LBFK == NO_ROUTE, NO_ROUTE, 1).short()},
        "K different experts",
    ),
    "last token": (lambda b: {"old_routes_LBFK": unfed(b)}, "for the last token of a response, which is never fed"),
    "no experts": (lambda b: {"about": About(made_by="x", model="y")}, "set experts in the manifest"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_value_is_answered_in_one_line_with_its_field(bundle: Bundle, fault: str) -> None:
    change, words = FAULTS[fault]
    with pytest.raises(BadBundle, match=words) as refused:
        replace(bundle, **change(bundle))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("made_by", ""), ("model", None), ("model_sha256", "abc"), ("experts", 0), ("seed", True), ("task", "x" * 3000)],
)
def test_a_wrong_fact_is_answered_in_one_line(name: str, value: object) -> None:
    with pytest.raises(BadBundle, match=f"{name} must be"):
        About(**({"made_by": "x", "model": "y"} | {name: value}))  # type: ignore[arg-type]


def test_padding_is_0_whatever_was_there(bundle: Bundle) -> None:
    noisy = torch.where(bundle.mask_BT.bool(), bundle.logprobs_BT, float("nan"))
    assert same(replace(bundle, logprobs_BT=noisy), bundle)


def test_a_missing_route_of_a_token_that_was_fed_is_allowed(bundle: Bundle) -> None:
    assert bundle.rollout_routes_LBFK is not None
    routes = bundle.rollout_routes_LBFK.clone()
    routes[:, 0] = NO_ROUTE
    assert replace(bundle, rollout_routes_LBFK=routes).rollout_routes_LBFK is not None


# --- files -------------------------------------------------------------------------------------------


def facts_changed(folder: Path, **changes: object) -> None:
    path = folder / bundle_files.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors_changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors, and the manifest so that it fits them."""
    tensors = load_file(folder / bundle_files.TENSORS)
    change(tensors)
    save_file(tensors, folder / bundle_files.TENSORS)
    digest = bundle_files._sha256(folder / bundle_files.TENSORS)
    facts_changed(folder, fields=sorted(tensors), sha256=digest)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / "bundle.json").unlink(), "there is no file bundle.json"),
    "no tensors": (lambda f: (f / "tensors.safetensors").unlink(), "there is no file tensors.safetensors"),
    "no JSON": (lambda f: (f / "bundle.json").write_text("{"), "bundle.json is no JSON"),
    "deep JSON": (lambda f: (f / "bundle.json").write_text("[" * 60000), "bundle.json is no JSON"),
    "large": (lambda f: (f / "bundle.json").write_text(" " * 70000), "bundle.json has more than 65536 bytes"),
    "other file": (lambda f: (f / "bundle.json").write_text("[]"), "does not say that this is a bundle"),
    "version": (lambda f: facts_changed(f, version=2), "version 2 of bundles is not known; this code reads 1"),
    "no about": (lambda f: facts_changed(f, about=None), "no proper about"),
    "strange fact": (lambda f: facts_changed(f, about={"path": "/etc"}), "about has an unknown entry 'path'"),
    "no maker": (lambda f: facts_changed(f, about={"model": "x"}), "about has no made_by"),
    "sizes": (lambda f: facts_changed(f, sizes={"B": 1}), "are not the tensors' sizes"),
    "fields": (lambda f: facts_changed(f, fields=[]), "do not name the same fields"),
    "cut": (lambda f: (f / "tensors.safetensors").write_bytes(b"12"), "is no safetensors file"),
    "torn": (
        lambda f: (f / "tensors.safetensors").write_bytes((f / "tensors.safetensors").read_bytes()[:-9]),
        "is no whole safetensors file",
    ),
    "long header": (
        lambda f: (f / "tensors.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}"),
        "header has more than",
    ),
    "other bytes": (
        lambda f: (f / "tensors.safetensors").write_bytes((f / "tensors.safetensors").read_bytes()[:-1] + b"\xff"),
        "its sha256 differs",
    ),
    "strange field": (
        lambda f: tensors_changed(f, lambda t: t.update(extra=torch.zeros(2))),
        "unknown field 'extra'; fields are tokens_BS, mask_BS",
    ),
    "needed field": (lambda f: tensors_changed(f, lambda t: t.pop("rewards_B")), "has no rewards_B; every bundle has"),
    "type": (
        lambda f: tensors_changed(f, lambda t: t.update(rewards_B=t["rewards_B"].double())),
        "rewards_B must be stored as F32; got F64",
    ),
    "value": (
        lambda f: tensors_changed(f, lambda t: t.update(old_logprobs_BT=-t["old_logprobs_BT"])),
        "old_logprobs_BT must hold logarithms",
    ),
}


@pytest.fixture(scope="module")
def written(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "whole"
    bundle_files.write(bundle, folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_answered_in_one_line_that_names_it(written: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for path in written.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change, words = DAMAGES[damage]
    change(folder)
    with pytest.raises(BadBundle, match=words) as refused:
        bundle_files.read(folder)
    assert str(refused.value).startswith(f"{folder}: ")
    assert "\n" not in str(refused.value)


def test_sizes_are_bounded_before_a_tensor_is_loaded(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_files, "tensors_of", lambda path: pytest.fail("loaded"))
    with monkeypatch.context() as smaller:
        smaller.setitem(MOST, "B", 7)
        with pytest.raises(BadBundle, match="the size B must be between 1 and 7; got 24"):
            bundle_files.read(written)
    monkeypatch.setattr(bundle_files, "MOST_BYTES", 64)
    with pytest.raises(BadBundle, match="at most 64 are read"):
        bundle_files.read(written)


# --- the page ----------------------------------------------------------------------------------------


def test_the_page_documents_every_field_and_every_fact() -> None:
    page = (ROOT / "docs" / "bundle.md").read_text()
    for name, field in bundle_files._FIELDS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == f"({', '.join(field.metadata['dimensions'])})"
        assert cells[2] == bundle_files._DTYPES[field.metadata["dtype"]]
        assert cells[3] == ("yes" if name in bundle_files.NEEDED else "no")
    for name in About.__dataclass_fields__:
        assert f"| `{name}` |" in page

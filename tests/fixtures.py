"""Shared by all tests: a small task and model, and one thread, so that results are the same to the bit.

The environment variable STEADYMOE_TEST_SEED is added to every seed that a test or a run in its process gives to a
generator of torch or numpy: the same tests on other prompts, weights, samples and noise. 0, the default, adds nothing.
Tests that compare with committed numbers hold at 0 alone.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from builds import PACKAGES, ROOT, build_wheel
from small_runs import finished
from transformers import PreTrainedModel

from steadymoe.bench import cli
from steadymoe.bench.runs import compose, launch, provenance
from steadymoe.bench.support import external
from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import build

# The algorithms that `make test` trains; `make check` trains all.
CORE_SIX = ("grpo", "gspo", "dapo", "cispo", "minirl", "dppo")

SHIFT = int(os.environ.get("STEADYMOE_TEST_SEED", "0"))


class Shifted(torch.Generator):
    """A generator that starts elsewhere."""

    def manual_seed(self, seed: int) -> Self:
        super().manual_seed(seed + SHIFT)
        return self


def shift_seeds() -> None:
    """Add ``SHIFT`` to every seed from now on; a generator without a seed stays without."""
    of_torch, of_numpy = torch.manual_seed, np.random.default_rng

    def default_rng(seed: Any = None) -> np.random.Generator:
        return of_numpy(seed + SHIFT if isinstance(seed, int) else seed)

    torch.Generator = Shifted  # type: ignore[misc]
    torch.manual_seed = lambda seed: of_torch(seed + SHIFT)
    np.random.default_rng = default_rng


if SHIFT:
    shift_seeds()

RECORDED = Path(__file__).parent / "recorded" / "results"
Said = Callable[..., str]
MICRO = {
    "_target_": "transformers.Qwen3MoeConfig",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "initializer_range": 0.15,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """More threads than one are not reproducible to the bit."""
    torch.set_num_threads(1)


def steadymoe(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run ``steadymoe`` with these words in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["steadymoe", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A results folder with the nine recorded runs: ``tmp_path``."""
    shutil.copytree(RECORDED / "runs", tmp_path / "runs")
    return tmp_path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Said:
    """What ``steadymoe`` says for words: on stdout where it ends with 0, anywhere where with another ``code``."""

    def answer(*words: str, code: int = 0) -> str:
        capfd.readouterr()
        assert steadymoe(monkeypatch, *words) == code
        said = capfd.readouterr()
        return said.out + said.err if code else said.out

    return answer


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Said:
    """The one line on stderr with which ``steadymoe`` refuses words: exit code 2, and nothing on stdout."""

    def answer(*words: str) -> str:
        capfd.readouterr()
        assert steadymoe(monkeypatch, *words) == 2
        said = capfd.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert said.err.startswith("steadymoe: ")
        return said.err

    return answer


@pytest.fixture
def refusal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said) -> Said:
    """The one line with which ``steadymoe run`` refuses words: no training, no file touched."""

    def answer(*words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("trained"))
        said = refused("run", *words)
        assert list(tmp_path.iterdir()) == []
        return said

    return answer


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without their figures, which take most of a report's time."""
    monkeypatch.setattr("steadymoe.bench.report.report_page.figures_of", lambda *_: [])


@pytest.fixture(scope="session")
def task() -> Chain:
    """Short chains modulo 6."""
    return Chain(min_operands=3, max_operands=5, modulus=6, spare_tokens=2)


@pytest.fixture
def model(task: Chain) -> PreTrainedModel:
    """A fresh random MoE model, smaller than micro."""
    return build.build(MICRO, task.tokenizer, seed=0, device="cpu")


def tutorial() -> dict[str, str]:
    """The files that docs/your_algorithm.md has a user write into ``~/mine``: name → text, in its order."""
    text = (ROOT / "docs" / "your_algorithm.md").read_text()
    return dict(re.findall(r"`~/mine/([\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)```", text, re.DOTALL))


def grpo_by(target: str) -> str:
    return re.sub(r"steadymoe\S*\.GRPO", target, (ROOT / "conf" / "algorithm" / "grpo.yaml").read_text())


def write_all(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a process that has imported no user's code."""
    as_new_process(monkeypatch)


def as_new_process(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Forget the code that this process has imported, and these modules."""
    monkeypatch.setattr("steadymoe.bench.support.source._first", {})
    monkeypatch.setattr(provenance, "_imported", {})
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, *modules: str) -> None:
    """Let STEADYMOE_PATH name a user's own folder, of whose modules none is imported yet."""
    monkeypatch.setenv(external.VARIABLE, str(folder))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)


def edit(path: Path, **facts: object) -> None:
    """Change some of what a ``run.json`` says."""
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a socket's path may have 107 bytes


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> compose.Run:
    """The small run, which nothing disturbed."""
    return finished(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, since a build leaves files beside its pyproject.toml."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "integrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))

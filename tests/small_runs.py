"""Runs of two or three seconds, their trainers, and what they recorded."""

import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra.utils import instantiate
from pandas.testing import assert_frame_equal
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench.runs import compose, execute, record
from steadymoe.bench.support.seeding import derive
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.columns import TABLES
from steadymoe.bench.training.learner import Measured
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Rollout, roll_out
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build

# A run of two or three seconds: forty supervised updates teach the format, and every accuracy is in the band.
SMALL = ["model=micro", "model.config.num_hidden_layers=2", "model.config.hidden_size=32"]
SMALL += ["task=chain", "task.min_operands=2", "task.max_operands=3", "task.modulus=3"]
SMALL += ["minibatch_prompts=2", "rollout.responses=8", "optimizer.learning_rate=1e-3", "updates_per_rollout=2"]
SMALL += ["updates=12", "checkpoint_every=4", "evaluation.every=4", "evaluation.prompts=8"]
SMALL += ["probe.every=8", "probe.responses=4", "cold_start.accuracy_low=0", "cold_start.accuracy_high=1"]
SMALL += ["cold_start.check_every=40", "cold_start.batch_size=32", "cold_start.learning_rate=1e-2"]
SMALL += ["cold_start.check_prompts=4"]

# A rollout of the same size, in more updates.
FOUR_UPDATES = ("updates_per_rollout=4", "minibatch_prompts=1")

# AdamW divides by the root of the second moment: where a gradient is rounding, rounding decides the sign of its step,
# and processors round differently. With an epsilon far above that root a step is proportional to the gradient.
PROPORTIONAL = ["optimizer.epsilon=1", "optimizer.learning_rate=0.1"]


def planned(results: Path, *words: str) -> compose.Run:
    return compose.plan([*SMALL, f"results_dir={results}", *words])[0]


@functools.cache
def known_starts() -> tempfile.TemporaryDirectory[str]:
    """The cold starts that small runs of this process have made."""
    return tempfile.TemporaryDirectory()


@contextmanager
def sharing_starts(results: Path) -> Iterator[None]:
    """Lend the known cold starts to a results folder, and keep those that it makes: each is a third of a run."""
    shutil.copytree(known_starts().name, results / "cold_starts", dirs_exist_ok=True)
    yield
    shutil.copytree(results / "cold_starts", known_starts().name, dirs_exist_ok=True)


def executed(made: compose.Run) -> str:
    """How a run ends that may begin at a known cold start."""
    with sharing_starts(Path(made.config.results_dir)):
        return execute.execute(made)


def finished(results: Path, *words: str) -> compose.Run:
    """The small run, made to its end."""
    made = planned(results, *words)
    assert executed(made) == "finished"
    return made


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """All recorded rows without the timing columns, which alone may differ."""
    frames = {name: record.read_table(folder, name) for name in TABLES}
    return {
        name: frame[[c for c in frame if not c.endswith(("_seconds", "_per_second"))]] for name, frame in frames.items()
    }


def assert_same(one: Path, other: Path) -> None:
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for name, frame in tables(one).items():
        assert len(frame), name
        assert_frame_equal(frame, tables(other)[name], check_exact=True)


def interrupt(made: compose.Run, at: int) -> None:
    """Run until step ``at`` is to begin, as Ctrl-C ends it."""
    step = Trainer.step

    def stops(self: Trainer, number: int) -> Any:
        if number == at:
            raise KeyboardInterrupt
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stops)
        with pytest.raises(KeyboardInterrupt):
            executed(made)


def assert_resumes(tmp_path: Path, stop_at: int, *words: str) -> compose.Run:
    """A run that was stopped in its step ``stop_at`` records what an undisturbed one does, which is returned."""
    whole, halted = finished(tmp_path / "whole", *words), planned(tmp_path / "halted", *words)
    interrupt(halted, stop_at)
    assert execute.execute(halted) == "finished"
    assert_same(whole.folder, halted.folder)
    return whole


def trainer(tmp_path: Path, *words: str) -> Trainer:
    """A trainer of the small run at random weights."""
    config = planned(tmp_path, *words).config
    task = instantiate(config.task)
    model = build.build(config.model["config"], task.tokenizer, derive(config.seed, "model"), "cpu")
    return Trainer(model, task, config)


def begun(made: Trainer, step: int = 1) -> tuple[Rollout, list[list[MicroBatch]], OldPolicy]:
    """A rollout, its mini-batches and its old policy."""
    rollout, _, _ = made.sample(step)
    minibatches = made.minibatches(step)
    return rollout, minibatches, made.learner.old_policy(rollout, minibatches)


def advantages(rollout: Rollout) -> Tensor:
    """Always the same normal numbers, one for each response, (B, T)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(rollout.scores_B), 1, generator=generator) * rollout.sequences.response_mask_BT


def updated(made: Trainer, updates: int = 2) -> list[Measured]:
    """Gradient updates on one rollout of two mini-batches, with advantages of both signs."""
    sampled_, minibatches, old = begun(made)
    signs_B1 = torch.tensor([1.0, -1.0]).repeat(len(sampled_.scores_B) // 2)[:, None]
    advantages_BT = signs_B1 * sampled_.sequences.response_mask_BT
    return [made.learner.update(sampled_, old, advantages_BT, rows_M) for rows_M in minibatches[:updates]]


def gradients(made: Trainer) -> list[dict[str, Tensor]]:
    """What the optimizer is handed from now on, by weight, for each update."""
    seen: list[dict[str, Tensor]] = []

    def keep(*_: Any) -> None:
        named = made.model.named_parameters()
        seen.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})

    made.learner.optimizer.register_step_pre_hook(keep)
    return seen


PROMPTS = ["3+3+1+1*0=", "5*3-3-5=", "5+1-4*4=", "3-0-1=", "3-4*2=", "5*2*4*5-3="]


def sampled(model: PreTrainedModel, task: Chain, seed: int = 0, responses: int = 4) -> Rollout:
    return roll_out(model, task, PROMPTS, responses, torch.Generator().manual_seed(seed))


def whole_logprobs(made: Trainer, rollout: Rollout) -> Tensor:
    """log-probabilities over the vocabulary at the response tokens, by a plain forward, (B, T, V)."""
    sequences = rollout.sequences
    logits_BSV = made.model(
        input_ids=sequences.tokens_BS[:, :-1],
        attention_mask=sequences.mask_BS[:, :-1],
        position_ids=(sequences.mask_BS[:, :-1].cumsum(-1) - 1).clamp(min=0),
    ).logits
    return logits_BSV[:, -sequences.response_width :].log_softmax(-1)


def responses(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """The response tokens and their mask, (B, T) each."""
    sequences = rollout.sequences
    return sequences.tokens_BS[:, -sequences.response_width :], sequences.response_mask_BT.bool()


def scalars(folder: Path) -> dict[str, dict[int, list[float]]]:
    """Tag → step → every value that TensorBoard's files have for it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    values: dict[str, dict[int, list[float]]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            values.setdefault(tag, {}).setdefault(event.step, []).append(event.value)
    return values

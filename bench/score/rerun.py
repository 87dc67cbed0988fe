"""Verify an entry: run its loss on fresh seeds, and measure the weights that it left on prompts drawn afterwards.

This runs the entry's code, in processes of its own and from a copy. Nothing that it writes is believed but the weights:
accuracy is measured here. docs/your_algorithm.md says what this catches.
"""

import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import pandas as pd
from safetensors import SafetensorError
from safetensors.torch import load_model
from transformers import PreTrainedModel

from steadymoe.bench.check.properties import KEEPS_STATE
from steadymoe.bench.runs import compose, execute, record
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.score import entry as entries
from steadymoe.bench.score.entry import BadEntry, Entry
from steadymoe.bench.score.standard import COLUMNS, RATE, REFERENCE, changed_setting
from steadymoe.bench.support import external, regular_files
from steadymoe.bench.support.seeding import numpy_generator, torch_generator
from steadymoe.bench.support.text import visible
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.sampling import Decoding, roll_out

# Fresh seeds of a rerun, and prompts on which it is measured.
_SEEDS, _PROMPTS = 5, 512
# Seeds of the suite and of those who tune are smaller.
_LEAST = 10**6
# A loss that learns from shuffled rewards does not learn from rewards: of GRPO's gain it may have this share.
_SHUFFLED = 0.25
# Characters of what ``check`` prints.
_LONGEST = 2**16


def seeds(commit: str) -> list[int]:
    """Return the seeds that follow from a commit's hash. Raises BadEntry if it is none."""
    if not re.fullmatch("[0-9a-f]{7,64}", commit, re.IGNORECASE):
        raise BadEntry(f"--commit must be a hash of seven or more hexadecimal digits, got {commit}")
    digests = (hashlib.sha256(f"{commit.lower()} {number}".encode()).hexdigest() for number in range(_SEEDS))
    return [_LEAST + int(digest[:8], 16) for digest in digests]


class Verdict(NamedTuple):
    """What a rerun found."""

    problem: str
    """Why it does not bear the entry out; "" if it does."""
    outcomes: pd.DataFrame | None = None
    """Of the entry and of GRPO over the learning rate, if they were measured."""
    keeps_state: bool = False


def rerun(entry: Entry, commit: str) -> Verdict:
    """Rerun an entry on the seeds of a commit. Raises BadEntry for weights that are not those of the model."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        entries.copy(entry, place / "code")
        fresh = seeds(commit)
        fixed = [f"experiment={RATE.experiment}", *RATE.overrides]
        one, *_ = compose.plan([*fixed, f"algorithm={REFERENCE}"])
        fixed.append(f"checkpoint_keep={one.config.steps}")
        algorithms = {REFERENCE: [f"algorithm={REFERENCE}"], entry.name: entry.overrides}
        words = {loss: [*fixed, *own, f"results_dir={place / loss}"] for loss, own in algorithms.items()}
        swept = {loss: [*each, f"seed={','.join(map(str, fresh))}"] for loss, each in words.items()}
        with composing(entry, place / "code"):
            plans = {loss: compose.plan(each, multirun=True, with_parts=False) for loss, each in swept.items()}
        reference, own = plans[REFERENCE], plans[entry.name]
        if changed := changed_setting(reference[0].plain | {"results_dir": ""}, own[0].plain | {"results_dir": ""}):
            return Verdict(f"it changes what the standard fixes: {changed}")
        with (place / "check.txt").open("w+") as told:
            refused = _steadymoe(place, entry, "check", *entry.overrides, told=told)
            told.seek(0)
            checked = told.read(_LONGEST)
        print("\n".join(map(visible, checked.splitlines())), file=sys.stderr, flush=True)
        if refused:
            return Verdict("it fails steadymoe check")
        for loss, each in swept.items():
            if loss != REFERENCE:
                shutil.copytree(place / REFERENCE / "cold_starts", place / loss / "cold_starts")
            if _steadymoe(place, entry, "run", "-m", *each):
                return Verdict("a run failed")
        drawn = secrets.randbits(62)  # nobody knows these prompts before the runs have ended
        found = [_measured(runs, reference, loss, drawn) for loss, runs in plans.items()]
        outcomes = pd.concat(found, ignore_index=True)
        best = outcomes[outcomes["loss"] == entry.name].groupby("value")["sampled"].mean().idxmax()
        alone = [*words[entry.name], f"optimizer.learning_rate={best:g}", f"seed={fresh[0]}"]
        alone += ["rollout.shuffle_rewards=true", "experiment_name=shuffled"]
        if _steadymoe(place, entry, "run", *alone):
            return Verdict("the run with shuffled rewards failed", outcomes)
        with composing(entry, place / "code"):
            shuffled = compose.plan(alone, with_parts=False)
        problem = _gains_without_reward(outcomes, _measured(shuffled, reference, entry.name, drawn))
        return Verdict(problem, outcomes, not problem and KEEPS_STATE in checked)


def _gains_without_reward(outcomes: pd.DataFrame, shuffled: pd.DataFrame) -> str:
    """Return what is wrong if a loss gains from shuffled rewards a share of what GRPO gains from rewards, else ""."""
    best = outcomes[outcomes["loss"] == REFERENCE].groupby("value")[["start", "sampled"]].mean()
    gain = float((best["sampled"] - best["start"]).max())
    without = float((shuffled["sampled"] - shuffled["start"]).mean())
    if without <= max(0.0, _SHUFFLED * gain):
        return ""
    return f"with shuffled rewards it gains {without:.3f}, GRPO with real ones {gain:.3f}: rewards are not why it gains"


@contextmanager
def composing(entry: Entry, code: Path) -> Iterator[None]:
    """Let this process compose the entry's YAML, from the folder ``code``; none of its modules is imported."""
    before = os.environ.get(external.VARIABLE)
    os.environ[external.VARIABLE] = str(code) if entry.files else ""
    try:
        yield
    finally:
        os.environ.pop(external.VARIABLE)
        os.environ |= {} if before is None else {external.VARIABLE: before}


def _steadymoe(place: Path, entry: Entry, *words: str, told: IO[str] | None = None) -> int:
    """Run a command with the entry's code in a process of its own, and return its exit code; it prints to ``told``."""
    with composing(entry, place / "code"):
        line = [sys.executable, "-m", "steadymoe.bench.cli", *words]
        return subprocess.run(line, env=dict(os.environ), stdout=told or sys.__stderr__, check=False).returncode


def _measured(runs: Sequence[Run], reference: Sequence[Run], loss: str, drawn: int) -> pd.DataFrame:
    """Return outcomes of ``runs``, measured on prompts of the seed ``drawn`` with the weights that they kept.

    Cold starts and models are those of GRPO's runs at the same seeds. A run that kept no weights has accuracy 0.
    """
    configs = {run.config.seed: run.config for run in reference}
    rows = []
    for run in runs:
        config = configs[run.config.seed]
        task, model, _ = execute.at_start(config, lambda *_: None)
        row = {"dial": RATE.name, "loss": loss, "algorithm": run.choices["algorithm"], "seed": config.seed}
        row |= {"rate": run.config.optimizer.learning_rate, "value": run.config.optimizer.learning_rate}
        accuracy = partial(_accuracy, model, task, config.seed, drawn)
        row |= {"start": accuracy(False), "start_greedy": accuracy(True), "sampled": 0.0, "greedy": 0.0}
        kept = record.weights_path(run.folder, config.steps)
        if kept.exists():
            try:
                regular_files.opened(kept, sys.maxsize).close()  # no link, no pipe
                load_model(model, kept, device=str(model.device))
                row |= {"sampled": accuracy(False), "greedy": accuracy(True)}
            except FloatingPointError:
                pass  # no accuracy
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                text = " ".join(str(error).split())[:200]
                raise BadEntry(f"{kept} does not hold the weights of the model: {text}") from error
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _accuracy(model: PreTrainedModel, task: Task, seed: int, drawn: int, greedy: bool) -> float:
    """Return the mean score of one response to each of the prompts that follow from ``drawn`` and the run's seed."""
    prompts = task.sample(_PROMPTS, numpy_generator(drawn, "verification", seed), held_out=True)
    generator = torch_generator(drawn, "verification_responses", seed, model.device.type)
    made = roll_out(model, task, prompts, 1, generator, Decoding(greedy=greedy, routes=False))
    return float(made.scores_B.mean())

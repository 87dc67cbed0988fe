"""What needs a GPU, in three stages of a few minutes: ``make gpu``, ``python benchmarks/gpu.py FOLDER``.

``experts`` times the back ends of experts, ``training`` times rollout steps beside TRL, ``suite`` makes one run of
the quick start and the tests marked ``gpu``. A stage whose table exists is not repeated, so a session that ends early
is no loss. No stage needs a network. Without a GPU the program says so and ends with code 2.
"""

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import speed
import torch
from transformers import PreTrainedModel

from steadymoe.bench.report import write
from steadymoe.bench.runs import provenance
from steadymoe.bench.support.seeding import repeatable
from steadymoe.bench.training.forward import Sequences, forward
from steadymoe.models import build, megablocks

# Size → overrides; the second has 57 M parameters in its experts.
SIZES = {
    "flat": "model=flat",
    "flat, 60 M": "model=flat model.config.num_hidden_layers=8 model.config.hidden_size=384 "
    "model.config.moe_intermediate_size=192 model.config.num_attention_heads=6 model.config.num_key_value_heads=2",
}
# Precision → overrides: in bf16 the old policy has a forward of its own.
PRECISIONS = {"fp32": "", "bf16": "savings.reuse_sampler_logprobs=null"}
# Sequences of a forward, and their positions.
SHAPE = (256, 128)
REPEATS = 5
TESTS = Path(__file__).parents[1] / "tests" / "benchmarks"
# The setting of `make speed` whose steps are timed.
TRAINED = speed.SETTINGS["long"].replace("model=flat ", "")


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of ``work`` in seconds, after one call that warms up."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        begun = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget(device: str) -> None:
    """Begin to count the peak of the memory."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> str:
    """Return the peak of the GPU's memory in MiB."""
    return f"{torch.cuda.max_memory_allocated() / 2**20:.0f}" if device == "cuda" else "–"


def experts(device: str, sizes: Mapping[str, str] = SIZES, shape: Sequence[int] = SHAPE, repeats: int = REPEATS) -> Any:
    """Time a forward, and a forward with its backward, through every back end of experts."""
    rows = []
    for size, back_end, precision in itertools.product(sizes, build.EXPERTS, PRECISIONS):
        row: dict[str, Any] = {"model": size, "experts": back_end, "precision": precision}
        why = megablocks.reason_against(device) if back_end == megablocks.NAME else None
        if why is not None:
            rows.append(row | {"note": why})
            continue
        config, task, _ = speed.prepared(sizes[size])
        model = build.build(config.model["config"], task.tokenizer, 0, device, back_end)
        sequences, count = random_sequences(model, shape), shape[0] * shape[1]
        _forget(device)
        with torch.no_grad():
            ahead = seconds(partial(forward, model, sequences, precision), device, repeats)
        both = seconds(partial(_there_and_back, model, sequences, precision), device, repeats)
        row |= {"forward (ms)": f"{1e3 * ahead:.2f}", "with backward (ms)": f"{1e3 * both:.2f}"}
        rows.append(row | {"tokens/s": f"{count / both:,.0f}", "peak (MiB)": _peak(device), "note": ""})
    return pd.DataFrame(rows).fillna("–")


def random_sequences(model: PreTrainedModel, shape: Sequence[int]) -> Sequences:
    """Return sequences of random tokens, the second half of each a response."""
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(model.config.vocab_size, tuple(shape), generator=generator).to(model.device)
    return Sequences(tokens_BS, torch.ones_like(tokens_BS), shape[1] // 2)


def _there_and_back(model: PreTrainedModel, sequences: Sequences, precision: str) -> None:
    forward(model, sequences, precision).logprobs_BT.sum().backward()
    model.zero_grad()


def training(device: str, sizes: Mapping[str, str] = SIZES, words: str = TRAINED, repeats: int = REPEATS) -> Any:
    """Time rollout steps, sampling and updates with all instruments, and without, beside TRL where it is installed.

    All compute as a run does on this device (``seeding.repeatable``), TRL too.
    """
    rows = []
    for size in sizes:
        overrides = f"{words} {sizes[size]} device={device}"
        trainers: dict[str, Callable[[], speed.Suite | speed.TRL]] = {
            f"{name}, {precision}": partial(speed.Suite, f"{overrides} precision={precision} {needs} {more}")
            for precision, needs in PRECISIONS.items()
            for name, more in (("steadymoe", ""), ("steadymoe, little measured", "measure=little"))
        }
        if find_spec("trl"):
            trainers["TRL, fp32"] = partial(speed.TRL, overrides)
        for name, made in trainers.items():
            _forget(device)
            taken = seconds(made().step, device, repeats)
            rows.append({"model": size, "trainer": name, "seconds a step": f"{taken:.3g}", "peak (MiB)": _peak(device)})
    return pd.DataFrame(rows)


def suite(device: str, commands: Mapping[str, Sequence[str]] | None = None) -> Any:
    """Make one run of the quick start and run the tests that need a GPU, and say how they ended."""
    rows = []
    for name, command in (commands or _commands(device)).items():
        begun = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True)
        last = (ended.stdout + ended.stderr).strip().splitlines()[-1:]
        row = {"what": name, "exit code": ended.returncode, "seconds": f"{time.perf_counter() - begun:.0f}"}
        rows.append(row | {"last line": "".join(last)})
    return pd.DataFrame(rows)


def _commands(device: str) -> dict[str, Sequence[str]]:
    words = ("experiment=quickstart", "experiment_name=gpu", "algorithm=gspo", "seed=0", f"device={device}")
    return {
        "quick start, one run": [sys.executable, "-m", "steadymoe.bench.cli", "run", *words],
        "pytest -m gpu": [sys.executable, "-m", "pytest", "-m", "gpu", str(TESTS)],
    }


STAGES = {"experts": experts, "training": training, "suite": suite}


def main(results: Path, device: str = "cuda") -> int:
    """Write the table of every stage that has none, and return the exit code."""
    if device == "cuda" and not torch.cuda.is_available():
        print("make gpu: torch finds no GPU here, so there is nothing to measure", file=sys.stderr)
        return 2
    repeatable(device, torch.get_num_threads())
    machine = provenance.machine(device, torch.get_num_threads())
    for number, (name, stage) in enumerate(STAGES.items(), 1):
        if (results / "tables" / f"{name}.md").exists():
            print(f"stage {number} of {len(STAGES)}, {name}: has its table")
            continue
        print(f"stage {number} of {len(STAGES)}, {name}", flush=True)
        rows = stage(device)
        print(rows.to_string(), flush=True)
        if "exit code" in rows and rows["exit code"].any():
            return 1  # without a table, so that the next call repeats it
        where = f"{machine.get('gpu', device)}, torch {torch.__version__}; medians of {REPEATS} calls after one."
        write.table(results, name, rows, where, ("md", "csv"))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

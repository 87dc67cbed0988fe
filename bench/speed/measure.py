"""Seconds of interleaved rounds, their medians, and the ratios of arms in the same rounds with their range."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from steadymoe.algorithms import names
from steadymoe.bench.check.share import shares
from steadymoe.bench.speed.arms import Arm, Ours, Plain, config_of
from steadymoe.bench.support.seeding import torch_generator
from steadymoe.bench.training.sampling import sample
from steadymoe.models import build

# The number of steps in a block. One step of a block has the forwards of the probes; blocks are compared as a whole.
BLOCK = 4
# Dial (a setting that is varied alone) → value → overrides, from few to many.
DIALS: dict[str, dict[int, list[str]]] = {
    "prompts": {value: [f"rollout.prompts={value}"] for value in (8, 16, 32, 64)},
    "operands": {value: [f"task.min_operands={value}", f"task.max_operands={value}"] for value in (3, 6, 12)},
    "layers": {value: [f"model.config.num_hidden_layers={value}"] for value in (2, 4, 8)},
    "experts": {value: [f"model.config.num_experts={value}"] for value in (4, 8, 16, 32)},
    "updates": {value: [f"updates_per_rollout={value}"] for value in (1, 2, 4, 8, 16)},
}


@dataclass(frozen=True)
class TimeRatio:
    """Of what is compared, block by block."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def seconds() -> float:
    """The processor time of this process, in seconds; other work on the machine does not lengthen it."""
    return time.process_time()


def interleaved(arms: Mapping[str, Arm], blocks: int) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]]]:
    """Arm → seconds per step in each block, and arm → results of ``step``; a first block warms up and is left out."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for block in range(blocks + 1):
        sums = dict.fromkeys(arms, 0.0)
        for _ in range(BLOCK):
            for name, arm in arms.items():
                begun = seconds()
                row = arm.step()
                sums[name] += seconds() - begun
                if block:
                    rows[name].append(row)
        if block:
            for name, total in sums.items():
                taken[name].append(total / BLOCK)
    return taken, rows


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> TimeRatio:
    """``theirs`` divided by ``ours`` in each block: how many times as fast ours is."""
    each = [other / one for one, other in zip(ours, theirs, strict=True)]
    return TimeRatio(statistics.median(each), min(each), max(each))


def stages(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Stage → its share of the time of steps, from rows of the table ``steps``."""
    names = ("rollout_seconds", "old_policy_seconds", "update_seconds", "probe_seconds")
    sums = {name.removesuffix("_seconds"): sum(row[name] for row in rows) for name in names}
    return {name: value / sum(sums.values()) for name, value in sums.items()}


def matmul_peak(size: int = 1024, rounds: int = 7) -> float:
    """FLOP/s of the best of several fp32 products of square matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(rounds):
        begun = seconds()
        for _ in range(4):
            a @ b
        best = min(best, (seconds() - begun) / 4)
    return 2 * size**3 / best


def useful_flop(arm: Ours, row: Mapping[str, Any]) -> float:
    """Useful FLOP of the training in a step: 6 per parameter and token for updates, 2 for the old policy's forward.

    A prompt counts once per group. ``row`` is the step's row of the table ``steps``. Only the parameters that one
    token uses count, without the embedding unless it is the output head too. The last token of a response is never
    fed to the model and does not count.
    """
    rollout, model = arm.config.rollout, arm.trainer.model
    active = build.size(model)["active_parameters"]
    if not model.config.tie_word_embeddings:
        active -= model.config.vocab_size * model.config.hidden_size
    every = row["update_tokens_per_second"] * row["update_seconds"]  # prompts once for each of their responses
    prompts = (every - row["response_tokens"]) / rollout.responses
    fed = row["response_tokens"] - rollout.prompts * rollout.responses
    return 8.0 * active * (prompts + fed)


def generation(words: Sequence[str], rounds: int, by: PreTrainedModel | None = None) -> TimeRatio:
    """How many times as fast our sampling is as ``model.generate``, for the same prompts and decoding steps.

    Our sampling is by the same untrained model, or by the model ``by`` of the same config.
    """
    plain = Plain(words)
    task, ours, theirs = plain.task, [], []
    for number in range(rounds + 1):
        prompts = plain.prompts(number)
        once, repeated = plain.encoded(prompts), plain.encoded(plain.repeated(prompts))
        begun = seconds()
        sample(
            by or plain.model,
            once,
            responses=plain.config.rollout.responses,
            end=-1,  # no response ends early; some responses of ``generate`` go on to the last step
            max_new_tokens=task.max_new_tokens,
            generator=torch_generator(number, "speed"),
        )
        middle = seconds()
        plain.generate(repeated)
        if number:
            ours.append(middle - begun)
            theirs.append(seconds() - middle)
    return ratio(ours, theirs)


def seconds_to_begin(words: Sequence[str], cache: Path | None = None) -> float:
    """Seconds until a new process with these words can make its first step; compiled code comes from ``cache``."""
    (process,) = _processes(1, "ours", words, 1, cache)
    return process["begun"]


def peak_memory(words: Sequence[str]) -> int:
    """The peak memory of a process that makes two steps, in bytes, interpreter included."""
    (process,) = _processes(1, "ours", words, 2)
    return process["memory"]


def two_processes(kind: str, words: Sequence[str], steps: int) -> float:
    """How many times as many steps two processes at once make as one process alone; ``kind`` is ours or plain."""
    (alone,), together = _processes(1, kind, words, steps), _processes(2, kind, words, steps)
    return 2 * alone["seconds"] / max(each["seconds"] for each in together)


def _processes(
    count: int, kind: str, words: Sequence[str], steps: int, cache: Path | None = None
) -> list[dict[str, Any]]:
    """What each of ``count`` processes says that make ``steps`` steps at the same time.

    ``seconds`` of the steps, ``begun``: seconds from its start to its first step, and ``memory`` in bytes.
    """
    line = [sys.executable, "-m", __name__, kind, str(steps), str(time.time()), *words]
    given = os.environ | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
    pipes: Any = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True, "env": given}
    running = [subprocess.Popen(line, **pipes) for _ in range(count)]
    try:
        for each in running:
            assert each.stdout is not None  # Popen was given a pipe
            if each.stdout.readline() != "ready\n":
                raise RuntimeError(f"a process that was to be timed failed: {' '.join(line)}")
        for each in running:
            assert each.stdin is not None  # Popen was given a pipe
            each.stdin.write("go\n")
            each.stdin.flush()
        return [json.loads(each.communicate()[0]) for each in running]
    finally:
        for each in running:
            each.kill()
            each.communicate()


def _answer(kind: str, steps: int, started: float, words: Sequence[str]) -> None:
    """The body of one of ``_processes``: make a first step, wait for a line on stdin, then make ``steps`` steps."""
    torch.set_num_threads(1)
    arm = Ours(words) if kind == "ours" else Plain(words)
    before = time.time() - started
    arm.step()
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    for _ in range(steps):
        arm.step()
    taken = time.perf_counter() - begun
    print(json.dumps({"seconds": taken, "begun": before, "memory": _most_memory()}))


def _most_memory() -> int:
    """The peak memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # the resource module also counts the parent's memory at the fork
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scaling(words: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds of a step at each value of each of ``DIALS``, other settings as in ``words``: dial, value, seconds.

    Seconds are the mean over the steps of one block, after a block that warms up.
    """
    rows = []
    for dial, values in DIALS.items():
        arms: dict[str, Arm] = {str(value): Ours([*words, *more]) for value, more in values.items()}
        taken, _ = interleaved(arms, 1)
        rows += [{"dial": dial, "value": int(value), "seconds": each[0]} for value, each in taken.items()]
    return rows


def losses(rounds: int) -> dict[str, float]:
    """Algorithm → the share of its loss, forward and backward, in the time of an update of micro (median)."""
    return shares({name: config_of(["model=micro", f"algorithm={name}"]) for name in names()}, rounds)


if __name__ == "__main__":
    _answer(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])

"""Record how cost grows: of a step over response length, experts and layers, of commands over runs.

``python benchmarks/growth.py`` writes ``growth.json``, ``growth.png`` and ``growth.svg`` to ``results/speed``:
processor seconds and the exponent, which is the slope of a line through the logarithms of the last three points.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import many_runs
import numpy as np
import pandas as pd
import speed
import torch

from steadymoe.bench.report import paper
from steadymoe.bench.report.figures import colours, style
from steadymoe.bench.support import files

RECORDED = Path(__file__).parents[1] / "results" / "speed"
_STEPS = 5
_BASE = "model=flat updates_per_rollout=2 savings.reuse_sampler_logprobs=10 minibatch_prompts=8"
_LONG = "model.config.max_position_embeddings=1024 task=chain task.spare_tokens=0"
# Axis → its values, and the overrides of one.
STEP: dict[str, tuple[Sequence[int], Callable[[int], str]]] = {
    "tokens of a response": ((16, 32, 64, 128), lambda n: f"{_LONG} task.min_operands={n} task.max_operands={n}"),
    "experts": ((8, 16, 32, 64, 128), lambda n: f"task=sort model.config.num_experts={n}"),
    "layers": ((2, 4, 8, 16), lambda n: f"task=sort model.config.num_hidden_layers={n}"),
}
RUNS = (10, 30, 100, 300, 1000)


def seconds_of_step(overrides: str) -> float:
    """Return the median processor time of a step of the suite with all metrics."""
    suite, taken = speed.Suite(f"{_BASE} {overrides}"), []
    for _ in range(_STEPS + 1):
        begun = time.process_time()
        suite.step()
        taken.append(time.process_time() - begun)
    return statistics.median(taken[1:])


def seconds_of_command(*words: str) -> float:
    """Return the processor time of ``steadymoe`` with these words and of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "steadymoe.bench.cli", *words]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_runs() -> Iterator[dict[str, float | str]]:
    """Yield the cost of commands over the number of runs that they read or plan."""
    for runs in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder)
            many_runs.make(results, runs)
            swept = f"seed=range({runs})"
            commands = {
                "status": ("status", "--results", folder),
                "run --dry": (
                    "run",
                    "--dry",
                    "experiment=tolerance",
                    "algorithm=grpo",
                    swept,
                    f"results_dir={folder}/new",
                ),
                "report": ("report", "--experiment", "many", "--results", folder),
            }
            for name, words in commands.items():
                yield {"axis": "runs", "line": name, "x": runs, "seconds": seconds_of_command(*words)}


def exponent(x: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds over log x at the last three points."""
    return float(np.polyfit(np.log(x[-3:]), np.log(seconds[-3:]), 1)[0])


def drawn(points: pd.DataFrame) -> style.DataFigure:
    """A panel for each axis, both scales logarithmic; the exponent stands beside each line."""
    with style.figure_style():
        figure, axes = style.panels(1, 4, 1.9, style.TWO_COLUMNS)
        for axis, (name, rows) in zip(axes, points.groupby("axis", sort=False), strict=True):
            for place, (line, its) in enumerate(rows.groupby("line", sort=False)):
                slope = exponent(its["x"].tolist(), its["seconds"].tolist())
                label = f"{line}: {slope:.2f}" if line else f"exponent {slope:.2f}"
                axis.plot(its["x"], its["seconds"], marker="o", markersize=3, color=colours.COLOURS[place], label=label)
                style.note(axis, str(line), its.rename(columns={"seconds": "mean"})[["x", "mean"]])
            axis.set(xscale="log", yscale="log", xlabel=str(name))
            values = sorted(set(rows["x"]))
            axis.set_xticks(values, style.numbers(values))
            axis.minorticks_off()
            axis.legend()
        axes[0].set_ylabel("processor seconds")
        text = (
            "Median of a step's processor time with all metrics, one thread; commands once, with their processes. The "
            "exponent is the slope through the last three points."
        )
        return style.finish(figure, None, text)


def main() -> None:
    """Measure, and write what was measured."""
    torch.set_num_threads(1)
    rows: list[dict[str, float | str]] = [
        {"axis": axis, "line": "", "x": value, "seconds": seconds_of_step(words(value))}
        for axis, (values, words) in STEP.items()
        for value in values
    ]
    points = pd.DataFrame([*rows, *of_runs()])
    lines = points.groupby(["axis", "line"], sort=False)
    slopes = {" ".join(filter(None, key)): exponent(its["x"].tolist(), its["seconds"].tolist()) for key, its in lines}
    facts = {"cpu": speed.provenance.processor(), "exponents": slopes, "points": points.to_dict("records")}
    files.write_json(RECORDED / "growth.json", facts)
    with paper.used(paper.Paper(caption=True)):
        for suffix in ("png", "svg"):
            drawn(points).write(RECORDED / f"growth.{suffix}", suffix)
    print(json.dumps(slopes, indent=2))


if __name__ == "__main__":
    main()

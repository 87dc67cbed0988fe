"""Time whole runs of this suite, of TRL and of a plain loop: ``python benchmarks/whole_runs.py``.

A run is the setting's own: all its rollouts and updates from a cached cold start; the suite also evaluates and records.
Models, prompts and the number of updates are the same for all. They take turns, and what is timed is processor time of
one thread. ``benchmarks/speed.py`` times steps.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import speed
import torch
from transformers import PreTrainedModel

from steadymoe.bench.runs import compose, execute, provenance
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support import files

RECORDED = Path("results/speed/whole_runs.json")
SETTINGS = {
    "7 tokens": "setting=tolerance",
    "19 tokens": "setting=tolerance_long task.fillers=0",
    "61 tokens": "setting=tolerance_long",
}
MODELS = ("flat", "dense_flat")
OURS = "suite"


def suite(words: str, folder: Path, measure: str = "little") -> Callable[[], None]:
    """Return a whole run; the first call makes the cold start and its evaluation, which later ones find."""
    (run,) = compose.plan([*words.split(), f"measure={measure}", f"results_dir={folder}"])

    def whole() -> None:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        if (status := execute.execute(run)) not in ("finished", "collapsed"):
            raise RuntimeError(f"a run of {words} ended as {status}")

    return whole


def peer(kind: type[speed.Plain | speed.TRL], words: str, folder: Path) -> Callable[[], None]:
    """Return the same rollouts and updates from the same start by another trainer, which evaluates nothing."""
    (run,) = compose.plan([*words.split(), f"results_dir={folder}"])

    def prepare(_: str) -> tuple[RunConfig, Any, PreTrainedModel]:
        task, model, _ = execute.at_start(run.config, lambda *_: None)
        return run.config, task, model

    def whole() -> None:
        trainer = kind(words, prepare)
        for _ in range(run.config.rollouts):
            trainer.step()

    return whole


def measure(words: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Time whole runs in turns: name → processor seconds of each round."""
    runs = {OURS: suite(words, folder), "measure=all": suite(words, folder, "all")}
    if "dense" not in words:  # the loop by hand is Qwen3-MoE's
        runs["a loop by hand"] = peer(speed.ByHand, words, folder)
    if find_spec("trl"):
        runs["TRL"] = peer(speed.TRL, words, folder)
    runs[OURS]()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, whole in runs.items():
            begun = time.process_time()
            whole()
            taken[name].append(time.process_time() - begun)
            print(f"{words}: {name} {taken[name][-1]:.1f} s", file=sys.stderr)
    return taken


def table(numbers: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return seconds of the suite and what others take over them, as a table in Markdown."""
    rows = {}
    for name, taken in numbers.items():
        ours = statistics.median(taken[OURS])
        others = {other: statistics.median(each) / ours for other, each in taken.items() if other != OURS}
        rows[name] = {"suite, seconds": f"{ours:.1f}"} | {other: f"{by:.2f}" for other, by in others.items()}
    return str(pd.DataFrame(rows).T.fillna("–").to_markdown(disable_numparse=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen settings, add them to the record, and print its table."""
    parser = argparse.ArgumentParser(prog="python benchmarks/whole_runs.py", description=str(__doc__).partition(":")[0])
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"seconds": {}}
    facts |= {"cpu": provenance.processor(), "cores": os.cpu_count(), "threads": 1}
    for setting in given.setting:
        for model in given.model:
            with tempfile.TemporaryDirectory() as folder:
                taken = measure(f"{SETTINGS[setting]} model={model}", Path(folder), given.rounds)
            facts["seconds"][f"{setting}, {'MoE' if model == 'flat' else 'dense twin'}"] = taken
            files.write_json(RECORDED, facts)
    shown = table(facts["seconds"])
    speed.section("whole runs", shown)
    print(shown)


if __name__ == "__main__":
    main()

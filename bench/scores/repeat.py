"""Whether an entry can be repeated: its loss passes ``check``, and two of its seeds come out as recorded.

This runs the entry's code, in processes of their own.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from steadymoe.bench.claims.study import Arm, Study
from steadymoe.bench.config import compose
from steadymoe.bench.scores.entry import Entry
from steadymoe.bench.scores.standard import STABILITY
from steadymoe.bench.statistics.estimates import t_quantile

REPEATED = "repeated"
SEEDS = (0, 1)
# The largest distance of the reward of the first two steps, which the first updates decide, from the recorded one.
_FIRST = 1e-3


def verdict(entry: Entry) -> str:
    """``repeated``, or why not, a phrase."""
    words = shlex.split(str(entry.about["words"]))
    environment = os.environ | {"STEADYMOE_PATH": str(entry.folder.resolve())}
    if _steadymoe(["check", *words], environment):
        return "check refuses it"
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", "-m", f"experiment={STABILITY.experiment}", *STABILITY.words, *words]
        command += [f"seed={','.join(map(str, SEEDS))}", f"results_dir={folder}"]
        if _steadymoe(command, environment):
            return "its runs fail"
        return _compare(entry, Path(folder), words, environment)


def _compare(entry: Entry, results: Path, words: list[str], environment: dict[str, str]) -> str:
    """Whether the repeated seeds have the recorded first rewards and an outcome inside the prediction interval."""
    line = [sys.executable, "-m", __name__, str(results), *words]
    told = json.loads(subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout)
    recorded = entry.by_seed(STABILITY)
    low, high = prediction(recorded.tolist())
    for seed in SEEDS:
        first, value = told[str(seed)]
        known = entry.made.get("first", {}).get(str(seed))
        if known is None or not np.allclose(first, known, rtol=0, atol=_FIRST):
            return f"seed {seed}: the first updates are others"
        if not low <= value <= high:
            return f"seed {seed}: {value:.3g} lies outside of [{low:.3g}, {high:.3g}]"
    return REPEATED


def prediction(numbers: list[float]) -> tuple[float, float]:
    """The interval that holds one further number of the same population with 95 % (Student's)."""
    n = len(numbers)
    half = t_quantile(0.95, n - 1) * float(np.std(numbers, ddof=1)) * np.sqrt(1 + 1 / n)
    mean = float(np.mean(numbers))
    return mean - half, mean + half


def firsts(study: Study, arm: Arm) -> dict[str, list[float]]:
    """The rewards of a run's first two steps, by seed."""
    steps = study.tables([arm])["steps"]
    rows = steps[(steps["metric"] == "reward") & (steps["step"] <= 2)].sort_values("step")
    return {str(seed): group["value"].tolist() for seed, group in rows.groupby("seed")}


def _steadymoe(words: list[str], environment: dict[str, str]) -> int:
    """The exit code of a command of steadymoe."""
    line = [sys.executable, "-m", "steadymoe.bench.cli", *words]
    return subprocess.run(line, env=environment, capture_output=True, check=False).returncode


def _main(results: Path, words: list[str]) -> None:
    """Print seed → first rewards and outcome of the repeated runs."""
    (run,) = compose.plan([f"experiment={STABILITY.experiment}", *STABILITY.words, *words, "seed=0"])
    study, arm = Study(results), Arm("repeated", STABILITY.folder, run.choices["algorithm"], run.axes)
    outcome, first = STABILITY.number(study, arm), firsts(study, arm)
    print(json.dumps({str(seed): [first[str(seed)], float(outcome[seed])] for seed in SEEDS}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])

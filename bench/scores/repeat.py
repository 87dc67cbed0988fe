"""Whether an entry can be repeated: its loss passes ``check``, and two of its seeds come out as recorded.

This runs the entry's code, in processes of their own and from a copy: nothing is written to the entry. This process
reads their results alone.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.claims.study import Arm, NotRun, Study
from steadymoe.bench.scores.entry import Entry
from steadymoe.bench.scores.standard import STABILITY
from steadymoe.bench.statistics.estimates import t_quantile

REPEATED = "repeated"
SEEDS = (0, 1)
# The updates that are compared: later ones differ between machines by more than rounding.
_UPDATES = 2
# The largest relative difference of their loss and gradient norm; the first update's loss is 0 but for rounding.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
# Both seeds lie inside their intervals with at least 95 %.
_LEVEL = 1 - 0.05 / len(SEEDS)


def verdict(entry: Entry) -> str:
    """``repeated``, with what could not be compared, or why not, a phrase."""
    with tempfile.TemporaryDirectory() as folder:
        code, results = Path(folder) / "entry", Path(folder) / "results"
        shutil.copytree(entry.folder, code)
        environment = os.environ | {"STEADYMOE_PATH": str(code)}
        if _steadymoe(["check", *entry.words], environment):
            return "check refuses it"
        seeds = f"seed={','.join(map(str, SEEDS))}"
        words = ["run", "-m", f"experiment={STABILITY.experiment}", *STABILITY.words, *entry.words, seeds]
        if _steadymoe([*words, f"results_dir={results}"], environment):
            return "its runs fail"
        return compare(entry, results)


def compare(entry: Entry, results: Path) -> str:
    """Whether the runs below ``results`` repeat the entry.

    From the same cold start, bit for bit, the first updates must be equal; another machine trains another one. The
    outcomes must lie in the prediction interval of the recorded ones.
    """
    runs = {json.loads(path.read_text())["seed"]: path.parent for path in (results / "runs").rglob("run.json")}
    facts = json.loads((runs[SEEDS[0]] / "run.json").read_text())
    arm = Arm(entry.name, facts["experiment"], facts["algorithm"], facts["axes"])
    try:
        outcomes = STABILITY.number(Study(results), arm)
    except NotRun:
        return "its runs fail"
    low, high = prediction(entry.by_seed(STABILITY).tolist())
    is_same_start = True
    for seed in SEEDS:
        known, found = entry.made["first"].get(str(seed)), first_updates(runs[seed])
        if known is None:
            return f"seed {seed}: its first updates are not recorded"
        if known["cold_start"] != found["cold_start"]:
            is_same_start = False
        elif not _equal(known, found):
            return f"seed {seed}: the first updates are others"
        if not low <= outcomes[seed] <= high:
            return f"seed {seed}: {outcomes[seed]:.3g} lies outside of [{low:.3g}, {high:.3g}]"
    return REPEATED if is_same_start else f"{REPEATED}, from other cold starts"


def _equal(known: dict[str, Any], found: dict[str, Any]) -> bool:
    return all(
        len(known[key]) == len(found[key])
        and np.allclose(known[key], found[key], rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=False)
        for key in ("loss", "grad_norm")
    )


def first_updates(run: Path) -> dict[str, Any]:
    """What a run's folder says of its begin: a hash of the cold start's weights, loss and gradient norm."""
    facts = json.loads((run / "run.json").read_text())
    results = next(each for each in run.parents if each.name == "runs").parent
    weights = results / "cold_starts" / f"{facts['cold_start']['fingerprint']}.safetensors"
    updates = pd.read_parquet(run / "updates.parquet", columns=["loss", "grad_norm"]).head(_UPDATES)
    return {"cold_start": hashlib.sha256(weights.read_bytes()).hexdigest()[:16]} | {
        key: updates[key].tolist() for key in ("loss", "grad_norm")
    }


def prediction(numbers: list[float]) -> tuple[float, float]:
    """The interval that holds one further number of the same population with ``_LEVEL`` (Student's)."""
    n = len(numbers)
    half = t_quantile(_LEVEL, n - 1) * float(np.std(numbers, ddof=1)) * np.sqrt(1 + 1 / n)
    mean = float(np.mean(numbers))
    return mean - half, mean + half


def _steadymoe(words: list[str], environment: dict[str, str]) -> int:
    """The exit code of a command of steadymoe; its progress goes to this process's stderr."""
    line = [sys.executable, "-m", "steadymoe.bench.cli", *words]
    return subprocess.run(line, env=environment, stdout=sys.stderr, check=False).returncode

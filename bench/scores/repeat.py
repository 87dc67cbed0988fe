"""Whether an entry can be repeated: its loss passes ``check``, and two of its seeds come out as recorded.

This runs the entry's code, in processes of their own and from a copy: nothing is written to the entry. This process
reads their results alone.
"""

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.claims.study import Arm, Study
from steadymoe.bench.scores.entry import OWN, Entry
from steadymoe.bench.scores.standard import STABILITY
from steadymoe.bench.statistics.estimates import t_quantile

REPEATED = "repeated"
# Seeds that are run again, of the entry and of GRPO: the entry is ranked by the difference of the two.
_SEEDS = 2
_ALSO = "grpo"
# The updates that are compared: later ones differ between machines by more than rounding.
_UPDATES = 2
# The largest relative difference of their loss and gradient norm; the first update's loss is 0 but for rounding.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
# All four runs lie inside their intervals with at least 95 %.
_LEVEL = 1 - 0.05 / (2 * _SEEDS)


def verdict(entry: Entry) -> str:
    """``repeated`` with the seeds, or why not, a phrase. The seeds are drawn anew each time: nobody can prepare two."""
    seeds = sorted(secrets.SystemRandom().sample(STABILITY.seeds, _SEEDS))
    with tempfile.TemporaryDirectory() as folder:
        code, results = Path(folder) / "entry", Path(folder) / "results"
        shutil.copytree(entry.folder, code)
        environment = os.environ | {"STEADYMOE_PATH": str(code)}
        if refused := _steadymoe(["check", *entry.words], environment):
            return "check refuses it" if refused == 1 else "its algorithm cannot be built"
        fixed = ["run", "-m", f"experiment={STABILITY.experiment}", *STABILITY.words, f"results_dir={results}"]
        fixed += [f"seed={','.join(map(str, seeds))}"]
        algorithms = [entry.words] + ([] if entry.words == [f"algorithm={_ALSO}"] else [[f"algorithm={_ALSO}"]])
        if any(_steadymoe([*fixed, *words], environment) for words in algorithms):
            return "its runs fail"
        return compare(entry, results, seeds)


def compare(entry: Entry, results: Path, seeds: Sequence[int]) -> str:
    """Whether the runs of ``seeds`` below ``results`` repeat the entry.

    From the same cold start, bit for bit, the first updates must be equal; another machine trains another one, and then
    nothing is decided. Outcomes, GRPO's too, must lie in the prediction interval of the recorded ones.
    """
    try:
        found = {arm: _found(results, entry.algorithm if arm == OWN else arm, seeds) for arm in (OWN, _ALSO)}
    except Exception as error:  # what the entry's code wrote
        return f"its runs cannot be read: {type(error).__name__}"
    is_same_start = True
    for seed in seeds:
        known, (first, _) = entry.about["first"][str(seed)], found[OWN][seed]
        if known["cold_start"] != first["cold_start"]:
            is_same_start = False
        elif not _equal(known, first):
            return f"seed {seed}: the first updates are others"
    for arm, runs in found.items():
        low, high = prediction(entry.by_seed(STABILITY, arm).tolist())
        for seed in seeds:
            if not low <= runs[seed][1] <= high:
                return f"seed {seed} of {arm}: {runs[seed][1]:.3g} lies outside of [{low:.3g}, {high:.3g}]"
    told = f"seeds {', '.join(map(str, seeds))}"
    return f"{REPEATED} ({told})" if is_same_start else f"not decided ({told}): other cold starts"


def _found(results: Path, algorithm: str, seeds: Sequence[int]) -> dict[int, tuple[dict[str, Any], float]]:
    """Seed → first updates and outcome of an algorithm's runs below ``results``."""
    runs = {}
    for path in (results / "runs").rglob("run.json"):
        facts = json.loads(path.read_text())
        if facts["algorithm"] == algorithm:
            runs[facts["seed"]] = (path.parent, facts)
    _, facts = runs[seeds[0]]
    outcomes = STABILITY.number(Study(results), Arm("", facts["experiment"], algorithm, facts["axes"]))
    return {seed: (first_updates(runs[seed][0]), float(outcomes[seed])) for seed in seeds}


def _equal(known: dict[str, Any], found: dict[str, Any]) -> bool:
    return all(
        len(known[key]) == len(found[key]) and np.allclose(known[key], found[key], rtol=_RELATIVE, atol=_ABSOLUTE)
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

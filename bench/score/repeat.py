"""Whether an entry can be repeated: its loss passes ``check``, and two of its seeds come out as recorded.

This runs the entry's code, in processes of their own and from a copy: nothing is written to the entry. This process
reads their results alone.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.score.entry import OWN, Entry
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.score.standard import STABILITY, changed_setting
from steadymoe.bench.statistics.estimates import t_quantile

REPEATED = "repeated"
# Seeds that are run again, of the entry and of GRPO: the entry is ranked by the difference of the two.
_SEEDS = 2
_ALSO = "grpo"
# The updates that are compared: later ones differ between machines by more than rounding.
_UPDATES = 2
# The largest relative difference of their loss and gradient norm; the first update's loss is 0 but for rounding.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
# The largest relative difference of outcomes that repeat bit for bit: pandas may add them up in another order.
_SAME = 1e-12
# All four runs lie inside their intervals with at least 95 %.
_LEVEL = 1 - 0.05 / (2 * _SEEDS)


@dataclass(frozen=True)
class _Run:
    """One run of the repetition."""

    first: Mapping[str, Any]
    outcome: float
    machine: str
    config: Mapping[str, Any]


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

    They must have GRPO's setting. From the same cold start, bit for bit, the first updates must be equal, and on the
    same machine the outcomes, GRPO's too. Another machine trains another cold start; then outcomes must lie in the
    prediction interval of the recorded ones, and nothing is decided.
    """
    try:
        found = {arm: _found(results, entry.algorithm if arm == OWN else arm, seeds) for arm in (OWN, _ALSO)}
        changed = [changed_setting(found[_ALSO][seed].config, found[OWN][seed].config) for seed in seeds]
    except Exception as error:  # what the entry's code wrote
        return f"its runs cannot be read: {type(error).__name__}"
    if any(changed):
        return f"its runs change what the standard fixes: {next(filter(None, changed))}"
    same_start = {seed for seed in seeds if _first(entry, seed)["cold_start"] == found[OWN][seed].first["cold_start"]}
    for seed in sorted(same_start):
        if not _equal(_first(entry, seed), found[OWN][seed].first):
            return f"seed {seed}: the first updates are others"
    for arm, runs in found.items():
        recorded = entry.by_seed(STABILITY, arm)
        low, high = prediction(recorded.tolist())
        for seed in seeds:
            outcome, known = runs[seed].outcome, float(recorded[seed])
            if seed in same_start and runs[seed].machine == entry.about["machine"]:
                if not math.isclose(outcome, known, rel_tol=_SAME):
                    return f"seed {seed} of {arm}: {outcome:.6g} on the same machine and cold start, not {known:.6g}"
            elif not low <= outcome <= high:
                return f"seed {seed} of {arm}: {outcome:.3g} lies outside of [{low:.3g}, {high:.3g}]"
    told = f"seeds {', '.join(map(str, seeds))}"
    same = len(same_start) == len(seeds)
    return f"{REPEATED} ({told})" if same else f"not decided ({told}): other cold starts"


def _first(entry: Entry, seed: int) -> Mapping[str, Any]:
    """The recorded first updates of a seed."""
    first: Mapping[str, Any] = entry.about["first"][str(seed)]
    return first


def _found(results: Path, algorithm: str, seeds: Sequence[int]) -> dict[int, _Run]:
    """Seed → the run of an algorithm below ``results``."""
    runs = {}
    for path in (results / "runs").rglob("run.json"):
        facts = json.loads(path.read_text())
        if facts["algorithm"] == algorithm:
            runs[facts["seed"]] = (path.parent, facts)
    _, facts = runs[seeds[0]]
    study, arm = Recorded(results), Arm("", facts["experiment"], algorithm, facts["axes"])
    outcomes, machines = STABILITY.number(study, arm), study.tables([arm])["runs"].set_index("seed")["machine"]
    return {
        seed: _Run(first_updates(folder), float(outcomes[seed]), str(machines[seed]), facts["config"])
        for seed in seeds
        for folder, facts in [runs[seed]]
    }


def _equal(known: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
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

"""Repeat an entry: its loss must pass ``check``, and two of its seeds must come out as submitted.

This runs the entry's code, in processes of its own and from a copy: nothing is written to the entry. This process reads
only their results.
"""

import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from steadymoe.bench.score.entry import OWN, Entry, first_updates
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.score.standard import STABILITY, changed_setting
from steadymoe.bench.statistics.estimates import t_quantile
from steadymoe.bench.support import regular_files

REPEATED = "repeated"
# Seeds that are rerun, of the entry and of GRPO: the entry is ranked by the difference of the two.
_SEEDS = 2
_REFERENCE = "grpo"
# Tolerances of loss and gradient norm of the first updates; the first update's loss is 0 but for rounding.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
# Tolerance of outcomes that repeat bit for bit: pandas may add them up in another order.
_SAME = 1e-12
# All four runs lie inside their intervals with at least 95 %.
_LEVEL = 1 - 0.05 / (2 * _SEEDS)


class _Run(NamedTuple):
    """One rerun."""

    first: Mapping[str, Any]
    outcome: float
    machine: str
    config: Mapping[str, Any]


def verdict(entry: Entry) -> str:
    """Return ``repeated`` with the seeds, or why not. The seeds are drawn each time, so nobody can prepare two."""
    seeds = sorted(secrets.SystemRandom().sample(STABILITY.seeds, _SEEDS))
    with tempfile.TemporaryDirectory() as folder:
        code, results = Path(folder) / "entry", Path(folder) / "results"
        shutil.copytree(entry.folder, code)
        environment = os.environ | {"STEADYMOE_PATH": str(code)}

        def steadymoe(*words: str) -> int:
            line = [sys.executable, "-m", "steadymoe.bench.cli", *words]
            return subprocess.run(line, env=environment, stdout=sys.stderr, check=False).returncode

        if refused := steadymoe("check", *entry.overrides):
            return "check refuses it" if refused == 1 else "its algorithm cannot be built"
        fixed = ["-m", f"experiment={STABILITY.experiment}", *STABILITY.overrides, f"results_dir={results}"]
        fixed += [f"seed={','.join(map(str, seeds))}"]
        for arm, overrides in ((OWN, entry.overrides), (_REFERENCE, [f"algorithm={_REFERENCE}"])):
            if steadymoe("run", *fixed, *overrides, f"experiment_name={arm}"):
                return "its runs fail"
        return compare(entry, results, seeds)


def compare(entry: Entry, results: Path, seeds: Sequence[int]) -> str:
    """Return whether the runs of ``seeds`` below ``results`` repeat the entry.

    They are two experiments, ``yours`` and ``grpo``, of one setting. From the same cold start, bit for bit, the first
    updates must be equal, and on the same machine the outcomes too, also GRPO's. Another machine trains another cold
    start; then outcomes must lie in the prediction interval of the submitted ones, and nothing is decided.
    """
    try:
        runs = {arm: _runs(results, arm) for arm in (OWN, _REFERENCE)}
        own = runs[OWN]
        changed = [changed_setting(runs[_REFERENCE][seed].config, own[seed].config) for seed in seeds]
    except Exception as error:  # what the entry's code wrote
        return f"its runs cannot be read: {type(error).__name__}"
    if any(changed):
        return f"its runs change what the standard fixes: {next(filter(None, changed))}"
    first = {seed: entry.about["first"][str(seed)] for seed in seeds}
    same_start = [seed for seed in seeds if first[seed]["cold_start"] == own[seed].first["cold_start"]]
    for seed in same_start:
        for key in ("loss", "grad_norm"):
            submitted, rerun = first[seed][key], own[seed].first[key]
            if len(submitted) != len(rerun) or not np.allclose(submitted, rerun, rtol=_RELATIVE, atol=_ABSOLUTE):
                return f"seed {seed}: the first updates differ"
    for arm, of_arm in runs.items():
        outcomes = entry.by_seed(STABILITY, arm)
        low, high = prediction(outcomes.tolist())
        for seed in seeds:
            outcome, known = of_arm[seed].outcome, float(outcomes[seed])
            if seed in same_start and of_arm[seed].machine == entry.about["machine"]:
                if not math.isclose(outcome, known, rel_tol=_SAME):
                    return f"seed {seed} of {arm}: {outcome:.6g} on the same machine and cold start, not {known:.6g}"
            elif not low <= outcome <= high:
                return f"seed {seed} of {arm}: {outcome:.3g} lies outside of [{low:.3g}, {high:.3g}]"
    which = f"seeds {', '.join(map(str, seeds))}"
    same = len(same_start) == len(seeds)
    return f"{REPEATED} ({which})" if same else f"not decided ({which}): other cold starts"


def _runs(results: Path, experiment: str) -> dict[int, _Run]:
    """Return seed → run of an experiment with one arm."""
    paths = (results / "runs" / experiment).rglob("run.json")
    files = {path.parent: regular_files.read_json(path) for path in paths}
    facts = next(iter(files.values()))
    recorded, arm = Recorded(results), Arm("", experiment, facts["algorithm"], facts["axes"])
    outcomes = STABILITY.measure(recorded, arm)
    machines = recorded.tables([arm])["runs"].set_index("seed")["machine"]
    runs = {}
    for folder, facts in files.items():
        seed = facts["seed"]
        runs[seed] = _Run(first_updates(folder), float(outcomes[seed]), str(machines[seed]), facts["config"])
    return runs


def prediction(numbers: list[float]) -> tuple[float, float]:
    """Return the interval that holds one further number of the same population with ``_LEVEL`` (Student's)."""
    n = len(numbers)
    half = t_quantile(_LEVEL, n - 1) * float(np.std(numbers, ddof=1)) * np.sqrt(1 + 1 / n)
    mean = float(np.mean(numbers))
    return mean - half, mean + half

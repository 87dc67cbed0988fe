"""Write the baselines of the standard and the entries of the core algorithms from the reference study.

    python -m steadymoe.bench.score.reference results/reference                          # the baselines alone
    python -m steadymoe.bench.score.reference results/reference results results/board

The entries come from run folders below ``results``, since they hold the first updates of their runs; the baselines come
from the archives in ``results/reference``.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import archive as audits
from steadymoe.bench.config import compose
from steadymoe.bench.score import baselines, entry
from steadymoe.bench.score.baselines import FOLDER, METADATA, OUTCOMES
from steadymoe.bench.score.entry import OWN
from steadymoe.bench.score.recorded import Arm, Audited, NotRun, Recorded
from steadymoe.bench.score.standard import ANCHORS, GRADIENT, PARTS, STABILITY, Part
from steadymoe.bench.support import atomic_files

# Algorithm → the paper and the equation of its loss.
CORE = {
    "grpo": ("DeepSeekMath (2402.03300)", "3, without KL"),
    "gspo": ("Group Sequence Policy Optimization (2507.18071)", "5 and 7"),
    "reinforce": (
        "Simple statistical gradient-following algorithms (Williams 1992)",
        "6, with the group's mean as baseline",
    ),
    "vespo": (
        "VESPO: Variational Sequence-Level Soft Policy Optimization (2602.10693)",
        "the kernel; not numbered in what was read",
    ),
    "cispo": ("MiniMax-M1 (2506.13585)", "4 and 5"),
    "sapo": ("Soft Adaptive Policy Optimization (2511.20347)", "5 and 6, read in a digest and in TRL's code"),
}


def write_entries(results: Path, to: Path) -> list[Path]:
    """Write an entry for each core algorithm below the folder ``to``. Raises NotRun, BadEntry."""
    recorded, written = Recorded(results), []
    for name, (paper, equation) in CORE.items():
        labels = {OWN: name} | {anchor: anchor for anchor in ANCHORS}
        arms: dict[str, entry.Arms] = {
            STABILITY.name: {label: Arm(label, STABILITY.source, of) for label, of in labels.items()},
            GRADIENT.name: {label: Audited(label, GRADIENT.source, of) for label, of in labels.items()},
        }
        seeds = ",".join(map(str, STABILITY.seeds))
        overrides = [f"experiment={STABILITY.source}", f"algorithm={name}", f"seed={seeds}", f"results_dir={results}"]
        runs = {run.config.seed: run.folder for run in compose.plan(overrides, multirun=True)}
        about: dict[str, Any] = {"name": name, "words": f"algorithm={name}", "paper": paper, "equation": equation}
        about |= {"tuned": False, "tuning": ""}
        text = f"# {name}\n\nAn algorithm of the suite, with the numbers of its YAML: docs/algorithms.md.\n"
        written.append(entry.submit(recorded, arms, runs, about, {"README.md": text}, to / name))
    return written


def write_baselines(results: Path, folder: Path = FOLDER) -> list[Path]:
    """Write what the archives below ``results`` hold for the standard to ``folder``; return the files.

    Only the standard's seeds, and only arms that ran at all of them. Raises NotRun if an anchor has not run.
    """
    recorded = Recorded(results)
    outcomes = []
    for part, arm in ((each, arm) for each in PARTS for arm in each.arms):
        try:
            numbers = part.measure(recorded, arm)
        except NotRun:
            if arm.label in ANCHORS.values():
                raise
            continue
        numbers = numbers[numbers.index.isin(part.seeds)]
        rows = pd.DataFrame({"seed": numbers.index, "value": numbers.to_numpy(), "start": float("nan")})
        names = {"part": part.name, "arm": arm.label}
        if isinstance(arm, Audited):
            outcomes.append(rows.assign(tokens=float("nan"), **names, algorithm=arm.loss))
        elif set(numbers.index) == set(part.seeds):
            rows["start"] = recorded.first(arm).reindex(numbers.index).to_numpy()
            rows["tokens"] = baselines.tokens(recorded, arm).reindex(numbers.index).to_numpy()
            outcomes.append(rows.assign(**names, algorithm=arm.algorithm))
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.concat(outcomes, ignore_index=True)
    atomic_files.write(folder / OUTCOMES, partial(table.to_parquet, index=False, compression="zstd"))
    text = json.dumps({part.name: _metadata(results, part) for part in PARTS}, indent=1, sort_keys=True) + "\n"
    atomic_files.write(folder / METADATA, partial(Path.write_text, data=text))
    return [folder / name for name in (OUTCOMES, METADATA)]


def _metadata(results: Path, part: Part) -> dict[str, Any]:
    """Hashes of a part by name and seed, the median minutes of a run or audit, and machine, revision and versions of
    the last one.
    """
    hashes: dict[str, dict[str, str]] = {}
    last: Mapping[Any, Any] | pd.Series
    if part.kind == "audits":
        made = [each for each in audits.load(results, part.source).made if each["config"]["seed"] in part.seeds]
        for audit in made:
            losses = {label: loss for label, loss in audit["losses"].items() if label in ANCHORS}
            for name, digest in baselines.audit_hashes(audit["config"], losses).items():
                hashes.setdefault(name, {})[str(audit["config"]["seed"])] = digest
        last = made[-1] | {"machine": f"{made[-1]['machine']['cpu']}, {made[-1]['config']['device']}"}
        seconds = pd.Series([audit["seconds"] for audit in made])
    else:
        anchors = [arm for arm in part.arms if isinstance(arm, Arm) and arm.label in ANCHORS.values()]
        runs = Recorded(results).tables(anchors)["runs"]
        for row in runs.itertuples():
            hashes.setdefault(str(row.algorithm), {})[str(row.seed)] = str(row.config_hash)
        last, seconds = runs.iloc[-1], runs["wall_seconds"]
    facts = {"hashes": hashes, "minutes": round(float(seconds.median()) / 60, 1)}
    texts = {name: last[name] for name in ("machine", "revision", "versions")}
    return facts | {
        name: text if isinstance(text, str) else json.dumps(text, sort_keys=True) for name, text in texts.items()
    }


if __name__ == "__main__":
    archives, *of_entries = map(Path, sys.argv[1:])
    written = write_baselines(archives)
    if of_entries:
        results, board = of_entries
        written += write_entries(results.absolute(), board)
    for path in written:
        print(f"wrote {path}")

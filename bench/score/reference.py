"""Rewrite the baselines of the standard, and the board's entries of the suite's algorithms, from the reference study.

    python -m steadymoe.bench.score.reference results/reference                          # the baselines alone
    python -m steadymoe.bench.score.reference results/reference results results/board

The baselines come from the archives in ``results/reference``, the outcomes of entries from run folders below
``results``, since they have the first updates. An entry keeps its name, words, paper and equation.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import archive as audits
from steadymoe.bench.runs import compose
from steadymoe.bench.score import arms, entry
from steadymoe.bench.score.entry import OWN
from steadymoe.bench.score.recorded import Arm, Audited, NotRun, Recorded
from steadymoe.bench.score.standard import (
    ANCHORS,
    FOLDER,
    GRADIENT,
    METADATA,
    OUTCOMES,
    PARTS,
    STABILITY,
    Part,
    audit_hashes,
)
from steadymoe.bench.support import atomic_files

# Part → the arms that are recorded at its setting.
_AUDITED = [
    Audited(name.upper(), GRADIENT.source, name) for name in ("grpo", "gspo", "reinforce", "vespo", "cispo", "sapo")
]
ARMS: dict[str, list[Any]] = {
    STABILITY.name: [
        *(arms.GRPO, arms.GSPO, *arms.OTHERS.values(), *arms.CONTROLS),
        *(arms.PAPERS, arms.PAPERS_R2, arms.GSPO_R2, arms.WIDE, arms.NARROW),
    ],
    GRADIENT.name: [*_AUDITED, *(arms.AUDITED[label] for label in ("grpo-paper", "gspo-grpo_band", "grpo-gspo_band"))],
}


def write_entries(results: Path, board: Path) -> list[Path]:
    """Replace the outcomes of the entries below ``board``. Raises NotRun, BadEntry."""
    recorded, written = Recorded(results), []
    for folder in sorted(path.parent for path in board.glob("*/entry.json")):
        about = json.loads((folder / "entry.json").read_text())
        about = {key: about[key] for key in ("name", "words", "paper", "equation", "tuning")}
        labels = {OWN: about["name"]} | {anchor: anchor for anchor in ANCHORS}
        arms_of: dict[str, dict[str, Any]] = {
            STABILITY.name: {label: Arm(label, STABILITY.source, name) for label, name in labels.items()},
            GRADIENT.name: {label: Audited(label, GRADIENT.source, name) for label, name in labels.items()},
        }
        seeds = ",".join(map(str, STABILITY.seeds))
        overrides = [f"experiment={STABILITY.source}", about["words"], f"seed={seeds}", f"results_dir={results}"]
        runs = {run.config.seed: run.folder for run in compose.plan(overrides, multirun=True)}
        texts = {"README.md": (folder / "README.md").read_text()}
        renewed = entry.submit(recorded, arms_of, runs, about, texts, folder.with_name(f".{folder.name}"))
        shutil.rmtree(folder)
        written.append(renewed.rename(folder))
    return written


def write_baselines(results: Path, folder: Path = FOLDER) -> list[Path]:
    """Write what the archives below ``results`` hold for the standard to ``folder``; return the files.

    Only the standard's seeds, and only arms that ran at all of them. Raises NotRun if an anchor has not run.
    """
    recorded = Recorded(results)
    outcomes = []
    for part, arm in ((each, arm) for each in PARTS for arm in ARMS[each.name]):
        try:
            numbers = part.measure(recorded, arm)
        except NotRun:
            if arm.label in ANCHORS.values():
                raise
            continue
        numbers = numbers[numbers.index.isin(part.seeds)]
        rows = pd.DataFrame({"part": part.name, "arm": arm.label, "value": numbers, "start": float("nan")})
        rows = rows.rename_axis("seed").assign(tokens=float("nan"))
        if isinstance(arm, Audited):
            outcomes.append(rows.assign(algorithm=arm.loss))
        elif set(numbers.index) == set(part.seeds):
            firsts = {"start": recorded.first(arm), "tokens": recorded.tokens(arm)}
            outcomes.append(rows.assign(**firsts, algorithm=arm.algorithm))
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.concat(outcomes).reset_index()[["seed", "value", "start", "tokens", "part", "arm", "algorithm"]]
    atomic_files.write(folder / OUTCOMES, lambda path: table.to_parquet(path, index=False, compression="zstd"))
    text = json.dumps({part.name: _metadata(results, part) for part in PARTS}, indent=1, sort_keys=True) + "\n"
    atomic_files.write(folder / METADATA, lambda path: path.write_text(text))
    return [folder / OUTCOMES, folder / METADATA]


def _metadata(results: Path, part: Part) -> dict[str, Any]:
    """Return hashes of a part by name and seed, the median minutes, and machine, revision and versions of the last."""
    hashes: dict[str, dict[str, str]] = {}
    last: dict[Any, Any]
    if part.one == "audit":
        made = [audit for audit in audits.load(results, part.source).made if audit["config"]["seed"] in part.seeds]
        for audit in made:
            losses = {label: loss for label, loss in audit["losses"].items() if label in ANCHORS}
            for name, digest in audit_hashes(audit["config"], losses).items():
                hashes.setdefault(name, {})[str(audit["config"]["seed"])] = digest
        last = made[-1] | {"machine": f"{made[-1]['machine']['cpu']}, {made[-1]['config']['device']}"}
        seconds = pd.Series([audit["seconds"] for audit in made])
    else:
        anchors = [arm for arm in ARMS[part.name] if arm.label in ANCHORS.values()]
        runs = Recorded(results).tables(anchors)["runs"]
        for algorithm, seed, digest in zip(runs["algorithm"], runs["seed"], runs["config_hash"], strict=True):
            hashes.setdefault(str(algorithm), {})[str(seed)] = str(digest)
        last, seconds = runs.iloc[-1].to_dict(), runs["wall_seconds"]
    facts = {name: last[name] for name in ("machine", "revision", "versions")}
    texts = {name: fact if isinstance(fact, str) else json.dumps(fact, sort_keys=True) for name, fact in facts.items()}
    return {"hashes": hashes, "minutes": round(float(seconds.median()) / 60, 1)} | texts


if __name__ == "__main__":
    archives, *of_entries = map(Path, sys.argv[1:])
    written = write_baselines(archives)
    if of_entries:
        written += write_entries(of_entries[0].absolute(), of_entries[1])
    print("\n".join(f"wrote {path}" for path in written))

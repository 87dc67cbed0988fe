"""Compare this tree with revision 75f16656, on this machine: weights, tables, configs, answers to bad input, test ids.

    .venv/bin/python tests/net/compare.py            all of it, about three minutes
    .venv/bin/python tests/net/compare.py inputs     or: runs, configs, tests

Prints what differs and exits with 1 if that is more than what went on purpose (``GONE``). It leaves the repository when
the changes that it watches over are done.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mapping
import pandas as pd

from steadymoe.bench.runs.identity import flatten

BASE = "75f16656"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("algorithms", "bench", "conf", "integrations", "models")
TIMING = ("_seconds", "_per_second")
# Experiment → its name in this tree.
EXPERIMENTS = json.loads((HERE / "experiments.json").read_text())
# Tables that left.
GONE = {"tails"}
# Their updates or evaluations were counted in rollouts of several lengths: they were recorded again.
COUNTED_ANEW = ("drift", "staleness")


def in_tree(tree: Path, place: Path, *words: str) -> Any:
    """Run in_tree.py with the packages of ``tree``, in the folder ``place``, and return what it prints."""
    links = place / "links" / "steadymoe"
    links.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not (links / name).exists():
            (links / name).symlink_to(tree / name)
    environment = os.environ | {"PYTHONPATH": str(links.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "in_tree.py"), *words]
    done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_runs(trees: dict[str, Path], place: Path) -> list[str]:
    """Compare final weights and every column that is no time."""
    made = {name: in_tree(tree, place / name, "runs", str(place / name)) for name, tree in trees.items()}
    apart = []
    for run, old in made["base"].items():
        new = made["here"][run]
        if (old["status"], old["weights"]) != (new["status"], new["weights"]):
            apart.append(f"{run}: {old['status']}, {new['status']}; weights {old['weights']}, {new['weights']}")
        for table in sorted(set(old["tables"]) - GONE):
            before, after = (pd.read_parquet(each["tables"][table]) for each in (old, new))
            for column in (name for name in before if not name.endswith(TIMING)):
                if column not in after:
                    apart.append(f"{run}: {table} lacks {column}")
                elif not before[column].astype(str).equals(after[column].astype(str)):
                    apart.append(f"{run}: {table}.{column} differs")
            apart += [f"{run}: {table}.{column} is new" for column in after if column not in before]
    return apart


def compare_configs(trees: dict[str, Path], place: Path) -> list[str]:
    """Compare the config of every run of each experiment that stays, mapped to the keys of today."""
    names = {"base": EXPERIMENTS, "here": EXPERIMENTS.values()}
    made = {name: in_tree(tree, place / name, "configs", *names[name]) for name, tree in trees.items()}
    apart = []
    for experiment, renamed in EXPERIMENTS.items():
        old, new = made["base"][experiment], made["here"][renamed]
        if len(old) != len(new):
            apart.append(f"{experiment}: {len(old)} runs, {len(new)} here")
        if experiment in COUNTED_ANEW:
            continue
        before = [
            flatten(mapping.convert(plain) | {"experiment_name": renamed, "checkpoint_every": 80}) for plain in old
        ]
        flats = [{json.dumps(flat, sort_keys=True) for flat in each} for each in (before, map(flatten, new))]
        apart += [f"{experiment}: only at {BASE}: {flat}" for flat in sorted(flats[0] - flats[1])]
        apart += [f"{experiment}: only here: {flat}" for flat in sorted(flats[1] - flats[0])]
    return apart


def compare_inputs(trees: dict[str, Path], place: Path) -> list[str]:
    """Every bad input gets one line and exit code 2, there and here."""
    made = {name: in_tree(tree, place / name, "inputs", str(HERE / "bad_inputs.txt")) for name, tree in trees.items()}
    return [
        f"{name}: {line}: exit code {code}, {count} lines: {text}"
        for name, said in made.items()
        for line, (code, count, text) in said.items()
        if (code, count) != (2, 1)
    ]


def compare_tests(trees: dict[str, Path], place: Path) -> list[str]:
    """List the tests that were there and are not here; nobody is told of a loss otherwise."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts="]
    said = subprocess.run(command, cwd=trees["here"], stdout=subprocess.PIPE, text=True, check=False).stdout
    here = {line.partition("[")[0] for line in said.splitlines() if "::" in line}
    gone = sorted(set((HERE / "tests.txt").read_text().split()) - here)
    print(f"{len(gone)} tests of {BASE} have left, {len(here)} are here")
    print(*(f"  {name}" for name in gone), sep="\n")
    return []


COMPARISONS = {"runs": compare_runs, "configs": compare_configs, "inputs": compare_inputs, "tests": compare_tests}


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base = place / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", base, BASE], cwd=ROOT, check=True)
        try:
            for name in ("base", "here"):
                (place / name).mkdir()
            trees = {"base": base, "here": ROOT}
            apart = {name: COMPARISONS[name](trees, place) for name in names or COMPARISONS}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    for name, lines in apart.items():
        print(f"{name}: {f'{len(lines)} differences' if lines else 'equal'}", *lines, sep="\n  ")
    return int(any(apart.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

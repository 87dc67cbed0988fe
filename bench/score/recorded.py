"""Record the standard: ``python -m steadymoe.bench.score.recorded RESULTS`` reads the runs of the three dials there.

Writes the outcomes of all losses that ran on the dial of the rate, and what is known of their runs, into the package.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report import archive, write
from steadymoe.bench.runs import compose
from steadymoe.bench.score import outcomes, standard
from steadymoe.bench.score.standard import DIALS, REFERENCE, Dial
from steadymoe.bench.support import regular_files


def record(results: Path) -> list[Path]:
    """Write outcomes and facts of the runs below ``results`` to the package; return the paths.

    A loss counts on a dial if all runs that the standard plans there have ended; of mismatch those at its best rate.
    """
    tables = {dial: archive.load(results, dial.experiment) for dial in DIALS}
    found = pd.DataFrame(columns=list(standard.COLUMNS))
    for dial, of_dial in tables.items():
        planned = compose.plan([f"experiment={dial.experiment}"], multirun=True, with_parts=False)
        needed = {(standard.value_of(dial, run), run.config.seed) for run in planned}
        for loss, steps in of_dial["steps"].groupby("algorithm", sort=False, observed=True):
            ours = outcomes.of_steps(steps, dial, str(loss))
            if dial.at_best_rate and str(loss) in set(found["loss"]):
                ours = ours[ours["rate"] == outcomes.best_rate(found, str(loss))]
            ours = ours[
                ours["seed"].isin({seed for _, seed in needed})
            ]  # further seeds may have run for another purpose
            if needed <= set(zip(ours["value"], ours["seed"], strict=True)):
                found = pd.concat([found, ours], ignore_index=True)
    found = found.sort_values(["dial", "loss", "rate", "value", "seed"], key=_order, ignore_index=True)
    facts = _facts(tables[DIALS[0]]["runs"], tables)
    texts = {standard.OUTCOMES: found.to_csv(index=False), standard.MADE: json.dumps(facts, indent=1) + "\n"}
    return write.files(standard.FOLDER, texts)


def _order(column: pd.Series) -> pd.Series:
    names = [dial.name for dial in DIALS]
    return column.map(names.index) if column.name == "dial" else column


def _facts(runs: pd.DataFrame, tables: dict[Dial, dict[str, pd.DataFrame]]) -> dict[str, Any]:
    """Return hashes of GRPO's configs by dial and value, and minutes, machine, revision, versions and date of runs."""
    hashes: dict[str, dict[str, str]] = {}
    for dial, of_dial in tables.items():
        if len(of_dial["runs"]):
            ours = of_dial["runs"][of_dial["runs"]["algorithm"] == REFERENCE]
            values = ours[dial.column].astype(float).map("{:g}".format)
            hashes[dial.name] = dict(zip(values, ours["config_without_seed"], strict=True))
    last = runs.iloc[-1]
    started = regular_files.read_json(Path(last["folder"]) / "run.json")["started"]
    return {
        "hashes": hashes,
        "minutes": round(float(runs["wall_seconds"].median()) / 60, 2),
        "machine": str(last["machine"]),
        "revision": str(last["revision"]),
        "versions": str(last["versions"]),
        "date": str(started)[:10],
    }


if __name__ == "__main__":
    print("\n".join(f"wrote {path}" for path in record(Path(sys.argv[1]))))

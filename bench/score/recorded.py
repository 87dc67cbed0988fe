"""Record the standard: ``python -m steadymoe.bench.score.recorded RESULTS`` reads the runs of the three dials there.

Writes the outcomes of all losses that ran on the dial of the rate, and what is known of their runs, into the package.
What was recorded before stays where the dial has not run for the loss again.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report import archive, write
from steadymoe.bench.runs import compose
from steadymoe.bench.score import outcomes, standard
from steadymoe.bench.score.standard import DIALS, RATE, REFERENCE, REPEATED, Dial
from steadymoe.bench.support import regular_files


def record(results: Path, to: Path = standard.FOLDER) -> list[Path]:
    """Write outcomes and facts of the runs below ``results`` to the folder ``to``; return the paths.

    A loss counts on a dial if all runs that the standard plans there have ended; of mismatch those at its best rate.
    All runs on the seeds of ``standard.REPEATED`` count as well. Off the dial of the rate, GRPO's must be there too.
    Raises ConfigError if ``to`` holds what was recorded with other settings.
    """
    is_first = not (to / standard.OUTCOMES).exists()
    found = pd.DataFrame(columns=list(standard.COLUMNS)) if is_first else standard.recorded(to)
    made: dict[str, Any] = {"hashes": {}, "also": {}} if is_first else standard.made(to)
    for dial in DIALS:
        planned = compose.plan([f"experiment={dial.experiment}", *dial.overrides], multirun=True, with_parts=False)
        references = [run for run in planned if run.choices["algorithm"] == REFERENCE]
        standard.refuse_other_settings(dial, references, made["hashes"].get(dial.name, {}))
        values = {standard.value_of(dial, run) for run in planned}
        recorded = archive.load(results, dial.experiment)
        for seeds in ({run.config.seed for run in planned}, set(REPEATED)):
            runs = recorded["runs"][recorded["runs"]["seed"].isin(seeds)]
            if dial != RATE and REFERENCE not in set(runs["algorithm"]):
                continue  # seeds would not be paired: another processor makes other cold starts
            for loss, steps in recorded["steps"].groupby("algorithm", sort=False, observed=True):
                ours = outcomes.of_steps(steps[steps["seed"].isin(seeds)], dial, str(loss))
                if dial.at_best_rate and str(loss) in set(found["loss"]):
                    ours = ours[ours["rate"] == outcomes.best_rate(found, str(loss))]
                # Others have run for another purpose.
                if set(itertools.product(values, seeds)) <= set(zip(ours["value"], ours["seed"], strict=True)):
                    again = (found["dial"] == dial.name) & (found["loss"] == loss) & found["seed"].isin(seeds)
                    found = pd.concat([found[~again], ours], ignore_index=True)
                    _note(made, dial, runs, str(loss))
    found = found.assign(dial=pd.Categorical(found["dial"], [dial.name for dial in DIALS]))
    found = found.sort_values(["dial", "loss", "rate", "value", "seed"], ignore_index=True)
    texts = {standard.OUTCOMES: found.to_csv(index=False), standard.MADE: json.dumps(made, indent=1) + "\n"}
    return write.files(to, texts)


def _note(made: dict[str, Any], dial: Dial, runs: pd.DataFrame, loss: str) -> None:
    """Add to ``made`` what is known of a loss's runs on a dial.

    GRPO's give the hashes of configs by value, and the facts of all losses that ran beside it. Those of a loss that ran
    elsewhere, and those of the repetition, stand under ``also``.
    """
    ours = runs[runs["algorithm"] == loss]
    last = ours.iloc[-1]
    started = regular_files.read_json(Path(last["folder"]) / "run.json")["started"]
    facts = {key: str(last[key]) for key in ("machine", "revision", "versions")} | {"date": str(started)[:10]}
    if set(ours["seed"]) <= set(REPEATED):
        of = "" if dial == RATE else f" of {dial.name}"
        made["also"][f"seeds {min(REPEATED)} to {max(REPEATED)}{of}"] = facts
        return
    if loss == REFERENCE:
        values = ours[dial.column].astype(float).map("{:g}".format)
        made["hashes"][dial.name] = dict(zip(values, ours["config_without_seed"], strict=True))
    if dial != RATE:
        return
    made["also"].pop(loss, None)
    if loss == REFERENCE:
        made |= {"minutes": round(float(runs["wall_seconds"].median()) / 60, 2)} | facts
    elif REFERENCE not in set(runs["algorithm"]):
        made["also"][loss] = facts


if __name__ == "__main__":
    print("\n".join(f"wrote {path}" for path in record(Path(sys.argv[1]))))

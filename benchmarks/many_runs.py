"""Many run folders from the nine recorded ones, to measure cost: ``python benchmarks/many_runs.py FOLDER 1000``.

The copies are valid runs: seeds, learning rates, rewards and hashes differ, and checksums are those of their tables.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from steadymoe.bench.runs import identity, provenance, record, run_folder
from steadymoe.bench.training import columns

RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "results" / "runs" / "small"


def make(results: Path, n: int, seeds: int = 3, repeats: int = 1) -> None:
    """Write ``n`` ended runs of the experiment ``many``; arms have ``seeds`` runs, steps occur ``repeats`` times."""
    originals = sorted(RECORDED.glob("**/seed=0"))
    facts = [json.loads((folder / "run.json").read_text()) for folder in originals]
    code = [provenance.code_hash(each["config"]) for each in facts]
    tables = [{name: record.read_table(folder, name) for name in columns.TABLES} for folder in originals]
    generator = np.random.default_rng(0)
    for number in range(n):
        arm, seed = divmod(number, seeds)
        which, rate = arm % len(originals), round(1e-3 * 1.01 ** (arm // len(originals)), 9)
        run = copy.deepcopy(facts[which]) | {"experiment": "many", "seed": seed, "algorithm_code": code[which]}
        run["config"] |= {"experiment_name": "many", "seed": seed, "updates": run["config"]["updates"] * repeats}
        run["config"]["optimizer"]["learning_rate"] = run["axes"]["optimizer.learning_rate"] = rate
        run |= {"axes": {"optimizer.learning_rate": rate, "updates": run["config"]["updates"]}}
        run |= {"axes_name": identity.axes_name(run["axes"]), "config_hash": identity.config_hash(run["config"])}
        run["config_hash_without_seed"] = identity.config_hash(run["config"] | {"seed": None})
        run |= {"training_version": provenance.TRAINING_VERSION, "versions": provenance.versions(None)}
        folder = results.joinpath(
            "runs", "many", run["algorithm"], run["model"], run["task"], run["axes_name"], f"seed={seed}"
        )
        folder.mkdir(parents=True)
        run["tables"] = {}
        for name, table in tables[which].items():
            last = run_folder.rollouts(run) // repeats
            long = pd.concat([table.assign(step=table["step"] + last * each) for each in range(repeats)])
            if name == "steps":
                noise = generator.normal(0, 0.05, len(long))
                long = long.assign(reward=(long["reward"] + noise).clip(0, 1), eval_accuracy=long["eval_accuracy"])
            path = folder / f"{name}.parquet"
            pq.write_table(pa.Table.from_pandas(long, schema=record.schema(name), preserve_index=False), path)
            run["tables"][name] = run_folder.checksum(path)
        (folder / "run.json").write_text(json.dumps(run))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]))

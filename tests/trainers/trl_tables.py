"""The tables that runs of ``trl_runs`` recorded, compared; and runs on several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.measurement import columns
from steadymoe.bench.runs import record

HERE = Path(__file__).parent
EXACT = (
    "expert_change_rate",
    "expert_set_change_rate",
    "token_any_layer_change_rate",
    "response_tokens",
    "step",
    "update",
)
PROBED = [name for name in columns.TABLES["updates"] if name.startswith(("log_ratio_", "routing_share"))]
PROBED += ["expert_change_per_update"]
TIMES = [name for name in columns.TABLES["steps"] if name.endswith(("_seconds", "_per_second"))]


def folder_of(results: Path) -> Path:
    (path,) = results.glob("runs/**/run.json")
    return path.parent


def tables(results: Path, probed: bool = True) -> dict[str, pd.DataFrame]:
    """The tables of the one run below ``results``, without columns of times and, unless ``probed``, of a probe."""
    found = {name: record.read_table(folder_of(results), name) for name in ("steps", "updates", "layers")}
    left_out = TIMES if probed else [*TIMES, *PROBED]
    return {name: table.drop(columns=left_out, errors="ignore") for name, table in found.items()}


def assert_equal(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame], within: float) -> None:
    """Equal tables: changes of experts and counts exactly, everything else ``within`` of it."""
    for name, table in one.items():
        assert list(table.columns) == list(other[name].columns)
        assert len(table) == len(other[name]) > 0
        for column in table:
            ours, theirs = table[column], other[name][column]
            if str(column) in EXACT:
                pd.testing.assert_series_equal(ours, theirs)
            elif ours.dtype == object:
                pairs = zip(ours, theirs, strict=True)
                assert all(left is right or np.array_equal(left, right) for left, right in pairs)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=within, atol=within, err_msg=str(column))


def run_with_processes(folder: Path, processes: int, wait: bool = True, **arguments: Any) -> subprocess.Popen[str]:
    """``trl_runs.py`` on several gloo processes; each records below ``folder/rank<n>``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(
            [*command, str(HERE / "trl_runs.py"), str(folder), json.dumps(arguments)],
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )
    if wait:
        assert started.wait() == 0, (folder / "log").read_text()
    return started

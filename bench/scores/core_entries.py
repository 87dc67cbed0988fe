"""The entries of the suite's core algorithms, from the runs of the reference study.

    python -m steadymoe.bench.scores.core_entries results results/board

takes run folders, not their archive: an entry holds the first updates of its runs.
"""

import sys
from pathlib import Path
from typing import Any

from steadymoe.bench.claims.study import Arm, Audited, Study
from steadymoe.bench.config import compose
from steadymoe.bench.scores import submit
from steadymoe.bench.scores.entry import OWN
from steadymoe.bench.scores.standard import ANCHORS, GRADIENT, STABILITY

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


def write(results: Path, to: Path) -> list[Path]:
    """Write an entry for each core algorithm below the folder ``to``. Raises NotRun, BadEntry."""
    study, written = Study(results), []
    for name, (paper, equation) in CORE.items():
        arms: dict[str, submit.Arms] = {
            STABILITY.name: {key: Arm(key, STABILITY.source, each) for key, each in _of(name).items()},
            GRADIENT.name: {key: Audited(key, GRADIENT.source, each) for key, each in _of(name).items()},
        }
        seeds = ",".join(map(str, STABILITY.seeds))
        words = [f"experiment={STABILITY.source}", f"algorithm={name}", f"seed={seeds}", f"results_dir={results}"]
        runs = {run.config.seed: run.folder for run in compose.plan(words, multirun=True)}
        said: dict[str, Any] = {"name": name, "words": f"algorithm={name}", "paper": paper, "equation": equation}
        said |= {"tuned": False, "tuning": ""}
        text = f"# {name}\n\nAn algorithm of the suite, with the numbers of its YAML: docs/algorithms.md.\n"
        written.append(submit.submit(study, arms, runs, said, {"README.md": text}, to / name))
    return written


def _of(name: str) -> dict[str, str]:
    """The algorithm of an entry's own arm and of each anchor."""
    return {OWN: name} | {anchor: anchor for anchor in ANCHORS}


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]).absolute(), Path(sys.argv[2])):
        print(f"wrote {path}")

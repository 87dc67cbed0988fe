"""What one tree of the suite computes, as JSON: run by compare.py, once with each tree.

python in_tree.py runs FOLDER | configs NAMES… | inputs FILE
"""

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

SMALL = [
    *("model=micro", "model.config.num_hidden_layers=2", "model.config.hidden_size=32"),
    *("task=chain", "task.min_operands=2", "task.max_operands=3", "task.modulus=3"),
    *("rollout.responses=8", "optimizer.learning_rate=1e-3", "updates_per_rollout=2"),
    *("evaluation.prompts=8", "probe.responses=4", "cold_start.accuracy_low=0"),
    *("cold_start.accuracy_high=1", "cold_start.check_every=40", "cold_start.batch_size=32"),
    *("cold_start.learning_rate=1e-2", "cold_start.check_prompts=4"),
]
COUNTS = {
    True: ["minibatch_prompts=2", "updates=12", "evaluation.every=4", "probe.every=4"],
    False: ["rollout.prompts=4", "steps=6", "evaluation.every=2", "probe.every=2"],
}
RUNS = {
    "plain": [],
    "r2": ["routing=r2"],
    "r3_noise": ["routing=r3", "engine=router_noise", "engine.strength=1.0"],
    "pr2": ["routing=pr2"],
    "dense": ["model=dense_micro"],
}


def runs(folder: str) -> dict[str, Any]:
    """Make the five small runs below ``folder``; return the hash of their final weights and their tables' places."""
    from steadymoe import bench
    from steadymoe.bench.schema import RunConfig
    from steadymoe.bench.training.trainer import Trainer

    counts = COUNTS[hasattr(RunConfig, "rollouts")]
    last: list[Trainer] = []
    step = Trainer.step

    def remembered(self: Trainer, number: int) -> Any:
        last[:] = [self]
        return step(self, number)

    Trainer.step = remembered  # type: ignore[method-assign]
    made = {}
    for name, words in RUNS.items():
        (planned,) = bench.plan(*SMALL, *counts, *words, f"results_dir={folder}", f"experiment_name={name}")
        status = bench.run(planned)
        digest = hashlib.sha256()
        for key, value in sorted(last[0].learner.model.state_dict().items()):
            digest.update(key.encode() + value.detach().contiguous().numpy().tobytes())
        tables = {path.stem: str(path) for path in sorted(Path(planned.folder).glob("*.parquet"))}
        made[name] = {"status": status, "weights": digest.hexdigest(), "tables": tables}
    return made


def configs(*names: str) -> dict[str, Any]:
    """Return the config of every run of each experiment."""
    from steadymoe import bench

    return {name: [run.plain for run in bench.plan(f"experiment={name}")] for name in names}


def inputs(file: str) -> dict[str, Any]:
    """Return the exit code and the number of lines on stderr of every command of ``file``."""
    from steadymoe.bench import cli

    said = {}
    for line in Path(file).read_text().splitlines():
        if line.startswith("#"):
            continue
        errors = io.StringIO()
        sys.argv = ["steadymoe", *line.split()]
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                cli.main()
                code: Any = 0
            except SystemExit as ended:
                code = ended.code
            except BaseException as error:
                code = repr(error)
        said[line] = [code, errors.getvalue().count("\n"), errors.getvalue().strip()]
    return said


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    print(json.dumps({"runs": runs, "configs": configs, "inputs": inputs}[verb](*words)))

"""Which of the suite's code runs between a command and its ``Trainer``: ``python tests/tracer.py [RESULTS]``.

Lines of function bodies that were executed, by file; lines of modules, which importing runs, do not count. The cold
start is cached beforehand, so training one is not part of it.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from steadymoe.bench.runs import command
from steadymoe.bench.training import trainer

ROOT = Path(__file__).parents[1]
# What is small here shortens the run before, whose cold start is cached.
WORDS = ("model=micro", "algorithm=gspo", "updates=8", "experiment_name=traced", "minibatch_prompts=1")
WORDS += ("evaluation.prompts=8", "evaluation.pass_k=0", "cold_start.check_every=1", "cold_start.check_prompts=4")
WORDS += ("cold_start.accuracy_low=0", "cold_start.accuracy_high=1")


def entry(words: Sequence[str]) -> dict[str, set[int]]:
    """Run ``steadymoe run`` until its ``Trainer`` exists; return the executed lines of function bodies by file."""
    lines: dict[str, set[int]] = defaultdict(set)
    ours: dict[CodeType, str | None] = {}

    def file_of(code: CodeType) -> str | None:
        if code not in ours:
            path = Path(code.co_filename)
            inside = path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in ("bench", "models", "algorithms")
            ours[code] = str(path.relative_to(ROOT)) if inside and code.co_name != "<module>" else None
        return ours[code]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if (file := file_of(frame.f_code)) is None:
            return None
        if event == "line":
            lines[file].add(frame.f_lineno)
        return trace

    made = trainer.Trainer.__init__

    def stop(*_: Any, **__: Any) -> None:
        sys.settrace(None)
        raise KeyboardInterrupt  # a run takes every other error for its own

    trainer.Trainer.__init__ = stop  # type: ignore[method-assign]
    sys.settrace(trace)
    try:
        command.main(list(words))
    finally:
        sys.settrace(None)
        trainer.Trainer.__init__ = made  # type: ignore[method-assign]
    return lines


if __name__ == "__main__":
    results = f"results_dir={sys.argv[1] if sys.argv[1:] else 'results'}"
    command.main([*WORDS, results, "seed=0"])  # the cold start
    found = entry([*WORDS, results, "seed=0", "optimizer.learning_rate=1e-3"])
    for file, numbers in sorted(found.items(), key=lambda each: -len(each[1])):
        print(f"{len(numbers):5} {file}")
    print(f"{len(found)} files, {sum(map(len, found.values()))} lines")

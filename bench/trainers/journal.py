"""The record of a run while another trainer makes it: whole steps, evaluations, and how the run ended."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.measurement import token_metrics
from steadymoe.bench.runs import record
from steadymoe.bench.runs.record import Record
from steadymoe.bench.statistics.collapse import Rule, detect
from steadymoe.bench.support import blame
from steadymoe.bench.trainers.run_folder import ForeignRun
from steadymoe.bench.training.columns_of_step import Measured, Row, StepRows


class ForeignStep(StepRows):
    """The rows of one step, from measurements that another trainer's processes have pooled."""

    def add_sampled(self, row: Mapping[str, Any], scores_PG: Tensor, shown: Measured) -> None:
        """Numbers of the rollout, the scores of its groups, and its measurements."""
        self._of_step |= token_metrics.of_rewards(scores_PG) | token_metrics.to_floats(shown.overall) | dict(row)
        self._add(0, shown)


class Journal:
    """Writes the folder of a run; one process of the trainer has it, and the others have none."""

    def __init__(self, run: ForeignRun) -> None:
        self._run = run
        self._record = Record(run.folder, run.facts())
        self._steps = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the folder while the trainer trains, and write how the training ended."""
        with self._record:
            try:
                yield
            except Exception as error:
                self._record.update(status="failed", error=blame.failure(error))
                raise
            except BaseException:
                self._record.update(status="interrupted")
                raise

    def begin(self, after: int, steps: int, **facts: Any) -> None:
        """Start with the step that follows ``after``, 0 for a new run, on the way to ``steps``.

        ``facts`` are added to ``run.json``. Raises ConfigError if the folder does not hold the steps up to ``after``.
        """
        if after and not self._record.holds(after):
            raise ConfigError(f"the trainer goes on after step {after}, whose rows are not in {self._record.folder}")
        self._record.run |= facts
        self._record.run["config"] |= {"steps": steps}
        self._steps = steps
        self._record.begin(after or None)

    def step(self, rows: dict[str, list[Row]], **facts: Any) -> None:
        """Add a whole step, or evaluations before the first."""
        self._record.append(rows)
        shown = {name: row.get(name) for row in rows.get("steps", ()) for name in ("reward", "expert_change_rate")}
        step = {"step": rows["steps"][0]["step"], "steps": self._steps} if "steps" in rows else {}
        self._record.update(progress=step | shown, **facts)

    def end(self, is_whole: bool) -> None:
        """Close the run: finished, collapsed or diverged, or interrupted if it is not ``is_whole``."""
        if not is_whole:
            self._record.update(status="interrupted")
            return
        steps = record.read_table(self._record.folder, "steps")
        collapse = detect(steps, Rule(), self._run.updates_per_rollout)
        diverged = None if collapse is None else {"reason": collapse.reason, "step": collapse.step, "update": None}
        tokens = int(steps["tokens_sampled"].sum())
        self._record.end(diverged, tokens=tokens)


def evaluations(step: int, prompts: Sequence[Any], scores: Sequence[float]) -> list[Row]:
    """Rows of held-out prompts; of a conversation the last message counts as the prompt."""
    texts = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in prompts]
    return [{"step": step, "prompt": text, "score": score} for text, score in zip(texts, scores, strict=True)]

"""Turn what TRL's trainer measures into the rows of a run folder, when its updates, steps and evaluations end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from steadymoe.bench.support.clock import Clock
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training import token_metrics
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.probes import UpdateProbe
from steadymoe.bench.training.step_rows import Measured, Row, StepRows
from steadymoe.integrations.trl import moments
from steadymoe.integrations.trl.moments import Moments
from steadymoe.integrations.trl.run_folder import LiveRecord
from steadymoe.models import build

UPDATE_SECONDS, PROBE_SECONDS, LEARNING_RATE = names("update_seconds", "probe_seconds", "learning_rate")
LOSS, GRAD_NORM, SCORE = names("loss", "grad_norm", "score")


class Steps(TrainerCallback):
    """Collect the rows of each step. Every process has the pooled rows; the main process has a ``record``.

    ``updates`` is the number of optimizer steps on one rollout. ``log`` maps "train" to the metrics that TRL logs, to
    which all columns of updates are added as ``steadymoe/<column>``. ``aux_loss`` is the coefficient of the routers'
    auxiliary loss.
    """

    def __init__(self, core: PreTrainedModel, updates: int, log: dict[str, Any], aux_loss: float) -> None:
        self._core, self._updates, self._log, self._aux_loss = core, updates, log, aux_loss
        self.record: LiveRecord | None = None
        self.update: list[Moments] = []
        """The micro-batches of the current update, of this process."""
        self.before_update: dict[str, float] = {}
        """Gradient norm and learning rate of the current update."""
        self.probe: UpdateProbe | None = None
        """Some responses of this process in the current rollout; the main process records only its own."""
        self._rows = StepRows(0)
        self._seconds: dict[str, float] = {}
        self._tokens_fed = self._missing = 0
        self._evaluations: list[Row] = []
        self._started = 0.0

    def begin(self, updates_done: int, rollout: Moments, scores_PG: Tensor, seconds: Mapping[str, float]) -> None:
        """Begin a step after its rollout was sampled and the old policy computed, in ``seconds`` per stage."""
        tokens, responses = int(rollout["tokens"]), int(rollout["responses"])
        self._tokens_fed = int(rollout["fed"])
        self._missing += int(rollout.get("missing", 0))
        # These stages are part of TRL's update, and the probe is not: ``on_step_end``.
        self._seconds = {**seconds, UPDATE_SECONDS: -sum(seconds.values()), PROBE_SECONDS: 0.0}
        self._rows = StepRows(updates_done // self._updates + 1)
        self._rows.add_rollout(scores_PG, scores_PG, responses, tokens, tokens, moments.rollout_columns(rollout))

    def add_evaluations(self, updates_done: int, prompts: Sequence[Any], scores: Sequence[float]) -> None:
        """Add the scores of held-out prompts of all processes; the last message of a conversation counts as prompt."""
        step = -(-updates_done // self._updates)
        texts = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in prompts]
        pairs = zip(texts, scores, strict=True)
        self._evaluations += [{"step": step, "prompt": text, SCORE: score} for text, score in pairs]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        after, rest = divmod(state.global_step, self._updates)
        if rest:
            raise UserError(
                f"the checkpoint was written after update {state.global_step}, in the middle of a rollout's "
                f"{self._updates} updates; set save_steps to a multiple of {self._updates}"
            )
        if self.record is not None:
            sizes = build.size(self._core)
            self.record.start(after, state.max_steps // self._updates, router_aux_loss=self._aux_loss, **sizes)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        measured = moments.update_columns(gathered(self.update))
        self.update.clear()
        if self.probe is not None:
            clock = Clock(args.device)
            with clock(PROBE_SECONDS):
                measured |= Measured(*self.probe.after_update(self._core), {})
            self._seconds[PROBE_SECONDS] += clock.seconds[PROBE_SECONDS]
            self._started += clock.seconds[PROBE_SECONDS]
        norm = self.before_update[GRAD_NORM]
        for name, value in (token_metrics.to_floats(measured.overall) | {GRAD_NORM: norm}).items():
            self._log["train"][f"steadymoe/{name}"].append(value)
        measured |= Measured({GRAD_NORM: measured.overall[LOSS].new_tensor(norm)}, {}, {})
        self._rows.add_update(self.before_update[LEARNING_RATE], measured)
        self._seconds[UPDATE_SECONDS] += time.perf_counter() - self._started
        if self._rows.updates == self._updates and not control.should_evaluate:
            self._write()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rows, self._evaluations = self._evaluations, []
        if state.global_step:
            self._rows.add_evaluations(rows)
        elif self.record is not None:
            self.record.add_step({"evaluations": rows})
        if self._rows.updates == self._updates:
            self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.record is not None:
            self.record.close(is_whole=state.global_step >= state.max_steps)

    def _write(self) -> None:
        """Write the step, which is whole."""
        if self.record is not None:
            rows = self._rows.tables(self._seconds, self._tokens_fed)
            self.record.add_step(rows, sampler_logprobs_missing=self._missing)
        self._rows = StepRows(0)


def gathered(parts: Sequence[Moments]) -> Moments:
    """Pool the moments of the parts of all processes, on the CPU; every process gets them."""
    own = {name: value.cpu() for name, value in moments.pooled(parts).items()}
    return moments.pooled(gather_object([own]))

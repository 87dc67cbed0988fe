"""What gradient updates do: how many experts they change, and what the ratios look like that the loss sees.

Shapes: B sequences of a rollout, M of one mini-batch, T response positions, L layers, F positions fed, K experts a
token, N response tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadymoe.algorithms import Batch, PolicyLoss
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.gspo import GSPO
from steadymoe.algorithms.parts import joined
from steadymoe.bench.calibration.engines import groups
from steadymoe.bench.calibration.readings import Reading, Sums
from steadymoe.bench.measurement import routing_drift, token_metrics
from steadymoe.bench.statistics.estimates import POSITIVE, mean_over_seeds
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.probes import attribution
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer

# Routes are compared with the old policy's after so many updates on a rollout, as far as there are so many.
AFTER = (1, 2, 4, 8, 16)
# The routes of so many prompts are watched from update to update.
_WATCHED = 32
# The bands of two papers: 2507.18071, section 5.1, gives both.
BANDS: dict[str, PolicyLoss] = {
    "GRPO": GRPO(clip_low=0.2, clip_high=0.27),
    "GSPO": GSPO(clip_low=3e-4, clip_high=4e-4),
}


@dataclass
class Updates:
    """The measurements of several rollouts of one trainer, one after another as in a run."""

    trainer: Trainer
    changes: Sums = field(default_factory=Sums)
    shares: Sums = field(default_factory=Sums)
    """The second moments of log-ratios: pinned over free, by mini-batch."""
    ratios: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """(key, case) → a number for each mini-batch, as its update sees it."""

    def rollout(
        self, step: int, rollout: Rollout, old: OldPolicy, advantages_BT: Tensor, say: Callable[[str], None]
    ) -> None:
        """All updates on one rollout. Raises FloatingPointError at an update that is not finite."""
        learner, minibatches = self.trainer.learner, self.trainer.minibatches(step)
        free_BT = self._free_logprobs(rollout, old, minibatches)
        watched = groups(rollout, self.trainer.config.rollout.responses)[:_WATCHED]
        parts = learner.forwards.split(torch.cat(watched))
        first_LBFK = last_LBFK = self._routes(rollout, parts)
        for update, minibatch in enumerate(minibatches, start=1):
            self._see(rollout, old, advantages_BT, minibatch)
            if update > 1:
                self._attribute((step, update), rollout, old, free_BT, minibatch)
            if not learner.update(rollout, old, advantages_BT, minibatch, first=update == 1).is_finite:
                raise FloatingPointError(f"update {update} of rollout {step} has no finite gradient")
            now_LBFK = self._routes(rollout, parts)
            self._compare(step, rollout, watched, last_LBFK, now_LBFK, "per update")
            if update in AFTER:
                after = f"after {update} update{'s' if update > 1 else ''}"
                self._compare(step, rollout, watched, first_LBFK, now_LBFK, after)
            last_LBFK = now_LBFK
        # The last weights are seen by no mini-batch to come: the first one shows what they have done.
        self._attribute((step, len(minibatches) + 1), rollout, old, free_BT, minibatches[0])
        say(f"rollout {step}: {len(minibatches)} updates")

    def readings(self) -> list[Reading]:
        """All readings of the rollouts so far."""
        moved = self.changes.readings("routes after updates", "prompts", {})
        section = "ratios that the loss sees"
        pinned = self.shares.estimate("routing_share", bounds=POSITIVE)
        share = type(pinned)(1 - pinned.mean, 1 - pinned.high, 1 - pinned.low, pinned.n)
        found = [Reading(section, "routing_share", share, "mini-batches")]
        for (key, of), values in self.ratios.items():
            bounds = POSITIVE if key.endswith("variance") else (0.0, 1.0)
            found.append(Reading(section, key, mean_over_seeds(values, bounds=bounds), "mini-batches", of))
        order = [each for name in ("per update", "after") for each in moved if each.of.startswith(name)]
        return [*order, *found]

    def _free_logprobs(self, rollout: Rollout, old: OldPolicy, minibatches: Sequence[list[MicroBatch]]) -> Tensor:
        """Log-probabilities before the updates with free routers, (B, T); under r3 and pr2 not the old policy's."""
        if self.trainer.config.routing.replay in ("none", "r2"):
            return old.logprobs_BT
        logprobs_BT = torch.zeros_like(old.logprobs_BT)
        with torch.no_grad():
            for part in (part for minibatch in minibatches for part in minibatch):
                found = self.trainer.learner.forwards(self.trainer.model, rollout, part)
                logprobs_BT[part.rows_M] = found.logprobs_BT
        return logprobs_BT

    @torch.no_grad()
    def _routes(self, rollout: Rollout, parts: Sequence[MicroBatch]) -> Tensor:
        """The routers' own choice on the watched rows."""
        found = joined([self.trainer.learner.forwards(self.trainer.model, rollout, part) for part in parts])
        assert found.routes_LBFK is not None  # of a model with routers
        routes_LBFK: Tensor = found.routes_LBFK
        return routes_LBFK

    def _compare(
        self, step: int, rollout: Rollout, watched: Sequence[Tensor], old_LBFK: Tensor, new_LBFK: Tensor, of: str
    ) -> None:
        """Add how far routes moved, prompt by prompt. The watched rows are the first ones of the rollout."""
        for prompt, rows_M in enumerate(watched):
            mask_MT = rollout.sequences.response_mask_BT[rows_M]
            moved = routing_drift.change(old_LBFK[:, rows_M], new_LBFK[:, rows_M], mask_MT)
            means = {"expert_change": moved.expert, "set_change": moved.set, "token_change": moved.any_layer}
            self.changes.add_all(token_metrics.to_floats(means), (step, prompt), int(mask_MT.sum()), of)

    @torch.no_grad()
    def _see(self, rollout: Rollout, old: OldPolicy, advantages_BT: Tensor, minibatch: Sequence[MicroBatch]) -> None:
        """Add the ratios of a mini-batch as the loss is about to see them, and what the papers' bands would clip."""
        learner = self.trainer.learner
        batches: list[Batch] = []
        for part in minibatch:
            now = learner.forwards(learner.model, rollout, part, learner.replayed(rollout, old))
            batches.append(learner.batch(rollout, old, advantages_BT, part.rows_M, now, (1, 1)))
        batch = joined(batches)
        for name, band in BANDS.items():
            numbers = token_metrics.to_floats(token_metrics.of_update(batch, band(batch))[0])
            self.ratios.setdefault(("clip_share", name), []).append(numbers["clip_fraction"])
        for key in ("token_ratio_variance", "sequence_ratio_variance", "ess"):
            self.ratios.setdefault((key, ""), []).append(numbers[key])

    @torch.no_grad()
    def _attribute(
        self,
        cluster: tuple[int, int],
        rollout: Rollout,
        old: OldPolicy,
        free_BT: Tensor,
        minibatch: Sequence[MicroBatch],
    ) -> None:
        """Add the second moments of a mini-batch's log-ratios, routers free and pinned to the old routes."""
        assert old.routes_LBFK is not None  # of a model with routers
        forwards, model = self.trainer.learner.forwards, self.trainer.model
        free = joined([forwards(model, rollout, part) for part in minibatch])
        pinned = joined([forwards(model, rollout, part, old.routes_LBFK) for part in minibatch])
        assert free.routes_LBFK is not None
        rows_M = torch.cat([part.rows_M for part in minibatch])
        mask_MT = rollout.sequences.response_mask_BT[rows_M]
        before_N = free_BT[rows_M][mask_MT.bool()]
        free_N, pinned_N = (each.logprobs_BT[mask_MT.bool()] - before_N for each in (free, pinned))
        changed_N = routing_drift.any_layer(old.routes_LBFK[:, rows_M], free.routes_LBFK, mask_MT)
        moments = token_metrics.to_floats(attribution(free_N, pinned_N, changed_N))
        whole = moments["log_ratio_moment_free"] * len(free_N)
        if whole > 0:
            pinned_part = moments["log_ratio_moment_pinned"] / moments["log_ratio_moment_free"]
            self.shares.add("routing_share", cluster, pinned_part, whole)

"""The losses of an audit, from ``audit.algorithms`` and ``audit.arms`` to trainers on one model; their reference."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from steadymoe.algorithms import PolicyLoss, build
from steadymoe.algorithms.advantages import LeaveOneOut
from steadymoe.algorithms.objective import KL
from steadymoe.algorithms.reinforce import Reinforce
from steadymoe.bench.check import batches
from steadymoe.bench.check.derivatives import gradient
from steadymoe.bench.runs import compose
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.identity import is_name
from steadymoe.bench.schema import AuditConfig, RunConfig
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.engine import Exact

# The config groups that ``audit.arms`` may override.
_GROUPS = ("algorithm", "advantage", "correction")
# The label of the reference: the policy gradient of fresh samples. No algorithm has a space in its name.
TRUTH = "policy gradient"


@dataclass(frozen=True)
class Loss:
    """One loss of an audit with its correction, advantage and initial state, on the model of all losses."""

    label: str
    trainer: Trainer

    @property
    def learner(self) -> Learner:
        """The learner that makes batch and objective of this loss."""
        return self.trainer.learner


def overrides(audit: AuditConfig) -> dict[str, list[str]]:
    """Return the overrides of each loss by its label. Raises ConfigError for a label or an override."""
    given = {name: [f"algorithm={name}"] for name in audit.algorithms}
    for label, text in audit.arms.items():
        words = shlex.split(text) if isinstance(text, str) else []
        wrong = [word for word in words if word.partition("=")[0].lstrip("+~").partition(".")[0] not in _GROUPS]
        if not any(word.startswith("algorithm=") for word in words) or wrong:
            raise ConfigError(
                f"audit.arms.{label} must be overrides of {', '.join(_GROUPS)} with an algorithm, as "
                f"'algorithm=grpo algorithm.loss.clip_low=0.1'; got {text!r}"
            )
        if not is_name(label) or label in given:
            raise ConfigError(f"audit.arms: {label!r} must be a new name of letters, digits, '.', '_', '-', '@'")
        given[label] = words
    return given


def plan(run: Run) -> dict[str, Run]:
    """Compose the losses of an audit, each as a run of its own. Raises ConfigError for one that cannot be audited."""
    runs, top_k = compose.variants(run, overrides(run.config.audit)), {}
    for label, each in runs.items():
        loss: PolicyLoss = build(each.config.algorithm.loss)
        top_k[label] = loss.traits.top_k
        on_policy_BT, _ = gradient(loss, batches.ragged(scale=0.0, top_k=top_k[label] or 1))
        if not (on_policy_BT.any() or each.config.algorithm.entropy_bonus):
            raise ConfigError(f"{label} has no gradient: its loss does not depend on the policy's log-probabilities")
    if len(set(top_k.values()) - {0}) > 1:
        raise ConfigError(f"losses of one audit must read the same number of most likely tokens; got {top_k}")
    return runs


def on_model(model: PreTrainedModel, task: Task, configs: Mapping[str, RunConfig]) -> list[Loss]:
    """Build the losses on one model, at their initial states; a KL term compares with the present weights."""
    return [Loss(label, Trainer(model, task, _without_samples(config))) for label, config in configs.items()]


def truth(model: PreTrainedModel, task: Task, config: RunConfig) -> Loss:
    """Build the reference: REINFORCE, summed over tokens, with a leave-one-out baseline, no standard deviation."""
    loss = {"_target_": f"{Reinforce.__module__}.{Reinforce.__name__}", "aggregation": "seq-mean-token-sum"}
    advantage = {"_target_": f"{LeaveOneOut.__module__}.{LeaveOneOut.__name__}"}
    overlong = replace(config.algorithm.overlong, penalty=0.0)
    algorithm = replace(
        config.algorithm,
        loss=loss,
        advantage=advantage,
        kl=KL(),  # type: ignore[arg-type]
        entropy_bonus=0.0,
        overlong=overlong,
    )
    (reference,) = on_model(model, task, {TRUTH: replace(config, algorithm=algorithm, advantage=None)})
    return reference


def _without_samples(config: RunConfig) -> RunConfig:
    """Return ``config`` for a trainer that samples nothing itself: as few samples of its own as possible."""
    return replace(
        config,
        engine={"_target_": f"{Exact.__module__}.{Exact.__name__}"},
        evaluation=replace(config.evaluation, prompts=1),
        probe=replace(config.probe, responses=1),
    )

"""The algorithms of an audit, from the words of its config to losses on one model; and the reference of them all."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from steadymoe.algorithms import Batch, build
from steadymoe.algorithms.advantages import LeaveOneOut
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.algorithms.reinforce import Reinforce
from steadymoe.bench.audit.gradients import Arm
from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import ConfigError, Run
from steadymoe.bench.config.identity import is_name
from steadymoe.bench.config.schema import Audit, RunConfig
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.engine import Exact

# The words that an arm may consist of.
_OF_ARMS = ("algorithm", "advantage", "correction")
# The label of the reference: the policy gradient of fresh samples. No algorithm has a space in its name.
TRUTH = "policy gradient"


def words_of(audit: Audit) -> dict[str, list[str]]:
    """Label → the words of ``steadymoe run`` that the arm stands for. Raises ConfigError for a label or a word."""
    found = {name: [f"algorithm={name}"] for name in audit.algorithms}
    for label, text in audit.arms.items():
        words = shlex.split(text) if isinstance(text, str) else []
        wrong = [word for word in words if word.partition("=")[0].lstrip("+~").partition(".")[0] not in _OF_ARMS]
        if not any(word.startswith("algorithm=") for word in words) or wrong:
            raise ConfigError(
                f"audit.arms.{label} must be words with an algorithm, as 'algorithm=grpo algorithm.loss.clip_low=0.1', "
                f"of {', '.join(_OF_ARMS)} alone; got {text!r}"
            )
        if not is_name(label) or label in found:
            raise ConfigError(f"audit.arms: {label!r} is no name of its own; use letters, digits, '.', '_', '-', '@'")
        found[label] = words
    return found


def of(run: Run) -> dict[str, Run]:
    """The arms of an audit, each as a run of its own. Raises ConfigError for one that cannot be audited."""
    found = compose.variants(run, words_of(run.config.audit))
    for label, arm in found.items():
        if not _has_gradient(_objective(arm.config)):
            raise ConfigError(f"{label} has no gradient: its loss does not depend on the policy's log-probabilities")
    top_k = {label: _objective(arm.config).traits.top_k for label, arm in found.items()}
    if len(set(top_k.values()) - {0}) > 1:
        raise ConfigError(f"an audit keeps one number of most likely tokens, and these losses want several: {top_k}")
    return found


def on(model: PreTrainedModel, task: Task, configs: Mapping[str, RunConfig]) -> list[Arm]:
    """The arms on one model, at their initial states; a KL term compares with the present weights."""
    return [Arm(label, Trainer(model, task, _alone(config))) for label, config in configs.items()]


def truth(model: PreTrainedModel, task: Task, config: RunConfig) -> Arm:
    """The reference: REINFORCE with a leave-one-out baseline, summed over tokens, without a standard deviation."""
    loss = {"_target_": f"{Reinforce.__module__}.{Reinforce.__name__}", "aggregation": "seq-mean-token-sum"}
    advantage = {"_target_": f"{LeaveOneOut.__module__}.{LeaveOneOut.__name__}"}
    overlong = replace(config.algorithm.overlong, penalty=0.0)
    algorithm = replace(config.algorithm, loss=loss, advantage=advantage, kl=KL(), entropy_bonus=0.0, overlong=overlong)
    plain = replace(config, algorithm=algorithm, advantage=None)
    return Arm(TRUTH, Trainer(model, task, _alone(plain)))


def top_k(arms: Sequence[Arm]) -> int:
    """How many most likely tokens the losses read."""
    return max((arm.learner.objective.traits.top_k for arm in arms), default=0)


def _alone(config: RunConfig) -> RunConfig:
    """``config`` of an arm that samples nothing itself: as few samples of its own as a trainer makes."""
    engine = {"_target_": f"{Exact.__module__}.{Exact.__name__}"}
    return replace(
        config,
        engine=engine,
        evaluation=replace(config.evaluation, prompts=1),
        probe=replace(config.probe, responses=1),
    )


def _objective(config: RunConfig) -> Objective:
    algorithm = config.algorithm
    return Objective(
        loss=build(algorithm.loss),
        correction=build(config.correction),
        kl=algorithm.kl,
        entropy_bonus=algorithm.entropy_bonus,
    )


def _has_gradient(objective: Objective) -> bool:
    """Whether a loss has a gradient on policy, on four responses with advantages of either sign."""
    generator = torch.Generator().manual_seed(0)
    old_BT = -0.1 - torch.rand(4, 5, generator=generator)
    now_BT, entropy_BT = old_BT.clone().requires_grad_(), torch.ones(4, 5).requires_grad_()
    top_BTK = torch.full((4, 5, objective.traits.top_k + 1), -1.0)
    top_BTK[..., -1] = old_BT
    batch = Batch(
        logprobs_BT=now_BT,
        mask_BT=torch.ones(4, 5, dtype=torch.long),
        advantages_BT=torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(4, 5),
        old_logprobs_BT=old_BT,
        rollout_logprobs_BT=old_BT,
        groups_B=torch.tensor([0, 0, 1, 1]),
        reference_logprobs_BT=old_BT - 0.1,
        entropy_BT=entropy_BT,
        router_log_ratio_LBTK=torch.zeros(1, 4, 5, 1),
        top_logprobs_BTK=top_BTK,
        old_top_logprobs_BTK=top_BTK,
        rollout_top_logprobs_BTK=top_BTK,
        state=objective.loss.initial_state(),
    )
    loss = objective(batch).loss
    if not loss.requires_grad:
        return False
    found = torch.autograd.grad(loss, (now_BT, entropy_BT), allow_unused=True)
    return any(each is not None and bool(each.any()) for each in found)

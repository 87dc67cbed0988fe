"""The config of a run as types: a frozen dataclass for each group, with the meaning, unit and bounds of every field.

The numbers themselves, and where each comes from, stand in ``conf/`` and nowhere else; ``validate.read`` makes a
``RunConfig`` of them. The docstring of a group says what the group means.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steadymoe.algorithms.objective import KL
from steadymoe.models import build

# A whole number above is none for torch or for a table's column.
_LARGEST = 2**63 - 1
# A run of more steps would not see its end: the recorded runs have at most a few hundred.
_MOST_STEPS = 1_000_000
# OpenMP crashes the process where it cannot make as many threads as it is asked for.
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Bounds:
    """What a field may hold, besides its type. A number is always finite."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    may_be_empty: bool = False

    def broken_by(self, value: Any) -> str | None:
        """What ``value`` must be and is not, in words; None if it is within the bounds."""
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        if isinstance(value, float) and not math.isfinite(value):
            return "finite"
        is_within = (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )
        if is_within and isinstance(value, int) and value > _LARGEST:
            return f"at most {_LARGEST}"
        return None if is_within else self._in_words()

    def _in_words(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least} and {self.at_most}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)


def setting(meaning: str, **bounds: Any) -> Any:
    """A field of a group: what it means, with its unit, and its ``Bounds``."""
    return field(metadata={"meaning": meaning, "bounds": Bounds(**bounds)})


def may_be_left_out(meaning: str, **bounds: Any) -> Any:
    """A field that is None where the YAML of its group leaves it out."""
    return field(default=None, metadata={"meaning": meaning, "bounds": Bounds(**bounds)})


def count(meaning: str, at_least: int = 1, at_most: int | None = None) -> Any:
    """A whole number from ``at_least`` up."""
    return setting(meaning, at_least=at_least, at_most=at_most)


def share(meaning: str) -> Any:
    """A number from 0 to 1."""
    return setting(meaning, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How much is sampled in a step."""

    prompts: int = count("prompts of a rollout")
    minibatch_prompts: int | None = count("prompts of a mini-batch; a number here decides prompts")
    responses: int = count("responses to each prompt; an advantage compares them", at_least=2)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """DAPO's dynamic sampling: groups of equal scores are replaced from further rollouts."""

    max_rollouts: int = count("rollouts that are sampled for one step at most; 1 replaces no group")


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft punishment of long responses."""

    penalty: float = setting("reward taken from a response that uses its whole budget of tokens", at_least=0)
    buffer: float = setting("share of a response's tokens over which the penalty rises", above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A loss, its advantage, and what can be added to any loss."""

    loss: Mapping[str, Any] = setting("the loss's class and its fields")
    advantage: Mapping[str, Any] | None = may_be_left_out("the class and fields of the loss's own advantage")
    kl: KL
    entropy_bonus: float = setting("coefficient of the entropy, in nats, in what is maximised", at_least=0)
    correction: str | None = setting("the correction that a preset is only true with")
    updates_per_rollout: int | None = count("the updates_per_rollout that a preset is only true with")
    sampling: Sampling
    overlong: Overlong


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Work that need not be done."""

    share_prompts: bool = setting("whether the prompt of a group is computed once")
    sampler_as_old: int | None = count(
        "every how many steps the sampler is checked, where it serves as the old policy; null for a forward of its own"
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW."""

    learning_rate: float = setting("step size; 0 is the frozen control", at_least=0)
    beta1: float = setting("decay of the gradient's running mean", at_least=0, below=1)
    beta2: float = setting("decay of the squared gradient's running mean", at_least=0, below=1)
    epsilon: float = setting("added to the root of the squared gradient's running mean", above=0)
    weight_decay: float = setting("share of a weight that is taken away in an update, per learning rate", at_least=0)
    max_grad_norm: float = setting("the norm to which a longer gradient is scaled down", above=0)
    router_factor: float = setting("the learning rate of routers, as a multiple of learning_rate", above=0)


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Supervised training before reinforcement."""

    path: str | None = setting("a model.safetensors to start from instead")
    noise: float = setting("probability that a demonstrated step is wrong", at_least=0, below=1)
    accuracy_low: float = share("training stops at the first check with this accuracy or a higher one")
    accuracy_high: float = share("training fails at a check with a higher accuracy")
    learning_rate: float = setting("step size of AdamW", above=0)
    batch_size: int = count("demonstrations of an update")
    check_every: int = count("updates between two checks")
    check_prompts: int = count("held-out prompts of a check, one response each")
    max_updates: int = count("updates after which training fails")
    router_factor: float = setting("the learning rate of routers, as a multiple of learning_rate", above=0)
    aux_loss: float = setting("coefficient of the load-balancing loss", at_least=0)
    z_loss: float = setting("coefficient of the router z-loss", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Sampled accuracy on held-out prompts."""

    every: int = count("steps between two evaluations")
    every_updates: int | None = count("gradient updates between two evaluations; a number here decides every")
    prompts: int = count("held-out prompts, one response each")
    permuted_routes: bool = setting("whether accuracy is also measured with routes permuted among tokens")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Forwards that only measure."""

    every: int = count("steps between two probes")
    every_updates: int | None = count("gradient updates between two probes; a number here decides every")
    responses: int = count("responses of the cold start that are kept to measure drift")
    fraction: float = share("share of a rollout on which each update is measured, at least 4 responses")
    largest: int = count("tokens with the largest ratios that are kept after a probed step", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """When a run counts as collapsed: ``statistics.collapse.Rule``."""

    window_updates: int = count("gradient updates over which reward is averaged")
    reward_fraction: float = share("share of the highest average reward below which reward has fallen")
    patience_updates: int = count("gradient updates that a fall must last")
    least_reward: float = share("average reward that a run must have had before reward can fall")
    entropy_fraction: float = share("share of the first step's entropy below which entropy has fallen")
    grad_norm_factor: float = setting("times the median of all earlier gradient norms that is too much", above=0)
    solved_reward: float = share("average reward below which entropy and gradient norm can make a collapse")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Whose experts run in the training forward, and what else is done to routers."""

    replay: str = setting("whose experts run", choices=("none", "r2", "r3", "pr2"))
    freeze: bool = setting("whether the routers' weights stay at the cold start")
    aux_loss: float = setting("coefficient of the load-balancing loss", at_least=0)
    z_loss: float = setting("coefficient of the router z-loss", at_least=0)
    predictor_learning_rate: float | None = may_be_left_out("step size of the heads of routing=pr2", above=0)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What ``steadymoe audit`` measures beside the model, the task and the optimizer of a run. No run reads it."""

    algorithms: tuple[str, ...] = setting(
        "names of algorithms and presets, each at the numbers of its YAML", may_be_empty=True
    )
    arms: Mapping[str, Any] = setting("further algorithms: a label, and the words of steadymoe run that it stands for")
    drift: tuple[int, ...] = count(
        "numbers of neutral updates between the rollout and the gradient", at_least=0, at_most=_MOST_STEPS
    )
    routing: tuple[str, ...] = setting("whose experts run in the gradient's forward", choices=("free", "r2", "r3"))
    router_scale: tuple[float, ...] = setting("factors on the routers' weights after the drift", above=0)
    clips: bool = setting("whether clip shares over the width of a band are measured too")
    minibatches: int = count("mini-batches of the audited rollout, and of the fresh one beside it", at_least=6)
    groups: int = count("groups of mini-batches that the jackknife leaves out", at_least=3)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run reads.

    ``advantage``, ``correction``, ``engine``, ``model`` and ``task`` stay mappings, as ``algorithm.loss`` does: the
    class that their ``_target_`` names says what is in them.
    """

    experiment_name: str = setting("the folder below results/runs")
    results_dir: str = setting("the folder below which everything is written")
    seed: int = count("seed of every generator of the run", at_least=0)
    device: str = setting("where the model lies", choices=("cpu", "cuda"))
    precision: str = setting("precision of forwards; weights are fp32", choices=("fp32", "bf16"))
    experts: str = setting("how experts are computed", choices=build.EXPERTS)
    compile: bool = setting("whether decoder layers are compiled")
    threads: int = count("threads of one run", at_most=_MOST_THREADS)
    steps: int = count("rollouts of the run", at_most=_MOST_STEPS)
    total_updates: int | None = count("gradient updates of the run; a number here decides steps", at_most=_MOST_STEPS)
    updates_per_rollout: int = count("gradient updates on one rollout, each on a mini-batch of whole groups")
    rollout: Rollout
    advantage: Mapping[str, Any] | None = setting("an advantage in place of the algorithm's own")
    algorithm: Algorithm
    savings: Savings
    microbatch: int | None = count("number of responses of one forward and backward; null for a whole mini-batch")
    optimizer: Optimizer
    cold_start: ColdStart
    evaluation: Evaluation
    measure: str = setting("what is recorded", choices=("all", "little"))
    probe: Probe
    collapse: Collapse
    checkpoint_every: int = count("steps between two checkpoints")
    checkpoint_keep: int | None = count("the step whose checkpoint is kept for branches")
    start_from: str | None = setting("the run and the step, <folder>@<step>, where a branch begins")
    weight_noise: float = setting("standard deviation of the noise on every weight at the start", at_least=0)
    log: str | None = setting("a logger beside the record")
    retry: str = setting("which of the runs that have not ended are run", choices=("all", "failed"))
    audit: Audit
    correction: Mapping[str, Any] = setting("correction of the mismatch between sampler and trainer")
    routing: Routing
    engine: Mapping[str, Any] = setting("what samples")
    model: Mapping[str, Any] = setting("what is trained")
    task: Mapping[str, Any] = setting("what it is trained on")

    @property
    def used_advantage(self) -> Mapping[str, Any]:
        """The advantage that is chosen, or else the algorithm's own; a config without either is refused."""
        return self.advantage or self.algorithm.advantage or {}

"""The config of a run as types: a frozen dataclass for each group, with the bounds of every field next to it.

Here is every default, with its source if there is one; a YAML of ``conf`` holds what a paper or a setting fixes.
``read`` makes a ``RunConfig`` of a composed config. Override any field: ``steadymoe run key=value …``.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    TypeAdapter,
    ValidationError,
)

from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.support.text import nearest

if TYPE_CHECKING:
    from steadymoe.algorithms.objective import Objective

# Implementations of experts, by their names in transformers' registry; the default first.
Experts = Literal["grouped_mm", "eager", "megablocks"]
EXPERTS: tuple[str, ...] = get_args(Experts)
# A larger whole number does not fit torch or a table's column.
_LARGEST = 2**63 - 1
# A run of more updates would not see its end: the recorded runs have at most a few hundred.
_MAX_UPDATES = 1_000_000
# OpenMP crashes the process where it cannot create this many threads.
_MAX_THREADS = 1024
_MAX_PASS_K = 1024  # of each prompt: more would hold a rollout of its own
# One command asks for the versions of a thousand runs.
version = functools.cache(metadata.version)
# Raised when training/cold_start.py makes another cold start of the same config.
_COLD_START_VERSION = 1


def _with_vectors(weights: tuple[str, ...]) -> tuple[str, ...]:
    if "vectors" not in weights:
        raise ValueError("must include vectors (norms, biases), because Muon updates matrices only")
    if len(set(weights)) < len(weights):
        raise ValueError("must not repeat a value")
    return weights


Count = Annotated[StrictInt, Field(ge=1, le=_LARGEST)]
# −0.0 + 0.0 is 0.0: all spellings of a number are one run.
Number = Annotated[StrictFloat, AfterValidator(lambda value: value + 0.0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Momentum = Annotated[Number, Field(ge=0, lt=1)]
_VECTORS = AfterValidator(_with_vectors)


class _Group:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(_Group):
    """How a rollout is sampled."""

    responses: Annotated[StrictInt, Field(ge=2, le=_LARGEST)] = 8  # G, to each prompt
    temperature: Annotated[Number, Field(ge=0.01, le=100)] = 1.0
    """Divides the logits of sampler and trainer alike; evaluation stays at 1. Beyond these bounds fp32 has no useful
    probabilities."""
    shuffle_rewards: StrictBool = False
    """A control: permutes rewards over the whole rollout before advantages are computed."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(_Group):
    """DAPO's dynamic sampling."""

    max_rollouts: Count = 1  # above 1: replace groups of equal scores, from up to this many rollouts


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(_Group):
    """DAPO's soft punishment of long responses."""

    penalty: NotNegative = 0.0  # subtracted from the reward of a response that uses its whole token budget (DAPO: 1)
    buffer: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """The share of the budget over which the penalty rises: 4096 of 20480 tokens (2503.14476, section 4.1)."""


@dataclass(frozen=True, kw_only=True)
class KLTermConfig(_Group):
    """Divergence from the cold start: the fields of ``algorithms.objective.KL``."""

    coefficient: NotNegative = 0.0  # β; off, as in DAPO, CISPO and, according to its first author, GSPO
    estimator: Literal["k1", "k2", "k3"] = "k3"  # Schulman, 2020; in the loss, the expected gradient of k1 is 0
    place: Literal["loss", "reward"] = "loss"


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(_Group):
    """A loss, its advantage, and what can be added to any loss: off unless an algorithm's YAML turns it on."""

    loss: Mapping[str, Any]
    advantage: Mapping[str, Any] | None = None
    kl: KLTermConfig = KLTermConfig()
    entropy_bonus: NotNegative = 0.0  # η
    correction: str | None = None  # that a preset requires
    updates_per_rollout: Count | None = None  # that a preset requires
    sampling: SamplingConfig = SamplingConfig()
    overlong: OverlongConfig = OverlongConfig()


@dataclass(frozen=True, kw_only=True)
class SavingsConfig(_Group):
    """Work that need not be done; results are equal up to rounding (docs/commands.md)."""

    share_prompts: StrictBool = True  # compute each group's prompt once, if every layer attends to all positions before
    reuse_sampler_logprobs: Count | None = None
    """Take the exact sampler's log-probabilities and routes for the old policy's, and verify a sixteenth of them every
    so many rollouts."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Group):
    """What every optimizer has; a subclass for each ``kind`` adds the rest."""

    learning_rate: Annotated[Number, Field(ge=0, le=1e12)]
    weight_decay: NotNegative = 0.0  # ours: only the algorithm should move the weights
    max_grad_norm: Positive = 1.0  # as in TRL and verl
    router_factor: Positive = 1.0  # the routers' learning rate is this × learning_rate
    expert_factor: Positive = 1.0  # the experts' learning rate is this × learning_rate
    decay: Share = 0.0
    """The last share of the updates, over which the rates fall linearly to 0; 0 is constant."""
    autoclip: Share | None = None
    """A gradient longer than this quantile of all norms so far is cut to it (AutoClip, 2007.14469)."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """``torch.optim.AdamW``, with torch's defaults. A config without a kind is AdamW's."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: Annotated[Number, Field(ge=0, le=1e12)] = 3e-4
    """Ours: tiny models need 1e-4 to 1e-3 where 30B ones use 1e-6."""
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    epsilon: Positive = 1e-8  # above the root mean square of the gradients it stops learning (UniRL #407)


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(OptimizerConfig):
    """``torch.optim.SGD`` or ``training.optimizers.SignDescent``."""

    kind: Literal["sgd", "sign"]
    momentum: Momentum = 0.9


@dataclass(frozen=True, kw_only=True)
class AdamWPartConfig(_Group):
    """The weights that AdamW steps under Muon, at the same learning rate, and its numbers: prime-rl's and Jordan's."""

    weights: Annotated[tuple[Literal["embeddings", "head", "routers", "vectors"], ...], _VECTORS] = (
        "embeddings",
        "head",
        "vectors",
    )
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    epsilon: Positive = 1e-8


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """``torch.optim.Muon`` and, for experts, ``training.optimizers.StackedMuon``, with torch's and Jordan's numbers."""

    kind: Literal["muon"]
    momentum: Momentum = 0.95
    nesterov: StrictBool = True
    ns_coefficients: tuple[Number, Number, Number] = (3.4445, -4.775, 2.0315)  # of Newton–Schulz
    ns_steps: Annotated[StrictInt, Field(ge=1, lt=100)] = 5
    ns_epsilon: Positive = 1e-7  # the least norm that a matrix is divided by
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """× 0.2·√max(rows, columns): AdamW's rates fit (Moonlight, 2502.16982; prime-rl)."""
    adamw: AdamWPartConfig = AdamWPartConfig()


def _kind(optimizer: Any) -> str | None:
    return str(optimizer.get("kind", "adamw")) if isinstance(optimizer, Mapping) else None


_ANY_OPTIMIZER = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[MomentumConfig, Tag("sgd")]
    | Annotated[MomentumConfig, Tag("sign")],
    Discriminator(_kind, "kind", "must be one of adamw, muon, sgd, sign"),
]


@dataclass(frozen=True, kw_only=True)
class ColdStartConfig(_Group):
    """Supervised training before RL, shared by all algorithms of one model, task and seed."""

    path: str | None = None  # a model.safetensors to start from, instead of a cold start
    noise: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    """Probability that a demonstrated step is wrong: limits accuracy and keeps entropy above 0."""
    accuracy_low: Share = 0.35  # training stops at the first check inside the band
    accuracy_high: Share = 0.7
    learning_rate: Positive = 3e-3
    batch_size: Count = 64
    check_every: Count = 25
    """Updates between checks. Up to three in a row are left out where the accuracy cannot have reached the band."""
    check_prompts: Count = 512  # held-out prompts, one response each; a quarter of them far below the band
    max_updates: Count = 5000
    router_factor: Positive = 1.0  # the routers' learning rate is this × learning_rate; a small factor keeps them flat
    aux_loss: NotNegative = 0.0  # coefficient of the load-balancing loss: spreads tokens over experts
    aux_loss_per_layer: StrictBool = False
    """Balance every layer by itself (Switch, 2101.03961, eq. 4), not all together."""
    z_loss: NotNegative = 0.0  # coefficient of the router z-loss: keeps routers' logits small


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_Group):
    """Accuracy on held-out prompts: of a sampled response, of the greedy one, and of the best of several (pass@k)."""

    every: Count = 40
    """Gradient updates, rounded up to whole rollouts; also before the first and after the last."""
    prompts: Count = 128  # one response each, the same prompts in every evaluation
    pass_k: Annotated[StrictInt, Field(ge=0, le=_MAX_PASS_K)] = 8
    """The k of pass@k, measured before the first and after the last rollout; 0: never."""
    pass_prompts: Count = 256  # how many of the prompts pass@k uses
    permuted_routes: StrictBool = False
    """Also measure accuracy with every token running another token's experts."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(_Group):
    """Forwards that only measure."""

    every: Count = 32  # gradient updates, rounded up to whole rollouts; also in the first rollout
    responses: Count = 16  # of the cold start, fixed for a run: they show how far routing has moved since
    fraction: Share = 0.015625  # 1/64 of a rollout, at least 4 responses: experts changed by one gradient update


@dataclass(frozen=True, kw_only=True)
class CollapseConfig(_Group):
    """When a run counts as collapsed: ``statistics.collapse.Rule``.

    Ours, since no thresholds are published (docs/metrics.md). Reports judge recorded runs again, but a run's hash has
    these numbers, so another default makes every run another one.
    """

    window_updates: Count = 80  # average reward over this many gradient updates; in whole rollouts, at least two
    reward_fraction: Share = 0.5  # of the highest average so far, or of the first rollout's reward
    patience_updates: Count = 160
    """A fall must last this many gradient updates, by every rule; in whole rollouts, at least two."""
    least_reward: Share = 0.1  # a run that never reached this reward cannot collapse
    entropy_fraction: Share = 0.05  # of the first rollout's entropy; 0 turns the rule off
    grad_norm_factor: Positive = 100.0  # times the median of all rollouts before
    solved_reward: Share = 0.9  # from this average on, entropy and gradient norm no longer count


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(_Group):
    """Whose experts run in the training forward, and what else is done to routers."""

    replay: Literal["off", "r2", "r3", "r3_gates", "r3_filtered", "pr2", "lagged", "pinned"] = "off"
    freeze: StrictBool = False  # keep the routers' weights at the cold start
    aux_loss: NotNegative = 0.0  # coefficient of the load-balancing loss; off as in R3 (2510.11370)
    aux_loss_per_layer: StrictBool = False
    """Balance every layer by itself (Switch, 2101.03961, eq. 4); pooled as in transformers."""
    z_loss: NotNegative = 0.0  # coefficient of the router z-loss (ST-MoE, 2202.08906)
    bias_speed: NotNegative = 0.0
    """Step of the selection bias that balances load (DeepSeek-V3, 2412.19437: 1e-3)."""
    predictor_learning_rate: Positive | None = None
    score_share: Share | None = None
    lag: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Of the weights that choose experts, in updates: so many copies of the weights are kept."""
    lag_trigger: Annotated[Number, Field(gt=1)] | None = None
    """Lag only for 64 updates after a gradient norm of this times the median of the 64 before it; null: always."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Group):
    """Everything that a run reads, counted in gradient updates.

    ``advantage``, ``correction``, ``engine``, ``model`` and ``task`` stay mappings, as ``algorithm.loss`` does: the
    class that their ``_target_`` names says what is in them.
    """

    experiment_name: str = "default"  # the folder below results/runs
    results_dir: str = "results"
    seed: Annotated[StrictInt, Field(ge=0, le=_LARGEST)] = 0
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: bfloat16 forwards over fp32 weights, except grouped_mm experts (docs/moe.md)."""
    experts: Experts = "grouped_mm"  # how experts are computed; eager is the reference (docs/moe.md)
    threads: Annotated[StrictInt, Field(ge=1, le=_MAX_THREADS)] = 1  # more than one is not bitwise reproducible
    updates: Annotated[StrictInt, Field(ge=1, le=_MAX_UPDATES)] = 240  # rounded up to whole rollouts
    updates_per_rollout: Annotated[StrictInt, Field(ge=1, le=_MAX_UPDATES)] = 8  # GSPO's authors: 4 (2507.18071, 5.1)
    minibatch_prompts: Count = 4  # of one update; a rollout has this × updates_per_rollout
    rollout: RolloutConfig = RolloutConfig()
    advantage: Mapping[str, Any] | None = None  # the algorithm's own
    algorithm: AlgorithmConfig
    savings: SavingsConfig = SavingsConfig()
    microbatch: Count | None = None  # responses per forward and backward; null for a whole mini-batch
    optimizer: _ANY_OPTIMIZER = AdamWConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    measure: Literal["all", "little"] = "all"
    """little: only rewards, accuracy, loss, entropy, gradient norm and mismatch; no ratios of updates, no routers."""
    probe: ProbeConfig = ProbeConfig()
    collapse: CollapseConfig = CollapseConfig()
    checkpoint_every: Count = 80  # gradient updates, rounded up to whole rollouts; changes no recorded number
    checkpoint_keep: Count | None = None
    """Keep the weights after the rollout of this update, in the run's folder: weights-<rollout>.safetensors."""
    log: Literal["tensorboard", "wandb"] | None = None
    """In addition to the record (docs/commands.md); WANDB_MODE=offline works, too."""
    retry: Literal["all", "failed"] = "all"  # which unfinished runs to run: all, or failed (--retry-failed)
    correction: Mapping[str, Any]
    routing: RoutingConfig = RoutingConfig()
    engine: Mapping[str, Any]
    model: Mapping[str, Any]
    task: Mapping[str, Any]

    @property
    def rollouts(self) -> int:
        """The number of rollouts: ``updates``, rounded up to whole ones."""
        return self.in_rollouts(self.updates)

    @property
    def prompts(self) -> int:
        """P, the prompts of a rollout."""
        return self.minibatch_prompts * self.updates_per_rollout

    @property
    def kept_rollout(self) -> int | None:
        """The rollout after which weights are kept."""
        return None if self.checkpoint_keep is None else self.in_rollouts(self.checkpoint_keep)

    def in_rollouts(self, updates: int) -> int:
        """Return a number of gradient updates in rollouts, rounded up."""
        return -(-updates // self.updates_per_rollout)

    @property
    def used_advantage(self) -> Mapping[str, Any]:
        """The advantage that is chosen, or else the algorithm's own; a config without either is refused."""
        return self.advantage or self.algorithm.advantage or {}

    @property
    def has_own_cold_start(self) -> bool:
        """Whether a run of this config begins with a cold start that is trained for it or taken from the cache."""
        return self.cold_start.path is None and "path" not in self.model

    @property
    def cold_start_fingerprint(self) -> str:
        """The hash that names a cold start: of all that goes into it, the libraries' versions too."""
        start = {
            key: value for key, value in asdict(self.cold_start).items() if not is_added(f"cold_start.{key}", value)
        }
        parts: dict[str, Any] = {"model": self.model, "task": self.task, "cold_start": start}
        parts |= {key: getattr(self, key) for key in ("seed", "device", "precision", "threads", "experts")}
        parts |= {"procedure": _COLD_START_VERSION} | {name: version(name) for name in ("torch", "transformers")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def objective(self) -> "Objective":
        """Build the loss with its correction, KL term and bonus; this imports torch.

        Raises TypeError or ValueError for numbers that their classes refuse.
        """
        from steadymoe.algorithms import build
        from steadymoe.algorithms.objective import KL, Objective

        algorithm = self.algorithm
        return Objective(
            loss=build(algorithm.loss),
            correction=build(self.correction),
            kl=KL(**asdict(algorithm.kl)),
            entropy_bonus=algorithm.entropy_bonus,
        )


ADDED = {
    **{"algorithm.advantage": None, "rollout.shuffle_rewards": False, "rollout.temperature": 1.0},
    **{"optimizer.decay": 0.0, "optimizer.autoclip": None, "optimizer.expert_factor": 1.0},
    **{"evaluation.pass_k": 8, "evaluation.pass_prompts": 256},
    **{f"{group}.aux_loss_per_layer": False for group in ("cold_start", "routing")},
    **{f"routing.{key}": None for key in ("predictor_learning_rate", "score_share", "lag", "lag_trigger")},
}
"""Fields that came after runs were recorded, by dotted key. At these values no hash has them."""


def is_added(key: str, value: Any) -> bool:
    """Return whether the field ``key``, at this value, is in no hash."""
    return key in ADDED and ADDED[key] == value


def defaults(group: type = RunConfig) -> dict[str, Any]:
    """Return every default as plain values, without the groups that a YAML or another class fills."""
    values = {each.name: each.default for each in fields(group) if each.default is not MISSING}
    found = {name: defaults(type(value)) if is_dataclass(value) else value for name, value in values.items()}
    return found | ({"algorithm": defaults(AlgorithmConfig), "optimizer": {}} if group is RunConfig else {})


_CONFIG = TypeAdapter(RunConfig)


def read(plain: Mapping[str, Any]) -> RunConfig:
    """Return the dataclasses of a composed config. Raises ConfigError for the first wrong field."""
    try:
        return _CONFIG.validate_python(dict(plain))
    except ValidationError as error:
        raise ConfigError(_in_one_line(error)) from error


def _keys(group: type = RunConfig, prefix: str = "") -> Iterator[str]:
    for each in fields(group):
        yield f"{prefix}{each.name}"
        if is_dataclass(each.default):
            yield from _keys(type(each.default), f"{prefix}{each.name}.")


def _in_one_line(error: ValidationError) -> str:
    """Return the first error as "`field` must be …, got …"; an unknown field comes first."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "unexpected_keyword_argument"), errors[0])
    place = list(first["loc"])
    if place[:1] == ["optimizer"]:
        del place[1:2]  # its kind: pydantic's tag, not a key
    key, kind = ".".join(map(str, place)), first["type"]
    if kind == "unexpected_keyword_argument":
        return f"unknown key `{key}`; {nearest(key, list(_keys()), '`steadymoe run --help`')}"
    if kind == "missing":
        return f"`{key}` is missing"
    if kind == "kind" and isinstance(first["input"], Mapping):
        return f"`{key}.kind` {first['msg']}, got {first['input']['kind']!r}"
    if kind in ("dataclass_type", "dict_type", "kind"):
        return f"`{key}` must be a group of fields, got {first['input']!r}"
    message = re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    return f"`{key}` {message}, got {first['input']!r}" if message.startswith("must") else message

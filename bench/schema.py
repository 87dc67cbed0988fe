"""The config of a run as types: a frozen dataclass for each group, with the bounds of every field next to it.

``conf/config.yaml`` says what each field means, what its usual value is and where that comes from. ``read`` makes a
``RunConfig`` of a composed config.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
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

if TYPE_CHECKING:
    from steadymoe.algorithms.objective import Objective

# Implementations of experts, by their names in transformers' registry; the default first.
Experts = Literal["grouped_mm", "eager", "megablocks"]
EXPERTS: tuple[str, ...] = get_args(Experts)
# A larger whole number does not fit torch or a table's column.
_LARGEST = 2**63 - 1
# A run of more steps would not see its end: the recorded runs have at most a few hundred.
_MAX_STEPS = 1_000_000
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
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Positive = Annotated[StrictFloat, Field(gt=0)]
NotNegative = Annotated[StrictFloat, Field(ge=0)]
Momentum = Annotated[StrictFloat, Field(ge=0, lt=1)]
_VECTORS = AfterValidator(_with_vectors)


class _Group:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(_Group):
    """How much is sampled in a step."""

    prompts: Count
    minibatch_prompts: Count | None
    responses: Annotated[StrictInt, Field(ge=2, le=_LARGEST)]
    shuffle_rewards: StrictBool = False
    temperature: Annotated[StrictFloat, Field(ge=0.01, le=100)] = 1.0
    """Of sampler and trainer; beyond these bounds fp32 has no useful probabilities."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(_Group):
    """DAPO's dynamic sampling: groups of equal scores are replaced from further rollouts."""

    max_rollouts: Count


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(_Group):
    """DAPO's soft punishment of long responses."""

    penalty: NotNegative
    buffer: Annotated[StrictFloat, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class KLTermConfig(_Group):
    """The fields of ``algorithms.objective.KL``."""

    coefficient: NotNegative
    estimator: Literal["k1", "k2", "k3"]
    place: Literal["loss", "reward"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(_Group):
    """A loss, its advantage, and what can be added to any loss."""

    loss: Mapping[str, Any]
    advantage: Mapping[str, Any] | None = None
    kl: KLTermConfig
    entropy_bonus: NotNegative
    correction: str | None
    updates_per_rollout: Count | None
    sampling: SamplingConfig
    overlong: OverlongConfig


@dataclass(frozen=True, kw_only=True)
class SavingsConfig(_Group):
    """Work that need not be done."""

    share_prompts: StrictBool
    sampler_as_old: Count | None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Group):
    """What every optimizer has; a subclass for each ``kind`` adds the rest."""

    learning_rate: Annotated[StrictFloat, Field(ge=0, le=1e12)]
    weight_decay: NotNegative
    max_grad_norm: Positive
    router_factor: Positive
    decay: Share = 0.0
    """The last share of the updates, over which the rates fall linearly to 0; 0 is constant."""
    autoclip: Share | None = None
    """A gradient longer than this quantile of all norms so far is cut to it (AutoClip, 2007.14469)."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """``torch.optim.AdamW``. A config without a kind is AdamW's."""

    kind: Literal["adamw"] = "adamw"
    beta1: Momentum
    beta2: Momentum
    epsilon: Positive


@dataclass(frozen=True, kw_only=True)
class MomentumConfig(OptimizerConfig):
    """``torch.optim.SGD`` or ``training.optimizers.SignDescent``."""

    kind: Literal["sgd", "sign"]
    momentum: Momentum


@dataclass(frozen=True, kw_only=True)
class AdamWPartConfig(_Group):
    """The weights that AdamW steps under Muon, and its numbers."""

    weights: Annotated[tuple[Literal["embeddings", "head", "routers", "vectors"], ...], _VECTORS]
    beta1: Momentum
    beta2: Momentum
    epsilon: Positive


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """``torch.optim.Muon`` and, for experts, ``training.optimizers.StackedMuon``."""

    kind: Literal["muon"]
    momentum: Momentum
    nesterov: StrictBool
    ns_coefficients: tuple[StrictFloat, StrictFloat, StrictFloat]
    ns_steps: Annotated[StrictInt, Field(ge=1, lt=100)]
    ns_epsilon: Positive
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    adamw: AdamWPartConfig


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
    """Supervised training before reinforcement."""

    path: str | None
    noise: Annotated[StrictFloat, Field(ge=0, lt=1)]
    accuracy_low: Share
    accuracy_high: Share
    learning_rate: Positive
    batch_size: Count
    check_every: Count
    check_prompts: Count
    max_updates: Count
    router_factor: Positive
    aux_loss: NotNegative
    aux_loss_per_layer: StrictBool = False
    z_loss: NotNegative


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_Group):
    """Accuracy on held-out prompts: of a sampled response, of the greedy one, and of the best of several (pass@k)."""

    every: Count
    every_updates: Count | None
    prompts: Count
    permuted_routes: StrictBool
    pass_k: Annotated[StrictInt, Field(ge=0, le=_MAX_PASS_K)] = 8
    pass_prompts: Count = 256


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(_Group):
    """Forwards that only measure."""

    every: Count
    every_updates: Count | None
    responses: Count
    fraction: Share


@dataclass(frozen=True, kw_only=True)
class CollapseConfig(_Group):
    """When a run counts as collapsed: ``statistics.collapse.Rule``."""

    window_updates: Count
    reward_fraction: Share
    patience_updates: Count
    least_reward: Share
    entropy_fraction: Share
    grad_norm_factor: Positive
    solved_reward: Share


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(_Group):
    """Whose experts run in the training forward, and what else is done to routers."""

    replay: Literal["none", "r2", "r3", "r3_gates", "r3_filtered", "pr2", "lagged"]
    freeze: StrictBool
    aux_loss: NotNegative
    aux_loss_per_layer: StrictBool = False
    z_loss: NotNegative
    bias_speed: NotNegative
    predictor_learning_rate: Positive | None = None
    score_share: Share | None = None
    lag: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Of the weights that choose experts, in updates: so many copies of the weights are kept."""
    lag_trigger: Annotated[StrictFloat, Field(gt=1)] | None = None
    """A gradient norm over the median of those before; null: the lag is always on."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Group):
    """Everything that a run reads.

    ``advantage``, ``correction``, ``engine``, ``model`` and ``task`` stay mappings, as ``algorithm.loss`` does: the
    class that their ``_target_`` names says what is in them.
    """

    experiment_name: str
    results_dir: str
    seed: Annotated[StrictInt, Field(ge=0, le=_LARGEST)]
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    experts: Experts
    threads: Annotated[StrictInt, Field(ge=1, le=_MAX_THREADS)]
    steps: Annotated[StrictInt, Field(ge=1, le=_MAX_STEPS)]
    total_updates: Annotated[StrictInt, Field(ge=1, le=_MAX_STEPS)] | None
    updates_per_rollout: Count
    rollout: RolloutConfig
    advantage: Mapping[str, Any] | None
    algorithm: AlgorithmConfig
    savings: SavingsConfig
    microbatch: Count | None
    optimizer: _ANY_OPTIMIZER
    cold_start: ColdStartConfig
    evaluation: EvaluationConfig
    measure: Literal["all", "little"]
    probe: ProbeConfig
    collapse: CollapseConfig
    checkpoint_every: Count
    checkpoint_keep: Count | None
    log: Literal["tensorboard", "wandb"] | None
    retry: Literal["all", "failed"]
    correction: Mapping[str, Any]
    routing: RoutingConfig
    engine: Mapping[str, Any]
    model: Mapping[str, Any]
    task: Mapping[str, Any]

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
        given = {key: value for key, value in asdict(self.cold_start).items() if not _is_neutral(key, value)}
        parts: dict[str, Any] = {"model": self.model, "task": self.task, "cold_start": given}
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


def _neutral(group: type, prefix: str = "") -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for each in fields(group):
        for inner in _groups(each.type):
            defaults |= _neutral(inner, f"{prefix}{each.name}.")
        if each.default is not MISSING:
            defaults[f"{prefix}{each.name}"] = each.default
    return defaults


def _groups(kind: Any) -> list[type]:
    """Return the dataclasses that a field of this type may hold."""
    if isinstance(kind, type) and is_dataclass(kind):
        return [kind]
    return [group for inner in get_args(kind) for group in _groups(inner)]


NEUTRAL = _neutral(RunConfig)
"""Dotted key → default of every field that has one here. At this value a field is not hashed, so a new field with a
default changes no recorded hash."""


def _is_neutral(key: str, value: Any) -> bool:
    """Return whether a field of the cold start is at a default that fingerprints made before it do not have."""
    return f"cold_start.{key}" in NEUTRAL and NEUTRAL[f"cold_start.{key}"] == value


_CONFIG = TypeAdapter(RunConfig)


def read(plain: Mapping[str, Any]) -> RunConfig:
    """Return the dataclasses of a composed config. Raises ConfigError for the first wrong field."""
    try:
        return _CONFIG.validate_python(dict(plain))
    except ValidationError as error:
        raise ConfigError(_in_one_line(error)) from error


def _in_one_line(error: ValidationError) -> str:
    """Return the first error as "`field` must be …, got …"; an unknown field comes first."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "unexpected_keyword_argument"), errors[0])
    place = list(first["loc"])
    if place[:1] == ["optimizer"]:
        del place[1:2]  # its kind: pydantic's tag, not a key
    key, kind = ".".join(map(str, place)), first["type"]
    if kind == "unexpected_keyword_argument":
        return f"unknown key `{key}`"
    if kind == "missing":
        return f"`{key}` is missing"
    if kind == "kind" and isinstance(first["input"], Mapping):
        return f"`{key}.kind` {first['msg']}, got {first['input']['kind']!r}"
    if kind in ("dataclass_type", "dict_type", "kind"):
        return f"`{key}` must be a group of fields, got {first['input']!r}"
    message = re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    return f"`{key}` {message}, got {first['input']!r}" if message.startswith("must") else message

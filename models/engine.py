"""Rollout engines: how the policy that samples differs from the one that is trained, as dials.

In one process and fp32 the sampler and the training forward agree to rounding, so the mismatch that real
systems have (other precision, noise in the router, old weights) is produced here, at a known strength. An
engine never touches the trainer's weights: it samples with a copy of its own. At strength 0 there is no copy,
and sampling is exact.

Shapes: E experts, N tokens, O output features, I input features.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadymoe.models.routing import routers, with_logits

# What serving engines leave in the precision of training, by parts of its name.
_SPARED = ("embed_tokens", "lm_head", ".gate.weight", ".router.weight", "shared_expert_gate")
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a sampler does differently; ``strength`` is how much, 0 for nothing."""

    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"engine.strength must be at least 0 and finite; got {self.strength}")

    @property
    def temperature(self) -> float:
        """The temperature that is sampled at; the training forward is always at 1."""
        return 1.0

    @property
    def delay(self) -> int:
        """How many steps old the weights are that sample."""
        return 0

    def round_weight(self, name: str, weight: Tensor) -> Tensor:
        """The copy's value of a weight, given the trainer's."""
        return weight

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Change how the copy computes, once; ``generator`` gives the rollout's source of noise."""
        return None


@dataclass(frozen=True, kw_only=True)
class Exact(Engine):
    """The trainer's own weights and arithmetic."""

    strength: float = 0.0

    def __post_init__(self) -> None:
        if self.strength != 0:
            raise ValueError("engine=exact has no strength; choose another engine")


@dataclass(frozen=True, kw_only=True)
class Rounding(Engine):
    """Weights and activations of linear layers and experts as w + α (q(w) − w), α the strength.

    ``dtype`` is bf16, fp8 (e4m3) or int8 (symmetric); the last two scale by the largest absolute value, per
    output ``channel`` or per ``tensor`` for weights, per token for activations. Routers, gates of shared experts,
    output head and embedding are left as they are with fp8 and int8, as serving engines do, and are rounded with
    bf16, routers with what they are given and their logits. Biases, norms and convolutions stay. Inside an expert
    only its input and its weights are rounded: its own hidden activation is out of reach.
    """

    dtype: str = "bf16"
    scale: str = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength > 1:
            raise ValueError(f"engine.strength of a rounding engine is at most 1; got {self.strength}")
        for name, value, choices in (
            ("dtype", self.dtype, ("bf16", "fp8", "int8")),
            ("scale", self.scale, ("channel", "tensor")),
        ):
            if value not in choices:
                raise ValueError(f"engine.{name} must be one of {', '.join(choices)}; got {value!r}")
        if self.dtype == "bf16" and self.scale != "channel":
            raise ValueError("engine.scale is of fp8 and int8: bf16 has no scale to choose")

    def round_weight(self, name: str, weight: Tensor) -> Tensor:
        """Matrices (…, outputs, inputs) are rounded, norms, biases and convolutions are not."""
        spared = any(part in name for part in _SPARED)
        if weight.dim() < 2 or name.endswith("bias") or "conv1d" in name or (spared and self.dtype != "bf16"):
            return weight
        return self._mixed(weight, self.scale == "tensor")

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Round what linear layers and experts are fed, and with bf16 what routers are fed and say."""
        spared = () if self.dtype == "bf16" else _SPARED
        experts = {id(module) for module in model.modules() if "Experts" in type(module).__name__}
        routed = set(routers(model))
        for name, module in model.named_modules():
            linear = isinstance(module, nn.Linear) and not any(part in f"{name}.weight" for part in spared)
            if linear or id(module) in experts or (self.dtype == "bf16" and module in routed):
                module.register_forward_pre_hook(lambda module, args: (self._mixed(args[0], False), *args[1:]))
        if self.dtype == "bf16":
            _change_logits(model, lambda logits_NE: self._mixed(logits_NE, False))

    def _mixed(self, values: Tensor, whole: bool) -> Tensor:
        return values + self.strength * (_quantised(values, self.dtype, whole) - values)


def _quantised(values: Tensor, dtype: str, whole: bool) -> Tensor:
    """``values`` as a grid of ``dtype`` holds them, scaled over all of them or over their last dimension."""
    if dtype == "bf16":
        return values.to(torch.bfloat16).to(values.dtype)
    largest = values.abs().amax() if whole else values.abs().amax(-1, keepdim=True)
    scale = (largest / (_FP8_MAX if dtype == "fp8" else 127)).clamp(min=torch.finfo(values.dtype).tiny)
    grid = values / scale
    grid = grid.to(torch.float8_e4m3fn).to(values.dtype) if dtype == "fp8" else grid.round()
    return grid * scale


@dataclass(frozen=True, kw_only=True)
class RouterNoise(Engine):
    """Gaussian noise on the routers' logits, ``strength`` its standard deviation."""

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Add noise to what every router's matrix gives."""

        def noisy(logits_NE: Tensor) -> Tensor:
            noise_NE = torch.randn(logits_NE.shape, generator=generator(), device=logits_NE.device)
            return logits_NE + self.strength * noise_NE.to(logits_NE.dtype)

        _change_logits(model, noisy)


@dataclass(frozen=True, kw_only=True)
class RouterBF16(Engine):
    """Only the routers' logits are rounded to bf16, as x + α (bf16(x) − x)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength > 1:
            raise ValueError(f"engine.strength of a rounding engine is at most 1; got {self.strength}")

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Round what every router's matrix gives."""
        _change_logits(
            model, lambda logits_NE: logits_NE + self.strength * (_quantised(logits_NE, "bf16", True) - logits_NE)
        )


@dataclass(frozen=True, kw_only=True)
class Stale(Engine):
    """Weights as they were ``strength`` steps ago, a whole number: asynchronous training.

    The first steps sample with the oldest weights there are, those of the cold start.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength > 1000 or self.strength != int(self.strength):
            raise ValueError(f"engine.strength of stale is a whole number of steps, at most 1000; got {self.strength}")

    @property
    def delay(self) -> int:
        """How many steps old the weights are that sample."""
        return int(self.strength)


@dataclass(frozen=True, kw_only=True)
class Temperature(Engine):
    """Sampling at temperature 1 + ``strength``, scored by the trainer at 1; log μ is that of what was sampled."""

    @property
    def temperature(self) -> float:
        """1 + strength."""
        return 1.0 + self.strength

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength > 99:
            raise ValueError(f"engine.strength of temperature is at most 99; got {self.strength}")


class Sampler:
    """The model that samples under an engine, kept up with the trainer's."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        self.engine, self._trained = engine, model
        self._generator = torch.Generator()
        self._copy: PreTrainedModel | None = None
        self._past: deque[dict[str, Tensor]] = deque(maxlen=engine.delay + 1)
        changed = type(engine).round_weight is not Engine.round_weight or type(engine).install is not Engine.install
        if engine.strength > 0 and (changed or engine.delay):
            self._copy = copy.deepcopy(model).requires_grad_(False)
            engine.install(self._copy, lambda: self._generator)
        self._transposed = {
            f"{module_name}.{name}"
            for module_name, module in model.named_modules()
            if getattr(module, "is_transposed", False)
            for name, weight in module.named_parameters(recurse=False)
            if weight.dim() == 3
        }

    @torch.no_grad()
    def model(self, generator: torch.Generator) -> PreTrainedModel:
        """The model to sample one step's rollouts with; ``generator`` is its source of noise. Call it once a step."""
        self._generator = generator
        if self._copy is None:
            return self._trained
        weights: Mapping[str, Tensor] = dict(self._trained.named_parameters())
        if self.engine.delay:
            self._past.append({name: weight.detach().clone() for name, weight in weights.items()})
            weights = self._past[0]
        for name, target in self._copy.named_parameters():
            weight = weights[name].detach()
            if name in self._transposed:  # outputs last: turned round, so that a channel is an output's
                target.copy_(self.engine.round_weight(name, weight.mT).mT)
            else:
                target.copy_(self.engine.round_weight(name, weight))
        return self._copy

    def state(self) -> dict[str, Tensor]:
        """The weights of past steps, as ``<age>/<name>``: what a checkpoint needs besides the trainer's."""
        return {f"{age}/{name}": weight for age, past in enumerate(self._past) for name, weight in past.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave."""
        past: dict[int, dict[str, Tensor]] = {}
        for key, weight in state.items():
            age, _, name = key.partition("/")
            past.setdefault(int(age), {})[name] = weight.to(self._trained.device)
        self._past.clear()
        self._past.extend(past[age] for age in sorted(past))


def _change_logits(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> None:
    """Put ``change`` between every router's matrix and the rest of the router, for good."""
    for router in routers(model):
        router.forward = partial(with_logits, router, router.forward, change)

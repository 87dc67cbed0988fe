"""Rollout engines: each makes the sampling policy differ from the trained policy, by a chosen strength.

In one process and fp32 the sampler and the training forward agree up to rounding. Real systems have a mismatch (other
precision, noise in the router, old weights); an engine produces such a mismatch at a known strength. An engine never
changes the trainer's weights: it samples with a copy. At strength 0 there is no copy, and sampling is exact.

Shapes (docs/metrics.md): B sequences, V vocabulary, E experts, N tokens of a forward.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadymoe.models.routing import routers
from steadymoe.models.selection import with_logits
from steadymoe.models.snapshots import Snapshots, weights_of

# Parts of the names of weights that serving engines leave in the precision of training.
_ROUTERS = (".gate.weight", ".router.weight")
_SPARED = ("embed_tokens", "lm_head", *_ROUTERS, "shared_expert_gate")
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A difference between sampler and trainer; ``strength`` (at least 0) is its size, and 0 is no difference."""

    strength: float = 1.0
    most: ClassVar[float] = 1e12
    """The largest strength."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= self.most:
            raise ValueError(f"engine.strength must be from 0 to {self.most:g} here; got {self.strength}")

    @property
    def temperature(self) -> float:
        """The temperature of sampling, in multiples of the trainer's (``rollout.temperature``)."""
        return 1.0

    @property
    def delay(self) -> int:
        """The age of the sampling weights, in steps."""
        return 0

    @property
    def truncates(self) -> bool:
        """Whether ``kept`` leaves tokens out."""
        return False

    @property
    def replays_mask(self) -> bool:
        """Whether the trainer normalises its log-probabilities over the tokens that ``kept`` left to the sampler."""
        return False

    def kept(self, all_logprobs_BV: Tensor) -> Tensor | None:
        """Return which tokens can be drawn, (B, V) bool; None for all. The log-probabilities are those of the draw."""
        return None

    def change_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return the copy's value of the trainer's ``weight``, same shape; ``generator`` draws a rollout's noise."""
        return weight

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Change the computation of the copy, once and for good; ``generator()`` is the source of a rollout's noise."""
        return None


@dataclass(frozen=True, kw_only=True)
class Exact(Engine):
    """Sampling with the trainer's own weights and arithmetic."""

    strength: float = 0.0

    def __post_init__(self) -> None:
        if self.strength != 0:
            raise ValueError("engine=exact has no strength; choose another engine")


@dataclass(frozen=True, kw_only=True)
class Rounding(Engine):
    """Rounded weights and activations of linear layers and experts: w + α (q(w) − w), where α is the strength.

    ``dtype`` is bf16, fp8 (e4m3) or int8 (symmetric). fp8 and int8 scale by the largest absolute value: weights per
    output ``channel`` or per ``tensor``, activations per token. fp8 and int8 leave routers, gates of shared experts,
    output head and embedding exact, as serving engines do. bf16 rounds these too, and the inputs and logits of routers.
    Biases, norms and convolutions are never rounded. Inside an expert the input and the weights are rounded, but not
    the hidden activation.
    """

    dtype: str = "bf16"
    scale: str = "channel"
    most: ClassVar[float] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("dtype", ("bf16", "fp8", "int8")), ("scale", ("channel", "tensor"))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"engine.{name} must be one of {', '.join(choices)}; got {value!r}")
        if self.dtype == "bf16" and self.scale != "channel":
            raise ValueError("engine.scale is for fp8 and int8: bf16 has no scale to choose")

    def change_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return the rounded matrix, (…, outputs, inputs); norms, biases and convolutions are returned unchanged."""
        if not _is_matrix(name, weight) or (self.dtype != "bf16" and any(part in name for part in _SPARED)):
            return weight
        return _rounded(weight, self.strength, self.dtype, self.scale == "tensor")

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Round the inputs of linear layers and experts, and with bf16 the inputs and logits of routers."""
        spared = () if self.dtype == "bf16" else _SPARED
        experts = {id(module) for module in model.modules() if "Experts" in type(module).__name__}
        routed = set(routers(model))
        for name, module in model.named_modules():
            linear = isinstance(module, nn.Linear) and not any(part in f"{name}.weight" for part in spared)
            if linear or id(module) in experts or (self.dtype == "bf16" and module in routed):
                module.register_forward_pre_hook(
                    lambda module, args: (_rounded(args[0], self.strength, self.dtype), *args[1:])
                )
        if self.dtype == "bf16":
            _change_logits(model, lambda logits_NE: _rounded(logits_NE, self.strength, "bf16"))


def _is_matrix(name: str, weight: Tensor) -> bool:
    """Whether a weight is a matrix, or one for each expert: no norm, bias or convolution."""
    return weight.dim() >= 2 and not name.endswith("bias") and "conv1d" not in name


def _rounded(values: Tensor, share: float, dtype: str, whole: bool = False) -> Tensor:
    return values + share * (_quantised(values, dtype, whole) - values)


def _quantised(values: Tensor, dtype: str, whole: bool) -> Tensor:
    """``values`` rounded to the grid of ``dtype``; the scale is shared by all values or by the last dimension."""
    if dtype == "bf16":
        return values.to(torch.bfloat16).to(values.dtype)
    largest = values.abs().amax() if whole else values.abs().amax(-1, keepdim=True)
    scale = (largest / (_FP8_MAX if dtype == "fp8" else 127)).clamp(min=torch.finfo(values.dtype).tiny)
    grid = values / scale
    grid = grid.to(torch.float8_e4m3fn).to(values.dtype) if dtype == "fp8" else grid.round()
    return grid * scale


@dataclass(frozen=True, kw_only=True)
class RouterNoise(Engine):
    """Gaussian noise on the routers' logits; ``strength`` is its standard deviation.

    With ``relative`` the standard deviation is ``strength`` times the logits' own over the experts of a token, so that
    a strength means the same in every model.
    """

    relative: bool = False

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Add noise to the logits of every router."""

        def noisy(logits_NE: Tensor) -> Tensor:
            noise_NE = torch.randn(logits_NE.shape, generator=generator(), device=logits_NE.device)
            spread = logits_NE.std(-1, keepdim=True) if self.relative else 1.0
            return logits_NE + self.strength * spread * noise_NE.to(logits_NE.dtype)

        _change_logits(model, noisy)


@dataclass(frozen=True, kw_only=True)
class RouterBF16(Engine):
    """Rounding of the routers' logits alone: x + α (bf16(x) − x), where α is the strength."""

    most: ClassVar[float] = 1

    def install(self, model: PreTrainedModel, generator: Callable[[], torch.Generator]) -> None:
        """Round the logits of every router."""
        _change_logits(model, lambda logits_NE: _rounded(logits_NE, self.strength, "bf16"))


@dataclass(frozen=True, kw_only=True)
class RouterSync(Engine):
    """Routers' weights sent to the sampler in bf16, w + α (bf16(w) − w); everything is computed in the trainer's
    precision (prime-rl #3524). α is the strength."""

    most: ClassVar[float] = 1

    def change_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return the rounded weight of a router; all others are returned unchanged."""
        return _rounded(weight, self.strength, "bf16") if name.endswith(_ROUTERS) else weight


@dataclass(frozen=True, kw_only=True)
class WeightNoise(Engine):
    """Gaussian noise on the weights: W + σ · std(W) · n, where σ is the strength and n ~ N(0, 1) anew for each rollout.

    std(W) is the standard deviation of a matrix's own entries; each expert has matrices of its own. The mean entry is
    almost 0, so σ is close to ‖noise‖/‖W‖ in the Frobenius norm. Biases, norms and convolutions have no noise.
    """

    def change_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return the noisy matrix; norms, biases and convolutions are returned unchanged."""
        if not _is_matrix(name, weight):
            return weight
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
        return weight + self.strength * weight.std((-2, -1), keepdim=True, correction=0) * noise


@dataclass(frozen=True, kw_only=True)
class Stale(Engine):
    """Weights that are ``strength`` steps old (a whole number), as in asynchronous training.

    The first steps sample with the weights of the cold start, the oldest weights.
    """

    most: ClassVar[float] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength != int(self.strength):
            raise ValueError(f"engine.strength of stale must be a whole number of steps; got {self.strength}")

    @property
    def delay(self) -> int:
        """The age of the sampling weights, in steps."""
        return int(self.strength)


@dataclass(frozen=True, kw_only=True)
class Temperature(Engine):
    """Sampling at 1 + ``strength`` times the trainer's temperature; log μ is taken at that temperature."""

    most: ClassVar[float] = 99

    @property
    def temperature(self) -> float:
        """1 + strength."""
        return 1.0 + self.strength


@dataclass(frozen=True, kw_only=True)
class Truncated(Engine):
    """Sampling from a part of the vocabulary; ``strength`` 1 truncates, 0 keeps every token.

    A token is kept if its probability is at least ``min_p`` times the largest; if it is among the ``top_k`` most likely
    (0 for all); and if those of the tokens left that are more likely have less than ``top_p`` of their joint
    probability. This is vLLM's order. log μ is renormalised over the kept tokens.

    The trainer normalises over the whole vocabulary: π_old/μ is then the probability of all kept tokens together, at
    most 1, whichever of them was drawn. With ``replay_mask`` it normalises over the kept tokens of the rollout
    (DeepSeek-V3.2, 2512.02556, section 3.1), in the old policy, in every update, in probes and in the reference policy.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    replay_mask: bool = False

    def __post_init__(self) -> None:
        if self.strength not in (0, 1):
            raise ValueError(
                f"engine.strength of truncated must be 1, or 0 to keep every token; got {self.strength}. "
                "top_p, top_k and min_p set how much is left out"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"engine.top_p must be above 0 and at most 1; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"engine.top_k must be at least 0, and 0 is no limit; got {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"engine.min_p must be at least 0 and below 1; got {self.min_p}")
        if self.truncates and (self.top_p, self.top_k, self.min_p) == (1, 0, 0):
            raise ValueError("engine=truncated keeps every token: lower top_p, or set top_k or min_p above 0")
        if self.replay_mask and not self.truncates:
            raise ValueError("engine.replay_mask=true needs engine.strength=1: without truncation there is no mask")

    @property
    def truncates(self) -> bool:
        """Whether the strength is 1."""
        return self.strength == 1

    @property
    def replays_mask(self) -> bool:
        """The field ``replay_mask``."""
        return self.replay_mask

    def kept(self, all_logprobs_BV: Tensor) -> Tensor | None:
        """Return which tokens can be drawn, (B, V) bool; at least one in each row."""
        if not self.truncates:
            return None
        # In fp64, so that top_p cuts where the exact sums do.
        ranked_BV, order_BV = all_logprobs_BV.double().exp().sort(dim=-1, descending=True, stable=True)
        kept_BV = ranked_BV >= self.min_p * ranked_BV[:, :1]
        if self.top_k:
            kept_BV[:, self.top_k :] = False
        if self.top_p < 1:
            ranked_BV = ranked_BV * kept_BV
            before_BV = ranked_BV.cumsum(-1) - ranked_BV
            kept_BV &= before_BV < self.top_p * ranked_BV.sum(-1, keepdim=True)
        return torch.zeros_like(kept_BV).scatter(-1, order_BV, kept_BV)


class Sampler:
    """The sampling model of an engine; it follows the trainer's weights."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        self.engine, self._trained = engine, model
        self._generator = torch.Generator()
        self._copy: PreTrainedModel | None = None
        self._past = Snapshots(model, engine.delay + 1)
        changed = type(engine).change_weight is not Engine.change_weight or type(engine).install is not Engine.install
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
        """Return the model that samples one step's rollout; call it once a step. ``generator`` draws its noise."""
        self._generator = generator
        if self._copy is None:
            return self._trained
        if self.engine.delay:
            self._past.take()
        weights = self._past.oldest
        for name, target in weights_of(self._copy).items():
            weight = weights[name].detach()
            if name in self._transposed:  # the outputs are the last dimension; a channel must be an output
                weight, target = weight.mT, target.mT
            target.copy_(self.engine.change_weight(name, weight, generator))
        return self._copy

    def state(self) -> dict[str, Tensor]:
        """Return the weights of past steps, for a checkpoint."""
        return self._past.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the weights of past steps from ``state()``."""
        self._past.load(state)


def _change_logits(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> None:
    for router in routers(model):
        router.forward = partial(with_logits, router, router.forward, change)

"""A bundle: frozen rollouts with what policies said of them, as a folder that any trainer can write (docs/bundle.md).

The folder holds ``bundle.json``, the manifest, and ``tensors.safetensors``. A bundle is checked when it is made: the
same rules hold for a bundle that is written and for one that is read. No path is taken from a manifest.

Shapes: B responses in groups of G, S positions of prompt and response together, T response positions, F = S − 1
positions fed to the model, L MoE layers, K experts a token.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from steadymoe.algorithms.parts import LEFT_OUT, dimensions, dimensions_of
from steadymoe.bench.training.forward import Sequences
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.bench.training.sampling import Rollout
from steadymoe.models.selection import NO_ROUTE

# The largest sizes of a bundle. They are compared with the sizes in a file's header before a tensor is loaded.
MOST = {"B": 2**16, "S": 2**17, "T": 2**17, "F": 2**17, "L": 2**9, "K": 2**6}
# Characters of a text in the manifest.
LONGEST_TEXT = 2000


class BadBundle(ValueError):
    """Something is no bundle, or lacks what is asked of it; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What the manifest says of where a bundle comes from. Raises BadBundle for a value of another kind."""

    made_by: str
    """The program or command that recorded the rollouts."""
    model: str
    """The name of the model."""
    model_sha256: str | None = None
    """``bundle_files.model_sha256`` of the weights that sampled, 64 hex digits; None if the weights are not at hand."""
    experts: int | None = None
    """E, the number of experts of a layer; None for a bundle without routes."""
    task: str | None = None
    engine: str | None = None
    """The sampler: the suite's engine, or the name of another one."""
    seed: int | None = None
    staleness: int | None = None
    """k, the number of updates between the weights that sampled and the current policy."""
    revision: str | None = None
    """The commit of the code that recorded the rollouts."""

    def __post_init__(self) -> None:
        texts = ("made_by", "model", "model_sha256", "task", "engine", "revision")
        for name, value in asdict(self).items():
            if value is None and name not in ("made_by", "model"):
                continue
            if name in texts and not (isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT):
                raise BadBundle(f"{name} must be a text of 1 to {LONGEST_TEXT} characters; got {_short(value)}")
            if name not in texts and not (type(value) is int and 0 <= value < 2**63):
                raise BadBundle(f"{name} must be a whole number, at least 0; got {_short(value)}")
        digits = self.model_sha256
        if digits is not None and (len(digits) != 64 or set(digits) - set("0123456789abcdef")):
            raise BadBundle(f"model_sha256 must be 64 hex digits; got {_short(digits)}")
        if self.experts is not None and not 1 <= self.experts <= 2**15 - 1:
            raise BadBundle(f"experts must be between 1 and {2**15 - 1}; got {self.experts}")


def _field(letters: str, dtype: torch.dtype) -> Mapping[str, Any]:
    return dict(dimensions(letters)) | {"dtype": dtype}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Frozen rollouts. Numbers are converted to the type of their field, and padding becomes 0 or ``NO_ROUTE``.

    Raises BadBundle, with the name of the field, for a wrong shape or type, a mask that is not 0 and 1 or has holes, a
    log-probability above 0 or not finite, a reward or an advantage that is not finite, groups that are not whole, and
    routes of experts that the model does not have or at positions that are never fed.
    """

    about: About = field(metadata=LEFT_OUT)
    response_width: int = field(metadata=LEFT_OUT)
    """T: the last T of the S positions hold responses."""
    tokens_BS: Tensor = field(metadata=_field("BS", torch.int32))
    """Token ids; prompts end at position S − T, responses begin there; 0 on padding."""
    mask_BS: Tensor = field(metadata=_field("BS", torch.uint8))
    """1 on tokens of prompt and response, 0 on padding: left of prompts, right of responses."""
    groups_B: Tensor = field(metadata=_field("B", torch.int32))
    """A number that the G responses to one prompt share; they stand in neighbouring rows."""
    rewards_B: Tensor = field(metadata=_field("B", torch.float32))
    """The reward of each response."""
    minibatches_B: Tensor | None = field(default=None, metadata=_field("B", torch.int32))
    """The mini-batch of each response, 0, 1, …; a group lies in one. None for a single mini-batch."""
    advantages_BT: Tensor | None = field(default=None, metadata=_field("BT", torch.float32))
    """The advantage of each token; None if rewards and groups give the advantages."""
    rollout_logprobs_BT: Tensor | None = field(default=None, metadata=_field("BT", torch.float32))
    """log μ of the response tokens, as the sampling engine computed it."""
    old_logprobs_BT: Tensor | None = field(default=None, metadata=_field("BT", torch.float32))
    """log π_old of the same tokens: the trainer's forward at the weights that sampled."""
    logprobs_BT: Tensor | None = field(default=None, metadata=_field("BT", torch.float32))
    """log π_θ of the same tokens: the trainer's forward at the current weights."""
    rollout_routes_LBFK: Tensor | None = field(default=None, metadata=_field("LBFK", torch.int16))
    """The experts that the sampler chose; −1 where there is no route."""
    old_routes_LBFK: Tensor | None = field(default=None, metadata=_field("LBFK", torch.int16))
    """The experts that the trainer's routers chose at the weights that sampled."""
    router_log_ratio_LBTK: Tensor | None = field(default=None, metadata=_field("LBTK", torch.float32))
    """log p_θ(e) − log p_old(e) of the routers' softmax for the K experts that π_old chose (RSPO)."""

    def __post_init__(self) -> None:
        self._check_shapes()
        for each, values in self.tensors(with_fields=True):
            object.__setattr__(self, each.name, _converted(each.name, values, each.metadata["dtype"]))
        self._check_masks()
        for each, values in self.tensors(with_fields=True):
            letters = dimensions_of(each) or ""
            if "T" in letters:
                object.__setattr__(self, each.name, self._checked_floats(each.name, values, letters))
        if not self.rewards_B.isfinite().all():
            raise BadBundle(f"rewards_B must be finite; row {_first(~self.rewards_B.isfinite())} is not")
        self._check_groups()
        for name in ("rollout_routes_LBFK", "old_routes_LBFK"):
            if getattr(self, name) is not None:
                self._check_routes(name, getattr(self, name))

    def tensors(self, with_fields: bool = False) -> list[tuple[Any, Tensor]]:
        """The tensors that the bundle holds, by name, or with ``with_fields`` by dataclass field."""
        each = [(one, getattr(self, one.name)) for one in fields(self) if "dtype" in one.metadata]
        return [(one if with_fields else one.name, values) for one, values in each if values is not None]

    @property
    def sizes(self) -> dict[str, int]:
        """B, S, T, F, and L and K where there are routes."""
        return sizes_of({name: tuple(values.shape) for name, values in self.tensors()}, self.response_width)

    @property
    def mask_BT(self) -> Tensor:
        """1 on response tokens."""
        return self.mask_BS[:, -self.response_width :]

    @property
    def sequences(self) -> Sequences:
        """The tokens as a training forward takes them."""
        return Sequences(self.tokens_BS.long(), self.mask_BS.long(), self.response_width)

    @property
    def responses(self) -> int:
        """G, the number of responses to each prompt."""
        return len(self.groups_B) // len(self.groups_B.unique())

    def rows_of_minibatches(self) -> list[Tensor]:
        """The rows of each mini-batch, (M,) each."""
        if self.minibatches_B is None:
            return [torch.arange(len(self.groups_B))]
        count = int(self.minibatches_B.max()) + 1
        return [(self.minibatches_B == index).nonzero().flatten() for index in range(count)]

    def get(self, name: str, why: str) -> Tensor:
        """A field by its name. Raises BadBundle, with the reason ``why`` it is needed, if the bundle lacks it."""
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise BadBundle(f"the bundle has no {name}, {why}")
        return values

    def _check_shapes(self) -> None:
        width = self.response_width
        if type(width) is not int:
            raise BadBundle(f"response_width must be a whole number; got {_short(width)}")
        for each, values in self.tensors(with_fields=True):
            if not isinstance(values, Tensor):
                raise BadBundle(f"{each.name} must be a tensor; got {type(values).__name__}")
        check_sizes({name: tuple(values.shape) for name, values in self.tensors()}, width)

    def _check_masks(self) -> None:
        if (self.mask_BS > 1).any():
            raise BadBundle("mask_BS must hold 0 and 1 alone: 1 on tokens, 0 on padding")
        width = self.tokens_BS.shape[1] - self.response_width
        prompts_BW, mask_BT = self.mask_BS[:, :width].bool(), self.mask_BT.bool()
        for what, part, fine_B in (
            ("prompt", "one run of 1 at the right end", _ends_in_ones(prompts_BW)),
            ("response", "one run of 1 at the left end", _ends_in_ones(mask_BT.flip(-1))),
        ):
            if not fine_B.all():
                raise BadBundle(f"mask_BS must be {part} of each {what}; row {_first(~fine_B)} is not")
        object.__setattr__(self, "tokens_BS", self.tokens_BS * self.mask_BS)
        if (self.tokens_BS < 0).any():
            raise BadBundle(f"tokens_BS must hold token ids, at least 0; row {_first((self.tokens_BS < 0).any(-1))}")

    def _checked_floats(self, name: str, values: Tensor, letters: str) -> Tensor:
        """The values with 0 on padding. Raises BadBundle for a number that cannot stand on a token."""
        mask = self.mask_BT.bool().view(*self.mask_BT.shape, *[1] * len(letters.partition("T")[2]))
        values = torch.where(mask, values, 0.0)
        if not values.isfinite().all():
            raise BadBundle(f"{name} must be finite on response tokens; {_place(~values.isfinite(), letters)} is not")
        if name.endswith("logprobs_BT") and (values > 0).any():
            raise BadBundle(f"{name} must hold logarithms of probabilities, at most 0; {_place(values > 0, letters)}")
        return values

    def _check_groups(self) -> None:
        groups, counts = self.groups_B.unique_consecutive(return_counts=True)
        if len(groups.unique()) != len(groups):
            raise BadBundle(
                "groups_B must have the responses to one prompt in neighbouring rows; a group is torn apart"
            )
        if (counts != counts[0]).any():
            raise BadBundle(
                f"groups_B must be whole groups of one size; group {int(groups[0])} has {int(counts[0])} responses and "
                f"group {int(groups[_first(counts != counts[0])])} has {int(counts[_first(counts != counts[0])])}"
            )
        numbered_BS = (self.tokens_BS.long() + 1) * self.mask_BS  # 0 on padding alone
        prompts = numbered_BS[:, : self.tokens_BS.shape[1] - self.response_width]
        begins_B = torch.arange(len(self.groups_B)) // int(counts[0]) * int(counts[0])
        if not torch.equal(prompts, prompts[begins_B]):
            row = _first((prompts != prompts[begins_B]).any(-1))
            raise BadBundle(f"groups_B must share a prompt; row {row} has another prompt than its group")
        if self.minibatches_B is None:
            return
        if not torch.equal(self.minibatches_B.unique(), torch.arange(int(self.minibatches_B.max()) + 1)):
            raise BadBundle("minibatches_B must number the mini-batches 0, 1, … without a gap")
        if not torch.equal(self.minibatches_B, self.minibatches_B[begins_B]):
            row = _first(self.minibatches_B != self.minibatches_B[begins_B])
            raise BadBundle(f"minibatches_B must hold whole groups; row {row} is in another mini-batch than its group")

    def _check_routes(self, name: str, routes_LBFK: Tensor) -> None:
        experts = self.about.experts
        if experts is None:
            raise BadBundle(f"{name} needs the number of experts: set experts in the manifest")
        if (routes_LBFK < NO_ROUTE).any() or (routes_LBFK >= experts).any():
            wrong = (routes_LBFK < NO_ROUTE) | (routes_LBFK >= experts)
            raise BadBundle(
                f"{name} must name experts 0 to {experts - 1}, or {NO_ROUTE} for no route; {_place(wrong, 'LBFK')} "
                f"names {int(routes_LBFK[wrong][0])}"
            )
        there_LBFK = routes_LBFK != NO_ROUTE
        partly_LBF = there_LBFK.any(-1) & ~there_LBFK.all(-1)
        if partly_LBF.any():
            raise BadBundle(f"{name} must have all K experts of a token or none; {_place(partly_LBF, 'LBF')} has some")
        fed_BF = self.sequences.route_mask_BF
        unfed_LBF = there_LBFK.any(-1) & ~fed_BF
        if unfed_LBF.any():
            raise BadBundle(
                f"{name} must be {NO_ROUTE} on padding and for the last token of a response, which is never fed; "
                f"{_place(unfed_LBF, 'LBF')} has a route"
            )
        ordered = routes_LBFK.sort(-1).values
        twice_LBF = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_ROUTE)).any(-1)
        if twice_LBF.any():
            raise BadBundle(f"{name} must name K different experts; {_place(twice_LBF, 'LBF')} names one twice")


def sizes_of(shapes: Mapping[str, tuple[int, ...]], response_width: int) -> dict[str, int]:
    """The size of each dimension letter, from the shapes of a bundle's tensors."""
    sizes: dict[str, int] = {}
    for name in ("tokens_BS", "rollout_routes_LBFK", "old_routes_LBFK", "router_log_ratio_LBTK"):
        for letter, size in zip(name.rpartition("_")[2], shapes.get(name, ()), strict=False):
            sizes.setdefault(letter, size)
        if name == "tokens_BS":
            sizes |= {"T": response_width, "F": sizes.get("S", 0) - 1}
    return sizes


def check_sizes(shapes: Mapping[str, tuple[int, ...]], response_width: int) -> None:
    """Raise BadBundle unless tensors of these shapes, by their names, fit together and into ``MOST``."""
    if len(shapes.get("tokens_BS", ())) != 2:
        raise BadBundle("tokens_BS must have two dimensions, (B, S)")
    sizes = sizes_of(shapes, response_width)
    for letter, size in sizes.items():
        if not 1 <= size <= MOST[letter]:
            raise BadBundle(f"the size {letter} must be between 1 and {MOST[letter]}; got {size}")
    if response_width >= sizes["S"]:
        raise BadBundle(f"response_width must leave a place for prompts: below S = {sizes['S']}; got {response_width}")
    for name, shape in shapes.items():
        letters = name.rpartition("_")[2]
        expected = tuple(sizes[letter] for letter in letters) if len(shape) == len(letters) else None
        if shape != expected:
            told = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
            raise BadBundle(f"{name} must have the shape ({', '.join(letters)}) with {told}; got {shape}")


def of_training(
    about: About,
    rollout: Rollout,
    old: OldPolicy,
    responses: int,
    logprobs_BT: Tensor | None = None,
    minibatches_B: Tensor | None = None,
    advantages_BT: Tensor | None = None,
) -> Bundle:
    """The bundle of a rollout of this suite and its old policy; ``responses`` is G, the other tensors as in Bundle."""
    sequences = rollout.sequences
    return Bundle(
        about=about,
        response_width=sequences.response_width,
        tokens_BS=sequences.tokens_BS.cpu(),
        mask_BS=sequences.mask_BS.cpu(),
        groups_B=torch.arange(len(sequences.tokens_BS)) // responses,
        rewards_B=rollout.scores_B.cpu(),
        rollout_logprobs_BT=rollout.logprobs_BT.cpu(),
        old_logprobs_BT=old.logprobs_BT.detach().cpu(),
        rollout_routes_LBFK=None if rollout.routes_LBFK is None else rollout.routes_LBFK.cpu(),
        old_routes_LBFK=None if old.routes_LBFK is None else old.routes_LBFK.cpu(),
        logprobs_BT=None if logprobs_BT is None else logprobs_BT.detach().cpu(),
        minibatches_B=None if minibatches_B is None else minibatches_B.cpu(),
        advantages_BT=None if advantages_BT is None else advantages_BT.cpu(),
    )


def _converted(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` as ``dtype``, on the CPU. Raises BadBundle for another kind of number, or one that does not fit."""
    values = values.detach().cpu()
    if dtype.is_floating_point != values.is_floating_point() or values.is_complex():
        kind = "floating-point numbers" if dtype.is_floating_point else "whole numbers"
        raise BadBundle(f"{name} must hold {kind}; got {values.dtype}")
    made = values.to(dtype)
    if not dtype.is_floating_point and not torch.equal(made.long(), values.long()):
        raise BadBundle(f"{name} must hold whole numbers that fit into {str(dtype).removeprefix('torch.')}")
    return made.contiguous()


def _ends_in_ones(mask_BX: Tensor) -> Tensor:
    """Whether each row is zeros and then at least one 1, (B,) bool."""
    return mask_BX[:, -1] & (mask_BX[:, 1:] >= mask_BX[:, :-1]).all(-1)


def _first(wrong: Tensor) -> int:
    return int(wrong.nonzero()[0, 0])


def _place(wrong: Tensor, letters: str) -> str:
    """The first true place of a mask, in words."""
    names = {"B": "row", "T": "response position", "F": "position", "L": "layer", "K": "place"}
    return ", ".join(f"{names[letter]} {at}" for letter, at in zip(letters, wrong.nonzero()[0].tolist(), strict=True))


def _short(value: object) -> str:
    return repr(value)[:60]

"""Conformance: another trainer's answers to a small bundle, checked line by line (docs/conformance.md).

The folder of conformance holds the weights of a small MoE model, a bundle of rollouts at these weights, and the
expected gradient of the routers. A trainer computes ``ANSWERS`` in fp32 and writes them to one safetensors file.

Shapes: B responses, S positions in all, T response positions, F = S − 1 positions fed, L MoE layers, K experts a token,
E experts, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from steadymoe.bench.bundles import bundle_files
from steadymoe.bench.bundles.bundle import BadBundle, Bundle
from steadymoe.bench.support.findings import Fails, Finding, ask
from steadymoe.models.selection import NO_ROUTE

EXPECTED = "expected.safetensors"
# More padding, left and right, for ``padded_logprobs_BT``.
PADDING = (3, 2)
ANSWERS = {
    "logprobs_BT": "log-probabilities of the response tokens, as the update computes them, before any update",
    "old_logprobs_BT": "the same as the pass for the old policy computes them, at the same weights",
    "routes_LBFK": "the experts that the routers chose in this pass; −1 where nothing is fed",
    "replayed_logprobs_BT": "log-probabilities while these routes are replayed",
    "forced_logprobs_BT": "log-probabilities while the bundle's rollout_routes_LBFK are replayed",
    "padded_logprobs_BT": "log-probabilities with 3 more positions of padding on the left and 2 on the right",
    "router_gradient_LEH": "gradient of −Σ A log π / Σ mask by the routers' weights while old_routes_LBFK are replayed",
}
# The largest absolute difference of log-probabilities in fp32: to another machine's, and to one's own in another order
# of computation. Both are far below what one wrong expert changes here.
_APART, _REORDERED = 1e-3, 1e-5
# The largest norm of a difference of gradients, as a share of the gradient's norm.
_GRADIENT = 1e-2


def check(folder: Path, answers: Path) -> list[Finding]:
    """A line for each property. Raises BadBundle for a folder that is no folder of conformance or a file that is none.

    An answer that is missing, of another shape or not finite fails in the lines that need it.
    """
    bundle = bundle_files.read(folder)
    expected = bundle_files.tensors_of(folder / EXPECTED)
    if "router_gradient_LEH" not in expected:
        raise BadBundle(f"{folder}: {EXPECTED} has no router_gradient_LEH")
    for name in ("old_logprobs_BT", "rollout_logprobs_BT", "advantages_BT", "old_routes_LBFK", "rollout_routes_LBFK"):
        bundle.get(name, "so it is no bundle of conformance")
    if not answers.is_file():
        raise BadBundle(f"there is no file {answers}")
    return list(lines(bundle, expected["router_gradient_LEH"], bundle_files.tensors_of(answers)))


def lines(bundle: Bundle, gradient_LEH: Tensor, answers: Mapping[str, Tensor]) -> Iterator[Finding]:
    """The lines of a trainer's ``answers`` to a bundle and its expected gradient of the routers."""
    asked = _Asked(bundle, gradient_LEH, answers)
    properties: Mapping[str, Callable[[], None]] = {
        "the given weights give the expected log-probabilities": asked.logprobs,
        "the ratio is exactly 1 before any update": asked.ratio,
        "the given weights give the expected routes": asked.routes,
        "the last token of a response, and padding, have no route": asked.last_token,
        "replay of the recorded routes is the identity": asked.identity,
        "other routes that are replayed are run": asked.forced,
        "a token without a route is left to the router": asked.missing,
        "gradients reach the routers under replay": asked.gradients,
        "padding changes nothing": asked.padding,
    }
    return ask(properties)


@dataclass(frozen=True)
class _Asked:
    """What each line compares. A method raises Fails if the property is not there."""

    bundle: Bundle
    gradient_LEH: Tensor
    answers: Mapping[str, Tensor]

    def logprobs(self) -> None:
        self._near("logprobs_BT", self._field("old_logprobs_BT"), _APART)

    def ratio(self) -> None:
        now_BT, old_BT = self._tokens("logprobs_BT"), self._tokens("old_logprobs_BT")
        apart_BT = (now_BT - old_BT).abs()
        if (count := int((apart_BT > 0).sum())) > 0:
            raise Fails(
                f"{count} of {int(self.bundle.mask_BT.sum())} tokens have a log-ratio other than 0, up to "
                f"{float(apart_BT.max()):.1e}: compute the old policy in the same pass, batches and precision"
            )

    def routes(self) -> None:
        fed_BF = self.bundle.sequences.route_mask_BF
        found, expected = (each.sort(-1).values for each in (self._routes(), self._field("old_routes_LBFK")))
        wrong_LBF = (found != expected).any(-1) & fed_BF
        if wrong_LBF.any():
            layer, row, place = wrong_LBF.nonzero()[0].tolist()
            raise Fails(
                f"{int(wrong_LBF.sum())} of {fed_BF.sum() * len(found)} routes differ, first in layer {layer}, "
                f"row {row}, position {place}: {found[layer, row, place].tolist()} in place of "
                f"{expected[layer, row, place].tolist()}"
            )

    def last_token(self) -> None:
        there_BF = (self._routes() != NO_ROUTE).any(-1).any(0)
        unfed_BF = there_BF & ~self.bundle.sequences.route_mask_BF
        if unfed_BF.any():
            row, place = unfed_BF.nonzero()[0].tolist()
            raise Fails(
                f"{int(unfed_BF.sum())} positions have a route and none is due, first row {row}, position {place}"
            )

    def identity(self) -> None:
        self._near("replayed_logprobs_BT", self._tokens("logprobs_BT"), _REORDERED)

    def forced(self) -> None:
        moved_BT = (self._tokens("forced_logprobs_BT") - self._field("old_logprobs_BT")).abs()
        if moved_BT.max() < _APART:
            raise Fails("they change no log-probability: the routers' own choice is run")
        self._near("forced_logprobs_BT", self._field("rollout_logprobs_BT"), _APART, ~self._lacking())

    def missing(self) -> None:
        self._near("forced_logprobs_BT", self._field("rollout_logprobs_BT"), _APART, self._lacking())

    def gradients(self) -> None:
        found = self._answer("router_gradient_LEH", tuple(self.gradient_LEH.shape)).double()
        if not found.isfinite().all():
            raise Fails("router_gradient_LEH is not finite")
        for layer, (given_EH, expected_EH) in enumerate(zip(found, self.gradient_LEH.double(), strict=True)):
            if not given_EH.any():
                raise Fails(f"the router of MoE layer {layer} has no gradient: gate weights must come from live logits")
            apart = float((given_EH - expected_EH).norm() / expected_EH.norm())
            if not apart <= _GRADIENT:
                raise Fails(f"in MoE layer {layer} the gradient is {apart:.1e} of its norm from the expected one")

    def padding(self) -> None:
        self._near("padded_logprobs_BT", self._tokens("logprobs_BT"), _REORDERED)

    def _near(self, name: str, other_BT: Tensor, bound: float, rows_B: Tensor | None = None) -> None:
        """Raise Fails unless an answer is within ``bound`` of ``other_BT`` on all response tokens of some rows."""
        apart_BT = (self._tokens(name) - other_BT).abs() * self.bundle.mask_BT
        apart_BT = apart_BT if rows_B is None else apart_BT * rows_B[:, None]
        if not float(apart_BT.max()) <= bound:
            row, place = divmod(int(apart_BT.argmax()), apart_BT.shape[1])
            raise Fails(
                f"{int((apart_BT > bound).sum())} tokens are further than {bound:.0e} off, most of all row {row}, "
                f"response position {place}, by {float(apart_BT.max()):.1e}"
            )

    def _lacking(self) -> Tensor:
        """Rows in which a token that is fed has no route to be replayed, (B,) bool."""
        there_BF = (self._field("rollout_routes_LBFK") != NO_ROUTE).all(-1).all(0)
        return (self.bundle.sequences.route_mask_BF & ~there_BF).any(-1)

    def _field(self, name: str) -> Tensor:
        return self.bundle.get(name, "so it is no bundle of conformance")

    def _tokens(self, name: str) -> Tensor:
        """An answer on response tokens, 0 on padding."""
        mask_BT = self.bundle.mask_BT.bool()
        found_BT = torch.where(mask_BT, self._answer(name, tuple(mask_BT.shape)), 0.0)
        if not found_BT.is_floating_point() or not found_BT.isfinite().all():
            raise Fails(f"{name} must hold finite floating-point numbers")
        return found_BT

    def _routes(self) -> Tensor:
        found = self._answer("routes_LBFK", tuple(self._field("old_routes_LBFK").shape))
        if found.is_floating_point() or found.is_complex():
            raise Fails(f"routes_LBFK must hold whole numbers; got {found.dtype}")
        return found

    def _answer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self.answers.get(name)
        if found is None:
            raise Fails(f"no answer {name}")
        if tuple(found.shape) != shape:
            raise Fails(f"{name} must have the shape {shape}; got {tuple(found.shape)}")
        return found

"""Conformance: another trainer's answers to a small bundle, checked line by line (docs/bundle.md).

The folder of conformance holds the weights of a small MoE model, a bundle of rollouts at these weights, their routes,
and the expected gradient of the routers. A trainer computes ``ANSWERS`` in fp32, in one safetensors file.

Shapes: B responses, S positions in all, T response positions, F = S − 1 positions fed, L MoE layers, K experts a token,
E experts, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from steadymoe.bench.bundles import bundle as bundles
from steadymoe.bench.bundles.bundle import BadBundle, Bundle
from steadymoe.bench.support.findings import Fails, Finding, ask
from steadymoe.models.selection import NO_ROUTE

BUNDLE, EXPECTED = "bundle.safetensors", "expected.safetensors"
# More padding, left and right, for ``padded_logprobs_BT``.
PADDING = (3, 2)
ANSWERS = {
    "logprobs_BT": "log-probabilities of the response tokens, as the update computes them, before any update",
    "old_logprobs_BT": "the same as the pass for the old policy computes them, at the same weights",
    "routes_LBFK": "the experts that the routers chose in this pass; −1 where nothing is fed",
    "replayed_logprobs_BT": "log-probabilities while these routes are replayed",
    "forced_logprobs_BT": "log-probabilities while rollout_routes_LBFK are replayed",
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
    bundle, expected = bundles.read(folder / BUNDLE), bundles.tensors_of(folder / EXPECTED)
    if set(expected) != {"old_routes_LBFK", "rollout_routes_LBFK", "router_gradient_LEH"}:
        raise BadBundle(f"{folder}: {EXPECTED} does not hold the routes and the gradient of conformance")
    return list(lines(bundle, expected, bundles.tensors_of(answers)))


def lines(bundle: Bundle, expected: Mapping[str, Tensor], answers: Mapping[str, Tensor]) -> Iterator[Finding]:
    """The lines of a trainer's ``answers`` to a bundle and what is expected of its routers. Raises BadBundle."""
    why = "so it is no bundle of conformance"
    expected_BT, other_BT = (bundle.get(f"{name}_logprobs_BT", why) for name in ("old", "rollout"))
    expected_LBFK, other_LBFK = (expected[f"{name}_routes_LBFK"] for name in ("old", "rollout"))
    gradient_LEH = expected["router_gradient_LEH"]
    mask_BT, fed_BF = bundle.mask_BT.bool(), bundle.sequences.route_mask_BF
    lacking_B = (fed_BF & (other_LBFK == NO_ROUTE).any(-1).any(0)).any(-1)

    def answer(name: str, like: Tensor) -> Tensor:
        """An answer, with 0 on the padding of response tokens."""
        found = answers.get(name)
        if found is None:
            raise Fails(f"no answer {name}")
        if found.shape != like.shape or found.is_floating_point() != like.is_floating_point():
            raise Fails(
                f"{name} must be {like.dtype} of the shape {tuple(like.shape)}; got {found.dtype}, {tuple(found.shape)}"
            )
        found = torch.where(mask_BT, found, 0.0) if name.endswith("_BT") else found
        if not found.isfinite().all():
            raise Fails(f"{name} must be finite")
        return found

    def near(name: str, like_BT: Tensor, bound: float, rows_B: Tensor | None = None) -> None:
        apart_BT = (answer(name, expected_BT) - like_BT).abs() * mask_BT
        apart_BT = apart_BT if rows_B is None else apart_BT * rows_B[:, None]
        if not float(apart_BT.max()) <= bound:
            row, place = divmod(int(apart_BT.argmax()), apart_BT.shape[1])
            raise Fails(
                f"{int((apart_BT > bound).sum())} tokens are further than {bound:.0e} off, most of all row {row}, "
                f"response position {place}, by {float(apart_BT.max()):.1e}"
            )

    def ratio() -> None:
        apart_BT = (answer("logprobs_BT", expected_BT) - answer("old_logprobs_BT", expected_BT)).abs()
        if (count := int((apart_BT > 0).sum())) > 0:
            raise Fails(
                f"{count} of {int(mask_BT.sum())} tokens have a log-ratio other than 0, up to "
                f"{float(apart_BT.max()):.1e}: compute the old policy in the same pass, batches and precision"
            )

    def routes() -> None:
        found, wanted = (each.sort(-1).values for each in (answer("routes_LBFK", expected_LBFK), expected_LBFK))
        wrong_LBF = (found != wanted).any(-1) & fed_BF
        if wrong_LBF.any():
            layer, row, place = at = tuple(wrong_LBF.nonzero()[0].tolist())
            raise Fails(
                f"{int(wrong_LBF.sum())} of {fed_BF.sum() * len(found)} routes differ, first in layer {layer}, "
                f"row {row}, position {place}: {found[at].tolist()} in place of {wanted[at].tolist()}"
            )

    def unfed() -> None:
        unfed_BF = (answer("routes_LBFK", expected_LBFK) != NO_ROUTE).any(-1).any(0) & ~fed_BF
        if unfed_BF.any():
            row, place = unfed_BF.nonzero()[0].tolist()
            raise Fails(
                f"{int(unfed_BF.sum())} positions have a route and none is due, first row {row}, position {place}"
            )

    def forced() -> None:
        if (answer("forced_logprobs_BT", expected_BT) - expected_BT).abs().max() < _APART:
            raise Fails("they change no log-probability: the routers' own choice is run")
        near("forced_logprobs_BT", other_BT, _APART, ~lacking_B)

    def gradients() -> None:
        found = answer("router_gradient_LEH", gradient_LEH).double()
        for layer, (given_EH, expected_EH) in enumerate(zip(found, gradient_LEH.double(), strict=True)):
            if not given_EH.any():
                raise Fails(f"the router of MoE layer {layer} has no gradient: gate weights must come from live logits")
            if not (apart := float((given_EH - expected_EH).norm() / expected_EH.norm())) <= _GRADIENT:
                raise Fails(f"in MoE layer {layer} the gradient is {apart:.1e} of its norm from the expected one")

    properties: Mapping[str, Callable[[], None]] = {
        "the given weights give the expected log-probabilities": lambda: near("logprobs_BT", expected_BT, _APART),
        "the ratio is exactly 1 before any update": ratio,
        "the given weights give the expected routes": routes,
        "the last token of a response, and padding, have no route": unfed,
        "replay of the recorded routes is the identity": lambda: near(
            "replayed_logprobs_BT", answer("logprobs_BT", expected_BT), _REORDERED
        ),
        "other routes that are replayed are run": forced,
        "a token without a route is left to the router": lambda: near(
            "forced_logprobs_BT", other_BT, _APART, lacking_B
        ),
        "gradients reach the routers under replay": gradients,
        "padding changes nothing": lambda: near("padded_logprobs_BT", answer("logprobs_BT", expected_BT), _REORDERED),
    }
    return ask(properties)

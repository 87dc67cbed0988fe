"""Conformance: another trainer's tensors for a small MoE model, checked property by property (rollouts.md).

The fixture holds the weights of a small MoE model, rollouts at these weights, their routes, and the expected gradient
of the routers. A trainer computes ``TENSORS`` in fp32, in one safetensors file.

Shapes: B responses, S positions in all, T response positions, F = S − 1 positions fed, L MoE layers, K experts a token,
E experts, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.findings import CheckFailed, Finding, ask
from steadymoe.bench.training.forward import Sequences
from steadymoe.models.selection import NO_ROUTE

ROLLOUTS, EXPECTED = "bundle.safetensors", "expected.safetensors"
# More padding, left and right, for ``padded_logprobs_BT``.
PADDING = (3, 2)
TENSORS = {
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
_MAX_BYTES = 2**28


def check(folder: Path, answers: Path) -> list[Finding]:
    """Check a trainer's tensors against the fixture. Raises UserError for a wrong folder or a damaged file.

    A tensor that is missing, of another shape or not finite fails the properties that need it.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name that of the conformance fixture with --fixture")
    theirs, expected = read(answers), read(folder / ROLLOUTS) | read(folder / EXPECTED)
    try:
        return list(findings(sequences(expected), expected, theirs))
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"{folder} is not the conformance fixture: {error}") from error


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError."""
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise UserError(f"there is no file {path}, or it has more than {_MAX_BYTES} bytes")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a valid safetensors file: {' '.join(str(error).split())[:200]}") from error


def sequences(expected: Mapping[str, Tensor]) -> Sequences:
    """Return the fixture's tokens as a training forward takes them."""
    width = expected["old_logprobs_BT"].shape[1]
    return Sequences(expected["tokens_BS"].long(), expected["mask_BS"].long(), width)


def findings(given: Sequences, expected: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Check the tensors ``theirs`` of a trainer property by property; ``expected`` are the fixture's.

    Raises KeyError if ``expected`` lacks a tensor.
    """
    expected_BT, other_BT = (expected[f"{name}_logprobs_BT"] for name in ("old", "rollout"))
    expected_LBFK, other_LBFK = (expected[f"{name}_routes_LBFK"] for name in ("old", "rollout"))
    gradient_LEH = expected["router_gradient_LEH"]
    mask_BT, fed_BF = given.response_mask_BT.bool(), given.route_mask_BF
    lacking_B = (fed_BF & (other_LBFK == NO_ROUTE).any(-1).any(0)).any(-1)

    def tensor(name: str, like: Tensor) -> Tensor:
        """Return a tensor of theirs, with 0 on the padding of responses."""
        values = theirs.get(name)
        if values is None:
            raise CheckFailed(f"no tensor {name}")
        if values.shape != like.shape or values.is_floating_point() != like.is_floating_point():
            wanted, got = (f"{each.dtype} of the shape {tuple(each.shape)}" for each in (like, values))
            raise CheckFailed(f"{name} must be {wanted}; got {got}")
        values = torch.where(mask_BT, values, 0.0) if name.endswith("_BT") else values
        if not values.isfinite().all():
            raise CheckFailed(f"{name} must be finite")
        return values

    def near(name: str, like_BT: Tensor, bound: float, rows_B: Tensor | None = None) -> None:
        apart_BT = (tensor(name, expected_BT) - like_BT).abs() * mask_BT
        apart_BT = apart_BT if rows_B is None else apart_BT * rows_B[:, None]
        if not float(apart_BT.max()) <= bound:
            row, place = divmod(int(apart_BT.argmax()), apart_BT.shape[1])
            raise CheckFailed(
                f"{int((apart_BT > bound).sum())} tokens differ by more than {bound:.0e}, most of all row {row}, "
                f"response position {place}, by {float(apart_BT.max()):.1e}"
            )

    def ratio() -> None:
        apart_BT = (tensor("logprobs_BT", expected_BT) - tensor("old_logprobs_BT", expected_BT)).abs()
        if (count := int((apart_BT > 0).sum())) > 0:
            raise CheckFailed(
                f"{count} of {int(mask_BT.sum())} tokens have a log-ratio other than 0, up to "
                f"{float(apart_BT.max()):.1e}: compute the old policy in the same pass, batches and precision"
            )

    def routes() -> None:
        chosen, wanted = (each.sort(-1).values for each in (tensor("routes_LBFK", expected_LBFK), expected_LBFK))
        wrong_LBF = (chosen != wanted).any(-1) & fed_BF
        if wrong_LBF.any():
            layer, row, place = at = tuple(wrong_LBF.nonzero()[0].tolist())
            raise CheckFailed(
                f"{int(wrong_LBF.sum())} of {fed_BF.sum() * len(chosen)} routes differ, first in layer {layer}, "
                f"row {row}, position {place}: {chosen[at].tolist()} instead of {wanted[at].tolist()}"
            )

    def unfed() -> None:
        unfed_BF = (tensor("routes_LBFK", expected_LBFK) != NO_ROUTE).any(-1).any(0) & ~fed_BF
        if unfed_BF.any():
            row, place = unfed_BF.nonzero()[0].tolist()
            raise CheckFailed(
                f"{int(unfed_BF.sum())} positions that are not fed have a route, first row {row}, {place}"
            )

    def forced() -> None:
        if (tensor("forced_logprobs_BT", expected_BT) - expected_BT).abs().max() < _APART:
            raise CheckFailed("log-probabilities do not change, so the routers still choose for themselves")
        near("forced_logprobs_BT", other_BT, _APART, ~lacking_B)

    def gradients() -> None:
        theirs_LEH = tensor("router_gradient_LEH", gradient_LEH).double()
        for layer, (given_EH, expected_EH) in enumerate(zip(theirs_LEH, gradient_LEH.double(), strict=True)):
            if not given_EH.any():
                raise CheckFailed(
                    f"the router of MoE layer {layer} has no gradient: gate weights must come from live logits"
                )
            if not (apart := float((given_EH - expected_EH).norm() / expected_EH.norm())) <= _GRADIENT:
                raise CheckFailed(f"in MoE layer {layer} the gradient is {apart:.1e} of its norm from the expected one")

    def own() -> Tensor:
        return tensor("logprobs_BT", expected_BT)

    properties: Mapping[str, Callable[[], None]] = {
        "the given weights give the expected log-probabilities": lambda: near("logprobs_BT", expected_BT, _APART),
        "the ratio is exactly 1 before any update": ratio,
        "the given weights give the expected routes": routes,
        "the last token of a response, and padding, have no route": unfed,
        "replay of the recorded routes is the identity": lambda: near("replayed_logprobs_BT", own(), _REORDERED),
        "replaying other routes runs those experts": forced,
        "a token without a route is left to the router": lambda: near(
            "forced_logprobs_BT", other_BT, _APART, lacking_B
        ),
        "gradients reach the routers under replay": gradients,
        "padding changes nothing": lambda: near("padded_logprobs_BT", own(), _REORDERED),
    }
    return ask(properties)

"""Conformance: the suite's own tensors pass, and a trainer with a known fault fails the property of that fault."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance_fixture
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_bundles import steadymoe_integrations
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from steadymoe.bench.training import packing
from steadymoe.bench.training.forward import Sequences, forward
from steadymoe.integrations.rollouts import conformance
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE

FIXTURE = Path(__file__).parents[2] / "results" / "reference" / "conformance"
Tensors = dict[str, Tensor]
GIVEN = load_file(FIXTURE / conformance.ROLLOUTS) | load_file(FIXTURE / conformance.EXPECTED)
WIDTH = GIVEN["old_logprobs_BT"].shape[1]
SEQUENCES = conformance.sequences(GIVEN)
RATIO = "the ratio is exactly 1 before any update"
IDENTITY = "replay of the recorded routes is the identity"
FORCED = "replaying other routes runs those experts"
MISSING = "a token without a route is left to the router"
LAST = "the last token of a response, and padding, have no route"
GRADIENT = "gradients reach the routers under replay"
PADDING = "padding changes nothing"
LOGPROBS = "the given weights give the expected log-probabilities"


@pytest.fixture
def model() -> PreTrainedModel:
    """The committed weights, as another trainer would load them."""
    return AutoModelForCausalLM.from_pretrained(FIXTURE / "model")


@pytest.fixture(scope="module")
def ours() -> Tensors:
    torch.set_num_threads(1)
    return conformance_fixture.tensors(AutoModelForCausalLM.from_pretrained(FIXTURE / "model"), SEQUENCES, GIVEN)


def failing(theirs: Tensors) -> dict[str, str]:
    findings = conformance.findings(SEQUENCES, GIVEN, theirs)
    return {finding.name: finding.sentence for finding in findings if not finding.passed}


def test_the_suites_own_tensors_pass(ours: Tensors) -> None:
    assert ours.keys() == conformance.TENSORS.keys()
    assert failing(ours) == {}


def test_the_committed_fixture_is_what_its_script_writes(tmp_path: Path) -> None:
    conformance_fixture.write(tmp_path / "made")
    for name in (conformance.ROLLOUTS, conformance.EXPECTED):
        one, other = (conformance.read(folder / name) for folder in (tmp_path / "made", FIXTURE))
        # Another kind of processor draws weights that differ in their last bits.
        assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert sum(path.stat().st_size for path in FIXTURE.rglob("*")) < 2**20


# --- known faults ------------------------------------------------------------------------------------


def logprobs(model: PreTrainedModel, forced_LBFK: Tensor | None = None, precision: str = "fp32") -> Tensor:
    with torch.no_grad():
        return forward(model, SEQUENCES, precision, forced_LBFK=forced_LBFK).logprobs_BT


def old_in_bf16(model: PreTrainedModel) -> Tensors:
    return {"old_logprobs_BT": logprobs(model, precision="bf16")}


def shifted_by_one_token(model: PreTrainedModel) -> Tensors:
    """As a trainer that takes the log-probability of the token before."""
    shifted = {name: logprobs(model).roll(1, -1) for name in ("logprobs_BT", "old_logprobs_BT", "padded_logprobs_BT")}
    return shifted | {"replayed_logprobs_BT": shifted["logprobs_BT"]}


def replay_shifted_by_one(model: PreTrainedModel) -> Tensors:
    """As a trainer that gives the route of position f to position f + 1."""
    routes = {"replayed": GIVEN["old_routes_LBFK"], "forced": GIVEN["rollout_routes_LBFK"]}
    return {f"{name}_logprobs_BT": logprobs(model, values.roll(1, 2)) for name, values in routes.items()}


def replay_ignored(model: PreTrainedModel) -> Tensors:
    return {"forced_logprobs_BT": logprobs(model)}


def missing_route_as_expert_0(model: PreTrainedModel) -> Tensors:
    first, routes = torch.tensor([0, 1], dtype=torch.int16), GIVEN["rollout_routes_LBFK"]
    return {"forced_logprobs_BT": logprobs(model, torch.where(routes == NO_ROUTE, first, routes))}


def routes_of_padding(model: PreTrainedModel) -> Tensors:
    """As a trainer that feeds the whole rectangle, the last token too, and keeps every route."""
    return {"routes_LBFK": GIVEN["old_routes_LBFK"].clamp(min=0)}


def gate_weights_detached(model: PreTrainedModel) -> Tensors:
    """As a trainer whose replay takes recorded gate weights instead of live ones."""
    for router in routers(model):
        plain = router.forward

        def detached(*arguments: Any, plain: Callable[..., Any] = plain) -> Any:
            logits, weights, indices = plain(*arguments)
            return logits, weights.detach(), indices

        router.forward = detached
    gradient_LEH = conformance_fixture.router_gradient(model, SEQUENCES, GIVEN, GIVEN["old_routes_LBFK"])
    return {"router_gradient_LEH": gradient_LEH}


def padding_attended(model: PreTrainedModel) -> Tensors:
    """As a trainer that drops the attention mask."""
    tokens, mask = (pad(values, conformance.PADDING) for values in (SEQUENCES.tokens_BS, SEQUENCES.mask_BS))
    wider = Sequences(tokens, mask, WIDTH + conformance.PADDING[1])
    layout = packing.separate(tokens, mask, wider.response_width)
    with torch.no_grad():
        wrong = forward(model, wider, "fp32", layout=replace(layout, mask=torch.ones_like(layout.mask)))
    return {"padded_logprobs_BT": wrong.logprobs_BT[:, :WIDTH]}


FAULTS: dict[str, tuple[Callable[[PreTrainedModel], Tensors], dict[str, str]]] = {
    "old policy in bf16": (old_in_bf16, {RATIO: "of 44 tokens"}),
    "tokens shifted": (shifted_by_one_token, {LOGPROBS: "most of all row"}),
    "replay shifted": (replay_shifted_by_one, {IDENTITY: "most of all row", FORCED: "", MISSING: "row"}),
    "replay ignored": (replay_ignored, {FORCED: "the routers still choose", MISSING: ""}),
    "missing route as expert 0": (missing_route_as_expert_0, {MISSING: ""}),
    "routes of padding": (routes_of_padding, {LAST: "positions"}),
    "gate weights detached": (gate_weights_detached, {GRADIENT: "MoE layer 0 has no gradient"}),
    "padding attended": (padding_attended, {PADDING: "1e-05"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_exactly_one_property(model: PreTrainedModel, ours: Tensors, fault: str) -> None:
    change, expected = FAULTS[fault]
    failed = failing(ours | change(model))
    assert failed.keys() == expected.keys()
    for name, key in expected.items():
        assert key in failed[name]
        assert "\n" not in failed[name]


def test_differing_route_is_named(ours: Tensors) -> None:
    assert failing(ours | {"routes_LBFK": ours["routes_LBFK"].flip(-1)}) == {}  # the order of the K experts
    (sentence,) = failing(ours | {"routes_LBFK": GIVEN["rollout_routes_LBFK"]}).values()
    assert "layer 0, row 0" in sentence


@pytest.mark.parametrize("name", conformance.TENSORS)
def test_missing_or_non_finite_tensor_fails_only_its_properties(ours: Tensors, name: str) -> None:
    missing = failing({key: values for key, values in ours.items() if key != name})
    assert missing
    assert all(name in sentence for sentence in missing.values())
    assert failing(ours | {name: ours[name][:-1]}).keys() == missing.keys()
    is_float = ours[name].is_floating_point()
    wrong = torch.full_like(ours[name], torch.nan) if is_float else ours[name].float()
    assert failing(ours | {name: wrong}).keys() == missing.keys()


def test_the_command_prints_a_line_per_property(
    ours: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, fixture: Path = FIXTURE) -> int:
        return steadymoe_integrations(monkeypatch, "conformance", str(tmp_path / name), "--fixture", str(fixture))

    save_file({name: values.contiguous() for name, values in ours.items()}, tmp_path / "good.safetensors")
    save_file({"logprobs_BT": ours["logprobs_BT"]}, tmp_path / "bad.safetensors")
    (tmp_path / "none.safetensors").write_text("x")
    assert run("good.safetensors") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines] == ["passes"] * 9
    assert run("bad.safetensors") == 1
    assert capsys.readouterr().out.count("FAILS") == 8
    other = tmp_path / "other"
    other.mkdir()
    for name in (conformance.ROLLOUTS, conformance.EXPECTED):
        save_file({"logprobs_BT": torch.zeros(1)}, other / name)
    for name, fixture in (
        ("none.safetensors", FIXTURE),
        ("nothing.safetensors", FIXTURE),
        ("good.safetensors", tmp_path),
        ("good.safetensors", other),
    ):
        assert run(name, fixture) == 2
        assert capsys.readouterr().err.count("\n") == 1

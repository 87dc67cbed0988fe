"""Conformance: the suite's own answers pass, and a trainer with a known fault fails in the line of that fault."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance_fixture
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import steadymoe
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from steadymoe.bench.bundles import bundle as bundles
from steadymoe.bench.bundles import conformance
from steadymoe.bench.bundles.bundle import BadBundle, Bundle
from steadymoe.bench.training import packing
from steadymoe.bench.training.forward import Sequences, forward
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "reference" / "conformance"
Answers = dict[str, Tensor]
EXPECTED = load_file(FOLDER / conformance.EXPECTED)


@pytest.fixture
def given() -> tuple[PreTrainedModel, Bundle]:
    """The committed weights, as another trainer would load them, and the committed bundle."""
    return AutoModelForCausalLM.from_pretrained(FOLDER / "model"), bundles.read(FOLDER / conformance.BUNDLE)


def failing(bundle: Bundle, answers: Answers) -> dict[str, str]:
    return {each.name: each.sentence for each in conformance.lines(bundle, EXPECTED, answers) if not each.passed}


def test_the_suites_own_answers_pass_every_line(given: tuple[PreTrainedModel, Bundle]) -> None:
    model, bundle = given
    answers = conformance_fixture.answers(model, bundle, EXPECTED)
    assert answers.keys() == conformance.ANSWERS.keys()
    assert failing(bundle, answers) == {}


def test_the_committed_folder_is_what_its_command_makes(tmp_path: Path) -> None:
    conformance_fixture.write(tmp_path / "made")
    one, other = (bundles.read(folder / conformance.BUNDLE) for folder in (tmp_path / "made", FOLDER))
    # Another kind of processor draws weights that differ in their last bits.
    assert (one.about, one.tensors.keys()) == (other.about, other.tensors.keys())
    for name, values in one.tensors.items():
        assert_close(values, other.tensors[name], rtol=0, atol=1e-5, msg=name)
    assert_close(load_file(tmp_path / "made" / conformance.EXPECTED), EXPECTED, rtol=1e-4, atol=1e-6)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 2**20
    with pytest.raises(FileExistsError):
        conformance_fixture.write(tmp_path / "made")


# --- trainers with a fault ---------------------------------------------------------------------------

RATIO = "the ratio is exactly 1 before any update"
IDENTITY = "replay of the recorded routes is the identity"
FORCED = "other routes that are replayed are run"
MISSING = "a token without a route is left to the router"
LAST = "the last token of a response, and padding, have no route"
GRADIENT = "gradients reach the routers under replay"
PADDING = "padding changes nothing"


def logprobs(model: PreTrainedModel, bundle: Bundle, forced_LBFK: Tensor | None = None, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return forward(model, bundle.sequences, kwargs.pop("precision", "fp32"), forced_LBFK=forced_LBFK).logprobs_BT


def old_in_bf16(model: PreTrainedModel, bundle: Bundle) -> Answers:
    return {"old_logprobs_BT": logprobs(model, bundle, precision="bf16")}


def replay_shifted_by_one(model: PreTrainedModel, bundle: Bundle) -> Answers:
    """As a trainer that gives the route of position f to position f + 1."""
    routes = {"replayed": EXPECTED["old_routes_LBFK"], "forced": EXPECTED["rollout_routes_LBFK"]}
    return {f"{name}_logprobs_BT": logprobs(model, bundle, values.roll(1, 2)) for name, values in routes.items()}


def replay_ignored(model: PreTrainedModel, bundle: Bundle) -> Answers:
    return {"forced_logprobs_BT": logprobs(model, bundle)}


def missing_route_as_expert_0(model: PreTrainedModel, bundle: Bundle) -> Answers:
    """As a trainer that fills routes that are not there with zeros."""
    first = torch.tensor([0, 1], dtype=torch.int16)
    filled = torch.where(EXPECTED["rollout_routes_LBFK"] == NO_ROUTE, first, EXPECTED["rollout_routes_LBFK"])
    return {"forced_logprobs_BT": logprobs(model, bundle, filled)}


def routes_of_padding(model: PreTrainedModel, bundle: Bundle) -> Answers:
    """As a trainer that feeds the whole rectangle, the last token too, and keeps every route."""
    return {"routes_LBFK": EXPECTED["old_routes_LBFK"].clamp(min=0)}


def gate_weights_detached(model: PreTrainedModel, bundle: Bundle) -> Answers:
    """As a trainer whose replay takes recorded gate weights in place of live ones."""
    for router in routers(model):
        plain = router.forward

        def detached(*arguments: Any, plain: Callable[..., Any] = plain) -> Any:
            logits, weights, indices = plain(*arguments)
            return logits, weights.detach(), indices

        router.forward = detached
    return {"router_gradient_LEH": conformance_fixture.router_gradient(model, bundle, EXPECTED["old_routes_LBFK"])}


def padding_attended(model: PreTrainedModel, bundle: Bundle) -> Answers:
    """As a trainer that drops the attention mask."""
    tokens, mask = (pad(each, conformance.PADDING) for each in (bundle.sequences.tokens_BS, bundle.sequences.mask_BS))
    wider = Sequences(tokens, mask, bundle.response_width + conformance.PADDING[1])
    layout = packing.separate(tokens, mask, wider.response_width)
    with torch.no_grad():
        found = forward(model, wider, "fp32", layout=replace(layout, mask=torch.ones_like(layout.mask)))
    return {"padded_logprobs_BT": found.logprobs_BT[:, : bundle.response_width]}


FAULTS: dict[str, tuple[Callable[[PreTrainedModel, Bundle], Answers], dict[str, str]]] = {
    "old policy in bf16": (old_in_bf16, {RATIO: "of 44 tokens have a log-ratio other than 0"}),
    "replay shifted": (replay_shifted_by_one, {IDENTITY: "most of all row", FORCED: "further", MISSING: "row"}),
    "replay ignored": (replay_ignored, {FORCED: "the routers' own choice is run", MISSING: "further than"}),
    "missing route as expert 0": (missing_route_as_expert_0, {MISSING: "further than"}),
    "routes of padding": (routes_of_padding, {LAST: "positions have a route and none is due"}),
    "gate weights detached": (gate_weights_detached, {GRADIENT: "the router of MoE layer 0 has no gradient"}),
    "padding attended": (padding_attended, {PADDING: "further than 1e-05 off"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_in_its_own_line_and_in_no_other(given: tuple[PreTrainedModel, Bundle], fault: str) -> None:
    model, bundle = given
    answers = conformance_fixture.answers(model, bundle, EXPECTED)
    change, expected = FAULTS[fault]
    found = failing(bundle, answers | change(model, bundle))
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert words in found[name]
        assert "\n" not in found[name]


def test_a_route_that_differs_is_named(given: tuple[PreTrainedModel, Bundle]) -> None:
    model, bundle = given
    answers = conformance_fixture.answers(model, bundle, EXPECTED)
    swapped = answers | {"routes_LBFK": answers["routes_LBFK"].flip(-1)}
    assert failing(bundle, swapped) == {}  # the order of the K experts means nothing
    (told,) = failing(bundle, answers | {"routes_LBFK": EXPECTED["rollout_routes_LBFK"]}).values()
    assert "routes differ, first in layer 0, row 0" in told


@pytest.mark.parametrize("name", conformance.ANSWERS)
def test_an_answer_that_is_missing_or_no_numbers_fails_in_the_lines_that_need_it(
    given: tuple[PreTrainedModel, Bundle], name: str
) -> None:
    model, bundle = given
    answers = conformance_fixture.answers(model, bundle, EXPECTED)
    missing = failing(bundle, {key: values for key, values in answers.items() if key != name})
    assert missing
    assert set(missing.values()) == {f"no answer {name}"}
    wrong = failing(bundle, answers | {name: answers[name][:-1]})
    assert wrong.keys() == missing.keys()
    if answers[name].is_floating_point():
        lost = failing(bundle, answers | {name: torch.full_like(answers[name], torch.nan)})
        assert lost.keys() == missing.keys()
    else:
        assert failing(bundle, answers | {name: answers[name].float()}).keys() == missing.keys()


# --- the command and the page ------------------------------------------------------------------------


def test_the_command_says_a_line_for_each_property(
    given: tuple[PreTrainedModel, Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = conformance_fixture.answers(*given, EXPECTED)
    save_file({name: values.contiguous() for name, values in answers.items()}, tmp_path / "good.safetensors")
    save_file({"logprobs_BT": answers["logprobs_BT"]}, tmp_path / "bad.safetensors")
    (tmp_path / "none.safetensors").write_text("x")
    assert steadymoe(monkeypatch, "bundle", "conform", str(FOLDER), str(tmp_path / "good.safetensors")) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 9
    assert all(line.startswith("passes  ") for line in said)
    assert steadymoe(monkeypatch, "bundle", "conform", str(FOLDER), str(tmp_path / "bad.safetensors")) == 1
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("FAILS   ") for line in said) == 8
    for name in ("none.safetensors", "nothing.safetensors"):
        assert steadymoe(monkeypatch, "bundle", "conform", str(FOLDER), str(tmp_path / name)) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_not_the_one_of_conformance_is_refused(
    given: tuple[PreTrainedModel, Bundle], tmp_path: Path
) -> None:
    folder, answers = tmp_path / "other", tmp_path / "answers.safetensors"
    folder.mkdir()
    bundles.write(replace(given[1], old_logprobs_BT=None), folder / conformance.BUNDLE)
    save_file({"logprobs_BT": torch.zeros(1)}, answers)
    with pytest.raises(BadBundle, match=r"there is no file expected\.safetensors"):
        conformance.check(folder, answers)
    save_file({"router_gradient_LEH": torch.zeros(1)}, folder / conformance.EXPECTED)
    with pytest.raises(BadBundle, match="does not hold the routes and the gradient"):
        conformance.check(folder, answers)
    shutil.copy(FOLDER / conformance.EXPECTED, folder)
    with pytest.raises(BadBundle, match="has no old_logprobs_BT, so it is no bundle of conformance"):
        conformance.check(folder, answers)


def test_the_page_names_every_answer_and_every_line(given: tuple[PreTrainedModel, Bundle]) -> None:
    page = " ".join((ROOT / "docs" / "bundle.md").read_text().split())
    for name, told in conformance.ANSWERS.items():
        assert f"| `{name}` | {told} |" in page
    assert len(failing(given[1], {})) == 9
    for name in failing(given[1], {}):
        assert f"| {name} |" in page

"""The losses against closed forms in value and gradient, and against each other in cases where their formulas agree.

Shapes: B responses, T response positions, P prompts, G responses to each.
"""

import ast
import dataclasses
import importlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from steadymoe import algorithms
from steadymoe.algorithms import Batch, LossOutput, ops
from steadymoe.algorithms.advantages import GroupMeanStd
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.gspo import GSPO
from steadymoe.algorithms.reinforce import Reinforce

ROOT = Path(__file__).parents[2]
Loss = Callable[[Batch], LossOutput]
Row = tuple[list[float], float]  # the log-ratios of a response's tokens, and its advantage
LOSSES = [Reinforce(), GRPO(), GSPO(), GSPO(scale_band_with_length=True), GSPO(clip_low=0.2, clip_high=0.2)]
NAN, INF = math.nan, math.inf
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=repr)


def make(
    rows: list[Row], dtype: torch.dtype = torch.float64, spare: int = 0, garbage: float = 0.0
) -> dict[str, Tensor]:
    """The tensors of a ragged batch; its old log-probabilities are 0, so that a ratio is exactly exp(log-ratio)."""
    width = max(len(xs) for xs, _ in rows) + spare
    mask_BT = torch.tensor([[1] * len(xs) + [0] * (width - len(xs)) for xs, _ in rows])
    logprobs_BT = torch.tensor([xs + [garbage] * (width - len(xs)) for xs, _ in rows], dtype=dtype)
    old_BT = torch.where(mask_BT.bool(), 0.0, garbage).to(dtype)
    return {
        "logprobs_BT": logprobs_BT.requires_grad_(),
        "old_logprobs_BT": old_BT,
        "rollout_logprobs_BT": torch.full_like(old_BT, NAN),  # no loss here reads them
        "mask_BT": mask_BT,
        "advantages_BT": torch.tensor([[advantage] * width for _, advantage in rows], dtype=dtype),
    }


def random_rows(seed: int, lengths: tuple[int, ...] = (5, 1, 3, 2, 4, 3), noise: float = 0.3) -> list[Row]:
    draw = torch.Generator().manual_seed(seed)
    noises = [(noise * torch.randn(n, generator=draw)).tolist() for n in lengths]
    return list(zip(noises, torch.randn(len(lengths), generator=draw).tolist(), strict=True))


def run(loss: Loss, batch: dict[str, Tensor]) -> tuple[LossOutput, Tensor]:
    """The output of a loss on a batch, and the gradient with respect to the batch's log-probabilities."""
    output = loss(Batch(**batch))
    return output, torch.autograd.grad(output.loss, batch["logprobs_BT"])[0]


def log(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def padded(rows: list[list[float]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.float64)


# --- closed forms ------------------------------------------------------------------------------------


def test_reinforce_closed_form() -> None:
    output, gradient_BT = run(Reinforce(), make([([-1.0, -2.0], 3.0), ([-0.5], -1.0)]))
    assert output.loss.item() == pytest.approx(-(3 * -1.5 + -1 * -0.5) / 2)
    assert_close(gradient_BT, padded([[-3 / 4, -3 / 4], [1 / 2]]))
    assert output.metrics == {}


def test_grpo_closed_form_inside_outside_and_on_the_edge() -> None:
    rows = [(log(2, 1.5, 0.5), 2.0), (log(0.5, 0.75, 1), -1.0), (log(3), -1.0)]
    output, gradient_BT = run(GRPO(clip_low=0.25, clip_high=0.5), make(rows))
    assert output.loss.item() == pytest.approx(-((3 + 3 + 1) / 3 - (0.75 + 0.75 + 1) / 3 - 3) / 3)
    assert_close(gradient_BT, padded([[0, -3 / 9, -1 / 9], [0, 0.75 / 9, 1 / 9], [3 / 3]]))
    assert output.metrics["clipped_high_BT"].tolist() == [[True, False, False], [False] * 3, [False] * 3]
    assert output.metrics["clipped_low_BT"].tolist() == [[False] * 3, [True, False, False], [False] * 3]


def test_gspo_closed_form_inside_outside_and_on_the_edge() -> None:
    rows = [
        (log(4, 1), 2.0),  # s = 2, above
        (log(0.25, 1), -1.0),  # s = 1/2, below
        (log(0.5, 0.5, 0.5), 1.0),  # below, but A > 0: passes
        (log(0.75), -1.0),  # on the lower edge
        (log(1.5), 2.0),  # on the upper edge
    ]
    output, gradient_BT = run(GSPO(clip_low=0.25, clip_high=0.5), make(rows))
    assert output.loss.item() == pytest.approx(-(3 - 0.75 + 0.5 - 0.75 + 3) / 5)
    assert_close(gradient_BT, padded([[0, 0], [0, 0], [-0.5 / 15] * 3, [0.75 / 5], [-3 / 5]]))
    high_BT, low_BT = output.metrics["clipped_high_BT"], output.metrics["clipped_low_BT"]
    # All tokens of a clipped response, and no padding.
    assert high_BT.tolist() == [[True, True, False]] + [[False] * 3] * 4
    assert low_BT.tolist() == [[False] * 3, [True, True, False]] + [[False] * 3] * 3


def outcome(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """The clipped surrogate and its slope in the log-ratio, by cases and without a min."""
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, 0.0
    return ratio * advantage, ratio * advantage


ROW = st.tuples(st.lists(st.floats(-1, 1), min_size=1, max_size=4), st.floats(-2, 2))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4), band=st.sampled_from([(0.25, 0.5), (2.0**-11, 2.0**-10)]))
def test_grpo_and_gspo_equal_plain_python(rows: list[Row], band: tuple[float, float]) -> None:
    token = [[outcome(math.exp(x), advantage, *band) for x in xs] for xs, advantage in rows]
    whole = [outcome(math.exp(math.fsum(xs) / len(xs)), advantage, *band) for xs, advantage in rows]
    sequence = [[pair] * len(xs) for pair, (xs, _) in zip(whole, rows, strict=True)]
    for loss, cells in (
        (GRPO(clip_low=band[0], clip_high=band[1]), token),
        (GSPO(clip_low=band[0], clip_high=band[1]), sequence),
    ):
        value = -sum(sum(value for value, _ in row) / len(row) for row in cells) / len(cells)
        gradient = padded([[-slope / len(row) / len(cells) for _, slope in row] for row in cells])
        output, gradient_BT = run(loss, make(rows))
        assert output.loss.item() == pytest.approx(value, abs=1e-12)
        assert_close(gradient_BT, gradient, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.27), (3e-4, 4e-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mark_is_a_zero_gradient_to_the_last_bit(dtype: torch.dtype, low: float, high: float) -> None:
    edges = torch.tensor([1 - low, 1 + high], dtype=dtype)
    around = [torch.nextafter(edges, torch.full_like(edges, to)) for to in (0, 2)]
    ratio = torch.cat([edges, *around]).repeat(2).requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=dtype).repeat_interleave(6)
    made = ops.clipped_surrogate(ratio, advantages, low, high)
    assert made.clipped_low_BT is not None
    assert made.clipped_high_BT is not None
    (slope,) = torch.autograd.grad(made.values_BT.sum(), ratio)
    assert (made.clipped_low_BT.sum(), made.clipped_high_BT.sum()) == (1, 1)
    assert_close(slope, torch.where(made.clipped_low_BT | made.clipped_high_BT, 0, advantages))


# --- relations ---------------------------------------------------------------------------------------


def test_gspo_is_grpo_for_responses_of_one_token() -> None:
    batch = make(random_rows(0, lengths=(1,) * 40))
    (grpo, grpo_BT), (gspo, gspo_BT) = (
        run(GRPO(clip_low=0.1, clip_high=0.2), batch),
        run(GSPO(clip_low=0.1, clip_high=0.2), batch),
    )
    assert grpo.metrics["clipped_low_BT"].any()
    assert grpo.metrics["clipped_high_BT"].any()
    assert_close(gspo.loss, grpo.loss)
    assert_close(gspo_BT, grpo_BT)
    assert_close(gspo.metrics, grpo.metrics)


@each_loss
def test_all_have_one_gradient_at_the_old_policy(loss: Loss) -> None:
    lengths, advantages = (3, 1, 2), (1.5, -1.0, 0.5)
    batch = make([([0.0] * n, advantage) for n, advantage in zip(lengths, advantages, strict=True)])
    expected = padded([[-a / n / 3] * n for n, a in zip(lengths, advantages, strict=True)])
    assert_close(run(loss, batch)[1], expected)


@each_loss
def test_zero_advantage_has_zero_gradient(loss: Loss) -> None:
    rows = random_rows(1)
    rows[0] = (rows[0][0], 0.0)
    assert (run(loss, make(rows))[1][0] == 0).all()
    assert (run(loss, make([(xs, 0.0) for xs, _ in rows]))[1] == 0).all()


@each_loss
@pytest.mark.parametrize("garbage", [0.0, -7.0, NAN, INF, -INF])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31), spare=st.integers(0, 6))
def test_padding_changes_nothing(loss: Loss, garbage: float, seed: int, spare: int) -> None:
    rows = random_rows(seed)
    output, gradient_BT = run(loss, make(rows, torch.float32))
    wide, wide_BT = run(loss, make(rows, torch.float32, spare, garbage))
    width = gradient_BT.shape[1]
    assert_close(wide.loss, output.loss, atol=1e-5, rtol=0)
    assert_close(wide_BT[:, :width], gradient_BT, atol=1e-5, rtol=0)
    assert (wide_BT[make(rows, spare=spare)["mask_BT"] == 0] == 0).all()
    for name, marks_BT in output.metrics.items():
        assert (wide.metrics[name][:, :width] == marks_BT).all()
        assert not wide.metrics[name][:, width:].any()


@each_loss
@pytest.mark.parametrize("garbage", [9.0, NAN])
def test_advantages_on_padding_change_nothing(loss: Loss, garbage: float) -> None:
    clean = make(random_rows(2))
    dirty = clean | {"advantages_BT": torch.where(clean["mask_BT"].bool(), clean["advantages_BT"], garbage)}
    (output, gradient_BT), (other, other_BT) = run(loss, clean), run(loss, dirty)
    assert (other.loss, other.metrics.keys()) == (output.loss, output.metrics.keys())
    assert_close(other_BT, gradient_BT, atol=0, rtol=0)


@each_loss
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(6)))
def test_the_order_of_the_batch_changes_nothing(loss: Loss, seed: int, order: list[int]) -> None:
    rows = random_rows(seed)
    output, gradient_BT = run(loss, make(rows, torch.float32))
    permuted, permuted_BT = run(loss, make([rows[i] for i in order], torch.float32))
    assert_close(permuted.loss, output.loss, atol=1e-5, rtol=0)
    assert_close(permuted_BT, gradient_BT[order], atol=1e-5, rtol=0)
    assert_close(permuted.metrics, {name: marks_BT[order] for name, marks_BT in output.metrics.items()})


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@each_loss
def test_a_ratio_that_ran_away_stays_finite(loss: Loss, advantage: float) -> None:
    batch = make([([1000.0, 0.1], advantage), ([-1000.0], advantage), ([1000.0], advantage)], torch.float32)
    output, gradient_BT = run(loss, batch)
    assert output.loss.isfinite()
    assert gradient_BT.isfinite().all()


@pytest.mark.parametrize(("reference", "factor"), [(64, 4), (4, 1)])
def test_scaled_band_of_gspo_is_root_of_reference_over_length_times_plain(reference: int, factor: int) -> None:
    batch = make(random_rows(3, lengths=(4,) * 40))
    low, high = 2.0**-6, 2.0**-5
    scaled, scaled_BT = run(
        GSPO(clip_low=low, clip_high=high, scale_band_with_length=True, reference_length=reference), batch
    )
    plain, plain_BT = run(GSPO(clip_low=low * factor, clip_high=high * factor), batch)
    assert_close((scaled.loss, scaled_BT, scaled.metrics), (plain.loss, plain_BT, plain.metrics))
    assert all(0 < marks_BT.sum() < batch["mask_BT"].sum() for marks_BT in plain.metrics.values())


def test_scaled_band_of_gspo_is_each_responses_own() -> None:
    rows = random_rows(4, lengths=(1, 4, 16, 4, 1, 16), noise=0.1)
    loss = GSPO(clip_low=2.0**-6, clip_high=2.0**-6, scale_band_with_length=True, reference_length=16)
    alone = [run(loss, make([row]))[0].loss for row in rows]
    assert_close(run(loss, make(rows))[0].loss, torch.stack(alone).mean())


# --- numbers and their refusal -----------------------------------------------------------------------


@pytest.mark.parametrize("loss", [GRPO, GSPO])
@pytest.mark.parametrize("wrong", [{"clip_low": -0.1}, {"clip_low": 1.0}, {"clip_low": NAN}, {"clip_high": -0.1}])
def test_an_impossible_band_is_refused(loss: type, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        loss(**wrong)


def test_a_reference_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="reference_length"):
        GSPO(reference_length=0)


def test_an_unknown_algorithm_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpro'.*grpo, .*gspo, .*reinforce"):
        algorithms.load("gpro")


@pytest.mark.parametrize("name", algorithms.names())
def test_a_misspelt_field_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="clip_hihg"):
        algorithms.load(name, clip_hihg=0.2)


def configured(name: str, part: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conf" / "algorithm" / f"{name}.yaml").read_text())[part]


def without_targets(numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_targets(value) if isinstance(value, dict) else value
        for key, value in numbers.items()
        if key != "_target_"
    }


@pytest.mark.parametrize("name", algorithms.names())
def test_the_defaults_are_the_numbers_of_the_yaml(name: str) -> None:
    numbers = configured(name, "loss")
    module, _, cls = numbers["_target_"].rpartition(".")
    if module.rpartition(".")[2] != name:
        return  # a variant: the same class under other numbers, `dppo_kl` of `dppo`
    defaults = dataclasses.asdict(getattr(importlib.import_module(module), cls)())
    assert without_targets(numbers) == defaults
    assert [type(numbers[field]) for field in defaults] == [type(value) for value in defaults.values()]


@pytest.mark.parametrize("name", algorithms.names(presets=True))
def test_every_algorithm_says_where_its_equation_was_read(name: str) -> None:
    told = algorithms.provenance(name)
    assert told in algorithms.PROVENANCES
    doc = sys.modules[type(algorithms.load(name)).__module__].__doc__ or ""
    assert doc.count("Provenance: ") == 1
    assert "@" not in name or told == "peer's code"
    # An equation that was not read in the paper has no provenance "paper".
    assert told != "paper" or not re.search(r"equations? (was|were)? ?not seen", doc)


def test_a_docstring_without_its_provenance_and_an_unknown_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["steadymoe.algorithms.grpo"], "__doc__", "Provenance: hearsay.")
    with pytest.raises(ValueError, match=r"algorithms\.grpo must say in its docstring: Provenance: paper, peer's code"):
        algorithms.provenance("grpo")
    with pytest.raises(ValueError, match="unknown algorithm 'grpq'"):
        algorithms.provenance("grpq")


def test_load_gives_the_yaml_numbers_under_the_overrides() -> None:
    assert algorithms.load("gspo", clip_high=0.5) == GSPO(clip_low=3e-4, clip_high=0.5)
    assert algorithms.load("grpo") == GRPO()
    assert algorithms.load("reinforce") == Reinforce()


def imports(path: Path) -> set[str]:
    """The modules that a file imports, dotted and absolute; a relative import may not leave the package."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert all(node.level <= 1 for node in froms)
    return plain | {f"{node.module}.{alias.name}" for node in froms if not node.level for alias in node.names}


@pytest.mark.parametrize("path", sorted((ROOT / "algorithms").glob("*.py")), ids=lambda path: path.name)
def test_algorithms_need_torch_alone(path: Path) -> None:
    others = [name for name in imports(path) if not name.startswith("steadymoe.algorithms")]
    assert {name.partition(".")[0] for name in others} <= {"torch", "yaml"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_know_nothing_of_bench(path: Path) -> None:
    assert not [name for name in imports(path) if "bench" in name.split(".")]


# --- advantages --------------------------------------------------------------------------------------


def test_group_advantage_closed_form() -> None:
    advantages_PG = GroupMeanStd(epsilon=0.5)(
        torch.tensor([[1.0, 0.0, 0.0, 1.0], [4.0, 0.0, 2.0, 2.0]]), torch.ones(2, 4)
    )
    first, second = 0.5 / (math.sqrt(1 / 3) + 0.5), 2 / (math.sqrt(8 / 3) + 0.5)
    assert_close(advantages_PG, torch.tensor([[first, -first, -first, first], [second, -second, 0.0, 0.0]]))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7])
def test_equal_rewards_have_advantage_exactly_zero(reward: float) -> None:
    assert (GroupMeanStd()(torch.full((2, 8), reward), torch.ones(2, 8)) == 0).all()

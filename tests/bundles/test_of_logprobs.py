"""The audit without a model: gradients of known losses have known numbers, and relations between losses hold."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO
from test_bundle import made
from test_cli import steadymoe
from torch import Tensor
from torch.testing import assert_close

from steadymoe import algorithms
from steadymoe.algorithms import Batch, Surrogate
from steadymoe.bench.bundles import bundle as bundles
from steadymoe.bench.bundles import of_logprobs
from steadymoe.bench.bundles.bundle import BadBundle, Bundle
from steadymoe.bench.check.derivatives import gradient
from steadymoe.bench.statistics.estimates import mean_over_seeds
from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import build

RATIO_BT = torch.tensor([[1.5, 1.0, 0.5, 1.1], [0.6, 1.3, 0.9, 1.0]])
OLD_BT = torch.tensor([[-0.5, -1.0, -1.5, -2.0], [-2.5, -3.0, -3.5, -4.0]])


def small(ratio_BT: Tensor = RATIO_BT, minibatches: int = 1, **changes: object) -> Bundle:
    """Two responses of four tokens to one prompt, with advantages ±1 and known ratios, for each mini-batch."""
    facts = {
        "response_width": 4,
        "tokens_BS": torch.ones(2, 5, dtype=torch.int32),
        "mask_BS": torch.ones(2, 5, dtype=torch.uint8),
        "rewards_B": torch.tensor([1.0, 0.0]),
        "advantages_BT": torch.tensor([[1.0], [-1.0]]).expand(2, 4),
        "old_logprobs_BT": OLD_BT,
        "logprobs_BT": OLD_BT + ratio_BT.log(),
    } | changes
    tensors = {
        key: value.repeat(minibatches, *[1] * (value.ndim - 1))
        for key, value in facts.items()
        if isinstance(value, Tensor)
    }
    number = torch.arange(2 * minibatches) // 2
    return Bundle(**(facts | tensors | {"groups_B": number, "minibatches_B": number}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bundle(task: Chain) -> Bundle:
    torch.set_num_threads(1)
    return made(build.build(MICRO, task.tokenizer, 0, "cpu"), task)


def measured(bundle: Bundle, name: str) -> dict[str, float]:
    return of_logprobs.audit(bundle, of_logprobs.losses([name], bundle)).set_index("measure")["mean"].to_dict()


def test_grpos_numbers_are_the_ones_of_its_equation() -> None:
    """min(r A, clip(r) A): of A = 1 the token of ratio 1.5 is clipped, of A = −1 the token of ratio 0.6."""
    found = measured(small(), "grpo")
    weights = torch.tensor([0.0, 1.0, 0.5, 1.1, 0.0, 1.3, 0.9, 1.0]) / 8  # two responses of four tokens
    assert found["without_gradient"] == 2 / 8
    assert (found["clip_low"], found["clip_high"]) == (1 / 8, 1 / 8)
    assert found["norm"] == pytest.approx(float(weights.norm()))
    assert found["ess_tokens"] == pytest.approx(float(weights.sum() ** 2 / (8 * weights.square().sum())))
    sums = weights.view(2, 4).sum(-1)
    assert found["ess_sequences"] == pytest.approx(float(sums.sum() ** 2 / (2 * sums.square().sum())))


def test_the_mass_by_decile_follows_the_old_probability() -> None:
    found = measured(small(), "grpo")
    weights = torch.tensor([0.0, 1.0, 0.5, 1.1, 0.0, 1.3, 0.9, 1.0])
    expected = np.zeros(10)  # of eight tokens, from the least probable, the ranks 1 to 8
    for rank, weight in enumerate(weights.flip(0).tolist()):
        expected[int((rank + 0.5) / 8 * 10)] += weight / float(weights.sum())
    assert [found[name] for name in of_logprobs.DECILES] == pytest.approx(expected.tolist())
    same = measured(small(old_logprobs_BT=torch.full((2, 4), -1.0)), "reinforce")
    assert same["mass_decile_6"] == 1  # ties share a decile, whatever the order of the rows


def test_a_gradient_is_the_one_of_finite_differences(bundle: Bundle) -> None:
    (batch, *_) = of_logprobs.batches(bundle)
    exact = Batch(
        logprobs_BT=batch.logprobs_BT.double(),
        mask_BT=batch.mask_BT,
        advantages_BT=batch.advantages_BT.double(),
        old_logprobs_BT=batch.get("old_logprobs_BT").double(),
    )
    for name in ("grpo", "gspo", "sapo"):
        wide = {"clip_low": 0.9, "clip_high": 9.0} if name != "sapo" else {}
        loss = algorithms.load(name, **wide)
        found_BT, _ = gradient(loss, exact)
        for place in [(0, 0), (3, 1), (5, 2)]:
            step = torch.zeros_like(exact.logprobs_BT)
            step[place] = 1e-6
            ends = [float(loss(replace(exact, logprobs_BT=exact.logprobs_BT + sign * step)).loss) for sign in (1, -1)]
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(found_BT[place]), rel=1e-4, abs=1e-9)


def test_losses_without_a_clip_agree_at_the_old_policy(bundle: Bundle) -> None:
    """At θ = θ_old every ratio is 1: GRPO, GSPO and REINFORCE with the same averages want the same."""
    at_old = replace(bundle, logprobs_BT=bundle.old_logprobs_BT)
    named = of_logprobs.losses(["grpo", "gspo", "gspo_token"], at_old)
    audited = of_logprobs.audit(at_old, named)
    means = audited.groupby("measure")["mean"].apply(list)
    assert means["cosine"] == pytest.approx([1] * 3, abs=1e-6)
    assert means["norm"] == pytest.approx([means["norm"][0]] * 3, rel=1e-5)
    assert means["clip_low"] == means["clip_high"] == [0] * 3


def test_a_flipped_advantage_flips_the_gradient_and_leaves_the_weights(bundle: Bundle) -> None:
    (batch, *_) = of_logprobs.batches(bundle)
    flipped = replace(batch, advantages_BT=-batch.advantages_BT)
    loss = algorithms.load("reinforce")
    one, other = (gradient(loss, each)[0] for each in (batch, flipped))
    assert_close(other, -one)


def test_padding_and_the_order_of_groups_change_nothing(bundle: Bundle) -> None:
    names = ["grpo", "gspo", "cispo"]
    order_B = torch.arange(24).view(6, 4).flip(0).flatten()
    moved = {
        name: values[..., order_B, :, :] if values.ndim == 4 else values[order_B]
        for name, values in bundle.tensors.items()
    }
    wider = {
        name: torch.nn.functional.pad(values, (3, 2) if name.endswith("_BS") else (0, 2))
        for name, values in moved.items()
        if name.endswith(("_BS", "_BT"))
    }
    kept = {name: values for name, values in moved.items() if name.endswith("_B")}
    other = Bundle(response_width=bundle.response_width + 2, **wider, **kept)
    tables = [of_logprobs.audit(each, of_logprobs.losses(names, each)) for each in (bundle, other)]
    assert tables[0][["algorithm", "measure"]].equals(tables[1][["algorithm", "measure"]])
    np.testing.assert_allclose(tables[0]["mean"], tables[1]["mean"], rtol=1e-5, atol=1e-7)


def test_intervals_are_over_mini_batches() -> None:
    ratios = [RATIO_BT, RATIO_BT.flip(0), RATIO_BT.sqrt(), torch.ones(2, 4)]
    four = small(minibatches=4)
    four = replace(four, logprobs_BT=four.old_logprobs_BT + torch.cat(ratios).log())
    audited = of_logprobs.audit(four, of_logprobs.losses(["grpo"], four)).set_index("measure")
    single = [measured(small(ratio), "grpo")["clip_high"] for ratio in ratios]
    found = audited.loc["clip_high", ["mean", "low", "high", "n"]].to_dict()
    assert found == vars(mean_over_seeds(single, bounds=(0, 1)))
    assert found["n"] == 4
    two = small(minibatches=2)
    assert of_logprobs.audit(two, of_logprobs.losses(["grpo"], two))["low"].isna().all()


def test_every_algorithm_is_audited_or_says_what_it_lacks(bundle: Bundle) -> None:
    """None fails in another way; what lacks a field names it."""
    lacking = {}
    for name in algorithms.names(presets=True):
        try:
            of_logprobs.losses([name], bundle)
        except BadBundle as error:
            lacking[name] = str(error)
    assert all("which this batch does not hold" in each for each in lacking.values())
    assert set(lacking) <= {"rspo", "rspo_grpo", "rspo_gspo", "trm", "dppo", "dppo_kl", "dppo@verl-0.9"}
    shifted = torch.zeros(3, 24, bundle.response_width, 2)
    assert of_logprobs.losses(["rspo"], replace(bundle, router_log_ratio_LBTK=shifted))


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("gsop", "unknown algorithm 'gsop'; choose from"),
        ("grpo,grpo", "named twice"),
        ("", "unknown algorithm ''"),
        ("trm", "trm: the loss reads .* which this batch does not hold"),
    ],
)
def test_wrong_names_are_answered_in_one_line(bundle: Bundle, names: str, words: str) -> None:
    with pytest.raises(BadBundle, match=words):
        of_logprobs.losses(names.split(","), bundle)


def test_a_bundle_without_what_the_audit_needs_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BadBundle, match="has no logprobs_BT"):
        of_logprobs.losses(["grpo"], replace(bundle, logprobs_BT=None))
    with pytest.raises(BadBundle, match="grpo: the loss reads old_logprobs_BT"):
        of_logprobs.losses(["grpo"], replace(bundle, old_logprobs_BT=None))
    with pytest.raises(BadBundle, match="every advantage is 0"):
        of_logprobs.losses(["grpo"], replace(bundle, rewards_B=torch.ones(24)))
    with pytest.raises(BadBundle, match="unknown advantage 'mean'; choose from batch_whitened"):
        of_logprobs.advantage("mean")


def test_advantages_of_groups_that_are_too_small_are_refused() -> None:
    alone = replace(small(), groups_B=torch.arange(2), minibatches_B=None, advantages_BT=None)
    for name, words in (
        (None, "groups of one response have no advantage of their own"),
        ("leave_one_out", "groups of 1 responses are too few"),
        ("group_mean", "every advantage is 0"),
        ("leave_one_out_std", "needs at least 3 responses"),
    ):
        with pytest.raises(BadBundle, match=words):
            of_logprobs.losses(["grpo"], alone, of_logprobs.advantage(name))
    assert of_logprobs.losses(["grpo"], alone, of_logprobs.advantage("plus_minus"))


@dataclass(frozen=True, kw_only=True)
class Broken(algorithms.TokenLoss):
    """log π · ∞ · 0 of every token."""

    def surrogate(self, batch: Batch) -> Surrogate:
        """Not finite."""
        return Surrogate(batch.logprobs_BT * torch.inf * 0)


def test_a_gradient_that_is_not_finite_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BadBundle, match="broken: the gradient is not finite"):
        of_logprobs.audit(bundle, {"broken": Broken()})


def test_a_loss_without_any_gradient_is_refused() -> None:
    far = small(torch.tensor([[1.4] * 4, [0.01] * 4]))
    with pytest.raises(BadBundle, match="grpo: the gradient is 0 on every token of the bundle; leave it out"):
        of_logprobs.audit(far, of_logprobs.losses(["grpo"], far))


# --- the command -------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_never_overwrites(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles.write(bundle, tmp_path / "b")
    words = ["bundle", "audit", str(tmp_path / "b"), "--algorithms", "grpo,gspo", "--csv", str(tmp_path / "a.csv")]
    assert steadymoe(monkeypatch, *words, "--advantage", "group_mean") == 0
    said = capsys.readouterr().out
    assert "| algorithm" in said
    assert "grpo, gspo" in said
    before = (tmp_path / "a.csv").read_bytes()
    assert steadymoe(monkeypatch, *words) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "a.csv").read_bytes() == before
    assert steadymoe(monkeypatch, "bundle", "show", str(tmp_path / "b")) == 0
    assert "3 mini-batches" in capsys.readouterr().out
    assert steadymoe(monkeypatch, "bundle", "show", str(tmp_path / "a.csv")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_hostile_names_are_shown_letter_by_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b[31mred\nb\u202e"
    bundles.write(replace(small(), about={"made_by": hostile, hostile: hostile}), tmp_path / "b")
    assert steadymoe(monkeypatch, "bundle", "show", str(tmp_path / "b")) == 0
    assert steadymoe(monkeypatch, "bundle", "audit", str(tmp_path / "b"), "--algorithms", hostile) == 2
    said = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in said.out + said.err)
    assert "made_by: a\\x1b[31mred\\nb\\u202e" in said.out
    assert said.err.count("\n") == 1

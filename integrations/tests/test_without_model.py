"""The audit without a model: gradients of known losses have known numbers, and relations between losses hold."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from small_bundles import jsonl, rollouts, steadymoe_integrations
from torch import Tensor
from torch.nn.functional import pad

from steadymoe import algorithms
from steadymoe.algorithms import Batch, Surrogate
from steadymoe.bench.statistics.estimates import mean_over_seeds
from steadymoe.integrations.rollouts import audit as without_model
from steadymoe.integrations.rollouts import bundle as bundles
from steadymoe.integrations.rollouts.bundle import BadBundle, Bundle

RATIO_BT = torch.tensor([[1.5, 1.0, 0.5, 1.1], [0.6, 1.3, 0.9, 1.0]])
OLD_BT = torch.tensor([[-0.5, -1.0, -1.5, -2.0], [-2.5, -3.0, -3.5, -4.0]])


def small(ratio_BT: Tensor = RATIO_BT, minibatches: int = 1, **changes: Tensor) -> Bundle:
    """Two responses of four tokens to one prompt, with advantages ±1 and known ratios, for each mini-batch."""
    fields = {
        "mask_BT": torch.ones(2, 4, dtype=torch.long),
        "rewards_B": torch.tensor([1.0, 0.0]),
        "advantages_BT": torch.tensor([[1.0], [-1.0]]).expand(2, 4),
        "old_logprobs_BT": OLD_BT,
        "logprobs_BT": OLD_BT + ratio_BT.log(),
    } | changes
    tensors = {key: value.repeat(minibatches, *[1] * (value.ndim - 1)) for key, value in fields.items()}
    number = torch.arange(2 * minibatches) // 2
    return Bundle(**tensors, groups_B=number, minibatches_B=number)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.set_num_threads(1)
    return bundles.read(jsonl(tmp_path_factory.mktemp("rollouts"), rollouts()))[0]


def audit(bundle: Bundle, names: str, advantage: str | None = None) -> pd.DataFrame:
    losses = without_model.losses(names.split(","))
    return without_model.audit(bundle, losses, without_model.load_advantage(advantage))


def measured(bundle: Bundle, name: str) -> dict[str, float]:
    return audit(bundle, name).set_index("measure")["mean"].to_dict()


def test_grpo_numbers_match_its_equation() -> None:
    """min(r A, clip(r) A): of A = 1 the token of ratio 1.5 is clipped, of A = −1 the token of ratio 0.6."""
    found = measured(small(), "grpo")
    weights = torch.tensor([0.0, 1.0, 0.5, 1.1, 0.0, 1.3, 0.9, 1.0]) / 8  # two responses of four tokens
    assert found["without_gradient"] == 2 / 8
    assert (found["clip_low"], found["clip_high"]) == (1 / 8, 1 / 8)
    assert found["norm"] == pytest.approx(float(weights.norm()))
    assert found["ess_tokens"] == pytest.approx(float(weights.sum() ** 2 / (8 * weights.square().sum())))
    sums = weights.view(2, 4).sum(-1)
    assert found["ess_sequences"] == pytest.approx(float(sums.sum() ** 2 / (2 * sums.square().sum())))


def test_mass_by_decile_follows_the_old_probability() -> None:
    found = measured(small(), "grpo")
    weights = torch.tensor([0.0, 1.0, 0.5, 1.1, 0.0, 1.3, 0.9, 1.0])
    expected = np.zeros(10)  # of eight tokens, from the least probable, the ranks 1 to 8
    for rank, weight in enumerate(weights.flip(0).tolist()):
        expected[int((rank + 0.5) / 8 * 10)] += weight / float(weights.sum())
    assert [found[name] for name in without_model.DECILES] == pytest.approx(expected.tolist())
    same = measured(small(old_logprobs_BT=torch.full((2, 4), -1.0)), "reinforce")
    assert same["mass_decile_6"] == 1  # ties share a decile, whatever the order of the rows


def test_losses_without_a_clip_agree_at_the_old_policy(bundle: Bundle) -> None:
    """At θ = θ_old every ratio is 1: GRPO, GSPO and REINFORCE with the same averages want the same."""
    at_old = replace(bundle, logprobs_BT=bundle.old_logprobs_BT)
    means = audit(at_old, "grpo,gspo,gspo_token").groupby("measure")["mean"].apply(list)
    assert means["cosine"] == pytest.approx([1] * 3, abs=1e-6)
    assert means["norm"] == pytest.approx([means["norm"][0]] * 3, rel=1e-5)
    assert means["clip_low"] == means["clip_high"] == [0] * 3


def test_padding_and_group_order_change_nothing(bundle: Bundle) -> None:
    order_B = torch.arange(24).view(6, 4).flip(0).flatten()
    moved = {name: values[order_B] for name, values in vars(bundle).items() if values is not None}
    wider = {name: pad(values, (0, 2)) if values.ndim == 2 else values for name, values in moved.items()}
    other = Bundle(**wider | {"groups_B": bundle.groups_B})
    tables = [audit(each, "grpo,gspo,cispo") for each in (bundle, other)]
    assert tables[0][["algorithm", "measure"]].equals(tables[1][["algorithm", "measure"]])
    np.testing.assert_allclose(tables[0]["mean"], tables[1]["mean"], rtol=1e-5, atol=1e-7)


def test_intervals_are_over_mini_batches() -> None:
    ratios = [RATIO_BT, RATIO_BT.flip(0), RATIO_BT.sqrt(), torch.ones(2, 4)]
    four = small(minibatches=4)
    four = replace(four, logprobs_BT=four.old_logprobs_BT + torch.cat(ratios).log())
    audited = audit(four, "grpo").set_index("measure")
    single = [measured(small(ratio), "grpo")["clip_high"] for ratio in ratios]
    found = audited.loc["clip_high", ["mean", "low", "high", "n"]].to_dict()
    assert found == vars(mean_over_seeds(single, bounds=(0, 1)))
    assert found["n"] == 4
    assert audit(small(minibatches=2), "grpo")["low"].isna().all()


def test_every_algorithm_is_audited_or_names_what_it_lacks(bundle: Bundle) -> None:
    refused = {}
    for name in algorithms.names(presets=True):
        try:
            audit(bundle, name)
        except BadBundle as error:
            refused[name] = str(error)
    masked = {name for name, message in refused.items() if "the gradient is 0" in message}  # a loss may mask this file
    assert all("which this batch does not hold" in refused[name] for name in refused.keys() - masked)
    centred = {"score_centering", "score_centering_tis", "score_centering_mis"}
    assert refused.keys() - masked == {"rspo", "rspo_grpo", "rspo_gspo", "trm", *centred}


# --- bad input ---------------------------------------------------------------------------------------


def test_invalid_requests_are_refused_in_one_line(bundle: Bundle) -> None:
    alone = replace(small(), groups_B=torch.arange(2), minibatches_B=torch.zeros(2), advantages_BT=None)
    far = small(torch.tensor([[1.4] * 4, [0.01] * 4]))
    for given, names, advantage, key in (
        (bundle, "gsop", None, "gsop"),
        (bundle, "grpo,grpo", None, "grpo"),
        (bundle, "", None, "''"),
        (bundle, "grpo", "mean", "'mean'; choose from batch_mean"),
        (replace(bundle, old_logprobs_BT=None), "grpo", None, "grpo: the loss reads old_logprobs_BT"),
        (replace(bundle, rewards_B=torch.ones(24)), "grpo", None, "every advantage is 0"),
        (far, "grpo", None, "grpo: the gradient is 0 on every token"),
        (alone, "grpo", None, "two responses or more per group"),
        (alone, "grpo", "leave_one_out", "groups of 1 responses are too few"),
        (alone, "grpo", "group_mean", "every advantage is 0"),
        (alone, "grpo", "leave_one_out_std", "at least 3 responses"),
    ):
        with pytest.raises(BadBundle, match=key):
            audit(given, names, advantage)
    assert len(audit(alone, "grpo", "plus_minus"))


@dataclass(frozen=True, kw_only=True)
class Broken(algorithms.TokenLoss):
    """log π · ∞ · 0 of every token."""

    def surrogate(self, batch: Batch) -> Surrogate:
        """Not finite."""
        return Surrogate(batch.logprobs_BT * torch.inf * 0)


def test_a_loss_without_a_finite_gradient_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BadBundle, match="broken: the gradient is not finite"):
        without_model.audit(bundle, {"broken": Broken()})


# --- the command -------------------------------------------------------------------------------------


def test_a_new_process_writes_the_same_numbers(bundle: Bundle, tmp_path: Path) -> None:
    here = audit(bundle, "grpo,gspo")
    command = [sys.executable, "-m", "steadymoe.integrations.command", "audit", str(jsonl(tmp_path, rollouts()))]
    command += ["--algorithms", "grpo,gspo", "--csv", str(tmp_path / "audit.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "audit.csv").read_text() == here.to_csv(index=False)
    assert "| algorithm" in done.stdout
    assert "grpo, gspo" in done.stdout


def test_hostile_names_are_shown_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile, made = "a\x1b[31mred\nb\u202e", str(tmp_path / "a.csv")
    path = jsonl(tmp_path, [row | {hostile: 3} for row in rollouts()])
    words = ["audit", str(path), "--csv", made]
    for wrong in (["--algorithms", hostile], ["--map", "rewards=groups"], ["seed=3"], ["--advantage", "no"]):
        assert steadymoe_integrations(monkeypatch, *words, *wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]
    assert steadymoe_integrations(monkeypatch, "audit", str(path), "--advantage", "group_mean") == 0
    shown = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert "ignored columns: a\\x1b[31mred\\nb\\u202e" in shown

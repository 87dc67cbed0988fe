"""The minimal loop trains as its algorithm and its metrics are defined."""

import math
import re
from dataclasses import replace

import minimal_loop
import pytest
import torch

from steadymoe.algorithms import Batch, LossOutput, load

SHORT = {"steps": 2, "warm_up_updates": 60}
Seen = list[tuple[Batch, LossOutput]]


@pytest.fixture(scope="module")
def trained() -> tuple[list[dict[str, float]], Seen]:
    """The rows of a short loop, and what its loss was given and returned in each update."""
    seen: Seen = []

    def recording(name: str):
        loss = load(name)

        def call(batch: Batch) -> LossOutput:
            output = loss(batch)
            seen.append((replace(batch, logprobs_BT=batch.logprobs_BT.detach().clone()), output))
            return output

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal_loop, "load", recording)
        return list(minimal_loop.train(**SHORT)), seen


def test_the_first_update_of_a_rollout_is_on_policy_and_later_ones_are_not(trained) -> None:
    rows, _ = trained
    assert [row["update"] for row in rows] == 2 * [1, 2, 3, 4]
    for row in rows:
        ratio = row["token_ratio_mean"], row["token_ratio_max"], row["token_ratio_variance"]
        if row["update"] == 1:
            assert (*ratio, row["clip_fraction"], row["expert_change_rate"]) == (1, 1, 0, 0, 0)
        else:
            assert row["token_ratio_max"] > 1
            assert row["token_ratio_variance"] > 0
            assert row["clip_fraction"] > 0
    # Two choices of experts may happen to be equal after one small update, but not in a whole rollout.
    for step in (1, 2):
        assert max(row["expert_change_rate"] for row in rows if row["step"] == step) > 0


def test_the_loss_is_gspos(trained) -> None:
    rows, seen = trained
    for row, (batch, output) in zip(rows, seen, strict=True):
        assert row["loss"] == load("gspo")(batch).loss.item()
        values = []  # 2507.18071, eqs. 5 and 7, one response after the other
        for new_T, old_T, mask_T, advantage_T in zip(
            batch.logprobs_BT, batch.get("old_logprobs_BT"), batch.mask_BT.bool(), batch.advantages_BT, strict=True
        ):
            ratio = math.exp((new_T - old_T)[mask_T].double().mean())
            advantage = advantage_T[0].item()
            values.append(min(ratio * advantage, min(max(ratio, 1 - 3e-4), 1 + 4e-4) * advantage))
        assert row["loss"] == pytest.approx(-sum(values) / len(values), abs=1e-5)
        assert output.loss.requires_grad


def test_mini_batches_are_whole_groups_whose_advantages_cancel(trained) -> None:
    _, seen = trained
    size = minimal_loop.PROMPTS * minimal_loop.RESPONSES // minimal_loop.UPDATES
    signal = []
    for batch, _ in seen:
        advantages_PG = batch.advantages_BT[:, 0].view(-1, minimal_loop.RESPONSES)
        assert advantages_PG.numel() == size
        torch.testing.assert_close(advantages_PG.sum(-1), torch.zeros(len(advantages_PG)), atol=1e-4, rtol=0)
        signal.append(bool(advantages_PG.any()))
    assert all(signal)


def test_equal_seeds_give_equal_numbers_and_other_seeds_others(trained) -> None:
    rows, _ = trained
    assert list(minimal_loop.train(**SHORT)) == rows
    assert list(minimal_loop.train(seed=1, steps=1, warm_up_updates=SHORT["warm_up_updates"])) != rows[:4]


def test_the_script_prints_one_line_for_each_rollout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trained
) -> None:
    rows, _ = trained
    monkeypatch.setattr(minimal_loop, "train", lambda: iter(rows))
    minimal_loop.main()
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", head) == ["step", "reward", "ratio variance", "clipped", "experts changed"]
    last = [row for row in rows if row["update"] == minimal_loop.UPDATES]
    for line, row in zip(lines, last, strict=True):
        step, reward, variance, clipped, changed = line.split()
        assert (int(step), float(reward)) == (row["step"], round(row["reward"], 2))
        assert float(variance) == pytest.approx(row["token_ratio_variance"], abs=1e-4)
        assert clipped == f"{row['clip_fraction']:.0%}"
        assert changed == f"{row['expert_change_rate']:.1%}"

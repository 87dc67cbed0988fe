"""The control that sharpens: its gradient is that of the negative entropy, and no reward enters."""

import sys
from pathlib import Path

import pytest
import torch
from small_runs import advantages, begun, trainer
from torch.testing import assert_close

from steadymoe.algorithms.batch import Batch

CONTROLS = Path(__file__).parents[2] / "results" / "ruler" / "controls"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control's folder is one of a user's own."""
    monkeypatch.setenv("STEADYMOE_PATH", str(CONTROLS))
    monkeypatch.syspath_prepend(str(CONTROLS))
    monkeypatch.delitem(sys.modules, "sharpening", raising=False)


def test_sharpening_is_the_gradient_of_the_negative_entropy() -> None:
    logits_V = torch.randn(7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logprobs_V = logits_V.log_softmax(-1)
    entropy = -(logprobs_V.exp() * logprobs_V).sum()
    (expected,) = torch.autograd.grad(-entropy, logits_V, retain_graph=True)
    batch = Batch(
        logprobs_BT=logprobs_V[:, None],  # every token once, weighed by its probability
        old_logprobs_BT=logprobs_V.detach()[:, None],
        rollout_logprobs_BT=logprobs_V.detach()[:, None],
        advantages_BT=torch.zeros(7, 1),
        mask_BT=torch.ones(7, 1),
        entropy_BT=entropy.detach().expand(7, 1),
    )
    from sharpening import Sharpening

    terms_V = Sharpening(aggregation="seq-mean-token-mean").surrogate(batch).values_BT.squeeze(-1)
    (made,) = torch.autograd.grad((logprobs_V.detach().exp() * terms_V).sum(), logits_V)
    assert_close(made, expected)


def test_sharpening_lowers_entropy_without_reading_advantages(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, "algorithm=sharpening", "optimizer.learning_rate=3e-3", "updates_per_rollout=1", "minibatch_prompts=4"
    )
    before = made.step(1).rows["updates"][0]["entropy"]
    for step in range(2, 12):
        after = made.step(step).rows["updates"][0]["entropy"]
    assert after < 0.9 * before
    rollout, (minibatch, *_), old = begun(made, 20)
    assert advantages(rollout).any()
    losses = [
        trainer(tmp_path, "algorithm=sharpening").learner.update(rollout, old, given_BT, minibatch).overall["loss"]
        for given_BT in (advantages(rollout), 0 * advantages(rollout))
    ]
    assert losses[0] == losses[1]

"""Policy losses evaluated on a batch, and their counterparts in other trainers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from steadymoe.algorithms import Batch, LossOutput, PolicyLoss
from steadymoe.algorithms.objective import Objective

Ours = tuple[str, dict[str, Any]]
Case = tuple[str, str]

WIDTH = {"constant_length": 7}  # the padded width of the batches, verl's L unless told, and told to TRL
DUAL = {"dual_clip": 3.0}  # off in the papers; always on in verl
VERLS_DPPO = {"anchor": "old", "aggregation": "token-mean", "ratio_cap": 3.0}  # as dppo@verl-0.9

LOSSES: dict[Case, Ours] = {
    ("trl", "default"): ("grpo@trl-1.16", {}),
    ("trl", "default_sequence"): ("gspo@trl-1.16", {}),
    ("trl", "default_gmpo"): ("gmpo", {}),
    ("trl", "default_corrected"): ("grpo@trl-1.16", {}),
    ("trl", "grpo"): ("grpo", {}),
    ("trl", "grpo_delta"): ("grpo", DUAL),
    ("trl", "bnpo"): ("ppo_clip", {}),
    ("trl", "dapo"): ("dapo", {}),
    ("trl", "dr_grpo"): ("dr_grpo", WIDTH),
    ("trl", "cispo"): ("cispo@trl-1.16", {}),
    ("trl", "sapo"): ("sapo", {}),
    ("trl", "vespo"): ("vespo", {}),
    ("trl", "gspo"): ("gspo", {}),
    ("trl", "gspo_wide"): ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("trl", "luspo"): ("luspo", {}),
    ("trl", "luspo_wide"): ("luspo", {"clip_low": 0.2, "clip_high": 0.2}),
    # Without the sampler's log-probabilities TRL takes the old policy's.
    ("trl", "opsm"): ("opsm", {"anchor": "old"}),
    ("trl", "opsm_close"): ("opsm", {"anchor": "old", "max_divergence": 0.05}),
    ("verl", "vanilla"): ("grpo@verl-0.9", {}),
    ("verl", "vanilla_corrected"): ("grpo@verl-0.9", {}),
    ("verl", "vanilla_by_response"): ("grpo", DUAL),
    ("verl", "vanilla_token_sum"): ("grpo", {"aggregation": "seq-mean-token-sum", **DUAL}),
    ("verl", "vanilla_constant"): ("dr_grpo", {**WIDTH, **DUAL}),
    ("verl", "vanilla_dapo"): ("dapo", DUAL),
    ("verl", "gspo"): ("gspo@verl-0.9", {}),
    ("verl", "gspo_corrected"): ("gspo@verl-0.9", {}),
    ("verl", "gspo_by_response"): ("gspo_token", {"clip_low": 0.2, "clip_high": 0.2}),
    ("verl", "gspo_paper"): ("gspo", {}),
    ("verl", "sapo"): ("sapo", {}),
    ("verl", "cispo"): ("cispo@verl-0.9", {}),
    ("verl", "cispo_readme"): ("cispo", {}),
    ("verl", "geo_mean"): ("gmpo@verl-0.9", {}),
    ("verl", "geo_mean_paper"): ("gmpo", {}),
    ("verl", "dppo_tv"): ("dppo@verl-0.9", {}),
    ("verl", "dppo_tv_corrected"): ("dppo@verl-0.9", {}),
    ("verl", "dppo_kl"): ("dppo_kl", {"max_divergence": 0.2, **VERLS_DPPO}),
    ("verl", "dppo_kl_close"): ("dppo_kl", VERLS_DPPO),
    ("verl", "gpg"): ("reinforce", {"aggregation": "token-mean"}),
}


def run(loss: PolicyLoss | Objective, batch: Batch) -> tuple[float, Tensor, LossOutput]:
    """The loss, its gradient with respect to every token's log-probability, and what it reports."""
    leaf_BT = batch.logprobs_BT.detach().clone().requires_grad_()
    output = loss(replace(batch, logprobs_BT=leaf_BT))
    output.loss.backward()
    assert leaf_BT.grad is not None
    return output.loss.item(), leaf_BT.grad, output


def same(one: PolicyLoss | Objective, other: PolicyLoss | Objective, batch: Batch) -> None:
    loss, grad_BT, _ = run(one, batch)
    other_loss, other_grad_BT, _ = run(other, batch)
    torch.testing.assert_close(grad_BT, other_grad_BT)
    assert loss == pytest.approx(other_loss)

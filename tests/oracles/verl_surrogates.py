"""verl's own losses, advantages and sampler corrections on random batches, for ``tests/algorithms/test_oracles.py``.

Run by ``make oracles`` in an environment with verl. A configuration is verl's own, so that its defaults are.

Shapes: B responses, T response positions.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import GROUP, RECORDED, RESPONSES, draw, each, write
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

BY_RESPONSE = {"loss_agg_mode": "seq-mean-token-mean"}
PAPER_GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, **BY_RESPONSE}

# case → verl's loss mode and what is set in its configuration; everything else is its default.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "vanilla_corrected": ("vanilla", {}),
    "vanilla_by_response": ("vanilla", BY_RESPONSE),
    "vanilla_token_sum": ("vanilla", {"loss_agg_mode": "seq-mean-token-sum"}),
    "vanilla_constant": ("vanilla", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    "vanilla_dapo": ("vanilla", {"clip_ratio_high": 0.28}),
    "gspo": ("gspo", {}),
    "gspo_corrected": ("gspo", {}),
    "gspo_by_response": ("gspo", BY_RESPONSE),
    "gspo_paper": ("gspo", PAPER_GSPO),
    "sapo": ("sapo", {}),
    "cispo": ("cispo", {}),
    "cispo_readme": ("cispo", {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2}),
    "geo_mean": ("geo_mean", {}),
    "geo_mean_paper": ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "dppo_tv": ("dppo_tv", {}),
    "dppo_tv_corrected": ("dppo_tv", {}),
    "dppo_kl": ("dppo_kl", {}),
    "dppo_kl_close": ("dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}),
    "gpg": ("gpg", {}),
}
ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
# case → level and threshold of its importance sampling; two numbers are IcePop's band.
WEIGHTS: dict[str, tuple[str, float | str]] = {
    "token": ("token", 2.0),
    "sequence": ("sequence", 2.0),
    "icepop": ("token", "0.5_5.0"),
}
# case → unit and band of its rejection.
REJECTIONS = {"geometric": ("seq_mean_k1", "0.9_1.5")}


def loss(
    mode: str, numbers: dict[str, Any], batch: dict[str, Tensor], weights_BT: Tensor | None = None
) -> list[Tensor]:
    """A loss and its gradient with respect to every token's log-probability."""
    # A dynamic batch size lifts a demand for sizes of micro-batches, which no loss looks at.
    config = ActorConfig(strategy="fsdp", rollout_n=GROUP, use_dynamic_bsz=True, **numbers)
    logprobs_BT = batch["logprobs"].clone().requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=batch["old_logprobs"],
        log_prob=logprobs_BT,
        advantages=batch["advantages"][:, None].expand_as(logprobs_BT),
        response_mask=batch["mask"].double(),
        loss_agg_mode=config.loss_agg_mode,  # as verl's workers pass it
        config=config,
        rollout_is_weights=weights_BT,
    )
    return [value.detach(), torch.autograd.grad(value, logprobs_BT)[0]]


def advantages(name: str, batch: dict[str, Tensor]) -> Tensor:
    """An estimator's advantages, (B, T), of rewards that stand on the last tokens."""
    rewards_BT = torch.zeros_like(batch["logprobs"])
    rewards_BT[torch.arange(RESPONSES), batch["mask"].sum(-1) - 1] = batch["rewards"]
    made_BT, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards_BT,
        response_mask=batch["mask"].double(),
        index=np.arange(RESPONSES) // GROUP,
        config=AlgoConfig(),
    )
    return made_BT


def weights(level: str, threshold: float | str, batch: dict[str, Tensor]) -> Tensor:
    """A correction's weights, (B, T)."""
    log_ratio_BT = batch["old_logprobs"] - batch["rollout_logprobs"]
    return compute_rollout_correction_weights(log_ratio_BT, batch["mask"].double(), level, threshold)[0]


def kept(unit: str, band: str, batch: dict[str, Tensor]) -> Tensor:
    """1 on the tokens that a rejection leaves, (B, T)."""
    log_ratio_BT = batch["old_logprobs"] - batch["rollout_logprobs"]
    return compute_rollout_rejection_mask(log_ratio_BT, batch["mask"].double(), unit, band)[0]


def main(path: Path) -> None:
    """Ask verl about every case and write the file."""
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)  # for what verl makes of numbers
    torch.set_num_threads(1)
    inputs, answers = draw(), {}
    batches = list(each(inputs))
    for case, (level, threshold) in WEIGHTS.items():
        answers[f"weights/{case}"] = torch.stack([weights(level, threshold, batch) for batch in batches])
    for case, (unit, band) in REJECTIONS.items():
        answers[f"weights/{case}"] = torch.stack([kept(unit, band, batch) for batch in batches])
    for case, (mode, numbers) in LOSSES.items():
        corrected = answers["weights/token"] if case.endswith("_corrected") else [None] * len(batches)
        pairs = [loss(mode, numbers, *each_one) for each_one in zip(batches, corrected, strict=True)]
        values, gradients = zip(*pairs, strict=True)
        answers |= {f"loss/{case}": torch.stack(values), f"gradient/{case}": torch.stack(gradients)}
    for name in ADVANTAGES:
        answers[f"advantages/{name}"] = torch.stack([advantages(name, batch) for batch in batches])
    write(path, "verl", inputs, answers)


if __name__ == "__main__":
    main(RECORDED / "verl-0.9.safetensors")

"""TRL's own losses, advantages and sampler corrections on random batches, for ``tests/algorithms/test_oracles.py``.

Run by ``make oracles`` in an environment with TRL. The trainer is a real one, so that its defaults are TRL's; what
it would ask of a model, a sampler and a reward function is answered with the numbers of a batch.

Shapes: B responses, T response positions.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from batches import GROUP, LENGTH, RECORDED, RESPONSES, draw, each, write
from datasets import Dataset
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

SEQUENCE = {"importance_sampling_level": "sequence"}

# case → what is set in TRL's configuration; everything else is its default.
LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "default_sequence": SEQUENCE,
    "default_gmpo": {},
    "default_corrected": {},
    "grpo": {"loss_type": "grpo"},
    "grpo_delta": {"loss_type": "grpo", "delta": 3.0},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": LENGTH},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, **SEQUENCE},
    "gspo_wide": {"loss_type": "grpo", **SEQUENCE},
    "luspo": {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3, **SEQUENCE},
    "luspo_wide": {"loss_type": "luspo", **SEQUENCE},
    "opsm": {"loss_type": "grpo", "off_policy_mask_threshold": 0.5},
    "opsm_close": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"scale_rewards": "none"},
    "batch": {"scale_rewards": "batch"},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "token_truncate": {"vllm_importance_sampling_mode": "token_truncate"},
    "token_mask": {"vllm_importance_sampling_mode": "token_mask"},
    "icepop": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 5.0,
    },
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate"},
}


def trainer(folder: str, numbers: dict[str, Any], gmpo: bool = False) -> GRPOTrainer:
    """TRL's trainer on a model of two words, which is never called."""
    words = Words(WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    sizes = {"vocab_size": 2, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    made = (GMPOTrainer if gmpo else GRPOTrainer)(
        model=Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=1)),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=(GMPOConfig if gmpo else GRPOConfig)(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=RESPONSES,
            num_generations=GROUP,
            **numbers,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"),
    )
    made.current_gradient_accumulation_steps = 1  # what the training loop would set
    return made


def answer(made: GRPOTrainer, logprobs_BT: Tensor) -> None:
    """Let the model's forward pass give these log-probabilities."""
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs_BT, torch.zeros_like(logprobs_BT), None)


def loss(made: GRPOTrainer, batch: dict[str, Tensor], corrected: bool = False) -> tuple[Tensor, Tensor]:
    """The trainer's loss and its gradient with respect to every token's log-probability."""
    rollout = scored(made, batch) if corrected else {}
    logprobs_BT = batch["logprobs"].clone().requires_grad_()
    answer(made, logprobs_BT)
    mask_BT = batch["mask"].long()
    inputs = {
        "prompt_ids": mask_BT[:, :1],
        "prompt_mask": mask_BT[:, :1],
        "completion_ids": mask_BT,
        "completion_mask": mask_BT,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"],
        "num_items_in_batch": mask_BT.sum(),
        "importance_sampling_ratio": rollout.get("importance_sampling_ratio"),
    }
    value = made._compute_loss(made.model, inputs)
    return value.detach(), torch.autograd.grad(value, logprobs_BT)[0]


def scored(made: GRPOTrainer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the trainer makes of a rollout: its advantages and its correction's weights, among others."""
    lengths_B = batch["mask"].sum(-1).tolist()
    rows = list(zip(batch["rollout_logprobs"].tolist(), lengths_B, strict=True))
    made._generate = lambda prompts: (
        [[0]] * RESPONSES,
        [[1] * length for length in lengths_B],
        None,
        ["a"] * RESPONSES,
        [row[:length] for row, length in rows],
        {},
        None,
        None,
    )
    made._calculate_rewards = lambda *_: batch["rewards"][:, None]
    answer(made, batch["old_logprobs"])
    made.use_vllm = True  # the correction is for vLLM alone; in the configuration this would load it
    return made._generate_and_score_completions([{"prompt": "a"}] * RESPONSES)


def main(path: Path) -> None:
    """Ask TRL about every case and write the file."""
    # TRL makes tensors of its own from numbers: in float32 they would be what the comparison measures.
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    inputs, answers = draw(), {}
    with tempfile.TemporaryDirectory() as folder:
        for case, numbers in LOSSES.items():
            made = trainer(folder, numbers, gmpo=case == "default_gmpo")
            pairs = [loss(made, batch, corrected=case == "default_corrected") for batch in each(inputs)]
            values, gradients = zip(*pairs, strict=True)
            answers |= {f"loss/{case}": torch.stack(values), f"gradient/{case}": torch.stack(gradients)}
        for case, numbers in ADVANTAGES.items():
            made = trainer(folder, numbers)
            rollouts = [scored(made, batch)["advantages"] for batch in each(inputs)]
            answers[f"advantages/{case}"] = torch.stack(rollouts)[..., None] * inputs["mask"]
        for case, numbers in CORRECTIONS.items():
            made = trainer(folder, numbers)
            rollouts = [scored(made, batch)["importance_sampling_ratio"] for batch in each(inputs)]
            answers[f"weights/{case}"] = torch.stack(rollouts) * inputs["mask"]
    write(path, "trl", inputs, answers)


if __name__ == "__main__":
    main(RECORDED / "trl-1.16.safetensors")

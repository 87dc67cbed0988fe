"""Shared by all tests: a small task and model, and one thread, so that results are the same to the bit."""

import pytest
import torch
from transformers import PreTrainedModel

from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import build

MICRO = {
    "_target_": "transformers.Qwen3MoeConfig",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "initializer_range": 0.15,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """More threads than one are not reproducible to the bit."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def task() -> Chain:
    """Short chains modulo 6."""
    return Chain(min_operands=3, max_operands=5, modulus=6, spare_tokens=2)


@pytest.fixture
def model(task: Chain) -> PreTrainedModel:
    """A fresh random MoE model, smaller than micro."""
    return build.build(MICRO, task.tokenizer, seed=0, device="cpu")

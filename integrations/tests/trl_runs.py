"""Small runs of ``SteadyGRPOTrainer`` on frozen responses, in this process or by ``torchrun`` (see ``main``).

Responses do not depend on how a rollout is split: they follow from the prompt and from a response's place in its group.
Also here: the tables that these runs recorded, and how to compare them.
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from trl import GRPOConfig

from steadymoe.bench.runs import record
from steadymoe.bench.tasks.sort import Sort
from steadymoe.bench.training import columns
from steadymoe.integrations.trl.trainer import SteadyGRPOTrainer
from steadymoe.models import build

GROUP = 8
TASK = Sort(symbols="0123456789a", min_length=3, max_length=6, spare_tokens=2)
PROMPTS = ["3175=", "82=".rjust(5, "4"), "90215=", "641=", "7788=", "305=", "1234=", "999="]
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
# Columns that a change of the split leaves equal; those of a probe; those of times.
EXACT = ("expert_change_rate", "expert_set_change_rate", "token_any_layer_change_rate", "response_tokens")
EXACT += ("step", "update")
PROBED = [
    name for name in columns.TABLES["updates"] if name.startswith(("log_ratio_", "routing_share", "relative_step_"))
]
PROBED += ["expert_change_per_update"]
TIMES = [name for name in columns.TABLES["steps"] if name.endswith(("_seconds", "_per_second"))]


def model(seed: int = 0, dense: bool = False) -> PreTrainedModel:
    """A small mixture of experts, or a dense model of its size, at random weights."""
    cls, sizes = (Qwen3Config, {"intermediate_size": 32}) if dense else (Qwen3MoeConfig, EXPERTS)
    name = f"transformers.{cls.__name__}"
    return build.build({"_target_": name, **SIZES, **sizes}, TASK.tokenizer, seed, "cpu")


def responses(prompts: Sequence[str]) -> list[list[int]]:
    """Return a response of its own for each prompt, of 1 to 8 tokens."""
    sampled, seen = [], dict.fromkeys(prompts, 0)
    for prompt in prompts:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{prompt} {seen[prompt]}".encode()))
        seen[prompt] += 1
        length = int(torch.randint(1, 9, (1,), generator=generator))
        digits = torch.randint(2, 12, (length,), generator=generator).tolist()
        sampled.append([*digits[:-1], TASK.tokenizer.eos_token_id] if length < 8 else digits)
    return sampled


class NoisySampler:
    """A ``rollout_func``: ``responses``, with the trainer's own log-probabilities moved by known ``noise``."""

    def __init__(self, noise: float = 0.0, missing: int = 0) -> None:
        self.noise, self.missing = noise, missing
        self.gaps: list[float] = []
        """log π_old − log μ of every token, nan where it is missing."""

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [TASK.tokenizer(prompt)["input_ids"] for prompt in prompts]
        completion_ids, logprobs = responses(prompts), []
        policy = trainer.accelerator.unwrap_model(trainer.model)
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            with torch.no_grad():
                logits_SV = policy(torch.tensor([prompt + completion])).logits[0]
            steps_T = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
            own_T = logits_SV.log_softmax(-1)[steps_T, torch.tensor(completion)]
            generator = torch.Generator().manual_seed(sum(prompt) * 31 + sum(completion))
            gap_T = self.noise * torch.randn(len(completion), generator=generator)
            if self.missing:
                gap_T[:: self.missing] = torch.nan
            self.gaps += gap_T.tolist()
            logprobs.append((own_T - gap_T).tolist())
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def reward(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A number that follows from the response, different within every group."""
    return [(sum(ids) % 7) / 6 for ids in completion_ids]


def trainer(
    folder: Path,
    rows: int = 16,
    accumulation: int = 1,
    updates: int = 4,
    dense: bool = False,
    rollout: Any = None,
    eval_prompts: int = 0,
    with_rollout: bool = True,
    settings: dict[str, Any] | None = None,
    **named: Any,
) -> SteadyGRPOTrainer:
    """A trainer of two updates on every rollout of two groups, with a plain gradient step.

    The model is loaded from a folder if TRL needs it there, for a reference model (``beta``) or to shard it.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "max_steps": updates,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": accumulation,
        "num_generations": GROUP,
        "num_iterations": 2,
        "max_completion_length": 8,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "router_aux_loss_coef": None if dense else 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    given = defaults | (settings or {})
    named = {"loss": "gspo"} | named
    if with_rollout:
        named["rollout_func"] = rollout or NoisySampler(noise=0.1)
    if eval_prompts:
        named["eval_dataset"] = Dataset.from_dict({"prompt": PROMPTS[-eval_prompts:]})
    policy: PreTrainedModel | str = model(dense=dense)
    args = GRPOConfig(**given)
    if given.get("beta") or "model_init_kwargs" in given:
        with args.distributed_state.main_process_first():
            if not (folder / "model").exists():
                policy.save_pretrained(folder / "model")
        policy = str(folder / "model")
    return SteadyGRPOTrainer(
        policy,
        reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=TASK.tokenizer,
        **named,
    )


def rollout_parts(adapter: SteadyGRPOTrainer) -> list[dict[str, Any]]:
    """Return the micro-batches of one rollout of a trainer, in the order of its groups."""
    adapter.model.train()
    adapter.current_gradient_accumulation_steps = adapter.args.gradient_accumulation_steps
    whole = adapter._generate_and_score_completions([{"prompt": text} for text in PROMPTS[:2] for _ in range(GROUP)])
    size = adapter.args.per_device_train_batch_size
    return [
        {name: values[start : start + size] if values.ndim else values for name, values in whole.items()}
        for start in range(0, 2 * GROUP, size)
    ]


def disturb(adapter: SteadyGRPOTrainer) -> None:
    """Move the weights, so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in adapter.model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


def folder_of(results: Path) -> Path:
    """Return the folder of the one run below ``results``."""
    (path,) = results.glob("runs/**/run.json")
    return path.parent


def tables(results: Path, probed: bool = True) -> dict[str, pd.DataFrame]:
    """Return the tables of the one run below ``results``, without times and, unless ``probed``, a probe's columns."""
    names = TIMES if probed else [*TIMES, *PROBED]
    folder = folder_of(results)
    return {
        name: record.read_table(folder, name).drop(columns=names, errors="ignore")
        for name in ("steps", "updates", "layers")
    }


def assert_equal(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> None:
    """Check that tables are equal: changes of experts and counts exactly, everything else up to rounding."""
    for name, table in one.items():
        assert len(table) == len(other[name]) > 0
        exact = [column for column in table if column in EXACT or table[column].dtype == object]
        pd.testing.assert_frame_equal(table[exact], other[name][exact])
        pd.testing.assert_frame_equal(table, other[name], rtol=2e-6, atol=1e-6)


def run_with_processes(folder: Path, processes: int, wait: bool = True, **arguments: Any) -> subprocess.Popen[str]:
    """Run this file on several gloo processes; each records below ``folder/rank<n>``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [__file__, str(folder), json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
    if wait:
        assert process.wait() == 0, (folder / "log").read_text()
    return process


def main() -> None:
    """``torchrun trl_runs.py <folder> <json of arguments of trainer>``: each process records below its own rank.

    ``shares<rank>.json`` holds, by name, the share of each parameter that this process has; null for a parameter that
    is not sharded.
    """
    folder, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    adapter = trainer(folder, record=folder / f"rank{rank}", **arguments)
    shares = {
        name: weight.to_local().numel() / weight.numel() if isinstance(weight, DTensor) else None
        for name, weight in adapter.model.named_parameters()
    }
    (folder / f"shares{rank}.json").write_text(json.dumps(shares))
    adapter.train()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""What the instruments cost: TRL's trainer with the suite's loss and columns next to TRL's own with the same loss.

    python tests/trainers/cost.py results/trainers

Both compute the old policy and sample with the same code. Trainings of ``micro`` on one thread take turns; ``cost.csv``
has their processor times, a row per round.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from steadymoe.bench import plan
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.tasks.sort import Sort
from steadymoe.bench.trainers.trl import SteadyGRPOTrainer
from steadymoe.models import build

ROUNDS, UPDATES = 9, 8
TASK = Sort(symbols="01234", min_length=3, max_length=5, spare_tokens=1)
# GSPO in TRL's settings.
_TRL_LOSS = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}


def reward(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return a number that follows from the response."""
    return [(sum(ids) % 7) / 6 for ids in completion_ids]


def build_trainer(folder: Path, cls: type[GRPOTrainer], **named: Any) -> GRPOTrainer:
    """Build a trainer of two rollouts of 128 responses, four updates on each."""
    settings = GRPOConfig(
        output_dir=str(folder),
        max_steps=UPDATES,
        per_device_train_batch_size=32,
        generation_batch_size=128,
        num_generations=8,
        max_completion_length=TASK.max_new_tokens,
        learning_rate=1e-4,
        router_aux_loss_coef=0.0,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        **({} if cls is SteadyGRPOTrainer else _TRL_LOSS),
    )
    model = build.build(plan("model=micro")[0].config.model["config"], TASK.tokenizer, 0, "cpu")
    prompts = Dataset.from_dict({"prompt": TASK.sample(512, numpy_generator(0, "prompts"))})
    return cls(model, reward, settings, train_dataset=prompts, processing_class=TASK.tokenizer, **named)


def measure(folder: Path) -> pd.DataFrame:
    """Return processor seconds: a row per round, a column per trainer. The first round is left out."""
    trainers = {
        "trl": build_trainer(folder, GRPOTrainer),
        "steadymoe": build_trainer(folder, SteadyGRPOTrainer, loss="gspo"),
        "steadymoe with a probe of 4": build_trainer(folder, SteadyGRPOTrainer, loss="gspo", probe=4),
    }
    rows, names = [], list(trainers)
    for number in range(ROUNDS + 1):
        seconds = {}
        for name in (*names[number % 3 :], *names[: number % 3]):
            start = time.process_time()
            trainers[name].train()
            seconds[name] = time.process_time() - start
        rows.append(seconds)
    return pd.DataFrame(rows[1:], columns=names)


if __name__ == "__main__":
    torch.set_num_threads(1)
    to = Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        table = measure(Path(name))
    atomic_files.write(to / "cost.csv", partial(table.to_csv, index=False, float_format="%.3f"))
    print(table, table.div(table["trl"], axis=0).describe().loc[["min", "50%", "max"]], sep="\n")

"""The same frozen rollouts through three trainers: the suite's own, the TRL adapter, and the adapter sharded.

    python benchmarks/side_by_side.py results/trainers

The suite's trainer makes a run of ``micro`` from a cold start, and saves initial weights, rollouts and the order
of its mini-batches. The adapter then trains on them, on one process and on two that share the weights (FSDP2). Writes
the archive of the three runs and ``side_by_side.csv``: how far their columns are apart.

Shapes: B responses of a rollout.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pandas as pd
import torch
from datasets import Dataset
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from steadymoe.bench import plan
from steadymoe.bench.report import report_page
from steadymoe.bench.report.results import bind
from steadymoe.bench.runs import execute, record, run_folder
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.support import files
from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.training import columns
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer
from steadymoe.integrations.trl.trainer import SteadyGRPOTrainer

EXPERIMENT = "side_by_side"
WORDS = ("model=micro", "task=sort", "algorithm=gspo", "advantage=group_mean", f"experiment_name={EXPERIMENT}")
WORDS += (
    "task.min_length=3",
    "cold_start.learning_rate=1e-3",
    "cold_start.accuracy_low=0.4",
    "cold_start.accuracy_high=0.6",
)
WORDS += ("engine=temperature", "task.symbols='012345678'")  # 12 tokens: tied embeddings cannot be sharded unequally
SIZES = ("updates=24", "minibatch_prompts=4", "updates_per_rollout=4", "optimizer.learning_rate=1e-3")
# Columns that are no measurement, or of time, or of a probe's responses, which are others in the adapter.
_OTHERS = ("_seconds", "_per_second", "routing_share", "per_update", "log_ratio_moment", "log_ratio_covariance")
_KEYS = ("step", "update", "layer", "learning_rate")


class SavingTrainer(Trainer):
    """The suite's trainer, which also saves its initial weights and every rollout to ``folder``."""

    folder: ClassVar[Path]

    def __init__(self, model: Any, *more: Any, **named: Any) -> None:
        model.save_pretrained(self.folder / "micro")
        super().__init__(model, *more, **named)

    def sample(self, step: int) -> tuple[Rollout, Tensor, int]:
        """Sample, and remember the rollout."""
        self._sampled, *rest = super().sample(step)
        return self._sampled, *rest

    def minibatches(self, step: int) -> list[list[MicroBatch]]:
        """Split the rollout, and save it with the order of its rows."""
        parts, rollout = super().minibatches(step), self._sampled
        tensors = {
            "order_B": torch.cat([part.rows_M for minibatch in parts for part in minibatch]),
            "tokens_BS": rollout.sequences.tokens_BS,
            "mask_BS": rollout.sequences.mask_BS,
            "response_mask_BT": rollout.sequences.response_mask_BT,
            "logprobs_BT": rollout.logprobs_BT,
            "scores_B": rollout.scores_B,
        }
        path = self.folder / f"rollout{step}.safetensors"
        save_file({name: values.contiguous() for name, values in tensors.items()}, path)
        return parts


def run_suite(folder: Path, run: Run) -> None:
    """Make the suite's own run, and save what the adapter needs of it to ``folder``."""
    SavingTrainer.folder = folder
    with mock.patch.object(execute, "Trainer", SavingTrainer):
        assert execute.execute(run) == "finished"


class Replays:
    """A ``rollout_func`` that returns the saved rollouts.

    TRL trains on a process's rows in their order (see ``run_adapter``). So that the processes together have the suite's
    mini-batches, each has its share of the groups of each mini-batch.
    """

    def __init__(self, folder: Path, run: Run, process: int, processes: int) -> None:
        config, self._process = run.config, process
        self._updates, responses = config.updates_per_rollout, config.rollout.responses
        self._rollouts = [load_file(folder / f"rollout{step}.safetensors") for step in range(1, config.rollouts + 1)]
        task: Any = instantiate(config.task)
        self.tokenizer, self.max_new_tokens = task.tokenizer, task.max_new_tokens
        self.prompts: list[str] = []
        """The prompts in TRL's order: rollout by rollout, process by process."""
        self._rows: list[list[Tensor]] = []
        for step, rollout in enumerate(self._rollouts, start=1):
            texts = task.sample(config.prompts, numpy_generator(config.seed, "rollout_prompts", step))
            shares = [rows_M.chunk(processes) for rows_M in rollout["order_B"].chunk(self._updates)]
            self._rows.append([torch.cat(rows) for rows in zip(*shares, strict=True)])
            for rows in self._rows[-1]:
                self.prompts += [texts[row // responses] for row in rows.tolist()[::responses]]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step // self._updates
        rollout, rows = self._rollouts[step], self._rows[step][self._process].tolist()
        output: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "score": []}
        width = rollout["response_mask_BT"].shape[1]
        for row, prompt in zip(rows, prompts, strict=True):
            is_prompt, is_response = rollout["mask_BS"][row, :-width].bool(), rollout["response_mask_BT"][row].bool()
            output["prompt_ids"].append(rollout["tokens_BS"][row, :-width][is_prompt].tolist())
            output["completion_ids"].append(rollout["tokens_BS"][row, -width:][is_response].tolist())
            output["logprobs"].append(rollout["logprobs_BT"][row][is_response].tolist())
            output["score"].append(float(rollout["scores_B"][row]))
            assert output["prompt_ids"][-1] == self.tokenizer(prompt)["input_ids"]
        return output


def score(prompts: Sequence[str], score: Sequence[float], **_: Any) -> Sequence[float]:
    """Return the suite's own scores."""
    return score


def run_adapter(folder: Path, results: Path, words: Sequence[str]) -> None:
    """Run the adapter on the saved rollouts, on this process or, under ``torchrun``, on several, sharded."""
    (run,) = plan(*words)
    config, numbers = run.config, run.config.optimizer
    processes, process = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    replays = Replays(folder, run, process, processes)
    grpo_trainer.shuffle_sequence_dict = lambda rows: rows  # the mini-batches are the suite's
    sharded = {"distributed_config": {"fsdp_size": processes}}
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=config.rollouts * config.updates_per_rollout,
        per_device_train_batch_size=config.prompts
        * config.rollout.responses
        // (config.updates_per_rollout * processes),
        steps_per_generation=config.updates_per_rollout,
        num_generations=config.rollout.responses,
        max_completion_length=replays.max_new_tokens,
        scale_rewards="none",
        learning_rate=numbers.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=numbers.beta1,
        adam_beta2=numbers.beta2,
        adam_epsilon=numbers.epsilon,
        weight_decay=numbers.weight_decay,
        max_grad_norm=numbers.max_grad_norm,
        optim="adamw_torch",
        router_aux_loss_coef=0.0,
        model_init_kwargs=sharded if processes > 1 else None,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        seed=config.seed,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )
    SteadyGRPOTrainer(
        str(folder / "micro"),
        score,
        args,
        train_dataset=Dataset.from_dict({"prompt": replays.prompts}),
        processing_class=replays.tokenizer,
        rollout_func=replays,
        loss="gspo",
        record=results,
        experiment=EXPERIMENT,
        task="sort",
        axes={"processes": processes} | ({"sharded": "fsdp2"} if processes > 1 else {}),
    ).train()


def compare(results: Path) -> pd.DataFrame:
    """Return, of columns that all three runs have, the largest value and the largest differences as shares of it.

    The first step is also there by itself: later, rounding has changed weights, and the experts of a token at a tie.
    """
    folders, rows = {}, []
    for path in (results / "runs" / EXPERIMENT).rglob("run.json"):
        axes = (run_folder.read_run(path.parent) or {})["axes"]
        name = "suite" if "trainer" not in axes else "sharded" if "sharded" in axes else "one process"
        folders[name] = path.parent
    for table in ("steps", "updates", "layers"):
        runs = {name: record.read_table(folder, table) for name, folder in folders.items()}
        assert len({len(run) for run in runs.values()}) == 1
        is_first = runs["suite"]["step"] == 1
        for column in columns.TABLES[table]:
            if column in _KEYS or any(part in column for part in _OTHERS):
                continue
            if any(run[column].dtype.kind not in "if" or run[column].isna().all() for run in runs.values()):
                continue
            values = {name: run[column].astype(float) for name, run in runs.items()}
            largest = values["suite"].abs().max()
            row: dict[str, Any] = {"table": table, "column": column, "largest": largest}
            for name in ("one process", "sharded"):
                assert (values[name].isna() == values["suite"].isna()).all(), (table, column, name)
                difference = (values[name] - values["suite"]).abs() / (largest or 1.0)
                row |= {f"{name}, first step": difference[is_first].max(), name: difference.max()}
            rows.append(row)
    return pd.DataFrame(rows)


def make(results: Path, *more: str) -> None:
    """Make the three runs below ``results``; ``more`` are arguments of ``steadymoe run``."""
    words = [*WORDS, *(more or SIZES), f"results_dir={results}"]
    (run,) = plan(*words)
    with tempfile.TemporaryDirectory() as name:
        run_suite(Path(name), run)
        for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
            command = [sys.executable, *launcher, __file__, "adapter", name, str(results), *words]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)


if __name__ == "__main__":
    if sys.argv[1] == "adapter":
        run_adapter(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        to = Path(sys.argv[1])
        with tempfile.TemporaryDirectory() as name:
            make(Path(name))
            shutil.rmtree(to / "data" / EXPERIMENT, ignore_errors=True)  # its runs may be named otherwise
            archived, *_ = report_page.keep(Path(name), EXPERIMENT, to)
            table = compare(Path(name))
        runs = pd.read_parquet(archived).assign(command="make side-by-side")  # no names of temporary folders
        files.write(archived, partial(runs.to_parquet, index=False, compression="zstd"))
        bind(archived.parent)
        files.write(to / f"{EXPERIMENT}.csv", partial(table.to_csv, index=False, float_format="%.3g"))
        print(table.to_string())

"""The same frozen rollouts through three trainers: the suite's own, the TRL adapter, and the adapter sharded.

    python tests/trainers/side_by_side.py results/trainers

The suite's trainer makes a run of ``micro`` from a cold start. Its weights at the start, its rollouts and the order of
its mini-batches are kept. The adapter then trains on them from these weights, on one process and on two processes that
share the weights (FSDP2). Written: the archive of the three runs, from which ``steadymoe report --results
results/trainers`` makes their page, and ``side_by_side.csv``: how far the columns of the three are apart.

Shapes: B responses of a rollout, P prompts, G responses to each.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from datasets import Dataset
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from steadymoe.bench import plan
from steadymoe.bench.config.compose import Run
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import report_page
from steadymoe.bench.runs import execute, record
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.trainers.trl import SteadyGRPOTrainer
from steadymoe.bench.training.microbatches import MicroBatch
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer

EXPERIMENT = "side_by_side"
WORDS = ("model=micro", "task=sort", "algorithm=gspo", "advantage=group_mean", f"experiment_name={EXPERIMENT}")
WORDS += ("engine=temperature", "task.symbols='012345678'")  # 12 tokens: tied embeddings cannot be sharded unequally
SIZES = ("steps=6", "rollout.prompts=16", "updates_per_rollout=4", "optimizer.learning_rate=1e-3")
# Columns that are no measurement, or of time, or of a probe's responses, which are others in the adapter.
_OTHERS = ("_seconds", "_per_second", "routing_share", "per_update", "log_ratio_moment", "log_ratio_covariance")
_KEYS = ("step", "update", "layer", "learning_rate")


class Keeps(Trainer):
    """The suite's trainer, which also keeps its weights at the start and every rollout."""

    folder: ClassVar[Path]

    def __init__(self, model: Any, *more: Any, **named: Any) -> None:
        model.save_pretrained(self.folder / "micro")
        super().__init__(model, *more, **named)

    def sample(self, step: int) -> tuple[Rollout, Tensor, int]:
        """As the suite's, and remembered."""
        self._made, *rest = super().sample(step)
        return self._made, *rest

    def minibatches(self, step: int) -> list[list[MicroBatch]]:
        """As the suite's; the order of the rows is kept with the rollout."""
        found, made = super().minibatches(step), self._made
        order_B = torch.cat([part.rows_M for parts in found for part in parts])
        kept = {"order_B": order_B, "tokens_BS": made.sequences.tokens_BS, "mask_BS": made.sequences.mask_BS}
        kept |= {"response_mask_BT": made.sequences.response_mask_BT, "logprobs_BT": made.logprobs_BT}
        kept |= {"scores_B": made.scores_B}
        save_file({name: each.contiguous() for name, each in kept.items()}, self.folder / f"rollout{step}.safetensors")
        return found


def ours(folder: Path, run: Run) -> None:
    """The suite's own run, with what the adapter needs of it in ``folder``."""
    Keeps.folder = folder
    usual, execute.Trainer = execute.Trainer, Keeps  # type: ignore[misc]
    try:
        assert execute.execute(run) == "finished"
    finally:
        execute.Trainer = usual  # type: ignore[misc]


class Replays:
    """A ``rollout_func`` that returns the kept rollouts.

    TRL trains on a process's rows in their order (see ``adapter``). So that the processes together have the suite's
    mini-batches, each has its share of the groups of each mini-batch.
    """

    def __init__(self, folder: Path, run: Run, process: int, processes: int) -> None:
        config, self._process = run.config, process
        self._updates, self._responses = config.updates_per_rollout, config.rollout.responses
        self._kept = [load_file(folder / f"rollout{step}.safetensors") for step in range(1, config.steps + 1)]
        task: Any = instantiate(config.task)
        self.tokenizer, self.max_new_tokens = task.tokenizer, task.max_new_tokens
        self.prompts: list[str] = []
        """The prompts in TRL's order: rollout by rollout, process by process."""
        self._rows: list[list[Tensor]] = []
        for step, kept in enumerate(self._kept, start=1):
            texts = task.sample(config.rollout.prompts, numpy_generator(config.seed, "rollout_prompts", step))
            shares = [rows_M.chunk(processes) for rows_M in kept["order_B"].chunk(self._updates)]
            self._rows.append([torch.cat(of_process) for of_process in zip(*shares, strict=True)])
            for rows in self._rows[-1]:
                self.prompts += [texts[row // self._responses] for row in rows.tolist()[:: self._responses]]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step // self._updates
        kept, rows = self._kept[step], self._rows[step][self._process].tolist()
        made: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "score": []}
        for row, prompt in zip(rows, prompts, strict=True):
            width = kept["response_mask_BT"].shape[1]
            before, after = kept["mask_BS"][row, :-width].bool(), kept["response_mask_BT"][row].bool()
            made["prompt_ids"].append(kept["tokens_BS"][row, :-width][before].tolist())
            made["completion_ids"].append(kept["tokens_BS"][row, -width:][after].tolist())
            made["logprobs"].append(kept["logprobs_BT"][row][after].tolist())
            made["score"].append(float(kept["scores_B"][row]))
            assert made["prompt_ids"][-1] == self.tokenizer(prompt)["input_ids"]
        return made


def score(prompts: Sequence[str], score: Sequence[float], **_: Any) -> Sequence[float]:
    """The suite's own scores."""
    return score


def adapter(folder: Path, results: Path, words: Sequence[str]) -> None:
    """The adapter's run on the kept rollouts, on this process or, under ``torchrun``, on several, sharded."""
    (run,) = plan(*words)
    config, numbers = run.config, run.config.optimizer
    processes, process = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    replays = Replays(folder, run, process, processes)
    grpo_trainer.shuffle_sequence_dict = lambda rows: rows  # the mini-batches are the suite's
    sharded = {"distributed_config": {"fsdp_size": processes}}
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=config.steps * config.updates_per_rollout,
        per_device_train_batch_size=config.rollout.prompts
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


def runs_of(results: Path) -> dict[str, Path]:
    """The folders of the three runs, by a name for each."""
    found = {}
    for path in sorted((results / "runs" / EXPERIMENT).rglob("run.json")):
        axes = (record.read_run(path.parent) or {})["axes"]
        name = "ours" if "trainer" not in axes else "sharded" if "sharded" in axes else "one process"
        found[name] = path.parent
    return found


def apart(results: Path) -> pd.DataFrame:
    """Columns that all three runs have: the largest value, and the largest differences from ours as a share of it.

    The first step is also there by itself: later, rounding has changed weights, and the experts of a token at a tie.
    """
    folders, rows = runs_of(results), []
    for table in ("steps", "updates", "layers"):
        found = {name: record.read_table(folder, table) for name, folder in folders.items()}
        assert len({len(each) for each in found.values()}) == 1
        is_first = found["ours"]["step"] == 1
        for column in columns.TABLES[table]:
            if column in _KEYS or any(part in column for part in _OTHERS):
                continue
            if not all(column in each and each[column].dtype.kind in "if" for each in found.values()):
                continue
            values = {name: each[column].astype(float) for name, each in found.items()}
            if any(each.isna().all() for each in values.values()):
                continue
            largest = values["ours"].abs().max()
            row: dict[str, Any] = {"table": table, "column": column, "largest": largest}
            for name in ("one process", "sharded"):
                assert (values[name].isna() == values["ours"].isna()).all(), (table, column, name)
                difference = (values[name] - values["ours"]).abs() / (largest or 1.0)
                row |= {f"{name}, first step": difference[is_first].max(), name: difference.max()}
            rows.append(row)
    return pd.DataFrame(rows)


def make(results: Path, *more: str) -> None:
    """The three runs below ``results``; ``more`` are words of ``steadymoe run``."""
    words = [*WORDS, *(more or SIZES), f"results_dir={results}"]
    (run,) = plan(*words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours(folder, run)
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        for how in ([], several):
            command = [sys.executable, *how, __file__, "adapter", str(folder), str(results), *words]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "adapter":
        adapter(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        to = Path(sys.argv[1])
        with tempfile.TemporaryDirectory() as name:
            make(Path(name))
            archived, *_ = report_page.keep(Path(name), EXPERIMENT, to)
            table = apart(Path(name))
        runs = pd.read_parquet(archived).assign(command="make side-by-side")  # no names of temporary folders
        atomic_files.write(archived, partial(runs.to_parquet, index=False, compression="zstd"))
        atomic_files.write(to / f"{EXPERIMENT}.csv", partial(table.to_csv, index=False, float_format="%.3g"))
        print(table.to_string())

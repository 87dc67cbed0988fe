"""The timed trainers: this suite, TRL's GRPOTrainer with GSPO's loss, and plain transformers, on the same work.

One step is a rollout of P prompts × G responses and the same number of gradient updates on it. Scores are random, so
that an untrained model has a signal in every group.

Shapes (docs/shapes.md): B sequences, F positions fed, S prompt and response positions, T response positions,
V vocabulary.
"""

import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from hydra.utils import instantiate
from transformers import GenerationConfig, PreTrainedModel

from steadymoe.bench.config import compose
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.support.seeding import derive, numpy_generator
from steadymoe.bench.tasks import Task
from steadymoe.bench.training.forward import Sequences
from steadymoe.bench.training.packing import positions
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build

# No evaluation falls into the timed steps.
_NEVER = ["steps=1000000", "evaluation.every=1000000"]
# ε of GSPO's paper (2507.18071, section 5.1).
_BAND = {"epsilon": 3e-4, "epsilon_high": 4e-4}


class Arm(Protocol):
    """A trainer that can make a rollout step."""

    def step(self) -> dict[str, Any]:
        """Make one step and return its metrics, if the trainer has any."""


class Scored:
    """A task with random scores."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._generator = torch.Generator().manual_seed(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def score(self, prompt: str, response: str, finished: bool) -> float:
        """A random score in [0, 1]; the response does not matter."""
        return float(torch.rand((), generator=self._generator))


def config_of(words: Sequence[str]) -> RunConfig:
    """The composed config of the timed work, from overrides; the algorithm is gspo unless ``words`` name another."""
    named = [] if any(word.startswith("algorithm=") for word in words) else ["algorithm=gspo"]
    return compose.plan([*_NEVER, *named, *words])[0].config


def model_of(config: RunConfig) -> PreTrainedModel:
    """An untrained model; equal configs give equal weights."""
    task = instantiate(config.task)
    return build.build(config.model["config"], task.tokenizer, derive(0, "speed"), config.device)


class Ours:
    """This suite."""

    def __init__(self, words: Sequence[str]) -> None:
        self.config = config_of(words)
        task: Any = Scored(instantiate(self.config.task))
        self.trainer = Trainer(model_of(self.config), task, self.config)
        self._steps = 0

    def step(self) -> dict[str, Any]:
        """Make one step of training; return its row of the table ``steps``."""
        self._steps += 1
        return self.trainer.step(self._steps).rows["steps"][0]


class Plain:
    """A minimal trainer with transformers alone: ``generate``, a forward for the old policy, updates."""

    def __init__(self, words: Sequence[str]) -> None:
        self.config = config_of(words)
        self.model, self.task = model_of(self.config), instantiate(self.config.task)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self._generation = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=self.task.max_new_tokens, pad_token_id=0
        )
        self._steps = 0

    def step(self) -> dict[str, Any]:
        """Make one rollout and its updates; nothing is measured."""
        self._steps += 1
        sequences = self.generate(self.encoded(self.repeated(self.prompts(self._steps))))
        with torch.no_grad():
            self._logprobs(sequences)
        rows_B = torch.randperm(len(sequences.tokens_BS))
        for rows in rows_B.chunk(self.config.updates_per_rollout):
            self.update(sequences.rows(rows))
        return {}

    def prompts(self, number: int) -> list[str]:
        """The P prompts of rollout ``number``."""
        return self.task.sample(self.config.rollout.prompts, numpy_generator(number, "speed"))

    def repeated(self, prompts: list[str]) -> list[str]:
        """Each prompt G times in a row."""
        return [prompt for prompt in prompts for _ in range(self.config.rollout.responses)]

    def encoded(self, prompts: list[str]) -> Any:
        """The prompts as tokens, padded on the left."""
        return self.task.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")

    def generate(self, encoded: Any) -> Sequences:
        """Responses sampled by ``model.generate``, without log-probabilities."""
        generate: Any = self.model.generate
        tokens_BS = generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            generation_config=self._generation,
        )
        width = encoded["input_ids"].shape[1]
        mask_BS = torch.cat([encoded["attention_mask"], (tokens_BS[:, width:] != 0).long()], 1)
        return Sequences(tokens_BS, mask_BS, tokens_BS.shape[1] - width)

    def update(self, sequences: Sequences) -> None:
        """Make one gradient update; every token has the advantage 1."""
        logprobs_BT = self._logprobs(sequences)
        (-logprobs_BT * sequences.response_mask_BT).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _logprobs(self, sequences: Sequences) -> torch.Tensor:
        tokens_BF, mask_BF = sequences.tokens_BS[:, :-1], sequences.mask_BS[:, :-1]
        logits_BTV = self.model(
            input_ids=tokens_BF,
            attention_mask=mask_BF,
            position_ids=positions(mask_BF),
            use_cache=False,
            logits_to_keep=sequences.response_width,
        ).logits
        targets_BT = sequences.tokens_BS[:, -sequences.response_width :]
        return logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None]).squeeze(-1)


class TRL:
    """TRL's unchanged GRPOTrainer with GSPO's loss. It trains in a thread of its own, one rollout for each ``step``.

    Raises ImportError without TRL (the extra ``oracles``).
    """

    def __init__(self, words: Sequence[str]) -> None:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        self.config = config_of(words)
        rollout, updates = self.config.rollout, self.config.updates_per_rollout
        rows = rollout.prompts * rollout.responses
        task = instantiate(self.config.task)
        scored = Scored(task)
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            return [scored.score(prompt, text, True) for prompt, text in zip(prompts, completions, strict=True)]

        go, done = self._go, self._done

        class Turns(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % updates == 0:
                    done.release()
                    go.acquire()

        with tempfile.TemporaryDirectory() as folder:
            settings = GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=rows // updates,
                num_generations=rollout.responses,
                generation_batch_size=rows,
                max_completion_length=task.max_new_tokens,
                importance_sampling_level="sequence",
                loss_type="grpo",
                beta=0.0,
                learning_rate=3e-4,
                max_steps=1_000_000,
                use_cpu=self.config.device == "cpu",
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
                **_BAND,
            )
        self._trainer = GRPOTrainer(
            model=model_of(self.config),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": task.sample(4096, numpy_generator(0, "speed"))}),
            processing_class=task.tokenizer,
            callbacks=[Turns()],
        )
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        self._go.acquire()
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
            self._done.release()

    def step(self) -> dict[str, Any]:
        """Make one rollout and its updates. Raises RuntimeError if TRL's trainer has stopped."""
        if not self._thread.is_alive() and self._error is None:
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise RuntimeError("TRL's trainer stopped") from self._error
        return {}

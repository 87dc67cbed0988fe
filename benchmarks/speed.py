"""Time a rollout step of this suite, of TRL and of two plain loops: ``make speed``.

A step samples G responses to each of P prompts and takes a few gradient updates on them. All trainers start from the
same untrained weights and take turns, so that other work on the machine slows all of them. Scores are random, so that
every group has a signal. docs/commands.md explains what is timed and shows what was recorded.

Shapes (docs/metrics.md): B sequences, F positions fed, S prompt and response positions, T response positions,
V vocabulary.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from torch.nn.functional import grouped_mm, rms_norm, scaled_dot_product_attention, silu
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from steadymoe.bench.runs import compose, provenance
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support import files
from steadymoe.bench.support.seeding import derive, numpy_generator, torch_generator
from steadymoe.bench.training.forward import Sequences
from steadymoe.bench.training.packing import positions
from steadymoe.bench.training.sampling import sample
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build

MEASURED = Path("results/measured_speed/speed.json")  # ignored by git
RECORDED, PAGE = Path("results/speed/speed.json"), Path("docs/commands.md")  # --record replaces both
# Rollouts per block. Probes run in the first of a block (``config_of``), so only whole blocks compare.
BLOCK = 4

# Four mini-batches of 64 responses out of 256, as by TRL's defaults. stale: two of 128, and long: two of 64, both
# on the board's model. tokens…: longer responses on it; a response to a chain has one token per operand.
SETTINGS = {
    "micro": "model=micro task=chain updates_per_rollout=4 minibatch_prompts=8",
    "tiny": "model=tiny task=chain updates_per_rollout=4 minibatch_prompts=8",
    "stale": "model=flat updates_per_rollout=2 minibatch_prompts=16 task=sort task.min_length=4 task.max_length=8 "
    "savings.reuse_sampler_logprobs=10",
    "long": "model=flat updates_per_rollout=2 minibatch_prompts=8 task=ledger savings.reuse_sampler_logprobs=10",
} | {
    f"tokens{tokens}": f"model=flat task=chain updates_per_rollout=2 minibatch_prompts={prompts} task.spare_tokens=0 "
    f"task.min_operands={tokens} task.max_operands={tokens} model.config.max_position_embeddings=1024"
    for tokens, prompts in ((50, 8), (200, 2))
}
# This suite: name in speed.json → overrides.
OURS = "ours"
VARIANTS = {
    OURS: "",
    "ours, little": "measure=little",
    "no sharing": "savings.share_prompts=false",
    "old policy's forward": "savings.reuse_sampler_logprobs=null",
    "distribution": "algorithm=score_centering",
}
# TRL ends some rows before their last token. It pads to the longest, which is shorter than ours here alone.
WITHOUT_TRL = ("tokens200",)
STAGES = ("rollout", "old_policy", "update", "probe")
# Row of the table → what is divided by the time of the suite with all metrics.
RATIOS = {
    "TRL": "TRL",
    "plain transformers": "plain transformers",
    "a loop by hand": "by hand",
    "`measure=little`": "ours, little",
    "`savings.share_prompts=false`": "no sharing",
    "`savings.reuse_sampler_logprobs=null`": "old policy's forward",
    "`algorithm=score_centering`": "distribution",
}


def config_of(overrides: str) -> RunConfig:
    """Return the config of a timed trainer, with GSPO's loss unless named, without evaluations. Raises ConfigError."""
    args = ["algorithm=gspo", "updates=1000000", "evaluation.every=1000000", *overrides.split()]
    last = {arg.partition("=")[0]: arg for arg in args}
    config = compose.plan(list(last.values()))[0].config
    return replace(config, probe=replace(config.probe, every=BLOCK * config.updates_per_rollout))


def prepared(overrides: str) -> tuple[RunConfig, Any, PreTrainedModel]:
    """Return the config, its task with random scores in [0, 1), and an untrained model, the same for equal configs.

    No token ends a response: random scores would teach each trainer another length.
    """
    config = config_of(overrides)
    task, generator = instantiate(config.task), torch.Generator().manual_seed(0)
    vars(task)["score"] = lambda prompt, response, finished: float(torch.rand((), generator=generator))
    model = build.build(config.model["config"], task.tokenizer, derive(0, "speed"), config.device)
    task.tokenizer.add_special_tokens({"eos_token": "<never>"})  # a token that the model does not have
    return config, task, model


# Of overrides: the config, the task and the model that a trainer begins with.
Prepare = Callable[[str], tuple[RunConfig, Any, PreTrainedModel]]


class Suite:
    """This suite's trainer; ``rows`` has a row of the table ``steps`` for each step."""

    def __init__(self, overrides: str) -> None:
        config, task, model = prepared(overrides)
        self.trainer = Trainer(model, task, config)
        self.rows: list[dict[str, Any]] = []

    def step(self) -> None:
        """Make one rollout and its updates."""
        self.rows += self.trainer.step(len(self.rows) + 1).rows["steps"]


class Plain:
    """A minimal trainer on transformers alone: ``generate``, a forward of the old policy, policy-gradient updates."""

    def __init__(self, overrides: str, prepare: Prepare = prepared) -> None:
        self.config, self.task, self.model = prepare(overrides)
        rate = self.config.optimizer.learning_rate
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        self._generation = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=self.task.max_new_tokens,
            pad_token_id=0,
            eos_token_id=self.task.tokenizer.eos_token_id,
        )
        self._steps = 0

    def step(self) -> None:
        """Make one rollout and its updates, in which every token has the advantage 1; measure nothing."""
        self._steps += 1
        sequences = self.generate(self.encoded(self._steps, self.config.rollout.responses))
        with torch.no_grad():
            self._logprobs(sequences)
        for rows in torch.randperm(len(sequences.tokens_BS)).chunk(self.config.updates_per_rollout):
            minibatch = sequences.rows(rows)
            (-self._logprobs(minibatch) * minibatch.response_mask_BT).mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def encoded(self, number: int, copies: int = 1) -> Any:
        """Tokenize the prompts of rollout ``number``, ``copies`` rows of each, padded on the left."""
        prompts = self.task.sample(self.config.prompts, numpy_generator(number, "speed"))
        rows = [prompt for prompt in prompts for _ in range(copies)]
        return self.task.tokenizer(rows, padding=True, padding_side="left", return_tensors="pt")

    def generate(self, encoded: Any) -> Sequences:
        """Sample responses by ``model.generate``, without log-probabilities."""
        generate: Any = self.model.generate
        tokens_BS = generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            generation_config=self._generation,
        )
        width = encoded["input_ids"].shape[1]
        mask_BS = torch.cat([encoded["attention_mask"], torch.ones_like(tokens_BS[:, width:])], 1)
        return Sequences(tokens_BS, mask_BS, tokens_BS.shape[1] - width)

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


class ByHand(Plain):
    """The same trainer without transformers' model code: a forward of Qwen3-MoE written out, for the same weights.

    Rows are padded, experts are one sorted ``grouped_mm``, and decoding keeps a cache that grows; nothing is measured.
    It is what a reader would write who wants RL on this model and nothing else.
    """

    def generate(self, encoded: Any) -> Sequences:
        """Sample responses with a cache of keys and values, a row each."""
        tokens_BS, mask_BS = encoded["input_ids"], encoded["attention_mask"]
        width, generator = tokens_BS.shape[1], torch.Generator().manual_seed(self._steps)
        cache: list[Any] = [None] * len(self._layers)
        alive_B1, end = torch.ones_like(mask_BS[:, :1]), self.task.tokenizer.eos_token_id
        with torch.no_grad():
            fed, position = tokens_BS, positions(mask_BS)
            while True:
                logits_BV = self._logits(fed, position, mask_BS, cache)[:, -1]
                drawn_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
                tokens_BS = torch.cat([tokens_BS, drawn_B1], 1)
                mask_BS = torch.cat([mask_BS, alive_B1], 1)
                alive_B1 = alive_B1 * (drawn_B1 != end)
                if tokens_BS.shape[1] == width + self.task.max_new_tokens or not alive_B1.any():
                    return Sequences(tokens_BS, mask_BS, tokens_BS.shape[1] - width)
                fed, position = drawn_B1, position[:, -1:] + 1

    def _logprobs(self, sequences: Sequences) -> torch.Tensor:
        tokens_BF, mask_BF, width = sequences.tokens_BS[:, :-1], sequences.mask_BS[:, :-1], sequences.response_width
        logits_BTV = self._logits(tokens_BF, positions(mask_BF), mask_BF, None)[:, -width:]
        targets_BT = sequences.tokens_BS[:, -width:]
        return logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None]).squeeze(-1)

    @property
    def _layers(self) -> Any:
        return self.model.base_model.layers

    def _logits(
        self, tokens: torch.Tensor, position: torch.Tensor, mask_BS: torch.Tensor, cache: list[Any] | None
    ) -> torch.Tensor:
        """Return the logits after each of ``tokens``, (B, N, V); ``cache`` holds the tokens before them and grows."""
        base: Any = self.model.base_model
        hidden, queries = base.embed_tokens(tokens), tokens.shape[1]
        turned = base.rotary_emb(hidden, position)
        allowed = torch.ones(queries, mask_BS.shape[1], dtype=torch.bool).tril(mask_BS.shape[1] - queries)
        allowed = allowed & mask_BS.bool()[:, None, None]
        allowed[..., 0] |= ~allowed.any(-1)  # a row of padding attends to something
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attention(
                layer.self_attn, _normed(layer.input_layernorm, hidden), turned, allowed, cache, number
            )
            normed = _normed(layer.post_attention_layernorm, hidden)
            hidden = hidden + _experts(layer.mlp, normed.flatten(0, 1)).view_as(hidden)
        return self.model.lm_head(_normed(base.norm, hidden))

    def _attention(
        self, part: Any, hidden: torch.Tensor, turned: Any, allowed: torch.Tensor, cache: list[Any] | None, number: int
    ) -> torch.Tensor:
        heads = (*hidden.shape[:2], -1, part.head_dim)
        query = _normed(part.q_norm, part.q_proj(hidden).view(heads)).transpose(1, 2)
        key = _normed(part.k_norm, part.k_proj(hidden).view(heads)).transpose(1, 2)
        value = part.v_proj(hidden).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *turned)
        if cache is not None:
            if cache[number] is not None:
                key, value = (torch.cat(pair, 2) for pair in zip(cache[number], (key, value), strict=True))
            cache[number] = key, value
        seen = scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True)
        return part.o_proj(seen.transpose(1, 2).flatten(2))


def _normed(norm: Any, values: torch.Tensor) -> torch.Tensor:
    return rms_norm(values, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _experts(part: Any, hidden_NH: torch.Tensor) -> torch.Tensor:
    """The MoE layer of tokens: softmax, top k, normalised gates, one grouped product for all experts, SwiGLU."""
    gates_NK, chosen_NK = (hidden_NH @ part.gate.weight.T).softmax(-1).topk(part.gate.top_k)
    gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)
    order = chosen_NK.flatten().argsort(stable=True)
    token = order // chosen_NK.shape[1]
    ends_E = chosen_NK.flatten().bincount(minlength=len(part.gate.weight)).cumsum(0).int()
    gate, up = grouped_mm(hidden_NH[token], part.experts.gate_up_proj.mT, offs=ends_E).chunk(2, -1)
    out = grouped_mm(silu(gate) * up, part.experts.down_proj.mT, offs=ends_E)
    return torch.zeros_like(hidden_NH).index_add(0, token, out * gates_NK.flatten()[order, None])


class TRL:
    """TRL's unchanged GRPOTrainer with GSPO's loss. It trains in a thread of its own, one rollout for each ``step``.

    Raises ImportError without TRL (the extra ``oracles``).
    """

    def __init__(self, overrides: str, prepare: Prepare = prepared) -> None:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        config, task, model = prepare(overrides)
        rollout, updates = config.rollout, config.updates_per_rollout
        rows = config.prompts * rollout.responses
        go, done = self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            return [task.score(prompt, text, True) for prompt, text in zip(prompts, completions, strict=True)]

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
                epsilon=3e-4,  # with epsilon_high as in GSPO's paper (2507.18071, section 5.1)
                epsilon_high=4e-4,
                learning_rate=config.optimizer.learning_rate,
                max_steps=1_000_000,
                use_cpu=config.device == "cpu",
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
            )
        self._trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": task.sample(4096, numpy_generator(0, "speed"))}),
            processing_class=task.tokenizer,
            callbacks=[Turns()],
        )
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        self._go.acquire()
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
            self._done.release()

    def step(self) -> None:
        """Make one rollout and its updates. Raises RuntimeError if TRL's trainer fails."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise RuntimeError("TRL's trainer failed") from self._error


def interleaved(trainers: Mapping[str, Suite | Plain | TRL], blocks: int) -> dict[str, list[float]]:
    """Time trainers in turns: name → processor seconds per step in each block. A first block warms up."""
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for block in range(blocks + 1):
        sums = dict.fromkeys(trainers, 0.0)
        for _ in range(BLOCK):
            for name, trainer in trainers.items():
                start = time.process_time()  # other work on the machine does not lengthen it
                trainer.step()
                sums[name] += time.process_time() - start
        if block:
            for name, total in sums.items():
                taken[name].append(total / BLOCK)
    return taken


def ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Divide the seconds of ``other`` by those of ``base``, block by block: median, least and most."""
    ratios = [above / below for below, above in zip(base, other, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def generate_ratio(overrides: str, rounds: int, model: PreTrainedModel) -> dict[str, float]:
    """Time ``model.generate`` relative to the suite's sampling by ``model``, on the same prompts and decoding steps."""
    plain, ours, theirs = Plain(overrides), [], []
    responses = plain.config.rollout.responses
    for number in range(rounds + 1):
        once, repeated = plain.encoded(number), plain.encoded(number, responses)
        start = time.process_time()
        sample(
            model,
            once,
            responses=responses,
            ends=(),  # no response ends early; a batch of ``generate`` goes on until its last one ends
            max_new_tokens=plain.task.max_new_tokens,
            generator=torch_generator(number, "speed"),
        )
        middle = time.process_time()
        plain.generate(repeated)
        if number:  # the first round warms up
            ours.append(middle - start)
            theirs.append(time.process_time() - middle)
    return ratio(ours, theirs)


def stages_and_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each stage's share of the time of steps, and the tokens per second of sampling and of training."""
    sums = {stage: sum(row[f"{stage}_seconds"] for row in rows) for stage in STAGES}
    trained = sum(row["response_tokens"] for row in rows)
    return {
        "stages": {stage: spent / sum(sums.values()) for stage, spent in sums.items()},
        "rollout_tokens_per_second": sum(row["tokens_sampled"] for row in rows) / sums["rollout"],
        "training_tokens_per_second": trained / (sums["old_policy"] + sums["update"]),
    }


def measure(overrides: str, blocks: int) -> dict[str, Any]:
    """Time one setting: seconds per step of each trainer, ratios to the suite, its stages, its rates and its memory."""
    suites = {name: Suite(f"{overrides} {more}") for name, more in VARIANTS.items()}
    peers: dict[str, Plain | TRL] = {"plain transformers": Plain(overrides), "by hand": ByHand(overrides)}
    if find_spec("trl") and overrides not in map(SETTINGS.get, WITHOUT_TRL):
        peers["TRL"] = TRL(overrides)
    taken = interleaved({**suites, **peers}, blocks)
    return {
        "seconds": {name: statistics.median(each) for name, each in taken.items()},
        **stages_and_rates(suites[OURS].rows[BLOCK:]),
        "beside": {name: ratio(taken[OURS], each) for name, each in taken.items() if name != OURS},
        "generate": generate_ratio(overrides, blocks, suites[OURS].trainer.model),
    }


def markdown(numbers: Mapping[str, Any]) -> str:
    """Write the numbers of settings as a table in Markdown, a column per setting."""
    cells = {setting: _cells(each) for setting, each in numbers.items()}
    machines = ", ".join(sorted({each["machine"]["cpu"] for each in numbers.values()}))
    return (
        f"One thread ({machines}). Medians over blocks of {BLOCK} steps. Rows without a unit, but `generate`'s: time "
        "over that of the suite with all metrics, with the range over blocks.\n\n"
        f"{pd.DataFrame(cells).fillna('').to_markdown(disable_numparse=True)}"
    )


def _cells(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return the column of one setting, row → cell; what was not measured, as TRL where it is missing, has none."""

    def with_range(ratios: Mapping[str, float]) -> str:
        return f"{ratios['median']:.2f} ({ratios['least']:.2f}–{ratios['most']:.2f})"

    cells = {"seconds per step of the suite, all metrics": f"{numbers['seconds'][OURS]:.3f}"}
    cells |= {row: with_range(numbers["beside"][name]) for row, name in RATIOS.items() if name in numbers["beside"]}
    cells["`generate` / our sampling"] = with_range(numbers["generate"])
    rates = (numbers[f"{rate}_tokens_per_second"] for rate in ("rollout", "training"))
    cells["tokens/s: rollout, training"] = "/".join(f"{rate:.0f}" for rate in rates)
    stages = ", ".join(numbers["stages"]).replace("_", " ")
    cells[f"% of a step: {stages}"] = "/".join(f"{share * 100:.0f}" for share in numbers["stages"].values())
    return cells


def section(name: str, text: str) -> None:
    """Replace what stands between ``<!-- begin name -->`` and ``<!-- end name -->`` in ``PAGE``.

    Raises ValueError for a page without these markers.
    """
    before, begin, rest = PAGE.read_text().partition(f"<!-- begin {name} -->\n")
    _, end, after = rest.partition(f"<!-- end {name} -->")
    if not (begin and end):
        raise ValueError(f"{PAGE} lacks the markers <!-- begin {name} --> and <!-- end {name} -->")
    files.write(PAGE, partial(Path.write_text, data=f"{before}{begin}{text.rstrip()}\n{end}{after}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write speed.json and print its table; exit with code 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/speed.py",
        description="Time a rollout step of this suite, of TRL and of two plain loops.",
    )
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="default: all")
    parser.add_argument("--blocks", type=int, default=6, help=f"interleaved blocks of {BLOCK} steps (default: 6)")
    parser.add_argument("--record", action="store_true", help=f"replace these settings in {RECORDED} and in {PAGE}")
    given = parser.parse_args(arguments)
    if given.blocks < 1:
        parser.error(f"--blocks must be at least 1, got {given.blocks}")
    if given.record and not (PAGE.is_file() and RECORDED.is_file()):
        parser.error(f"--record replaces {RECORDED} and a section of {PAGE}: run it where both are")
    if not find_spec("trl"):
        print("TRL is not installed and is left out; `make speed` installs it", file=sys.stderr)
    torch.set_num_threads(1)
    measured_by = {
        "machine": {"system": platform.system(), "cpu": provenance.processor(), "cores": os.cpu_count(), "threads": 1},
        "versions": {name: version(name) for name in ("torch", "transformers", "trl") if find_spec(name)},
        "blocks": given.blocks,
    }
    numbers = {setting: measured_by | measure(SETTINGS[setting], given.blocks) for setting in given.setting}
    if given.record:
        known = json.loads(RECORDED.read_text()) | numbers
        recorded = {setting: known[setting] for setting in SETTINGS if setting in known}
        files.write_json(RECORDED, recorded)
        section("timings", markdown(recorded))
        print(f"replaced the table of {PAGE}; the text around it is yours to update", file=sys.stderr)
    else:
        MEASURED.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(MEASURED, numbers)
    print(markdown(numbers))


if __name__ == "__main__":
    main()

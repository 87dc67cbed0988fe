"""What a run costs beside plain transformers, on the same model and batch, in one process, interleaved.

``make speed``; options: ``--model``, ``--rounds``. Prints a Markdown table: seconds and tokens per second
as medians over rounds, and every ratio as the median of the rounds' own ratios with its range.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hydra.utils import instantiate
from transformers import GenerationConfig, PreTrainedModel

from steadymoe.algorithms import names
from steadymoe.bench import compose, metrics
from steadymoe.bench.layout import positions
from steadymoe.bench.policy import Sequences
from steadymoe.bench.probe import UpdateProbe
from steadymoe.bench.rollout import Rollout, sample
from steadymoe.bench.seeding import derive, numpy_generator, torch_generator
from steadymoe.bench.train import Trainer
from steadymoe.models import build


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["micro", "tiny", "deep"], help="names from conf/model")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds; the medians are printed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model in arguments.model:
        print(table(model, measure(model, arguments.rounds)), flush=True)
    print(losses(arguments.rounds), flush=True)


def measure(model_name: str, rounds: int) -> dict[str, Any]:
    """Seconds of every stage in every round, and the tokens each handles."""
    config = compose.plan([f"model={model_name}", "algorithm=gspo"])[0].config
    task = instantiate(config["task"])

    def fresh() -> PreTrainedModel:
        return build.build(config["model"]["config"], task.tokenizer, derive(0, "speed"), "cpu")

    trainer, plain = Trainer(fresh(), task, config), fresh()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, fused=True)

    prompts = task.sample(config["rollout"]["prompts"], numpy_generator(0, "speed"))
    repeated = [prompt for prompt in prompts for _ in range(config["rollout"]["responses"])]
    encoded = task.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    expanded = task.tokenizer(repeated, padding=True, padding_side="left", return_tensors="pt")
    # No end token: both samplers make every response as long as it may be, so they do equal work.
    sampling = {"responses": config["rollout"]["responses"], "end": -1, "max_new_tokens": task.max_new_tokens}

    def ours_sample() -> Rollout:
        generator = torch_generator(0, "speed")
        return sample(trainer.model, encoded["input_ids"], encoded["attention_mask"], generator=generator, **sampling)

    generation = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=task.max_new_tokens, pad_token_id=0)

    def plain_sample() -> None:
        generate: Any = plain.generate
        generate(**{k: expanded[k] for k in ("input_ids", "attention_mask")}, generation_config=generation)

    made = ours_sample()
    sequences = made.sequences
    minibatches = trainer.minibatches(1)
    advantages_BT = torch.randn(len(repeated), 1, generator=torch_generator(0, "speed")) * sequences.response_mask_BT
    old = trainer.learner.old_policy(made, minibatches)

    def ours_updates() -> None:
        for parts in minibatches:
            measured = trainer.learner.update(made, old, advantages_BT, parts)
            metrics.to_floats(measured.overall)
            {name: values.tolist() for name, values in measured.layers.items()}

    def plain_updates() -> None:
        for parts in minibatches:
            for part in parts:
                _plain_update(plain, plain_optimizer, sequences.rows(part.rows_M))

    def old_policy() -> None:
        trainer.learner.old_policy(made, minibatches)

    watched = UpdateProbe(trainer.model, sequences.rows(trainer.sampled_rows(1)), "fp32")

    def probes() -> None:
        for _ in minibatches:
            watched.after_update(trainer.model)

    stages: dict[str, tuple[Callable[[], object], int]] = {
        "plain updates": (plain_updates, int(sequences.mask_BS.sum())),
        "our updates": (ours_updates, int(sequences.mask_BS.sum())),
        "plain generate": (plain_sample, int(sequences.response_mask_BT.sum())),
        "our sampling": (ours_sample, int(sequences.response_mask_BT.sum())),
        "old-policy forward": (old_policy, int(sequences.mask_BS.sum())),
        "probes": (probes, 0),
        "evaluation": (lambda: trainer.evaluate(1), 0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for round_number in range(rounds + 1):
        for name, (stage, _) in stages.items():
            begun = time.perf_counter()
            stage()
            if round_number:  # the first round warms up
                seconds[name].append(time.perf_counter() - begun)
    return {
        "seconds": seconds,
        "tokens": {name: tokens for name, (_, tokens) in stages.items()},
        "config": config,
    }


def _plain_update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, part: Sequences) -> None:
    """Forward, backward and optimizer as anyone would write them: a policy gradient, nothing measured."""
    tokens_BF, mask_BF = part.tokens_BS[:, :-1], part.mask_BS[:, :-1]
    logits_BTV = model(
        input_ids=tokens_BF,
        attention_mask=mask_BF,
        position_ids=positions(mask_BF),
        use_cache=False,
        logits_to_keep=part.response_width,
    ).logits
    targets_BT = part.tokens_BS[:, -part.response_width :]
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, targets_BT[..., None]).squeeze(-1)
    (-logprobs_BT * part.response_mask_BT).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def losses(rounds: int) -> str:
    """What the loss of every algorithm costs, forward and backward, beside an update of ``micro``, as Markdown."""
    learners = {}
    for name in names():
        config = compose.plan(["model=micro", f"algorithm={name}"])[0].config
        task = instantiate(config["task"])
        model = build.build(config["model"]["config"], task.tokenizer, derive(0, "speed"), "cpu")
        trainer = Trainer(model, task, config)
        made, _, _ = trainer.sample(1)
        minibatches = trainer.minibatches(1)
        old = trainer.learner.old_policy(made, minibatches)
        learners[name] = trainer.learner, made, old, torch.ones_like(made.logprobs_BT), minibatches[0]
    shares_of: dict[str, list[float]] = {name: [] for name in learners}
    updates: list[float] = []
    for round_number in range(rounds + 1):
        for name, (learner, made, old, advantages_BT, parts) in learners.items():
            rows = torch.cat([part.rows_M for part in parts])
            begun = time.perf_counter()
            learner.update(made, old, advantages_BT, parts)
            update = time.perf_counter() - begun
            now = learner.forwards(learner.model, made, rows)
            batch = learner.batch(
                made, old, advantages_BT, rows, now, (len(rows), int(made.sequences.response_mask_BT[rows].sum()))
            )
            batch = replace(batch, logprobs_BT=batch.logprobs_BT.detach().requires_grad_())
            begun = time.perf_counter()
            learner.objective(batch).loss.backward()
            if round_number:  # the first round warms up
                shares_of[name].append((time.perf_counter() - begun) / update)
                updates.append(update)
    shares = sorted(((statistics.median(values), name) for name, values in shares_of.items()), reverse=True)
    lines = [
        f"### Losses on micro: share of an update ({statistics.median(updates) * 1e3:.0f} ms), {rounds} rounds",
        "",
        "| algorithm | loss, forward and backward |",
        "|---|---|",
        *(f"| {name} | {share:.2%} |" for share, name in shares[:3]),
        f"| median of {len(shares)} | {statistics.median(share for share, _ in shares):.2%} |",
    ]
    return "\n".join(lines) + "\n"


def table(model_name: str, measured: dict[str, Any]) -> str:
    """The measurements of one model as Markdown."""
    seconds, tokens, config = measured["seconds"], measured["tokens"], measured["config"]
    rollout, updates = config["rollout"], config["updates_per_rollout"]
    lines = [
        f"### {model_name}: {rollout['prompts']} prompts × {rollout['responses']} responses, {updates} updates, "
        f"one thread, {len(seconds['our updates'])} rounds",
        "",
        "| stage | ms (median) | tokens/s | beside plain transformers |",
        "|---|---|---|---|",
    ]
    beside = {"our updates": "plain updates", "our sampling": "plain generate"}
    for name, values in seconds.items():
        median = statistics.median(values)
        rate = f"{tokens[name] / median:,.0f}" if tokens[name] else ""
        ratio = ""
        if name in beside:
            ratios = [ours / plain for ours, plain in zip(values, seconds[beside[name]], strict=True)]
            ratio = f"{statistics.median(ratios):.2f} × the time ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {median * 1e3:.0f} | {rate} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

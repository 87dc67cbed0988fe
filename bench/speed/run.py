"""The benchmark as a whole: the timed comparisons, their numbers as JSON, and their tables as Markdown."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.runs import provenance
from steadymoe.bench.speed import measure
from steadymoe.bench.speed.arms import TRL, Arm, Ours, Plain, config_of
from steadymoe.bench.speed.measure import SAVINGS, TimeRatio, interleaved, ratio
from steadymoe.bench.support import atomic_files

# The folder of a measurement (ignored by git), the folder of the committed measurement, and its page.
MEASURED, RECORDED, PAGE = Path("results/measured_speed"), Path("results/speed"), Path("docs/speed.md")
MODELS = ("micro", "tiny")
# Four mini-batches of 64 responses out of 256, as with TRL's defaults.
UPDATES = 4
# The models whose memory is measured.
_MEMORY = ("micro", "tiny", "deep")
_TASKS = {"chain": [], "chain of ten": ["task.min_operands=10", "task.max_operands=10"]}


def main(words: list[str]) -> None:
    """Measure, write ``speed.json``, ``speed.md`` and the figure, and print the tables or the JSON.

    The committed numbers are replaced with ``--record`` alone.
    """
    parser = argparse.ArgumentParser(prog="steadymoe speed", description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="names from conf/model")
    parser.add_argument("--blocks", type=int, default=6, help=f"interleaved blocks of {measure.BLOCK} steps")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, default=MEASURED, help=f"folder (default: {MEASURED})")
    place.add_argument("--record", action="store_true", help=f"replace what is committed: {RECORDED} and {PAGE}")
    parser.add_argument("--json", action="store_true", help="print the numbers in place of the tables")
    arguments = parser.parse_args(words)
    if arguments.record and not _is_recorded():
        parser.error(f"--record replaces {RECORDED} and its tables in {PAGE}: no such pair below this folder")
    torch.set_num_threads(1)
    begun = time.monotonic()
    try:
        for model in arguments.model:
            config_of([f"model={model}"])
    except ConfigError as error:
        parser.error(str(error))
    numbers = everything(arguments.model, arguments.blocks)
    numbers["minutes"] = round((time.monotonic() - begun) / 60, 1)
    if arguments.record:
        page = PAGE.read_text().replace((RECORDED / "speed.md").read_text(), markdown(numbers))
        atomic_files.write(PAGE, partial(Path.write_text, data=page))
        _say(f"the tables of {PAGE} are new; its sentences about them are not")
    write(numbers, RECORDED if arguments.record else arguments.out)
    print(json.dumps(numbers, indent=1) if arguments.json else markdown(numbers))


def write(numbers: dict[str, Any], folder: Path) -> None:
    """Write the numbers, their tables and their figure to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"speed.json": json.dumps(numbers, indent=1) + "\n", "speed.md": markdown(numbers)}.items():
        atomic_files.write(folder / name, partial(Path.write_text, data=text))
    figure = scaling_figure(pd.DataFrame(numbers["scaling"]))
    for suffix in ("png", "svg"):
        atomic_files.write(folder / f"scaling.{suffix}", partial(style.save, figure, suffix=suffix))


def _is_recorded() -> bool:
    """Whether the committed page contains the committed tables."""
    tables = RECORDED / "speed.md"
    return PAGE.is_file() and tables.is_file() and tables.read_text() in PAGE.read_text()


def everything(models: list[str], blocks: int) -> dict[str, Any]:
    """All numbers: machine, versions, and for each model the cost of a step and of its stages."""
    names = ["torch", "transformers", *(["trl"] if find_spec("trl") else [])]
    numbers: dict[str, Any] = {
        "machine": {"system": platform.system(), "cpu": provenance.processor(), "cores": os.cpu_count(), "threads": 1},
        "versions": {name: version(name) for name in names},
        "matmul_gflops": measure.matmul_peak() / 1e9,
        "blocks": blocks,
    }
    if "trl" not in numbers["versions"]:
        _say("TRL is not installed here: `make speed` installs it")
    numbers["models"] = {}
    for model in models:
        _say(f"{model}: steps beside TRL, plain transformers, the dense twin, and without each saving")
        numbers["models"][model] = of_model(model, blocks)
    _say("two processes at once")
    words = ["model=micro", f"updates_per_rollout={UPDATES}"]
    numbers["two_processes"] = {kind: measure.two_processes(kind, words, steps=16) for kind in ("ours", "plain")}
    numbers["peak_mib"] = {model: measure.peak_memory([f"model={model}"]) / 2**20 for model in _MEMORY}
    _say("the cost of the loss of every algorithm")
    numbers["losses"] = measure.losses(rounds=7)
    _say("the growth of a step of micro")
    numbers["scaling"] = measure.scaling(words)
    return numbers


def of_model(model: str, blocks: int) -> dict[str, Any]:
    """The numbers of one model; also with longer prompts and with signal in half of the groups."""
    words = [f"model={model}", f"updates_per_rollout={UPDATES}"]
    ours = Ours(words)
    arms: dict[str, Arm] = {
        "ours": ours,
        "measure=little": Ours([*words, "measure=little"]),
        "sampler_as_old": Ours([*words, "savings.sampler_as_old=10"]),
        "no savings": Ours([*words, *(f"savings.{name}=false" for name in SAVINGS)]),
        "dense twin": Ours([f"model=dense_{model}", *words[1:]]),
        "plain transformers": Plain(words),
    }
    if find_spec("trl"):
        arms["TRL"] = TRL(words)
    taken, rows_of = interleaved(arms, blocks)
    rows = rows_of["ours"]
    sampled = sum(row["tokens_sampled"] for row in rows)
    rollout_seconds = sum(row["rollout_seconds"] for row in rows)
    training_seconds = sum(row["old_policy_seconds"] + row["update_seconds"] for row in rows)
    numbers: dict[str, Any] = {
        "seconds": {name: statistics.median(each) for name, each in taken.items()},
        "times_as_fast": {name: vars(ratio(taken["ours"], each)) for name, each in taken.items() if name != "ours"},
        "stages": measure.stages(rows),
        "rollout_tokens_per_second": sampled / rollout_seconds,
        "training_tokens_per_second": sum(row["response_tokens"] for row in rows) / training_seconds,
        "useful_gflops": sum(measure.useful_flop(ours, row) for row in rows) / training_seconds / 1e9,
        "times_generate": vars(measure.generation(words, blocks * measure.BLOCK)),
    }
    numbers["savings"] = savings(words, blocks)
    if find_spec("trl"):
        numbers["beside_trl"] = {
            f"{task}, signal in {'all' if signal == 1 else 'half'}": beside_trl([*words, *more], signal, blocks)
            for task, more in _TASKS.items()
            for signal in (1.0, 0.5)
        }
    return numbers


def savings(words: list[str], blocks: int) -> dict[str, dict[str, float]]:
    """How many times as long a step takes with each saving alone switched off; signal in half of the groups."""
    arms: dict[str, Arm] = {"ours": Ours(words, 0.5)}
    arms |= {name: Ours([*words, f"savings.{name}=false"], 0.5) for name in SAVINGS}
    taken, _ = interleaved(arms, blocks)
    return {name: vars(ratio(taken["ours"], taken[name])) for name in SAVINGS}


def beside_trl(words: list[str], signal: float, blocks: int) -> dict[str, float]:
    """How many times as fast our step is as a step of TRL's trainer, all metrics on; ``signal`` as in ``Scored``."""
    taken, _ = interleaved({"ours": Ours(words, signal), "TRL": TRL(words, signal)}, blocks)
    return vars(ratio(taken["ours"], taken["TRL"]))


def markdown(numbers: dict[str, Any]) -> str:
    """The numbers as tables in Markdown."""
    machine, models = numbers["machine"], numbers["models"]
    first = next(iter(models.values()))
    versions = ", ".join(f"{name} {number}" for name, number in numbers["versions"].items())
    lines = [
        f"{machine['cores']} cores of {machine['cpu']}, one thread; {versions}; fp32 matmul peak "
        f"{numbers['matmul_gflops']:.0f} GFLOP/s. 32 prompts × 8 responses, {UPDATES} updates. Medians of "
        f"{numbers['blocks']} blocks of {measure.BLOCK} steps, ratios of the same blocks with their range.",
        "",
        _table(
            {
                "seconds a step": lambda one: f"{one['seconds']['ours']:.3f}",
                "TRL takes": lambda one: _times(one, "TRL"),
                "plain transformers take": lambda one: _times(one, "plain transformers"),
                "without savings": lambda one: _times(one, "no savings"),
                "with `measure=little`": lambda one: _times(one, "measure=little"),
                "with `savings.sampler_as_old=10`": lambda one: _times(one, "sampler_as_old"),
                "the dense twin takes": lambda one: _times(one, "dense twin"),
                "sampling beside `generate`": lambda one: f"{TimeRatio(**one['times_generate'])} times as fast",
                "rollout tokens/s": lambda one: f"{one['rollout_tokens_per_second']:,.0f}",
                "training tokens/s": lambda one: f"{one['training_tokens_per_second']:,.0f}",
                "useful arithmetic of training": lambda one: (
                    f"{one['useful_gflops']:.1f} GFLOP/s, {one['useful_gflops'] / numbers['matmul_gflops']:.0%} of peak"
                ),
                **{f"share of {stage.replace('_', ' ')}": partial(_stage, stage) for stage in first["stages"]},
            },
            models,
        ),
        "",
        "A step without one saving, signal in half of the groups:",
        "",
        _table({f"`savings.{name}=false`": partial(_without, name) for name in first["savings"]}, models),
    ]
    beside = {name: one for name, one in models.items() if "beside_trl" in one}
    if beside:
        rows = {case: partial(_beside, case) for case in next(iter(beside.values()))["beside_trl"]}
        lines += ["", "How many times as long TRL's step takes, by task and groups with a signal:", ""]
        lines.append(_table(rows, beside))
    ours, plain = (numbers["two_processes"][kind] for kind in ("ours", "plain"))
    lines += [
        "",
        f"Two processes of micro at once make {ours:.2f} times the steps of one; of plain transformers {plain:.2f}.",
    ]
    held = ", ".join(f"{model} {mib:,.0f}" for model, mib in numbers["peak_mib"].items())
    lines += ["", f"Most memory that a process holds, MiB, interpreter and libraries included: {held}."]
    dearest = sorted(numbers["losses"].items(), key=lambda each: -each[1])[:3]
    lines += ["", "Share of a loss, forward and backward, in an update of micro, the three dearest algorithms: "]
    median = statistics.median(numbers["losses"].values())
    lines[-1] += ", ".join(f"{name} {share:.1%}" for name, share in dearest) + f"; median of all {median:.1%}."
    frame = pd.DataFrame(numbers["scaling"])
    lines += ["", "Seconds a step of micro as one dial is turned:", "", "| dial | seconds |", "|---|---|"]
    for dial, group in frame.groupby("dial", sort=False):
        cells = ", ".join(f"{value}: {each:.3f}" for value, each in zip(group["value"], group["seconds"], strict=True))
        lines.append(f"| {dial} | {cells} |")
    return "\n".join(lines) + "\n"


def _table(rows: dict[str, Any], models: dict[str, Any]) -> str:
    head = f"| | {' | '.join(models)} |\n|---|{'---|' * len(models)}\n"
    return head + "\n".join(
        f"| {name} | {' | '.join(cell(one) for one in models.values())} |" for name, cell in rows.items()
    )


def _times(one: dict[str, Any], name: str) -> str:
    found = one["times_as_fast"].get(name)
    return "–" if found is None else f"{TimeRatio(**found)} × the time"


def _stage(stage: str, one: dict[str, Any]) -> str:
    return f"{one['stages'][stage]:.0%}"


def _without(name: str, one: dict[str, Any]) -> str:
    return f"{TimeRatio(**one['savings'][name])} × the time"


def _beside(case: str, one: dict[str, Any]) -> str:
    return str(TimeRatio(**one["beside_trl"][case]))


def scaling_figure(rows: pd.DataFrame) -> style.DataFigure:
    """Seconds of a step over each dial, on logarithmic axes."""
    dials = list(dict.fromkeys(rows["dial"]))
    with style.figure_style():
        figure, axes = style.panels(2, 3, 3.2, width=style.TWO_COLUMNS, sharey=True)
        for axis, dial in zip(axes, dials, strict=False):
            ours = rows[rows["dial"] == dial]
            axis.plot(ours["value"], ours["seconds"], "o-", color=looks.COLOURS[0], linewidth=1.1, markersize=3)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(ours["value"], [str(value) for value in ours["value"]])
            axis.set_xlabel(dial)
            shown = pd.DataFrame({"x": ours["value"], "mean": ours["seconds"]})
            style.note(axis, dial, shown, "seconds a step")
        for axis in axes[len(dials) :]:
            axis.remove()
        for axis in (axes[0], axes[3]):
            axis.set_ylabel("seconds a step")
        return style.finish(
            figure, None, "Processor seconds of one thread, a step's share of four of micro; no interval."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""The benchmark as a whole: the timed comparisons, and their numbers as JSON."""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.report.figures import style
from steadymoe.bench.runs import provenance
from steadymoe.bench.speed import measure
from steadymoe.bench.speed.arms import TRL, Arm, Ours, Plain, config_of
from steadymoe.bench.speed.measure import interleaved, ratio
from steadymoe.bench.speed.page import markdown, scaling_figure
from steadymoe.bench.support import atomic_files

# The folder of a measurement (ignored by git), the folder of the committed measurement, and its page.
MEASURED, RECORDED, PAGE = Path("results/measured_speed"), Path("results/speed"), Path("docs/speed.md")
COMPILED = "compile=true"
# Four mini-batches of 64 responses out of 256, as with TRL's defaults; two of 128 with the model, the task and the
# mini-batches of the standard setting *stale* (conf/experiment/stale.yaml), whose 16 updates would take too long here.
_FLAT = ["model=flat", "updates_per_rollout=2"]
SETTINGS = {
    "micro": ["model=micro", "updates_per_rollout=4"],
    "tiny": ["model=tiny", "updates_per_rollout=4"],
    "stale": [*_FLAT, "task=sort", "task.min_length=4", "task.max_length=8"],
}
_HOW = {"": [], "compiled": [COMPILED]}
# What can be measured, and what is said of it meanwhile.
PARTS = {
    "settings": "steps beside TRL, plain transformers and the dense twin, compiled and not",
    "begins": "a worker begins, with an empty and with a filled cache of compiled code",
    "lengths": "longer responses, compiled and not",
    "two_processes": "two processes at once",
    "peak_mib": "the memory of a process",
    "losses": "the cost of the loss of every algorithm",
    "scaling": "the growth of a step of micro",
}
# The model of *stale* with longer responses: words for about so many tokens of a response, as in the clip atlas.
LENGTHS = {
    f"{count} tokens, {prompts} prompts": [
        *_FLAT,
        f"task.min_operands={count}",
        f"task.max_operands={count}",
        "task.spare_tokens=0",
        "model.config.max_position_embeddings=1024",
        f"rollout.prompts={prompts}",
    ]
    for count, prompts in ((50, 16), (200, 4))
}


def main(words: list[str]) -> None:
    """Measure, write ``speed.json``, ``speed.md`` and the figure, and print the tables or the JSON.

    The committed numbers are replaced with ``--record`` alone.
    """
    parser = argparse.ArgumentParser(prog="steadymoe speed", description=__doc__)
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="what is timed")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, help="what is measured")
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
        config_of([*SETTINGS["stale"], COMPILED])
    except ConfigError as error:  # no C++ compiler, say
        parser.error(str(error))
    numbers = everything(arguments.setting, arguments.blocks, arguments.part)
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
    if "scaling" in numbers:
        figure = scaling_figure(pd.DataFrame(numbers["scaling"]))
        for suffix in ("png", "svg"):
            atomic_files.write(folder / f"scaling.{suffix}", partial(style.save, figure, suffix=suffix))


def _is_recorded() -> bool:
    """Whether the committed page contains the committed tables."""
    tables = RECORDED / "speed.md"
    return PAGE.is_file() and tables.is_file() and tables.read_text() in PAGE.read_text()


def everything(settings: list[str], blocks: int, parts: Sequence[str] = tuple(PARTS)) -> dict[str, Any]:
    """The numbers of some ``PARTS``, and the machine and the versions that they were measured with."""
    names = ["torch", "transformers", *(["trl"] if find_spec("trl") else [])]
    numbers: dict[str, Any] = {
        "machine": {"system": platform.system(), "cpu": provenance.processor(), "cores": os.cpu_count(), "threads": 1},
        "versions": {name: version(name) for name in names},
        "matmul_gflops": measure.matmul_peak() / 1e9,
        "blocks": blocks,
    }
    if "trl" not in numbers["versions"]:
        _say("TRL is not installed here: `make speed` installs it")
    for part in parts:
        _say(PARTS[part])
        numbers[part] = _part(part, settings, blocks)
    return numbers


def _part(part: str, settings: list[str], blocks: int) -> Any:
    stale = SETTINGS["stale"]
    if part == "settings":
        return {setting: of_setting(setting, blocks) for setting in settings}
    if part == "begins":
        return begins([*stale, COMPILED])
    if part == "lengths":
        return {name: compiled_or_not(words, blocks) for name, words in LENGTHS.items()}
    if part == "two_processes":
        of_two = {"ours": ("ours", stale), "compiled": ("ours", [*stale, COMPILED]), "plain": ("plain", stale)}
        return {name: measure.two_processes(kind, words, steps=6) for name, (kind, words) in of_two.items()}
    if part == "peak_mib":
        named = {(each, how): [*SETTINGS[each], *more] for each in settings for how, more in _HOW.items()}
        return {f"{each} {how}".strip(): measure.peak_memory(words) / 2**20 for (each, how), words in named.items()}
    return measure.losses(rounds=5) if part == "losses" else measure.scaling(SETTINGS["micro"])


def begins(words: list[str]) -> dict[str, float]:
    """Seconds until a process can make its first step: not compiled, with an empty cache, and with the filled one."""
    with tempfile.TemporaryDirectory() as folder:
        empty, filled = (measure.seconds_to_begin(words, Path(folder)) for _ in range(2))
    return {"not compiled": measure.seconds_to_begin(words[:-1]), "empty cache": empty, "filled cache": filled}


def of_setting(setting: str, blocks: int) -> dict[str, Any]:
    """The numbers of one setting; a step of each trainer in turns."""
    words = SETTINGS[setting]
    twin = [word.replace("model=", "model=dense_") for word in words]
    of_arms = {"ours": words, "compiled": [*words, COMPILED], "dense twin": twin}
    of_arms |= {f"{name}, little": [*of_arms[name], "measure=little"] for name in ("ours", "compiled")}
    of_arms["no sharing"] = [*words, "savings.share_prompts=false"]
    of_arms["sampler as old"] = [*of_arms["compiled"], "savings.sampler_as_old=10"]
    made = {name: Ours(each) for name, each in of_arms.items()}
    arms: dict[str, Arm] = {**made, "plain transformers": Plain(words)}
    if find_spec("trl"):
        arms["TRL"] = TRL(words)
    taken, rows = interleaved(arms, blocks)
    numbers: dict[str, Any] = {"seconds": {name: statistics.median(each) for name, each in taken.items()}}
    for base in ("ours", "compiled"):
        numbers[base] = of_stages(made[base], rows[base]) | {
            "beside": {name: vars(ratio(taken[base], each)) for name, each in taken.items() if name != base},
            "generate": vars(measure.generation(words, blocks, made[base].trainer.model)),
        }
    return numbers


def of_stages(arm: Ours, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the stages in the time of steps, tokens a second, and useful arithmetic."""
    sampled = sum(row["tokens_sampled"] for row in rows)
    training_seconds = sum(row["old_policy_seconds"] + row["update_seconds"] for row in rows)
    return {
        "stages": measure.stages(rows),
        "rollout_tokens_per_second": sampled / sum(row["rollout_seconds"] for row in rows),
        "training_tokens_per_second": sum(row["response_tokens"] for row in rows) / training_seconds,
        "useful_gflops": sum(measure.useful_flop(arm, row) for row in rows) / training_seconds / 1e9,
    }


def compiled_or_not(words: list[str], blocks: int) -> dict[str, Any]:
    """A step that is compiled and one that is not, in turns."""
    arms = {"ours": Ours(words), "compiled": Ours([*words, COMPILED])}
    taken, rows = interleaved(arms, blocks)
    return {"seconds": {name: statistics.median(each) for name, each in taken.items()}} | {
        "not compiled": vars(ratio(taken["compiled"], taken["ours"])),
        "compiled": {"stages": measure.stages(rows["compiled"])},
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

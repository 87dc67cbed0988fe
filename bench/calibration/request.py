"""``steadymoe calibrate`` from its words to its exit code: refusals, what is kept already, the files."""

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from steadymoe.bench.calibration import measure, page, readings
from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import ConfigError, Run
from steadymoe.bench.report.figures import style
from steadymoe.bench.runs import provenance
from steadymoe.bench.support import atomic_files, source
from steadymoe.bench.support.revision import revision
from steadymoe.bench.support.text import visible
from steadymoe.bench.training.cold_start import ColdStartError
from steadymoe.models import build, pretrained

HELP = """steadymoe calibrate key=value … [--redo]

Compare a model's routers, ratios, gradient and engines with published numbers of real models:
steadymoe calibrate model=flat task=sort engine=fp8 optimizer.learning_rate=6e-4. Takes the overrides of
`steadymoe run`, for one run. Results are saved to <results_dir>/calibrations/<model>-<task>-<hash>/; --redo replaces
them."""
_FILES = ("calibration.png", "calibration.csv", "calibration.html", "calibration.json")
# What decides the numbers of a calibration and the ranges beside them, apart from the training code.
_MEASURES: tuple[str, ...] = (
    *(f"calibration/{name}.py" for name in ("at_rest", "engines", "measure", "readings", "updates")),
    *(f"measurement/{name}.py" for name in ("gradient_noise", "published", "router_certainty")),
)


def answer(words: list[str]) -> int:
    """Calibrate what ``words`` ask for and return the exit code.

    0: measured, or measured before; 1: the measurement failed; 2: the request is invalid; 130: interrupted.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    try:
        run = _planned([word for word in words if word != "--redo"])
        folder = _folder(run)
        kept = None if "--redo" in words else _kept(folder, run)
        _begin(folder.parent, run)
    except (ConfigError, ValueError, OSError) as error:
        return _refuse(error, 2)
    console = Console(markup=False, highlight=False)  # its texts come from data
    if kept is not None:
        _show(console, kept, f"calibrated before: {folder} (--redo makes it again)")
        return 0
    begun = time.monotonic()
    try:
        made = measure.calibrate(run, partial(_progress, begun))
        facts = _facts(run, folder.name, made, time.monotonic() - begun)
        _write(folder, facts)
    except (ColdStartError, FloatingPointError, OSError) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        return _refuse("interrupted; no calibration was written", 130)
    _show(console, facts, "")
    for name in _FILES:
        console.print(visible(f"wrote {folder / name}"), soft_wrap=True)
    return 0


def _refuse(why: object, code: int) -> int:
    print(f"steadymoe: {visible(why)}", file=sys.stderr)
    return code


def _progress(begun: float, text: str) -> None:
    print(visible(f"{time.monotonic() - begun:4.0f} s  {text}"), file=sys.stderr, flush=True)


def _planned(words: list[str]) -> Run:
    """The one run that the words name. Raises ConfigError for a flag, a sweep, a branch or a dense model."""
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word} is no flag of steadymoe calibrate; it takes --redo, --help, key=value")
    runs = compose.plan(words, multirun=True)
    if len(runs) > 1:
        axes = [{**each.choices, **each.axes, "seed": each.config.seed} for each in runs]
        differing = sorted({key for each in axes for key in each if len({str(one.get(key)) for one in axes}) > 1})
        raise ConfigError(
            f"calibrate measures one config, and these words name {len(runs)}: give one value to {', '.join(differing)}"
        )
    (run,) = runs
    if run.config.start_from is not None:
        raise ConfigError("calibrate measures a model at its cold start; leave start_from out")
    if run.config.compile:
        raise ConfigError("compile=true: calibrate has many trainers on one model, and was never compiled")
    model = run.config.model
    layers = pretrained.moe_layers(model["path"]) if "path" in model else build.has_experts(model["config"])
    if not layers:
        raise ConfigError("calibrate measures routers, and this model is dense")
    return run


def _folder(run: Run) -> Path:
    """Where the files of a calibration lie; names from configs become harmless."""
    named = re.sub(r"[^A-Za-z0-9._@-]", "-", f"{run.choices['model']}-{run.choices['task']}").lstrip(".")[:120]
    return Path(run.config.results_dir) / "calibrations" / f"{named}-{run.config_hash}"


def _kept(folder: Path, run: Run) -> dict[str, Any] | None:
    """The calibration that is there; None if there is none. Raises ConfigError for one of other code, or not whole."""
    path = folder / "calibration.json"
    if not path.exists():
        return None
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        code = provenance.difference(facts).code
        is_other = facts["config_hash"] != run.config_hash or facts["calibration_code"] != _code()
        _table(facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no whole calibration; add --redo to make it again") from error
    if code or is_other:
        raise ConfigError(f"{path} was made by {code or 'other code'}; add --redo to make it again")
    return facts


def _begin(place: Path, run: Run) -> None:
    """Make the folder of all calibrations, before anything is measured. Raises ConfigError."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"results_dir={run.config.results_dir} cannot be written: {error}") from error


def _code() -> str:
    """A hash of the code that measures."""
    return source.digest([source.SUITE / "bench" / name for name in _MEASURES])


def _facts(run: Run, name: str, made: measure.Calibration, seconds: float) -> dict[str, Any]:
    """The content of ``calibration.json``; a number that is not finite is null, and "inf" where it has no bound."""
    config = run.config
    rows = readings.table(made.readings).to_dict("records")
    return {
        "name": name,
        "command": run.command.replace("steadymoe run", "steadymoe calibrate", 1),
        "config_hash": run.config_hash,
        "algorithm_code": provenance.code_hash(run.plain),
        "training_version": provenance.TRAINING_VERSION,
        "calibration_code": _code(),
        "versions": provenance.versions(config.experts),
        "revision": revision(),
        "machine": provenance.machine(config.device, config.threads),
        "seconds": round(seconds, 1),
        "cold_start": made.cold_start,
        "model": made.size,
        "reward": made.reward,
        "rollouts": measure.ROLLOUTS,
        "readings": [{str(key): _written(value) for key, value in row.items()} for row in rows],
        "config": run.plain,
    }


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _table(facts: Mapping[str, Any]) -> pd.DataFrame:
    """The readings of ``calibration.json`` as they were measured."""
    table = pd.DataFrame(facts["readings"])
    numbers = ["mean", "low", "high", "published_low", "published_high", "factor"]
    return table.assign(**{name: table[name].astype(float) for name in numbers})


def _write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write every file; the JSON comes last, since its presence says that the others are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, csv, web, last = (folder / name for name in _FILES)
    table = _table(facts)
    drawn = page.figure(table, str(facts["name"]))
    atomic_files.write(picture, partial(style.save, drawn, suffix="png"))
    atomic_files.write(csv, partial(table.to_csv, index=False))
    atomic_files.write(web, partial(Path.write_text, data=page.html(table, facts, picture), encoding="utf-8"))
    atomic_files.write_json(last, facts)


def _show(console: Console, facts: Mapping[str, Any], first: str) -> None:
    """Print the tables; each line on its own, as wide as it is."""
    for line in [first, *page.text(_table(facts)).splitlines(), page.CAPTION]:
        console.print(visible(line), soft_wrap=True)

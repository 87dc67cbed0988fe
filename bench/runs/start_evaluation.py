"""The evaluation of a cold start: measured once, kept next to it, and shared by every run that begins there."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from steadymoe.bench.runs import identity, provenance
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support import files
from steadymoe.bench.support.text import visible

Row = dict[str, Any]


def of_start(config: RunConfig, start: Mapping[str, Any], cache: Path, measure: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of the evaluation before the first update: those kept in ``cache``, or ``measure()``, kept now.

    ``start`` is what ``cold_start.load_or_make`` returns. Rows of another config, code or machine are not used, and a
    damaged file is named and measured again. Of two runs that want them at once, one measures and the other waits.
    Without a cached cold start nothing is kept.
    """
    if "sha256" not in start:
        return measure()
    key = _key(config, start)
    name = f"{config.cold_start_fingerprint}.evaluation-{identity.digest(key)[:16]}"
    path = cache / f"{name}.json"
    with FileLock(files.replaceable(cache / f".{name}.lock")):
        try:
            return _rows(files.read_json(path, files.MAX_BYTES), key)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f"steadymoe: {visible(path)} is damaged and is measured again: {visible(error)}", file=sys.stderr)
        rows = measure()
        files.write_json(path, {"key": key, "sha256": identity.digest(rows), "rows": rows})
        return rows


def _key(config: RunConfig, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rows depend on. Losses, routing and engines do not change what the start answers."""
    plain = {part: getattr(config, part) for part in ("task", "model")}
    evaluation = {name: value for name, value in asdict(config.evaluation).items() if name != "every"}
    facts = provenance.facts(plain, config.experts, config.device, config.threads)
    code = {name: facts[name] for name in ("algorithm_code", "training_version", "versions", "machine")}
    at_once = config.prompts * config.rollout.responses if config.evaluation.pass_k else None  # pass@k draws so many
    seeded = {name: getattr(config, name) for name in ("seed", "precision", "experts", "device", "threads")}
    return {"start": start["sha256"], "evaluation": evaluation, "at_once": at_once} | seeded | code | plain


def _rows(kept: Any, key: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a file. Raises ValueError, TypeError or KeyError unless they are those that were measured."""
    if kept["key"] != json.loads(json.dumps(key)):
        raise ValueError("it is of another evaluation")
    if kept["sha256"] != identity.digest(kept["rows"]):
        raise ValueError("its rows are not those that were measured")
    return list(kept["rows"])

"""``steadymoe audit``: measure gradients, report them, audit another trainer's rollouts, check its route replay."""

import argparse
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import visible

FIXTURE = Path("results/reference/conformance")
_MEASURE = """Measure the gradients of many losses on the same frozen rollouts, after k neutral updates.

  steadymoe audit experiment=audit seed=300,301 'audit.algorithms=[grpo,gspo]'
  steadymoe audit report --experiment audit           tables and figures over checkpoints
  steadymoe audit --bundle rollouts.jsonl --algorithms grpo,gspo
                                                      each loss's gradient on another trainer's rollouts
  steadymoe audit --conformance tensors.safetensors   does another trainer replay routes?

Takes the overrides of `steadymoe run`, except the algorithm; several values make several audits. Each is saved to
<results_dir>/audits/<experiment>/…/seed=<n>/. Rerun the command to resume."""
_REPORT = """Write tables and figures of an experiment's audits, over checkpoints, to <results>/tables and /figures.

  steadymoe audit report --experiment audit --losses grpo,gspo --against gspo --drift 16
  steadymoe audit report --experiment audit --keep archive    archive the data, and draw nothing"""
# Mode → the arguments that go with it.
_MODES = {
    "measure": {"overrides", "dry", "redo"},
    "bundle": {"bundle", "algorithms", "advantage", "names", "map", "csv"},
    "conformance": {"conformance", "fixture"},
}


def main(words: list[str]) -> int:
    """Run ``steadymoe audit`` and return the exit code.

    0: done; 1: a measurement failed or a property fails; 130: interrupted. Raises UserError for an invalid request.
    """
    if words[:1] == ["report"]:
        return _report(_report_parser().parse_args(words[1:]))
    parser = _parser()
    arguments = parser.parse_args(words)
    mode = parser.mode(arguments, _MODES)
    return {"measure": _measure, "bundle": _bundle, "conformance": _conformance}[mode](arguments)


def _parser() -> Parser:
    """Return the parser of everything but ``report``."""
    parser = Parser(prog="steadymoe audit", description=_MEASURE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    parser.add_argument("--dry", action="store_true", help="print what exists and what would run")
    parser.add_argument("--redo", action="store_true", help="measure everything again")
    theirs = parser.add_argument_group("another trainer's rollouts (docs/audit.md#rollouts-of-another-trainer)")
    theirs.add_argument("--bundle", type=Path, metavar="FILE", help="a .jsonl or .parquet file, one row per response")
    theirs.add_argument("--algorithms", metavar="A,B", default="grpo,gspo", help="algorithms or presets, by name")
    theirs.add_argument("--advantage", metavar="NAME", help="from conf/advantage (default: the file's, else GRPO's)")
    theirs.add_argument("--names", choices=("trl", "verl"), help="column names of this trainer's batch")
    theirs.add_argument("--map", action="append", default=[], metavar="OURS=THEIRS", help="rename a column; repeatable")
    theirs.add_argument("--csv", type=Path, metavar="FILE", help="write every estimate to this file")
    theirs.add_argument("--conformance", type=Path, metavar="TENSORS", help="check a trainer's tensors (.safetensors)")
    theirs.add_argument("--fixture", type=Path, default=FIXTURE, help=f"the conformance folder (default: {FIXTURE})")
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="steadymoe audit report", description=_REPORT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", default="audit", help="the experiment of the audits (default: audit)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument("--losses", metavar="A,B", help="only these losses, by label (default: all)")
    parser.add_argument("--against", metavar="LOSS", help="the loss to compare with (default: grpo, else the first)")
    parser.add_argument("--drift", type=int, metavar="K", help="the largest k to show (default: the largest)")
    parser.add_argument("--format", default="png,svg,pdf", metavar="A,B", help="some of png,svg,pdf (default: all)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="archive the data in this folder, and draw nothing")
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    from filelock import Timeout

    from steadymoe.bench.audit import plan, tables
    from steadymoe.bench.training.cold_start import ColdStartError

    planned = plan.plan(arguments.overrides)
    plan.refuse_others(planned, arguments.redo)
    if arguments.dry:
        for audit in planned:
            drifts = audit.run.config.audit.drift if arguments.redo else audit.missing
            to_do = ", ".join(f"k={k}" for k in drifts) or "audit.json"
            is_done = not arguments.redo and audit.is_finished
            print(visible(f"{audit.folder}: {'done' if is_done else f'to do: {to_do}'}"))
        return 0
    planned[0].folder.mkdir(parents=True, exist_ok=True)  # an OSError here exits with 2
    begun = monotonic()
    try:
        for number, audit in enumerate(planned, start=1):
            audit.make(partial(_log, begun, f"audit {number}/{len(planned)}"), arguments.redo)
    except Timeout:
        return _failed(f"another process makes {audit.folder}")
    except (ColdStartError, FloatingPointError, ValueError, OSError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        _failed("interrupted; rerun the command to resume after the last table")
        return 130
    ranking = tables.ranking(tables.read([audit.folder for audit in planned]))
    for line in [*ranking.to_markdown(index=False).splitlines(), *(f"in {audit.folder}" for audit in planned)]:
        print(visible(line))
    return 0


def _log(begun: float, name: str, text: str) -> None:
    print(visible(f"{monotonic() - begun:4.0f} s  {name}: {text}"), file=sys.stderr, flush=True)


def _failed(error: Any) -> int:
    print(f"steadymoe: {visible(error)}", file=sys.stderr)
    return 1


def _report(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.audit import archive, report
    from steadymoe.bench.report import write

    chosen = {name: getattr(arguments, name) for name in ("losses", "against", "drift")}
    if arguments.keep is not None:
        if given := [f"--{name}" for name, value in chosen.items() if value is not None]:
            raise UserError(f"--keep archives all losses; leave {', '.join(given)} out")
        path, missing = archive.keep(arguments.results, arguments.experiment, arguments.keep)
        print("\n".join(visible(line) for line in [f"wrote {path}", *missing]))
        return 0
    formats = write.formats(arguments.format)
    losses = None if arguments.losses is None else [name.strip() for name in arguments.losses.split(",")]
    place, experiment = arguments.results, arguments.experiment
    written = report.write(place, experiment, formats, losses, arguments.against, arguments.drift)
    print(written.ranking)
    for line in [*(f"wrote {path}" for path in written.files), *written.missing]:
        print(visible(line))
    return 0


def _bundle(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.audit import bundle, without_model

    advantage = without_model.load_advantage(arguments.advantage)
    rollouts, ignored = bundle.read(arguments.bundle, bundle.names(arguments.names, arguments.map))
    losses = without_model.losses([name.strip() for name in arguments.algorithms.split(",")])
    audited = without_model.audit(rollouts, losses, advantage)
    print(without_model.text(audited))
    if ignored:
        print(visible(f"ignored columns: {', '.join(ignored)}"))
    if arguments.csv is not None:
        atomic_files.write(arguments.csv.resolve(), partial(audited.to_csv, index=False))
        print(visible(f"wrote {arguments.csv}"))
    return 0


def _conformance(arguments: argparse.Namespace) -> int:
    from steadymoe.bench.audit import conformance

    findings = conformance.check(arguments.fixture, arguments.conformance)
    for finding in findings:
        print(finding.line)
    return 0 if all(finding.passed for finding in findings) else 1

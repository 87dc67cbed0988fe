"""``steadymoe audit``: measure gradients of many losses on the same frozen rollouts, and report them."""

import argparse
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from steadymoe.bench.report import paper
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.text import visible

_MEASURE = """Measure the gradients of many losses on the same frozen rollouts, after k updates by GRPO without a clip.

  steadymoe audit experiment=audit seed=300,301 'audit.algorithms=[grpo,gspo]'
  steadymoe audit report --experiment audit           tables and figures over checkpoints

Takes the overrides of `steadymoe run`, except the algorithm; several values make several audits. Each is saved to
<results_dir>/audits/<experiment>/…/seed=<n>/. Rerun the command to resume."""
_REPORT = """Write tables and figures of an experiment's audits, over checkpoints, to <results>/tables and /figures.

  steadymoe audit report --experiment audit --losses grpo,gspo --against gspo --drift 16
  steadymoe audit report --experiment audit --keep archive    only archive the data"""
_MODES = {
    "report": {"experiment", "results", "losses", "against", "drift", "format", *paper.OPTIONS},
    "keep": {"experiment", "results", "keep"},
}


def main(words: list[str]) -> int:
    """Run ``steadymoe audit`` and return the exit code.

    0: done; 1: a measurement failed; 130: interrupted. Raises UserError for an invalid request.
    """
    if words[:1] == ["report"]:
        parser = _report_parser()
        given = parser.parse_args(words[1:])
        parser.mode(given, _MODES)
        return _report(given)
    return _measure(_parser().parse_args(words))


def _parser() -> Parser:
    parser = Parser(prog="steadymoe audit", description=_MEASURE)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    parser.add_argument("--dry", action="store_true", help="print what exists and what would run")
    parser.add_argument("--redo", action="store_true", help="measure everything again")
    return parser


def _report_parser() -> Parser:
    parser = Parser(prog="steadymoe audit report", description=_REPORT)
    parser.add_argument("--experiment", default="audit", help="the experiment of the audits (default: audit)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument("--losses", metavar="A,B", help="only these losses, by label (default: all)")
    parser.add_argument("--against", metavar="LOSS", help="the loss to compare with (default: grpo, else the first)")
    parser.add_argument("--drift", type=int, metavar="K", help="the largest k to show (default: the largest)")
    parser.add_argument("--format", default="png,svg,pdf", metavar="A,B", help="some of png,svg,pdf (default: all)")
    paper.add_options(parser)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="only archive the data, in this folder")
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
        return _failed(f"another process is writing {audit.folder}")
    except (ColdStartError, FloatingPointError, ValueError, OSError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        without = " without --redo" if arguments.redo else ""
        _failed(f"interrupted; rerun the command{without} to resume after the last table")
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

    if arguments.keep is not None:
        path, missing = archive.keep(arguments.results, arguments.experiment, arguments.keep)
        print("\n".join(visible(line) for line in [f"wrote {path}", *missing]))
        return 0
    formats = write.formats(arguments.format)
    losses = None if arguments.losses is None else [name.strip() for name in arguments.losses.split(",")]
    place, experiment = arguments.results, arguments.experiment
    with paper.used(paper.given(arguments)):
        written = report.write(place, experiment, formats, losses, arguments.against, arguments.drift)
    print(written.table)
    for line in [*(f"wrote {path}" for path in written.files), *written.missing]:
        print(visible(line))
    return 0

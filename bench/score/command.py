"""``steadymoe score``: its arguments, what it refuses before anything runs, and its three modes."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from steadymoe.bench.audit import request as audits
from steadymoe.bench.check import request as check
from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import ConfigError
from steadymoe.bench.runs import command as runs
from steadymoe.bench.runs import dry, record, redo
from steadymoe.bench.score import baselines, board, comparison, entry, page, plan
from steadymoe.bench.score.baselines import Baselines
from steadymoe.bench.score.plan import Plan
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part, changed_setting
from steadymoe.bench.support.text import visible

_RESULTS = Path("results")


def main(arguments: argparse.Namespace) -> int:
    """Run ``steadymoe score`` and return its exit code.

    0: done; 1: a run failed, or an entry was not repeated; 130: interrupted. Raises UserError.
    """
    if arguments.verify:
        return verify(arguments.verify, arguments.run, arguments.board)
    if arguments.submit:
        return submit(arguments)
    return score(arguments.overrides, arguments.quick, arguments.dry, arguments.redo)


# --- scoring ----------------------------------------------------------------------------------------------------------


def score(overrides: Sequence[str], quick: bool = False, dry_run: bool = False, again: bool = False) -> int:
    """Check the algorithm, run what is missing, and write the score; ``again`` replaces outdated runs.

    Raises ConfigError or Damaged before anything runs, and NotRun, Damaged or OSError after.
    """
    console, known = Console(markup=False, highlight=False), baselines.load()  # its texts come from data
    planned = _plan(overrides, known, quick, again)
    for part in PARTS:
        for line in _progress(part, planned, known):
            console.print(visible(f"{part.name}: {line}"), soft_wrap=True)
    if dry_run:
        return 0
    if code := check.answer(list(planned.overrides)):
        print("steadymoe: the algorithm fails `steadymoe check` and is not scored", file=sys.stderr)
        return 2 if code == 1 else code
    for part in PARTS:
        if code := _run(part, planned, again):
            return code
    recorded = Recorded(_RESULTS)
    compared = [comparison.compare(part, planned, recorded, known) for part in PARTS]
    notes = ["A first look: three seeds and one checkpoint decide little."] if planned.quick else []
    notes += [note for each in compared for note in each.notes]
    folder = _RESULTS / "scores" / (f"{VERSION}-quick" if planned.quick else VERSION) / planned.name
    command = shlex.join(["steadymoe", "score", *planned.overrides, *(["--quick"] if planned.quick else [])])
    written = page.write(compared, notes, command, folder)
    for line in [*page.text(compared).splitlines(), *notes, *(f"wrote {path}" for path in written)]:
        console.print(visible(line), soft_wrap=True)
    return 0


def _plan(overrides: Sequence[str], known: Baselines, quick: bool = False, again: bool = False) -> Plan:
    """Plan a score. Raises ConfigError for everything that is refused before anything runs."""
    try:
        planned = plan.read(overrides, quick)
        for part in PARTS:
            _refuse(part, planned, known, again)
    except ValueError as error:  # overrides that cannot be composed
        raise ConfigError(str(error)) from error
    return planned


def _refuse(part: Part, planned: Plan, known: Baselines, again: bool) -> None:
    """Raise ConfigError, before anything runs, for what would stop the score later or would score something else.

    The anchors must be those of the standard; the scored algorithm may differ from them only in the algorithm, without
    its sampling (``changed_setting``); folders must hold nothing of other code or another config.
    """
    seed = planned.seeds(part)[0]
    if part.kind == "audits":
        (anchors,) = audits.plan([f"experiment={part.experiment}", *part.overrides, f"seed={seed}"])
        names = [name for name in ANCHORS if name in known.metadata[part.name]["hashes"]]
        losses = {name: anchors.arms[name].plain["algorithm"]["loss"] for name in names}
        hashes = baselines.audit_hashes(anchors.run.plain, losses)
        baselines.refuse_other_settings(part, seed, hashes, known)
        return audits.refuse_others(planned.audits(part), again)
    own, *others = planned.runs(part)
    first = {name: _at(seed, each) for name, each in planned.anchor_runs(part).items()}
    baselines.refuse_other_settings(part, seed, {name: run.config_hash for name, run in first.items()}, known)
    if changed := changed_setting(first["grpo"].plain, _at(seed, own).plain):
        raise ConfigError(f"{planned.label} changes what the standard fixes for every algorithm: {changed}")
    if not again and (older := [run for run in own if _has_changed(run)]):
        raise ConfigError(
            f"{planned.label} was scored with other numbers ({older[0].folder}); score it again with --redo, or give "
            "it another name"
        )
    anchors_runs = [run for each in others for run in each]
    return runs.refuse_others(anchors_runs if again else [*own, *anchors_runs], may_redo=again)


def _at(seed: int, planned: Sequence[compose.Run]) -> compose.Run:
    return next(run for run in planned if run.config.seed == seed)


def _has_changed(run: compose.Run) -> bool:
    """Whether a run's folder holds a run of another config."""
    before = record.known(run.folder)
    return bool(before) and before["config_hash"] != run.config_hash


def _run(part: Part, planned: Plan, again: bool) -> int:
    """Run what is missing of a part; return the exit code of the first command that fails, else 0."""
    if part.kind == "runs":
        if again:
            for line in redo.set_aside([run for run in planned.runs(part)[0] if _has_changed(run)]):
                print(visible(line), file=sys.stderr)
        execute = runs.main
    else:
        execute = audits.answer
        try:
            audits.refuse_others(planned.audits(part))
            again = False
        except ConfigError:  # something there is of other code or another config
            again = True
    flags = ["--redo"] if again else []
    return next((code for command in planned.commands(part) if (code := execute([*command, *flags]))), 0)


def _is_missing(part: Part, planned: Plan) -> bool:
    """Whether something of a part has not run."""
    if part.kind == "audits":
        return any(audit.missing for audit in planned.audits(part))
    return any(record.status(run.folder) not in record.ENDED for each in planned.runs(part) for run in each)


def _progress(part: Part, planned: Plan, known: Baselines) -> list[str]:
    """The finished and missing runs or audits of a part, and how long they take."""
    pace = [known.pace(part)] if _is_missing(part, planned) else []
    if part.kind == "audits":
        all_audits = planned.audits(part)
        missing = sum(bool(audit.missing) for audit in all_audits)
        return [f"{len(all_audits)} audits: {missing} to do, {len(all_audits) - missing} done", *pace]
    all_runs = [run for each in planned.runs(part) for run in each]
    return [*dry.lines(all_runs, 0, compose.at_once(planned.commands(part)[0][1:], True)), *pace]


# --- entries ----------------------------------------------------------------------------------------------------------


def submit(arguments: argparse.Namespace) -> int:
    """Write the entry of a scored algorithm to the new folder ``arguments.submit``.

    The whole score must be there, from today's code, of the standard, and from one machine. Raises ConfigError,
    Damaged, NotRun, BadEntry.
    """
    planned, recorded = _plan(arguments.overrides, baselines.load()), Recorded(_RESULTS)
    for part in PARTS:
        if _is_missing(part, planned):
            command = shlex.join(["steadymoe", "score", *planned.overrides])
            raise NotRun(f"{planned.label} is not fully scored, its part {part.name} is missing; run {command}")
        arms = [arm for arm in planned.arms(part) if isinstance(arm, Arm)]
        if several := comparison.kinds(recorded, arms):
            raise ConfigError(f"an entry needs runs of one machine and one set of versions; got {several[0]}")
    arms_of = {part.name: dict(zip((entry.OWN, *ANCHORS), planned.arms(part), strict=False)) for part in PARTS}
    folders = {run.config.seed: run.folder for run in planned.runs(PARTS[0])[0]}
    about = {"name": arguments.name or planned.name, "words": shlex.join(planned.overrides), "paper": arguments.paper}
    about |= {"equation": arguments.equation, "tuned": bool(arguments.tuned), "tuning": arguments.tuned}
    readme = (
        f"# {about['name']}\n\n{arguments.paper}\n\nEquation: {arguments.equation}\n\n"
        "What is it for, and what is known of it? Which numbers were chosen, on which seeds?\n"
    )
    files = entry.own_files(planned.overrides) | {"README.md": readme}
    print(visible(f"wrote {entry.submit(recorded, arms_of, folders, about, files, arguments.submit)}"))
    return 0


def verify(folders: Sequence[Path], run: bool = False, to: Path | None = None) -> int:
    """Verify entries, repeat some of their runs if asked, print the board, and write it to the folder ``to``.

    Raises BadEntry or Damaged.
    """
    entries = entry.load(folders)
    try:
        repeated = board.rerun_entries(entries) if run else True
    except KeyboardInterrupt:
        print("steadymoe: interrupted", file=sys.stderr)
        return 130
    rows = board.table(entries)
    print(board.text(rows))
    for path in board.write(entries, rows, to) if to else []:
        print(visible(f"wrote {path}"))
    return 0 if repeated else 1

"""``steadymoe score``: parse its arguments, refuse before anything runs, and score, submit or verify."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from steadymoe.bench.audit import command as audit
from steadymoe.bench.audit import plan as audits
from steadymoe.bench.check import command as check
from steadymoe.bench.runs import command as runs
from steadymoe.bench.runs import compose, dry, record
from steadymoe.bench.runs.compose import ConfigError
from steadymoe.bench.runs.overrides import at_once
from steadymoe.bench.score import board, comparison, entry, plan, standard
from steadymoe.bench.score.plan import Plan
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
from steadymoe.bench.score.standard import ANCHORS, GRADIENT, PARTS, STABILITY, VERSION, Baselines, changed_setting
from steadymoe.bench.support import regular_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.text import visible

_RESULTS = Path("results")
_DESCRIPTION = """\
Score an algorithm: check it, train it next to GRPO and GSPO at the settings of the standard,
and compare it with the recorded algorithms. Only what is missing runs, so the same command
resumes an interrupted score. Prints a table for each part and writes a page to results/scores/."""
_EXAMPLES = """\
examples:
  steadymoe score algorithm=vespo --quick      ten minutes on two cores: three seeds next to GRPO
  steadymoe score algorithm=vespo --dry        what has run, what is missing, how long it takes
  steadymoe score algorithm=vespo              the whole score, about an hour
  steadymoe score algorithm=vespo --submit entries/vespo --paper 2602.10693 --equation 5
  steadymoe score --verify results/board       check submitted scores and print the board

A loss of your own: docs/your_algorithm.md"""
# Mode → the arguments that go with it.
_MODES = {
    "score": {"overrides", "quick", "dry", "redo"},
    "verify": {"verify", "run", "board"},
    "submit": {"overrides", "submit", "paper", "equation", "name", "tuned"},
}


def main(words: list[str]) -> int:
    """Run ``steadymoe score`` and return its exit code.

    0: done; 1: a run failed, or an entry was not repeated; 2: ``check`` fails; 130: interrupted. Raises UserError.
    """
    arguments = read(words)
    if arguments.verify:
        return verify(arguments.verify, arguments.run, arguments.board)
    if arguments.submit:
        return submit(arguments)
    return score(arguments.overrides, arguments.quick, arguments.dry, arguments.redo)


def read(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; exit for --help and for invalid ones."""
    parser = Parser(
        prog="steadymoe score",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "algorithm=NAME, and algorithm.loss.KEY=VALUE to override numbers of its YAML"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)
    parser.add_argument("--quick", action="store_true", help="a first look: yours and GRPO at three seeds, one audit")
    parser.add_argument("--dry", action="store_true", help="print what would run and how long it takes, and stop")
    parser.add_argument("--redo", action="store_true", help="replace runs made with other code or other numbers")
    group = parser.add_argument_group("submit a finished score")
    group.add_argument("--submit", type=Path, metavar="FOLDER", help="write an entry of the board to this new folder")
    group.add_argument("--paper", metavar="TEXT", help="where the algorithm comes from (required)")
    group.add_argument("--equation", metavar="TEXT", help="the equation of the loss (required)")
    group.add_argument("--name", help="the name on the board (default: the algorithm's)")
    group.add_argument("--tuned", default="", metavar="TEXT", help="what you tuned, and on which seeds")
    group = parser.add_argument_group("verify submitted scores")
    group.add_argument("--verify", nargs="+", type=Path, metavar="FOLDER", help="entries, or folders of entries")
    group.add_argument("--run", action="store_true", help="run their code: check the loss and repeat two seeds")
    group.add_argument("--board", type=Path, metavar="FOLDER", help="write board.md and board.html to this folder")
    arguments = parser.parse_intermixed_args(words)
    mode = parser.mode(arguments, _MODES)
    if mode != "verify" and not arguments.overrides:
        parser.error("choose an algorithm: algorithm=NAME")
    if mode == "submit" and not (arguments.paper and arguments.equation):
        parser.error("--submit requires --paper and --equation")
    return arguments


def score(overrides: Sequence[str], quick: bool = False, dry_run: bool = False, again: bool = False) -> int:
    """Check the algorithm, run what is missing, and write the score; ``again`` replaces outdated runs.

    Raises UserError before anything runs, and NotRun, Damaged or OSError after.
    """
    known = standard.baselines()
    planned = _plan(overrides, known, quick, again)
    for line in _progress(planned, known):
        print(visible(line))
    if dry_run:
        return 0
    if check.check(planned.overrides):
        print("steadymoe: the algorithm fails `steadymoe check` and is not scored", file=sys.stderr)
        return 2
    if code := _run(planned, again):
        return code
    recorded = Recorded(_RESULTS)
    parts = [comparison.compare(part, planned, recorded, known) for part in PARTS]
    notes = ["A first look: three seeds and one checkpoint decide little."] if planned.quick else []
    notes += [note for part in parts for note in part.notes]
    version = f"{VERSION}-quick" if planned.quick else VERSION
    folder = regular_files.folder(_RESULTS, "scores", version, planned.name)
    command = shlex.join(["steadymoe", "score", *planned.overrides, *(["--quick"] if planned.quick else [])])
    paths = comparison.write_page(parts, notes, command, folder)
    for line in [*comparison.text(parts).splitlines(), *notes, *(f"wrote {path}" for path in paths)]:
        print(visible(line))
    return 0


def _plan(overrides: Sequence[str], known: Baselines, quick: bool = False, again: bool = False) -> Plan:
    """Plan a score. Raises ConfigError for what would stop it later, or would score something else.

    The anchors must be those of the standard; the scored algorithm may differ from them only in the algorithm, without
    its sampling; folders must hold nothing of other code or another config, unless ``again``.
    """
    try:
        planned = plan.read(overrides, quick)
        own, anchors = planned.runs[planned.own_label], {name: planned.runs[ANCHORS[name]] for name in planned.anchors}
        hashes = {name: of_anchor[0].config_hash for name, of_anchor in anchors.items()}
        known.refuse_other_settings(STABILITY, own[0].config.seed, hashes)
        if changed := changed_setting(anchors["grpo"][0].plain, own[0].plain):
            raise ConfigError(f"{planned.label} changes what the standard fixes for every algorithm: {changed}")
        if not again and (older := [run for run in own if _has_changed(run)]):
            raise ConfigError(
                f"{planned.label} was scored with other numbers ({older[0].folder}); score it again with --redo, or "
                "give it another name"
            )
        runs.refuse_others([run for run in planned.all_runs if not (again and run in own)], may_redo=again)
        audited = planned.audits[0]
        losses = {name: audited.losses[name].plain["algorithm"]["loss"] for name in anchors}
        hashes = standard.audit_hashes(audited.run.plain, losses)
        known.refuse_other_settings(GRADIENT, audited.run.config.seed, hashes)
        audits.refuse_others(planned.audits, again)
    except ValueError as error:  # overrides that cannot be composed
        raise ConfigError(str(error)) from error
    return planned


def _has_changed(run: compose.Run) -> bool:
    """Whether a run's folder holds a run of another config."""
    before = record.known(run.folder)
    return bool(before) and before["config_hash"] != run.config_hash


def _run(planned: Plan, again: bool) -> int:
    """Run what is missing; return the exit code of the first command that fails, else 0."""
    if again:
        for line in runs.redo([run for run in planned.runs[planned.own_label] if _has_changed(run)]):
            print(visible(line), file=sys.stderr)
    for command in dict.fromkeys(map(tuple, planned.run_commands.values())):
        if code := runs.main([*command, *(["--redo"] if again else [])]):
            return code
    flags = []
    try:
        audits.refuse_others(planned.audits)
    except ConfigError:  # something there is of other code or another config; ``_plan`` has refused it unless ``again``
        flags = ["--redo"]
    return audit.main([*planned.audit_command, *flags])


def _missing(planned: Plan) -> dict[str, int]:
    """Return part → the number of its runs or audits that are missing."""
    not_ended = [run for run in planned.all_runs if record.status(run.folder) not in record.ENDED]
    return {STABILITY.name: len(not_ended), GRADIENT.name: sum(bool(each.missing) for each in planned.audits)}


def _progress(planned: Plan, known: Baselines) -> list[str]:
    """Return lines on the finished and missing runs and audits, and how long they take by the standard's records."""
    missing, count = _missing(planned), len(planned.audits)
    processes = at_once(planned.run_commands[planned.own_label][1:], True)
    lines = {
        STABILITY.name: [dry.lines(planned.all_runs, 0, processes)[0]],
        GRADIENT.name: [f"{count} audits: {missing[GRADIENT.name]} to do, {count - missing[GRADIENT.name]} done"],
    }
    total = 0.0
    for part, most in ((STABILITY, processes or 1), (GRADIENT, 1)):
        if missing[part.name]:
            facts = known.metadata[part.name]
            together = min(most, missing[part.name])
            minutes = missing[part.name] * facts["minutes"] / together
            total += minutes
            pace = f"one {part.one} took {facts['minutes']} minutes of one core on {facts['machine']}"
            lines[part.name].append(f"about {minutes:.0f} minutes, {together} at once; {pace}")
    whole = [f"in all: about {total:.0f} minutes and the cold starts"] if total else []
    return [f"{name}: {line}" for name, of_part in lines.items() for line in of_part] + whole


def submit(arguments: argparse.Namespace) -> int:
    """Write the entry of a scored algorithm to the new folder ``arguments.submit``.

    The whole score must be there, from today's code, of the standard, and from one machine. Raises ConfigError,
    Damaged, NotRun, BadEntry.
    """
    planned, recorded = _plan(arguments.overrides, standard.baselines()), Recorded(_RESULTS)
    if parts := [name for name, missing in _missing(planned).items() if missing]:
        command = shlex.join(["steadymoe", "score", *planned.overrides])
        raise NotRun(f"{planned.label} is not fully scored, its part {parts[0]} is missing; run {command}")
    own_and_anchors = [arm for arm in planned.arms(STABILITY) if isinstance(arm, Arm)]
    if several := comparison.machines_or_versions(recorded, own_and_anchors):
        raise ConfigError(f"an entry needs runs of one machine and one set of versions; got {several[0]}")
    arms = {part.name: dict(zip((entry.OWN, *ANCHORS), planned.arms(part), strict=False)) for part in PARTS}
    folders = {run.config.seed: run.folder for run in planned.runs[planned.own_label]}
    about = {"name": arguments.name or planned.name, "words": shlex.join(planned.overrides), "paper": arguments.paper}
    about |= {"equation": arguments.equation, "tuning": arguments.tuned}
    readme = (
        f"# {about['name']}\n\n{arguments.paper}\n\nEquation: {arguments.equation}\n\n"
        "What is it for, and what is known of it? Which numbers were chosen, on which seeds?\n"
    )
    files = entry.own_files(planned.overrides) | {"README.md": readme}
    print(visible(f"wrote {entry.submit(recorded, arms, folders, about, files, arguments.submit)}"))
    return 0


def verify(folders: Sequence[Path], run: bool = False, to: Path | None = None) -> int:
    """Verify entries, repeat some of their runs if asked, print the board, and write it to the folder ``to``.

    The verdicts of reruns are kept with the board in ``to``, never with the entries, which are a stranger's. Raises
    BadEntry or Damaged.
    """
    entries = entry.load(folders)
    verdicts = board.verdicts(to)
    repeated = board.rerun_entries(entries, verdicts, to) if run else True
    rows = board.table(entries, verdicts)
    print(board.text(rows))
    for path in board.write_board(entries, rows, to) if to else []:
        print(visible(f"wrote {path}"))
    return 0 if repeated else 1

"""``steadymoe score``: parse its arguments, refuse before anything runs; score and record a loss, or draw the board."""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from steadymoe.bench.check import command as check
from steadymoe.bench.check import properties
from steadymoe.bench.report import write
from steadymoe.bench.report.folders import ended_runs
from steadymoe.bench.report.tolerances import changes_routes
from steadymoe.bench.runs import command as runs
from steadymoe.bench.runs import compose, dry, progress, run_folder
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.overrides import key_of, swept
from steadymoe.bench.score import board, outcomes, recorded, standard
from steadymoe.bench.score.standard import COLUMNS, CONTROL, EXPERIMENT, FREE, MEASURED, PINNED, Side
from steadymoe.bench.statistics.tolerance import REFERENCE
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import Parser
from steadymoe.bench.support.text import visible

_RESULTS = Path("results")
_DESCRIPTION = """\
Score an algorithm, or a change of routing or optimizer: the learning rates it tolerates on an MoE,
in multiples of GRPO's, what moving routes cost it, and what it tolerates on the dense twin. Checks
it, trains it next to GRPO with free routes, with pinned ones and on the twin, and once with shuffled
rewards. Only what is missing runs, so the same command resumes an interrupted score. Prints a table
and writes a page to results/scores/."""
_EXAMPLES = """\
examples:
  steadymoe score algorithm=vespo --quick      eight minutes on two cores: free and pinned routes, three seeds
  steadymoe score algorithm=vespo --dry        what has run, what is missing, how long it takes
  steadymoe score algorithm=vespo              the full score, half an hour; later ones reuse GRPO
  steadymoe score algorithm=grpo routing=r2    what replay gives back of GRPO's routing cost
  steadymoe score algorithm=mine --record      also append it to the outcomes recorded in this checkout
  steadymoe score --board results/board        draw the board of the recorded losses

A loss of your own: docs/your_algorithm.md"""
# Mode → the arguments that go with it.
_MODES = {
    "score": {"overrides", "quick", "dry", "redo"},
    "record": {"overrides", "record", "dry", "redo"},
    "board": {"board"},
}
# What may be scored with an algorithm, or in place of one: groups of the config, and what some routings need off.
_CHANGES = ("routing", "optimizer", "savings.reuse_sampler_logprobs")


def main(args: list[str]) -> int:
    """Run ``steadymoe score`` and return its exit code.

    0: done; 1: a run failed, or a loss that gains without rewards was not recorded; 2: ``check`` fails; 130:
    interrupted. Raises UserError.
    """
    arguments = _parsed(args)
    if arguments.board:
        for path in board.write_board(arguments.board):
            print(visible(f"wrote {path}"))
        return 0
    return score(arguments.overrides, arguments.quick, arguments.dry, arguments.redo, arguments.record)


def _parsed(args: list[str]) -> argparse.Namespace:
    """Parse the arguments; exit for --help and for invalid ones."""
    parser = Parser(prog="steadymoe score", description=_DESCRIPTION, epilog=_EXAMPLES, allow_abbrev=False)
    text = "algorithm=NAME, numbers of its YAML (algorithm.loss.KEY=VALUE), changes (routing=NAME, optimizer.KEY=VALUE)"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)
    parser.add_argument(
        "--quick", action="store_true", help="a first look: two learning rates, three seeds, free and pinned routes"
    )
    parser.add_argument("--dry", action="store_true", help="print what would run and how long it takes, and stop")
    parser.add_argument("--redo", action="store_true", help="replace runs made with other code or another config")
    text = "append the outcomes of the loss, and of GRPO beside it, to those recorded in this git checkout"
    parser.add_argument("--record", action="store_true", help=text)
    parser.add_argument("--board", type=Path, metavar="FOLDER", help="write the board to this folder")
    arguments = parser.parse_intermixed_args(args)
    if parser.mode(arguments, _MODES) != "board" and not arguments.overrides:
        parser.error("choose an algorithm: algorithm=NAME")
    return arguments


@dataclass(frozen=True)
class Arm:
    """What is scored, or GRPO beside it."""

    label: str
    name: str
    """Its name in file names."""
    overrides: tuple[str, ...]

    @property
    def of_algorithm(self) -> list[str]:
        """Return the overrides that choose the algorithm and its numbers."""
        return [word for word in self.overrides if not _is_change(word)]

    @property
    def changes(self) -> set[str]:
        """Return the groups besides the algorithm that it changes."""
        return {key_of(word).partition(".")[0] for word in self.overrides} - {"algorithm"}


_GRPO = Arm(REFERENCE, REFERENCE, (f"algorithm={REFERENCE}",))


def _is_change(word: str) -> bool:
    key = key_of(word)
    return key != "optimizer.learning_rate" and (key in _CHANGES or key.partition(".")[0] in _CHANGES)


class Part(NamedTuple):
    """The runs of an arm on a side."""

    arm: Arm
    side: Side
    args: list[str]
    """The arguments of ``steadymoe run`` that make ``planned``."""
    planned: list[Run]


def _part(arm: Arm, side: Side, more: Sequence[str] = ()) -> Part:
    """Plan the runs of a side, with ``more`` overrides. Raises ConfigError."""
    own = {key_of(word) for word in (*arm.overrides, *more, *side.more)}
    usual = [word for word in (standard.SEEDS, *side.choices) if key_of(word) not in own]
    args = [f"experiment={EXPERIMENT}", *usual, *side.more, *arm.overrides, *more]
    return Part(arm, side, ["-m", *args], compose.plan(args, multirun=True))


def _parts(arms: Sequence[Arm], quick: bool) -> tuple[list[Part], list[str]]:
    """Plan the runs over learning rates, and return them and why an arm lacks a side. Raises ConfigError."""
    grid: Sequence[str] = standard.QUICK if quick else ()
    parts, lacks = [_part(arm, FREE, grid) for arm in arms], []
    for side in (PINNED,) if quick else standard.SIDES[1:]:
        for arm in arms:
            if side == PINNED and changes_routes(arm.label):  # they cannot be two things
                continue
            try:
                parts.append(_part(arm, side, grid))
            except ConfigError as error:  # with free routes it can be
                lacks.append(f"{arm.label} is not scored with {side.name}: {error}")
    return parts, lacks


def _at(*rates: float) -> list[str]:
    return [f"optimizer.learning_rate={','.join(f'{rate:g}' for rate in rates)}"]


def read(overrides: Sequence[str]) -> Arm:
    """Return the arm that the overrides choose. Raises ConfigError."""
    changes = [word for word in overrides if _is_change(word)]
    if several := swept(changes):
        raise ConfigError(f"{several[0]} has several values; give one")
    if units := [name for name in standard.OWN_RATES if f"optimizer={name}" in changes]:
        raise ConfigError(f"optimizer={units[0]} has learning rates of its own, which are not compared with AdamW's")
    name = check.read([word for word in overrides if word not in changes])[0]
    words = [word for word in overrides if word != f"algorithm={name}"]
    if not words:
        return Arm(name, name, tuple(overrides))
    if len(words) > standard.MOST_TUNED:
        most = standard.MOST_TUNED
        raise ConfigError(f"at most {most} numbers of a loss may be tuned, got {len(words)}: {' '.join(words)}")
    label = " ".join([name, *sorted(words)])
    digest = hashlib.sha256(label.encode()).hexdigest()[:8]
    return Arm(label, f"{name.replace('@', '-at-')}-{digest}", tuple(overrides))


def score(
    overrides: Sequence[str], quick: bool = False, dry_run: bool = False, again: bool = False, to_record: bool = False
) -> int:
    """Check the algorithm, run what is missing, and write the score; ``again`` replaces outdated runs.

    Raises UserError before anything runs, and Damaged, OSError and, ``to_record``, ConfigError after.
    """
    own = read(overrides)
    if to_record:
        recorded.refuse(own.label, overrides)
    # GRPO first: its gain sets the threshold.
    arms = list({arm.label: arm for arm in (_GRPO, own)}.values())
    parts, lacks = _parts(arms, quick)
    usual, known = parts[0].planned[0].config.optimizer.learning_rate, _joined(map(_outcomes, parts))
    beyond = [each for part in parts for each in _beyond(part, known, quick)]
    known = _joined([known, *map(_outcomes, beyond)])
    later = [] if quick else _later(own, arms, known, usual)
    planned = [*parts, *beyond, *later]
    _refuse(own, planned, again)
    for line in [*lacks, *_progress(planned, again)]:
        print(visible(line))
    if dry_run:
        return 0
    if check.check(own.of_algorithm):
        print("steadymoe: the algorithm fails `steadymoe check` and is not scored", file=sys.stderr)
        return 2
    total, ran = sum(len(part.planned) for part in planned), list[tuple[Part, pd.DataFrame]]()
    for part in parts:
        if code := _run(part, again, ran, total):
            return code
        for each in _beyond(part, _joined(its for _, its in ran), quick):
            if code := _run(each, again, ran, total):
                return code
    # The best rates are known now.
    for part in [] if quick else _later(own, arms, _joined(its for _, its in ran), usual):
        if code := _run(part, again, ran, total):
            return code
    found = _joined(its for _, its in ran)
    keeps_state = properties.memory(check.read(own.of_algorithm)[1]).startswith(properties.KEEPS_STATE)
    label = "with state" if keeps_state else ""
    problem = "" if quick else outcomes.gains_without_reward(found)
    notes = [f"{own.label} is {label}: {board.TERMS[label]}"] if label else []
    notes += [f"{own.label} cannot be recorded: {problem}."] if problem else []
    # The last arm is the scored one, or GRPO, which needs no STEADYMOE_PATH.
    own_part = next(part for part in parts if part.arm == own or own.label == REFERENCE)
    _show(own, found, notes, quick, own_part.planned[0].command.partition("steadymoe ")[0])
    if to_record and not problem:
        _record(own, own_part.planned, found, label)
    return 1 if to_record and problem else 0


def _later(own: Arm, arms: Sequence[Arm], found: pd.DataFrame, usual: float) -> list[Part]:
    """Plan, at the best rates so far with free routes, the measured runs and one of ``own`` with shuffled rewards."""
    ran = set(found.loc[found["side"] == FREE.name, "loss"])
    best = {arm: _at(outcomes.best_rate(found, arm.label) if arm.label in ran else usual) for arm in arms}
    return [*(_part(arm, MEASURED, best[arm]) for arm in arms), _part(own, CONTROL, best[own])]


def _beyond(part: Part, found: pd.DataFrame, quick: bool) -> list[Part]:
    """Plan the runs at the rates beyond the grid that the outcomes so far ask for; none of a quick score."""
    wider = [] if quick else outcomes.wider(found, part.arm.label, part.side)
    return [_part(part.arm, part.side, _at(*wider))] if wider else []


def _run(part: Part, again: bool, ran: list[tuple[Part, pd.DataFrame]], total: int) -> int:
    """Make the planned runs, add them with their outcomes to ``ran``, and return the exit code.

    ``again`` moves outdated ones away first.
    """
    for line in run_folder.redo(part.planned) if again else ():
        print(visible(line), file=sys.stderr)
    done = sum(len(each.planned) for each, _ in ran)
    with progress.counted(done, max(total, done + len(part.planned))):  # rates beyond the grid are not in the total
        code = runs.main(part.args)
    ran.append((part, _outcomes(part)))
    return code


def _outcomes(part: Part) -> pd.DataFrame:
    """Return the outcomes of its runs that have ended."""
    return outcomes.of_runs(part.planned, part.side, part.arm.label)


def _joined(found: Iterable[pd.DataFrame]) -> pd.DataFrame:
    ended = [each for each in found if len(each)]
    return pd.concat(ended, ignore_index=True) if ended else pd.DataFrame(columns=list(COLUMNS))


def _refuse(own: Arm, parts: Sequence[Part], again: bool) -> None:
    """Raise ConfigError for what would stop a score later, or would score something else."""
    reference, *_ = parts
    for side in standard.SIDES:
        standard.refuse_other_settings(side, _part(reference.arm, side, ["seed=1000"]).planned)
    mine = [run for part in parts if part.arm.label == own.label for run in part.planned]
    if own.changes:
        plain = Arm(own.name, own.name, tuple(own.of_algorithm))
        same = {run.config_hash for side in (FREE, PINNED) for run in _part(plain, side).planned}
        if mine[0].config_hash in same:
            raise ConfigError(f"{own.label} changes nothing: the standard has this value, or runs it with every score")
    if changed := standard.changed_setting(reference.planned[0].plain, mine[0].plain, own.changes):
        raise ConfigError(f"{own.label} changes what the standard fixes for every algorithm: {changed}")
    # In whose folders are runs of another config.
    older = [run for run in mine if run_folder.known(run.folder).get("config_hash", run.config_hash) != run.config_hash]
    if older and not again:
        raise ConfigError(
            f"{own.label} was scored with another config ({older[0].folder}); score it again with --redo, or rename it"
        )
    run_folder.refuse_others([run for part in parts for run in part.planned if run not in older], may_redo=again)


def _progress(parts: Sequence[Part], again: bool) -> list[str]:
    """Return lines on finished, missing and, ``again``, outdated runs, and how long they take at the recorded pace."""
    states: dict[str, list[run_folder.State]] = {}
    for part in parts:
        states.setdefault(part.side.name, []).extend(run_folder.read_state(run.folder) for run in part.planned)
    lines = [f"{side}: {dry.summary(its)}" for side, its in states.items()]
    missing = sum(not state.has_ended for its in states.values() for state in its)
    if again and (old := [run for part in parts for run in part.planned if run_folder.stale(run) is not None]):
        missing += sum(run_folder.read_state(run.folder).has_ended for run in old)
        lines.append(f"outdated: {len(old)} to replace")
    if missing:
        made = standard.made()
        lines.append(f"about {missing * made['minutes']:.0f} minutes of one core of {made['machine']} and cold starts")
    return lines


def _show(own: Arm, found: pd.DataFrame, more: Sequence[str], quick: bool, path: str) -> None:
    """Print the scores and the notes, with ``more``, and write the page with its figure and its numbers.

    ``path`` sets STEADYMOE_PATH before the command that repeats the score, where its runs need it.
    """
    scored = outcomes.scores(found)
    rows, notes = outcomes.table(scored), [*outcomes.notes(scored, found, own.label, quick), *more]
    version = f"{standard.VERSION}-quick" if quick else standard.VERSION
    folder = files.folder(_RESULTS, "scores", version, own.name)
    paths = board.draw(scored, folder)
    title = f"{visible(own.label)} in {version}"
    command = path + shlex.join(["steadymoe", "score", *own.overrides, *(["--quick"] if quick else [])])
    page = board.page(title, scored, {"Tolerance": rows}, notes, own.label, command)
    paths += write.text_files(folder, {"score.html": page, standard.OUTCOMES: found.to_csv(index=False)})
    for line in [*write.to_markdown(rows).splitlines(), *notes, *(f"wrote {path}" for path in paths)]:
        print(visible(line))


def _record(own: Arm, mine: Sequence[Run], found: pd.DataFrame, label: str) -> None:
    """Append the outcomes of a loss and of GRPO to the recorded ones, with what is known of the loss's runs."""
    ran, own_runs = ended_runs(_RESULTS, EXPERIMENT), {str(run.folder) for run in mine}
    last = ran[ran["folder"].map(lambda folder: str(Path(folder).absolute()) in own_runs)].iloc[-1]
    facts = {key: str(last[key]) for key in ("machine", "revision", "versions")}
    facts |= {"date": str(run_folder.known(Path(last["folder"]))["started"])[:10], "label": label}
    for path in recorded.append(own.label, own.overrides, found, facts):
        print(visible(f"wrote {path}"))

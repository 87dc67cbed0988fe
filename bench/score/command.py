"""``steadymoe score``: parse its arguments, refuse before anything runs; score, submit, verify, or draw the board."""

import argparse
import functools
import hashlib
import itertools
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from steadymoe.bench.check import command as check
from steadymoe.bench.report import archive, write
from steadymoe.bench.runs import command as runs
from steadymoe.bench.runs import compose, dry, identity, record
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.overrides import at_once
from steadymoe.bench.score import board, entry, outcomes, standard
from steadymoe.bench.score.standard import ANCHORS, DIALS, MOST_TUNED, QUICK, RATE, REFERENCE, VERSION, Dial
from steadymoe.bench.support import external, regular_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.text import visible

_RESULTS = Path("results")
_DESCRIPTION = """\
Score an algorithm: how much stress it bears, in multiples of GRPO's. Checks it, trains it next to
GRPO and GSPO over learning rates, then over updates per rollout and over noise on the sampler.
Only what is missing runs, so the same command resumes an interrupted score. Prints a table and
writes a page to results/scores/."""
_EXAMPLES = """\
examples:
  steadymoe score algorithm=vespo --quick      under ten minutes on two cores: the rate, three seeds
  steadymoe score algorithm=vespo --dry        what has run, what is missing, how long it takes
  steadymoe score algorithm=vespo              the full score, half an hour; later ones reuse GRPO and GSPO
  steadymoe score algorithm=mine --submit entries/mine --paper 2602.10693
  steadymoe score --verify entries/mine --commit 1a2b3c4 --board results/board
  steadymoe score --board results/board        draw the board

A loss of your own: docs/your_algorithm.md"""
# Mode → the arguments that go with it.
_MODES = {
    "score": {"overrides", "quick", "dry", "redo"},
    "submit": {"overrides", "submit", "paper", "tuned"},
    "verify": {"verify", "commit", "board"},
    "board": {"board"},
}


def main(words: list[str]) -> int:
    """Run ``steadymoe score`` and return its exit code.

    0: done; 1: a run failed, or an entry was not verified; 2: ``check`` fails; 130: interrupted. Raises UserError.
    """
    arguments = _parsed(words)
    if arguments.verify:
        return 0 if board.verify(arguments.verify, arguments.commit, arguments.board) else 1
    if arguments.submit:
        return submit(arguments.overrides, arguments.submit, arguments.paper, arguments.tuned)
    if arguments.board:
        for path in board.write_board(arguments.board):
            print(visible(f"wrote {path}"))
        return 0
    return score(arguments.overrides, arguments.quick, arguments.dry, arguments.redo)


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse the arguments; exit for --help and for invalid ones."""
    parser = Parser(prog="steadymoe score", description=_DESCRIPTION, epilog=_EXAMPLES, allow_abbrev=False)
    text = "algorithm=NAME, and algorithm.loss.KEY=VALUE to override numbers of its YAML"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=text)
    parser.add_argument(
        "--quick", action="store_true", help="a first look: three learning rates, three seeds, next to GRPO"
    )
    parser.add_argument("--dry", action="store_true", help="print what would run and how long it takes, and stop")
    parser.add_argument("--redo", action="store_true", help="replace runs made with other code or another config")
    group = parser.add_argument_group("submit a finished score")
    group.add_argument("--submit", type=Path, metavar="FOLDER", help="write an entry of the board to this new folder")
    group.add_argument("--paper", metavar="TEXT", help="where the algorithm comes from (required)")
    text = "the table of trials from which you chose the numbers on the command line"
    group.add_argument("--tuned", type=Path, metavar="FILE", help=text)
    group = parser.add_argument_group("the board")
    group.add_argument("--verify", type=Path, metavar="FOLDER", help="rerun an entry; executes its code")
    group.add_argument("--commit", metavar="HASH", help="its merge commit, which determines the fresh seeds")
    group.add_argument("--board", type=Path, metavar="FOLDER", help="write the board to this folder")
    arguments = parser.parse_intermixed_args(words)
    mode = parser.mode(arguments, _MODES)
    if mode in ("score", "submit") and not arguments.overrides:
        parser.error("choose an algorithm: algorithm=NAME")
    if mode == "submit" and not arguments.paper:
        parser.error("--submit requires --paper")
    if mode == "verify" and not (arguments.commit and arguments.board):
        parser.error("--verify requires --commit and --board")
    return arguments


@dataclass(frozen=True)
class Arm:
    """A loss of a score: the scored one or an anchor."""

    label: str
    name: str
    """Its name in file names."""
    overrides: tuple[str, ...]

    def words(self, dial: Dial, more: Sequence[str] = ()) -> list[str]:
        """Return the arguments of ``steadymoe run`` that turn a dial, with ``more`` overrides."""
        return ["-m", f"experiment={dial.experiment}", *dial.overrides, *self.overrides, *more]

    def runs(self, dial: Dial, more: Sequence[str] = ()) -> list[Run]:
        """Plan the runs of ``words``. Raises ConfigError."""
        return list(_planned(tuple(self.words(dial, more)[1:]), Path.cwd(), external.versions()))


@functools.cache
def _planned(words: tuple[str, ...], where: Path, outside: tuple[tuple[str, int], ...]) -> tuple[Run, ...]:
    """Plan runs once for each folder ``where`` results are and each state ``outside`` of the user's configs."""
    return tuple(compose.plan(words, multirun=True))


def read(overrides: Sequence[str]) -> Arm:
    """Return the arm that the overrides choose. Raises ConfigError."""
    name = check.read(overrides).name
    run, *_ = compose.plan([f"experiment={RATE.experiment}", *RATE.overrides, *overrides, "seed=0"])
    axes = identity.axes_name({key: value for key, value in run.axes.items() if key.startswith("algorithm.")})
    if not axes:
        return Arm(name, name, tuple(overrides))
    digest = hashlib.sha256(axes.encode()).hexdigest()[:8]
    return Arm(f"{name} {axes}", f"{name.replace('@', '-at-')}-{digest}", tuple(overrides))


def _arms(own: Arm, quick: bool = False) -> list[Arm]:
    """Return the anchors and the scored loss, GRPO first: its gain draws the line."""
    anchors = [Arm(name, name, (f"algorithm={name}",)) for name in (ANCHORS[:1] if quick else ANCHORS)]
    return [*anchors, *([] if own.label in [anchor.label for anchor in anchors] else [own])]


def score(overrides: Sequence[str], quick: bool = False, dry_run: bool = False, again: bool = False) -> int:
    """Check the algorithm, run what is missing, and write the score; ``again`` replaces outdated runs.

    Raises UserError before anything runs, and Damaged or OSError after.
    """
    own, more = read(overrides), QUICK if quick else ()
    arms = _arms(own, quick)
    every = {arm.label: _every(arm, quick) for arm in arms}
    _refuse(own, arms, every, again)
    for line in _progress(arms, every, quick, again):
        print(visible(line))
    if dry_run:
        return 0
    if check.check(own.overrides):
        print("steadymoe: the algorithm fails `steadymoe check` and is not scored", file=sys.stderr)
        return 2
    for arm in arms:
        if again:
            _replace(_rate_runs(arm, quick))
        if code := runs.main(arm.words(RATE, more)):
            return code
        until = arms[: arms.index(arm) + 1]
        rates = [] if quick else outcomes.wider(_rates(until), arm.label, _grid(arm))
        if rates and (code := runs.main(arm.words(RATE, _at(*rates)))):
            return code
    for dial in () if quick else DIALS[1:]:
        for arm in arms:
            if again:
                _replace(arm.runs(dial, _at_best(arm, dial)))
            if code := runs.main(arm.words(dial, _at_best(arm, dial))):
                return code
    return _show(own, _outcomes(arms, quick), quick)


def _replace(planned: Sequence[Run]) -> None:
    """Move outdated runs away, and say which."""
    for line in runs.redo(planned):
        print(visible(line), file=sys.stderr)


def _grid(arm: Arm) -> list[float]:
    """Return the learning rates of the standard."""
    return sorted({run.config.optimizer.learning_rate for run in arm.runs(RATE)})


def _at(*rates: float) -> list[str]:
    return [f"optimizer.learning_rate={','.join(f'{rate:g}' for rate in rates)}"]


def _rate_runs(arm: Arm, quick: bool) -> list[Run]:
    """Return the runs over the learning rate, those beyond the grid's ends included."""
    if quick:
        return arm.runs(RATE, QUICK)
    grid = _grid(arm)
    return [*arm.runs(RATE), *arm.runs(RATE, _at(grid[0] / 2, 2 * grid[-1]))]


def _every(arm: Arm, quick: bool) -> list[Run]:
    """Return all runs of an arm; of a dial that is turned at its best rate, those at the rate that is best today."""
    later = [] if quick else [run for *_, planned in _later([arm]) for run in planned]
    return [*_rate_runs(arm, quick), *later]


def _rates(arms: Sequence[Arm], quick: bool = False) -> pd.DataFrame:
    """Return the outcomes over the learning rate, those beyond the grid's ends included."""
    found = [outcomes.of_runs(_rate_runs(arm, quick), RATE, arm.label) for arm in arms]
    return pd.concat(found, ignore_index=True)


def _at_best(arm: Arm, dial: Dial) -> list[str]:
    """Return the override of a dial that is turned at an arm's best rate; none before the arm has one."""
    if not dial.at_best_rate or (ended := _rates([arm])).empty:
        return []
    return _at(outcomes.best_rate(ended, arm.label))


def _later(arms: Sequence[Arm]) -> list[tuple[Arm, Dial, list[Run]]]:
    """Return the runs of the other dials; see ``_at_best``."""
    return [(arm, dial, arm.runs(dial, _at_best(arm, dial))) for arm in arms for dial in DIALS[1:]]


def _missing(planned: Iterable[Run]) -> list[Run]:
    return [run for run in planned if record.status(run.folder) not in record.ENDED]


def _outcomes(arms: Sequence[Arm], quick: bool = False) -> pd.DataFrame:
    """Return the outcomes of everything that has ended."""
    found = [outcomes.of_runs(planned, dial, arm.label) for arm, dial, planned in ([] if quick else _later(arms))]
    return pd.concat([_rates(arms, quick), *found], ignore_index=True)


def _refuse(own: Arm, arms: Sequence[Arm], every: Mapping[str, Sequence[Run]], again: bool) -> None:
    """Raise ConfigError for what would stop a score later, or would score something else.

    ``every``: the runs of each arm.
    """
    first = {label: its[0].plain for label, its in every.items()}
    for dial in DIALS:
        standard.refuse_other_settings(dial, arms[0].runs(dial))
    if changed := standard.changed_setting(first[REFERENCE], first[own.label]):
        raise ConfigError(f"{own.label} changes what the standard fixes for every algorithm: {changed}")
    tuned = [word for word in own.overrides if not word.startswith("algorithm=")]
    if len(tuned) > MOST_TUNED:
        raise ConfigError(f"at most {MOST_TUNED} numbers of a loss may be tuned, got {len(tuned)}: {' '.join(tuned)}")
    older = [run for run in every[own.label] if _has_changed(run)]
    if older and not again:
        raise ConfigError(
            f"{own.label} was scored with another config ({older[0].folder}); score it again with --redo, or rename it"
        )
    runs.refuse_others([run for its in every.values() for run in its if run not in older], may_redo=again)


def _has_changed(run: Run) -> bool:
    """Whether a run's folder holds a run of another config."""
    before = record.known(run.folder)
    return bool(before) and before["config_hash"] != run.config_hash


def _progress(arms: Sequence[Arm], every: Mapping[str, Sequence[Run]], quick: bool, again: bool) -> list[str]:
    """Return lines on finished, missing and, ``again``, outdated runs, and how long they take at the recorded pace."""
    at = at_once(arms[0].words(RATE)[1:], True) or 1
    states = [record.read_state(run.folder) for arm in arms for run in arm.runs(RATE, QUICK if quick else ())]
    lines, missing = [f"rate: {dry.summary(states)}"], sum(not state.has_ended for state in states)
    if not quick:
        later = len(_missing(run for *_, planned in _later(arms) for run in planned))
        missing += later
        lines.append(f"staleness and mismatch: {later} to run")
    if again and (old := [run for its in every.values() for run in its if runs.stale(run) is not None]):
        missing += sum(record.read_state(run.folder).has_ended for run in old)
        lines.append(f"outdated: {len(old)} to replace")
    facts = standard.made()
    if missing:
        minutes = missing * facts["minutes"] / min(at, missing)
        lines.append(
            f"about {minutes:.0f} minutes with {at} runs at once, plus cold starts; one run took "
            f"{facts['minutes']} minutes on one core of {facts['machine']}"
        )
    return lines


def _show(own: Arm, found: pd.DataFrame, quick: bool) -> int:
    """Print the scores, and write the page with its figure and its numbers."""
    scored = outcomes.scores(found)
    rows, notes = outcomes.table(scored), outcomes.notes(scored, found, own.label, quick)
    rows = rows if not quick else rows.drop(columns=[f"{dial.name} × {REFERENCE}" for dial in DIALS[1:]])
    version = f"{VERSION}-quick" if quick else VERSION
    folder = regular_files.folder(_RESULTS, "scores", version, own.name)
    paths = board.draw(found, folder)
    title = f"{visible(own.label)} in {version}"
    page = board.page(title, found, {"Bearable stress": rows}, notes, own.label, _command(own, quick))
    paths += write.files(folder, {"score.html": page, standard.OUTCOMES: found.to_csv(index=False)})
    for line in [*write.to_markdown(rows).splitlines(), *notes, *(f"wrote {path}" for path in paths)]:
        print(visible(line))
    return 0


def _command(own: Arm, quick: bool = False) -> str:
    """Return the command of a score, with STEADYMOE_PATH where its runs need it."""
    prefix = own.runs(RATE)[0].command.partition("steadymoe ")[0]
    return prefix + shlex.join(["steadymoe", "score", *own.overrides, *(["--quick"] if quick else [])])


def submit(overrides: Sequence[str], to: Path, paper: str, tuned: Path | None) -> int:
    """Write the entry of a scored algorithm to the new folder ``to``.

    The whole score must be there, from today's code and of the standard. Raises UserError.
    """
    own = read(overrides)
    arms = _arms(own)
    every = {arm.label: _every(arm, quick=False) for arm in arms}
    _refuse(own, arms, every, again=False)
    if len(own.overrides) > 1 and tuned is None:
        raise ConfigError(
            "numbers on the command line count as tuned; add --tuned FILE, the table of trials that chose them"
        )
    later = (planned for *_, planned in _later(arms))
    if missing := _missing(itertools.chain(*(arm.runs(RATE) for arm in arms), *later)):
        raise ConfigError(
            f"{own.label} is not fully scored: {missing[0].folder} has not finished; run: {_command(own)}"
        )
    found = _outcomes(arms).replace({"loss": {own.label: own.name}})
    last = archive.load(_RESULTS, RATE.experiment)["runs"].iloc[-1]
    about = {"name": own.name, "words": shlex.join(own.overrides), "paper": paper}
    about |= {key: str(last[key]) for key in ("machine", "revision", "versions")}
    about["date"] = str(record.known(every[own.label][0].folder)["started"])[:10]
    print(visible(f"wrote {entry.write(to, about, own.overrides, found, tuned)}"))
    return 0

"""``steadymoe score``: parse its arguments, refuse before anything runs; score and record a loss, or draw the board."""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from steadymoe.bench.check import command as check
from steadymoe.bench.check import properties
from steadymoe.bench.report import write
from steadymoe.bench.report.folders import ended_runs
from steadymoe.bench.runs import command as runs
from steadymoe.bench.runs import compose, dry, identity, record
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.overrides import at_once
from steadymoe.bench.score import board, outcomes, recorded, standard
from steadymoe.bench.score.standard import ANCHORS, COLUMNS, DIALS, MOST_TUNED, QUICK, RATE, REFERENCE, VERSION, Dial
from steadymoe.bench.support import regular_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.text import visible

_RESULTS = Path("results")
_DESCRIPTION = """\
Score an algorithm: how much stress it bears, in multiples of GRPO's. Checks it, trains it next to
GRPO and GSPO over learning rates, then over updates per rollout and over noise on the sampler, and
once with shuffled rewards. Only what is missing runs, so the same command resumes an interrupted
score. Prints a table and writes a page to results/scores/."""
_EXAMPLES = """\
examples:
  steadymoe score algorithm=vespo --quick      under ten minutes on two cores: the rate, three seeds
  steadymoe score algorithm=vespo --dry        what has run, what is missing, how long it takes
  steadymoe score algorithm=vespo              the full score, half an hour; later ones reuse GRPO and GSPO
  steadymoe score algorithm=mine --record      also append it to the outcomes recorded in this checkout
  steadymoe score --board results/board        draw the board of the recorded losses

A loss of your own: docs/your_algorithm.md"""
# Mode → the arguments that go with it.
_MODES = {
    "score": {"overrides", "quick", "dry", "redo"},
    "record": {"overrides", "record", "dry", "redo"},
    "board": {"board"},
}


def main(words: list[str]) -> int:
    """Run ``steadymoe score`` and return its exit code.

    0: done; 1: a run failed, or a loss that gains without rewards was not recorded; 2: ``check`` fails; 130:
    interrupted. Raises UserError.
    """
    arguments = _parsed(words)
    if arguments.board:
        for path in board.write_board(arguments.board):
            print(visible(f"wrote {path}"))
        return 0
    return score(arguments.overrides, arguments.quick, arguments.dry, arguments.redo, arguments.record)


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
    text = "append the outcomes of the loss, and of GRPO beside it, to those recorded in this git checkout"
    parser.add_argument("--record", action="store_true", help=text)
    parser.add_argument("--board", type=Path, metavar="FOLDER", help="write the board to this folder")
    arguments = parser.parse_intermixed_args(words)
    if parser.mode(arguments, _MODES) != "board" and not arguments.overrides:
        parser.error("choose an algorithm: algorithm=NAME")
    return arguments


@dataclass(frozen=True)
class Arm:
    """A loss of a score: the scored one or an anchor."""

    label: str
    name: str
    """Its name in file names."""
    overrides: tuple[str, ...]


class Part(NamedTuple):
    """The runs of an arm on a dial."""

    arm: Arm
    dial: Dial
    words: list[str]
    """The arguments of ``steadymoe run`` that make ``planned``."""
    planned: list[Run]
    beyond: list[Run]
    """Runs at rates beyond the grid's ends, which count where they were needed."""

    @property
    def runs(self) -> list[Run]:
        """Return the planned runs and those beyond."""
        return [*self.planned, *self.beyond]


def _part(arm: Arm, dial: Dial, more: Sequence[str] = (), beyond: Sequence[float] = ()) -> Part:
    """Plan the runs that turn a dial, with ``more`` overrides; also at the rates ``beyond``. Raises ConfigError."""
    words = ["-m", f"experiment={dial.experiment}", *dial.overrides, *arm.overrides, *more]
    further = compose.plan([*words[1:], *_at(*beyond)], multirun=True) if beyond else []
    return Part(arm, dial, words, compose.plan(words[1:], multirun=True), further)


def _at(*rates: float) -> list[str]:
    return [f"optimizer.learning_rate={','.join(f'{rate:g}' for rate in rates)}"]


def read(overrides: Sequence[str]) -> Arm:
    """Return the arm that the overrides choose. Raises ConfigError."""
    name = check.read(overrides).name
    run, *_ = compose.plan([f"experiment={RATE.experiment}", *RATE.overrides, *overrides, "seed=0"])
    axes = identity.axes_name({key: value for key, value in run.axes.items() if key.startswith("algorithm.")})
    if not axes:
        return Arm(name, name, tuple(overrides))
    digest = hashlib.sha256(axes.encode()).hexdigest()[:8]
    return Arm(f"{name} {axes}", f"{name.replace('@', '-at-')}-{digest}", tuple(overrides))


def score(
    overrides: Sequence[str], quick: bool = False, dry_run: bool = False, again: bool = False, to_record: bool = False
) -> int:
    """Check the algorithm, run what is missing, and write the score; ``again`` replaces outdated runs.

    Raises UserError before anything runs, and Damaged, OSError and, ``to_record``, ConfigError after.
    """
    own = read(overrides)
    anchors = [Arm(name, name, (f"algorithm={name}",)) for name in (ANCHORS[:1] if quick else ANCHORS)]
    # GRPO first: its gain draws the line.
    arms = [*anchors, *([] if own.label in [anchor.label for anchor in anchors] else [own])]
    grid = sorted({run.config.optimizer.learning_rate for run in _part(arms[0], RATE).planned})
    ends = [] if quick else [grid[0] / 2, 2 * grid[-1]]
    rates = [_part(arm, RATE, QUICK if quick else (), ends) for arm in arms]
    dials, control = ([], []) if quick else _later(own, rates)
    _refuse(own, [*rates, *dials, *control], again)
    if to_record:
        recorded.refuse(overrides, _keys([part for part in (*rates, *dials) if part.arm.label == own.label]))
    for line in _progress(rates, dials, control, again):
        print(visible(line))
    if dry_run:
        return 0
    if check.check(own.overrides):
        print("steadymoe: the algorithm fails `steadymoe check` and is not scored", file=sys.stderr)
        return 2
    for place, part in enumerate(rates):
        if code := _run(part, again):
            return code
        wider = [] if quick else outcomes.wider(_outcomes(rates[: place + 1]), part.arm.label, grid)
        if wider and (code := runs.main([*part.words, *_at(*wider)])):
            return code
    dials, control = ([], []) if quick else _later(own, rates)  # at the best rates, now known
    for part in (*dials, *control):
        if code := _run(part, again):
            return code
    found, shuffled = _outcomes([*rates, *dials]), _outcomes(control)
    keeps_state = properties.memory(check.read(overrides).loss).startswith(properties.KEEPS_STATE)
    label = "with state" if keeps_state else ""
    problem = "" if quick else outcomes.gains_without_reward(found, shuffled)
    notes = [f"{own.label} is {label}: {board.TERMS[label]}"] if label else []
    notes += [f"{own.label} cannot be recorded: {problem}."] if problem else []
    _show(own, found, notes, quick)
    if to_record and not problem:
        _record(own, found, label)
    return 1 if to_record and problem else 0


def _later(own: Arm, rates: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Plan the other dials of every arm, and a run of the scored loss with shuffled rewards.

    What is at an arm's best rate is at the rate that is best today.
    """
    found, first = _outcomes(rates), rates[0].planned[0].config
    best = {loss: _at(outcomes.best_rate(found, loss)) for loss in found["loss"].unique()}
    dials = [
        _part(arm, dial, best.get(arm.label, ()) if dial.at_best_rate else ())
        for dial in DIALS[1:]
        for arm, *_ in rates
    ]
    one = ["rollout.shuffle_rewards=true", f"experiment_name={RATE.experiment}_shuffled", f"seed={first.seed}"]
    return dials, [_part(own, RATE, [*one, *best.get(own.label, _at(first.optimizer.learning_rate))])]


def _run(part: Part, again: bool) -> int:
    """Make the planned runs and return the exit code; ``again`` moves outdated ones away first, and says which."""
    for line in runs.redo(part.runs) if again else ():
        print(visible(line), file=sys.stderr)
    return runs.main(part.words)


def _outcomes(parts: Sequence[Part]) -> pd.DataFrame:
    """Return the outcomes of everything that has ended."""
    found = [outcomes.of_runs(part.runs, part.dial, part.arm.label) for part in parts]
    ended = [each for each in found if len(each)]
    return pd.concat(ended, ignore_index=True) if ended else pd.DataFrame(columns=list(COLUMNS))


def _keys(parts: Sequence[Part]) -> pd.DataFrame:
    """Return what is known of outcomes before anything runs."""
    keys = [
        (part.arm.label, part.dial.name, standard.value_of(part.dial, run), run.config.seed)
        for part in parts
        for run in part.planned
    ]
    return pd.DataFrame(keys, columns=recorded.KEYS)


def _refuse(own: Arm, parts: Sequence[Part], again: bool) -> None:
    """Raise ConfigError for what would stop a score later, or would score something else."""
    reference, *_ = parts
    for dial in DIALS:
        standard.refuse_other_settings(dial, _part(reference.arm, dial).planned)
    mine = [run for part in parts if part.arm.label == own.label for run in part.runs]
    if changed := standard.changed_setting(reference.planned[0].plain, mine[0].plain):
        raise ConfigError(f"{own.label} changes what the standard fixes for every algorithm: {changed}")
    tuned = [word for word in own.overrides if not word.startswith("algorithm=")]
    if len(tuned) > MOST_TUNED:
        raise ConfigError(f"at most {MOST_TUNED} numbers of a loss may be tuned, got {len(tuned)}: {' '.join(tuned)}")
    older = [run for run in mine if _has_changed(run)]
    if older and not again:
        raise ConfigError(
            f"{own.label} was scored with another config ({older[0].folder}); score it again with --redo, or rename it"
        )
    runs.refuse_others([run for part in parts for run in part.runs if run not in older], may_redo=again)


def _has_changed(run: Run) -> bool:
    """Whether a run's folder holds a run of another config."""
    before = record.known(run.folder)
    return bool(before) and before["config_hash"] != run.config_hash


def _progress(rates: Sequence[Part], dials: Sequence[Part], control: Sequence[Part], again: bool) -> list[str]:
    """Return lines on finished, missing and, ``again``, outdated runs, and how long they take at the recorded pace."""
    of_rates, *others = (
        [record.read_state(run.folder) for part in parts for run in part.planned] for parts in (rates, dials, control)
    )
    missing, *later = (sum(not state.has_ended for state in states) for states in (of_rates, *others))
    lines = [f"rate: {dry.summary(of_rates)}"]
    if dials:
        lines.append(f"staleness and mismatch: {later[0]} to run; with shuffled rewards: {later[1]}")
        missing += sum(later)
    every = [run for part in (*rates, *dials, *control) for run in part.runs]
    if again and (old := [run for run in every if runs.stale(run) is not None]):
        missing += sum(record.read_state(run.folder).has_ended for run in old)
        lines.append(f"outdated: {len(old)} to replace")
    if missing:
        facts, at = standard.made(), at_once(rates[0].words[1:], True) or 1
        minutes = missing * facts["minutes"] / min(at, missing)
        lines.append(
            f"about {minutes:.0f} minutes with {at} runs at once, plus cold starts; one run took "
            f"{facts['minutes']} minutes on one core of {facts['machine']}"
        )
    return lines


def _show(own: Arm, found: pd.DataFrame, more: Sequence[str], quick: bool) -> None:
    """Print the scores and the notes, with ``more``, and write the page with its figure and its numbers."""
    scored = outcomes.scores(found)
    rows, notes = outcomes.table(scored), [*outcomes.notes(scored, found, own.label, quick), *more]
    rows = rows if not quick else rows.drop(columns=[f"{dial.name} × {REFERENCE}" for dial in DIALS[1:]])
    version = f"{VERSION}-quick" if quick else VERSION
    folder = regular_files.folder(_RESULTS, "scores", version, own.name)
    paths = board.draw(found, folder)
    title = f"{visible(own.label)} in {version}"
    # With STEADYMOE_PATH where its runs need it.
    prefix = _part(own, RATE).planned[0].command.partition("steadymoe ")[0]
    command = prefix + shlex.join(["steadymoe", "score", *own.overrides, *(["--quick"] if quick else [])])
    page = board.page(title, found, {"Bearable stress": rows}, notes, own.label, command)
    paths += write.files(folder, {"score.html": page, standard.OUTCOMES: found.to_csv(index=False)})
    for line in [*write.to_markdown(rows).splitlines(), *notes, *(f"wrote {path}" for path in paths)]:
        print(visible(line))


def _record(own: Arm, found: pd.DataFrame, label: str) -> None:
    """Append the outcomes of a loss and of GRPO to the recorded ones, with what is known of the loss's runs."""
    ran = ended_runs(_RESULTS, RATE.experiment)
    last = ran[ran["algorithm"] == own.name].iloc[-1]
    facts = {key: str(last[key]) for key in ("machine", "revision", "versions")}
    facts |= {"date": str(record.known(Path(last["folder"]))["started"])[:10], "label": label}
    for path in recorded.append(own.label, found[found["loss"].isin([own.label, REFERENCE])], facts):
        print(visible(f"wrote {path}"))

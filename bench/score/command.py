"""``steadymoe score``: parse its arguments, refuse before anything runs; score and record a loss, or draw the board."""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from steadymoe.bench.check import command as check
from steadymoe.bench.check import properties
from steadymoe.bench.report import write
from steadymoe.bench.report.folders import ended_runs
from steadymoe.bench.runs import command as runs
from steadymoe.bench.runs import compose, dry, identity, progress, run_folder
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.overrides import at_once
from steadymoe.bench.score import board, outcomes, recorded, standard
from steadymoe.bench.score.standard import ANCHORS, COLUMNS, DIALS, MOST_TUNED, QUICK, RATE, REFERENCE, VERSION, Dial
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import Parser
from steadymoe.bench.support.text import visible

_RESULTS = Path("results")
# The name of the dial on which the scored loss runs with shuffled rewards.
_CONTROL = "shuffled"
_DESCRIPTION = """\
Score an algorithm: how much stress it tolerates, in multiples of GRPO's. Checks it, trains it next to
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
    arguments = parser.parse_intermixed_args(args)
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
    args: list[str]
    """The arguments of ``steadymoe run`` that make ``planned``."""
    planned: list[Run]
    beyond: Sequence[Run] = ()
    """Runs at rates beyond the grid's ends, which count where they were needed."""

    @property
    def runs(self) -> list[Run]:
        """Return the planned runs and those beyond."""
        return [*self.planned, *self.beyond]

    @property
    def grid(self) -> list[float]:
        """Return the learning rates of the planned runs, ascending."""
        return sorted({run.config.optimizer.learning_rate for run in self.planned})


def _part(arm: Arm, dial: Dial, more: Sequence[str] = (), is_wide: bool = False) -> Part:
    """Plan the runs that turn a dial, with ``more`` overrides; ``is_wide``: and those beyond. Raises ConfigError."""
    args = [f"experiment={dial.experiment}", *dial.overrides, *arm.overrides, *more]
    part = Part(arm, dial, ["-m", *args], compose.plan(args, multirun=True))
    ends = _at(part.grid[0] / 2, 2 * part.grid[-1])
    return part._replace(beyond=compose.plan([*args, *ends], multirun=True)) if is_wide else part


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
    # GRPO first: its gain sets the threshold.
    arms = {arm.label: arm for arm in (*anchors, own)}.values()
    rates = [_part(arm, RATE, QUICK if quick else (), is_wide=not quick) for arm in arms]
    best = _best_rates(rates)
    later = [] if quick else _later(own, rates, best)
    parts = [*rates, *later]
    _refuse(own, parts, again)
    if to_record:
        recorded.refuse(overrides)
    for line in _progress(parts, again):
        print(visible(line))
    if dry_run:
        return 0
    if check.check(own.overrides):
        print("steadymoe: the algorithm fails `steadymoe check` and is not scored", file=sys.stderr)
        return 2
    done, total = 0, sum(len(part.planned) for part in parts)
    for place, part in enumerate(rates):
        with progress.counted(done, total):
            if code := _run(part, again):
                return code
        done += len(part.planned)
        wider = [] if quick else outcomes.wider(_outcomes(rates[: place + 1]), part.arm.label, part.grid)
        if wider and (code := runs.main([*part.args, *_at(*wider)])):
            return code
    if later and (measured := _best_rates(rates)) != best:
        later = _later(own, rates, measured)
    for part in later:
        with progress.counted(done, total):
            if code := _run(part, again):
                return code
        done += len(part.planned)
    found = _outcomes([*rates, *later])
    is_control = found["dial"] == _CONTROL
    found, shuffled = found[~is_control], found[is_control]
    keeps_state = properties.memory(check.read(overrides).loss).startswith(properties.KEEPS_STATE)
    label = "with state" if keeps_state else ""
    problem = "" if quick else outcomes.gains_without_reward(found, shuffled)
    notes = [f"{own.label} is {label}: {board.TERMS[label]}"] if label else []
    notes += [f"{own.label} cannot be recorded: {problem}."] if problem else []
    # The last arm is the scored one, or an anchor, which needs no STEADYMOE_PATH.
    _show(own, found, notes, quick, rates[-1].planned[0].command.partition("steadymoe ")[0])
    if to_record and not problem:
        _record(own, found, label)
    return 1 if to_record and problem else 0


def _best_rates(rates: Sequence[Part]) -> dict[str, float]:
    """Return loss → its best rate today, of those that have ended runs."""
    found = _outcomes(rates)
    return {loss: outcomes.best_rate(found, loss) for loss in found["loss"].unique()}


def _later(own: Arm, rates: Sequence[Part], best: Mapping[str, float]) -> list[Part]:
    """Plan the other dials of every arm, and a run of the scored loss with shuffled rewards, at the rates ``best``."""
    first = rates[0].planned[0].config
    at = {label: _at(rate) for label, rate in best.items()}
    dials = [
        _part(arm, dial, at.get(arm.label, ()) if dial.at_best_rate else ()) for dial in DIALS[1:] for arm, *_ in rates
    ]
    shuffled = ("rollout.shuffle_rewards=true", f"experiment_name={RATE.experiment}_shuffled", f"seed={first.seed}")
    control = replace(RATE, name=_CONTROL, overrides=(*RATE.overrides, *shuffled))
    return [*dials, _part(own, control, at.get(own.label, _at(first.optimizer.learning_rate)))]


def _run(part: Part, again: bool) -> int:
    """Make the planned runs and return the exit code; ``again`` moves outdated ones away first, and says which."""
    for line in run_folder.redo(part.runs) if again else ():
        print(visible(line), file=sys.stderr)
    return runs.main(part.args)


def _outcomes(parts: Sequence[Part]) -> pd.DataFrame:
    """Return the outcomes of everything that has ended."""
    found = [outcomes.of_runs(part.runs, part.dial, part.arm.label) for part in parts]
    ended = [each for each in found if len(each)]
    return pd.concat(ended, ignore_index=True) if ended else pd.DataFrame(columns=list(COLUMNS))


def _refuse(own: Arm, parts: Sequence[Part], again: bool) -> None:
    """Raise ConfigError for what would stop a score later, or would score something else."""
    reference, *_ = parts
    for dial in DIALS:  # at the experiment's own rate, as it was recorded
        standard.refuse_other_settings(dial, _part(reference.arm, dial, ["seed=0"]).planned)
    mine = [run for part in parts if part.arm.label == own.label for run in part.runs]
    if changed := standard.changed_setting(reference.planned[0].plain, mine[0].plain):
        raise ConfigError(f"{own.label} changes what the standard fixes for every algorithm: {changed}")
    tuned = [override for override in own.overrides if not override.startswith("algorithm=")]
    if len(tuned) > MOST_TUNED:
        raise ConfigError(f"at most {MOST_TUNED} numbers of a loss may be tuned, got {len(tuned)}: {' '.join(tuned)}")
    # In whose folders are runs of another config.
    older = [run for run in mine if run_folder.known(run.folder).get("config_hash", run.config_hash) != run.config_hash]
    if older and not again:
        raise ConfigError(
            f"{own.label} was scored with another config ({older[0].folder}); score it again with --redo, or rename it"
        )
    run_folder.refuse_others([run for part in parts for run in part.runs if run not in older], may_redo=again)


def _progress(parts: Sequence[Part], again: bool) -> list[str]:
    """Return lines on finished, missing and, ``again``, outdated runs, and how long they take at the recorded pace."""
    states: dict[str, list[run_folder.State]] = {}
    for part in parts:
        states.setdefault(part.dial.name, []).extend(run_folder.read_state(run.folder) for run in part.planned)
    to_run = {dial: sum(not state.has_ended for state in of_dial) for dial, of_dial in states.items()}
    lines, missing = [f"{RATE.name}: {dry.summary(states[RATE.name])}"], sum(to_run.values())
    if _CONTROL in to_run:
        others = missing - to_run[RATE.name] - to_run[_CONTROL]
        lines.append(f"staleness and mismatch: {others} to run; with shuffled rewards: {to_run[_CONTROL]}")
    if again and (old := [run for part in parts for run in part.runs if run_folder.stale(run) is not None]):
        missing += sum(run_folder.read_state(run.folder).has_ended for run in old)
        lines.append(f"outdated: {len(old)} to replace")
    if missing:
        facts, at = standard.made(), at_once(parts[0].args[1:], True) or 1
        minutes = missing * facts["minutes"] / min(at, missing)
        lines.append(
            f"about {minutes:.0f} minutes with {at} runs at once, plus cold starts; one run took "
            f"{facts['minutes']} minutes on one core of {facts['machine']}"
        )
    return lines


def _show(own: Arm, found: pd.DataFrame, more: Sequence[str], quick: bool, path: str) -> None:
    """Print the scores and the notes, with ``more``, and write the page with its figure and its numbers.

    ``path`` sets STEADYMOE_PATH before the command that repeats the score, where its runs need it.
    """
    scored = outcomes.scores(found)
    rows, notes = outcomes.table(scored), [*outcomes.notes(scored, found, own.label, quick), *more]
    rows = rows if not quick else rows.drop(columns=[f"{dial.name} × {REFERENCE}" for dial in DIALS[1:]])
    version = f"{VERSION}-quick" if quick else VERSION
    folder = files.folder(_RESULTS, "scores", version, own.name)
    paths = board.draw(found, folder)
    title = f"{visible(own.label)} in {version}"
    command = path + shlex.join(["steadymoe", "score", *own.overrides, *(["--quick"] if quick else [])])
    page = board.page(title, found, {"Tolerance": rows}, notes, own.label, command)
    paths += write.text_files(folder, {"score.html": page, standard.OUTCOMES: found.to_csv(index=False)})
    for line in [*write.to_markdown(rows).splitlines(), *notes, *(f"wrote {path}" for path in paths)]:
        print(visible(line))


def _record(own: Arm, found: pd.DataFrame, label: str) -> None:
    """Append the outcomes of a loss and of GRPO to the recorded ones, with what is known of the loss's runs."""
    ran = ended_runs(_RESULTS, RATE.experiment)
    last = ran[ran["algorithm"] == own.name].iloc[-1]
    facts = {key: str(last[key]) for key in ("machine", "revision", "versions")}
    facts |= {"date": str(run_folder.known(Path(last["folder"]))["started"])[:10], "label": label}
    for path in recorded.append(own.label, found[found["loss"].isin([own.label, REFERENCE])], facts):
        print(visible(f"wrote {path}"))

"""``steadymoe score`` from its words to its exit code: what is refused, what is missing, runs, and what is shown."""

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
from steadymoe.bench.runs import dry, record, redo
from steadymoe.bench.runs import request as runs
from steadymoe.bench.runs.damage import Damaged
from steadymoe.bench.score import asked as asking
from steadymoe.bench.score import entry, kept, page, parts
from steadymoe.bench.score import submit as making
from steadymoe.bench.score.asked import Asked
from steadymoe.bench.score.kept import Kept
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
from steadymoe.bench.score.standard import PARTS, VERSION, Part, changed_setting
from steadymoe.bench.support.text import visible

HELP = """steadymoe score algorithm=NAME [algorithm.loss.KEY=VALUE …] [--quick] [--dry] [--redo]

Places an algorithm, also one in a folder of STEADYMOE_PATH, beside the recorded algorithms of the standard: checks
it, runs what is missing of it and of the anchors (GRPO, GSPO, the policy that never moves), and writes tables, a
figure and a page to results/scores/. The same command goes on where it was stopped. --quick: yours and GRPO at three
seeds, a first look; --dry says what would be run; --redo makes anew what other code made, and yours if its numbers
have changed. docs/your_algorithm.md"""


def answer(words: list[str]) -> int:
    """Score the algorithm that ``words`` name and return the exit code.

    0: scored; 1: a run failed; 2: the request is invalid, or the algorithm is refused by ``check``; 130: interrupted.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    console = Console(markup=False, highlight=False)  # its texts come from data
    try:
        asked, recorded = asking.read(words), kept.load()
        for part in PARTS:
            _refuse_others(part, asked, recorded)
        for part in PARTS:
            for line in _dry(part, asked, recorded):
                console.print(visible(f"{part.name}: {line}"), soft_wrap=True)
    except (ConfigError, Damaged, ValueError, OSError) as error:
        return _refuse(error)
    if "--dry" in words:
        return 0
    if code := check.answer(list(asked.words)):
        print("steadymoe: an algorithm that check refuses is not scored", file=sys.stderr)
        return 2 if code == 1 else code
    for part in PARTS:
        if code := _make(part, asked):
            return code
    try:
        return _show(asked, recorded, console)
    except (NotRun, Damaged, OSError) as error:
        return _refuse(error)


def submit(arguments: argparse.Namespace) -> Path:
    """The entry of a scored algorithm, written to ``arguments.to``. Raises ConfigError, Damaged, NotRun, BadEntry.

    Everything of its score has to be there, made by today's code, of the standard, and on one machine.
    """
    asked, recorded = asking.read(arguments.words), kept.load()
    if asked.quick or asked.redo:
        raise ConfigError("an entry is written from a whole score, without --quick and --redo")
    command, study = shlex.join(["steadymoe", "score", *asked.words]), Recorded(Path("results"))
    for part in PARTS:
        _refuse_others(part, asked, recorded)
        if _waits(part, asked):
            raise NotRun(f"the part {part.name} of {asked.label} has not run whole: {command}")
        arms = [arm for arm in asked.here(part) if isinstance(arm, Arm)]
        if arms and (several := parts.several(study, arms)):
            raise ConfigError(f"the runs of {part.name} are of several kinds ({several[0]}), and an entry is of one")
    arms_of = {part.name: dict(zip((entry.OWN, *asked.anchors), asked.here(part), strict=False)) for part in PARTS}
    folders = {run.config.seed: run.folder for run in asked.runs(PARTS[0])[0]}
    said = {"name": arguments.name or asked.name, "words": shlex.join(asked.words), "paper": arguments.paper}
    said |= {"equation": arguments.equation, "tuned": bool(arguments.tuned), "tuning": arguments.tuned}
    text = making.readme(said["name"], arguments.paper, arguments.equation)
    files = making.own_files(asked.words) | {"README.md": text}
    return making.submit(study, arms_of, folders, said, files, arguments.to)


def _refuse_others(part: Part, asked: Asked, recorded: Kept) -> None:
    """Raise ConfigError before anything is run, where something would stop the score later or would mean another thing.

    What the anchors make must be of the standard; the scored algorithm's runs may differ from theirs in the algorithm
    alone, without its sampling (``changed_setting``); folders must hold nothing of other code or another config.
    """
    seed = asked.seeds(part)[0]
    if part.kind == "audits":
        (anchors,) = audits.plan([f"experiment={part.experiment}", *part.words, f"seed={seed}"])
        losses = {name: anchors.arms[name].plain["algorithm"]["loss"] for name in recorded.anchors(part)}
        kept.refuse_other_settings(part, seed, kept.audit_hashes(anchors.run.plain, losses), recorded)
        return audits.refuse_others(asked.audits(part), asked.redo)
    own, *others = asked.runs(part)
    runs_of = {name: _at(seed, runs) for name, runs in asked.anchor_runs(part).items()}
    kept.refuse_other_settings(part, seed, {name: run.config_hash for name, run in runs_of.items()}, recorded)
    if changed := changed_setting(runs_of["grpo"].plain, _at(seed, own).plain):
        raise ConfigError(
            f"{asked.label} changes what the standard fixes: {changed}; every algorithm gets the same setting and the "
            "same number of rollouts"
        )
    if not asked.redo and (older := [run for run in own if _has_changed(run)]):
        raise ConfigError(
            f"{asked.label} has other numbers than when it was scored ({older[0].folder}); add --redo to score it "
            "anew, or give it another name"
        )
    beside = [run for each in others for run in each]
    return runs.refuse_others(beside if asked.redo else [*own, *beside], may_redo=asked.redo)


def _at(seed: int, planned: Sequence[compose.Run]) -> compose.Run:
    return next(run for run in planned if run.config.seed == seed)


def _has_changed(run: compose.Run) -> bool:
    """Whether a run's folder holds a run of another config."""
    before = record.known(run.folder)
    return bool(before) and before["config_hash"] != run.config_hash


def _make(part: Part, asked: Asked) -> int:
    """Make what is missing of a part; return the exit code of the first command that fails, else 0."""
    if part.kind == "runs":
        if asked.redo:
            for line in redo.set_aside([run for run in asked.runs(part)[0] if _has_changed(run)]):
                print(visible(line), file=sys.stderr)
        again = ["--redo"] if asked.redo else []
        return next((code for words in asked.commands(part) if (code := runs.answer([*words, *again]))), 0)
    try:
        audits.refuse_others(asked.audits(part))
        again = []
    except ConfigError:  # something there is of other code or another config
        again = ["--redo"]
    for words in asked.commands(part):
        if code := audits.answer([*words, *again]):
            return code
    return 0


def _waits(part: Part, asked: Asked) -> bool:
    """Whether something of a part is not made yet."""
    if part.kind == "audits":
        return any(each.missing for each in asked.audits(part))
    return any(record.status(run.folder) not in record.ENDED for runs_of in asked.runs(part) for run in runs_of)


def _dry(part: Part, asked: Asked, recorded: Kept) -> list[str]:
    """The runs or audits of a part that are done, the missing ones, and their minutes, in two or three lines."""
    pace = [recorded.pace(part)] if _waits(part, asked) else []
    if part.kind == "audits":
        planned = asked.audits(part)
        waiting = sum(bool(each.missing) for each in planned)
        return [f"{len(planned)} audits: {waiting} to do, {len(planned) - waiting} done", *pace]
    every = [run for runs_of in asked.runs(part) for run in runs_of]
    return [*dry.lines(every, 0, compose.at_once(asked.commands(part)[0][1:], True)), *pace]


def _show(asked: Asked, recorded: Kept, console: Console) -> int:
    """Say where the algorithm stands, and write its page."""
    study, shown, notes = Recorded(Path("results")), [], []
    if asked.quick:
        notes.append("A first look: three seeds and one checkpoint decide little.")
    for part in PARTS:
        found, remarks = parts.of(part, asked, study, recorded)
        shown.append(found)
        notes += remarks
    folder = Path("results") / "scores" / (f"{VERSION}-quick" if asked.quick else VERSION) / asked.name
    command = shlex.join(["steadymoe", "score", *asked.words, *(["--quick"] if asked.quick else [])])
    written = page.write(shown, notes, command, folder)
    for line in [*page.text(shown).splitlines(), *notes, *(f"wrote {path}" for path in written)]:
        console.print(visible(line), soft_wrap=True)
    return 0


def _refuse(error: Exception) -> int:
    print(f"steadymoe: {visible(error)}", file=sys.stderr)
    return 2

"""``steadymoe score`` from its words to its exit code: what is asked, what is missing, runs, and where it stands."""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from steadymoe.bench.audit import request as audits
from steadymoe.bench.check import request as check
from steadymoe.bench.claims.study import Arm, Audited, NotRun, Study
from steadymoe.bench.config import compose, identity
from steadymoe.bench.config.compose import ConfigError
from steadymoe.bench.runs import dry
from steadymoe.bench.runs import request as runs
from steadymoe.bench.runs.damage import Damaged
from steadymoe.bench.scores import entry, kept, page, standing
from steadymoe.bench.scores import submit as making
from steadymoe.bench.scores.kept import Kept
from steadymoe.bench.scores.standard import ANCHORS, FROZEN, PARTS, STABILITY, VERSION, Part
from steadymoe.bench.support.text import visible

HELP = """steadymoe score algorithm=NAME [algorithm.loss.KEY=VALUE …] [--quick] [--dry] [--redo]

Places an algorithm, also one in a folder of STEADYMOE_PATH, beside the recorded algorithms of the standard: checks
it, runs what is missing of it and of the anchors (GRPO, GSPO, the policy that never moves), and writes tables, a
figure and a page to results/scores/. The same command goes on where it was stopped. --quick: yours and GRPO at three
seeds, a first look; --dry says what would be run; --redo makes anew what other code made. docs/your_algorithm.md"""
_FLAGS = ("--quick", "--dry", "--redo")
# The name of the scored algorithm in audits, and the names of the anchors among the recorded arms.
_YOURS = "yours"
_SHOWN = {"grpo": "GRPO", "gspo": "GSPO"}


@dataclass(frozen=True)
class Asked:
    """What is scored, and how."""

    words: tuple[str, ...]
    """The words that name the algorithm and its numbers."""
    label: str
    """Its name in tables."""
    name: str
    """Its name in file names."""
    quick: bool
    redo: bool

    def seeds(self, part: Part) -> tuple[int, ...]:
        """The seeds that are run."""
        return part.quick if self.quick else part.seeds

    @property
    def anchors(self) -> tuple[str, ...]:
        """The algorithms that are run beside it."""
        return ANCHORS[:1] if self.quick else ANCHORS


def answer(words: list[str]) -> int:
    """Score the algorithm that ``words`` name and return the exit code.

    0: scored; 1: a run failed; 2: the request is invalid, or the algorithm is refused by ``check``; 130: interrupted.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    console = Console(markup=False, highlight=False)  # its texts come from data
    try:
        asked, recorded = _read(words), kept.load()
        planned = {part: _plan(part, asked) for part in PARTS}
        for part in PARTS:
            _refuse_others(part, asked, recorded)
        for part in PARTS:
            for line in _dry(part, planned[part]):
                console.print(visible(f"{part.name}: {line}"), soft_wrap=True)
    except (ConfigError, Damaged, ValueError, OSError) as error:
        print(f"steadymoe: {visible(error)}", file=sys.stderr)
        return 2
    if "--dry" in words:
        return 0
    if code := check.answer(list(asked.words)):
        print("steadymoe: an algorithm that check refuses is not scored", file=sys.stderr)
        return 2 if code == 1 else code
    for part in PARTS:
        run = runs.answer if part.kind == "runs" else audits.answer
        for each in planned[part]:
            if code := run([*each, *(["--redo"] if asked.redo else [])]):
                return code
    try:
        return _show(asked, recorded, console)
    except (NotRun, Damaged, OSError) as error:
        print(f"steadymoe: {visible(error)}", file=sys.stderr)
        return 2


def _read(words: Sequence[str]) -> Asked:
    """What the words ask for. Raises ConfigError."""
    named = tuple(word for word in words if word not in _FLAGS)
    checked = check.read(list(named))
    (run,) = compose.plan([f"experiment={STABILITY.experiment}", *STABILITY.words, *named, "seed=0"])
    axes = identity.axes_name({key: value for key, value in run.axes.items() if key.startswith("algorithm.")})
    label = f"{checked.name} {axes}" if axes else checked.name
    name = f"{checked.name}-{hashlib.sha256(axes.encode()).hexdigest()[:8]}" if axes else checked.name
    return Asked(named, label, name, "--quick" in words, "--redo" in words)


def _refuse_others(part: Part, asked: Asked, recorded: Kept) -> None:
    """Raise ConfigError before anything is run, where something would stop the score later or would mean another thing.

    What the anchors make must be of the standard; the scored algorithm's runs may differ from theirs in the algorithm
    alone; folders must hold nothing of other code or another config.
    """
    planned, seed = _plan(part, asked), part.seeds[0]
    fixed = [f"experiment={part.experiment}", *part.words, f"seed={seed}"]
    if part.kind == "audits":
        (anchors,) = audits.plan(fixed)
        losses = {name: anchors.arms[name].plain["algorithm"]["loss"] for name in recorded.anchors(part)}
        kept.refuse_other_settings(part, seed, kept.audit_hashes(anchors.run.plain, losses), recorded)
        return audits.refuse_others([each for words in planned for each in audits.plan(words)], asked.redo)
    runs_of = {name: compose.plan([*fixed, f"algorithm={name}"])[0] for name in asked.anchors}
    hashes = {name: run.config_hash for name, run in runs_of.items()}
    kept.refuse_other_settings(part, seed, hashes, recorded)
    every = [run for words in planned for run in compose.plan(words[1:], multirun=True)]
    mine = next(run for run in every if run.config.seed == seed)
    apart = identity.difference(identity.flatten(runs_of["grpo"].plain), identity.flatten(mine.plain)).split(", ")
    if other := [each for each in apart if each and not each.startswith("algorithm.")]:
        raise ConfigError(
            f"{asked.label} changes what the standard fixes: {other[0]}; a score is of an algorithm alone"
        )
    return runs.refuse_others(every, may_redo=asked.redo)


def _plan(part: Part, asked: Asked) -> list[list[str]]:
    """The words of each command that the part takes, the scored algorithm first."""
    seeds = "seed=" + ",".join(map(str, asked.seeds(part)))
    if part.kind == "audits":
        arm = f'+audit.arms.{_YOURS}="{" ".join(asked.words)}"'
        name = f"experiment_name={_audits(part, asked)}"
        return [
            [
                f"experiment={part.experiment}",
                *part.words,
                arm,
                f"audit.algorithms=[{','.join(asked.anchors)}]",
                name,
                seeds,
            ]
        ]
    anchors = [name for name in asked.anchors if asked.words != (f"algorithm={name}",)]
    others = [(f"algorithm={','.join(anchors)}",)] if anchors else []
    each = [asked.words, *others, *([] if asked.quick else [FROZEN])]
    return [["-m", f"experiment={part.experiment}", *part.words, *words, seeds] for words in each]


def _audits(part: Part, asked: Asked) -> str:
    """The name under which the audits with the scored algorithm are recorded."""
    return f"{part.folder}{'-quick' if asked.quick else ''}-{asked.name}"


def _dry(part: Part, commands: Sequence[list[str]]) -> list[str]:
    """What there is of a part and what would be made, a line or two."""
    if part.kind == "audits":
        planned = [each for words in commands for each in audits.plan(words)]
        waiting = sum(bool(each.missing) for each in planned)
        return [f"{len(planned)} audits: {waiting} to do, {len(planned) - waiting} done"]
    every = [run for words in commands for run in compose.plan(words[1:], multirun=True)]
    return dry.lines(every, 0, compose.at_once(commands[0][1:], True))


def _show(asked: Asked, recorded: Kept, console: Console) -> int:
    """Say where the algorithm stands, and write its page."""
    study = Study(Path("results"))
    parts, notes = [], []
    if asked.quick:
        notes.append("A first look: three seeds and one checkpoint decide little.")
    for part in PARTS:
        shown, note = _part(part, asked, study, recorded)
        parts.append(shown)
        notes += [f"{part.name}: {note}"] if note else []
    folder = Path("results") / "scores" / (f"{VERSION}-quick" if asked.quick else VERSION) / asked.name
    command = shlex.join(["steadymoe", "score", *asked.words, *(["--quick"] if asked.quick else [])])
    written = page.write(parts, notes, command, folder)
    for line in [*page.text(parts).splitlines(), *notes, *(f"wrote {path}" for path in written)]:
        console.print(visible(line), soft_wrap=True)
    return 0


def _part(part: Part, asked: Asked, study: Study, recorded: Kept) -> tuple[page.Shown, str]:
    """One part of the score, and a remark on the machine; "" for none."""
    here = {arm.label: part.number(study, arm) for arm in _here(part, asked)}
    seeds = list(asked.seeds(part))
    here = {name: numbers[numbers.index.isin(seeds)] for name, numbers in here.items()}
    rows = recorded.of(part)
    theirs = {str(arm): group.set_index("seed")["value"] for arm, group in rows.groupby("arm", sort=False)}
    note = standing.why_not_pooled(here, theirs, [_SHOWN[name] for name in asked.anchors])
    mine = _mine(asked)
    found = standing.rows(mine, here, theirs, pooled=not note)
    starts = {str(arm): float(start) for arm, start in rows.groupby("arm")["start"].mean().dropna().items()}
    drawn = pd.DataFrame(columns=["arm", "seed", "step", "metric", "value"])
    if part.kind == "runs":
        of_here = [arm for arm in _here(part, asked) if isinstance(arm, Arm)]
        starts |= {arm.label: float(study.first(arm).mean()) for arm in of_here}
        own = pd.concat([kept.curve(study, arm).assign(arm=arm.label) for arm in of_here])
        others = recorded.curves[(recorded.curves["part"] == part.name) & ~recorded.curves["arm"].isin(list(here))]
        drawn = (
            pd.concat([own[own["seed"].isin(seeds)], others], ignore_index=True)
            .rename(columns={"update": "step"})
            .assign(metric="reward")
        )
    return page.Shown(part, found, mine, drawn, starts), note


def _mine(asked: Asked) -> str:
    return f"{asked.label} (yours)"


def _here(part: Part, asked: Asked) -> list[Arm | Audited]:
    """The arms of this machine: the scored algorithm, the anchors and, of runs, the policy that never moves."""
    if part.kind == "audits":
        name = _audits(part, asked)
        return [Audited(_mine(asked), name, _YOURS), *(Audited(_SHOWN[each], name, each) for each in asked.anchors)]
    anchors = [_arm(part, _SHOWN[each], (f"algorithm={each}",)) for each in asked.anchors]
    frozen = [] if asked.quick else [_arm(part, "frozen", FROZEN)]
    return [_arm(part, _mine(asked), asked.words), *anchors, *frozen]


def _arm(part: Part, label: str, words: Sequence[str]) -> Arm:
    """The runs of a part that ``words`` ask for."""
    (run,) = compose.plan([f"experiment={part.experiment}", *part.words, *words, "seed=0"])
    return Arm(label, part.folder, run.choices["algorithm"], run.axes)


def submit(arguments: argparse.Namespace) -> Path:
    """The entry of a scored algorithm, written to ``arguments.to``. Raises ConfigError, Damaged, NotRun, BadEntry.

    Its runs must be of today's code and of the standard, as for a score.
    """
    asked, recorded = _read(arguments.words), kept.load()
    if asked.quick:
        raise ConfigError("an entry needs the whole score, without --quick")
    arms = {}
    for part in PARTS:
        _refuse_others(part, asked, recorded)
        own, *others = _here(part, asked)
        arms[part.name] = {entry.OWN: own} | dict(zip(asked.anchors, others, strict=False))
    runs_of = {run.config.seed: run.folder for run in compose.plan(_plan(STABILITY, asked)[0][1:], multirun=True)}
    said = {"name": arguments.name or asked.name, "words": shlex.join(asked.words), "paper": arguments.paper}
    said |= {"equation": arguments.equation, "tuned": bool(arguments.tuned), "tuning": arguments.tuned}
    text = making.readme(said["name"], arguments.paper, arguments.equation)
    files = making.own_files(asked.words) | {"README.md": text}
    try:
        return making.submit(Study(Path("results")), arms, runs_of, said, files, arguments.to)
    except NotRun as missing:
        command = shlex.join(["steadymoe", "score", *asked.words])
        raise NotRun(f"no ended runs of {missing}: {command}") from missing

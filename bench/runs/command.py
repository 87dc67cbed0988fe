"""``steadymoe run`` from its words to its exit code: flags, refusals before anything is touched, launch, outcome."""

import shlex
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import ConfigError, Run
from steadymoe.bench.runs import dry, execute, launch, outcome, progress, record, redo, sweep_plan
from steadymoe.bench.support.text import visible


def main(words: list[str]) -> int:
    """Make the runs that ``words`` ask for and return the exit code.

    0: all ended; 1: a run failed or was lost; 2: the request is invalid; 130: interrupted.
    """
    console = Console(markup=False, highlight=False)  # its texts come from data
    try:
        flags = _flags(words)
        if "--help" in flags.prints:
            launch.show(flags.prints)
            return 0
        runs = compose.plan(flags.overrides, flags.multirun)
        if flags.prints:
            _refuse_swept_print(flags)
            launch.show([*flags.prints, *flags.overrides])
            return 0
        launch.refuse_absent_cluster(flags.overrides)
        refuse_others(runs, may_redo=flags.redo)
        asked = len(runs)
        if flags.only_failed:
            runs = _failed(runs)
        if flags.dry:
            at_once = compose.at_once(flags.overrides, flags.multirun)
            for line in dry.lines(runs, asked - len(runs), at_once):
                _say(console, line)
            return 0
        _begin(runs, _sweep(runs, flags))
        for line in redo.set_aside(runs) if flags.redo else ():
            _say(console, line)
    except (ConfigError, ValueError, OSError) as error:
        print(f"steadymoe: {visible(error)}", file=sys.stderr)
        return 2
    if len(runs) < asked:
        _say(console, f"{asked - len(runs)} of {asked} runs have not failed and are left for a run of all")
    before = {each.folder: record.look(each.folder) for each in runs}
    waiting = [each for each in runs if not before[each.folder].has_ended]
    if len(waiting) < len(runs):
        _say(console, f"{len(runs) - len(waiting)} of {len(runs)} runs have ended before and are left as they are")
        for line in redo.left(runs, before):
            _say(console, line)
    for each in waiting:
        if (why := before[each.folder].damage) is not None:
            _say(console, f"damaged, made again: {each.folder} ({why})")
    lost = False
    if waiting:
        code = _launch(runs, waiting, flags, console)
        if code == 130:
            return code
        lost = code != 0
    return 1 if _outcome(runs, console) or lost else 0


def _say(console: Console, text: str) -> None:
    console.print(visible(text), soft_wrap=True)


def _launch(runs: Sequence[Run], waiting: Sequence[Run], flags: "_Flags", console: Console) -> int:
    """Execute the runs that are ``waiting`` and show the progress of all.

    Returns 0, 1 if a launcher has lost a job, 130 if interrupted.
    """
    # SIGTERM, by which a batch system ends a job, counts as Ctrl-C: it stops the workers too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress.watch(runs, console):
            config = compose.settings(flags.overrides)
            launch.launch(waiting, config, compose.is_sweep(config.hydra, flags.multirun))
    except launch.lost_job_errors() as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        print(f"steadymoe: the launcher has lost a job; the others may go on. {visible(why)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("steadymoe: interrupted; the same command goes on from the last checkpoints", file=sys.stderr)
        return 130
    return 0


def _outcome(runs: Sequence[Run], console: Console) -> bool:
    """Say how the runs ended, and what comes next; whether any has failed."""
    states = {each.folder: record.look(each.folder) for each in runs}
    counts = Counter(state.status for state in states.values())
    _say(console, ", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for line in outcome.lines(runs):
        _say(console, line)
    failed = [each for each in runs if states[each.folder].status not in (*record.ENDED, "running")]
    for each in failed:
        last = str(states[each.folder].facts.get("error") or "").strip().splitlines()[-1:]
        print(f"steadymoe: {states[each.folder].status}: {visible(' '.join(last))}", file=sys.stderr)
        print(f"  again: {visible(each.command)}", file=sys.stderr)
    results, experiment = runs[0].config.results_dir, runs[0].config.experiment_name
    where = "" if results == "results" else f" --results {shlex.quote(results)}"
    _say(console, f"next: steadymoe report --experiment {experiment}{where}")
    return bool(failed)


def _failed(runs: Sequence[Run]) -> list[Run]:
    """The runs of ``--retry-failed``: the failed runs and the ended runs. Raises ConfigError if none has failed."""
    statuses = [record.status(each.folder) for each in runs]
    if "failed" not in statuses:
        raise ConfigError(f"--retry-failed: none of {len(runs)} runs has failed; leave the flag out to run the others")
    return [each for each, status in zip(runs, statuses, strict=True) if status in (*record.ENDED, "failed")]


def make_one(run: Run) -> str:
    """Make one run in this process and return its status, as ``execute.execute`` does; nothing is shown meanwhile.

    Raises ConfigError where the run's folder holds a run of another config or an ended run of other code.
    """
    refuse_others([run])
    _begin([run])
    return execute.execute(run)


def refuse_others(runs: Sequence[Run], may_redo: bool = False) -> None:
    """Raise ConfigError where a run's folder holds a run of another config or, without ``may_redo``, of other code."""
    for each in runs:
        execute.refuse_other_config(each)
    if not may_redo:
        redo.refuse_other_code(runs)


def _begin(runs: Sequence[Run], sweep: str | None = None) -> None:
    """Make the results folder, and add the runs to the plans of their experiments. Raises ConfigError, OSError.

    ``sweep`` is the command that makes them all, if there is one.
    """
    results = Path(runs[0].config.results_dir)
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"results_dir={results} cannot be written: {error}") from error
    sweep_plan.remember(runs, sweep)


def _sweep(runs: Sequence[Run], flags: "_Flags") -> str | None:
    """The command that makes or resumes all ``runs``; None for a single run."""
    if len(runs) < 2:
        return None
    prefixes = {run.command.partition("steadymoe ")[0] for run in runs}  # STEADYMOE_PATH, or nothing
    return max(prefixes) + compose.command([*(["-m"] if flags.multirun else []), *flags.overrides])


@dataclass(frozen=True)
class _Flags:
    """The words of ``steadymoe run``, sorted."""

    multirun: bool
    only_failed: bool
    redo: bool
    dry: bool
    prints: list[str]
    """Flags of Hydra that only print."""
    overrides: list[str]


def _flags(words: list[str]) -> _Flags:
    """Sort the words of the command. Raises ConfigError for an unknown flag or two flags that exclude each other."""
    given, prints, overrides = set(), [], []
    rest = iter(words)
    for word in rest:
        if word in ("-m", "--multirun", "--retry-failed", "--redo", "--dry"):
            given.add("-m" if word == "--multirun" else word)
        elif word in ("-h", "--help"):
            prints = ["--help"]
        elif word in ("--cfg", "--info"):
            prints += [word, next(rest, "job" if word == "--cfg" else "all")]
        elif word.startswith("-"):
            raise ConfigError(
                f"{word} is no flag of steadymoe run; "
                "it takes -m, --dry, --retry-failed, --redo, --cfg job, --info all, --help, key=value"
            )
        else:
            overrides.append(word)
    if {"--retry-failed", "--redo"} <= given:
        raise ConfigError("--redo is for runs that have ended, --retry-failed for others; use one of them")
    return _Flags("-m" in given, "--retry-failed" in given, "--redo" in given, "--dry" in given, prints, overrides)


def _refuse_swept_print(flags: _Flags) -> None:
    """Raise ConfigError if a flag that prints one config is given together with a sweep."""
    swept = compose.swept(flags.overrides)
    if swept:
        raise ConfigError(f"{flags.prints[0]} prints one config: give one value in {', '.join(swept)}")

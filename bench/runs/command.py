"""The story of ``steadymoe run``: arguments → checked configs → their folders → launch → how the runs ended."""

import argparse
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Sequence

import yaml

from steadymoe.bench.runs import compose, dry, launch, outcome, overrides, progress, run_folder, validate
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.run_folder import States
from steadymoe.bench.support import processes
from steadymoe.bench.support.errors import Parser
from steadymoe.bench.support.text import shortened, visible


def main(args: list[str]) -> int:
    """Execute the runs that ``args`` select and return the exit code. Raises ConfigError for an invalid request.

    0: all ended; 1: a run failed or was lost; 130: interrupted.
    """
    flags = _flags(args)
    if flags.help or flags.info:
        launch.show(["--help"] if flags.help else ["--info", flags.info, *flags.overrides])
        return 0

    # Arguments → checked configs.
    left_out: list[str] = []
    requested = compose.plan(flags.overrides, flags.multirun, left_out)
    if flags.cfg:
        print(yaml.safe_dump(requested[0].plain, sort_keys=False, allow_unicode=True), end="")
        return 0
    launch.refuse_absent_cluster(flags.overrides)
    _print(*shortened([f"left out: {point}" for point in left_out]))

    # Their folders: what is there, what may be touched, what is run again. Up to here nothing was written.
    states = run_folder.refuse_others(requested, may_redo=flags.redo)
    runs = _failed(requested, states) if flags.retry_failed else requested
    if flags.dry:
        _print(*validate.notes(runs), *dry.lines(runs, states, len(requested) - len(runs)))
        return 0
    run_folder.add_to_plan(runs, _sweep(runs, [*(["-m"] if flags.multirun else []), *flags.overrides]))
    if flags.redo:
        _print(*(run_folder.redo(runs) or ["none of these runs is stale; nothing to redo"]))
        states = _states(runs)
    if skipped := len(requested) - len(runs):
        _print(f"--retry-failed skips {skipped} of {len(requested)} runs, which have neither failed nor finished")
    _print(*validate.notes(runs), *run_folder.describe(runs, states))

    # Launch, and how the runs ended.
    waiting = [run for run in runs if not states[run.folder].has_ended]
    code = _launch(runs, waiting, flags) if waiting else 0
    return code if code == 130 else max(code, _outcome(runs))


def _flags(args: list[str]) -> argparse.Namespace:
    overrides.refuse_reserved(args)
    parser = Parser(prog="steadymoe run", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--cfg", choices=("job",), nargs="?", const="job")
    parts = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    parser.add_argument("--info", choices=parts, nargs="?", const="all")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--retry-failed", action="store_true")
    again.add_argument("--redo", action="store_true")
    parser.add_argument("overrides", nargs="*")
    flags = parser.parse_intermixed_args(args)
    if (flags.cfg or flags.info) and (several := overrides.swept(flags.overrides)):
        raise ConfigError(f"{'--cfg' if flags.cfg else '--info'} shows one config: give one value in {several[0]}")
    return flags


def _print(*lines: str) -> None:
    for line in lines:
        print(visible(line), flush=True)


def _failed(runs: Sequence[Run], states: States) -> list[Run]:
    if not any(state.status == "failed" for state in states.values()):
        raise ConfigError(f"--retry-failed: none of {len(runs)} runs has failed; leave the flag out to run the others")
    return [run for run in runs if states[run.folder].status in (*run_folder.ENDED, "failed")]


def _states(runs: Sequence[Run]) -> States:
    return {run.folder: run_folder.read_state(run.folder) for run in runs}


def _sweep(runs: Sequence[Run], args: Sequence[str]) -> str | None:
    """Return the command ``args`` that makes or resumes all ``runs``; None for a single run."""
    if len(runs) < 2:
        return None
    # STEADYMOE_PATH, or nothing
    prefixes = {run.command.removesuffix(overrides.command_of(compose.own(run.args))) for run in runs}
    return max(prefixes) + overrides.command_of(args)


def _launch(runs: Sequence[Run], waiting: Sequence[Run], flags: argparse.Namespace) -> int:
    """Execute the ``waiting`` runs. Returns 0, 1 if a launcher has lost a job, 130 if interrupted."""
    # SIGTERM, by which a batch system ends a job, counts as Ctrl-C: it stops the workers too.
    signal.signal(signal.SIGTERM, processes.interrupt)
    try:
        with progress.watch(runs):
            launch.launch(waiting, flags.overrides, flags.multirun)
    except launch.lost_job_errors() as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        print(f"steadymoe: a job was lost; the remaining jobs continue. {visible(why)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("steadymoe: interrupted; rerun the command to resume from the last checkpoints", file=sys.stderr)
        return 130
    return 0


def _outcome(runs: Sequence[Run]) -> int:
    states = _states(runs)
    counts = Counter(state.status for state in states.values())
    _print(*outcome.lines(runs, states))
    failed = [run for run in runs if states[run.folder].status not in (*run_folder.ENDED, "running")]
    for run in failed:
        state = states[run.folder]
        why = state.damage or str(state.facts.get("error") or "")
        print(f"steadymoe: {state.status}: {visible(' '.join(why.strip().splitlines()[-1:]))}", file=sys.stderr)
        print(f"  rerun: {visible(run.command)}", file=sys.stderr)
    results, experiment = runs[0].config.results_dir, runs[0].config.experiment_name
    where = "" if results == "results" else f" --results {shlex.quote(results)}"
    ended = ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
    has_ended = any(state.has_ended for state in states.values())
    then = f"report: steadymoe report --experiment {experiment}" if has_ended else "status: steadymoe status"
    _print(f"{ended}; {then}{where}")
    return int(bool(failed))

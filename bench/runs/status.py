"""``steadymoe status``: how many runs of each experiment have ended, and the commands of the other runs."""

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadymoe.bench.runs import provenance, run_folder
from steadymoe.bench.runs.run_folder import State, States
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import Parser, UserError
from steadymoe.bench.support.external import VARIABLE
from steadymoe.bench.support.text import visible

# The statuses of runs that their command can still make.
_TO_DO = ("failed", "interrupted", "missing", "damaged")
_SECONDS_BETWEEN_LOOKS = 2
# Status → its name for people, where they differ.
_SHOWN = {"missing": "not started"}


def main(args: list[str]) -> int:
    """Print the status of every experiment and return the exit code. Raises UserError without a results folder."""
    parser = Parser(
        prog="steadymoe status",
        description="For each experiment, print how many runs finished, failed or remain, and how to resume them.",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    parser.add_argument(
        "--watch", action="store_true", help="refresh until interrupted; without a terminal, print once"
    )
    given = parser.parse_args(args)
    results = given.results
    if not results.is_dir():
        raise UserError(f"there is no folder {results}; start some runs with: steadymoe run experiment=quickstart")
    if given.watch and sys.stdout.isatty():
        _watch(results)
    with provenance.unchanging():
        print("\n".join(lines(results)))
    return 0


def _watch(results: Path) -> None:
    from rich.live import Live
    from rich.text import Text

    with suppress(KeyboardInterrupt), Live(screen=True, refresh_per_second=1) as live:
        while True:
            live.update(Text("\n".join(lines(results))))
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def states_of(folder: Path) -> dict[Path, State]:
    """Return run folder → state for every run of an experiment, planned runs without a folder included."""
    recorded = {path.parent for path in folder.glob("**/run.json")}
    planned = {folder / name for name in run_folder.planned(folder)[0]}
    return run_folder.read_states(sorted(recorded | planned))


def lines(results: Path) -> list[str]:
    """Return what ``steadymoe status`` prints; recorded texts are made ``visible``.

    Code that the runs name is read at most, never imported.
    """
    place = files.refuse_links(results / "runs", results)
    links = sorted(path for path in place.glob("*") if path.is_symlink())
    lines = [f"{visible(path)} is a link; links in a results folder are not followed" for path in links]
    for folder in sorted(path for path in place.glob("*") if path.is_dir() and path not in links):
        plan, why = run_folder.planned(folder)
        if why is not None:
            lines.append(
                f"{visible(folder.name)}: {visible(why)}; unstarted runs are not listed; the next run replaces it"
            )
        if states := states_of(folder):
            lines += _experiment_lines(folder, states, plan)
    return lines or [f"no runs below {visible(place)}; start some with: steadymoe run experiment=quickstart"]


def _row(experiment: Path, what: str, run: Path, why: str, rerun: str | None = None) -> list[str]:
    """Return the lines on a run to rerun or to look at."""
    reason = f" ({visible(why)})" if why else ""
    first = f"  {what}: {visible(run.relative_to(experiment.parent))}{reason}"
    return [first] if rerun is None else [first, f"    {_shown('rerun', rerun, experiment)}"]


def _experiment_lines(folder: Path, states: States, plan: Mapping[str, str]) -> list[str]:
    commands = {run: plan.get(str(run.relative_to(folder))) for run in states}
    to_do = [run for run, state in states.items() if state.status in _TO_DO]
    sweeps = {command: n for command, n in Counter(commands[run] for run in to_do).items() if command and n > 1}
    differences = {run: provenance.difference(state.facts) for run, state in states.items() if state.has_ended}
    unknown = Counter(found.unknown for found in differences.values() if found.unknown and not found.stale)
    stale = sum(found.stale is not None for found in differences.values())

    counts = Counter(state.status for state in states.values())
    summary = [f"{counts[name]} {_SHOWN.get(name, name)}" for name in sorted(counts)]
    summary += [f"{stale} stale"] if stale else []
    lines = [f"{visible(folder.name)}: {', '.join(summary)}"]
    for command, n in sweeps.items():
        which = "all" if n == len(to_do) else f"{n} of"
        lines.append(f"  {_shown(f'resume {which} {len(to_do)}', command, folder)}")
    for run in to_do:
        lines += _unfinished(folder, run, states[run], commands[run], sweeps)
    for run, found in differences.items():
        lines += _ended(folder, run, states[run].facts, found)
    return lines + [f"  finished, their code cannot be compared: {n} ({visible(why)})" for why, n in unknown.items()]


def _unfinished(folder: Path, run: Path, state: State, planned: str | None, sweeps: Container[str]) -> list[str]:
    """Return the lines on a run that its command can still make; none if ``sweeps``, listed before, count it."""
    command = state.facts.get("command") or planned
    if command in sweeps and state.status == "missing":
        return []
    error = str(state.facts.get("error") or "").strip().splitlines()[-1:] if state.status == "failed" else []
    whys = [*error, *filter(None, [state.damage])]
    whys += ["no known command reproduces it; you can remove it"] if command is None else []
    rerun = None if command in sweeps else command
    return _row(folder, _SHOWN.get(state.status, state.status), run, "; ".join(whys), rerun)


def _ended(folder: Path, run: Path, facts: Mapping[str, Any], difference: provenance.Difference) -> Iterator[str]:
    """Yield lines on an ended run that is stale, or whose replay is misaligned."""
    if difference.stale is not None:
        yield from _row(folder, "stale", run, difference.stale, f"{facts['command']} --redo")
    if facts["routing"] in ("off", "freeze"):
        return
    from steadymoe.bench.runs import outcome, record  # tables, which no other row needs

    with suppress(OSError, ValueError):  # another command names a table that cannot be read
        if (fault := outcome.misaligned(record.read_table(run, "steps"))) is not None:
            yield from _row(folder, "replay is misaligned", run, fault)


def _shown(what: str, command: str, experiment: Path) -> str:
    """Return ``what: command`` for a command to paste; one that another folder's file names is quoted, as data."""
    if _is_ours(command, experiment.parents[1]):
        return f"{what}: {visible(command)}"
    return f"{what}, recorded elsewhere; read it before you run it: {shlex.quote(visible(command))}"


def _is_ours(command: str, results: Path) -> bool:
    """Return whether a recorded command can do no more than make runs below ``results`` with the suite's code.

    A results folder may have been made elsewhere. Such a command is one ``steadymoe run`` as a shell reads it, without
    classes, folders of code or settings of Hydra that it chooses itself, and its runs lie in this folder.
    """
    own = f"{VARIABLE}={shlex.quote(os.environ.get(VARIABLE, ''))} "
    command = command.removeprefix(own)
    try:
        args = shlex.split(command)
    except ValueError:
        return False
    if args[:2] != ["steadymoe", "run"] or shlex.join(args) != command:
        return False
    if any(arg.startswith("-") and arg not in ("-m", "--redo") for arg in args):
        return False
    if any("_target_" in arg or ("hydra" in arg and not arg.startswith("hydra/launcher=")) for arg in args):
        return False
    places = [arg.partition("=")[2] for arg in args if arg.startswith("results_dir=")] or ["results"]
    return Path(places[-1]).expanduser().resolve() == results.resolve()

"""``steadymoe status``: how many runs of each experiment have ended, and the commands of the other runs."""

import os
import shlex
from collections import Counter
from pathlib import Path

from steadymoe.bench.runs import lifecycle, provenance, record
from steadymoe.bench.support import regular_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.external import VARIABLE
from steadymoe.bench.support.text import visible

# The statuses of runs that their command can still make.
_TO_DO = ("failed", "interrupted", "missing", "damaged")
# Status → its name for people, where they differ.
_SHOWN = {"missing": "not started"}


def main(words: list[str]) -> int:
    """Print the status of every experiment and return the exit code. Raises UserError without a results folder."""
    parser = Parser(
        prog="steadymoe status",
        description="For each experiment, print how many runs finished, failed or remain, and how to resume them.",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    results = parser.parse_args(words).results
    if not results.is_dir():
        raise UserError(f"there is no folder {results}; start some runs with: steadymoe run experiment=quickstart")
    with provenance.unchanging():
        print("\n".join(lines(results)))
    return 0


def states_of(folder: Path) -> dict[Path, record.State]:
    """Return run folder → state for every run of an experiment, planned runs without a folder included."""
    recorded = {path.parent for path in folder.glob("**/run.json")}
    planned = {folder / name for name in lifecycle.planned(folder)[0]}
    return record.states(sorted(recorded | planned))


def lines(results: Path) -> list[str]:
    """Return what ``steadymoe status`` prints; recorded texts are made ``visible``.

    Code that the runs name is read at most, never imported.
    """
    place = regular_files.refuse_links(results / "runs", results)
    folders = sorted(path for path in place.glob("*") if path.is_dir() and not path.is_symlink())
    links = sorted(path for path in place.glob("*") if path.is_symlink())
    lines = [f"{visible(path)} is a link; links in a results folder are not followed" for path in links]
    for folder in folders:
        plan, why = lifecycle.planned(folder)
        if why is not None:
            lines.append(
                f"{visible(folder.name)}: {visible(why)}; the next run replaces it; unstarted runs cannot be listed"
            )
        if states := states_of(folder):
            lines += _experiment_lines(folder, states, plan)
    return lines or [f"no runs below {visible(results / 'runs')}; start some with: steadymoe run experiment=quickstart"]


def _experiment_lines(folder: Path, states: dict[Path, record.State], plan: dict[str, str]) -> list[str]:
    """Return the lines on one experiment."""
    differences = {run: provenance.difference(state.facts) for run, state in states.items() if state.has_ended}
    stale = {run: found.stale for run, found in differences.items() if found.stale is not None}
    unknown = Counter(found.unknown for run, found in differences.items() if found.unknown and run not in stale)
    counts = Counter(state.status for state in states.values())
    summary = [f"{counts[name]} {_SHOWN.get(name, name)}" for name in sorted(counts)]
    summary += [f"{len(stale)} stale"] if stale else []
    lines = [f"{visible(folder.name)}: " + ", ".join(summary)]
    to_do = [str(run.relative_to(folder)) for run, state in states.items() if state.status in _TO_DO]
    of_several = {sweep: n for sweep, n in Counter(plan[name] for name in to_do if name in plan).items() if n > 1}
    for sweep, n in of_several.items():
        which = f"{'all' if n == len(to_do) else f'{n} of'} {len(to_do)}"
        lines.append(f"  {_shown(f'resume {which}', sweep, folder)}")
    for run, state in states.items():
        where, facts = visible(run.relative_to(folder.parent)), state.facts
        command = facts.get("command") or plan.get(str(run.relative_to(folder)))
        if state.status == "missing" and command in of_several:
            continue  # counted, and made by the command above
        if state.status in _TO_DO:
            why = f" ({visible(state.damage)})" if state.damage is not None else ""
            lines.append(f"  {_SHOWN.get(state.status, state.status)}: {where}{why}")
            if state.status == "failed":
                lines += [f"    {visible(line)}" for line in str(facts.get("error") or "").strip().splitlines()[-1:]]
            if command is not None and command not in of_several:  # it stands above already
                lines.append(f"    {_shown('rerun', command, folder)}")
            elif command is None:
                lines.append(f"    no known command reproduces it; you can remove it: {visible(run)}")
        elif run in stale:
            lines.append(f"  stale: {where} ({visible(stale[run])})")
            lines.append(f"    {_shown('rerun', f'{command} --redo', folder)}")
    for run in differences:
        if states[run].facts["routing"] in ("off", "freeze"):
            continue
        from steadymoe.bench.runs import outcome  # tables, which no other line needs

        if (fault := outcome.misaligned_run(run)) is not None:
            lines.append(f"  replay is misaligned: {visible(run.relative_to(folder.parent))} ({fault})")
    lines += [f"  finished, their code cannot be compared: {unknown[why]} ({visible(why)})" for why in unknown]
    return lines


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
        words = shlex.split(command)
    except ValueError:
        return False
    if words[:2] != ["steadymoe", "run"] or shlex.join(words) != command:
        return False
    if any(word.startswith("-") and word not in ("-m", "--redo") for word in words):
        return False
    if any("_target_" in word or ("hydra" in word and not word.startswith("hydra/launcher=")) for word in words):
        return False
    places = [word.partition("=")[2] for word in words if word.startswith("results_dir=")] or ["results"]
    return Path(places[-1]).expanduser().resolve() == results.resolve()

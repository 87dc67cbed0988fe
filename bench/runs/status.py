"""``steadymoe status``: how many runs of each experiment have ended, and the commands of the other runs."""

import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steadymoe.bench.runs import provenance, run_folder
from steadymoe.bench.support import regular_files
from steadymoe.bench.support.arguments import Parser
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.external import VARIABLE
from steadymoe.bench.support.text import visible

# The statuses of runs that their command can still make.
_TO_DO = ("failed", "interrupted", "missing", "damaged")
# Status → its name for people, where they differ.
_SHOWN = {"missing": "not started"}


def main(args: list[str]) -> int:
    """Print the status of every experiment and return the exit code. Raises UserError without a results folder."""
    parser = Parser(
        prog="steadymoe status",
        description="For each experiment, print how many runs finished, failed or remain, and how to resume them.",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    results = parser.parse_args(args).results
    if not results.is_dir():
        raise UserError(f"there is no folder {results}; start some runs with: steadymoe run experiment=quickstart")
    with provenance.unchanging():
        print("\n".join(lines(results)))
    return 0


def states_of(folder: Path) -> dict[Path, run_folder.State]:
    """Return run folder → state for every run of an experiment, planned runs without a folder included."""
    recorded = {path.parent for path in folder.glob("**/run.json")}
    planned = {folder / name for name in run_folder.planned(folder)[0]}
    return run_folder.read_states(sorted(recorded | planned))


def lines(results: Path) -> list[str]:
    """Return what ``steadymoe status`` prints; recorded texts are made ``visible``.

    Code that the runs name is read at most, never imported.
    """
    place = regular_files.refuse_links(results / "runs", results)
    links = sorted(path for path in place.glob("*") if path.is_symlink())
    lines = [f"{visible(path)} is a link; links in a results folder are not followed" for path in links]
    for folder in sorted(path for path in place.glob("*") if path.is_dir() and path not in links):
        plan, why = run_folder.planned(folder)
        if why is not None:
            lines.append(
                f"{visible(folder.name)}: {visible(why)}; the next run replaces it; unstarted runs cannot be listed"
            )
        if states := states_of(folder):
            lines += _experiment_lines(folder, states, plan)
    return lines or [f"no runs below {visible(place)}; start some with: steadymoe run experiment=quickstart"]


@dataclass(frozen=True)
class _Row:
    """A run to rerun or to look at."""

    what: str
    run: Path
    why: str | None
    advice: str | None = None

    def lines(self, experiment: Path) -> list[str]:
        why = f" ({visible(self.why)})" if self.why else ""
        first = f"  {self.what}: {visible(self.run.relative_to(experiment.parent))}{why}"
        return [first, f"    {self.advice}"] if self.advice else [first]


def _experiment_lines(folder: Path, states: run_folder.States, plan: Mapping[str, str]) -> list[str]:
    """Return the lines on one experiment: how many runs, how to resume its sweeps, and each run with a problem."""
    to_do = {run: state for run, state in states.items() if state.status in _TO_DO}
    differences = {run: provenance.difference(state.facts) for run, state in states.items() if state.has_ended}
    stale = {run: difference.stale for run, difference in differences.items() if difference.stale}
    commands = {
        run: state.facts.get("command") or plan.get(str(run.relative_to(folder))) for run, state in states.items()
    }
    times = Counter(plan[name] for name in (str(run.relative_to(folder)) for run in to_do) if name in plan)
    sweeps = {command: n for command, n in times.items() if n > 1}

    rows = []
    for run, state in to_do.items():
        command, error = commands[run], str(state.facts.get("error") or "").strip().splitlines()[-1:]
        if state.status == "missing" and command in sweeps:
            continue  # counted, and made by the sweep's command
        advice = f"no known command reproduces it; you can remove it: {visible(run)}"
        if command is not None:
            advice = "" if command in sweeps else _shown("rerun", command, folder)
        why = "".join(error) if state.status == "failed" else state.damage
        rows.append(_Row(_SHOWN.get(state.status, state.status), run, why, advice))
    for run, why in stale.items():
        rows.append(_Row("stale", run, why, _shown("rerun", f"{commands[run]} --redo", folder)))
    rows += [_Row("replay is misaligned", run, fault) for run in differences if (fault := _fault(run, states[run]))]

    counts = Counter(state.status for state in states.values())
    summary = [f"{counts[name]} {_SHOWN.get(name, name)}" for name in sorted(counts)]
    summary += [f"{len(stale)} stale"] if stale else []
    lines = [f"{visible(folder.name)}: {', '.join(summary)}"]
    for command, n in sweeps.items():
        which = "all" if n == len(to_do) else f"{n} of"
        lines.append(f"  {_shown(f'resume {which} {len(to_do)}', command, folder)}")
    lines += [line for row in rows for line in row.lines(folder)]
    unknown = Counter(difference.unknown for run, difference in differences.items() if run not in stale)
    lines += [f"  finished, their code cannot be compared: {n} ({visible(why)})" for why, n in unknown.items() if why]
    return lines


def _fault(run: Path, state: run_folder.State) -> str | None:
    """Return why the replay of an ended run is misaligned; None if it is not, or if its table cannot be read."""
    if state.facts["routing"] in ("off", "freeze"):
        return None
    from steadymoe.bench.runs import outcome, record  # tables, which no other line needs

    try:
        return outcome.misaligned(record.read_table(run, "steps"))
    except (OSError, ValueError):
        return None


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

"""What lies on disk: how many runs of each experiment ended, and the commands of those that did not."""

from collections import Counter
from pathlib import Path

from steadymoe.bench import provenance, record, sweep

# What there is left to do about a run, and how each is announced.
_TO_DO = ("failed", "interrupted", "missing", "unreadable")


def of_experiment(folder: Path) -> dict[Path, str]:
    """The status of every run below an experiment's folder, those that are planned and not there included."""
    found = {path.parent for path in folder.glob("**/run.json")}
    asked_for = {folder / name for name in sweep.planned(folder)}
    return {run: record.status(run) for run in sorted(found | asked_for)}


def lines(results: Path) -> list[str]:
    """The answer of ``steadymoe status``, line by line. What the runs name is read at most, never imported."""
    folders = sorted(path for path in (results / "runs").glob("*") if path.is_dir())
    by_experiment = {folder: statuses for folder in folders if (statuses := of_experiment(folder))}
    if not by_experiment:
        return [f"no runs below {results / 'runs'}; start some with: steadymoe run experiment=quickstart"]
    answer = []
    for folder, statuses in by_experiment.items():
        ended = [run for run, status in statuses.items() if status in record.ENDED]
        now = {run: provenance.difference(record.read_run(run) or {}) for run in ended}
        stale = {run: found.said for run, found in now.items() if found.said is not None}
        unknown = Counter(found.unknown for run, found in now.items() if found.unknown and run not in stale)
        counts = Counter(statuses.values())
        said = [f"{counts[name]} {name}" for name in sorted(counts)] + ([f"{len(stale)} stale"] if stale else [])
        answer.append(f"{folder.name}: " + ", ".join(said))
        plan = sweep.planned(folder)
        for run, status in statuses.items():
            where = run.relative_to(results / "runs")
            if status in _TO_DO:
                facts = (record.read_run(run) or {}) if status in ("failed", "interrupted") else {}
                answer.append(f"  {status}: {where}")
                answer += [f"    {line}" for line in (facts.get("error") or "").strip().splitlines()[-1:]]
                answer.append(f"    again: {facts.get('command') or plan.get(str(run.relative_to(folder)))}")
            elif run in stale:
                answer.append(f"  stale: {where} ({stale[run]})")
                answer.append(f"    again: {(record.read_run(run) or {}).get('command')} --redo")
        answer += [f"  {unknown[why]} ended with code that cannot be compared: {why}" for why in unknown]
    return answer

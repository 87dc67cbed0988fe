"""What lies on disk: how many runs of each experiment ended, and the commands of those that did not."""

from collections import Counter
from pathlib import Path

from steadymoe.bench import record, sweep

# What there is left to do about a run, and how each is announced.
_TO_DO = ("failed", "interrupted", "missing", "unreadable")


def of_experiment(folder: Path) -> dict[Path, str]:
    """The status of every run below an experiment's folder, those that are planned and not there included."""
    found = {path.parent for path in folder.glob("**/run.json")}
    asked_for = {folder / name for name in sweep.planned(folder)}
    return {run: record.status(run) for run in sorted(found | asked_for)}


def lines(results: Path) -> list[str]:
    """The answer of ``steadymoe status``, line by line."""
    folders = sorted(path for path in (results / "runs").glob("*") if path.is_dir())
    by_experiment = {folder: statuses for folder in folders if (statuses := of_experiment(folder))}
    if not by_experiment:
        return [f"no runs below {results / 'runs'}; start some with: steadymoe run experiment=quickstart"]
    answer = []
    for folder, statuses in by_experiment.items():
        ended = [run for run, status in statuses.items() if status in record.ENDED]
        stale = {run: why for run in ended if (why := is_stale(run)) is not None}
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
                answer.append(f"  stale: {where} ({stale[run]}); to have it anew, remove that folder")
                answer.append(f"    again: {(record.read_run(run) or {}).get('command')}")
    return answer


def is_stale(folder: Path) -> str | None:
    """What has changed since an ended run was made, if the same command would run on other ground today."""
    from steadymoe.bench import run  # torch is imported for this alone

    facts = record.read_run(folder) or {}
    try:
        if facts["algorithm_code"] != run.code_hash(facts["config"]):
            return "made by other code of its algorithm"
    except ValueError:
        return "its algorithm is not here"
    now, then = run.versions(facts["config"]), facts["versions"]
    changed = [f"{name} {then.get(name)}" for name, number in now.items() if then.get(name) != number]
    return f"made with {', '.join(changed)}" if changed else None

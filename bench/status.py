"""What lies on disk: how many runs of each experiment ended, and the commands of those that did not."""

from collections import Counter
from pathlib import Path

from steadymoe.bench import record


def run_folders(results: Path, experiment: str | None = None) -> list[Path]:
    """Every run folder below ``results/runs``, or of one experiment, sorted."""
    return sorted(path.parent for path in (results / "runs" / (experiment or "")).glob("**/run.json"))


def lines(results: Path) -> list[str]:
    """The answer of ``steadymoe status``, line by line."""
    by_experiment: dict[str, list[Path]] = {}
    for folder in run_folders(results):
        by_experiment.setdefault(folder.relative_to(results / "runs").parts[0], []).append(folder)
    if not by_experiment:
        return [f"no runs below {results / 'runs'}; start some with: steadymoe run experiment=quickstart"]
    answer = []
    for experiment, folders in by_experiment.items():
        statuses = {folder: record.status(folder) for folder in folders}
        counts = Counter(statuses.values())
        answer.append(f"{experiment}: " + ", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
        for folder, status in statuses.items():
            if status in ("failed", "interrupted"):
                run = record.read_run(folder) or {}
                answer.append(f"  {status}: {folder.relative_to(results / 'runs')}")
                answer += [f"    {line}" for line in (run.get("error") or "").strip().splitlines()[-1:]]
                answer.append(f"    again: {run.get('command')}")
    return answer

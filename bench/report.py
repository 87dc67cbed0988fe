"""Tables, figures and one self-contained page, from what is recorded in ``results/runs``."""

import base64
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from steadymoe.bench import atomic, collect, draw, record, stability, tables
from steadymoe.bench.figures import FIGURES, Paper
from steadymoe.bench.stats import Estimate


class NothingToReport(Exception):
    """No run has ended; the message says how to start some."""


@dataclass(frozen=True)
class Report:
    """What was written, the summary tables as Markdown, and what each figure that was not drawn lacks."""

    files: list[Path]
    table: str
    missing: list[str]


def make(results: Path, experiment: str | None = None) -> Report:
    """Write ``tables/``, ``figures/`` and ``report.html`` below ``results``, replacing earlier ones.

    Raises NothingToReport if no run of the experiment has ended.
    """
    ended = _ended(results, experiment)
    found = collect.runs(results, experiment)
    for folder in ("tables", "figures"):
        (results / folder).mkdir(parents=True, exist_ok=True)
    files, markdown, sections = [], [], []
    missing = {paper.id: _absent(paper) for paper in FIGURES.values() if not paper.variant}
    for name, runs in ended.groupby("experiment"):
        section, written, table, lacking = _section(results, str(name), runs, found[found["experiment"] == name])
        missing |= {paper.id: _lacks(paper, said) for paper, said in lacking if paper.id in missing}
        for figure in section["figures"]:
            missing.pop(figure["id"], None)
        sections.append(section)
        files += written
        warning = f"These runs differ in {', '.join(section['mixed'])}.\n\n" if section["mixed"] else ""
        markdown.append(f"{name}\n\n{warning}{table}\n")
    environment = jinja2.Environment(autoescape=True, loader=jinja2.PackageLoader("steadymoe.bench", "."))
    page = environment.get_template("report.html").render(sections=sections, missing=list(missing.values()))
    atomic.write(results / "report.html", lambda temporary: temporary.write_text(page))
    return Report([*files, results / "report.html"], "\n".join(markdown), list(missing.values()))


def export(results: Path, experiment: str | None, suffix: str) -> Path:
    """Write every number of the runs that ended as one tidy table, ``parquet`` or ``csv``, and return its path.

    Raises NothingToReport if no run of the experiment has ended.
    """
    tidy = collect.tidy(_ended(results, experiment))
    path = results / "tables" / f"{experiment or 'all'}-tidy.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, partial(tidy.to_parquet if suffix == "parquet" else tidy.to_csv, index=False))
    return path


def _ended(results: Path, experiment: str | None) -> pd.DataFrame:
    found = collect.runs(results, experiment)
    ended = found[found["status"].isin(record.ENDED)]
    if ended.empty:
        raise NothingToReport(f"no ended runs below {results / 'runs' / (experiment or '')}; {_known(results)}")
    return ended


def _known(results: Path) -> str:
    """What there is to report instead."""
    names = sorted(path.name for path in (results / "runs").glob("*") if path.is_dir())
    return f"experiments there: {', '.join(names)}" if names else "start some with: steadymoe run experiment=quickstart"


def _absent(paper: Paper) -> str:
    return _lacks(paper, f"ended runs of {paper.experiment}")


def _lacks(paper: Paper, what: str) -> str:
    """One line on a figure that cannot be drawn."""
    return f"{paper.id} {paper.name} lacks {what}: {draw.command(paper)}"


def _papers(experiment: str) -> list[Paper]:
    """The figures that an experiment is asked for: those it is made for, or every one if it is made for none."""
    own = [paper for paper in FIGURES.values() if paper.experiment == experiment and not paper.variant]
    every = [paper for paper in FIGURES.values() if not paper.variant]
    return [FIGURES["overview"], *(paper for paper in own or every if paper.id != "overview")]


def _protocol(runs: pd.DataFrame) -> dict[str, str]:
    """What was run, as values that occur."""
    keys = ["task", "model", "engine", "routing", "correction", "steps", *collect.NUMBERS, "seed"]
    values = {key.replace("_", " "): sorted(runs[key].dropna().unique().tolist()) for key in keys}
    return {key: ", ".join(map(str, found)) for key, found in values.items()}


def _mixed(runs: pd.DataFrame) -> list[str]:
    """In what runs differ that stand in one table as if they did not."""
    mixed = [key for key in ("versions", "revision", "machine") if runs[key].nunique() > 1]
    mixed += ["settings besides the axes"] if runs["settings"].nunique() > 1 else []
    for what in ("config_without_seed", "algorithm_code"):
        counts = runs.groupby("arm")[what].nunique()
        mixed += [f"{what.removesuffix('_without_seed').replace('_', ' ')} ({arm})" for arm in counts.index[counts > 1]]
    return mixed


def _section(
    results: Path, name: str, runs: pd.DataFrame, found: pd.DataFrame
) -> tuple[dict[str, Any], list[Path], str, list[tuple[Paper, str]]]:
    """One experiment: what the page shows of it, the files written, its table, the figures it lacks something for."""
    data = draw.data(runs)
    steps = data["steps"]
    summary = tables.summary(steps, runs)
    markdown = tables.to_markdown(summary)
    texts = {
        results / "tables" / f"{name}-summary.md": f"{markdown}\n\n{tables.CAPTION}\n",
        results / "tables" / f"{name}-summary.csv": tables.to_numbers(summary).to_csv(index=False),
        results / "tables" / f"{name}-runs.csv": found.drop(columns=["folder", "axes_values", "numbers"]).to_csv(
            index=False
        ),
    }
    board = tables.leaderboard(steps, runs, stability.by_arm(steps, runs, stability.frontiers(runs)))
    texts |= {
        results / "tables" / f"{name}-leaderboard.md": (
            f"{tables.to_markdown(_rounded(board))}\n\n{tables.LEADERBOARD_CAPTION}\n"
        ),
        results / "tables" / f"{name}-leaderboard.csv": tables.to_numbers(board).to_csv(index=False),
        results / "tables" / f"{name}-leaderboard.tex": tables.to_latex(board, tables.LEADERBOARD_CAPTION),
        results / "tables" / f"{name}-summary.tex": tables.to_latex(summary, tables.CAPTION),
    }
    of_models = tables.models(steps, runs)
    if of_models is not None:
        text = f"{tables.to_markdown(of_models)}\n\n{tables.MODELS_CAPTION}\n"
        texts |= {
            results / "tables" / f"{name}-models.md": text,
            results / "tables" / f"{name}-models.csv": tables.to_numbers(of_models).to_csv(index=False),
        }
    for path, text in texts.items():
        atomic.write(path, partial(Path.write_text, data=text))
    long = results / "tables" / f"{name}-steps.parquet"
    atomic.write(long, partial(steps.to_parquet, index=False))
    files, shown, lacking = [*texts, long], [], []
    for paper in _papers(name):
        if said := paper.lacks(data):
            lacking += [(paper, said)] if paper.experiment == name else []
            continue
        figure = paper.figure(data)
        written = draw.write(paper, figure, results, name)
        files += written
        width = f"{figure.get_figwidth() * 8:g}rem"
        (svg,) = [path for path in written if path.suffix == ".svg"]
        image = base64.b64encode(svg.read_bytes()).decode()
        shown.append({"id": paper.id, "name": paper.name, "caption": paper.caption, "svg": image, "width": width})
    shown_tables = [(board, tables.LEADERBOARD_CAPTION), (summary, tables.CAPTION)]
    shown_tables += [] if of_models is None else [(of_models, tables.MODELS_CAPTION)]
    section = {
        "name": name,
        "tables": [
            {"header": list(table.columns), "rows": _cells(table), "caption": caption}
            for table, caption in shown_tables
        ],
        "figures": shown,
        "runs": found.to_dict("records"),
        "mixed": _mixed(runs),
        "protocol": _protocol(runs),
    }
    return section, files, markdown, lacking


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    return table.map(lambda cell: f"{cell:.3g}" if isinstance(cell, float) else cell)


def _cells(table: pd.DataFrame) -> list[list[dict[str, Any]]]:
    """What the page shows in each cell, and the number it is sorted by, if any."""
    shown = _rounded(table).map(str).to_numpy().tolist()
    numbers = table.map(lambda cell: cell.mean if isinstance(cell, Estimate) else cell).to_numpy().tolist()
    return [
        [
            {"text": text, "number": "" if isinstance(number, str) or number != number else number}
            for text, number in zip(*row, strict=True)
        ]
        for row in zip(shown, numbers, strict=True)
    ]

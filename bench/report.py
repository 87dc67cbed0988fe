"""Tables, figures and one self-contained page, from what is recorded in ``results/runs``."""

import base64
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from steadymoe.bench import atomic, collect, figures, record, tables


class NothingToReport(Exception):
    """No run has ended; the message says how to start some."""


@dataclass(frozen=True)
class Report:
    """What was written, and the summary tables as Markdown."""

    files: list[Path]
    table: str


def make(results: Path, experiment: str | None = None) -> Report:
    """Write ``tables/``, ``figures/`` and ``report.html`` below ``results``, replacing earlier ones.

    Raises NothingToReport if no run of the experiment has ended.
    """
    ended = _ended(results, experiment)
    found = collect.runs(results, experiment)
    for folder in ("tables", "figures"):
        (results / folder).mkdir(parents=True, exist_ok=True)
    files, markdown, sections = [], [], []
    for name, runs in ended.groupby("experiment"):
        section, written, table = _section(results, str(name), runs, found[found["experiment"] == name])
        sections.append(section)
        files += written
        warning = f"These runs differ in {', '.join(section['mixed'])}.\n\n" if section["mixed"] else ""
        markdown.append(f"{name}\n\n{warning}{table}\n")
    environment = jinja2.Environment(autoescape=True, loader=jinja2.PackageLoader("steadymoe.bench", "."))
    page = environment.get_template("report.html").render(sections=sections)
    atomic.write(results / "report.html", lambda temporary: temporary.write_text(page))
    return Report([*files, results / "report.html"], "\n".join(markdown))


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
) -> tuple[dict[str, Any], list[Path], str]:
    """One experiment: what the page shows of it, the files written, its table."""
    steps = collect.steps(runs)
    summary = tables.summary(steps, runs)
    markdown = tables.to_markdown(summary)
    texts = {
        results / "tables" / f"{name}-summary.md": f"{markdown}\n\n{tables.CAPTION}\n",
        results / "tables" / f"{name}-summary.csv": tables.to_numbers(summary).to_csv(index=False),
        results / "tables" / f"{name}-runs.csv": found.drop(columns=["folder", "axes_values", "numbers"]).to_csv(
            index=False
        ),
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
    data = results / "tables" / f"{name}-steps.parquet"
    atomic.write(data, partial(steps.to_parquet, index=False))
    files, shown = [*texts, data], []
    for figure_name, draw in figures.FIGURES.items():
        figure = draw(steps)
        if figure is None:
            continue
        for suffix in ("png", "svg"):
            path = results / "figures" / f"{name}-{figure_name}.{suffix}"
            atomic.write(path, partial(figures.save, figure, suffix=suffix))
            files.append(path)
        image = base64.b64encode(path.read_bytes()).decode()
        shown.append({"name": figure_name, "caption": draw.__doc__, "svg": image})
    shown_tables = [(summary, tables.CAPTION)]
    shown_tables += [] if of_models is None else [(of_models, tables.MODELS_CAPTION)]
    section = {
        "name": name,
        "tables": [
            {"header": list(table.columns), "rows": table.map(str).to_numpy().tolist(), "caption": caption}
            for table, caption in shown_tables
        ],
        "figures": shown,
        "runs": found.to_dict("records"),
        "mixed": _mixed(runs),
    }
    return section, files, markdown

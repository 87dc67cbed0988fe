"""Tables, figures and one self-contained page, made from recorded runs (``archive.load``)."""

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.report import (
    archive,
    collapse_tables,
    collect,
    draw,
    head_to_head,
    headline,
    realism,
    tables,
    write,
)
from steadymoe.bench.report.figures import FIGURES, FORMATS, FigureSpec
from steadymoe.bench.runs import outcome
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import atomic_files, processes
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible
from steadymoe.bench.training import samples

# The most characters of samples on the page, for each experiment.
_MOST_SAID = 100_000


class NothingToReport(UserError):
    """No run has ended; the message is one line and says how to start a run."""


@dataclass(frozen=True)
class Report:
    """The result of ``make``."""

    files: list[Path]
    """The written files."""
    table: str
    """The summary tables as Markdown."""
    missing: list[str]
    """One line for each figure that was not drawn, with the data that it lacks."""
    left_out: list[str]
    """One line for each damaged run."""


def make(
    results: Path,
    experiment: str | None = None,
    formats: Sequence[str] = FORMATS,
    arms: Sequence[str] | None = None,
    overview_alone: Collection[str] = (),
) -> Report:
    """Write ``tables/``, ``figures/`` and ``report.html`` below ``results``, in place of older files of these formats.

    Figures in ``formats``, and as svg, which the page shows; of all arms, or of some of one experiment. What is missing
    is told of the figures of ``experiment`` alone where one is named. The experiments ``overview_alone`` have no other
    shipped figure (``figures_of``).

    Raises draw.CannotDraw for an unknown arm, NothingToReport if no run of the experiment has ended, and Damaged if an
    archive cannot be read.
    """
    recorded = {name: draw.choose(found, arms) for name, found in ended(results, experiment).items()}
    known = draw.every()
    for folder in ("tables", "figures"):
        (results / folder).mkdir(parents=True, exist_ok=True)
    files, markdown, sections = [], [], []
    asked = [spec for spec in known.values() if experiment in (None, spec.experiment)]
    missing = {spec.id: _absent(spec) for spec in asked}
    names = list(recorded)
    drawn_as = tuple(dict.fromkeys((*formats, "svg")))
    of_one = partial(_section, results, drawn_as, arms, overview_alone)
    of_each = processes.in_processes(of_one, names, list(recorded.values()))
    for name, (section, written, table, lacking) in zip(names, of_each, strict=True):
        missing |= {id: _lacks(known[id], lack) for id, lack in lacking.items() if id in missing}
        for figure in section["figures"]:
            missing.pop(figure["id"], None)
        sections.append(section)
        files += written
        warning = f"These runs differ in {', '.join(section['mixed'])}.\n\n" if section["mixed"] else ""
        warning += "".join(f"Nothing to learn from: {visible(line)}.\n\n" for line in section["silent"])
        markdown.append(f"{visible(name)}\n\n{warning}{table}\n")
    lines, absent = left_out(results, experiment), list(missing.values())
    terms = headline.TERMS | outcome.TERMS
    page = write.html("report", "report_page.html", sections=sections, missing=absent, left_out=lines, terms=terms)
    files += write.files(results, {"report.html": page})
    return Report(files, "\n".join(markdown), absent, lines)


def left_out(results: Path, experiment: str | None = None) -> list[str]:
    """One line for each damaged run; tables and figures leave it out."""
    names = [name for name in archive.experiments(results) if experiment in (None, name)]
    found = [each for name in names for each in collect.damaged(results, name).items()]
    how = "`steadymoe status` names the command that makes it again"
    return [f"left out, damaged: {visible(folder)} ({visible(why)}); {how}" for folder, why in found]


def export(results: Path, experiment: str | None, suffix: str) -> Path:
    """Write every number of the ended runs as one tidy table and return its path; ``suffix`` is parquet or csv.

    Raises NothingToReport if no run of the experiment has ended, or if the archive alone is left of the runs.
    """
    runs = [_with_folder(each["runs"]) for each in ended(results, experiment).values() if "folder" in each["runs"]]
    if not runs:
        raise NothingToReport(f"{results / 'data'} holds tables without their runs, and cannot be exported")
    tidy = collect.tidy(pd.concat(runs))
    path = results / "tables" / f"{experiment or 'all'}-tidy.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, partial(tidy.to_parquet if suffix == "parquet" else tidy.to_csv, index=False))
    return path


def keep(results: Path, experiment: str | None, to: Path) -> list[Path]:
    """Archive the tables of the report in ``to/data``, without run folders. Raises NothingToReport as ``make`` does."""
    return [path for name, found in ended(results, experiment).items() for path in archive.keep(found, name, to)]


def shown_tables(data: dict[str, pd.DataFrame]) -> dict[str, tuple[pd.DataFrame, str]]:
    """Kind → (table, caption) for one experiment, made from ``draw.data``; empty tables are left out."""
    runs, steps = data["runs"], data["steps"]
    own = {name: archive.without_recorded(data[name]) for name in ("steps", "runs", "evaluations")}
    own = archive.one_trainer(own)
    every = {
        "leaderboard": (tables.leaderboard(own["steps"], own["runs"], data["by_arm"]), tables.LEADERBOARD_CAPTION),
        "summary": (tables.summary(steps, runs), tables.CAPTION),
        "head_to_head": (head_to_head.table(**own), head_to_head.CAPTION),
        "warnings": (data["warnings"], collapse_tables.WARNINGS_CAPTION),
        "models": (tables.models(steps, runs), tables.MODELS_CAPTION),
        "realism": (realism.table(data), realism.CAPTION),
    }
    return {kind: (table, caption) for kind, (table, caption) in every.items() if not table.empty}


def texts(experiment: str, shown: dict[str, tuple[pd.DataFrame, str]], runs: pd.DataFrame) -> dict[str, str]:
    """File name → text: the tables of ``shown_tables`` as Markdown, CSV and LaTeX, and the list of runs as CSV."""
    runs = runs.drop(columns=["folder", "axes_values", "numbers", "config"], errors="ignore")
    found = {f"{experiment}-runs.csv": runs.to_csv(index=False)}
    for kind, (table, caption) in shown.items():
        found |= write.table_texts(f"{experiment}-{kind}", table, caption)
    return found


def ended(results: Path, experiment: str | None) -> dict[str, dict[str, pd.DataFrame]]:
    """The tables of ``archive.load`` for one experiment, or for each that has an ended run.

    Raises NothingToReport if no run has ended, and Damaged where kept tables cannot be read.
    """
    names = archive.experiments(results) if experiment is None else [experiment]
    recorded = {name: archive.load(results, name, foreign=True) for name in names}
    recorded = {name: tables for name, tables in recorded.items() if not tables["runs"].empty}
    if not recorded:
        where = visible(results / "runs" / (experiment or ""))
        damaged = left_out(results, experiment)
        raise NothingToReport(f"no ended runs below {where}; {damaged[0] if damaged else _known(results, experiment)}")
    return recorded


def _known(results: Path, experiment: str | None) -> str:
    """A hint: the experiments that can be reported, or the command that starts one."""
    names = [visible(name) for name in archive.experiments(results)]
    if not names:
        return "start some with: steadymoe run experiment=quickstart"
    return nearest(experiment or "", names, f"`ls {visible(results)}/*`")


def _absent(spec: FigureSpec) -> str:
    return _lacks(spec, f"ended runs of {spec.experiment}")


def _lacks(spec: FigureSpec, what: str) -> str:
    """One line on a figure that cannot be drawn."""
    return f"{spec.id} {spec.name} lacks {what}: {draw.command(spec)}"


def figures_of(experiment: str, overview_alone: Collection[str] = ()) -> list[FigureSpec]:
    """The figures of an experiment: the overview, the figures that name the experiment, and a user's own that name it.

    Where no shipped figure names the experiment, every shipped figure. An experiment of ``overview_alone`` has the
    overview and a user's own figures: its arms stand beside the arms of another experiment in the figures of
    ``steadymoe study``.
    """
    users = [spec for spec in draw.every().values() if spec.experiment == experiment and spec.id not in FIGURES]
    if experiment in overview_alone:
        return [FIGURES["overview"], *users]
    own = [spec for spec in FIGURES.values() if spec.experiment == experiment]
    return [FIGURES["overview"], *(spec for spec in own or FIGURES.values() if spec.id != "overview"), *users]


def _settings(runs: pd.DataFrame) -> pd.DataFrame:
    """The values of each setting that occur in the runs."""
    keys = ["task", "model", "engine", "routing", "correction", "steps", *collect.NUMBERS, "seed"]
    values = {key.replace("_", " "): sorted(runs[key].dropna().unique().tolist()) for key in keys if key in runs}
    return pd.DataFrame({"setting": list(values), "values": [", ".join(map(str, found)) for found in values.values()]})


def _listed(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each run, with what makes it again."""
    rows: list[Any] = runs.to_dict("records")
    listed = runs[["arm", "seed"]].assign(
        **{"status": [outcome.recorded(run) for run in rows], "by today's rule": [outcome.judged(run) for run in rows]}
    )
    listed["seconds"] = runs["wall_seconds"].astype(float).map("{:.0f}".format, na_action="ignore")
    more = {"config_hash": "config", "revision": "code", "machine": "machine", "command": "command"}
    return listed.join(runs[[*more]].rename(columns=more).assign(code=runs["revision"].str[:8]))


def _mixed(runs: pd.DataFrame) -> list[str]:
    """The facts (code, machine, config) in which runs of one table differ, although the table treats them as equal."""
    mixed = [key for key in ("versions", "revision", "machine") if runs[key].nunique() > 1]
    mixed += ["settings besides the axes"] if runs["settings"].nunique() > 1 else []
    for what in ("config_without_seed", "algorithm_code"):
        counts = runs[runs[what] != ""].groupby("arm")[what].nunique()  # "": its code is not known
        mixed += [f"{what.removesuffix('_without_seed').replace('_', ' ')} ({arm})" for arm in counts.index[counts > 1]]
    return mixed


def _section(
    results: Path,
    formats: Sequence[str],
    arms: Sequence[str] | None,
    overview_alone: Collection[str],
    name: str,
    recorded: dict[str, pd.DataFrame],
) -> tuple[dict[str, Any], list[Path], str, dict[str, str]]:
    """The part of one experiment: its section of the page, its files, its summary, and figure id → missing data."""
    data = draw.data(recorded)
    runs = data["runs"]
    found = runs
    if "folder" in runs:  # the list of runs also has the runs that have not ended
        every = collect.runs(results, name).merge(runs[["folder", *collapse.JUDGED]], how="left", on="folder")
        found = pd.concat([every, runs[runs["folder"].isna()]], ignore_index=True)
    found = found if arms is None else found[found["arm"].isin(set(runs["arm"]))]
    shown = shown_tables(data)
    files = write.files(results / "tables", texts(name, shown, found))
    figures: list[dict[str, Any]] = []
    lacking: dict[str, str] = {}
    for spec in figures_of(name, overview_alone):
        if lack := spec.lacks(data):
            lacking |= {spec.id: lack} if spec.experiment == name else {}
            continue
        figure = spec.figure(data)
        written = draw.write(spec, figure, results, name, formats)
        files += written
        width = f"{figure.get_figwidth() * 8:g}rem"
        (svg,) = [path for path in written if path.suffix == ".svg"]
        image = base64.b64encode(svg.read_bytes()).decode()
        figures.append({"id": spec.id, "name": spec.name, "caption": spec.caption, "svg": image, "width": width})
    section = {
        "name": visible(name),
        "arms": arms,
        "said": headline.sentences(shown),
        "first": headline.table(shown),
        "caption": headline.CAPTION,
        "tables": {kind.replace("_", " ").capitalize(): each for kind, each in shown.items()}
        | {"Settings": (_settings(runs), ""), "Runs": (_listed(found), "")},
        "figures": figures,
        "mixed": _mixed(runs),
        "silent": outcome.silent_arms(recorded["steps"]),
        **_samples(runs),
    }
    return section, files, tables.to_markdown(shown["summary"][0]), lacking


def _with_folder(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that are not archived."""
    return runs[runs["folder"].notna()]


def _samples(runs: pd.DataFrame) -> dict[str, Any]:
    """Samples of a few runs, one seed of every arm first, up to ``_MOST_SAID`` characters; the number of runs left out.

    Archived runs have no samples.
    """
    if "folder" not in runs:
        return {"samples": [], "left_out": 0}
    runs = _with_folder(runs)
    ordered = runs.assign(place=runs.sort_values("seed").groupby("arm").cumcount()).sort_values(["place", "arm"])
    said = {f"{run['arm']} seed={run['seed']}": samples.read(Path(run["folder"])) for run in ordered.to_dict("records")}
    found = [{"run": name, "rows": rows} for name, rows in said.items() if rows]
    sizes = pd.Series([sum(len(row["prompt"] + row["response"]) for row in rows) for rows in said.values() if rows])
    shown = int((sizes.cumsum() <= _MOST_SAID).sum())
    return {"samples": found[:shown], "left_out": len(found) - shown}

"""Tables, figures and one self-contained page from recorded runs (``Results.load``)."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from steadymoe.bench.report import figures, folders, joined, paper, tables, tolerances, write
from steadymoe.bench.report.figures import FIGURES, CannotDraw, DataFigure, FigureSpec, style
from steadymoe.bench.report.folders import experiments
from steadymoe.bench.report.results import Results
from steadymoe.bench.report.write import FORMATS
from steadymoe.bench.runs import outcome, run_folder
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.support import blame, files, processes
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import nearest, visible, without_formulas
from steadymoe.bench.training import samples

# The most characters of samples on the page, for each experiment.
_MAX_CHARACTERS = 100_000


class NothingToReport(UserError):
    """No run has ended; the message says how to start one."""


# Data


def ended(
    results: Path, experiment: str | None, arms: Sequence[str] | None = None, lost: list[str] | None = None
) -> dict[str, Results]:
    """Return what one experiment recorded, or each that has an ended run; of ``arms`` or all.

    Experiments joined by commas are one, under a name of their own (``joined``). Raises NothingToReport if no run has
    ended, UserError for an unknown arm, Damaged if an archive is damaged. Where others are left, ``lost`` gets a line
    for it instead.
    """
    if is_joined(experiment):
        places = joined.places(results, experiment or "")
        each = {label: ended(folder, name)[name] for label, (folder, name) in places.items()}
        return _named({joined.name(list(each)): joined.join(each).of(arms)})
    names = experiments(results) if experiment is None else [experiment]
    recorded: dict[str, Results] = {}
    damages: list[Damaged] = []
    for name in names:
        try:
            recorded[name] = Results.load(results, name, foreign=True)
        except Damaged as error:
            damages.append(error)
    if damages and (lost is None or len(damages) == len(names)):
        raise damages[0]
    if lost is not None:
        lost += [f"left out, damaged: {visible(error)}" for error in damages]
    recorded = {name: its.of(arms) for name, its in recorded.items() if not its.runs.empty}
    if recorded:
        return _named(recorded)
    known, lines = [visible(name) for name in experiments(results)], left_out(results, experiment)
    hint = "start some with: steadymoe run experiment=quickstart"
    hint = nearest(experiment or "", known, f"`ls {visible(results)}/*`") if known else hint
    where = visible(results / "runs" / (experiment or ""))
    raise NothingToReport(f"no ended runs below {where}; {lines[0] if lines else hint}")


def _named(recorded: dict[str, Results]) -> dict[str, Results]:
    """Return experiments with their arms named as the paper does. Raises UserError for a name that is not there."""
    paper.refuse_unknown(pd.concat([its.runs for its in recorded.values()]))
    return {name: replace(its, runs=paper.rename(its.runs)) for name, its in recorded.items()}


def is_joined(experiment: str | None) -> bool:
    """Return whether the text names several experiments."""
    return "," in (experiment or "")


def left_out(results: Path, experiment: str | None = None) -> list[str]:
    """Return one line for each damaged run; tables and figures leave it out."""
    places = [(results, name) for name in experiments(results) if experiment in (None, name)]
    if is_joined(experiment):
        places = list(joined.places(results, experiment or "").values())
    found = [item for place in places for item in folders.damaged(*place).items()]
    hint = "`steadymoe status` prints the command to rerun it"
    return [f"left out, damaged: {visible(folder)} ({visible(reason)}); {hint}" for folder, reason in found]


# Figures


def draw(
    spec: FigureSpec,
    results: Path,
    experiment: str | None,
    formats: Sequence[str] = FORMATS,
    arms: Sequence[str] | None = None,
    to: Path | None = None,
) -> list[Path]:
    """Draw a figure from the runs of ``experiment`` (default: the figure's own) and ``arms``; return the files.

    They go below ``to``, the folder ``results`` unless given.

    Runs of other trainers are drawn if the experiment is named. Raises CannotDraw if the figure's data are missing.
    """
    name = experiment or spec.experiment
    if is_joined(experiment):
        ((name, recorded),) = ended(results, experiment, arms).items()
    else:
        recorded = Results.load(results, name, foreign=experiment is not None)
        if recorded.runs.empty:
            lack = f"{spec.id} lacks ended runs of {visible(name)} below {results / 'runs'}"
            raise CannotDraw(f"{lack}; start some: {command(spec)}")
        recorded = _named({name: recorded.of(arms)})[name]
    return write.figure(to or results, spec.stem(name), figure_of(spec, recorded), spec.caption, formats)


def figure_of(spec: FigureSpec, recorded: Results) -> DataFigure:
    """Return a figure of what was recorded. Raises CannotDraw if that lacks what the figure shows."""
    if missing := spec.lacks(recorded):
        names = ", ".join(sorted(set(recorded.runs["experiment"])))
        raise CannotDraw(f"{spec.id} lacks {missing} in {names}; its own experiment is: {command(spec)}")
    return spec.figure(recorded)


def command(spec: FigureSpec) -> str:
    """Return the command that makes the data of a figure."""
    return f"steadymoe run experiment={spec.experiment}"


def listing(results: Path) -> pd.DataFrame:
    """Return every figure: id, name, experiment, and whether its data are on disk or else what is missing."""
    specs = figures.every().values()
    load = cache(partial(Results.load, results))
    rows = []
    for spec in specs:
        data = load(spec.experiment)
        missing = "no ended runs" if data.runs.empty else spec.lacks(data)
        rows.append((spec.id, spec.name, spec.experiment, "yes" if missing is None else f"no: {missing}"))
    return pd.DataFrame(rows, columns=["id", "name", "experiment", "data on disk"])


def figures_of(experiment: str, alone: bool = True) -> list[FigureSpec]:
    """Return the figures of an experiment: the overview, and those that name the experiment.

    If no shipped figure names it: all shipped figures if the experiment is reported ``alone``, else the overview.
    """
    named = [spec for spec in figures.every().values() if spec.experiment == experiment]
    if alone and not any(spec.id in FIGURES for spec in named):
        named = [*FIGURES.values(), *named]
    return list({spec.id: spec for spec in [FIGURES["overview"], *named]}.values())


# The report


class Report(NamedTuple):
    """What ``make`` has written."""

    files: list[Path]
    text: str
    """What a terminal shows of each experiment: a table of five columns, warnings, the verdict."""
    missing: list[str]
    """One line for each figure that was not drawn, with the data that it lacks, and ``lost``."""
    lost: list[str]
    """One line for each damaged archive, and for each figure that could not be drawn."""


def make(
    results: Path,
    experiment: str | None = None,
    formats: Sequence[str] = FORMATS,
    arms: Sequence[str] | None = None,
    to: Path | None = None,
) -> Report:
    """Write ``tables/``, ``figures/`` and ``report.html`` below ``to``, in place of older files of these formats.

    ``to`` is the folder ``results`` unless given. Figures are written in ``formats``, and as svg for the page. With
    ``experiment`` only the figures of this experiment are reported as missing. Raises as ``ended`` does.
    """
    to = results if to is None else to
    files.replaceable(files.folder(to) / "report.html")  # before the minutes that its content takes
    lost: list[str] = []
    recorded = ended(results, experiment, arms, lost)
    named = {id: spec for id, spec in figures.every().items() if experiment in (None, spec.experiment)}
    specs = {id: spec for id, spec in named.items() if not spec.needs_own}
    missing = {id: f"ended runs of {spec.experiment}" for id, spec in specs.items()}
    one = partial(
        _section, paper.current(), results, to, tuple(dict.fromkeys((*formats, "svg"))), arms, len(recorded) == 1
    )
    sections = processes.in_processes(one, list(recorded), list(recorded.values()))
    for section in sections:
        missing |= {id: what for id, what in section["lacking"].items() if id in missing}
        for figure in section["figures"]:
            missing.pop(figure["id"], None)
    absent = [f"{id} {specs[id].name} lacks {what}: {command(specs[id])}" for id, what in missing.items()]
    lost += [line for section in sections for line in section["failed"]]
    page = write.html(
        "report",
        "report_page.html",
        sections=sections,
        missing=absent,
        left_out=lost + left_out(results, experiment),
        terms=tables.TERMS | outcome.TERMS,
    )
    paths = [path for section in sections for path in section["files"]] + write.text_files(to, {"report.html": page})
    return Report(paths, "\n".join(section["text"] for section in sections), absent + lost, lost)


def shown_tables(recorded: Results) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return kind → (table, caption); a further table of a report is a row here.

    Only arms of one trainer are ranked.
    """
    steps, runs, own = recorded.joined["steps"], recorded.runs, recorded.one_trainer().joined
    every = {
        "tolerance": (tolerances.table(own["steps"]), tolerances.caption()),
        "summary": (tables.summary(steps, runs), tables.CAPTION),
        "head_to_head": (tables.head_to_head(own["steps"], own["evaluations"]), tables.HEAD_TO_HEAD_CAPTION),
        "models": (tables.models(steps, runs), tables.MODELS_CAPTION),
    }
    return {kind: (table, caption) for kind, (table, caption) in every.items() if not table.empty}


def _section(
    asked: paper.Paper,
    results: Path,
    to: Path,
    formats: Sequence[str],
    arms: Sequence[str] | None,
    alone: bool,
    name: str,
    recorded: Results,
) -> dict[str, Any]:
    """Write the files of one experiment; return its section of the page, its files, summary, and lacking figures."""
    with paper.used(asked):  # this may be a process of its own
        runs = listed = recorded.runs
        steps = recorded.joined["steps"]
        if "folder" in runs and runs["experiment"].nunique() == 1:  # list the runs that have not ended, too
            listed = paper.rename(folders.read_runs(results, name))
            listed = listed.join(runs[runs.columns.difference(listed.columns, sort=False)])
        listed = listed if arms is None else listed[listed["arm"].isin(set(runs["arm"]))]
        shown = shown_tables(recorded)
        plain = listed.drop(columns=["folder", "config", "start"], errors="ignore")
        paths = write.text_files(to, {f"{name}-runs.csv": without_formulas(plain).to_csv(index=False)}, "tables")
        for kind, (table, caption) in shown.items():
            paths += write.table(to, f"{name}-{kind}", table, caption)
        dial = shown.get("tolerance")
        lead, first, said = "overview", (tables.headline(shown), tables.HEADLINE_CAPTION), tables.sentences(shown)
        if dial is not None:  # what a sweep over a dial is for
            lead, first = "tolerance", (dial[0], tolerances.SHORT_CAPTION)
            said = [*tolerances.sentences(dial[0]), *said]
        drawn = [_drawn(spec, to, name, recorded, formats, spec.name == lead) for spec in figures_of(name, alone)]
        warnings, rates = _warnings(recorded), tables.best_rates(steps)
        if waiting := int((~listed["status"].isin(run_folder.ENDED)).sum()):
            warnings.insert(0, f"{waiting} of {len(listed)} runs have not ended; this shows the others.")
        more = {"Settings": (_settings(runs), ""), "Runs": (_listed(listed), "")}
        text = [visible(name), *map(visible, warnings), write.to_terminal(tables.for_terminal(shown))]
        text += [visible(" ".join(said[:2]))]
        return {
            "name": visible(name),
            "arms": arms,
            "sentences": [*said, *rates, *tables.knowledge_lost(steps)],
            "lead": lead,
            "first": first,
            "tables": {kind.replace("_", " ").capitalize(): pair for kind, pair in shown.items()} | more,
            "figures": [each for each in drawn if "svg" in each],
            "warnings": warnings,
            **_samples(runs),
            "files": paths + [path for each in drawn for path in each.get("files", ())],
            "text": "\n\n".join(text) + "\n",
            "lacking": {each["id"]: each["lack"] for each in drawn if "lack" in each},
            "failed": [each["failed"] for each in drawn if "failed" in each],
        }


def _drawn(
    spec: FigureSpec, results: Path, name: str, recorded: Results, formats: Sequence[str], leads: bool
) -> dict[str, Any]:
    """Write a figure; return what the page shows of it, what it lacks (``lack``), or why it could not be drawn."""
    if lack := spec.lacks(recorded):
        return {"id": spec.id, "lack": lack} if spec.experiment == name else {}
    try:
        figure = spec.figure(recorded)
        paths = write.figure(results, spec.stem(name), figure, spec.caption, formats)
    except Exception as error:  # no figure costs the page, a user's own least of all
        return {"failed": f"{spec.id} {spec.name} could not be drawn: {visible(blame.one_line(error))}"}
    svg = files.read_bytes(next(path for path in paths if path.suffix == ".svg"))
    return {
        "id": spec.id,
        "name": spec.name,
        "caption": write.whole_caption(figure, spec.caption),
        "svg": base64.b64encode(svg).decode(),
        "narrow": style.narrow_svg(partial(spec.figure, recorded)) if leads else "",
        "width": f"{figure.get_figwidth() * 8:g}rem",
        "files": paths,
    }


def _settings(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the values of each setting that occur in the runs."""
    keys = ["task", "model", "engine", "routing", "correction", "optimizer", *folders.NUMBERS, "seed"]
    values = {key.replace("_", " "): ", ".join(map(str, sorted(runs[key].dropna().unique().tolist()))) for key in keys}
    return pd.DataFrame(values.items(), columns=["setting", "values"])


def _listed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each run, with what repeats it."""
    rows: list[Any] = runs.to_dict("records")
    listed = runs[["arm", "seed"]].assign(
        status=[outcome.judged(run) if run["status"] in run_folder.ENDED else run["status"] for run in rows]
    )
    listed["seconds"] = runs["wall_seconds"].astype(float).map("{:.0f}".format, na_action="ignore")
    more = {"config_hash": "config", "revision": "code", "machine": "machine", "command": "command"}
    return listed.join(runs[[*more]].rename(columns=more).assign(code=runs["revision"].str[:8]))


def _warnings(recorded: Results) -> list[str]:
    """Return what a reader must know of the runs: facts in which they differ, although a table treats them as equal."""
    runs = recorded.runs
    mixed = [key for key in ("versions", "revision", "machine") if runs[key].nunique() > 1]
    mixed += (
        ["settings besides the axes"] if (runs.groupby(["experiment", "model"])["settings"].nunique() > 1).any() else []
    )
    for key in ("config_without_seed", "algorithm_code"):
        counts = runs[runs[key] != ""].groupby("arm")[key].nunique()  # "": its code is not known
        mixed += [f"{key.removesuffix('_without_seed').replace('_', ' ')} ({arm})" for arm in counts.index[counts > 1]]
    warnings = [line] if (line := joined.difference(runs)) else []
    warnings += [f"These runs differ in {', '.join(mixed)}: see the table of runs."] if mixed else []
    return warnings + [
        f"{line[0].upper()}{line[1:]}." for line in outcome.findings_of_arms(recorded.wide(*outcome.READ))
    ]


def _samples(runs: pd.DataFrame) -> dict[str, Any]:
    """Return samples of a few runs, one seed of every arm first, and the number of runs left out for their length.

    Archived runs have no samples.
    """
    if "folder" not in runs:
        return {"samples": [], "left_out": 0}
    runs = runs.dropna(subset="folder")  # of joined experiments some may be archived
    ordered = runs.assign(place=runs.sort_values("seed").groupby("arm").cumcount()).sort_values(["place", "arm"])
    read: list[dict[str, Any]] = [
        {"run": f"{run['arm']} seed={run['seed']}", "rows": samples.read(Path(run["folder"]))}
        for run in ordered.to_dict("records")
    ]
    sampled = [run for run in read if run["rows"]]
    sizes = pd.Series([sum(len(row["prompt"] + row["response"]) for row in run["rows"]) for run in sampled])
    shown = int((sizes.cumsum() <= _MAX_CHARACTERS).sum())
    return {"samples": sampled[:shown], "left_out": len(sampled) - shown}


# Instead of a report


def export(results: Path, experiment: str | None, suffix: str) -> Path:
    """Write every number of the ended runs as one tidy table and return its path; ``suffix`` is parquet or csv.

    Raises NothingToReport if no run of the experiment has ended, or if the archive alone is left of the runs.
    """
    names = [name for name in experiments(results) if experiment in (None, name)]
    runs = [found for name in names if len(found := folders.ended_runs(results, name))]
    if not runs:
        ended(results, experiment)
        raise NothingToReport(f"{results / 'data'} holds archived tables without their runs, which cannot be exported")
    parts = folders.tidy(pd.concat(runs, ignore_index=True).rename_axis("run"))
    path = files.folder(results, "tables") / f"{experiment or 'all'}-tidy.{suffix}"
    files.write(path, partial(write.pieces, suffix=suffix, parts=parts))
    return path


def keep(results: Path, experiment: str | None, to: Path) -> list[Path]:
    """Archive the tables of the report in ``to/data``, without run folders; archived runs that are not here stay.

    Raises NothingToReport as ``make`` does, and Damaged for an archive that cannot be read, before anything is written.
    """
    recorded = {name: its.with_archived(name, to) for name, its in ended(results, experiment).items()}
    return [path for name, its in recorded.items() for path in its.keep(name, to)]

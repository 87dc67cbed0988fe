"""``steadymoe audit report``: tables and figures over the checkpoints of an experiment."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import archive, clip_atlas, clips, tables
from steadymoe.bench.audit.figures import FIGURES
from steadymoe.bench.audit.measure import NOT_FINITE
from steadymoe.bench.report import tables as report_tables
from steadymoe.bench.report.figures import FORMATS, looks, save
from steadymoe.bench.support import atomic_files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import visible, without_mathematics

_LONGEST_NAME = 80


class CannotReport(UserError):
    """The audits lack what was asked for; the message is one line."""


@dataclass(frozen=True)
class Made:
    """The result of ``make``."""

    files: list[Path]
    ranking: pd.DataFrame
    """The losses at the largest drift, by falling usefulness."""
    missing: list[str]
    """One line for each figure that was not drawn, and for each audit that is not finished."""


def make(
    results: Path,
    experiment: str,
    formats: Sequence[str] = FORMATS,
    losses: Sequence[str] | None = None,
    against: str | None = None,
    drift: int | None = None,
) -> Made:
    """Write tables and figures of the audits of ``experiment`` to ``tables/`` and ``figures/`` below ``results``.

    ``losses`` are labels to show (default: all), ``against`` the loss that the others are compared with (default: grpo,
    else the first), ``drift`` the largest k to show. Raises CannotReport for a name or number that is not there,
    archive.NoAudits without audits, and Damaged where a file cannot be read.
    """
    found = archive.load(results, experiment)
    rows = _chosen(found.rows, losses, drift)
    reference = _reference(rows, against)
    for folder in ("figures", "tables"):
        (results / folder).mkdir(parents=True, exist_ok=True)
    groups: Any = rows.groupby(tables.SETTING, dropna=False)
    ranking = pd.concat(
        [tables.ranking(group).assign(setting=setting, strength=strength) for (setting, strength), group in groups]
    )
    ranking = ranking[[*tables.SETTING, *(name for name in ranking if name not in tables.SETTING)]]
    is_whole = losses is None and against is None and drift is None
    stem = _stem(experiment) if is_whole else f"{_stem(experiment)}-part"  # a part replaces no whole report
    files: list[Path] = []
    if reference is not None:
        files += _tables(results, f"{stem}-ranking", ranking)
        files += _tables(results, f"{stem}-contrasts", tables.contrasts(rows, reference))
    missing = list(found.unfinished)
    lost = rows[rows["quantity"] == NOT_FINITE].groupby(["loss", "k", "routing"], as_index=False).size()
    missing += [
        f"{each['loss']} has no finite gradient at k = {each['k']}, routing {each['routing']}, at {each['size']} "
        "checkpoints: no estimate counts them"
        for each in lost.to_dict("records")
    ]
    files += _clips(results, stem, rows, formats)
    joined = tables.joined(rows)
    for name, spec in FIGURES.items() if reference is not None else ():
        keys = ["setting", "start", "router_scale", *([] if spec.over_strengths else ["strength"])]
        for ending, group in _groups(joined, keys):
            lacks = spec.lacks(group)
            if lacks is not None:
                missing.append(f"{name}{ending} was not drawn: it lacks {lacks}")
                continue
            figure = spec.draw(without_mathematics(group))
            named = f"{stem}-{name}{ending}"
            for suffix in formats:
                files.append(results / "figures" / f"{named}.{suffix}")
                atomic_files.write(files[-1], partial(save, figure, suffix=suffix))
            files += _tables(results, named, figure.numbers, markdown=False)
    return Made(files, ranking[ranking["k"] == ranking["k"].max()], missing)


def _clips(results: Path, stem: str, rows: pd.DataFrame, formats: Sequence[str]) -> Iterator[Path]:
    """Write tables and figures of clip shares, if the audits measured any; yield the files."""
    if clip_atlas.shares(rows).empty:
        return
    yield from _tables(results, f"{stem}-clips", clip_atlas.atlas(rows), markdown=False)
    yield from _tables(results, f"{stem}-equivalent_bands", clip_atlas.equivalent(rows))
    yield from _tables(results, f"{stem}-clip_prediction", clip_atlas.misses(rows))
    measured = rows[rows["quantity"].str.contains("clip_share|response_length") & (rows["routing"] != "fresh")]
    for ending, group in _groups(measured[measured["k"] > 0], ["start", "router_scale", "routing"]):
        for anchor in clips.ANCHORS:
            figure = clip_atlas.figure(without_mathematics(group), anchor)
            for suffix in formats:
                path = results / "figures" / f"{stem}-clips-{anchor.replace(' ', '_')}{ending}.{suffix}"
                atomic_files.write(path, partial(save, figure, suffix=suffix))
                yield path


def _chosen(rows: pd.DataFrame, losses: Sequence[str] | None, drift: int | None) -> pd.DataFrame:
    """The rows of some losses, and of drifts up to ``drift``. Raises CannotReport."""
    labels = sorted(rows.loc[rows["algorithm"] != "", "loss"].unique())
    unknown = [name for name in losses or () if name not in labels]
    if unknown:
        raise CannotReport(f"there is no loss {unknown[0]!r} in these audits; choose from {', '.join(labels)}")
    if drift is not None and drift not in set(rows["k"]):
        raise CannotReport(f"no audit has k = {drift}; choose from {', '.join(map(str, sorted(set(rows['k']))))}")
    if losses is not None:
        rows = rows[(rows["algorithm"] == "") | rows["loss"].isin(losses)]
    return rows if drift is None else rows[rows["k"] <= drift]


def _reference(rows: pd.DataFrame, against: str | None) -> str | None:
    """The loss that the others are compared with, None without losses. Raises CannotReport for one that is missing."""
    of_losses = rows[rows["algorithm"] != ""]
    labels = sorted(of_losses["loss"].unique())
    if against is None and not labels:
        return None
    if against is None:
        return looks.reference(looks.of_lines(of_losses, "loss"))
    if against not in labels:
        raise CannotReport(f"there is no loss {against!r} to compare with; choose from {', '.join(labels)}")
    return against


def _groups(joined: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each figure, and what its file's name ends with: "" if there is one such figure."""
    varying = [key for key in keys if joined[key].nunique() > 1]
    endings: list[str] = []
    for place, group in joined.groupby([*keys], dropna=False):
        values = dict(zip(keys, place, strict=True))
        told = " ".join(
            str(values[key]) if key in ("setting", "routing") else f"{key}={values[key]:g}" for key in varying
        )
        ending = re.sub(r"[^A-Za-z0-9._=@]+", "-", told)[:_LONGEST_NAME]
        endings.append(ending)
        number = f"-{endings.count(ending)}" if endings.count(ending) > 1 else ""  # two may differ in dropped letters
        yield f"-{ending}{number}" if ending else "", group


def _stem(experiment: str) -> str:
    """How the names of an experiment's files begin."""
    return experiment if experiment.startswith("audit") else f"{experiment}-audit"


def _tables(results: Path, stem: str, table: pd.DataFrame, markdown: bool = True) -> list[Path]:
    """Write a table as CSV and, for people, as Markdown; return the files."""
    texts = {".csv": table.to_csv(index=False)}
    if markdown:
        texts[".md"] = f"{report_tables.to_markdown(_short(table))}\n"
    files = []
    for suffix, text in texts.items():
        files.append(results / "tables" / f"{stem}{suffix}")
        atomic_files.write(files[-1], partial(Path.write_text, data=text))
    return files


def _short(table: pd.DataFrame) -> pd.DataFrame:
    """A table without the columns that are the same in every row and place no row: setting, strength, start, scale."""
    keys = [key for key in (*tables.SETTING, "start", "router_scale") if key in table]
    same = [key for key in keys if table[key].nunique(dropna=False) < 2]
    return table.drop(columns=same)


def keep(results: Path, experiment: str, to: Path) -> tuple[Path, list[str]]:
    """Archive the audits of ``experiment`` below ``to``; return the file, and a line for each unfinished audit.

    Raises as ``make`` does.
    """
    found = archive.load(results, experiment)
    return archive.keep(found, experiment, to), found.unfinished


def answer(arguments: argparse.Namespace) -> int:
    """Print the ranking and what was written; return the exit code, 0. Raises as ``make`` does."""
    given = {name: getattr(arguments, name) for name in ("losses", "against", "drift", "format")}
    if arguments.keep is not None:
        said = [f"--{name}" for name, value in given.items() if value is not None]
        if said:
            raise CannotReport(f"--keep keeps the audits whole; leave {', '.join(said)} out")
        path, missing = keep(arguments.results, arguments.experiment, arguments.keep)
        files = [path]
    else:
        formats = FORMATS if given["format"] is None else given["format"].split(",")
        if not set(formats) <= set(FORMATS):
            raise CannotReport(f"--format takes {', '.join(FORMATS)}; got {given['format']}")
        losses = None if given["losses"] is None else [name.strip() for name in given["losses"].split(",")]
        made = make(
            arguments.results, arguments.experiment, formats, losses, against=given["against"], drift=given["drift"]
        )
        print(report_tables.to_markdown(_short(made.ranking)))
        files, missing = made.files, made.missing
    for line in [*(f"wrote {path}" for path in files), *missing]:
        print(visible(line))
    return 0

"""``steadymoe audit report``: tables and figures over the checkpoints of an experiment."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from steadymoe.bench.audit import archive, clip_atlas, clips, tables
from steadymoe.bench.audit.figures import FIGURES, clip_shares
from steadymoe.bench.audit.measure import NOT_FINITE
from steadymoe.bench.report import paper
from steadymoe.bench.report import write as writer
from steadymoe.bench.report.figures import CannotDraw, looks
from steadymoe.bench.report.report_page import Report
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import without_mathematics

_LONGEST_NAME = 80


def write(
    results: Path,
    experiment: str,
    formats: Sequence[str] = writer.FORMATS,
    losses: Sequence[str] | None = None,
    against: str | None = None,
    drift: int | None = None,
) -> Report:
    """Write tables and figures of the audits of ``experiment`` to ``tables/`` and ``figures/`` below ``results``.

    The report's table has the losses at the largest drift, by falling usefulness; a line is missing for each figure
    that was not drawn, and for each audit that is not finished.

    ``losses`` are labels to show (default: all), ``against`` the loss to compare with (default: grpo, else the first),
    ``drift`` the largest k to show. Raises UserError for a name or number that is not there and without audits, and
    Damaged where a file cannot be read.
    """
    audits = archive.load(results, experiment)
    rows, reference = _named(*_chosen(audits.rows, losses, against, drift))
    stem = experiment if experiment.startswith("audit") else f"{experiment}-audit"
    if any(choice is not None for choice in (losses, against, drift)):
        stem += "-part"  # a part replaces no whole report
    lost = rows[rows["quantity"] == NOT_FINITE].groupby(["loss", "k", "routing"], as_index=False).size()
    missing = audits.unfinished + [
        f"{row['loss']} has no finite gradient at k = {row['k']}, routing {row['routing']}, at {row['size']} "
        "checkpoints, which estimates leave out"
        for row in lost.to_dict("records")
    ]
    ranking = tables.ranking(rows)
    files: list[Path] = []
    if reference is not None:
        files += _table(results, f"{stem}-ranking", ranking)
        files += _table(results, f"{stem}-contrasts", tables.contrasts(rows, reference))
    files += _clips(results, stem, rows, formats)
    joined = tables.joined(rows)
    for name, draw in FIGURES.items() if reference is not None else ():
        for ending, group in _groups(joined, [*tables.SETTING, "router_scale"]):
            try:
                drawn = draw(without_mathematics(group))
            except CannotDraw as error:
                missing.append(f"{name}{ending} was not drawn: {error}")
                continue
            files += writer.figure(results, f"{stem}-{name}{ending}", drawn, formats=formats)
    last = ranking[ranking["k"] == ranking["k"].max()]
    return Report(files, writer.to_markdown(_short(last)), missing)


def _clips(results: Path, stem: str, rows: pd.DataFrame, formats: Sequence[str]) -> Iterator[Path]:
    """Write tables and figures of clip shares, if the audits measured any; yield the files."""
    if clip_atlas.shares(rows).empty:
        return
    yield from writer.table(results, f"{stem}-clips", clip_atlas.atlas(rows), kinds=["csv"])
    yield from _table(results, f"{stem}-equivalent_bands", clip_atlas.equivalent(rows))
    measured = rows[rows["quantity"].str.contains("clip_share|response_length") & (rows["routing"] != "fresh")]
    for ending, group in _groups(measured[measured["k"] > 0], ["router_scale", "routing"]):
        for anchor in clips.ANCHORS:
            drawn = clip_shares(without_mathematics(group), anchor)
            name = f"{stem}-clips-{anchor.replace(' ', '_')}{ending}"
            yield from writer.figure(results, name, drawn, formats=formats)


def _chosen(
    rows: pd.DataFrame, losses: Sequence[str] | None, against: str | None, drift: int | None
) -> tuple[pd.DataFrame, str | None]:
    """Return the rows of some losses up to a drift, and the loss to compare with, None without losses.

    Raises UserError for a loss or a drift that is not there.
    """
    labels = sorted(rows.loc[rows["algorithm"] != "", "loss"].unique())
    wanted = [*(losses or ()), *([] if against is None else [against])]
    if unknown := [name for name in wanted if name not in labels]:
        raise UserError(f"there is no loss {unknown[0]!r} in these audits; choose from {', '.join(labels)}")
    if drift is not None and drift not in set(rows["k"]):
        raise UserError(f"no audit has k = {drift}; choose from {', '.join(map(str, sorted(set(rows['k']))))}")
    if losses is not None:
        rows = rows[(rows["algorithm"] == "") | rows["loss"].isin(wanted)]
    lines = looks.of_lines(rows[rows["algorithm"] != ""], "loss")
    reference = against if against is not None or not lines else looks.reference(lines)
    return (rows if drift is None else rows[rows["k"] <= drift]), reference


def _named(rows: pd.DataFrame, reference: str | None) -> tuple[pd.DataFrame, str | None]:
    """Return the rows and the loss to compare with, losses named as the paper does."""
    measured = rows.loc[rows["algorithm"] != "", ["loss", "algorithm"]].rename(columns={"loss": "arm"})
    paper.refuse_unknown(measured)
    names = paper.renamed(measured)
    own = None if reference is None else names.get(reference, reference)
    return rows.assign(loss=rows["loss"].map(lambda loss: names.get(loss, loss))), own


def _groups(joined: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows of each figure, and the ending of its file's name: "" if there is one such figure."""
    varying = [key for key in keys if joined[key].nunique() > 1]
    endings: list[str] = []
    for place, group in joined.groupby([*keys], dropna=False):
        values = dict(zip(keys, place, strict=True))
        named = [f"{values[key]}" if key in ("setting", "routing") else f"{key}={values[key]:g}" for key in varying]
        ending = re.sub(r"[^A-Za-z0-9._=@]+", "-", " ".join(named))[:_LONGEST_NAME]
        endings.append(ending)
        number = f"-{endings.count(ending)}" if endings.count(ending) > 1 else ""  # two may differ in dropped letters
        yield f"-{ending}{number}" if ending else "", group


def _table(results: Path, stem: str, table: pd.DataFrame) -> list[Path]:
    """Write a table as CSV and, for people, as Markdown; return the files."""
    files = writer.table(results, stem, table, kinds=["csv"])
    return files + writer.table(results, stem, _short(table), kinds=["md"])


def _short(table: pd.DataFrame) -> pd.DataFrame:
    """Drop setting, strength and scale where they are the same in every row."""
    keys = [key for key in (*tables.SETTING, "router_scale") if key in table]
    return table.drop(columns=[key for key in keys if table[key].nunique(dropna=False) < 2])

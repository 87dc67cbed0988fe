"""The clip atlas: shares that clips take, over checkpoints, as tables and as a figure. ``clips`` measures them."""

import numpy as np
import pandas as pd

from steadymoe.bench.audit import clips
from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.report.figures.looks import Look
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.statistics.estimates import mean_over_seeds

# Shares below this are not drawn.
_LEAST = 3e-4
PLACE = ["setting", "strength", "start", "k", "router_scale", "routing", "unit", "anchor", "band"]


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """The clip shares in an audit's rows: ``PLACE``, ``side``, ``kind``, ``checkpoint``, ``value``; side "both" too."""
    kinds = "|".join((clips.PREDICTED, clips.MEASURED))
    parts = rows["quantity"].str.extract(rf"^(?P<kind>{kinds})_(?P<side>low|high) (?P<band>\S+)$")
    found = rows.assign(kind=parts["kind"], side=parts["side"], band=parts["band"].astype(float)).dropna(
        subset=["kind"]
    )
    of = found["loss"].str.extract(r"^(?P<unit>.*) to (?P<anchor>.*)$")
    found = found.assign(unit=of["unit"], anchor=of["anchor"])
    keys = [*PLACE, "kind", "checkpoint"]
    both = found.groupby(keys, dropna=False)["value"].sum(min_count=2).reset_index().assign(side="both")
    return pd.concat([found[[*keys, "side", "value"]], both], ignore_index=True)


def atlas(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured and predicted share of every band: ``PLACE``, ``side``, mean to n over checkpoints, predicted."""
    found = shares(rows)
    keys = [*PLACE, "side"]
    table = []
    for place, group in found.groupby(keys, dropna=False):
        values = {kind: group.loc[group["kind"] == kind, "value"] for kind in (clips.MEASURED, clips.PREDICTED)}
        over = mean_over_seeds(values[clips.MEASURED].tolist(), bounds=(0.0, 1.0))
        table.append([*place, over.mean, over.low, over.high, over.n, values[clips.PREDICTED].mean()])
    return pd.DataFrame(table, columns=[*keys, "mean", "low", "high", "n", "predicted"])


def equivalent(rows: pd.DataFrame, token_bands: tuple[float, ...] = (0.1, 0.2, 0.3)) -> pd.DataFrame:
    """The width at which a symmetric band on the sequence ratio clips as large a share as a token band does.

    Between the measured widths the share is interpolated on logarithmic axes; a share that none of them reaches has no
    equivalent. Columns: ``PLACE`` without unit and band, ``token_band``, ``share``, then the sequence
    band: mean (geometric), low, high, n over the checkpoints that have one.
    """
    found = shares(rows)
    found = found[(found["side"] == "both") & (found["kind"] == clips.MEASURED)]
    keys = [key for key in PLACE if key not in ("unit", "band")]
    table = []
    for place, group in found.groupby(keys, dropna=False):
        for token_band in token_bands:
            widths, taken = [], []
            for _, of_checkpoint in group.groupby("checkpoint"):
                curves = {unit: each.set_index("band")["value"] for unit, each in of_checkpoint.groupby("unit")}
                share = float(curves[clips.UNITS[0]][token_band])
                taken.append(share)
                widths.append(_width(curves[clips.UNITS[1]], share))
            over = mean_over_seeds([float(np.log(width)) for width in widths if width == width])
            numbers = [float(np.exp(each)) for each in (over.mean, over.low, over.high)]
            table.append([*place, token_band, float(np.mean(taken)), *numbers, over.n])
    return pd.DataFrame(table, columns=[*keys, "token_band", "share", "mean", "low", "high", "n"])


def _width(curve: pd.Series, share: float) -> float:
    """Where a falling curve of shares over bands has the value ``share``; nan outside it."""
    curve = curve[curve > 0].sort_index()
    if share <= 0 or curve.empty or not curve.min() <= share <= curve.max():
        return float("nan")
    logs = np.log(curve.to_numpy()[::-1]), np.log(curve.index.to_numpy()[::-1])
    return float(np.exp(np.interp(np.log(share), *logs)))


def misses(rows: pd.DataFrame) -> pd.DataFrame:
    """How far predictions lie from measured shares (both sides together, k > 0), by setting, unit and anchor.

    Columns: mean and largest absolute difference, in shares of all ratios, over bands, drifts and checkpoints.
    """
    found = shares(rows)
    found = found[(found["side"] == "both") & (found["k"] > 0)]
    keys = ["setting", "strength", "unit", "anchor"]
    if found.empty:
        return pd.DataFrame(columns=[*keys, "mean", "max", "count"])
    wide = found.pivot_table("value", [*PLACE, "checkpoint"], "kind", dropna=False).dropna().reset_index()
    wide["apart"] = (wide[clips.PREDICTED] - wide[clips.MEASURED]).abs()
    return wide.groupby(keys, dropna=False)["apart"].agg(["mean", "max", "count"]).reset_index()


def figure(rows: pd.DataFrame, anchor: str) -> DataFigure:
    """Clip share over the width of the band: a row for each unit, a column for each setting, a line for each k > 0.

    ``rows`` are of one start, scale and routing. Dashed: what four moments of the same log-ratios predict.
    """
    table = atlas(rows)
    table = table[(table["side"] == "both") & (table["anchor"] == anchor) & (table["k"] > 0)]
    columns = _columns(rows)
    drifts = sorted(table["k"].unique())
    with style.figure_style():
        width = style.TWO_COLUMNS if len(columns) > 1 else 4.2
        drawn, axes = style.panels(2, len(columns), 4.4, width, sharex=True, sharey=True)
        for place, axis in enumerate(axes):
            unit, (setting, strength, title) = clips.UNITS[place // len(columns)], columns[place % len(columns)]
            is_here = (table["unit"] == unit) & (table["setting"] == setting) & (table["strength"] == strength)
            for number, k in enumerate(drifts):
                of_k = table[is_here & (table["k"] == k)].sort_values("band").rename(columns={"band": "x"})
                is_drawn = of_k["mean"] >= _LEAST
                of_k = of_k.assign(**{name: of_k[name].where(is_drawn) for name in ("mean", "low", "high")})
                look = looks.ramp(number, len(drifts))
                marked = Look(look.colour, "-", look.marker, marked=True)
                style.line(axis, f"k = {k}", of_k[["x", "mean", "low", "high", "n"]], marked, f"{unit}, {title}")
                predicted = of_k.loc[of_k["predicted"] >= _LEAST, ["x", "predicted"]]
                axis.plot(predicted["x"], predicted["predicted"], "--", color=look.colour, linewidth=0.8)
                style.note(axis, f"k = {k}, predicted", predicted, f"{unit}, {title}")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_ylim(_LEAST, 1)
            if place < len(columns):
                axis.set_title(title)
            else:
                axis.set_xlabel("width of the band")
            if place % len(columns) == 0:
                axis.set_ylabel(f"clipped share,\n{unit}")
        counts = table["n"].astype(int).tolist()
        text = (
            f"Mean over checkpoints, n = {style.span(counts)}{'; shaded: 95 % t interval' if max(counts) > 2 else ''}. "
        )
        text += (
            f"A ratio to the {anchor} is clipped outside 1 ± width, where the advantage's sign asks for it. Dashed: "
        )
        text += f"predicted from four moments of the log-ratios of either sign. Shares below {_LEAST:g} are not drawn."
        return style.finish(drawn, axes[0], text)


def _columns(rows: pd.DataFrame) -> list[tuple[str, float, str]]:
    """Setting, strength and title of each column, by the mean length of the responses."""
    of_length = rows[rows["quantity"] == "response_length"].groupby(["setting", "strength"])["value"].mean()
    titles = [f"responses of {length:.0f} tokens" for length in of_length]
    if len(set(titles)) < len(titles):
        titles = [
            f"{title}\n{setting} strength {strength:g}"
            for title, (setting, strength) in zip(titles, of_length.index, strict=True)
        ]
    columns = [(*key, title) for key, title in zip(of_length.index, titles, strict=True)]
    return [column for _, column in sorted(zip(of_length, columns, strict=True))]

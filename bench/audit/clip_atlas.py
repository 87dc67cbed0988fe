"""The clip atlas: clip shares over checkpoints, and the sequence bands that clip as much as token bands do."""

import numpy as np
import pandas as pd

from steadymoe.bench.audit import clips
from steadymoe.bench.statistics.estimates import mean_over_seeds

PLACE = ["setting", "strength", "k", "router_scale", "routing", "unit", "anchor", "band"]
_TOKEN_BANDS = (0.1, 0.2, 0.3)


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the clip shares in audits' rows: ``PLACE``, side ("low", "high", "both"), checkpoint, value."""
    parts = rows["quantity"].str.extract(r"^clip_share_(?P<side>low|high) (?P<band>\S+)$")
    ratios = rows["loss"].str.extract(r"^(?P<unit>.*) to (?P<anchor>.*)$")
    sided = rows.assign(band=parts["band"].astype(float), side=parts["side"], **ratios).dropna(subset=["side"])
    keys = [*PLACE, "checkpoint"]
    both = sided.groupby(keys, dropna=False)["value"].sum(min_count=2).reset_index().assign(side="both")
    return pd.concat([sided[[*keys, "side", "value"]], both], ignore_index=True)


def atlas(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the share of every band over checkpoints: ``PLACE``, side, mean, low, high, n."""
    keys, table = [*PLACE, "side"], []
    for place, group in shares(rows).groupby(keys, dropna=False):
        mean = mean_over_seeds(group["value"].tolist(), bounds=(0.0, 1.0))
        table.append([*place, *vars(mean).values()])
    return pd.DataFrame(table, columns=[*keys, "mean", "low", "high", "n"])


def equivalent(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the width at which a symmetric band on the sequence ratio clips as large a share as a token band does.

    Shares between the measured widths are interpolated on logarithmic axes; a share that none of them reaches has no
    equivalent. Columns: ``PLACE`` without unit and band, ``token_band``, ``share``, then the sequence band: mean
    (geometric), low, high, n over the checkpoints that have one.
    """
    both = shares(rows).query("side == 'both'")
    keys, table = [key for key in PLACE if key not in ("unit", "band")], []
    for place, group in both.groupby(keys, dropna=False):
        curves = group.pivot(index="band", columns=["unit", "checkpoint"], values="value")
        token, sequence = (curves[unit] for unit in clips.UNITS)
        for band in _TOKEN_BANDS:
            widths = [_width(sequence[checkpoint], share) for checkpoint, share in token.loc[band].items()]
            mean = mean_over_seeds([float(np.log(width)) for width in widths if width == width])
            numbers = [float(np.exp(number)) for number in (mean.mean, mean.low, mean.high)]
            table.append([*place, band, float(np.mean(token.loc[band])), *numbers, mean.n])
    return pd.DataFrame(table, columns=[*keys, "token_band", "share", "mean", "low", "high", "n"])


def _width(curve: pd.Series, share: float) -> float:
    """Return where a falling curve of shares over bands has the value ``share``; nan outside it."""
    curve = curve[curve > 0].sort_index()
    if share <= 0 or curve.empty or not curve.min() <= share <= curve.max():
        return float("nan")
    logs = np.log(curve.to_numpy()[::-1]), np.log(curve.index.to_numpy()[::-1])
    return float(np.exp(np.interp(np.log(share), *logs)))

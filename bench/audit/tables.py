"""The tables of audits: read from disk, averaged over checkpoints, ranked, and contrasted pair by pair.

A checkpoint is the replicate: within one, intervals come from the jackknife over mini-batches; over several, from
Student's t.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from steadymoe.bench.audit import estimators
from steadymoe.bench.audit.estimators import Jackknifed
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.report.archive import read_kept
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds

# What tells the audits of an experiment apart, next to their checkpoints.
SETTING = ["setting", "strength"]
_WEIGHTS = ["k", "router_scale", "routing"]
# What tells a row from the others of its checkpoint.
PLACE = [*_WEIGHTS, "loss", "block", "cut", "quantity"]
_CONTRASTED = ("usefulness", "gain", "snr")
_RANKED = ("usefulness", "gain", "snr", "cosine", "bias", "staleness_bias")


def read(folders: Sequence[Path]) -> pd.DataFrame:
    """Return the rows of all tables in the folders of audits, ``with_gain``; ``checkpoint`` numbers the folders.

    Raises Damaged if a table cannot be read or lacks a column.
    """
    parts = []
    for number, folder in enumerate(folders):
        for path in sorted(folder.glob("k=*.parquet")):
            table = read_kept(path)
            refuse_lacking(table, path, COLUMNS)
            parts.append(table.assign(checkpoint=number))
    return with_gain(pd.concat(parts, ignore_index=True))


def refuse_lacking(table: pd.DataFrame, path: Path, columns: Sequence[str]) -> None:
    """Raise Damaged if the table in ``path`` lacks one of ``columns``."""
    if lacking := [name for name in columns if name not in table]:
        raise Damaged(f"{path} is not an audit's table: it lacks {', '.join(lacking)}")


def with_gain(table: pd.DataFrame) -> pd.DataFrame:
    """Add a row ``gain`` for each usefulness; it follows from usefulness and SNR, so audits do not record it.

    Its interval comes from the replicates of both; without them it has none.
    """
    place = ["checkpoint", *PLACE[:-1]]
    noise = table.loc[table["quantity"] == "snr", [*place, "value", "replicates"]]
    rows = table[table["quantity"] == "usefulness"].merge(noise, on=place, suffixes=("", "_snr"))
    if rows.empty:  # an audit of clips alone
        return table
    pairs = rows[["value", "replicates", "value_snr", "replicates_snr"]].itertuples(index=False, name=None)
    gains = [estimators.gain(_estimate(*pair[:2]), _estimate(*pair[2:])) for pair in pairs]
    added = rows[table.columns].assign(
        quantity="gain",
        **{name: [getattr(gain, name) for gain in gains] for name in ("value", "low", "high")},
        replicates=pd.Series([list(gain.replicates) or None for gain in gains], dtype=object),
    )
    return pd.concat([table, added], ignore_index=True)


def _estimate(value: float, replicates: Sequence[float] | None) -> Jackknifed:
    return estimators.from_replicates(float(value), [] if replicates is None else list(replicates))


def over_checkpoints(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean and interval of every quantity over checkpoints: ``SETTING`` if given, ``PLACE``, mean, low, high, n.

    A checkpoint where a quantity is undefined does not count. For one checkpoint the interval is the jackknife's.
    """
    rows, keys = [], _keys(table, PLACE)
    numbers_R3 = table[["value", "low", "high"]].to_numpy(dtype=float)
    groups: Any = table.groupby(keys, sort=True, dropna=False).indices
    for place, group in groups.items():
        values = numbers_R3[group, 0]
        known = values[~np.isnan(values)]
        over = mean_over_seeds(known.tolist())
        numbers = [*numbers_R3[group[0]], len(known)] if len(values) == 1 else vars(over).values()
        rows.append([*place, *numbers])
    return pd.DataFrame(rows, columns=[*keys, "mean", "low", "high", "n"])


def _keys(table: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return [*(name for name in SETTING if name in table), *names]


def joined(table: pd.DataFrame) -> pd.DataFrame:
    """Return what figures draw of ``archive.load``: ``over_checkpoints``, and each loss's algorithm and band."""
    wanted = table[table["quantity"].isin([*_RANKED, "share", "reward"])]
    by_loss = table[["loss", "algorithm", "clip_low", "clip_high"]].drop_duplicates("loss")
    return over_checkpoints(wanted).merge(by_loss, on="loss", how="left")


def contrasts(table: pd.DataFrame, against: str) -> pd.DataFrame:
    """Return every loss minus the loss ``against``, in usefulness, gain and SNR, paired by mini-batch and checkpoint.

    Columns: the place, then value, low, high, n over checkpoints; for one checkpoint the interval is the jackknife's.
    """
    is_loss = table["replicates"].notna() & (table["block"] == "whole") & (table["cut"] == "before")
    chosen = table[is_loss & table["quantity"].isin(_CONTRASTED) & (table["algorithm"] != "")]
    keys = [*SETTING, *_WEIGHTS, "quantity"]
    theirs = chosen[chosen["loss"] == against]
    pairs = chosen[chosen["loss"] != against].merge(theirs, on=[*keys, "checkpoint"], suffixes=("", "_other"))
    rows = []
    for (*place, loss), group in pairs.groupby([*keys, "loss"], dropna=False):
        columns = (group[name] for name in ("value", "replicates", "value_other", "replicates_other"))
        apart = [_estimate(*pair[:2]) - _estimate(*pair[2:]) for pair in zip(*columns, strict=True)]
        over = mean_over_seeds([difference.value for difference in apart])
        low, high = (apart[0].low, apart[0].high) if over.n == 1 else (over.low, over.high)
        rows.append([*place, f"{loss} − {against}", over.mean, low, high, over.n])
    return pd.DataFrame(rows, columns=[*keys, "loss", "value", "low", "high", "n"])


def ranking(table: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by falling usefulness at every setting and place, as texts with intervals.

    Next to it gain, SNR, cosine and bias. A loss whose usefulness is undefined comes last.
    """
    is_whole = (table["block"] == "whole") & (table["cut"] == "before")
    chosen = over_checkpoints(table[is_whole & table["quantity"].isin(_RANKED)])
    places = _keys(table, _WEIGHTS)
    keys = [*places, "loss"]
    if not (chosen["quantity"] == "usefulness").any():  # clips alone, or no loss has finite gradients
        return pd.DataFrame(columns=[*keys, *_RANKED])
    numbers = chosen[["mean", "low", "high", "n"]].itertuples(index=False, name=None)
    chosen = chosen.assign(shown=[str(Estimate(*row)) for row in numbers])
    wide = chosen.pivot(index=keys, columns="quantity", values="shown")
    wide["order"] = chosen[chosen["quantity"] == "usefulness"].set_index(keys)["mean"]
    wide = wide.dropna(subset=["usefulness"]).reset_index()
    wide = wide.sort_values([*places, "order"], ascending=[True] * len(places) + [False])
    return wide[[*keys, *(name for name in _RANKED if name in wide)]].reset_index(drop=True)

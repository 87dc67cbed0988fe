"""The tables of audits: read from disk, averaged over checkpoints, ranked, and contrasted pair by pair.

A checkpoint is the replicate: within one, intervals come from the jackknife over mini-batches; over several, from
Student's t.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from steadymoe.bench.audit import estimators
from steadymoe.bench.audit.estimators import Jackknifed
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.statistics.estimates import Estimate, mean_over_seeds

# What tells the audits of an experiment apart, next to their checkpoints.
SETTING = ["setting", "strength"]
_WEIGHTS = ["start", "k", "router_scale", "routing"]
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
            try:
                table = pd.read_parquet(path)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error
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
    """Return mean and interval of every quantity over checkpoints: ``PLACE``, mean, low, high, n.

    A checkpoint where a quantity is undefined does not count. For one checkpoint the interval is the jackknife's.
    """
    rows = []
    numbers_R3 = table[["value", "low", "high"]].to_numpy(dtype=float)
    groups: Any = table.groupby(PLACE, sort=True, dropna=False).indices
    for place, group in groups.items():
        values = numbers_R3[group, 0]
        known = values[~np.isnan(values)]
        over = mean_over_seeds(known.tolist())
        numbers = [*numbers_R3[group[0]], len(known)] if len(values) == 1 else vars(over).values()
        rows.append([*place, *numbers])
    return pd.DataFrame(rows, columns=[*PLACE, "mean", "low", "high", "n"])


def joined(table: pd.DataFrame) -> pd.DataFrame:
    """Return what figures draw of ``archive.load``: ``over_checkpoints`` of each setting and strength.

    Adds setting, strength, and each loss's algorithm, clip_low, clip_high.
    """
    wanted = table[table["quantity"].isin([*_RANKED, "share", "reward"])]
    groups: Any = wanted.groupby(SETTING, dropna=False)
    parts = [over_checkpoints(group).assign(**dict(zip(SETTING, setting, strict=True))) for setting, group in groups]
    by_loss = table[["loss", "algorithm", "clip_low", "clip_high"]].drop_duplicates("loss")
    return pd.concat(parts, ignore_index=True).merge(by_loss, on="loss", how="left")


def contrasts(table: pd.DataFrame, against: str) -> pd.DataFrame:
    """Return every loss minus the loss ``against``, in usefulness, gain and SNR, paired by mini-batch and checkpoint.

    Columns: the place, then value, low, high, n over checkpoints; for one checkpoint the interval is the jackknife's.
    """
    is_loss = table["replicates"].notna() & (table["block"] == "whole") & (table["cut"] == "before")
    chosen = table[is_loss & table["quantity"].isin(_CONTRASTED) & (table["algorithm"] != "")]
    keys = [*SETTING, *_WEIGHTS, "quantity"]
    rows = []
    for place, group in chosen.groupby(keys, dropna=False):
        columns = (group[name] for name in ("checkpoint", "loss", "value", "replicates"))
        estimates = {
            (checkpoint, loss): _estimate(value, replicates)
            for checkpoint, loss, value, replicates in zip(*columns, strict=True)
        }
        checkpoints = sorted(set(group["checkpoint"]))
        for loss in sorted(set(group["loss"]) - {against}):
            pairs = [(estimates.get((number, loss)), estimates.get((number, against))) for number in checkpoints]
            apart = [one - other for one, other in pairs if one is not None and other is not None]
            over = mean_over_seeds([difference.value for difference in apart])
            if over.n:
                low, high = (apart[0].low, apart[0].high) if over.n == 1 else (over.low, over.high)
                numbers = {"loss": f"{loss} − {against}", "value": over.mean, "low": low, "high": high, "n": over.n}
                rows.append(dict(zip(keys, place, strict=True)) | numbers)
    return pd.DataFrame(rows, columns=[*keys, "loss", "value", "low", "high", "n"])


def ranking(table: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by falling usefulness at every start, drift, scale and routing, as texts with intervals.

    Next to it gain, SNR, cosine and bias. A loss whose usefulness is undefined comes last.
    """
    is_whole = (table["block"] == "whole") & (table["cut"] == "before")
    chosen = over_checkpoints(table[is_whole & table["quantity"].isin(_RANKED)])
    keys = [*_WEIGHTS, "loss"]
    if not chosen.loc[chosen["quantity"] == "usefulness", "n"].any():  # clips alone, or no loss has finite gradients
        return pd.DataFrame(columns=[*keys, *_RANKED])
    numbers = chosen[["mean", "low", "high", "n"]].itertuples(index=False, name=None)
    chosen = chosen.assign(shown=[str(Estimate(*row)) for row in numbers])
    wide = chosen.pivot(index=keys, columns="quantity", values="shown")
    wide["order"] = chosen[chosen["quantity"] == "usefulness"].set_index(keys)["mean"]
    wide = wide.dropna(subset=["usefulness"]).reset_index()
    wide = wide.sort_values([*_WEIGHTS, "order"], ascending=[True] * len(_WEIGHTS) + [False])
    return wide[[*keys, *(name for name in _RANKED if name in wide)]].reset_index(drop=True)

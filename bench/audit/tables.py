"""The tables of audits: read from disk, averaged over checkpoints, ranked, and contrasted pair by pair.

A checkpoint is the replicate: within one, intervals come from the jackknife over mini-batches; over several, from
Student's t.
"""

import math
from collections.abc import Mapping, Sequence
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

# What tells a row from the others of its checkpoint.
PLACE = ["start", "k", "router_scale", "routing", "loss", "block", "cut", "quantity"]
# A contrast, and a ranking, are of one block, one cut, one routing, …
_WHOLE = {"block": "whole", "cut": "before"}
_CONTRASTED = ("usefulness", "gain", "snr")
# What tells the audits of an experiment apart, beside their checkpoints.
SETTING = ["setting", "strength"]
_RANKED = ("usefulness", "gain", "snr", "cosine", "bias", "staleness_bias")


def read(folders: Sequence[Path]) -> pd.DataFrame:
    """The rows of all units in the folders of audits, ``with_gain``; ``checkpoint`` is the folder's place among them.

    Raises Damaged if a table cannot be read or is of no audit.
    """
    parts = [
        _read(path).assign(checkpoint=number)
        for number, folder in enumerate(folders)
        for path in sorted(folder.glob("k=*.parquet"))
    ]
    return with_gain(pd.concat(parts, ignore_index=True))


def with_gain(table: pd.DataFrame) -> pd.DataFrame:
    """Add a row ``gain`` for each usefulness; audits do not record it, since it follows from usefulness and SNR.

    Its interval comes from the replicates of both; without them it has none.
    """
    place = ["checkpoint", *PLACE[:-1]]
    noise = table.loc[table["quantity"] == "snr", [*place, "value", "replicates"]]
    rows = table[table["quantity"] == "usefulness"].merge(noise, on=place, suffixes=("", "_snr"))
    found = [
        estimators.gain(_estimate(*of_usefulness), _estimate(*of_snr))
        for of_usefulness, of_snr in zip(
            zip(rows["value"], rows["replicates"], strict=True),
            zip(rows["value_snr"], rows["replicates_snr"], strict=True),
            strict=True,
        )
    ]
    if not found:  # an audit of clips alone
        return table
    added = rows[table.columns].assign(
        quantity="gain",
        **{name: [getattr(each, name) for each in found] for name in ("value", "low", "high")},
        replicates=pd.Series([list(each.replicates) or None for each in found], dtype=object),
    )
    return pd.concat([table, added], ignore_index=True)


def _estimate(value: float, replicates: Sequence[float] | None) -> Jackknifed:
    return estimators.of_replicates(float(value), [] if replicates is None else list(replicates))


def _read(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    refuse_lacking(table, path, COLUMNS)
    return table


def refuse_lacking(table: pd.DataFrame, path: Path, columns: Sequence[str]) -> None:
    """Raise Damaged if the table in ``path`` lacks one of ``columns``."""
    lacking = [name for name in columns if name not in table]
    if lacking:
        raise Damaged(f"{path} is of no audit: it lacks {', '.join(lacking)}")


def over_checkpoints(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and interval of every quantity over checkpoints: ``PLACE``, mean, low, high, n.

    A checkpoint where a quantity is undefined does not count: ``n`` says how many do. Of one checkpoint the interval is
    the jackknife's, and ``n`` is 1.
    """
    rows = []
    numbers_R3 = table[["value", "low", "high"]].to_numpy(dtype=float)
    groups: Any = table.groupby(PLACE, sort=True, dropna=False).indices
    for place, group in groups.items():
        values = numbers_R3[group, 0]
        known = values[~np.isnan(values)]
        if len(values) == 1:
            found = [*numbers_R3[group[0]], len(known)]
        else:
            over = mean_over_seeds(known.tolist())
            found = [over.mean, over.low, over.high, over.n]
        rows.append([*place, *found])
    return pd.DataFrame(rows, columns=[*PLACE, "mean", "low", "high", "n"])


def joined(table: pd.DataFrame) -> pd.DataFrame:
    """What figures draw of the rows of ``archive.load``: ``over_checkpoints`` of each setting and strength.

    Beside its columns: setting, strength, and of each loss algorithm, clip_low, clip_high.
    """
    wanted = table[table["quantity"].isin([*_RANKED, "share", "reward"])]
    groups: Any = wanted.groupby(SETTING, dropna=False)
    parts = [
        over_checkpoints(group).assign(setting=setting, strength=strength) for (setting, strength), group in groups
    ]
    of_losses = table[["loss", "algorithm", "clip_low", "clip_high"]].drop_duplicates("loss")
    return pd.concat(parts, ignore_index=True).merge(of_losses, on="loss", how="left")


def contrasts(table: pd.DataFrame, against: str) -> pd.DataFrame:
    """Every loss less the loss ``against``, in usefulness, gain and SNR, at every setting, drift and routing.

    Columns: the place, then value, low, high, n over checkpoints; of one checkpoint the interval is the jackknife's.
    """
    of_losses = table["replicates"].notna() & (table["block"] == "whole") & (table["cut"] == "before")
    kept = table[of_losses & table["quantity"].isin(_CONTRASTED) & (table["algorithm"] != "")]
    keys = [*SETTING, "start", "k", "router_scale", "routing", "quantity"]
    rows = []
    for place, group in kept.groupby(keys, dropna=False):
        columns = (group[name] for name in ("checkpoint", "loss", "value", "replicates"))
        found = {
            (checkpoint, loss): _estimate(value, replicates)
            for checkpoint, loss, value, replicates in zip(*columns, strict=True)
        }
        for loss in sorted(set(group["loss"]) - {against}):
            pairs = [(found.get((each, loss)), found.get((each, against))) for each in sorted(set(group["checkpoint"]))]
            apart = [one - other for one, other in pairs if one is not None and other is not None]
            over = mean_over_seeds([each.value for each in apart])
            if over.n:
                low, high = (apart[0].low, apart[0].high) if over.n == 1 else (over.low, over.high)
                numbers = {"loss": f"{loss} − {against}", "value": over.mean, "low": low, "high": high, "n": over.n}
                rows.append(dict(zip(keys, place, strict=True)) | numbers)
    return pd.DataFrame(rows, columns=[*keys, "loss", "value", "low", "high", "n"])


def ranking(table: pd.DataFrame, cut: str = "before") -> pd.DataFrame:
    """Every loss at every start, drift, scale and routing, by falling usefulness, next to gain, SNR, cosine and bias.

    A loss whose usefulness is undefined stands last.
    """
    whole = (table["block"] == "whole") & (table["cut"] == cut)
    chosen = over_checkpoints(table[whole & table["quantity"].isin(_RANKED)])
    keys = ["start", "k", "router_scale", "routing", "loss"]
    if chosen.empty:  # an audit of clips alone
        return pd.DataFrame(columns=[*keys, *_RANKED])
    chosen = chosen.assign(
        told=[str(Estimate(*each)) for each in chosen[["mean", "low", "high", "n"]].itertuples(index=False, name=None)]
    )
    wide = chosen.pivot(index=keys, columns="quantity", values="told").reset_index()
    means = chosen[chosen["quantity"] == "usefulness"].set_index(keys)["mean"]
    wide["order"] = [means.get(tuple(each), math.nan) for each in wide[keys].itertuples(index=False, name=None)]
    wide = wide.dropna(subset=["usefulness"]).sort_values(
        ["start", "k", "router_scale", "routing", "order"], ascending=[True, True, True, True, False]
    )
    return wide[[*keys, *(name for name in _RANKED if name in wide)]].reset_index(drop=True)


def contrast(
    table: pd.DataFrame, first: str, second: str, quantity: str, **place: Any
) -> tuple[pd.DataFrame, Estimate]:
    """``first`` less ``second`` at one ``place``: by checkpoint, paired by mini-batch; and over checkpoints.

    ``place`` gives what is left open by ``loss`` and ``quantity``: k, routing and, if there are several, start and
    router_scale; block and cut are the whole gradient before the cut unless given. Raises ValueError where a checkpoint
    has several such rows.
    """
    rows = []
    for checkpoint, group in table.groupby("checkpoint", sort=True):
        pair = [_one(group, _WHOLE | place | {"loss": loss, "quantity": quantity}) for loss in (first, second)]
        if pair[0] is not None and pair[1] is not None:
            apart = pair[0] - pair[1]
            rows.append({"checkpoint": checkpoint, "value": apart.value, "low": apart.low, "high": apart.high})
    by_checkpoint = pd.DataFrame(rows, columns=["checkpoint", "value", "low", "high"])
    return by_checkpoint, mean_over_seeds(by_checkpoint["value"].tolist())


def _one(group: pd.DataFrame, place: Mapping[str, Any]) -> Jackknifed | None:
    """The estimate at one place; None where it is undefined."""
    group = group[np.logical_and.reduce([group[key].to_numpy() == value for key, value in place.items()])]
    if len(group) > 1:
        raise ValueError(f"{dict(place)} names {len(group)} rows of one checkpoint: say its start and router_scale too")
    if group.empty or group["replicates"].iloc[0] is None:
        return None
    return _estimate(group["value"].iloc[0], group["replicates"].iloc[0])

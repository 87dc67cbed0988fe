"""A user's own columns of updates and steps, from outside the checkout.

Every module ``*metrics.py`` in a folder of STEADYMOE_PATH has a list ``METRICS``. Each ``Metric`` in it is a column
``own/<name of its function>`` of all runs with ``measure=all``.
"""

import inspect
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from steadymoe.bench.support import blame, external, processes, source
from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.training import columns

if TYPE_CHECKING:  # figures read labels here, and are drawn without torch
    from torch import Tensor

    from steadymoe.algorithms import Batch, LossOutput
    from steadymoe.bench.training.forward import Forward


@dataclass(frozen=True)
class Update:
    """One gradient update, without gradient: what the suite's own columns are computed from.

    Shapes: M responses of the mini-batch, F positions fed, L MoE layers, K experts a token.
    """

    batch: "Batch"
    """The whole mini-batch, however it was split."""
    output: "LossOutput"
    now: "Forward"
    """The forward of the update, with ``routes_LBFK``; the route of a token is that of the position before it."""
    old_routes_LMFK: "Tensor | None"
    """The old policy's routes of the same rows; None for a dense model."""


@dataclass(frozen=True)
class Metric:
    """A column: a function's name is the column's, and the first line of its docstring the column's meaning."""

    function: "Callable[[Update], Tensor | float]"
    """Returns a scalar, or a mask or value of every token, (M, T), whose mean over response tokens is recorded."""
    label: str = ""
    """What an axis calls it (``columns.label``)."""
    unit: str = ""
    over_updates: Literal["mean", "largest", "least"] = "mean"
    """How a step reduces the numbers of its updates."""

    @property
    def column(self) -> columns.Column:
        """The column, as ``columns`` declares the suite's own."""
        name, (meaning, *_) = f"own/{self.function.__name__}", (inspect.getdoc(self.function) or "").split("\n")
        return columns.Column(name, meaning, self.label, unit=self.unit, over_updates=self.over_updates)


def load() -> Mapping[str, Metric]:
    """Return the metrics by column, and let ``columns.of_metric`` know them. Raises ConfigError for a wrong module."""
    metrics = _load(tuple(external.metrics()))
    columns.OWN.clear()
    columns.OWN.update({name: metric.column for name, metric in metrics.items()})
    return metrics


@cache
def _load(paths: tuple[Path, ...]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    if paths:
        external.make_importable()  # a module may import its neighbours
    for path in paths:
        found = source.find(path.stem)  # by this name a run's record finds its code again
        if found is None or not found.samefile(path):
            raise ConfigError(f"{path} is not a valid module name, or shadows another module; rename it")
        try:
            listed = runpy.run_path(str(path), run_name=path.stem).get("METRICS")
        except BaseException as error:  # a user's own code
            if processes.is_interrupt(error):
                raise
            raise ConfigError(f"{path}: {blame.one_line(error)}") from error
        if not isinstance(listed, list) or not all(isinstance(each, Metric) for each in listed):
            raise ConfigError(f"{path} must define METRICS, a list of steadymoe.bench.training.own_metrics.Metric")
        for each in listed:
            if why := _wrong(each, metrics):
                raise ConfigError(f"{path}: {why}")
            metrics[each.column.name] = each
    return metrics


def _wrong(metric: Metric, others: Mapping[str, Metric]) -> str | None:
    """Return why a metric cannot be a column; None if it can."""
    name = getattr(metric.function, "__name__", repr(metric.function))
    if not columns.is_own(f"own/{name}"):
        return f"a metric is a function with a short ASCII name; got {name!r}"
    if f"own/{name}" in others or any(name in table for table in columns.TABLES.values()):
        return f"there is already a column {name}; rename the metric"
    if not metric.column.meaning:
        return f"{name} needs a docstring, whose first line is the column's meaning"
    if metric.over_updates not in ("mean", "largest", "least"):
        return f"over_updates of {name} must be mean, largest or least; got {metric.over_updates!r}"
    return None


def measured(metrics: Mapping[str, Metric], update: Update) -> "dict[str, Tensor]":
    """Return the columns of one update, as scalars. Raises ValueError for what is no scalar and no (M, T)."""
    from steadymoe.algorithms.batch import summed
    from steadymoe.bench.training import token_metrics

    mask_MT = update.batch.mask_BT
    numbers: dict[str, Tensor] = {}
    for metric in metrics.values():
        numbers |= summed({metric.function.__name__: metric.function(update)}, mask_MT)
    return token_metrics.of_numbers("own", numbers)

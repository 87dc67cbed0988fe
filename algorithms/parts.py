"""Dataclasses of tensors: each field says what its dimensions are, and parts are joined by what the fields say.

A field's metadata is made by ``dimensions`` (a tensor, with B for the rows along which parts are joined), by
``joined_by`` (anything else), or is ``LEFT_OUT`` (the whole takes the field's default). There is no other default: a
field that says nothing is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part")

LEFT_OUT: Mapping[str, Any] = {"join": None}


def dimensions(letters: str) -> Mapping[str, Any]:
    """Return the metadata of a tensor with one dimension for each letter, B among them: ``dimensions("LBTK")``."""
    return {"dimensions": letters, "join": partial(_concatenated, dim=letters.index("B"))}


def joined_by(join: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Return the metadata of a field whose values in all parts ``join`` turns into the value of the whole."""
    return {"join": join}


def dimensions_of(field: Field[Any]) -> str | None:
    """Return the letters of a tensor's dimensions; None for a field that is no tensor of rows.

    Raises TypeError for a field that does not say how parts are joined.
    """
    if "join" not in field.metadata:
        raise TypeError(
            f"the field {field.name} must say in its metadata how parts are joined: dimensions(…), joined_by(…) or "
            "LEFT_OUT of steadymoe.algorithms.parts"
        )
    return field.metadata.get("dimensions")


def joined(parts: Sequence[Part]) -> Part:
    """Parts of one mini-batch or rollout as a whole, in their order, without gradient.

    A field that is None in the first part is None in the whole. Raises TypeError for a field that does not say how
    parts are joined.
    """
    first: Any = parts[0]
    whole: dict[str, Any] = {}
    for field in fields(first):
        dimensions_of(field)
        values, join = [getattr(part, field.name) for part in parts], field.metadata["join"]
        if join is not None:
            whole[field.name] = None if values[0] is None else join(values)
    return type(first)(**whole)


def rows(whole: Part, index_B: Tensor) -> Part:
    """Return the rows ``index_B`` (int64) of every tensor of rows; other fields stay as they are."""
    tensors = {
        field.name: getattr(whole, field.name).index_select(letters.index("B"), index_B)
        for field in fields(whole)  # type: ignore[arg-type]
        if (letters := dimensions_of(field)) and getattr(whole, field.name) is not None
    }
    return replace(whole, **tensors)  # type: ignore[type-var]


def _concatenated(values: Sequence[Tensor], dim: int) -> Tensor:
    return values[0].detach() if len(values) == 1 else torch.cat([each.detach() for each in values], dim)

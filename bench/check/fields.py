"""The fields of an algorithm's classes against the numbers in its YAML: each is in both, so no number is hidden."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from steadymoe.algorithms import class_of, meant
from steadymoe.bench.support.findings import Fails

SECTIONS = ("loss", "advantage")


def check(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """How many fields each section has. Raises Fails for a key that is no field, and for a field that is no key."""
    faults = [fault for name, numbers in sections.items() for fault in _faults(numbers, name)]
    if faults:
        raise Fails("; ".join(faults))
    told = (f"{_count(numbers)} of the {name}" for name, numbers in sections.items())
    return f"every field has its number in the YAML: {', '.join(told)}"


def known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """A section without the keys that are no fields of its class. Raises ValueError for a class that is not found."""
    names = [*_names(numbers), "_target_"]
    return {
        key: known(value) if isinstance(value, Mapping) else value for key, value in numbers.items() if key in names
    }


def _faults(numbers: Mapping[str, Any], place: str) -> Iterator[str]:
    """What is in one of the two alone, here and in the classes inside."""
    names, cls = _names(numbers), class_of(numbers).__name__
    for key, value in numbers.items():
        if key not in (*names, "_target_"):
            yield f"the YAML has {place}.{key}, and {cls} has no such field: {meant(key, names)}"
        elif isinstance(value, Mapping):
            yield from _faults(value, f"{place}.{key}")
    hidden = [name for name in names if name not in numbers]
    if hidden:
        yield f"{cls} has fields without a number in the YAML: {', '.join(f'{place}.{name}' for name in hidden)}"


def _count(numbers: Mapping[str, Any]) -> int:
    return sum(_count(value) if isinstance(value, Mapping) else key != "_target_" for key, value in numbers.items())


def _names(numbers: Mapping[str, Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(class_of(numbers)) if field.init]

"""The identity of a run: the config fields that change its numbers, their hash, and the name of its folder."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

# Fields that change nothing that a run records. They are no axis of its folder and no part of its hash.
NO_NUMBERS = ("experiment_name", "results_dir", "checkpoint_every", "checkpoint_keep", "retry", "log")

# Config groups, each with its default choice, which switches the group off. Any other choice is an axis of the folder.
OFF = {"advantage": None, "correction": "off", "engine": "exact", "optimizer": "adamw", "routing": "off"}

_LONGEST_AXES = 120
# File systems take names of 255 bytes. The names of an experiment's figures, and of half-written files, are longer than
# the experiment's own name and need the rest.
LONGEST_NAME = 180
_NAME = re.compile(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]*")


def is_name(text: str) -> bool:
    """Return whether ``text`` can be a part of a run's folder: letters, digits, ``._-@``, no ``.`` first."""
    return _NAME.fullmatch(text) is not None and len(text) <= LONGEST_NAME


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys to dotted ones; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def of_classes(config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """Return a config with ``change`` made to each section of a class: loss, advantage, correction, engine."""

    def changed(group: Any, keys: Iterable[str]) -> Any:
        if not isinstance(group, Mapping):  # refused by the schema
            return group
        sections = {key: group[key] for key in keys if isinstance(group.get(key), dict) and "_target_" in group[key]}
        return {**group, **{key: change(section) for key, section in sections.items()}}

    of_algorithm = changed(config.get("algorithm"), ("loss", "advantage"))  # another trainer's config may have none
    return changed({**config, "algorithm": of_algorithm}, ("advantage", "correction", "engine"))


def axes(flat: Mapping[str, Any], reference: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """Return every override that differs from the named configs, and every group of ``choices`` that is not off.

    ``flat`` is a config by dotted keys, ``reference`` its named configs as they stand.
    """
    keys = [key for key in flat if key not in (*NO_NUMBERS, "seed")]
    changed = {key: flat[key] for key in keys if key not in reference or reference[key] != flat[key]}
    changed |= {group: choices[group] for group, off in OFF.items() if choices.get(group) != off}
    return changed


def config_hash(config: Mapping[str, Any]) -> str:
    """Return 16 hex digits over everything that changes numbers; files count by their content, not their place.

    Fields at the default of the class that a config names do not count (``algorithms.minimal``).
    """
    from steadymoe.algorithms import minimal  # imports torch

    numbers = _hashed(of_classes(config, minimal))
    if config["cold_start"]["path"] is not None:
        weights = Path(config["cold_start"]["path"]).read_bytes()
        numbers["cold_start.path"] = hashlib.sha256(weights).hexdigest()
    if "path" in config["model"]:
        from steadymoe.models import pretrained  # transformers is imported for this alone

        numbers["model.path"] = pretrained.digest(config["model"]["path"])
    return digest(numbers)[:16]


def settings_hash(config: Mapping[str, Any], swept: Container[str]) -> str:
    """Return a hash of the fields that all runs of a sweep share: no seed, ``swept`` field or named config.

    The optimizer's fields count, as they did when there was only AdamW, unless optimizers are compared.
    """
    named = ("algorithm.", "model.", "task.", *(f"{group}." for group in OFF if group != "optimizer" or group in swept))
    numbers = _hashed(config)
    shared = {k: v for k, v in numbers.items() if not k.startswith(named) and k != "seed" and k not in swept}
    return digest(shared)[:16]


def _hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    from steadymoe.bench.schema import is_added  # pydantic, which `steadymoe status` need not wait for

    return {key: value for key, value in flatten(config).items() if key not in NO_NUMBERS and not is_added(key, value)}


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, 64 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def axes_name(axes: Mapping[str, Any]) -> str:
    """Overrides as one folder name: sorted, in harmless characters; beyond 120 characters its end is a hash."""
    name = ",".join(f"{key}={axes[key]}" for key in sorted(axes))
    harmless = re.sub(r"[^A-Za-z0-9._=,+-]", "-", name)
    if harmless == name and len(name) <= _LONGEST_AXES:
        return name
    return f"{harmless[: _LONGEST_AXES - 9]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def shortener(among: Iterable[Any]) -> Callable[[Any], str]:
    """Return the function from each of the values ``among`` to its label.

    A path is shortened to as few of its last parts as tell it from the other paths in ``among``, without
    ``.safetensors``. A last part of 16 hex digits or more is cut to eight, if eight tell it from the others.
    """
    texts = {value for value in among if isinstance(value, str) and PurePosixPath(value).parts}
    lengths = {text: len(PurePosixPath(text).parts) for text in texts if "/" in text}
    labels: dict[str, str] = {}
    for count in range(1, max(lengths.values(), default=0) + 1):
        for cut in (8, None):
            tails = {text: _tail(text, count, cut) for text in texts}
            times = Counter(tails.values())
            for text, length in lengths.items():
                if count <= length and times[tails[text]] == 1:
                    labels.setdefault(text, tails[text])
    return lambda value: labels.get(str(value), str(value))


def _tail(path: str, count: int, cut: int | None) -> str:
    """Return the last ``count`` parts of a path; if the last part is a hash, only its first ``cut`` digits."""
    *before, last = PurePosixPath(path).parts[-count:]
    last = last.removesuffix(".safetensors")
    return "/".join([*before, last[:cut] if re.fullmatch("[0-9a-f]{16,}", last) else last])


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the fields in which two configs differ and that change numbers, as ``key: old -> new``, in one line."""
    before, after = flatten(old), flatten(new)
    keys = [key for key in sorted(before | after) if key not in NO_NUMBERS]
    values = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in keys]
    return ", ".join(f"{key}: {then} -> {now}" for key, then, now in values if then != now)

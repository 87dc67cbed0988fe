"""What makes a run the run it is: the numbers that count, their hashes, and the name of its folder."""

import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

# What changes nothing that a run records: neither an axis of its folder nor a part of its hash.
NO_NUMBERS = ("experiment_name", "results_dir", "checkpoint_every", "retry", "log", "savings.reuse_first")

# Fields added after the first release, with the value at which a run is what it was before the field
# existed ({"routing.replay": "off"}, say): at that value they leave the hashes of older runs as they were.
# The thresholds of a collapse change no recorded number, only what the end of a run is called.
NEUTRAL: dict[str, Any] = {
    "experts": "grouped_mm",
    "measure": "all",
    "probe.every": 1,
    "savings.share_prompts": False,
    "savings.trim_padding": False,
    "savings.skip_silent": False,
    "savings.drop_finished": False,
    "savings.sampler_as_old": None,
    "rollout.minibatch_prompts": None,
    "total_updates": None,
    "algorithm.updates_per_rollout": None,
    "optimizer.router_factor": 1.0,
    "cold_start.router_factor": 1.0,
    "cold_start.aux_loss": 0.0,
    "cold_start.z_loss": 0.0,
    "engine.relative": False,
    "collapse.window_updates": 80,
    "collapse.patience_updates": 160,
    "collapse.entropy_fraction": 0.05,
    "collapse.grad_norm_factor": 100.0,
    "collapse.solved_reward": 0.9,
}

# Fields that are gone. In the hash of every run each still has the value that recorded runs have, so that these are
# found again. A collapse was once counted in rollouts; the savings changed no number but for rounding.
REMOVED: dict[str, Any] = {
    "collapse.window": 5,
    "collapse.patience": 10,
    "savings.trim_padding": True,
    "savings.skip_silent": True,
    "savings.drop_finished": True,
}

# Numbers that follow from updates_per_rollout where the second field is given; then that one counts, in their place.
IMPLIED = {"rollout.prompts": "rollout.minibatch_prompts", "steps": "total_updates"}

# Config groups that are switched off unless asked for: a choice other than this is an axis of the folder.
OFF = {"advantage": None, "correction": "none", "engine": "exact", "routing": "off"}

_LONGEST_AXES = 120
# File systems take names of 255 bytes; the rest is for the names of an experiment's figures, and of files half written.
LONGEST_NAME = 180
_NAME = re.compile(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]*")


def is_name(text: str) -> bool:
    """Whether ``text`` can be a part of a run's folder: letters, digits, ``.``, ``_``, ``-``, ``@``, no ``.`` first."""
    return _NAME.fullmatch(text) is not None and len(text) <= LONGEST_NAME


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys to dotted ones; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def is_neutral(key: str, value: Any) -> bool:
    """Whether the field ``key`` has the value at which a run is what it was before the field existed."""
    return key in NEUTRAL and bool(NEUTRAL[key] == value)


def implied(config: Mapping[str, Any]) -> list[str]:
    """The numbers that ``compose`` filled in; a config older than their fields has none."""
    flat = flatten(config)
    return [key for key, given in IMPLIED.items() if flat.get(given) is not None]


def config_hash(config: Mapping[str, Any], neutral: Mapping[str, Any] | None = None) -> str:
    """16 hex digits over everything that changes numbers; fields at their neutral value leave it unchanged."""
    return _digest(_numbers(config, NEUTRAL if neutral is None else neutral))


def settings_hash(config: Mapping[str, Any], swept: Container[str]) -> str:
    """A hash of what runs of one sweep share: all but seed, what is ``swept`` and what the named configs hold."""
    named = ("algorithm.", "model.", "task.", *(f"{group}." for group in OFF))
    left_out = ("seed", *NO_NUMBERS, *implied(config))
    numbers = {k: v for k, v in _with_removed(config).items() if not k.startswith(named) and k not in left_out}
    return _digest({k: v for k, v in numbers.items() if k not in swept and not is_neutral(k, v)})


def _numbers(config: Mapping[str, Any], neutral: Mapping[str, Any]) -> dict[str, Any]:
    """The flattened config without what changes no number or is implied, and without fields at their neutral value."""
    left_out = (*NO_NUMBERS, *implied(config))
    numbers = {
        key: value
        for key, value in _with_removed(config).items()
        if key not in left_out and not (key in neutral and neutral[key] == value)
    }
    if config["cold_start"]["path"] is not None:  # what stands in the file counts, not where the file is
        weights = Path(config["cold_start"]["path"]).read_bytes()
        numbers["cold_start.path"] = hashlib.sha256(weights).hexdigest()
    if "path" in config["model"]:
        from steadymoe.models import pretrained  # transformers is imported for this alone

        numbers["model.path"] = pretrained.digest(config["model"]["path"])
    return numbers


def _with_removed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flattened config with the ``REMOVED`` fields of the groups that it has."""
    return {key: value for key, value in REMOVED.items() if key.partition(".")[0] in config} | flatten(config)


def _digest(numbers: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def axes_name(axes: Mapping[str, Any]) -> str:
    """Overrides as one folder name: sorted, of harmless characters, hashed beyond 120 of them; "" for none."""
    name = ",".join(f"{key}={axes[key]}" for key in sorted(axes))
    harmless = re.sub(r"[^A-Za-z0-9._=,+-]", "-", name)
    if harmless == name and len(name) <= _LONGEST_AXES:
        return name
    return f"{harmless[: _LONGEST_AXES - 9]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def short(value: Any, among: Iterable[Any]) -> str:
    """A value as a label shows it: of a path as few last parts as tell it from the other paths ``among``, without
    ``.safetensors``; of a name of 16 hex digits or more the first eight, where they do."""
    if not isinstance(value, str) or "/" not in value:
        return str(value)
    others = {other for other in among if isinstance(other, str) and other != value}
    parts = PurePosixPath(value).parts
    for count in range(1, len(parts) + 1):
        for cut in (8, None):
            if all(_tail(other, count, cut) != _tail(value, count, cut) for other in others):
                return _tail(value, count, cut)
    return value


def _tail(path: str, count: int, cut: int | None) -> str:
    """The last ``count`` parts of a path; a last part that is a hash alone is cut."""
    *before, last = PurePosixPath(path).parts[-count:]
    last = last.removesuffix(".safetensors")
    return "/".join([*before, last[:cut] if re.fullmatch("[0-9a-f]{16,}", last) else last])


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The numbers in which two configs differ, as ``key: old -> new``, in one line."""
    before, after = _with_removed(old), _with_removed(new)
    keys = [key for key in sorted(before | after) if before.get(key, "absent") != after.get(key, "absent")]
    return ", ".join(
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}" for key in keys if key not in NO_NUMBERS
    )

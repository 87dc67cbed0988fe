"""The names in the configs: what a named config holds, and what could have been meant by a name that none holds."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from steadymoe.algorithms import class_of, meant
from steadymoe.bench.config.identity import flatten
from steadymoe.bench.config.validate import ConfigError

CONF = Path(__file__).parents[2] / "conf"

_EXTRAS = {"submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray"}


def plain_values(composed: DictConfig) -> dict[str, Any]:
    """Our part of a composed config, without Hydra's own, as plain values."""
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    return OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


@functools.cache
def _composed(words: tuple[str, ...]) -> dict[str, Any]:
    """The named configs as they stand, without overrides."""
    return plain_values(hydra.compose("config", list(words)))


def reference_of(words: tuple[str, ...]) -> dict[str, Any]:
    """The named configs as they stand, flattened: dotted key → value."""
    return flatten(_composed(words))


@contextmanager
def errors_in_one_line(words: Sequence[str]) -> Iterator[None]:
    """Hydra's errors, a dozen lines each, as one ConfigError line that names the choices."""
    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and name in _EXTRAS:
            raise ConfigError(f"{group}={name} needs its package: pip install 'steadymoe[{_EXTRAS[name]}]'") from error
        raise ConfigError(f"there is no {group} {name!r}; choose from {', '.join(error.options or [])}") from error
    except OverrideParseException as error:
        raise ConfigError(f"cannot read {error.override!r} as key=value") from error
    except (HydraException, OmegaConfBaseException, ValueError, OverflowError) as error:
        message = " ".join(str(error).split())
        unknown = re.search(r"Could not override '([^']+)'", message)
        if unknown is None:
            raise ConfigError(message) from error
        raise ConfigError(f"there is no {unknown[1]!r} in the config; {_choices(unknown[1], words)}") from error


def _choices(unknown: str, words: Sequence[str]) -> str:
    """What could have been meant by a key that does not exist: its siblings, or the words most like it."""
    if unknown.startswith("hydra."):
        return "see `steadymoe run --info config` for Hydra's own settings"
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    named = (*groups, "hydra.searchpath")
    keys = list(reference_of(tuple(w for w in words if w.partition("=")[0] in named and "," not in w)))
    parent = unknown.rpartition(".")[0]
    siblings = [key for key in keys if parent and key.startswith(f"{parent}.") and not key.endswith("_target_")]
    if parent.startswith("algorithm.loss"):
        return _of_loss(unknown, words)
    if siblings:
        others = "; + adds a field that the YAML leaves out" if parent == "model.config" else ""
        return f"choose from {', '.join(siblings)}{others}"
    top = sorted({key.partition(".")[0] for key in keys} | set(groups))
    near = difflib.get_close_matches(unknown, sorted({*keys, *top}), n=3)
    return f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(top)}"


def _of_loss(unknown: str, words: Sequence[str]) -> str:
    """What could have been meant by a field that the YAML of a loss, or of its host, does not have."""
    parent, _, name = unknown.rpartition(".")
    named = [word for word in words if word.partition("=")[0] in ("algorithm", "hydra.searchpath")]
    swept = [word for word in named if word.startswith("algorithm=") and set(word) & set(",(")]
    numbers: Any = _composed(tuple(word for word in named if word not in swept))
    for part in parent.split("."):
        numbers = numbers.get(part, {})
    known = [field.name for field in dataclasses.fields(class_of(numbers))]
    return f"+ adds a field that the YAML leaves out: +{unknown}" if name in known else meant(name, known)

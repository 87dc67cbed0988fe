"""The provenance of a run: the code of its algorithm, the training code, the libraries, the machine."""

import functools
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from steadymoe.bench.runs.identity import flatten
from steadymoe.bench.support import source
from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.support.source import revision

# Raise it by hand when numbers change that training records of a config and seed: runs of before are then "made by
# other training code", and are not mixed with new ones. tests/runs/test_provenance.py notices when that may have
# happened.
TRAINING_VERSION = 4

# What any loss goes through, whatever its own file imports.
_EVERY_LOSS = [source.SUITE / "algorithms" / f"{name}.py" for name in ("batch", "loss", "objective", "ops", "parts")]


_Hashes = dict[tuple[frozenset[str], frozenset[str]], str | None]
# Within ``unchanging``: names of modules → what ``code_hash`` returns.
_known: _Hashes | None = None
# The same of the code that this process has imported, or is about to.
_imported: _Hashes = {}


@contextmanager
def unchanging() -> Iterator[None]:
    """Take the code on disk as unchanging until the end of the context: code that many runs share is read once."""
    global _known
    before, _known = _known, {}
    try:
        yield
    finally:
        _known = before


@dataclass(frozen=True)
class Difference:
    """The differences between the provenance of a recorded run and of the same run today; None means equal."""

    code: str | None
    """The other code that made the run: "other training code (version 1; now 2)"."""
    unknown: str | None
    """Why the code cannot be compared; None if it can."""
    libraries: str | None
    """The libraries that made the run and have another version here: "torch 2.11.0"."""

    @property
    def stale(self) -> str | None:
        """Return why the run is stale; None if it is not, or if that is unknown."""
        reasons = [f"made by {self.code}"] if self.code else []
        reasons += [f"made with {self.libraries}"] if self.libraries else []
        return ", ".join(reasons) or None


def difference(facts: Mapping[str, Any], imported: bool = False) -> Difference:
    """Return how today's code and libraries differ from the recorded ones; ``facts`` is a run's ``run.json``.

    Modules that the facts name are found and read, and never imported; ``imported`` as in ``code_hash``. The code of
    another trainer is not at hand.
    """
    if facts.get("origin"):
        return Difference(None, f"made by another trainer, {facts['origin']}", None)
    config, code, unknown = facts["config"], None, None
    if not facts["algorithm_code"]:
        unknown = "its code was not found"
    elif (now := code_hash(config, imported)) is None:
        unknown = "its code is missing; set STEADYMOE_PATH to the folder of your own code"
    elif facts["training_version"] != TRAINING_VERSION:
        code = f"other training code (version {facts['training_version']}; now {TRAINING_VERSION})"
    elif now != facts["algorithm_code"]:
        code = "other code of its algorithm, task or engine"
    then = facts["versions"]
    other = [
        f"{name} {then.get(name)}" for name, here in versions(config.get("experts")).items() if then.get(name) != here
    ]
    return Difference(code, unknown, ", ".join(other) or None)


def code_hash(config: Mapping[str, Any], imported: bool = False) -> str | None:
    """Return a hash of the code that users change: loss, advantage, correction, their own tasks and engines.

    The hash covers the classes' files and the local modules that they import, comments too; imports from installed
    packages do not count. None if a class's file is missing or cannot be read. With ``imported`` it is of the code that
    this process runs: of files as they were when first asked for so, whatever is on disk by now.
    """
    losses = modules_of({part: config.get(part) for part in ("algorithm", "advantage", "correction")})
    others = modules_of(config) - losses
    hashes = _imported if imported else {} if _known is None else _known
    key = (frozenset(losses), frozenset(others))
    if key not in hashes:
        hashes[key] = None
        with suppress(ValueError, OSError):
            if (files := source.reachable([*losses, *filter(_is_users, others)], _counts)) is not None:
                hashes[key] = source.digest([*files.values(), *_EVERY_LOSS], first=imported)
    return hashes[key]


def refuse_edited(plain: Mapping[str, Any]) -> None:
    """Raise ConfigError if code that a config names has changed on disk since this process imported it."""
    if code_hash(plain, imported=True) != code_hash(plain):
        loss = plain["algorithm"]["loss"]["_target_"]
        raise ConfigError(
            f"code of a run of {loss} has changed since this process imported it; start Python again to run it"
        )


def versions(experts: str | None) -> dict[str, str]:
    """Return the library versions of a run with these ``experts``; it resumes only with the same versions."""
    packages = ["steadymoe", "torch", "transformers", "tokenizers", "numpy", "hydra-core"]
    packages += ["triton", "megablocks"] if experts == "megablocks" else []
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def facts(plain: Mapping[str, Any], experts: str | None, device: str, threads: int) -> dict[str, Any]:
    """Return what every file of facts records of its origin; ``plain`` is the config as plain values."""
    return {
        "algorithm_code": code_hash(plain, imported=True) or "",
        "training_version": TRAINING_VERSION,
        "versions": versions(experts),
        "revision": revision(),
        "machine": machine(device, threads),
        "config": plain,
    }


@functools.cache
def processor() -> str:
    """Return the name of this machine's processor."""
    facts = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", facts.read_text(), re.MULTILINE) if facts.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()


def machine(device: str, threads: int) -> dict[str, Any]:
    """Return the facts of this machine; its GPU where ``device`` is cuda."""
    facts = {"system": platform.system(), "cpu": processor(), "cores": os.cpu_count(), "threads": threads}
    if device == "cuda":
        import torch  # seconds, which `steadymoe status` need not wait

        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a foreign run's back end
        return "absent"


def modules_of(config: Mapping[str, Any]) -> set[str]:
    """Return the modules of the classes that a config names."""
    return {str(value).rpartition(".")[0] for key, value in flatten(config).items() if key.endswith("_target_")}


def _is_users(module: str) -> bool:
    """Return whether a module is neither the suite's nor an installed package's; one without a file counts."""
    file = source.find(module)
    return file is None or not (source.is_of_suite(file) or source.is_installed(file))


def _counts(module: str, file: Path) -> bool:
    """Return whether an import of a loss is part of its hash: users' code and the suite's algorithms."""
    if source.is_of_suite(file):
        return source.is_of_suite(file, "algorithms") and module != "steadymoe.algorithms"
    return not source.is_installed(file)  # the recorded versions identify an installed package

"""The standard ``steadymoe-1``: the parts of a score, and their recorded numbers.

The numbers of a part stand in ``conf/experiment/standard_<part>.yaml`` and are frozen: a part with other numbers is
another version, and scores of two versions are never mixed (``Baselines.refuse_other_settings``). What was recorded
comes with the package, in ``steadymoe-1/``; ``reference`` writes it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.runs import identity
from steadymoe.bench.runs.compose import ConfigError
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.score import arms
from steadymoe.bench.score.recorded import Recorded
from steadymoe.bench.statistics.estimates import Bounds

VERSION = "steadymoe-1"
# Algorithms that run on the scorer's machine too, so that differences are paired by seed, with their labels.
ANCHORS = {"grpo": "GRPO", "gspo": "GSPO"}
FROZEN = ("algorithm=grpo", "optimizer.learning_rate=0.0")
FOLDER = Path(__file__).parent / VERSION
OUTCOMES, METADATA = "outcomes.parquet", "made.json"


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a score."""

    name: str
    question: str
    outcome: str
    """The number that decides the part."""
    one: str
    """What has an outcome: a ``run`` or an ``audit``."""
    seeds: tuple[int, ...]
    quick_seeds: tuple[int, ...]
    measure: Callable[[Recorded, Any], pd.Series]
    """Outcome by seed of an arm: an ``Arm`` of runs, an ``Audited`` of audits."""
    source: str
    """The experiment of the reference study that has the anchors."""
    bounds: Bounds | None = None
    """The range of the outcome; None if it is unbounded."""
    overrides: tuple[str, ...] = ()
    """Further overrides; none in the standard."""

    @property
    def difference_bounds(self) -> Bounds | None:
        """The range of a difference of two outcomes."""
        return None if self.bounds is None else (self.bounds[0] - self.bounds[1], self.bounds[1] - self.bounds[0])

    @property
    def experiment(self) -> str:
        """The file of ``conf/experiment`` with its numbers."""
        return f"standard_{self.name}"

    @property
    def folder(self) -> str:
        """The experiment name of its runs."""
        return f"{VERSION}-{self.name}"


STABILITY = Part(
    "stability",
    "how much is learned on stale data, sixteen updates on one rollout",
    "mean reward",
    "run",
    seeds=tuple(range(10)),
    quick_seeds=(0, 1, 2),
    measure=Recorded.mean_reward,
    source="study",
    bounds=(0.0, 1.0),
)
GRADIENT = Part(
    "gradient",
    "how much of a mini-batch's gradient points where fresh samples point, in units of its noise",
    "usefulness",
    "audit",
    seeds=tuple(range(305, 315)),
    quick_seeds=(305,),
    measure=lambda recorded, loss: recorded.gradient(loss, "usefulness", arms.DRIFT),
    source=f"{VERSION}-gradient",
)
PARTS = (STABILITY, GRADIENT)


def changed_setting(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return the first field fixed by the standard that two configs differ in, as ``key: theirs -> ours``, or None.

    An algorithm chooses its own section of the config, except ``algorithm.sampling``: dynamic sampling draws more
    rollouts for the same number of updates.
    """
    before, after = identity.flatten(theirs), identity.flatten(ours)
    for key in before | after:
        fixed = not key.startswith("algorithm.") or key.startswith("algorithm.sampling.")
        if fixed and identity.changes_numbers(key) and before.get(key) != after.get(key):
            return f"{key}: {before.get(key)} -> {after.get(key)}"
    return None


@dataclass(frozen=True)
class Baselines:
    """The recorded numbers of the standard."""

    outcomes: pd.DataFrame
    """part, arm, algorithm, seed, value, start and tokens (nan where there are none)."""
    metadata: Mapping[str, Any]
    """Part → hashes by name and seed, minutes, machine, revision, versions."""

    def of(self, part: Part) -> pd.DataFrame:
        """Return the outcomes of one part."""
        return self.outcomes[self.outcomes["part"] == part.name]

    def refuse_other_settings(self, part: Part, seed: int, hashes: Mapping[str, str]) -> None:
        """Raise ConfigError if a planned config differs from the recorded one: that would be another standard.

        ``hashes`` are of the configs planned at ``seed``: of the anchors' runs by algorithm, or ``audit_hashes``.
        """
        recorded = self.metadata[part.name]["hashes"]
        for name, planned in hashes.items():
            if recorded.get(name, {}).get(str(seed)) != planned:
                raise ConfigError(
                    f"{part.experiment} has other numbers for {name} than {VERSION} was recorded with; a score needs "
                    "the version of steadymoe that has them"
                )


def baselines(folder: Path = FOLDER) -> Baselines:
    """Read the recorded numbers in ``folder``. Raises Damaged if a file is missing or cannot be read."""
    try:
        outcomes = pd.read_parquet(folder / OUTCOMES)
        metadata = json.loads((folder / METADATA).read_text())
        outcomes[["part", "arm", "algorithm", "seed", "value", "start", "tokens"]]
        [(metadata[part.name]["hashes"].items(), float(metadata[part.name]["minutes"])) for part in PARTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} does not hold the numbers of {VERSION}: {' '.join(str(error).split())}") from error
    return Baselines(outcomes, metadata)


def audit_hashes(plain: Mapping[str, Any], losses: Mapping[str, Any]) -> dict[str, str]:
    """Hash an audit without its list of losses, and each loss by its label.

    ``plain`` is an audit's whole config, ``losses`` the sections ``algorithm.loss`` by label. Another loss, or another
    drift, changes no number of the others.
    """
    drawn = {key: plain["audit"][key] for key in ("minibatches", "groups", "router_scale")}
    hashed = {"the audit": [identity.config_hash(plain), drawn], **losses}
    texts = {name: json.dumps(content, sort_keys=True, default=list) for name, content in hashed.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}

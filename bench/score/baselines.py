"""The recorded numbers of the standard, which the wheel carries in ``steadymoe-1/`` (written by ``reference``)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.config import identity
from steadymoe.bench.config.compose import ConfigError
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.score.standard import PARTS, VERSION, Part

FOLDER = Path(__file__).parent / VERSION
OUTCOMES, METADATA = "outcomes.parquet", "made.json"


@dataclass(frozen=True)
class Baselines:
    """The recorded numbers of the standard."""

    outcomes: pd.DataFrame
    """part, arm, algorithm, seed, value, start and tokens (nan where there are none)."""
    metadata: Mapping[str, Any]
    """Part → hashes by name and seed (``refuse_other_settings``), minutes, machine, revision, versions."""

    def of(self, part: Part) -> pd.DataFrame:
        """The outcomes of one part."""
        return self.outcomes[self.outcomes["part"] == part.name]

    def pace(self, part: Part) -> str:
        """How long one run or audit of a part took on the machine of the record."""
        metadata, one = self.metadata[part.name], "run" if part.kind == "runs" else "audit"
        return f"one {one} took {metadata['minutes']} minutes of one core on {metadata['machine']}"


def load(folder: Path = FOLDER) -> Baselines:
    """Read the baselines in ``folder``. Raises Damaged if a file is missing or cannot be read."""
    try:
        outcomes = pd.read_parquet(folder / OUTCOMES)
        metadata = json.loads((folder / METADATA).read_text())
        outcomes[["part", "arm", "algorithm", "seed", "value", "start", "tokens"]]
        [(metadata[part.name]["hashes"].items(), float(metadata[part.name]["minutes"])) for part in PARTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} does not hold the numbers of {VERSION}: {' '.join(str(error).split())}") from error
    return Baselines(outcomes, metadata)


def refuse_other_settings(part: Part, seed: int, hashes: Mapping[str, str], baselines: Baselines) -> None:
    """Raise ConfigError where a planned config is not the recorded one: that would be another standard.

    ``hashes`` are of what is planned at ``seed``, by name: the anchors' runs by algorithm, or ``audit_hashes``.
    """
    known = baselines.metadata[part.name]["hashes"]
    for name, planned in hashes.items():
        if known.get(name, {}).get(str(seed)) != planned:
            raise ConfigError(
                f"{part.experiment} has other numbers for {name} than {VERSION} was recorded with; a score needs "
                "the version of steadymoe that has them"
            )


def audit_hashes(plain: Mapping[str, Any], losses: Mapping[str, Any]) -> dict[str, str]:
    """Hash an audit without its list of losses, and each loss by its label.

    ``plain`` is an audit's whole config, ``losses`` the sections ``algorithm.loss`` by label. Another loss, or another
    drift, changes no number of the others (``audit.request``).
    """
    drawn = {key: plain["audit"][key] for key in ("minibatches", "groups", "router_scale")}
    hashed = {"the audit": [identity.config_hash(plain), drawn], **losses}
    return {name: _digest(content) for name, content in hashed.items()}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()[:16]


def tokens(recorded: Recorded, arm: Arm) -> pd.Series:
    """Return the response tokens sampled by each run of an arm, by seed; nan where they are not recorded."""
    return recorded.tables([arm])["runs"].set_index("seed")["tokens_sampled"].astype(float)

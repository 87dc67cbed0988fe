"""What was recorded for the standard: one number for each run and checkpoint, and the curves of reward.

    python -m steadymoe.bench.score.kept results/reference

writes it from the archives of the reference study to ``bench/score/steadymoe-1/``, which the wheel carries.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.audit import archive as audits
from steadymoe.bench.config import identity
from steadymoe.bench.config.compose import ConfigError
from steadymoe.bench.runs.damage import Damaged
from steadymoe.bench.score.recorded import Arm, NotRun, Recorded
from steadymoe.bench.score.standard import ANCHORS, PARTS, VERSION, Part
from steadymoe.bench.support import atomic_files

FOLDER = Path(__file__).parent / VERSION
_OUTCOMES, _CURVES, _MADE = "outcomes.parquet", "curves.parquet", "made.json"


@dataclass(frozen=True)
class Kept:
    """The recorded numbers of the standard."""

    outcomes: pd.DataFrame
    """part, arm, algorithm, seed, value, start and tokens (nan where there are none)."""
    curves: pd.DataFrame
    """part, arm, seed, update, value: reward over gradient updates."""
    made: Mapping[str, Any]
    """Part → hashes by name and seed (``refuse_other_settings``), minutes, machine, revision, versions."""

    def of(self, part: Part) -> pd.DataFrame:
        """The outcomes of one part."""
        return self.outcomes[self.outcomes["part"] == part.name]

    def anchors(self, part: Part) -> list[str]:
        """The anchors that were recorded at one part."""
        return [name for name in ANCHORS if name in self.made[part.name]["hashes"]]

    def pace(self, part: Part) -> str:
        """How long one run or audit of a part took on the machine of the record."""
        made, one = self.made[part.name], "run" if part.kind == "runs" else "audit"
        return f"where it was recorded ({made['machine']}), one {one} took {made['minutes']} minutes of one core"


def load(folder: Path = FOLDER) -> Kept:
    """What is kept in ``folder``. Raises Damaged if a file is missing or cannot be read."""
    try:
        outcomes, curves = (pd.read_parquet(folder / name) for name in (_OUTCOMES, _CURVES))
        made = json.loads((folder / _MADE).read_text())
        outcomes[["part", "arm", "algorithm", "seed", "value", "start", "tokens"]]
        curves[["part", "arm", "seed", "update", "value"]]
        [(made[part.name]["hashes"].items(), float(made[part.name]["minutes"])) for part in PARTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} does not hold the numbers of {VERSION}: {' '.join(str(error).split())}") from error
    return Kept(outcomes, curves, made)


def refuse_other_settings(part: Part, seed: int, hashes: Mapping[str, str], kept: Kept) -> None:
    """Raise ConfigError where something would be made by another config than the recorded one: another standard.

    ``hashes`` are of what is planned at ``seed``, by name: the anchors' runs by algorithm, or ``audit_hashes``.
    """
    known = kept.made[part.name]["hashes"]
    for name, planned in hashes.items():
        if known.get(name, {}).get(str(seed)) != planned:
            raise ConfigError(
                f"{part.experiment} has other numbers for {name} than {VERSION} was recorded with; a score needs "
                "the version of steadymoe that has them"
            )


def audit_hashes(plain: Mapping[str, Any], losses: Mapping[str, Any]) -> dict[str, str]:
    """What identifies an audit apart from its list of losses, and each loss by its label.

    ``plain`` is an audit's whole config, ``losses`` the sections ``algorithm.loss`` by label. A loss more or less, or
    a drift, changes no number of another one (``audit.request``).
    """
    drawn = {key: plain["audit"][key] for key in ("minibatches", "groups", "router_scale")}
    return {"the audit": _digest([identity.config_hash(plain), drawn])} | {
        label: _digest(loss) for label, loss in losses.items()
    }


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=list).encode()).hexdigest()[:16]


def freeze(results: Path, folder: Path = FOLDER) -> list[Path]:
    """Write what the reference study below ``results`` holds for the standard to ``folder``; return the files.

    Of the standard's seeds alone, and of arms that have run at all of them. Raises NotRun if an anchor has not run.
    """
    study = Recorded(results)
    outcomes, curves, made = [], [], {}
    for part in PARTS:
        for arm in part.recorded:
            try:
                numbers = part.number(study, arm)
            except NotRun:
                if arm.label.casefold() in ANCHORS:
                    raise
                continue
            numbers = numbers[numbers.index.isin(part.seeds)]
            if isinstance(arm, Arm) and set(numbers.index) != set(part.seeds):
                continue  # an arm that is not recorded at every seed is not recorded
            algorithm = arm.algorithm if isinstance(arm, Arm) else arm.loss
            rows = pd.DataFrame({"seed": numbers.index, "value": numbers.to_numpy()})
            for name, of in (("start", study.first), ("tokens", partial(tokens, study))):
                rows[name] = of(arm).reindex(numbers.index).to_numpy() if isinstance(arm, Arm) else float("nan")
            outcomes.append(rows.assign(part=part.name, arm=arm.label, algorithm=algorithm))
            if isinstance(arm, Arm):
                drawn = curve(study, arm)
                curves.append(drawn[drawn["seed"].isin(part.seeds)].assign(part=part.name, arm=arm.label))
        made[part.name] = _facts(results, part)
    tables = {_OUTCOMES: pd.concat(outcomes, ignore_index=True), _CURVES: pd.concat(curves, ignore_index=True)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        atomic_files.write(folder / name, partial(table.to_parquet, index=False, compression="zstd"))
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    atomic_files.write(folder / _MADE, partial(Path.write_text, data=text))
    return [folder / name for name in (*tables, _MADE)]


def tokens(study: Recorded, arm: Arm) -> pd.Series:
    """The response tokens that each run of an arm sampled, by seed; nan where they are not recorded."""
    return study.tables([arm])["runs"].set_index("seed")["tokens_sampled"].astype(float)


def curve(study: Recorded, arm: Arm) -> pd.DataFrame:
    """The reward of every step of an arm's runs: seed, update, value."""
    steps = study.tables([arm])["steps"]
    steps = steps[steps["metric"] == "reward"]
    return pd.DataFrame(
        {
            "seed": steps["seed"].to_numpy(),
            "update": (steps["step"] * steps["updates_per_rollout"]).to_numpy(),
            "value": steps["value"].to_numpy(),
        }
    )


def _facts(results: Path, part: Part) -> dict[str, Any]:
    """What made the numbers of a part: hashes by name and seed, the median minutes of one run or audit, and of the last
    the machine, revision and versions.
    """
    hashes: dict[str, dict[str, str]] = {}
    last: Mapping[Any, Any] | pd.Series
    if part.kind == "audits":
        made = [each for each in audits.load(results, part.source).made if each["config"]["seed"] in part.seeds]
        for each in made:
            losses = {label: loss for label, loss in each["losses"].items() if label in ANCHORS}
            for name, digest in audit_hashes(each["config"], losses).items():
                hashes.setdefault(name, {})[str(each["config"]["seed"])] = digest
        last = made[-1] | {"machine": f"{made[-1]['machine']['cpu']}, {made[-1]['config']['device']}"}
        seconds = pd.Series([each["seconds"] for each in made])
    else:
        anchors = [arm for arm in part.recorded if isinstance(arm, Arm) and arm.label.casefold() in ANCHORS]
        runs = Recorded(results).tables(anchors)["runs"]
        for row in runs.itertuples():
            hashes.setdefault(str(row.algorithm), {})[str(row.seed)] = str(row.config_hash)
        last, seconds = runs.iloc[-1], runs["wall_seconds"]
    facts = {"hashes": hashes, "minutes": round(float(seconds.median()) / 60, 1)}
    return facts | {name: _one(last[name]) for name in ("machine", "revision", "versions")}


def _one(fact: Any) -> str:
    """A fact as one text; an archive of audits holds it as a mapping."""
    return fact if isinstance(fact, str) else json.dumps(fact, sort_keys=True)


if __name__ == "__main__":
    for path in freeze(Path(sys.argv[1])):
        print(f"wrote {path}")

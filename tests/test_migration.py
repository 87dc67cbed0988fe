"""Results from before a config field was added have today's fields and hashes once they are migrated."""

import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench.config import identity
from steadymoe.bench.statistics.collapse import Rule

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
EARLIER = "0123456789abcdef"

spec = importlib.util.spec_from_file_location("migrate", ROOT / "results" / "migrate.py")
assert spec is not None
assert spec.loader is not None
migrate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(migrate)


def before(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as it was before the fields that the migration adds."""
    fields: dict[str, Any] = json.loads(json.dumps(config))
    for key in migrate.ADDED:
        group, _, name = key.rpartition(".")
        del (fields[group] if group else fields)[name]
    return fields


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_runs_get_todays_hash_and_keep_theirs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "recorded" / "results", tmp_path, dirs_exist_ok=True)
    recorded = {path: json.loads(path.read_text()) for path in tmp_path.rglob("run.json")}
    for path, facts in recorded.items():
        changed = {"config": before(facts["config"]), "config_hash": EARLIER, "config_hash_without_seed": EARLIER}
        path.write_text(json.dumps({key: facts[key] for key in facts if key != "recorded_hash"} | changed))
    tables = {path: content for path, content in contents(tmp_path).items() if path.suffix == ".parquet"}
    assert list(migrate.migrate(tmp_path)) == []
    for path, facts in recorded.items():
        assert json.loads(path.read_text()) == facts | {"recorded_hash": EARLIER}
        assert facts["config_hash"] == identity.config_hash(facts["config"])
    once = contents(tmp_path)
    assert tables.items() <= once.items()
    assert list(migrate.migrate(tmp_path)) == []
    assert contents(tmp_path) == once


def test_a_field_that_is_there_keeps_its_value() -> None:
    assert migrate.completed({"probe": {"largest": 8}})["probe"] == {"largest": 8}


def test_an_archive_gets_todays_hash_and_columns_and_keeps_its_own_hash(tmp_path: Path) -> None:
    runs = pd.read_parquet(REFERENCE / "data" / "quickstart" / "runs.parquet")
    assert (runs["config_hash"] == [identity.config_hash(json.loads(text)) for text in runs["config"]]).all()
    path = tmp_path / "data" / "quickstart" / "runs.parquet"
    path.parent.mkdir(parents=True)
    configs = [None, *(json.dumps(before(json.loads(text))) for text in runs["config"][1:])]  # one was not archived
    earlier = runs.assign(config=configs, config_hash=EARLIER, config_without_seed=EARLIER)
    earlier.drop(columns=["recorded_hash", "origin", "collapse_rule"]).to_parquet(path, index=False)
    for _ in range(2):
        assert list(migrate.migrate(tmp_path)) == []
        migrated = pd.read_parquet(path)
        assert set(migrated["recorded_hash"]) == {EARLIER}
        assert migrated["config"].isna().tolist() == [True] + [False] * (len(runs) - 1)
        assert migrated["config_hash"][0] == EARLIER
        todays = runs.assign(recorded_hash=EARLIER, collapse_rule=Rule().text())
        pd.testing.assert_frame_equal(migrated[1:][runs.columns], todays[1:])


def test_audits_get_todays_hash_where_their_command_still_makes_them(tmp_path: Path) -> None:
    kept = json.loads((REFERENCE / "audits" / "clip_atlas" / "audits.json").read_text())
    audits = kept["audits"][:2]
    earlier = [{**each, "config": before(each["config"]), "audit_hash": EARLIER} for each in audits]
    earlier[1]["command"] += " audit.drift=[0,1]"
    for each in earlier:
        del each["recorded_hash"]
    path, alone = tmp_path / "audits" / "clip_atlas" / "audits.json", tmp_path / "audits" / "other" / "audit.json"
    for place, facts in ((path, kept | {"audits": earlier}), (alone, earlier[0])):
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(facts))
    assert list(migrate.migrate(tmp_path)) == []
    expected = [each | {"recorded_hash": EARLIER} for each in audits]
    expected[1] |= {"audit_hash": EARLIER, "command": earlier[1]["command"]}
    assert json.loads(path.read_text()) == kept | {"audits": expected}
    assert json.loads(alone.read_text()) == expected[0]


def test_what_cannot_be_migrated_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    source = next((ROOT / "tests" / "recorded" / "results").rglob("run.json"))
    facts = json.loads(source.read_text())
    facts["config"]["cold_start"]["path"] = "gone.safetensors"
    path = tmp_path / "run.json"
    path.write_text(json.dumps(facts))
    (line,) = migrate.migrate(tmp_path)
    assert line.startswith(f"{path} is left as it is: ")
    assert "gone.safetensors" in line
    assert json.loads(path.read_text()) == facts
    path.write_text(json.dumps(facts | {"origin": "trl 1.16.0"}))  # not a config of the suite's
    assert list(migrate.migrate(tmp_path)) == []

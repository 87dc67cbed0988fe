"""Experiments joined by commas: arms told apart where needed, differences named, bad names refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from fixtures import RECORDED, Said

from steadymoe.bench import results
from steadymoe.bench.report import joined, report_page
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.report.results import Results, bind
from steadymoe.bench.runs import identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two archives of the recorded runs: ``base``, and ``mine`` without gspo."""
    whole = Results.load(RECORDED, "small")
    whole.keep("base", tmp_path)
    whole.of(["grpo", "reinforce"]).keep("mine", tmp_path)
    return tmp_path


def test_shared_arms_are_named_by_experiment(folder: Path) -> None:
    together = results("base,mine", folder)
    both = {f"{arm} ({name})" for arm in ("grpo", "reinforce") for name in ("base", "mine")}
    assert set(together.runs["arm"]) == {"gspo", *both}
    assert together.runs.index.is_unique
    for label in ("base", "mine"):
        alone, ours = Results.load(folder, label), together.where(together.runs["experiment"] == label)
        for name, table in alone.joined.items():
            moved = ours.joined[name].reset_index(drop=True)
            same = [column for column in table if column not in ("run", "arm", "experiment")]
            pd.testing.assert_frame_equal(moved[same], table[same])
            assert (moved["run"].map(ours.runs["seed"]) == table["seed"]).all()
    assert joined.difference(together.runs) == ""


def test_seeds_of_one_config_form_one_arm(folder: Path) -> None:
    base = Results.load(folder, "base")
    first, later = (base.where(is_kept) for is_kept in (base.runs["seed"] == 0, base.runs["seed"] > 0))
    runs = joined.join({"first": first, "later": later}).runs
    assert set(runs["arm"]) == {"grpo", "gspo", "reinforce"}
    assert runs.groupby("arm")["seed"].apply(sorted).tolist() == [[0, 1, 2]] * 3
    changed = replace(later, runs=later.runs.assign(config_without_seed="another"))
    assert "grpo (later)" in set(joined.join({"first": first, "later": changed}).runs["arm"])


def test_differing_settings_are_named_without_algorithms() -> None:
    runs = Results.load(RECORDED, "small").runs
    config = json.loads(runs["config"].iloc[0])
    config["updates_per_rollout"] = 64
    config["task"]["modulus"] = 99
    config["algorithm"]["loss"]["clip_high"] = 0.9
    config["rollout"]["temperature"] = 1.0  # the other runs are of a time before there was the field, at its default
    other = runs.assign(experiment="mine", config=json.dumps(config | {"seed": 77}), model="deep")
    line = joined.difference(pd.concat([runs, other]))
    assert "\n" not in line
    assert "updates_per_rollout 2 (small), 64 (mine)" in line
    assert f"task.modulus {json.loads(runs['config'].iloc[0])['task']['modulus']} (small), 99 (mine)" in line
    assert "model tiny (small), deep (mine)" in line.replace(str(runs["model"].iloc[0]), "tiny")
    assert not any(word in line for word in ("clip_high", "seed ", "77", "temperature", "advantage"))


def test_joined_report_starts_with_the_difference(folder: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"]])  # for time
    runs = pd.read_parquet(folder / "data" / "mine" / "runs.parquet").assign(task="other")
    runs.to_parquet(folder / "data" / "mine" / "runs.parquet", index=False)
    bind(folder / "data" / "mine")
    words = ["--results", str(folder), "--experiment", "base,mine", "--format", "svg"]
    told = ran("report", *words)
    line = next(line for line in told.splitlines() if "differ in more than" in line)
    assert "other (mine)" in line
    assert told.index(line) < told.index("arm  ")
    assert line.replace("&", "&amp;") in (folder / "report.html").read_text()
    assert (folder / "tables" / "base-and-mine-summary.csv").exists()
    assert (folder / "figures" / "base-and-mine-overview.svg").exists()
    assert ran("report", "--figure", "fig02", *words).startswith(line)


def test_experiment_from_another_folder_is_joined(folder: Path) -> None:
    shutil.copytree(folder / "data", folder / "other" / "data")
    places = joined.places(folder, f"base,{folder}/other/mine")
    assert places == {"base": (folder, "base"), "mine": (folder / "other", "mine")}
    places = joined.places(folder, f"mine,{folder}/other/mine")
    assert list(places) == ["mine", f"{folder}/other/mine"]
    assert identity.is_name(joined.name(list(places)))
    assert identity.is_name(joined.name(["a" * 100, "b" * 100]))
    assert joined.name(["../x y", "b"]) == "x-y-and-b"


@pytest.mark.parametrize(
    ("experiment", "more", "said"),
    [
        ("base,mein", (), "there is no experiment 'mein'; choose from base, mine"),
        ("base,", (), "there is no experiment ''"),
        ("base,../data/mine", (), "there is no experiment '../data/mine'"),
        ("base,base", (), "--experiment names 'base' twice"),
        ("base,mine", ("--keep", "kept"), "--keep and --export take one experiment at a time"),
        ("base,mine", ("--arms", "rspo"), "there is no arm 'rspo'; choose from GRPO (base), GRPO (mine)"),
    ],
)
def test_invalid_join_fails_in_one_line(
    experiment: str, more: tuple[str, ...], said: str, folder: Path, refused: Said
) -> None:
    assert said in refused("report", "--results", str(folder), "--experiment", experiment, *more)
    assert [path.name for path in folder.iterdir()] == ["data"]

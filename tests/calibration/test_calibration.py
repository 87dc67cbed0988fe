"""``steadymoe calibrate`` at tiny size: its numbers are a run's own, its files are whole, wrong words touch nothing."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from test_cli import steadymoe
from test_execute import SMALL, planned
from transformers import PreTrainedModel

from steadymoe.bench.calibration import measure, page, readings, request
from steadymoe.bench.calibration.readings import Reading
from steadymoe.bench.calibration.updates import Updates
from steadymoe.bench.measurement import published
from steadymoe.bench.runs import execute
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.routing import routers

FASTER = "optimizer.learning_rate=3e-3"
NAMES = {"calibration.json", "calibration.csv", "calibration.html", "calibration.png"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of one calibration through the command line."""
    results = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert steadymoe(monkeypatch, "calibrate", *SMALL, FASTER, f"results_dir={results}") == 0
    return results


@pytest.fixture
def folder(results: Path) -> Path:
    (folder,) = (results / "calibrations").iterdir()
    return folder


@pytest.fixture
def table(folder: Path) -> pd.DataFrame:
    """The readings, by key and case."""
    facts = json.loads((folder / "calibration.json").read_text())
    return request._table(facts).set_index(["key", "of"]).sort_index()


def trainer_of(results: Path, *words: str) -> Trainer:
    config = planned(results, *words).config
    task, model, _ = execute.at_start(config, lambda *_: None)
    return Trainer(model, task, config)


def updates_of(trainer: Trainer, rollouts: int = 1) -> Updates:
    """The measurements of the first rollouts."""
    updates = Updates(trainer)
    for step in range(1, rollouts + 1):
        rollout, _, _ = trainer.sample(step)
        old, _ = trainer.old_policy(rollout, trainer.minibatches(step), step)
        mask_BT = rollout.sequences.response_mask_BT
        advantages_BT = trainer.advantages(trainer.rewards(rollout, old), mask_BT)
        updates.rollout(step, rollout, old, advantages_BT, lambda _: None)
    return updates


# --- numbers -----------------------------------------------------------------------------------------


def test_changes_ratios_and_clips_are_those_that_a_run_records(results: Path) -> None:
    words = [FASTER, "probe.fraction=1", "algorithm.loss.clip_high=0.27", "updates_per_rollout=4"]
    rows = trainer_of(results, *words).step(1).rows["updates"]
    updates = updates_of(trainer_of(results, *words))
    means = {name: sum(row[name] for row in rows) / 4 for name in ("expert_change_per_update", "clip_fraction", "ess")}
    assert updates.changes.estimate("expert_change", "per update").mean == pytest.approx(
        means["expert_change_per_update"]
    )
    assert means["expert_change_per_update"] > 0
    assert updates.ratios["clip_share", "GRPO"] == pytest.approx([row["clip_fraction"] for row in rows])
    variances = updates.ratios["token_ratio_variance", ""]
    assert variances == pytest.approx([row["token_ratio_variance"] for row in rows])
    assert updates.ratios["ess", ""] == pytest.approx([row["ess"] for row in rows])
    # Before any update there is nothing to see, and the narrow band clips at least what the wide one does.
    assert variances[0] == updates.ratios["clip_share", "GSPO"][0] == 0
    assert updates.ratios["ess", ""][0] == 1
    once = updates.changes.estimate("set_change", "after 1 update")
    assert once.n == 4
    later = updates.changes.estimate("token_change", "after 4 updates").mean
    assert later >= updates.changes.estimate("set_change", "after 4 updates").mean > 0


def test_without_learning_nothing_moves_and_routing_has_no_share(results: Path) -> None:
    found = {
        (each.key, each.of): each.estimate
        for each in updates_of(trainer_of(results, "optimizer.learning_rate=0"), 2).readings()
    }
    still = [key for key in found if key[0] not in ("ess", "routing_share")]
    assert {found[key].mean for key in still} == {0.0}
    assert ("expert_change", "after 2 updates") in still
    assert found["ess", ""].mean == 1
    assert math.isnan(found["routing_share", ""].mean)


def test_routing_has_no_share_in_a_change_of_the_head_and_most_of_a_change_of_choices(results: Path) -> None:
    def share(change: Callable[[PreTrainedModel], object]) -> Estimate:
        """Routing's share where every update makes this change and no other."""
        trainer = trainer_of(results, "optimizer.learning_rate=0")
        update = trainer.learner.update

        def changed(*given: Any, **named: Any) -> Any:
            measured = update(*given, **named)
            with torch.no_grad():
                change(trainer.model)
            return measured

        trainer.learner.update = changed  # type: ignore[method-assign]
        return next(each.estimate for each in updates_of(trainer, 2).readings() if each.key == "routing_share")

    def shuffle(model: PreTrainedModel) -> None:
        for router in routers(model):
            router.weight.copy_(router.weight.roll(1, 0))  # every expert is chosen where its neighbour was

    of_head = share(lambda model: model.model.norm.weight.mul_(1.3))
    assert of_head.mean == pytest.approx(0, abs=1e-5)
    of_choices = share(shuffle)
    assert of_choices.mean > 0.5
    assert of_choices.low < of_choices.mean < of_choices.high
    assert of_choices.n == 4


def test_under_replay_the_share_is_of_the_weights_and_not_of_the_forced_routes(results: Path) -> None:
    replayed = updates_of(trainer_of(results, FASTER, "routing=r3", "optimizer.router_factor=20")).readings()
    share = next(each.estimate for each in replayed if each.key == "routing_share")
    assert math.isfinite(share.mean)
    assert share.mean != 0


def test_the_exact_engine_agrees_and_noise_in_the_routers_disagrees_most(table: pd.DataFrame) -> None:
    means = table["mean"]
    for key in ("set_disagreement", "token_disagreement", "f2"):
        assert means[key, "exact"] == 0
        assert means[key, "router_noise"] >= means[key, "bf16"]
    assert means["kl_k3", "exact"] < 1e-10 < means["kl_k3", "bf16"] < means["kl_k3", "router_noise"]
    assert means["set_disagreement", "router_noise"] > 0.05
    assert means["token_disagreement", "router_noise"] >= means["set_disagreement", "router_noise"]


def test_the_configs_own_engine_is_measured_beside_the_shipped_ones(results: Path) -> None:
    config = planned(results, "engine=router_noise").config
    shipped = list(measure.engines.ENGINES)
    assert list(measure.engines.chosen(config, "router_noise")) == shipped
    louder = replace(config, engine={**config.engine, "strength": 3.0})
    assert list(measure.engines.chosen(louder, "router_noise")) == [*shipped, "router_noise of this config"]
    assert list(measure.engines.chosen(replace(config, engine={"_target_": "mine.Engine"}), "mine"))[-1] == "mine"
    stale = replace(config, engine={"_target_": "steadymoe.models.engine.Stale", "strength": 1.0})
    assert list(measure.engines.chosen(stale, "stale")) == shipped


@pytest.mark.parametrize(
    ("ours", "factor"),
    [(0.1, 1.0), (0.05, 1.0), (0.15, 1.0), (0.005, 0.1), (0.3, 2.0), (0.0, 0.0), (math.nan, math.nan)],
)
def test_a_factor_is_the_distance_from_the_nearer_end(ours: float, factor: float) -> None:
    known = published.beside("expert_change", "per update")
    assert known is not None
    assert known.factor(ours) == pytest.approx(factor, nan_ok=True)


def test_published_ranges_stand_beside_readings_that_there_are() -> None:
    assert {each.key for each in published.PUBLISHED} - set(readings.LABELS) == {
        "ratio_variance_over_dense"
    }  # a gate's
    assert all(0 < each.low <= each.high and each.source for each in published.PUBLISHED)
    assert {each.gate for each in published.PUBLISHED} - {None} == {f"R{number}" for number in range(1, 9)}
    exact, other = published.beside("kl_k3", "exact"), published.beside("kl_k3", "int8")
    assert exact is not None
    assert other is not None
    assert (exact.low, other.gate) == (8.4e-4, "R3")
    assert published.beside("f2", "exact") is None


# --- files and exit codes ----------------------------------------------------------------------------


def test_every_file_is_there_and_holds_the_same_numbers(folder: Path, table: pd.DataFrame) -> None:
    assert {path.name for path in folder.iterdir()} == NAMES
    facts = json.loads((folder / "calibration.json").read_text())
    assert facts["command"].startswith("steadymoe calibrate model=micro")
    assert {"config", "revision", "versions", "machine", "seconds"} <= set(facts)
    assert folder.name == f"micro-chain-{facts['config_hash']}"
    csv = pd.read_csv(folder / "calibration.csv", keep_default_na=False, na_values=[""])
    assert csv["mean"].tolist() == pytest.approx(request._table(facts)["mean"].tolist(), nan_ok=True)
    assert {key for key, _ in table.index} == set(readings.LABELS)
    assert table["n"].min() > 0
    within = table[(table["low"] > table["mean"]) | (table["high"] < table["mean"])]
    assert within.empty
    assert (folder / "calibration.png").read_bytes().startswith(b"\x89PNG")
    web = (folder / "calibration.html").read_text()
    assert web.count("<tr>") > len(table)
    assert not re.search(r"(?:src|href)=\"(?!data:)", web)


def test_the_same_command_shows_what_is_there_and_redo_makes_the_same_again(
    results: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", *SMALL, FASTER, f"results_dir={results}"]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(measure, "calibrate", lambda *_: pytest.fail("measured"))
        assert steadymoe(patched, *words) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"calibrated before: {folder}")
    assert "experts changed, per update" in said.out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert steadymoe(monkeypatch, *words, "--redo") == 0
    assert (folder / "calibration.csv").read_bytes() == before["calibration.csv"]
    said = capsys.readouterr()
    assert "rollout 3: 2 updates" in said.err
    assert f"wrote {folder / 'calibration.json'}" in said.out


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda text: text.replace('"calibration_code": "', '"calibration_code": "x'), "was made by other code"),
        (lambda text: text[: len(text) // 2], "is no whole calibration"),
        (lambda text: "[]", "is no whole calibration"),
    ],
)
def test_what_is_there_and_is_not_of_this_code_is_refused_and_left(
    change: Callable[[str], str],
    answer: str,
    results: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = folder / "calibration.json"
    whole = file.read_text()
    try:
        file.write_text(change(whole))
        assert steadymoe(monkeypatch, "calibrate", *SMALL, FASTER, f"results_dir={results}") == 2
        said = capsys.readouterr()
        assert answer in said.err
        assert "--redo" in said.err
        assert (said.err.count("\n"), said.out) == (1, "")
        assert file.read_text() == change(whole)
    finally:
        file.write_text(whole)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["model=dense_micro"], "calibrate measures routers, and this model is dense"),
        (["seed=0,1"], "calibrate measures one config, and these words name 2: give one value to seed"),
        (["experiment=quickstart", "seed=0"], "these words name 3: give one value to algorithm"),
        (["modle=flat"], "did you mean"),
        (["model=flaat"], "there is no model 'flaat'; did you mean flat, "),
        (["optimizer.learning_rate=fast"], "optimizer.learning_rate must be a number"),
        (["--frob"], "--frob is no flag of steadymoe calibrate; it takes --redo"),
        (["-m", "seed=0"], "-m is no flag"),
        (["model=pretrained"], "model.path"),
        (["start_from=nowhere@3"], "start_from"),
        (["results_dir=/proc/nowhere"], "cannot be written"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_words_are_answered_in_one_line_and_touch_nothing(
    words: list[str],
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "calibrate", lambda *_: pytest.fail("measured"))
    assert steadymoe(monkeypatch, "calibrate", *words) == 2
    said = capsys.readouterr()
    assert answer in said.err
    assert said.err.startswith("steadymoe: ")
    assert (said.err.count("\n"), said.out) == (1, "")
    assert list(tmp_path.iterdir()) == []


def test_help_says_what_it_takes_and_where_its_files_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steadymoe(monkeypatch, "calibrate", "--help") == 0
    assert "calibrations/<model>-<task>-<hash>/; --redo" in capsys.readouterr().out


def test_a_cold_start_that_misses_its_band_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, f"results_dir={tmp_path}", "cold_start.accuracy_low=0.99", "cold_start.max_updates=40"]
    assert steadymoe(monkeypatch, "calibrate", *words) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("steadymoe: the cold start reached accuracy")
    assert list((tmp_path / "calibrations").iterdir()) == []


def test_a_checkpoint_of_ones_own_is_calibrated(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(results)
    trainer.model.save_pretrained(tmp_path / "checkpoint")
    trainer.task.tokenizer.save_pretrained(tmp_path / "checkpoint")
    words = ["model=pretrained", f"model.path={tmp_path / 'checkpoint'}", f"results_dir={tmp_path / 'results'}"]
    small = [word for word in SMALL if not word.startswith("model")]
    assert steadymoe(monkeypatch, "calibrate", *small, *words, "experiment_name=own") == 0
    (folder,) = (tmp_path / "results" / "calibrations").iterdir()
    assert folder.name.startswith("pretrained-chain-")
    assert not (tmp_path / "results" / "cold_starts").exists()


# --- what is shown -----------------------------------------------------------------------------------


def test_numbers_without_bounds_and_hostile_names_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "<script>$x$\n"
    found = [
        Reading("gradient", "noise_scale", Estimate(math.inf, 3.0, math.inf, 5), "prompts"),
        Reading("gradient", "routing_share", Estimate(math.nan, math.nan, math.nan, 0), "mini-batches"),
        Reading("routes", "expert_change", Estimate(0.01, 0.005, 0.02, 5), "prompts", "per update"),
        Reading(readings.ENGINES, "kl_k3", Estimate(0.0, math.nan, math.nan, 5), "prompts", name),
    ]
    table = readings.table(found)
    told = page.text(table)
    assert "∞ [3, ∞]" in told
    assert "0.2 ×" in told
    assert "<script>$x$\\n" in told
    assert (
        request._table(
            {"readings": [{k: request._written(v) for k, v in row.items()} for row in table.to_dict("records")]}
        )["mean"][0]
        == math.inf
    )
    drawn = page.figure(table, name)
    assert {"experts changed, per update", "published"} & {*drawn.numbers["x"], *drawn.numbers["series"]}
    picture = tmp_path / "it.png"
    page.style.save(drawn, picture, "png")
    web = page.html(table, {"name": name, "command": f"steadymoe calibrate {name}"}, picture)
    assert "<script>" not in web
    assert "&lt;script&gt;" in web

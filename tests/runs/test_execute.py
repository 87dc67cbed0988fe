"""Whole runs, small: they repeat to the bit, survive a kill, and are never overwritten silently."""

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hydra.utils import instantiate
from small_runs import (
    PROPORTIONAL,
    SMALL,
    assert_resumes,
    assert_same,
    executed,
    finished,
    interrupt,
    planned,
    sharing_starts,
    tables,
    trainer,
    updated,
)

from steadymoe.algorithms import Batch, LossOutput
from steadymoe.algorithms.objective import Objective
from steadymoe.bench.runs import compose, execute, outcome, record, run_folder
from steadymoe.bench.schema import ColdStartConfig, ConfigError
from steadymoe.bench.training import checkpoint, cold_start, samples
from steadymoe.bench.training.columns import TABLES
from steadymoe.models import build


def test_a_run_records_every_table_and_every_column(whole: compose.Run) -> None:
    facts = run_folder.known(whole.folder)
    assert (facts["status"], facts["config"]) == ("finished", whole.plain)
    assert facts["wall_seconds"] > 0
    assert facts["tokens"] == record.read_table(whole.folder, "steps")["response_tokens"].sum()
    frames = tables(whole.folder)
    assert frames["steps"]["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert frames["updates"][["step", "update"]].to_numpy().tolist() == [[s, u] for s in range(1, 7) for u in (1, 2)]
    assert len(frames["layers"]) == 6 * 3 * 2  # steps, the rollout and two updates, layers
    assert frames["evaluations"].groupby("step").size().to_dict() == {0: 8, 2: 8, 4: 8, 6: 8}
    for name in ("steps", "updates"):  # grpo on a MoE model, without a correction
        empty = {column for column in frames[name] if frames[name][column].isna().all()}
        absent = {"correction_weight", "correction_rejected", "loss_number", "route_prediction_kl"}
        absent |= {"replay_expert_disagreement", "replay_set_disagreement"}  # nothing is replayed
        absent |= {"replay_share", "replay_kept", "routing_lagged"}
        of_steps = {"reference_kl", "eval_accuracy_permuted", "replay_kl", "replay_kl_free", "replay_kl_shifted"}
        assert empty == absent | (of_steps if name == "steps" else set())


def test_a_run_keeps_a_few_of_its_prompts_responses_and_rewards(whole: compose.Run) -> None:
    rows = samples.read(whole.folder)
    assert pd.Series([row["step"] for row in rows]).value_counts().to_dict() == {1: 8, 3: 8, 6: 8}
    task = instantiate(whole.config.task)
    for row in rows:
        assert task.score(row["prompt"], row["response"], row["finished"]) == row["reward"]
    assert len({row["prompt"] for row in rows if row["step"] == 1}) == 4
    assert (whole.folder / "samples.jsonl").stat().st_size < 20_000


def test_columns_agree_with_each_other(whole: compose.Run) -> None:
    frames = tables(whole.folder)
    updates, layers, steps = frames["updates"], frames["layers"], frames["steps"]
    over_layers = layers[layers["update"] > 0].groupby(["step", "update"])["expert_change_rate"].mean()
    np.testing.assert_allclose(over_layers, updates["expert_change_rate"], atol=1e-6)
    np.testing.assert_allclose(updates.groupby("step")["entropy"].mean(), steps["entropy"], atol=1e-12)
    np.testing.assert_allclose(updates.groupby("step")["token_ratio_max"].max(), steps["token_ratio_max"])
    assert steps["token_ratio_histogram"].map(sum).tolist() == steps["response_tokens"].tolist()
    assert (updates["clip_fraction"] == updates["clip_fraction_low"] + updates["clip_fraction_high"]).all()


def test_ratio_is_1_and_routing_unchanged_before_the_first_update(whole: compose.Run) -> None:
    updates = record.read_table(whole.folder, "updates")
    first = updates[updates["update"] == 1]
    assert (first[["token_ratio_mean", "token_ratio_max"]] == 1).all(axis=None)
    assert (first[["token_ratio_variance", "sequence_ratio_variance", "expert_change_rate"]] == 0).all(axis=None)
    later = updates[updates["update"] == 2]
    assert (later["token_ratio_variance"] > 0).all()


def test_the_sampler_and_the_training_forward_agree_in_fp32(whole: compose.Run) -> None:
    steps = record.read_table(whole.folder, "steps")
    assert steps["rollout_logprob_gap_max"].max() < 5e-5
    assert steps["rollout_kl_k3"].abs().max() < 1e-8
    assert steps["rollout_expert_disagreement"].max() == 0


def test_equal_configs_run_bitwise_equal_with_any_cold_start_cache(whole: compose.Run, tmp_path: Path) -> None:
    again = planned(tmp_path)  # `finished` would lend it the cold start
    assert execute.execute(again) == "finished"
    assert_same(whole.folder, again.folder)
    cached = finished(tmp_path, "experiment_name=cached")
    assert_same(whole.folder, cached.folder)


def test_run_killed_at_a_random_step_resumes_to_the_same_numbers(whole: compose.Run, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "steadymoe.bench.cli", "run", *SMALL, f"results_dir={tmp_path}"]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    made = planned(tmp_path)
    wanted = int(np.random.default_rng(0).integers(1, 6))
    deadline = time.monotonic() + 60
    while len(record.read_table(made.folder, "steps") if made.folder.exists() else []) < wanted:
        assert child.poll() in (None, 0), "the run failed before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert len(record.read_table(made.folder, "steps")) >= wanted
    assert run_folder.read_state(made.folder).status in ("interrupted", "finished")
    assert execute.execute(made) == "finished"
    assert_same(whole.folder, made.folder)
    left = {path.name for path in made.folder.iterdir() if not path.name.startswith(".")}
    assert left == {"run.json", "samples.jsonl", *(f"{name}.parquet" for name in TABLES)}


def test_run_of_a_loss_that_draws_random_numbers_repeats_and_resumes(tmp_path: Path) -> None:
    word = "algorithm.loss._target_=faulty_losses.TokenDropout"
    before = random.getstate(), torch.get_rng_state()
    whole = assert_resumes(tmp_path, 4, "updates=8", word)
    assert (random.getstate(), torch.get_rng_state().tolist()) == (before[0], before[1].tolist()), "restored"
    again = finished(tmp_path / "again", "updates=8", word)
    assert_same(whole.folder, again.folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("InPlace", "InPlace.surrogate changed the batch in place: advantages_BT"),
        ("Bare", "Bare.surrogate must return a Surrogate of a tensor"),
        ("InPlaceOfTheGraph", "the gradient of InPlaceOfTheGraph failed"),
        ("OneValueARow", "OneValueARow.surrogate must return a value for each token"),
    ],
)
def test_fault_of_a_loss_names_its_file_and_line(tmp_path: Path, name: str, words: str) -> None:
    made = planned(tmp_path, f"algorithm.loss._target_=faulty_losses.{name}", "updates=2")
    with sharing_starts(tmp_path):
        assert execute.execute(made) == "failed"
    error = run_folder.known(made.folder)["error"].splitlines()[-1]
    assert words in error
    assert re.search(r"faulty_losses\.py, line \d+", error)


def test_rows_past_the_checkpoint_and_torn_rows_are_dropped_on_resume(whole: compose.Run, tmp_path: Path) -> None:
    made = planned(tmp_path)
    interrupt(made, 6)
    assert run_folder.read_state(made.folder).status == "interrupted"
    assert checkpoint.step_of(made.folder / "checkpoint.safetensors") == 4
    assert len(record.read_table(made.folder, "steps")) == 5
    with (made.folder / "updates.jsonl").open("a") as file:
        file.write('{"step": 6, "update": 1, "lo')
    assert execute.execute(made) == "finished"
    assert_same(whole.folder, made.folder)


def test_a_checkpoint_of_other_library_versions_is_not_resumed(
    whole: compose.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(tmp_path)
    step = execute.Trainer.step
    monkeypatch.setattr(execute.Trainer, "step", lambda self, n: step(self, n) if n < 4 else 1 / 0)
    assert executed(made) == "failed"
    facts = json.loads((made.folder / "run.json").read_text())
    assert "ZeroDivisionError" in facts["error"]
    facts["versions"]["torch"] = "0.1"
    (made.folder / "run.json").write_text(json.dumps(facts))
    monkeypatch.setattr(execute.Trainer, "step", lambda self, n: step(self, n) if n < 2 else 1 / 0)
    assert execute.execute(made) == "failed"  # before its first checkpoint: the old one must be gone by now
    assert "restarted" in json.loads((made.folder / "run.json").read_text())
    seen: list[int] = []
    monkeypatch.setattr(execute.Trainer, "step", lambda self, n: seen.append(n) or step(self, n))
    assert execute.execute(made) == "finished"
    assert seen == [1, 2, 3, 4, 5, 6]
    assert_same(whole.folder, made.folder)


def test_finished_run_is_skipped_and_another_config_is_refused(
    whole: compose.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, look = {path: path.stat().st_mtime_ns for path in whole.folder.glob("*.*")}, run_folder.read_state

    def under_the_lock(folder: Path) -> run_folder.State:
        assert run_folder.is_held(folder), "another process may end the run after this look"
        return look(folder)

    monkeypatch.setattr(execute, "_train", lambda *_: pytest.fail("trained again"))
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "read_state", under_the_lock)
        assert execute.execute(whole) == "finished"
    other = replace(whole, config=replace(whole.config, updates=14), config_hash="0" * 16)
    with pytest.raises(ConfigError, match="updates: 12 -> 14"):
        execute.execute(other)
    assert {path: path.stat().st_mtime_ns for path in whole.folder.glob("*.*")} == before


def test_run_of_another_process_is_left_to_it(tmp_path: Path) -> None:
    made = planned(tmp_path)
    with record.Record(made.folder, execute._facts(made)) as other:
        other.update(status="running")
        assert execute.execute(made) == "running"
        assert run_folder.read_state(made.folder).status == "running"
    assert run_folder.read_state(made.folder).status == "interrupted"


class Poisoned(Objective):
    def __call__(self, batch: Batch) -> LossOutput:
        return LossOutput(super().__call__(batch).loss * float("inf"))


@pytest.mark.parametrize(("where", "step", "update"), [("loss", 3, 1), ("step", 3, 0), ("evaluate", 6, 2)])
def test_non_finite_number_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: int, update: int
) -> None:
    """In a loss, in weights before a step samples, and in weights that the last update ruined."""
    made = planned(tmp_path)
    stage = "evaluate" if where == "evaluate" else "step"
    plain = getattr(execute.Trainer, stage)

    def poisoned(self: execute.Trainer, number: int) -> object:
        if number == step and where == "loss":
            self.learner.objective = Poisoned(**vars(self.learner.objective))
        elif number == step:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))
        return plain(self, number)

    monkeypatch.setattr(execute.Trainer, stage, poisoned)
    assert executed(made) == "diverged"
    assert run_folder.known(made.folder)["diverged"] == {"reason": "not finite", "step": step, "update": update}
    assert len(record.read_table(made.folder, "steps")) == step
    assert execute.execute(made) == "diverged"  # as final as finished


def test_a_collapsed_reward_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(tmp_path, "algorithm=grpo_unclipped", "collapse.window_updates=1", "collapse.patience_updates=2")
    step = execute.Trainer.step

    def losing(self: execute.Trainer, number: int) -> object:
        result = step(self, number)
        result.rows["steps"][0]["reward"] = 1.0 if number < 4 else 0.1
        return result

    monkeypatch.setattr(execute.Trainer, "step", losing)
    assert executed(made) == "collapsed"
    event = {"reason": "reward", "step": 5, "update": None}  # averages of two
    assert run_folder.known(made.folder)["diverged"] == event
    assert len(record.read_table(made.folder, "steps")) == 6  # it goes on to its end
    assert run_folder.read_state(made.folder).status == "collapsed"
    (line,) = outcome.lines([made], {made.folder: run_folder.read_state(made.folder)})
    assert line.startswith("collapsed: grpo_unclipped seed=0: reward at step 5 (expected")


def test_runs_wait_for_a_cold_start_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(tmp_path)
    task = instantiate(made.config.task)
    trained: list[int] = []
    train = cold_start.train

    def slow(*arguments: object) -> dict[str, object]:
        trained.append(1)
        time.sleep(0.5)
        return train(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cold_start, "train", slow)
    models = [build.build(made.config.model["config"], task.tokenizer, 0, "cpu") for _ in range(2)]
    threads = [
        threading.Thread(target=cold_start.load_or_make, args=(model, task, made.config, tmp_path / "c"))
        for model in models
    ]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    assert len(trained) == 1
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_algorithms_share_a_cold_start(tmp_path: Path) -> None:
    def fingerprint(*words: str) -> str:
        return planned(tmp_path, *words).config.cold_start_fingerprint

    of_a_run = ["algorithm=grpo", "updates=18", "optimizer.learning_rate=1e-2", "optimizer.router_factor=2"]
    assert fingerprint("algorithm=gspo") == fingerprint(*of_a_run)
    others = ["seed=1", "task.modulus=5", "model.config.num_experts=4", "cold_start.noise=0.3", "precision=bf16"]
    others += [f"cold_start.{name}=0.5" for name in ("router_factor", "aux_loss", "z_loss")]
    assert len({fingerprint(), *(fingerprint(word) for word in others)}) == 1 + len(others)
    per = "cold_start.aux_loss_per_layer"
    pooled, layers = ([f"{per}={each}", "cold_start.aux_loss=0.5"] for each in ("false", "true"))
    assert fingerprint(*pooled) == fingerprint("cold_start.aux_loss=0.5") != fingerprint(*layers)


def test_cold_start_outside_its_band_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = finished(tmp_path)
    weights = tmp_path / "cold_starts" / f"{first.config.cold_start_fingerprint}.safetensors"
    given = finished(tmp_path, f"cold_start.path={weights}")
    assert_same(first.folder, given.folder)
    assert run_folder.known(given.folder)["cold_start"] == {"path": str(weights)}
    assert run_folder.known(first.folder)["cold_start"]["fingerprint"] == weights.stem
    monkeypatch.chdir(tmp_path)
    relative = planned(tmp_path, f"cold_start.path=cold_starts/{weights.name}")
    assert (relative.folder, relative.axes, relative.config) == (given.folder, given.axes, given.config), "one arm"
    assert compose.labels([given, first])[0] == f"grpo cold_start.path={weights.stem[:8]} seed=0"
    missed = planned(tmp_path, "cold_start.accuracy_low=0.9", "cold_start.max_updates=40")
    assert execute.execute(missed) == "failed"
    assert "raise cold_start.max_updates" in run_folder.known(missed.folder)["error"]
    monkeypatch.setattr(cold_start, "train", lambda *_: pytest.fail("tried again"))
    assert execute.execute(missed) == "failed"  # the same config would miss it again
    assert "raise cold_start.max_updates" in run_folder.known(missed.folder)["error"]


def test_interrupted_cold_start_resumes_to_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "_STEEPEST", 1.0)  # so that none of few checks is left out
    words = ["cold_start.check_every=4", "cold_start.accuracy_low=0.95", "cold_start.max_updates=16"]
    config = planned(tmp_path, *words, "cold_start.batch_size=4").config
    task = instantiate(config.task)

    def made_in(folder: Path, stop_at: int | None = None) -> tuple[Any, list[int]]:
        model, seen = build.build(config.model["config"], task.tokenizer, 0, "cpu"), []

        def on_check(update: int, accuracy: float, left: float) -> None:
            seen.append(update)
            assert left <= 60
            if update == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(cold_start.ColdStartError if stop_at is None else KeyboardInterrupt):
            cold_start.train(model, task, config, on_check, folder)
        return model, seen

    whole, seen = made_in(tmp_path / "whole")
    assert seen == [4, 8, 12, 16]
    made_in(tmp_path / "halted", stop_at=12)  # killed after a check and before it was kept: that part is made again
    halted, seen = made_in(tmp_path / "halted")
    assert seen == [12, 16]
    assert (tmp_path / "halted").read_bytes() == (tmp_path / "whole").read_bytes()
    for one, other in zip(whole.parameters(), halted.parameters(), strict=True):
        assert torch.equal(one, other)
    (tmp_path / "halted").write_bytes(b"torn")
    assert made_in(tmp_path / "halted")[1] == [4, 8, 12, 16], "a damaged one begins anew"
    assert capsys.readouterr().err.count("restarting the cold start, because") == 1


@pytest.mark.check
def test_rerun_finishes_a_killed_cold_start_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["updates=2", "cold_start.check_every=10", "cold_start.accuracy_low=0.7"]
    whole, killed = planned(tmp_path / "whole", *words), planned(tmp_path / "killed", *words)
    rising = "cold_start._accuracy = lambda *a: a[4] / 40"  # of the updates, so that the third check is in the band
    kill = "cold_start._keep = lambda *a, keep=cold_start._keep: (keep(*a), os.kill(os.getpid(), 9))"
    begin = "import os, sys; from steadymoe.bench.runs import compose, execute; "
    begin += "from steadymoe.bench.training import cold_start"
    monkeypatch.setattr(cold_start, "_STEEPEST", 1.0)  # so that no check is left out
    code = f"{begin}; cold_start._STEEPEST = 1.0; {rising}; {kill}; execute.execute(compose.plan(sys.argv[1:])[0])"
    words = [*SMALL, f"results_dir={tmp_path / 'killed'}", *words]
    done = subprocess.run([sys.executable, "-c", code, *words], check=False)
    cache, name = tmp_path / "killed" / "cold_starts", killed.config.cold_start_fingerprint
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in cache.glob("*.safetensors")] == [f"{name}.partial.safetensors"]
    assert run_folder.read_state(killed.folder).status == "interrupted"
    monkeypatch.setattr(cold_start, "_accuracy", lambda *a: a[4] / 40)
    assert execute.execute(whole) == execute.execute(killed) == "finished"
    assert_same(whole.folder, killed.folder)
    assert [path.name for path in cache.glob("*.safetensors")] == [f"{name}.safetensors"]
    made = (tmp_path / "whole" / "cold_starts" / f"{name}.safetensors").read_bytes()
    assert (cache / f"{name}.safetensors").read_bytes() == made


def test_cold_start_time_is_extrapolated_from_its_slope() -> None:
    checks = [(25 * place, 0.1 + 0.02 * place) for place in range(1, 6)]
    assert cold_start.updates_left(checks, goal=0.4, most=5000) == pytest.approx(250)  # 0.2 at 0.02 in 25 updates
    assert cold_start.updates_left(checks, goal=0.4, most=200) == 75
    assert cold_start.updates_left([(25, 0.3)], goal=0.4, most=100) == 75
    assert cold_start.updates_left([(25, 0.3), (50, 0.2)], goal=0.4, most=100) == 50


def test_checks_at_which_the_band_cannot_be_reached_are_left_out() -> None:
    numbers = ColdStartConfig(accuracy_low=0.35, check_every=10, max_updates=95)
    assert cold_start._STEEPEST == 0.015
    assert cold_start.next_check([], numbers) == 30  # .35 at .015 an update: 23.3 updates
    assert cold_start.next_check([(30, 0.18)], numbers) == 50  # 11.3
    assert cold_start.next_check([(30, 0.21)], numbers) == 40
    assert cold_start.next_check([(30, 0.5)], numbers) == 40
    assert cold_start.next_check([(70, 0.0)], numbers) == 90  # the last that max_updates allows
    assert cold_start.next_check([(90, 0.0)], numbers) > 95
    assert cold_start.next_check([], replace(numbers, check_every=2)) == 8  # at most three in a row
    assert cold_start.next_check([], replace(numbers, check_every=25)) == 25


def test_check_far_below_the_band_takes_few_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = planned(tmp_path, "cold_start.accuracy_low=0.35", "cold_start.check_prompts=512").config
    for accuracy, prompts in ((0.22, [128]), (0.23, [128, 512]), (0.6, [128, 512])):  # .35 − 3·√(.35·.65/128) = .224
        asked = []
        monkeypatch.setattr(cold_start, "_accuracy", lambda _, __, n, *___: asked.append(n) or accuracy)  # noqa: B023
        assert (cold_start._checked(None, None, config, 1), asked) == (accuracy, prompts)
    for few in (planned(tmp_path).config, replace(config, cold_start=replace(config.cold_start, check_prompts=8))):
        asked = []
        monkeypatch.setattr(cold_start, "_accuracy", lambda _, __, n, *___: asked.append(n) or 0.0)  # noqa: B023
        cold_start._checked(None, None, few, 1)
        assert asked == [few.cold_start.check_prompts]  # so few show nothing, or the band begins at 0


def test_zero_learning_rate_changes_nothing(tmp_path: Path) -> None:
    frozen = finished(tmp_path, "optimizer.learning_rate=0")
    updates = record.read_table(frozen.folder, "updates")
    assert (updates["token_ratio_variance"] == 0).all()
    assert (updates["expert_change_per_update"].dropna() == 0).all()
    assert updates["expert_change_per_update"].notna().any()
    assert record.read_table(frozen.folder, "steps")["expert_change_since_start"].max() == 0
    scores = record.read_table(frozen.folder, "evaluations").groupby("step")["score"].agg(list)
    assert all(each == scores[0] for each in scores)  # the same weights, prompts and draws


def test_the_three_algorithms_coincide_at_one_update_a_rollout(tmp_path: Path) -> None:
    curves = []
    for name in ("reinforce", "grpo", "gspo"):
        made = finished(tmp_path, f"algorithm={name}", "updates_per_rollout=1", "minibatch_prompts=4", *PROPORTIONAL)
        curves.append(record.read_table(made.folder, "updates")[["grad_norm", "entropy"]].to_numpy())
    assert np.ptp(curves[0][:, 1]) > 1e-2  # the updates move the policy
    np.testing.assert_allclose(curves[0], curves[1], atol=1e-4)
    np.testing.assert_allclose(curves[0], curves[2], atol=1e-4)


def test_router_auxiliary_loss_is_off_by_default(tmp_path: Path) -> None:
    (one,), (other,) = (updated(trainer(tmp_path, *words), 1) for words in ([], ["routing.aux_loss=0.5"]))
    # The balance loss is at least its coefficient × K = 1.
    assert other.overall["loss"] - one.overall["loss"] > 0.9


def test_bf16_forwards_differ_from_fp32_and_keep_fp32_weights(whole: compose.Run, tmp_path: Path) -> None:
    rounded = finished(tmp_path, "precision=bf16", "updates=2")
    gap = record.read_table(rounded.folder, "steps")["rollout_logprob_gap_max"].max()
    assert gap < 0.5
    assert not tables(rounded.folder)["updates"]["loss"].equals(tables(whole.folder)["updates"]["loss"][:2])

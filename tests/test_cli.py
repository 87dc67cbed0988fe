"""The command line: wrong words are answered in one line, with exit code 2, and touch nothing."""

import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from builds import ROOT
from fixtures import RECORDED, Said, tutorial, write_all
from hydra.utils import instantiate
from rich.console import Console
from small_runs import SMALL, executed, planned, sharing_starts
from small_sweeps import wait_for

from steadymoe.bench import schema
from steadymoe.bench.runs import compose, execute, fits, identity, launch, progress, record, run_folder, validate
from steadymoe.bench.support import source
from steadymoe.models import build

# Words that no run can have → what the one line names.
WRONG = {
    "trian.lr=3": "trian",
    "lr=1e-3": "optimizer.learning_rate",
    "top_k=2": "model.config.num_experts_per_tok",
    "experts=8": "model.config.num_experts=8",
    "-cn mine": "STEADYMOE_PATH",
    "--config-dir=mine": "STEADYMOE_PATH",
    "hydra.run.dir=mine": "results_dir",
    "hydra.sweep.dir=mine": "results_dir",
    "--hydra-help": "--info",
    "hydra/sweeper=optuna": "range(",
    "optimizer.lr=3": "optimizer.",
    "algorithm=mine": "mine",
    "algorithm=GRPO": "GRPO",
    "optimizer=adam": "adam",
    "updates=" + "9" * 23: "updates",
    "model.config.num_hidden_layers=" + "9" * 17: "num_hidden_layers",
    "routing.aux_loss_per_layer=true": "routing.aux_loss above 0",
    "model.config._target_=os.system": "transformers config",
    "algorithm.loss.clip_low=-1": "clip_low",
    "algorithm.loss.dual_clip=abc": "dual_clip",
    "algorithm.loss.clip_low=null": "clip_low",
    "correction=null": "correction",
    "algorithm=[grpo]": "algorithm",
    "+model=micro": "model",
    "+seed=1": "seed",
    "seed=interval(0,3)": "seed",
    "seed=range(0,3,0)": "seed",
    "seed=choice()": "seed",
    "algorithm.loss=3": "algorithm.loss",
    "algorithm.loss.clip_high.x=2": "clip_high",
    "hydra.launcher=3": "launcher",
    "algorithm=reinforce_pp_baseline@nemo-rl-prorl-2.1": "correction=seq_mask_tis",
    "+algorithm.loss.clip=1": "clip_low",
    "algorithm.loss._target_=steadymoe.algorithms.advantages.GroupMeanStd": "GroupMeanStd",
    "algorithm.loss._target_=steadymoe.algorithms.nowhere.GRPO": "steadymoe.algorithms.nowhere",
    "task.min_length=9": "task.max_length",
    "cold_start.path=nowhere.safetensors": "nowhere.safetensors",
    f"cold_start.path={ROOT}/pyproject.toml": "not a safetensors file",
    "cold_start.accuracy_low=0.7": "cold_start.accuracy_high",
    "experiment_name=../up": "experiment_name",
    "experiment_name=" + "e" * 300: "experiment_name",
    "seed=0,1": "-m",
    "+foo=1": "foo",
    "optimizer.kind=muon": "optimizer.kind",
    "hydra.nope=3": "nope",
    "results_dir=/proc/nowhere": "cannot be written",
    f"results_dir={ROOT}/pyproject.toml/results": "cannot be written",
    "results_dir=": "results_dir",
    "results_dir=" + "r" * 300: "255 bytes",
    "results_dir=" + "r/" * 2000: "3900 bytes",
    "--package=model": "--package",
    "~seed": "seed",
    "~cold_start": "cold_start cannot be left out",
    "cold_start=5": "`cold_start` must be a group of fields, got 5",
    "updates_per_rollout=abc": "`updates_per_rollout` must be a valid integer, got 'abc'",
    "routing=r2 routing.predictor_learning_rate=0.1": "routing.predictor_learning_rate must be set with routing=pr2",
    "routing=pr2 routing.predictor_learning_rate=null": "routing.predictor_learning_rate must be set with routing=pr2",
    "routing=r3 routing.score_share=0.5": "routing.score_share must be set with routing=r3_filtered",
    "routing=r3_filtered routing.score_share=1.5": "`routing.score_share` must be less than or equal to 1, got 1.5",
    "model=dense_micro routing.bias_speed=0.001": "this model is dense and has no routers to replay, freeze or balance",
    "algorithm=../algorithm/grpo": "algorithm",
    "minibatch_prompts=80000000000": "needs at least",
    "cold_start.check_prompts=80000000000": "needs at least",
    "hydra.launcher.n_jobs=0": "hydra.launcher.n_jobs",
    "hydra.launcher.backend=none": "hydra.launcher.backend",
    "nonsense": "nonsense",
    "cold_start.path=seed=3": "cold_start.path",
    "algorithm=dppo algorithm.loss.top_k=2.5": "top_k",
    "algorithm=rspo_grpo algorithm.loss.clip_low=0.1": "clip_low",
    "optimizer=muon optimizer.adamw.weights=[head]": "optimizer.adamw.weights",
    "optimizer=muon optimizer.adamw.weights=[vectors,biases]": "'routers'",
    "optimizer=sgd optimizer.beta1=0.9": "beta1",
    "optimizer=muon routing=pr2": "predictor_learning_rate",
    "--redo --retry-failed": "not allowed with",
    "--retry-failed -m seed=0,1": "--retry-failed",
    "-m seed=range(3,1)": "seed",
    "-m seed=shuffle(range(0,1000000000000))": "10000",
    "-m seed=range(0,101) updates=range(1,101)": "10000",
    "-m algorithm=glob(zzz*) seed=0,1": "algorithm",
    "-m experiment=quickstart,replay seed=0": "experiment",
    "-m algorithm=grpo,gspo --cfg job": "--cfg",
    "-m algorithm=[grpo],gspo": "algorithm",
    "-m seed=0,1 rollout.temperature=1,0": "rollout.temperature",  # one wrong point stops the sweep
}


@pytest.mark.parametrize("words", WRONG)
def test_invalid_arguments_fail_in_one_line_and_write_nothing(words: str, refusal_of: Said) -> None:
    assert WRONG[words] in refusal_of(*words.split())


def test_null_and_fields_of_a_host_are_valid_overrides() -> None:
    compose.plan(["algorithm=minirl", "algorithm.loss.ratio_cap=null"])
    compose.plan(["algorithm=opsm", "algorithm.loss.host.clip_high=0.28", "algorithm.loss.host.dual_clip=3"])


def test_impossible_combinations_are_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["routing=off,freeze", "optimizer.router_factor=.1,1"]
    left_out, summary, *_ = ran("run", "-m", *words, "--dry").splitlines()
    assert left_out.startswith("left out: routing=freeze optimizer.router_factor=0.1: ")
    assert summary == "3 runs: 3 to run"
    with pytest.raises(compose.ConfigError, match="routing=freeze"):  # where it cannot be said
        compose.plan(words, multirun=True)


@pytest.mark.parametrize(
    ("words", "made", "named"),
    [
        ("model=micro,dense_micro model.config.num_experts=4,16", 2, "config.num_experts"),
        ("model.config.num_experts=8,16 model.config.num_experts_per_tok=2,12", 3, "num_experts_per_tok"),
        ("algorithm=grpo,reinforce algorithm.loss.clip_high=0.3", 1, "clip_high"),
        ("task=sort,chain task.modulus=7", 1, "modulus"),
        ("model=micro,dense_micro routing=off,r2", 3, "dense"),
    ],
)
def test_a_point_that_cannot_be_is_left_out_of_a_sweep(words: str, made: int, named: str) -> None:
    left_out: list[str] = []
    assert len(compose.plan(words.split(), True, left_out)) == made
    assert len(left_out) == math.prod(word.count(",") + 1 for word in words.split()) - made
    assert all(named in line for line in left_out)


def test_a_dense_twin_ignores_what_a_sweep_says_of_routers() -> None:
    words = ["experiment=tolerance", "model=flat,dense_flat", "algorithm=grpo", "seed=0"]
    words += ["optimizer.learning_rate=1e-4"]
    about_routers = ["cold_start.aux_loss", "cold_start.router_factor", "optimizer.router_factor"]
    for typed in ([], ["optimizer.router_factor=0.5"], ["routing=r3"], ["experts=eager"]):
        moe, dense = compose.plan([*words, *typed], multirun=True)
        assert (moe.choices["model"], dense.choices["model"]) == ("flat", "dense_flat")
        assert moe.not_applicable == ()
        assert set(about_routers) <= set(dense.not_applicable)
        assert dense.axes == {}
        # Its own command makes the same run, with the settings off.
        (again,) = compose.plan(shlex.split(dense.command)[2:])
        assert (again.config_hash, again.folder) == (dense.config_hash, dense.folder)
        assert (dense.config.optimizer.router_factor, dense.config.routing.replay) == (1, "off")
        assert (dense.config.cold_start.router_factor, dense.config.cold_start.aux_loss) == (1, 0)
    # What is typed for a dense model alone is refused.
    for typed in (["optimizer.router_factor=0.5"], ["routing=r3"], ["cold_start.aux_loss=0.02"]):
        with pytest.raises(compose.ConfigError, match="this model is dense"):
            compose.plan([*words, "model=dense_flat", *typed], multirun=True)


def test_tilde_expands_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for word in ("results_dir=~/x", "results_dir='~/x'"):
        (made,) = compose.plan([word])
        assert made.folder.is_relative_to(tmp_path / "x" / "runs")
        assert compose.plan(["results_dir=" + str(tmp_path / "x")])[0].config_hash == made.config_hash


def test_gpu_is_checked_where_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["run", *SMALL, "device=cuda", f"results_dir={tmp_path}"]
    ran(*words, "--dry")
    (line,) = [line for line in ran(*words, code=1).splitlines() if line.startswith("steadymoe: failed: ")]
    assert "torch finds no CUDA device here" in line


def test_run_is_refused_below_its_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound a run is planned, a byte below it is not; what a run holds more of, it needs more memory for."""

    def need(*words: str) -> int:
        (made,) = compose.plan(["minibatch_prompts=8", "probe.responses=1", *words])
        return fits.memory_need(made.config, instantiate(made.config.task))

    (made,) = compose.plan(["evaluation.pass_k=1024", "minibatch_prompts=1"])
    task = instantiate(made.config.task)
    most = fits.memory_need(made.config, task)
    assert need() < need("minibatch_prompts=16") < 2 * need()
    assert need("evaluation.pass_k=1024", "minibatch_prompts=1") > need("minibatch_prompts=1")
    weights = need("routing=lagged", "routing.lag=3") - need("routing=lagged", "routing.lag=2")
    assert weights == 4 * build.build(made.config.model["config"], task.tokenizer, 0).num_parameters()
    assert need("routing=lagged", "routing.lag=3") - need() == 3 * weights
    monkeypatch.setattr(fits, "capacity", lambda _: most)
    fits.check_memory(made.config, task)
    monkeypatch.setattr(fits, "capacity", lambda _: most - 1)
    with pytest.raises(ValueError, match="of memory"):
        fits.check_memory(made.config, task)


def test_version_is_printed_with_the_revision(monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert f"steadymoe {version('steadymoe')}" in (said := ran("--version"))
    assert head in said
    monkeypatch.setattr(source, "__file__", "/nowhere/source.py")
    assert ran("--version") == f"steadymoe {version('steadymoe')}\n"


def test_dry_run_counts_runs_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    def found() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("**/*")}

    words = ["run", "--dry", *SMALL, f"results_dir={tmp_path}/made", "-m", "seed=0,1,2,3", "hydra.launcher.n_jobs=2"]
    said = ran(*words).splitlines()
    assert said[0] == "4 runs: 4 to run"
    assert found() == {}
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("trained"))
    ended, damaged = compose.plan([*SMALL, f"results_dir={tmp_path}/made", "seed=0,1"], multirun=True)
    executed(ended)
    damaged.folder.mkdir(parents=True)
    (damaged.folder / "run.json").write_text("{}")
    before = found()
    said = ran(*words).splitlines()
    assert all(part in said[0] for part in ("1 damaged", "1 finished", "2 to run"))
    assert "3 to train" in said[1]
    assert [f"seed={number}," in line for number, line in enumerate(said[3:], start=1)] == [True] * 3
    assert len(ran(*words, "seed=range(1,31)").splitlines()) == 24
    assert found() == before


ELSEWHERE = {
    "reprot": "reprot",
    "": "",
    "report --formt png": "--formt",
    "report --results . --format gif": "gif",
    "report --results . --figure fig99": "fig99",
    "report --results . --figure fig05": "experiment=tolerance_staleness",
    "report --results . --figure fig05 --experiment small": "updates_per_rollout",
    "report --results . --columns 3": "argument --columns: invalid choice: 3",
    "report --results . --names grpo": "--names takes grpo=GRPO,gspo=GSPO, each name once; got 'grpo'",
    "report --results . --names grpo=": "--names takes",
    "report --results . --names grpx=G": "there is no loss or arm 'grpx'; choose from grpo, gspo, reinforce",
    "report --results . --names grpo=X,gspo=X": "grpo and gspo would both be 'X'",
    "status --experiment x\x1b": "\\x1b",
    "status --results nowhere": "nowhere",
    "status --results file": "file",
} | {
    f"report --results . {instead} {option}": f"{option.split()[0]} cannot be combined with {instead.split()[0]}"
    for instead in ("--list", "--keep kept", "--export csv")
    for option in ("--format svg", "--arms grpo", "--columns 1", "--names ''")
}


@pytest.mark.parametrize("words", ELSEWHERE)
def test_wrong_words_of_other_commands_fail_in_one_line_and_write_nothing(
    words: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    monkeypatch.chdir(recorded)
    Path("file").touch()
    said = refused(*shlex.split(words))
    assert ELSEWHERE[words] in said
    assert "\x1b" not in said
    assert sorted(path.name for path in recorded.iterdir()) == ["file", "runs"]


def test_read_only_results_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "cannot be written" in refused("run", f"results_dir={tmp_path}")


@pytest.mark.usefixtures("no_figures")
def test_sweep_runs_reports_and_shows_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, refused: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", *SMALL, "updates=4", "-m", "algorithm=gspo,reinforce", "seed=0,1", "experiment_name=small"]
    with sharing_starts(tmp_path / "results"):
        said = ran(*words)
    assert "4 finished" in said
    assert "[4/4]" in said  # plain lines, since this is no terminal
    assert "steadymoe report --experiment small" in said
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert "4 of 4 runs have already finished" in ran(*words)
    told = ran("report", "--experiment", "small", "--format", "svg").splitlines()
    assert any(line.startswith("GSPO") for line in told), told
    assert (told[-1], max(map(len, told[2:6])) <= 100) == ("open results/report.html", True)
    assert "two seeds decide nothing" in told[-3]
    assert (tmp_path / "results" / "report.html").exists()
    assert ran("status") == ran("status", "--watch")  # no terminal: once
    assert "small: 4 finished" in ran("status")
    told = ran("report", "--experiment", "small", "--format", "svg", "--out", "elsewhere", "-v").splitlines()
    assert "wrote elsewhere/tables/small-summary.md" in told
    Path("file").touch()
    assert "file" in refused("report", "--experiment", "small", "--out", "file")


def test_failed_run_prints_its_command_and_exits_with_1(tmp_path: Path, ran: Said) -> None:
    words = [*SMALL, "cold_start.accuracy_low=0.95", "cold_start.max_updates=1", f"results_dir={tmp_path}"]
    said = ran("run", *words, code=1)
    assert "raise cold_start.max_updates" in said
    assert "rerun: steadymoe run" in said
    assert "1 failed; status: steadymoe status" in said
    assert "1 failed" in ran("status", "--results", str(tmp_path))


def test_cfg_prints_the_config_and_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, refused: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ran("run", "--cfg", "job", "algorithm=gspo", "updates=7")
    assert "updates: 7" in said
    assert "steadymoe.algorithms.gspo.GSPO" in said
    refused("run", "--cfg", "job", "stepz=1")
    assert list(tmp_path.iterdir()) == []


def test_user_code_outside_the_suite_runs_as_documented(tmp_path: Path) -> None:
    text, blocks = (ROOT / "docs" / "your_algorithm.md").read_text(), tutorial()
    write_all(tmp_path / "mine", blocks)
    (command,) = re.findall(r"^STEADYMOE_PATH=\S+ steadymoe run .*", text, re.MULTILINE)
    steadymoe_ = f"{shlex.quote(sys.executable)} -m steadymoe.bench.cli"

    def run_(*words: str) -> subprocess.CompletedProcess[str]:
        line = command.replace("steadymoe run", f"{steadymoe_} run") + " " + shlex.join(words)
        environment = os.environ | {"HOME": str(tmp_path)}
        return subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)

    small = [word for word in SMALL if not word.startswith(("model=", "task"))]
    done = run_(*small, "hydra/launcher=basic")  # whose processes take longer to start than two runs
    assert done.returncode == 0, done.stderr
    assert "2 finished" in done.stdout
    (made,) = tmp_path.glob("results/runs/reversal/half_clipped/shallow/reverse/**/run.json")
    facts = run_folder.known(made.parent)
    assert facts["command"].startswith(f"STEADYMOE_PATH={tmp_path}/mine steadymoe run algorithm=half_clipped")
    assert facts["moe_layers"] == 2
    wrong = run_("algorithm=half_clipped", "algorithm.loss.epsilon_high=0.3")
    assert wrong.returncode == 2
    assert "did you mean clip_high?" in wrong.stderr


@pytest.mark.check
def test_experiments_report_the_same_together_as_alone(tmp_path: Path, ran: Said) -> None:
    (of_seed,) = (RECORDED / "runs" / "small" / "grpo").glob("*/*/*/seed=0")  # with it alone, few figures
    for name in ("one", "two"):  # several are drawn in processes of their own
        shutil.copytree(of_seed, tmp_path / "runs" / name / of_seed.relative_to(RECORDED / "runs" / "small"))
    ran("report", "--results", str(tmp_path), "--format", "png")
    drawn = sorted((tmp_path / "figures").iterdir())
    assert {path.suffix for path in drawn} == {".png", ".svg", ".txt"}  # svg is what the page shows
    together = {path: path.read_bytes() for path in [*drawn, *(tmp_path / "tables").iterdir()]}
    page = (tmp_path / "report.html").read_text()
    assert all(f">{name}<" in page for name in ("one", "two"))
    of_two = {path: content for path, content in together.items() if path.name.startswith("two-")}
    assert 2 * len(of_two) == len(together)
    for path in together:
        path.unlink()
    ran("report", "--results", str(tmp_path), "--experiment", "two", "--format", "png")
    assert of_two == {path: path.read_bytes() for path in of_two}


def test_figure_list_shows_which_have_data(tmp_path: Path, ran: Said) -> None:
    shutil.copytree(RECORDED / "runs" / "small", tmp_path / "runs" / "gspo")
    lines = ran("report", "--list", "--results", str(tmp_path)).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert rows["fig01"].split("|")[4].strip() == "yes"
    assert rows["fig05"].split("|")[4].strip() == "no: no ended runs"


def test_the_live_display_shows_every_run(whole: compose.Run, tmp_path: Path) -> None:
    runs = [whole, planned(tmp_path, "seed=1")]
    console = Console(force_terminal=True, width=120, record=True)
    with progress.watch(runs, console):
        pass
    shown = console.export_text()
    assert all(part in shown for part in ("1 of 2 runs done", "grpo seed=0", "6/6", "waiting")), shown
    with progress.counted(3, 7), progress.watch(runs, console):
        pass
    assert "4 of 7 runs done" in console.export_text()


def test_folders_hold_the_overrides_that_differ_from_the_named_configs() -> None:
    def folder(*words: str) -> str:
        (made,) = compose.plan([*words])
        return str(made.folder).partition("/results/runs/")[2]

    assert folder() == "default/grpo/flat/sort/seed=0"
    assert folder("updates=240", "seed=3") == "default/grpo/flat/sort/seed=3"  # the default is no axis
    assert folder("optimizer.max_grad_norm=1", "checkpoint_every=3") == folder()
    assert folder("updates_per_rollout=16", "optimizer.learning_rate=1e-3", "experiment_name=a") == (
        "a/grpo/flat/sort/optimizer.learning_rate=0.001,updates_per_rollout=16/seed=0"
    )
    assert folder("experiment=quickstart", "algorithm=gspo", "seed=2") == "quickstart/gspo/flat/sort/seed=2"
    name = identity.axes_name({"cold_start.path": "../a b;$c"})
    assert not set(" ;$/") & set(name)
    assert name != identity.axes_name({"cold_start.path": "../a-b;$c"})


def test_hash_covers_exactly_what_changes_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "version", lambda _: "1")  # as if wandb were installed

    def hashed(*words: str) -> str:
        return compose.plan([*words])[0].config_hash

    same = ["experiment_name=b", "results_dir=elsewhere", "checkpoint_every=3", "checkpoint_keep=3", "retry=failed"]
    same += ["log=wandb", "optimizer.max_grad_norm=1"]
    assert {hashed(word) for word in same} == {hashed()}
    others = ["seed=1", "updates=99", "algorithm=gspo", "model=micro", "model.config.num_experts=8", "precision=bf16"]
    assert len({hashed(), *map(hashed, others)}) == 1 + len(others)


def test_a_new_field_changes_no_hash_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compose.plan([])[0].plain
    monkeypatch.setitem(schema.ADDED, "optimizer.schedule", "constant")

    def hashed(**schedule: str) -> str:
        return identity.config_hash(plain | {"optimizer": plain["optimizer"] | schedule})

    assert hashed(schedule="constant") == hashed() == compose.plan([])[0].config_hash
    assert hashed(schedule="linear") != hashed()


def test_settings_hash_ignores_swept_fields() -> None:
    usual, other = compose.plan(["-m", "optimizer.learning_rate=3e-4,1e-3"][1:], multirun=True)
    assert "optimizer.learning_rate" not in usual.axes, "it is the usual one"
    assert identity.settings_hash(usual.plain, other.axes) == identity.settings_hash(other.plain, other.axes)
    assert identity.settings_hash(usual.plain, ()) != identity.settings_hash(other.plain, ())
    (longer,) = compose.plan(["updates=7"])
    assert identity.settings_hash(usual.plain, other.axes) != identity.settings_hash(longer.plain, other.axes)


def test_recorded_hashes_are_unchanged() -> None:
    folders = [path.parent for path in RECORDED.glob("**/run.json")]
    assert folders
    for facts in map(run_folder.known, folders):
        assert facts["config_hash"] == identity.config_hash(facts["config"])


def test_time_left_follows_from_the_pace_of_the_running_runs() -> None:
    def state(status: str, step: int, pace: float | None) -> dict[str, object]:
        return {"status": status, "step": step, "steps": 10, "seconds_per_step": pace}

    states = [state("finished", 10, 2.0), state("running", 4, 2.0), state("running", 8, 2.0), state("waiting", 0, None)]
    assert progress._left(states) == "0:18"  # (6 + 2 + 10) steps of 2 s, two at once
    assert progress._left([state("cold start", 0, None)]) == "?"


def test_progress_shows_best_reward_and_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_CHECKS", 0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.001)
    (made,) = compose.plan([*SMALL, f"results_dir={tmp_path}", "updates=6"])
    shown, stop = io.StringIO(), threading.Event()
    with record.Record(made.folder, execute._facts(made)) as folder:
        thread = threading.Thread(target=progress._show_lines, args=([made], Console(file=shown), stop))
        folder.update(status="running")
        thread.start()
        for check, left in (((25, 0.125, 130.0), "2:10"), ((50, 0.25, 61.0), "1:01")):
            folder.update(progress=dict(zip(progress.CHECK, check, strict=True)))
            parts = (f"{check[0]} updates", left)
            wait_for(lambda parts=parts: all(part in shown.getvalue() for part in parts))
        stop.set()
        thread.join()
    shutil.rmtree(made.folder)
    assert executed(made) == "finished"
    best = run_folder.known(made.folder)["progress"]["best_reward"]
    assert best == record.read_table(made.folder, "steps")["reward"].max()

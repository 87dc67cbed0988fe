"""The timings are of real steps, and docs/speed.md shows what was recorded."""

import json
import re
import time
from pathlib import Path

import pandas as pd
import pytest
from test_execute import SMALL

from steadymoe.bench import speed
from steadymoe.bench.config import compose
from steadymoe.bench.statistics.estimates import over_seeds

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / speed.PAGE).read_text()
RECORDED = json.loads((ROOT / speed.RECORDED).read_text())
ONCE = json.loads((ROOT / "results" / "speed" / "once.json").read_text())
TINY = " ".join(word for word in SMALL if not word.startswith(("steps", "evaluation", "cold_start", "algorithm")))


class Fake:
    """A trainer whose steps take a known time on a patched clock."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes, self.steps = clock, takes, 0

    def step(self) -> None:
        self.steps += 1
        self.clock[0] += self.takes


def test_trainers_take_turns_and_the_first_block_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    fast, slow = Fake(clock, 1.0), Fake(clock, 2.5)
    taken = speed.interleaved({"fast": fast, "slow": slow}, blocks=3)
    assert taken == {"fast": [1.0] * 3, "slow": [2.5] * 3}
    assert fast.steps == slow.steps == 4 * speed.BLOCK
    assert speed.ratio(taken["fast"], taken["slow"]) == {"median": 2.5, "least": 2.5, "most": 2.5}
    assert speed.ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == {"median": 0.5, "least": 0.25, "most": 1.0}


def test_stages_are_shares_and_rates_are_tokens_by_their_seconds() -> None:
    seconds = {"rollout_seconds": 2.0, "old_policy_seconds": 1.0, "update_seconds": 4.0, "probe_seconds": 1.0}
    found = speed.stages_and_rates([seconds | {"tokens_sampled": 80, "response_tokens": 40}] * 3)
    assert found["stages"] == {"rollout": 0.25, "old_policy": 0.125, "update": 0.5, "probe": 0.125}
    assert (found["rollout_tokens_per_second"], found["training_tokens_per_second"]) == (40, 8)


def test_every_group_has_a_signal() -> None:
    suite = speed.Suite(f"{TINY} rollout.prompts=32")
    suite.step()
    (row,) = suite.rows
    assert row["reward"] == pytest.approx(0.5, abs=0.1)
    assert row["groups_without_signal"] == 0


def test_plain_transformers_train_too() -> None:
    plain = speed.Plain(TINY)
    before = [weight.detach().clone() for weight in plain.model.parameters()]
    plain.step()
    assert any((weight != was).any() for weight, was in zip(plain.model.parameters(), before, strict=True))


def test_a_setting_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "VARIANTS", {"ours": "", "compiled": "measure=little"})  # this machine need not compile
    monkeypatch.setattr(speed, "find_spec", lambda _: None)
    numbers = speed.measure(TINY, 1)
    assert set(numbers["seconds"]) == {"ours", "compiled", "plain transformers"}
    assert sum(numbers["ours"]["stages"].values()) == pytest.approx(1)
    there, back = numbers["ours"]["beside"]["compiled"], numbers["compiled"]["beside"]["ours"]
    assert there["median"] * back["median"] == pytest.approx(1)
    assert there["median"] == pytest.approx(numbers["seconds"]["compiled"] / numbers["seconds"]["ours"])
    shown = speed.markdown(RECORDED | {"settings": {"mine": numbers}})
    assert "TRL /" not in shown
    assert re.search(rf"\| seconds per step, not compiled +\| {numbers['seconds']['ours']:.3f} +\|", shown)


@pytest.mark.parametrize("setting", speed.SETTINGS)
def test_the_settings_are_runs_and_stale_is_that_of_its_experiment(setting: str) -> None:
    config = speed.config_of(speed.SETTINGS[setting])
    stale = compose.plan(["experiment=stale", "algorithm=gspo", "seed=0"])[0].config
    assert config.rollout.prompts % config.updates_per_rollout == 0
    if setting == "stale":
        assert (config.model, config.task) == (stale.model, stale.task)
        assert config.rollout.prompts / config.updates_per_rollout == stale.rollout.minibatch_prompts
    if setting.startswith("tokens"):
        longer = {"max_position_embeddings": config.model["config"]["max_position_embeddings"]}
        assert config.model["config"] == stale.model["config"] | longer


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--setting", "nothing"], "invalid choice: 'nothing'"),
        (["--blocks", "0"], "--blocks must be at least 1, got 0"),
        (["--record", "--setting", "micro"], "leave out --setting"),
        (["--record"], "run it where both are"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_timed(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("timed"))
    with pytest.raises(SystemExit, match="2"):
        speed.main(arguments)
    assert line in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_a_compiler_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("timed"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="2"):
        speed.main([])
    assert "compile=true: it needs a C++ compiler" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--setting", "micro"], ["--record"]])
def test_only_record_replaces_what_is_committed(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (speed.PAGE, speed.RECORDED):
        path.parent.mkdir(parents=True)
        path.write_text((ROOT / path).read_text())
    before = {path: path.read_text() for path in (speed.PAGE, speed.RECORDED)}
    other = RECORDED["settings"]["micro"] | {"seconds": {"ours": 1234.5, "compiled": 1.0}}
    monkeypatch.setattr(speed, "measure", lambda *_: other)
    monkeypatch.setattr(speed, "config_of", lambda _: None)  # this machine need not compile
    speed.main(arguments)
    if arguments == ["--record"]:
        numbers = json.loads(speed.RECORDED.read_text())
        assert list(numbers["settings"]) == list(speed.SETTINGS)
        old, new = speed.markdown(RECORDED), speed.markdown(numbers)
        assert "1234.500" in new
        assert speed.PAGE.read_text() == PAGE.replace(old, new)
        assert not speed.MEASURED.exists()
    else:
        assert {path: path.read_text() for path in before} == before
        assert json.loads(speed.MEASURED.read_text())["settings"] == {"micro": other}
        assert f"/{speed.MEASURED.parent}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_page_shows_the_recorded_numbers() -> None:
    assert speed.markdown(RECORDED) in PAGE
    compiled = [RECORDED["settings"][setting]["compiled"] for setting in ("micro", "tiny", "stale")]
    little = [1 - each["beside"]["compiled, little"]["median"] for each in compiled]
    peak = [ONCE["useful_gflops"][setting]["compiled"] / ONCE["matmul_gflops"] for setting in ONCE["useful_gflops"]]
    goals = PAGE.partition("| goal |")[2].partition("\n\n")[0]
    for shown in (
        ", ".join(f"{each['beside']['TRL']['median']:.2f}" for each in compiled),
        ", ".join(f"{each['generate']['median']:.2f}" for each in compiled),
        ", ".join(f"{100 * each:.0f}" for each in little) + " %",
        ", ".join(f"{100 * each:.0f}" for each in peak) + " %",
        f"{ONCE['two_processes']['compiled']:.2f} ({ONCE['two_processes']['ours']:.2f} not compiled)",
        f"{ONCE['begins']['filled cache']:.0f} s ({ONCE['begins']['not compiled']:.0f} s not compiled)",
    ):
        assert shown in goals, shown


def test_what_was_measured_once_is_shown_as_it_was_recorded() -> None:
    once = PAGE.partition("## Measured once")[2]
    shown = [f"{each['ours']['median']:.2f}" for each in ONCE["dense twin"].values()]
    shown += [f"{each:.1f}" for by_base in ONCE["useful_gflops"].values() for each in by_base.values()]
    shown += [f"{setting} {mib:,.0f}" for setting, mib in ONCE["peak_mib"].items()]
    shown += [f"{name} {share:.1%}" for name, share in sorted(ONCE["losses"].items(), key=lambda each: -each[1])[:3]]
    shown += [f"{each:.2f}" for each in ONCE["two_processes"].values()]
    shown += [f"{seconds:.3g} s" for seconds in (ONCE["begins"]["empty cache"], ONCE["begins"]["filled cache"])]
    for name, group in pd.DataFrame(ONCE["scaling"]).groupby("dial", sort=False):
        cells = zip(group["value"], group["seconds"], strict=True)
        shown.append(f"| {name} | {', '.join(f'{value}: {seconds:.3f}' for value, seconds in cells)} |")
    lengths = list(ONCE["lengths"].values())
    rows = {"seconds a step, compiled": [f"{each['seconds']['compiled']:.2f}" for each in lengths]}
    for stage in speed.STAGES:
        shares = [f"{each['compiled']['stages'][stage]:.0%}" for each in lengths]
        rows[f"share of {stage.replace('_', ' ')}"] = shares
    shown += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    for text in shown:
        assert text in once, text


def test_the_sweep_with_and_without_compilation_is_told_as_it_was_recorded() -> None:
    runs = pd.read_csv(ROOT / "results" / "speed" / "compiled_sweep.csv")
    assert runs.groupby("compiled").size().tolist() == [30, 30]
    for name, each in (
        ("median seconds of a run's steps", runs.groupby("compiled")["seconds_of_steps"].median()),
        ("seconds of all steps", runs.groupby("compiled")["seconds_of_steps"].sum()),
        ("all seconds, with", runs.groupby("compiled")["wall_seconds"].sum()),
    ):
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
        assert row.endswith(f"| {each[False]:,.0f} | {each[True]:,.0f} |")
    rewards = runs.pivot(index="seed", columns=["compiled", "algorithm"], values="mean_reward")
    leads = [over_seeds((rewards[each]["gspo"] - rewards[each]["grpo"]).tolist()) for each in (False, True)]
    assert f"| {leads[0]} | {leads[1]} |" in PAGE
    apart = runs.pivot(index=["algorithm", "seed"], columns="compiled", values="mean_reward")
    assert f"is {over_seeds((apart[True] - apart[False]).tolist())} in mean\nreward (n = 30)" in PAGE

"""The benchmark times real steps, and its page is that of the recorded numbers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_execute import SMALL

from steadymoe.bench.config import compose
from steadymoe.bench.speed import measure, page, run
from steadymoe.bench.speed.arms import Ours, Plain, config_of
from steadymoe.bench.statistics.estimates import over_seeds
from steadymoe.models import build

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results" / "speed" / "speed.json"
WORDS = [word for word in SMALL if not word.startswith(("steps", "evaluation", "cold_start"))]


class Counting:
    """Takes a known time, as far as the clock is patched."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes, self.steps = clock, takes, 0

    def step(self) -> dict[str, Any]:
        self.steps += 1
        self.clock[0] += self.takes
        return {"number": self.steps}


def test_arms_take_turns_and_the_first_block_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measure, "seconds", lambda: clock[0])
    fast, slow = Counting(clock, 1.0), Counting(clock, 2.5)
    taken, said = measure.interleaved({"fast": fast, "slow": slow}, blocks=3)
    assert taken == {"fast": [1.0] * 3, "slow": [2.5] * 3}
    assert fast.steps == slow.steps == 4 * measure.BLOCK
    assert [row["number"] for row in said["fast"]] == list(range(measure.BLOCK + 1, 4 * measure.BLOCK + 1))
    assert measure.ratio(taken["fast"], taken["slow"]) == measure.TimeRatio(2.5, 2.5, 2.5)
    assert measure.ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == measure.TimeRatio(0.5, 0.25, 1.0)


def test_all_groups_have_a_signal() -> None:
    row = Ours([*WORDS, "rollout.prompts=32"]).step()
    assert row["reward"] == pytest.approx(0.5, abs=0.1)
    assert row["groups_without_signal"] == 0


def test_stages_are_shares_and_arithmetic_counts_a_prompt_once() -> None:
    ours = Ours(WORDS)
    shares = measure.stages([ours.step()])
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0
    row = {"update_tokens_per_second": 100.0, "update_seconds": 4.0, "response_tokens": 144}
    # 4 prompts × 8 responses: (400 − 144)/8 prompt tokens; of 144 response tokens the 32 last are fed to nothing.
    active = build.size(ours.trainer.model)["active_parameters"]
    assert ours.trainer.model.config.tie_word_embeddings
    # 6 for an update and 2 for the old policy.
    assert measure.useful_flop(ours, row) == pytest.approx(8 * active * (32 + 112))


def test_an_unknown_setting_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--setting", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_a_machine_that_cannot_compile_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "everything", lambda *_: pytest.fail("measured"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="2"):
        run.main([])
    assert "compile=true: it needs a C++ compiler" in capsys.readouterr().err


@pytest.mark.parametrize("words", [*run.SETTINGS.values(), *run.LENGTHS.values()])
def test_the_timed_settings_are_runs_and_stale_has_the_model_task_and_minibatch_of_its_experiment(
    words: list[str],
) -> None:
    config = config_of(words)
    stale = compose.plan(["experiment=stale", "algorithm=gspo", "seed=0"])[0].config
    if words == run.SETTINGS["stale"]:
        assert (config.model, config.task) == (stale.model, stale.task)
    if "model=flat" in words:
        assert config.model["config"] | {"max_position_embeddings": 0} == stale.model["config"] | {
            "max_position_embeddings": 0
        }
    assert config.rollout.prompts % config.updates_per_rollout == 0
    if words == run.SETTINGS["stale"]:
        assert config.rollout.prompts / config.updates_per_rollout == stale.rollout.minibatch_prompts


def test_the_sweep_with_and_without_compilation_is_told_as_it_was_recorded() -> None:
    runs = pd.read_csv(ROOT / "results" / "speed" / "compiled_sweep.csv")
    told = (ROOT / "docs" / "speed.md").read_text()
    assert runs.groupby("compiled").size().tolist() == [30, 30]
    for name, each in (
        ("median seconds of a run's steps", runs.groupby("compiled")["seconds_of_steps"].median()),
        ("seconds of all steps", runs.groupby("compiled")["seconds_of_steps"].sum()),
        ("all seconds, with", runs.groupby("compiled")["wall_seconds"].sum()),
    ):
        (row,) = [line for line in told.splitlines() if line.startswith(f"| {name}")]
        assert row.endswith(f"| {each[False]:,.0f} | {each[True]:,.0f} |")
    rewards = runs.pivot(index="seed", columns=["compiled", "algorithm"], values="mean_reward")
    leads = [over_seeds((rewards[each]["gspo"] - rewards[each]["grpo"]).tolist()) for each in (False, True)]
    assert f"| {leads[0]} | {leads[1]} |" in told
    apart = runs.pivot(index=["algorithm", "seed"], columns="compiled", values="mean_reward")
    assert f"is {over_seeds((apart[True] - apart[False]).tolist())} in mean\nreward (n = 30)" in told


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is committed about speed, and a measurement that gives other numbers."""
    for name in ("docs/speed.md", "results/speed/speed.json", "results/speed/speed.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    numbers = json.loads(RECORDED.read_text())
    numbers["settings"]["stale"]["seconds"]["ours"] = 1234.5
    monkeypatch.setattr(run, "everything", lambda *_: numbers)
    monkeypatch.setattr(run, "config_of", lambda words: None)  # this machine may have no C++ compiler
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_measurement_leaves_what_is_committed_as_it_was(checkout: Path) -> None:
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    run.main([])
    made = {path for path in checkout.rglob("*") if path.is_file()} - before.keys()
    assert {path.parent for path in made} == {checkout / run.MEASURED}
    assert "1234.500" in (checkout / run.MEASURED / "speed.md").read_text()
    assert {path: path.read_bytes() for path in before} == before
    assert f"/{run.MEASURED}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_measurement_is_recorded_when_asked_and_its_page_follows(checkout: Path) -> None:
    run.main(["--record"])
    tables = (checkout / run.RECORDED / "speed.md").read_text()
    text = (checkout / run.PAGE).read_text()
    assert "1234.500" in tables
    assert tables in text
    assert text.replace(tables, "") == (ROOT / run.PAGE).read_text().replace(
        RECORDED.with_suffix(".md").read_text(), ""
    )
    assert (
        json.loads((checkout / run.RECORDED / "speed.json").read_text())["settings"]["stale"]["seconds"]["ours"]
        == 1234.5
    )
    assert not (checkout / run.MEASURED).exists()


def test_nothing_is_measured_for_a_record_that_is_not_there(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "everything", lambda *_: pytest.fail("measured"))
    (checkout / run.PAGE).unlink()
    with pytest.raises(SystemExit, match="2"):
        run.main(["--record"])
    assert "no such pair below this folder" in capsys.readouterr().err


def test_plain_transformers_learn_too() -> None:
    arm = Plain(WORDS)
    before = [weight.detach().clone() for weight in arm.model.parameters()]
    arm.step()
    assert any((weight != was).any() for weight, was in zip(arm.model.parameters(), before, strict=True))


def test_a_process_of_its_own_says_what_it_took() -> None:
    (alone,) = measure._processes(1, "ours", WORDS, 1)
    assert alone["seconds"] > 0
    assert 2**27 < alone["memory"] < 2**30  # a run of micro fits in 1 GiB
    with pytest.raises(RuntimeError, match="failed"):
        measure._processes(1, "ours", ["model=nothing"], 1)


def test_the_page_is_of_the_recorded_numbers() -> None:
    numbers = json.loads(RECORDED.read_text())
    text = (ROOT / "docs" / "speed.md").read_text()
    assert page.markdown(numbers) in text
    assert page.markdown(numbers) == RECORDED.with_suffix(".md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link


def test_what_is_said_of_the_goals_is_what_was_recorded() -> None:
    numbers = json.loads(RECORDED.read_text())
    goals = (ROOT / "docs" / "speed.md").read_text().partition("| goal |")[2].partition("\n\n")[0]
    of = [numbers["settings"][setting]["compiled"] for setting in ("micro", "tiny", "stale")]
    trl, generate = (
        [each["median"] for each in found]
        for found in ([one["beside"]["TRL"] for one in of], [one["generate"] for one in of])
    )
    little = [1 - one["beside"]["compiled, little"]["median"] for one in of]
    peak = [one["useful_gflops"] / numbers["matmul_gflops"] for one in of]
    for said in (
        ", ".join(f"{each:.2f}" for each in trl),
        ", ".join(f"{each:.2f}" for each in generate),
        ", ".join(f"{100 * each:.0f}" for each in little) + " %",
        ", ".join(f"{100 * each:.0f}" for each in peak) + " %",
        f"{numbers['two_processes']['compiled']:.2f} ({numbers['two_processes']['ours']:.2f} not compiled)",
        f"{numbers['begins']['filled cache']:.0f} s ({numbers['begins']['not compiled']:.0f} s not compiled)",
    ):
        assert said in goals, said


def made_up() -> dict[str, Any]:
    """Numbers of every part, each ratio and share another one."""
    stages = {"rollout": 0.3, "old_policy": 0.2, "update": 0.4, "probe": 0.1}
    times = {"median": 2.25, "least": 2.0, "most": 2.5}
    names = ("TRL", "plain transformers", "dense twin", "no sharing", "sampler as old", "ours", "ours, little")
    base = {"stages": stages, "rollout_tokens_per_second": 1e4, "training_tokens_per_second": 1e3, "useful_gflops": 9.0}
    base |= {"generate": times, "beside": dict.fromkeys([*names, "compiled", "compiled, little"], times)}
    one = {"seconds": {"ours": 1.5, "compiled": 0.75}, "ours": base, "compiled": base}
    length = {"seconds": {"compiled": 3.25}, "not compiled": times, "compiled": {"stages": stages}}
    return {
        "machine": {"cores": 2, "cpu": "a processor"},
        "versions": {"torch": "2"},
        "matmul_gflops": 90.0,
        "blocks": 6,
        "settings": {"tiny": one, "stale": one},
        "begins": {"not compiled": 4.0, "empty cache": 111.0, "filled cache": 8.0},
        "lengths": {"50 tokens": length},
        "two_processes": {"ours": 1.91, "compiled": 1.92, "plain": 1.81},
        "peak_mib": {"stale": 444.0},
        "losses": {"gspo": 0.02, "gepo": 0.03, "trm": 0.01},
        "scaling": [{"dial": dial, "value": value, "seconds": 1.0} for dial in measure.DIALS for value in (2, 4)],
    }


def test_a_page_holds_what_was_measured_and_nothing_else() -> None:
    numbers = made_up()
    whole = page.markdown(numbers)
    told = (
        "| seconds a step, compiled | 0.750 | 0.750 |",
        "3.25",
        "1.92",
        "111 s",
        "stale 444",
        "gepo 3.0%",
        "| layers |",
    )
    parts = ("settings", "lengths", "two_processes", "begins", "peak_mib", "losses", "scaling")
    assert set(parts) == set(run.PARTS)
    assert "| TRL takes, beside compiled | 2.25 (2.00 to 2.50) × the time |" in whole
    assert "9.0 GFLOP/s, 10% of peak" in whole
    for part, text in zip(parts, told, strict=True):
        assert text in whole
        assert text not in page.markdown({name: value for name, value in numbers.items() if name != part})


def test_the_figure_has_a_panel_for_each_dial() -> None:
    figure = page.scaling_figure(pd.DataFrame(made_up()["scaling"]))
    assert len(figure.numbers) == 2 * len(measure.DIALS)
    assert {axis.get_xlabel() for axis in figure.axes} == set(measure.DIALS)
    assert all(axis.get_xscale() == axis.get_yscale() == "log" for axis in figure.axes)


def test_parts_are_measured_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(run, "_part", lambda part, settings, blocks: asked.append((part, settings)))
    monkeypatch.setattr(measure, "matmul_peak", lambda: 9e10)
    numbers = run.everything(["tiny"], 2, ["losses", "begins"])
    assert asked == [("losses", ["tiny"]), ("begins", ["tiny"])]
    assert {"losses", "begins"} < numbers.keys()
    assert "scaling" not in numbers

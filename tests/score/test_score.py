"""Scores: the statistics, what runs, what is refused, and an entry from submission to rerun."""

import hashlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from steadymoe.bench import cli, results
from steadymoe.bench.audit import request as audits
from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import ConfigError
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.score import baselines, command, comparison, entry, page, plan, reference, rerun, standard
from steadymoe.bench.score.recorded import NONE
from steadymoe.bench.score.standard import GRADIENT, PARTS, STABILITY
from steadymoe.bench.statistics.estimates import Estimate

SEEDS = range(10)


def by_seed(*numbers: float) -> pd.Series:
    return pd.Series(dict(enumerate(numbers)), dtype=float)


NOISE = np.linspace(-0.05, 0.05, 10)
GRPO, GSPO = by_seed(*(0.5 + NOISE)), by_seed(*(0.65 + NOISE[::-1]))


# --- statistics -----------------------------------------------------------------------------------------------------


def by_name(
    ours: pd.Series, here: dict[str, pd.Series], recorded: dict[str, pd.Series], comparable: bool = True
) -> dict[str, comparison.Row]:
    found = comparison.rows("mine", {"mine": ours, **here}, recorded, STABILITY, comparable)
    return {row.algorithm: row for row in found}


def test_grpo_under_another_name_is_0_away_from_grpo() -> None:
    found = by_name(GRPO, {"GRPO": GRPO}, {"GRPO": GSPO, "GSPO": GSPO})
    assert found.keys() == {"mine", "GRPO", "GSPO"}  # the GRPO that ran here replaces the recorded one
    assert (found["GRPO"].difference.mean, found["GRPO"].source, found["GRPO"].verdict) == (0, "here", "not decided")
    assert (found["GSPO"].source, found["GSPO"].verdict) == ("recorded", "yours is lower")
    assert (found["mine"].difference, found["mine"].verdict) == (NONE, "–")


def test_rows_stand_by_their_outcome_and_the_worst_is_last() -> None:
    flipped = by_seed(*(0.1 + NOISE))
    found = comparison.rows("flipped", {"flipped": flipped, "GRPO": GRPO, "GSPO": GSPO}, {}, STABILITY)
    assert [row.algorithm for row in found] == ["GSPO", "GRPO", "flipped"]
    assert {row.verdict for row in found if row.algorithm != "flipped"} == {"yours is lower"}
    assert found[1].p == 2 / 2**10
    assert found[1].difference.mean == pytest.approx(-0.4)


def test_a_difference_of_means_is_welchs() -> None:
    row = by_name(GRPO, {}, {"GSPO": GSPO})["GSPO"]
    half = 2.101 * np.sqrt(GRPO.var() / 10 + GSPO.var() / 10)  # t of 18 degrees of freedom
    assert row.difference.mean == pytest.approx(-0.15)
    assert row.difference.high - row.difference.mean == pytest.approx(half, rel=1e-3)
    assert row.p == pytest.approx(stats.ttest_ind(GRPO, GSPO, equal_var=False).pvalue)
    few = by_name(GRPO[:2], {}, {"GSPO": GSPO})["GSPO"]
    assert np.isnan([few.difference.low, few.p]).all()
    assert few.verdict == "not decided"


def test_recorded_rows_are_compared_where_the_anchors_of_the_machine_are_the_recorded_ones() -> None:
    recorded = {"GRPO": GRPO, "GSPO": GSPO}
    close = {"GRPO": GRPO + by_seed(*NOISE[::-1] / 3), "GSPO": GSPO}
    agree, said = comparison.anchors_agree(close, recorded, ["GRPO", "GSPO"])
    assert agree
    assert "GSPO here less recorded: 0 [0, 0], n 10" in said
    agree, said = comparison.anchors_agree(close | {"GSPO": GSPO + 0.02}, recorded, ["GRPO", "GSPO"])
    assert not agree
    assert "GSPO here less recorded: 0.02" in said
    for few in ({"GRPO": GRPO[:8]}, {}, {"GRPO": GRPO, "GSPO": GSPO[:3]}):
        agree, said = comparison.anchors_agree(few, recorded, ["GRPO", "GSPO"])
        assert not agree
        assert said.startswith("too few seeds")
    found = {
        row.algorithm: row for row in comparison.rows("mine", {"mine": GRPO}, recorded, STABILITY, comparable=False)
    }
    assert found["GSPO"].difference is NONE
    assert np.isnan(found["GSPO"].p)


def test_an_undefined_outcome_stands_last_and_p_is_corrected_for_the_rows() -> None:
    here = {"mine": GSPO, "GRPO": GRPO, "empty": by_seed(*[np.nan] * 10), "same": GSPO}
    found = comparison.rows("mine", here, {}, GRADIENT)
    assert [row.algorithm for row in found] == ["mine", "same", "GRPO", "empty"]
    of = {row.algorithm: row for row in found}
    assert of["GRPO"].p == 2 / 2**10
    assert of["GRPO"].corrected == 2 * of["GRPO"].p  # "empty" counts as no comparison
    assert (of["same"].verdict, of["empty"].verdict) == ("not decided", "–")


# --- baselines -----------------------------------------------------------------------------------------------------


def test_the_committed_numbers_of_the_standard_are_those_of_the_reference_study(tmp_path: Path) -> None:
    reference.write_baselines(Path(__file__).parents[2] / "results" / "reference", tmp_path)
    for path in sorted(baselines.FOLDER.iterdir()):
        if path.suffix == ".json":
            assert (tmp_path / path.name).read_text() == path.read_text()
        else:
            pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / path.name), pd.read_parquet(path))
    assert sum(path.stat().st_size for path in baselines.FOLDER.iterdir()) < 5 * 2**20


def test_the_anchors_of_the_standard_are_recorded_at_every_seed_with_todays_config() -> None:
    found = baselines.load()
    assert found.metadata.keys() == {part.name for part in PARTS}
    for algorithm in standard.ANCHORS:
        runs = compose.plan(["experiment=standard_stability", f"algorithm={algorithm}", "seed=0,9"], multirun=True)
        for run in runs:
            baselines.refuse_other_settings(STABILITY, run.config.seed, {algorithm: run.config_hash}, found)
        (other,) = compose.plan(
            ["experiment=standard_stability", f"algorithm={algorithm}", "seed=0", "optimizer.learning_rate=1e-3"]
        )
        with pytest.raises(ConfigError, match=f"other numbers for {algorithm} than steadymoe-1"):
            baselines.refuse_other_settings(STABILITY, 0, {algorithm: other.config_hash}, found)
    for seed in (305, 314):
        (audit,) = audits.plan(["experiment=standard_gradient", f"seed={seed}"])
        losses = {name: audit.arms[name].plain["algorithm"]["loss"] for name in standard.ANCHORS}
        baselines.refuse_other_settings(GRADIENT, seed, baselines.audit_hashes(audit.run.plain, losses), found)
        for changed, of in (
            ({"audit": audit.run.plain["audit"] | {"minibatches": 48}}, losses),
            ({"optimizer": audit.run.plain["optimizer"] | {"learning_rate": 1e-3}}, losses),
            ({}, losses | {"gspo": losses["gspo"] | {"clip_low": 0.1}}),
        ):
            with pytest.raises(ConfigError, match="standard_gradient has other numbers for"):
                baselines.refuse_other_settings(
                    GRADIENT, seed, baselines.audit_hashes(audit.run.plain | changed, of), found
                )
    seeds = found.of(STABILITY).groupby("arm")["seed"].agg(set)
    assert seeds["GRPO"] == seeds["GSPO"] == set(STABILITY.seeds)


def test_a_folder_without_the_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="does not hold the numbers of steadymoe-1"):
        baselines.load(tmp_path)
    for path in baselines.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert len(baselines.load(tmp_path).outcomes)
    (tmp_path / "outcomes.parquet").write_bytes(b"PAR1")
    with pytest.raises(Damaged):
        baselines.load(tmp_path)


# --- the command ----------------------------------------------------------------------------------------------------


def said(*words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["steadymoe", "score", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    found = capsys.readouterr()
    return int(stopped.value.code or 0), found.out, found.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "choose an algorithm"),
        (["algorithm=nothing"], "there is no algorithm 'nothing'"),
        (["algorithm=grpo", "model=tiny"], "got model=tiny"),
        (["algorithm=grpo", "--fast"], "unrecognized arguments: --fast"),
        (["algorithm=grpo", "--paper", "x"], "--paper requires --submit"),
        (["algorithm=grpo", "--submit", "x"], "--submit requires --paper and --equation"),
        (["--verify", "x", "--quick"], "--quick does not go with --verify"),
        (["algorithm=grpo", "--verify", "x"], "key=value does not go with --verify"),
        (["--verify", "nowhere"], "nowhere is not a folder"),
        (["algorithm=grpo", "algorithm.loss.clip_low=-1"], "clip_low"),
        (
            ["algorithm=dapo"],
            "dapo changes what the standard fixes",
        ),
        (["algorithm=gspo", "algorithm.sampling.max_rollouts=2"], "algorithm.sampling.max_rollouts: 1 -> 2"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_touches_nothing(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = said(*words, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_dry_says_what_is_missing_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = said("algorithm=sapo", "--dry", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0
    assert "stability: 40 runs: 40 waiting" in out  # SAPO, GRPO, GSPO, frozen
    assert "gradient: 10 audits: 10 to do, 0 done" in out
    for one in ("stability: one run", "gradient: one audit"):
        (minutes,) = re.findall(rf"{one} took (.*) minutes of one core", out)
        assert 0.2 < float(minutes) < 10
    _, quick, _ = said("algorithm=grpo", "--quick", "--dry", capsys=capsys, monkeypatch=monkeypatch)
    assert "stability: 3 runs: 3 waiting" in quick  # GRPO is its own anchor
    words = ("algorithm=dapo", "--dry", "algorithm.sampling.max_rollouts=1")
    assert said(*words, capsys=capsys, monkeypatch=monkeypatch)[0] == 0
    assert not list(tmp_path.iterdir())


SMALL = (
    "hydra/launcher=basic",  # in this process
    *("model=micro", "task.min_length=2", "task.max_length=3"),
    *("total_updates=8", "updates_per_rollout=2", "rollout.minibatch_prompts=2", "evaluation.every_updates=8"),
    *("evaluation.prompts=8", "optimizer.learning_rate=3e-2", "collapse.patience_updates=4"),
    *("collapse.window_updates=4", "cold_start.batch_size=32", "cold_start.accuracy_low=0"),
    *("cold_start.accuracy_high=1", "cold_start.check_every=30", "cold_start.check_prompts=8"),
)

AUDIT = ("audit.minibatches=8", "audit.drift=[0,2]", "audit.groups=4")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard of two parts at a small size, recorded on this machine, and a folder of one's own algorithms."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine" / "conf" / "algorithm"
    mine.mkdir(parents=True)
    grpo = Path(__file__).parents[2] / "conf" / "algorithm" / "grpo.yaml"
    (mine / "same.yaml").write_text(grpo.read_text())
    monkeypatch.setenv("STEADYMOE_PATH", str(tmp_path / "mine"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)  # another test may have had one of that name
    stability = replace(STABILITY, overrides=SMALL, seeds=(0, 1), quick_seeds=(0,))
    gradient = replace(
        GRADIENT,
        overrides=(*SMALL, *AUDIT),
        seeds=(305,),
        quick_seeds=(305,),
        measure=lambda recorded, loss: recorded.gradient(loss, "snr", 2),  # usefulness is undefined at this size
    )
    for module in (baselines, command, entry):
        monkeypatch.setattr(module, "PARTS", (stability, gradient))
    for module in (plan, rerun):
        monkeypatch.setattr(module, "STABILITY", stability)
    return tmp_path


def test_one_algorithm_after_the_other_is_scored_beside_the_same_anchors(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO under another name is 0 away; a second algorithm makes its own runs alone; recorded files stay."""
    recorded = baselines.Baselines(
        pd.DataFrame(
            [("stability", "SAPO", "sapo", seed, 0.4 + seed / 100, 0.3, 1000.0 + 2 * seed) for seed in range(2)]
            + [("stability", "VESPO", "vespo", seed, 0.4 + seed / 100, 0.3, np.nan) for seed in range(2)],
            columns=["part", "arm", "algorithm", "seed", "value", "start", "tokens"],
        ),
        _made(),
    )
    monkeypatch.setattr(baselines, "load", lambda: recorded)
    monkeypatch.setattr(command.check, "answer", lambda words: 0)
    before_all = {path: path.read_bytes() for path in baselines.FOLDER.iterdir()}
    code, out, err = said("algorithm=same", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0, err
    rows = pd.read_csv("results/scores/steadymoe-1/same/score.csv").set_index(["part", "algorithm"])
    assert set(rows.loc["stability"].index) == {"same (yours)", "GRPO", "GSPO", "frozen", "SAPO", "VESPO"}
    sampled = results("steadymoe-1-stability")["steps"].query("metric == 'tokens_sampled' and algorithm == 'same'")
    own = sampled.groupby("seed")["value"].sum().mean()
    assert own > 0
    assert rows.loc[("stability", "same (yours)"), "tokens"] == own
    assert rows.loc[("stability", "SAPO"), "tokens"] == 1001
    assert {f"{own:,.0f}", "1,001", "not recorded"} <= {cell.strip() for cell in re.split(r"[|\n]", out)}
    assert rows.loc[("stability", "GRPO"), "difference mean"] == 0
    assert rows.loc[("gradient", "GRPO"), "difference mean"] == 0
    assert rows.loc[("stability", "GSPO"), "source"] == "here"
    assert rows.loc[("stability", "SAPO"), "source"] == "recorded"
    shown = Path("results/scores/steadymoe-1/same/score.html").read_text()
    assert shown.count('class="mine"') == 2
    assert "same (yours)" in out
    before = _digests(small / "results" / "runs")
    code, out, _ = said("algorithm=sapo", "--dry", capsys=capsys, monkeypatch=monkeypatch)
    assert re.search(r"stability: 8 runs: .*2 waiting", out)  # its own; anchors and the frozen policy are there
    code, out, _ = said("algorithm=same", capsys=capsys, monkeypatch=monkeypatch)  # again: nothing is made
    assert code == 0
    assert _digests(small / "results" / "runs") == before
    _is_an_entry_that_is_repeated(small, capsys, monkeypatch)
    _the_tutorials_algorithm_gets_a_first_look(small, capsys, monkeypatch)
    assert {path: path.read_bytes() for path in baselines.FOLDER.iterdir()} == before_all


def _the_tutorials_algorithm_gets_a_first_look(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two files of docs/your_algorithm.md, as they stand there; then with another number."""
    text = (Path(__file__).parents[2] / "docs" / "your_algorithm.md").read_text()
    (loss, *_), (numbers, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (small / "mine" / "my_losses.py").write_text(loss)
    yaml = small / "mine" / "conf" / "algorithm" / "half_clipped.yaml"
    yaml.write_text(numbers)
    words = ("algorithm=half_clipped", "--quick")
    code, out, err = said(*words, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0, err
    assert "half_clipped (yours)" in out
    assert "too few seeds to compare this machine" in out
    assert Path("results/scores/steadymoe-1-quick/half_clipped/score.html").exists()
    assert "results/scores/steadymoe-1-quick/half_clipped/score.html" in text
    yaml.write_text(numbers.replace("clip_high: 0.2", "clip_high: 0.3"))
    code, _, err = said(*words, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "half_clipped was scored with other numbers" in err
    assert "--redo" in err
    code, _, err = said(*words, "--redo", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0, err
    assert "another config (algorithm.loss.clip_high: 0.2 -> 0.3)" in err


def _is_an_entry_that_is_repeated(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of GRPO under another name is read as it was scored, and the runs themselves repeat it."""
    submit = ("algorithm=same", "--paper", "none", "--equation", "3", "--submit")
    code, _, err = said(*submit, str(small / "entry"), capsys=capsys, monkeypatch=monkeypatch)
    assert (code, err) == (0, "")
    found = entry.read(small / "entry")
    assert found.own_files == ["conf/algorithm/same.yaml"]
    for part in command.PARTS:
        pd.testing.assert_series_equal(found.by_seed(part), found.by_seed(part, "grpo"))
    results = small / "results"
    assert rerun.compare(found, results, [0, 1]) == "repeated (seeds 0, 1)"
    of_first = found.about["first"]
    for changed, verdict in (
        ({"grad_norm": [1.01 * norm for norm in of_first["0"]["grad_norm"]]}, "seed 0: the first updates differ"),
        ({"cold_start": "of another machine"}, "not decided (seeds 0, 1): other cold starts"),
    ):
        first = of_first | {"0": of_first["0"] | changed}
        assert rerun.compare(replace(found, about={**found.about, "first": first}), results, [0, 1]) == verdict
    elsewhere = {**found.about, "machine": "another"}
    for arm in ("yours", "grpo"):
        near, far = (
            found.outcomes.assign(value=found.outcomes["value"] + shift * (found.outcomes["arm"] == arm))
            for shift in (1e-9, 50)  # of two seeds the interval is wide
        )
        same = f"seed 0 of {arm}: {found.by_seed(STABILITY, arm)[0]:.6g} on the same machine and cold start, not "
        for shifted in (near, far):
            assert rerun.compare(replace(found, outcomes=shifted), results, [0, 1]).startswith(same)
        assert rerun.compare(replace(found, outcomes=near, about=elsewhere), results, [0, 1]).startswith("repeated")
        assert "lies outside" in rerun.compare(replace(found, outcomes=far, about=elsewhere), results, [0, 1])
    path = next((results / "runs").glob("*/same/**/seed=1/run.json"))
    known = path.read_text()
    path.write_text(known.replace('"responses": 8', '"responses": 16'))
    assert rerun.compare(found, results, [0, 1]).endswith("the standard fixes: rollout.responses: 8 -> 16")
    path.write_text(known)
    assert rerun.compare(found, small / "mine", [0, 1]).startswith("its runs cannot be read")
    one = next((results / "audits").rglob("k=2.parquet"))
    one.rename(one.with_suffix(".away"))
    code, _, err = said(*submit, str(small / "again"), capsys=capsys, monkeypatch=monkeypatch)
    assert (code, "part gradient is missing; run steadymoe score algorithm=same" in err) == (2, True)


def _made() -> dict[str, dict[str, Any]]:
    """What made the small standard: the hashes of its anchors' runs, and of its audit."""
    fixed = ["experiment=standard_stability", *SMALL, "seed=0"]
    runs = {name: {"0": compose.plan([*fixed, f"algorithm={name}"])[0].config_hash} for name in standard.ANCHORS}
    (audit,) = audits.plan(["experiment=standard_gradient", *SMALL, *AUDIT, "seed=305"])
    of_audit = {name: {"305": digest} for name, digest in baselines.audit_hashes(audit.run.plain, {}).items()}
    where = {"machine": "this one", "minutes": 0.1}
    return {"stability": {"hashes": runs} | where, "gradient": {"hashes": of_audit} | where}


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("**/*"))
        if path.is_file() and path.name != "sweep.json"
    }


def test_other_numbers_than_the_recorded_ones_are_another_standard(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"stability": {"hashes": {"grpo": {"0": "0"}}}, "gradient": {"hashes": {}}}
    monkeypatch.setattr(baselines, "load", lambda: baselines.Baselines(pd.DataFrame(), made))
    code, out, err = said("algorithm=same", "--quick", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert "standard_stability has other numbers for grpo than steadymoe-1 was recorded with" in err
    made = _made() | {"gradient": {"hashes": {}}}
    code, out, err = said("algorithm=same", "--quick", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert "standard_gradient has other numbers for the audit than steadymoe-1 was recorded with" in err
    assert not (small / "results").exists()


def test_an_algorithm_that_check_refuses_is_not_run(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _made()
    monkeypatch.setattr(baselines, "load", lambda: baselines.Baselines(pd.DataFrame(), made))
    monkeypatch.setattr(command.check, "answer", lambda words: 1)
    code, _, err = said("algorithm=same", "--quick", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "is not scored" in err
    assert not (small / "results").exists()


def test_an_algorithm_that_changes_the_setting_is_refused(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _made()
    monkeypatch.setattr(baselines, "load", lambda: baselines.Baselines(pd.DataFrame(), made))
    path = small / "mine" / "conf" / "algorithm" / "greedy.yaml"
    own = "".join(f"  {line}\n" for line in (path.parent / "same.yaml").read_text().splitlines())
    path.write_text(f"# @package _global_\nrollout:\n  responses: 16\nalgorithm:\n{own}")
    code, out, err = said("algorithm=greedy", "--quick", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert "greedy changes what the standard fixes for every algorithm: rollout.responses: 8 -> 16" in err
    assert not (small / "results").exists()


def test_labels_of_two_overrides_are_two() -> None:
    found = [plan.read(["algorithm=grpo", f"algorithm.loss.clip_{end}=0.1"]) for end in ("low", "high")]
    assert len({each.name for each in found}) == len({each.label for each in found}) == 2
    assert found[0].label == "grpo algorithm.loss.clip_low=0.1"


def test_a_page_escapes_names(tmp_path: Path) -> None:
    name = "<script>x</script>"
    row = comparison.Row(name, "here", Estimate(0.5, 0.4, 0.6, 10), NONE, np.nan, np.nan)
    part = comparison.Comparison(STABILITY, [row], name, 0.3, {name: 10.0}, [])
    page.write([part], ["a <b>note</b>"], name, tmp_path)
    text = (tmp_path / "score.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<b>note" not in text

"""Scores: the statistics, what runs, what is refused, and an entry from submission to rerun."""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from committed import assert_same
from scipy import stats
from test_cli import steadymoe

from steadymoe.bench import results
from steadymoe.bench.audit import plan as audits
from steadymoe.bench.runs import compose
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.score import board, command, comparison, entry, plan, reference, rerun, standard
from steadymoe.bench.score.recorded import NONE
from steadymoe.bench.score.standard import GRADIENT, PARTS, STABILITY

ROOT = Path(__file__).parents[2]


def by_seed(*numbers: float) -> pd.Series:
    return pd.Series(dict(enumerate(numbers)), dtype=float)


NOISE = np.linspace(-0.05, 0.05, 10)
GRPO, GSPO = by_seed(*(0.5 + NOISE)), by_seed(*(0.65 + NOISE[::-1]))


# --- statistics -----------------------------------------------------------------------------------------------------


def compared(here: dict[str, pd.Series], recorded: dict[str, pd.Series], **more: Any) -> pd.DataFrame:
    return comparison.compare_outcomes("mine", here, recorded, STABILITY, **more).set_index("algorithm")


def test_rows_are_sorted_by_outcome_paired_with_what_ran_here_and_p_is_corrected() -> None:
    flipped = by_seed(*(0.1 + NOISE))
    here = {"mine": flipped, "GRPO": GRPO, "empty": by_seed(*[np.nan] * 10), "GSPO": GSPO, "same": flipped}
    rows = compared(here, {"GRPO": GSPO})  # the GRPO that ran here replaces the recorded one
    assert rows.index.tolist() == ["GSPO", "GRPO", "mine", "same", "empty"]
    assert set(rows["source"]) == {"here"}
    grpo, same, mine = rows["difference"][["GRPO", "same", "mine"]]
    assert (grpo.mean, same.mean, mine) == (pytest.approx(-0.4), 0, NONE)
    assert rows.loc["GRPO", "p"] == 2 / 2**10  # it does not vary: sign flips
    gspo = float(stats.ttest_rel(flipped, GSPO).pvalue)
    assert rows.loc["GSPO", "p"] == pytest.approx(gspo)
    # "empty" counts as no comparison.
    assert rows.loc[["GRPO", "GSPO"], "corrected"].tolist() == pytest.approx([2 * 2 / 2**10, 3 * gspo])
    assert rows["verdict"].tolist() == ["yours is lower"] * 2 + ["–", "not decided", "–"]


def test_a_difference_of_means_is_welchs() -> None:
    row = compared({"mine": GRPO}, {"GSPO": GSPO}).loc["GSPO"]
    assert (row["source"], row["verdict"]) == ("recorded", "yours is lower")
    half = 2.101 * np.sqrt(GRPO.var() / 10 + GSPO.var() / 10)  # t of 18 degrees of freedom
    assert row["difference"].mean == pytest.approx(-0.15)
    assert row["difference"].high - row["difference"].mean == pytest.approx(half, rel=1e-3)
    assert row["p"] == pytest.approx(stats.ttest_ind(GRPO, GSPO, equal_var=False).pvalue)
    four = compared({"mine": GRPO[:4]}, {"GSPO": GSPO}).loc["GSPO"]
    assert four["corrected"] < 0.001
    assert four["verdict"] == "not decided", "fewer than five seeds"
    few = compared({"mine": GRPO[:2]}, {"GSPO": GSPO}).loc["GSPO"]
    assert np.isnan([few["difference"].low, few["p"]]).all()
    assert few["verdict"] == "not decided"


def test_recorded_rows_are_compared_only_if_the_anchors_agree_with_their_records() -> None:
    recorded, anchors = {"GRPO": GRPO, "GSPO": GSPO}, ["GRPO", "GSPO"]
    close = {"GRPO": GRPO + by_seed(*NOISE[::-1] / 3), "GSPO": GSPO}
    agree, note = comparison.anchors_agree(close, recorded, anchors)
    assert agree
    assert "GSPO here less recorded: 0, n 10" in note
    agree, note = comparison.anchors_agree(close | {"GSPO": GSPO + 0.02}, recorded, anchors)
    assert not agree
    assert "GSPO here less recorded: 0.02" in note
    for few in ({"GRPO": GRPO[:8]}, {}, {"GRPO": GRPO, "GSPO": GSPO[:3]}):
        agree, note = comparison.anchors_agree(few, recorded, anchors)
        assert not agree
        assert "too few seeds" in note
    row = compared({"mine": GRPO}, recorded, comparable=False).loc["GSPO"]
    assert (row["difference"], row["verdict"]) == (NONE, "–")


# --- baselines -----------------------------------------------------------------------------------------------------


def test_the_committed_numbers_of_the_standard_are_those_of_the_reference_study(tmp_path: Path) -> None:
    reference.write_baselines(ROOT / "results" / "reference", tmp_path)
    written, committed = ((folder / standard.METADATA).read_text() for folder in (tmp_path, standard.FOLDER))
    assert_same(written, committed, standard.METADATA)
    written, committed = (pd.read_parquet(folder / standard.OUTCOMES) for folder in (tmp_path, standard.FOLDER))
    pd.testing.assert_frame_equal(written, committed)


def test_the_anchors_of_the_standard_are_recorded_at_every_seed_with_todays_config() -> None:
    known = standard.baselines()
    assert known.metadata.keys() == {part.name for part in PARTS}
    for algorithm in standard.ANCHORS:
        for run in compose.plan(["experiment=standard_stability", f"algorithm={algorithm}", "seed=0,9"], multirun=True):
            known.refuse_other_settings(STABILITY, run.config.seed, {algorithm: run.config_hash})
    (audit,) = audits.plan(["experiment=standard_gradient", "seed=314"])
    losses = {name: audit.losses[name].plain["algorithm"]["loss"] for name in standard.ANCHORS}
    known.refuse_other_settings(GRADIENT, 314, standard.audit_hashes(audit.run.plain, losses))
    seeds = known.of(STABILITY).groupby("arm")["seed"].agg(set)
    assert seeds["GRPO"] == seeds["GSPO"] == set(STABILITY.seeds)


def test_a_folder_without_the_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="does not hold the numbers of steadymoe-1"):
        standard.baselines(tmp_path)
    (tmp_path / standard.METADATA).write_bytes((standard.FOLDER / standard.METADATA).read_bytes())
    (tmp_path / standard.OUTCOMES).write_bytes(b"PAR1")
    with pytest.raises(Damaged):
        standard.baselines(tmp_path)


# --- the command ----------------------------------------------------------------------------------------------------


Score = Callable[..., tuple[int, str, str]]


@pytest.fixture
def score(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Score:
    """``steadymoe score`` in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = steadymoe(monkeypatch, "score", *words)
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "algorithm=NAME"),
        ("algorithm=nothing", "there is no algorithm 'nothing'"),
        ("algorithm=grpo model=tiny", "got model=tiny"),
        ("algorithm=grpo --fast", "--fast"),
        ("algorithm=grpo --paper x", "--paper requires --submit"),
        ("algorithm=grpo --submit x", "--submit requires --paper and --equation"),
        ("--verify x --quick", "--quick does not go with --verify"),
        ("algorithm=grpo --verify x", "key=value does not go with --verify"),
        ("--verify nowhere", "nowhere is not a folder"),
        ("algorithm=grpo algorithm.loss.clip_low=-1", "clip_low"),
        ("algorithm=dapo", "dapo changes what the standard fixes"),
        ("algorithm=gspo algorithm.sampling.max_rollouts=2", "algorithm.sampling.max_rollouts: 1 -> 2"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_touches_nothing(
    words: str, message: str, score: Score, tmp_path: Path
) -> None:
    code, out, err = score(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_dry_prints_what_is_missing_and_runs_nothing(score: Score, tmp_path: Path) -> None:
    code, out, _ = score("algorithm=sapo", "--dry")
    assert code == 0
    assert "stability: 40 runs: 40 to run" in out  # SAPO, GRPO, GSPO, frozen
    assert "gradient: 10 audits: 10 to do, 0 done" in out
    parts = re.findall(r"(\w+): about (\d+) minutes, (\d+) at once; one \w+ took (.*) minutes of one core", out)
    assert [part for part, *_ in parts] == ["stability", "gradient"]
    for count, (_, minutes, at_once, one) in zip((40, 10), parts, strict=True):
        assert float(minutes) == pytest.approx(count * float(one) / int(at_once), abs=0.51)
    (whole,) = re.findall(r"in all: about (\d+) minutes", out)
    assert len(re.findall(r"about \d+", out)) == 3  # no second estimate beside them
    assert float(whole) == pytest.approx(sum(float(minutes) for _, minutes, *_ in parts), abs=1.1)
    assert "stability: 3 runs: 3 to run" in score("algorithm=grpo", "--quick", "--dry")[1]  # GRPO is its own anchor
    assert score("algorithm=dapo", "--dry", "algorithm.sampling.max_rollouts=1")[0] == 0
    assert not list(tmp_path.iterdir())


def test_labels_of_two_overrides_are_two() -> None:
    plans = [plan.read(["algorithm=grpo", f"algorithm.loss.clip_{end}=0.1"]) for end in ("low", "high")]
    assert len({each.name for each in plans}) == len({each.label for each in plans}) == 2


# --- a standard at a small size -------------------------------------------------------------------------------------

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
def small(score: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard of two parts at a small size, recorded on this machine, and a folder of one's own algorithms."""
    mine = tmp_path / "mine" / "conf" / "algorithm"
    mine.mkdir(parents=True)
    (mine / "same.yaml").write_text((ROOT / "conf" / "algorithm" / "grpo.yaml").read_text())
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
    parts = {"STABILITY": stability, "GRADIENT": gradient, "PARTS": (stability, gradient)}
    for module in (standard, plan, command, entry, rerun, board):
        for name in parts.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, parts[name])
    monkeypatch.setattr(standard, "baselines", lambda: standard.Baselines(_recorded(), _metadata()))
    return tmp_path


def _recorded() -> pd.DataFrame:
    rows = [("stability", "SAPO", "sapo", seed, 0.4 + seed / 100, 0.3, 1000.0 + 2 * seed) for seed in range(2)]
    rows += [("stability", "VESPO", "vespo", seed, 0.4 + seed / 100, 0.3, np.nan) for seed in range(2)]
    return pd.DataFrame(rows, columns=["part", "arm", "algorithm", "seed", "value", "start", "tokens"])


def _metadata() -> dict[str, dict[str, Any]]:
    """The hashes of the anchors' runs, and of the audit, of the small standard."""
    fixed = ["experiment=standard_stability", *SMALL, "seed=0"]
    runs = {name: {"0": compose.plan([*fixed, f"algorithm={name}"])[0].config_hash} for name in standard.ANCHORS}
    (audit,) = audits.plan(["experiment=standard_gradient", *SMALL, *AUDIT, "seed=305"])
    losses = {name: audit.losses[name].plain["algorithm"]["loss"] for name in standard.ANCHORS}
    of_audit = {name: {"305": digest} for name, digest in standard.audit_hashes(audit.run.plain, losses).items()}
    where = {"machine": "this one", "minutes": 0.1}
    return {"stability": {"hashes": runs} | where, "gradient": {"hashes": of_audit} | where}


def _digests(folder: Path) -> dict[Path, str]:
    files = (path for path in folder.glob("**/*") if path.is_file() and path.name != "sweep.json")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_one_algorithm_after_the_other_is_scored_next_to_the_same_anchors(
    small: Path, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO under another name is 0 away; a second algorithm adds its own runs alone; recorded files stay."""
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    committed = _digests(standard.FOLDER)
    code, out, err = score("algorithm=same")
    assert code == 0, err
    rows = pd.read_csv("results/scores/steadymoe-1/same/score.csv").set_index(["part", "algorithm"])
    assert set(rows.loc["stability"].index) == {"same (yours)", "GRPO", "GSPO", "frozen", "SAPO", "VESPO"}
    sampled = results("steadymoe-1-stability")["steps"].query("metric == 'tokens_sampled' and algorithm == 'same'")
    own = sampled.groupby("seed")["value"].sum().mean()
    assert rows.loc[("stability", "same (yours)"), "tokens"] == own > 0
    assert rows.loc[("stability", "SAPO"), "tokens"] == 1001
    assert {f"{own:,.0f}", "1,001", "not recorded"} <= {cell.strip() for cell in re.split(r"[|\n]", out)}
    assert rows.loc[("stability", "GRPO"), "difference mean"] == 0
    assert rows.loc[("gradient", "GRPO"), "difference mean"] == 0
    assert rows.loc["stability"]["source"][["GSPO", "SAPO"]].tolist() == ["here", "recorded"]
    assert Path("results/scores/steadymoe-1/same/score.html").read_text().count('class="mine"') == 2
    before = _digests(small / "results" / "runs")
    code, out, _ = score("algorithm=sapo", "--dry")
    assert re.search(r"stability: 8 runs: .*2 to run", out)  # its own; anchors and the frozen policy are there
    assert score("algorithm=same")[0] == 0  # again: nothing runs
    assert _digests(small / "results" / "runs") == before
    _check_its_entry_is_repeated(small, score)
    _check_the_tutorial(small, score)
    assert _digests(standard.FOLDER) == committed


def _check_the_tutorial(small: Path, score: Score) -> None:
    """The two files of docs/your_algorithm.md, as they are there; then with another number."""
    text = (ROOT / "docs" / "your_algorithm.md").read_text()
    (loss, *_), (numbers, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (small / "mine" / "my_losses.py").write_text(loss)
    yaml = small / "mine" / "conf" / "algorithm" / "half_clipped.yaml"
    yaml.write_text(numbers)
    words = ("algorithm=half_clipped", "--quick")
    code, out, err = score(*words)
    assert code == 0, err
    assert "half_clipped (yours)" in out
    page = "results/scores/steadymoe-1-quick/half_clipped/score.html"
    assert Path(page).exists()
    assert page in text
    yaml.write_text(numbers.replace("clip_high: 0.2", "clip_high: 0.3"))
    code, _, err = score(*words)
    assert code == 2
    assert "half_clipped was scored with other numbers" in err
    code, _, err = score(*words, "--redo")
    assert code == 0, err
    assert "another config (algorithm.loss.clip_high: 0.2 -> 0.3)" in err


def _repeats(results: Path, to: Path) -> Path:
    """The runs of ``same`` and of GRPO as ``--run`` makes them: two experiments, each of one arm."""
    to.mkdir()
    shutil.copytree(results / "cold_starts", to / "cold_starts")
    for arm, algorithm in (("yours", "same"), ("grpo", "grpo")):
        for path in (results / "runs").glob(f"*/{algorithm}/**/run.json"):
            if json.loads(path.read_text())["axes"]["optimizer.learning_rate"]:  # not the frozen policy
                shutil.copytree(path.parent, to / "runs" / arm / path.parent.name)
    return to


def _check_its_entry_is_repeated(small: Path, score: Score) -> None:
    """The entry of GRPO under another name is read as it was scored, and the runs themselves repeat it."""
    submit = ("algorithm=same", "--paper", "none", "--equation", "3", "--submit")
    code, _, err = score(*submit, str(small / "entry"))
    assert (code, err) == (0, "")
    found, results = entry.read(small / "entry"), _repeats(small / "results", small / "repeats")
    assert found.own_files == ["conf/algorithm/same.yaml"]
    for part in command.PARTS:
        pd.testing.assert_series_equal(found.by_seed(part), found.by_seed(part, "grpo"))
    assert rerun.compare(found, results, [0, 1]) == "repeated (seeds 0, 1)"
    submitted = found.about["first"]
    for changed, verdict in (
        ({"grad_norm": [1.01 * norm for norm in submitted["0"]["grad_norm"]]}, "seed 0: the first updates differ"),
        ({"cold_start": "of another machine"}, "not decided (seeds 0, 1): other cold starts"),
    ):
        first = submitted | {"0": submitted["0"] | changed}
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
        # Two seeds may end alike, and their interval is then a point.
        spread = near.assign(value=near["value"] + 0.01 * (near["seed"] == 1))
        assert rerun.compare(replace(found, outcomes=spread, about=elsewhere), results, [0, 1]).startswith("repeated")
        assert "lies outside" in rerun.compare(replace(found, outcomes=far, about=elsewhere), results, [0, 1])
    path = results / "runs" / "yours" / "seed=1" / "run.json"
    path.write_text(path.read_text().replace('"responses": 8', '"responses": 16'))
    assert rerun.compare(found, results, [0, 1]).endswith("the standard fixes: rollout.responses: 8 -> 16")
    assert rerun.compare(found, small / "mine", [0, 1]).startswith("its runs cannot be read")
    one = next((small / "results" / "audits").rglob("k=2.parquet"))
    one.rename(one.with_suffix(".away"))
    code, _, err = score(*submit, str(small / "again"))
    assert (code, "part gradient is missing; run steadymoe score algorithm=same" in err) == (2, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stability": {"hashes": {"grpo": {"0": "0"}}}}, "standard_stability has other numbers for grpo"),
        ({"gradient": {"hashes": {}}}, "standard_gradient has other numbers for the audit"),
    ],
)
def test_other_numbers_than_the_recorded_ones_are_another_standard(
    changed: dict[str, Any], message: str, small: Path, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = _metadata() | changed
    monkeypatch.setattr(standard, "baselines", lambda: standard.Baselines(pd.DataFrame(), metadata))
    code, out, err = score("algorithm=same", "--quick")
    assert (code, out) == (2, "")
    assert message in err
    assert not (small / "results").exists()


def test_an_algorithm_that_fails_check_or_changes_the_setting_is_not_run(
    small: Path, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.check, "check", lambda overrides: 1)
    code, _, err = score("algorithm=same", "--quick")
    assert code == 2
    assert "is not scored" in err
    path = small / "mine" / "conf" / "algorithm" / "greedy.yaml"
    own = "".join(f"  {line}\n" for line in (path.parent / "same.yaml").read_text().splitlines())
    path.write_text(f"# @package _global_\nrollout:\n  responses: 16\nalgorithm:\n{own}")
    code, out, err = score("algorithm=greedy", "--quick")
    assert (code, out) == (2, "")
    assert "rollout.responses: 8 -> 16" in err
    assert not (small / "results").exists()

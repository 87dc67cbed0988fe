"""Scores: three numbers a loss from outcomes that are known, what runs, what is refused and what is recorded."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fixtures import on_path, steadymoe

from steadymoe.bench.check import properties
from steadymoe.bench.runs import compose, identity
from steadymoe.bench.score import board, command, outcomes, recorded, standard
from steadymoe.bench.score.standard import COLUMNS, DIALS, MISMATCH, RATE, REFERENCE, STALENESS, Dial
from steadymoe.bench.support.errors import ConfigError

ROOT = Path(__file__).parents[2]
Score = Callable[..., tuple[int, str, str]]
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
REPEATED = range(10, 15)  # further seeds of the dials of rate and mismatch
VALUES = {"rate": RATES, "staleness": (16.0, 32.0, 64.0, 128.0), "mismatch": (0.0, 0.1, 0.2, 0.4)}


def made(octaves: dict[str, float], dials: tuple[str, ...] = ("rate",), seeds: int = 5) -> pd.DataFrame:
    """Outcomes that hold at .8 up to the second value of a dial times 2 ** octaves, and fall from there on."""
    generator, rows = np.random.default_rng(0), []
    for dial in dials:
        values = VALUES[dial]
        for loss, shift in octaves.items():
            for value in values:
                if dial == "mismatch":
                    fall = max(0.0, value - 0.1 * 2**shift) / 0.1
                else:
                    fall = max(0.0, np.log2(value / values[1]) - shift)
                for seed in range(seeds):
                    level = np.clip(0.8 - 0.3 * fall + 0.01 * generator.standard_normal(), 0, 1)
                    rate = value if dial == "rate" else 1e-4
                    rows.append((dial, loss, loss, rate, value, seed, 0.4, 0.6, level, level))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def test_score_has_a_number_per_dial_and_is_ranked() -> None:
    found = outcomes.scores(made({"grpo": 0.0, "gspo": 1.0, "less": -1.0}, ("rate", "staleness", "mismatch")))
    assert [each.loss for each in found] == ["gspo", "grpo", "less"]
    gspo, grpo, less = found
    for dial in ("rate", "staleness"):
        assert gspo.tolerances[dial].ratio == pytest.approx(2, rel=0.1)
        assert grpo.tolerances[dial].ratio == 1
        assert less.tolerances[dial].ratio == pytest.approx(0.5, rel=0.1)
    assert (gspo.decided["rate"], grpo.decided["rate"], less.decided["rate"]) == (True, False, True)
    assert gspo.tolerances["mismatch"].ratio == pytest.approx((0.2 + 0.2 / 3) / (0.1 + 0.2 / 3), rel=0.1)
    rows = outcomes.table(found)
    assert rows["rate × grpo"].tolist()[1] == "1.00"
    assert rows["rate × grpo"].str.endswith(" *").tolist() == [True, False, True]


def test_levels_use_shared_seeds_and_ratios_all_seeds() -> None:
    found = made({"grpo": 0.0, "gspo": 1.0}, seeds=8)
    fewer = found[(found["loss"] == "grpo") | (found["seed"] < 5)]
    changed = fewer.assign(sampled=fewer["sampled"].where(fewer["seed"] < 5, 0.5 * fewer["sampled"]))
    (gspo, grpo), (few, same) = outcomes.scores(changed), outcomes.scores(fewer[fewer["seed"] < 5])
    assert grpo.sampled == same.sampled
    assert (grpo.seeds, gspo.seeds) == (8, 5)
    assert str(gspo.tolerances["rate"]) == str(few.tolerances["rate"])
    assert outcomes.start(changed)[0].n == 5


def test_missing_dial_and_missing_threshold_are_shown_in_words() -> None:
    (first, _) = outcomes.scores(made({"grpo": 0.0, "gspo": 1.0}))
    assert first.text(STALENESS) == "not run"
    flat = made({"grpo": 0.0}).assign(sampled=0.3)
    (alone,) = outcomes.scores(flat)
    assert alone.text(RATE) == "no threshold"


def test_smallest_decidable_ratio_grows_with_noise_and_losses() -> None:
    (number, *_) = (each.tolerances["rate"] for each in outcomes.scores(made({"gspo": 1.0, "grpo": 0.0})))
    assert 1 < outcomes.smallest(number, 1) < outcomes.smallest(number, 11)
    wide = replace(number, low=number.low / 2, high=number.high * 2)
    assert outcomes.smallest(wide, 1) > outcomes.smallest(number, 1)
    assert outcomes.smallest(number, 1) == pytest.approx(number.high / number.ratio)
    assert np.isnan(outcomes.smallest(replace(number, high=np.inf), 1))


def test_grid_is_extended_once_at_its_ends() -> None:
    levels = made({"grpo": 0.0, "strong": 9.0, "weak": -3.0})
    falls = (levels["loss"] == "weak") & (levels["value"] > RATES[0])
    levels.loc[falls, "sampled"] -= 0.2
    levels.loc[(levels["loss"] != "weak") & (levels["value"] == RATES[1]), "sampled"] += 0.1  # the best of both
    assert outcomes.wider(levels, "grpo", RATES) == []
    assert outcomes.wider(levels, "strong", RATES) == [2 * RATES[-1]]
    assert outcomes.wider(levels, "weak", RATES) == [RATES[0] / 2]
    more = levels[levels["loss"] == "strong"].assign(value=2 * RATES[-1]).drop_duplicates("seed")
    less = levels[levels["loss"] == "strong"].assign(value=RATES[0] / 2).drop_duplicates("seed")
    assert outcomes.wider(pd.concat([levels, more, less]), "strong", RATES) == []


# --- what was recorded ------------------------------------------------------------------------------------------------


def test_grpo_was_recorded_with_current_settings_on_every_dial() -> None:
    table, hashes = standard.recorded(), standard.made()["hashes"]
    for dial in DIALS:
        planned = compose.plan([f"experiment={dial.experiment}", f"algorithm={REFERENCE}"], multirun=True)
        standard.refuse_other_settings(dial, planned)
        values = {f"{standard.value_of(dial, run):g}" for run in planned}
        assert values <= hashes[dial.name].keys()
        ours = table[(table["dial"] == dial.name) & (table["loss"] == REFERENCE)]
        again = set() if dial == STALENESS else set(REPEATED)
        assert set(ours["seed"]) == {run.config.seed for run in planned} | again
        assert (ours.groupby("value").size() == (10 if again else 5)).all()


@pytest.mark.parametrize("dial", DIALS, ids=lambda dial: dial.name)
def test_other_settings_than_the_recorded_ones_are_refused(
    dial: Dial, score: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any dial, before anything runs."""
    facts = standard.made()
    changed = facts["hashes"] | {dial.name: dict.fromkeys(facts["hashes"][dial.name], "0")}
    monkeypatch.setattr(standard, "made", lambda: facts | {"hashes": changed})
    code, _, err = score("algorithm=sapo", "--dry")
    assert (code, f"experiment={dial.experiment} is not as it was recorded" in err) == (2, True)
    assert not list(tmp_path.iterdir())


# --- the command ------------------------------------------------------------------------------------------------------


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
        ("algorithm=sapo --record --quick", "--quick cannot be combined with --record"),
        ("--board b --quick", "--quick cannot be combined with --board"),
        ("--record", "algorithm=NAME"),
        ("algorithm=grpo algorithm.loss.clip_low=-1", "clip_low"),
        ("algorithm=dapo", "dapo changes what the standard fixes"),
        ("algorithm=gspo algorithm.sampling.max_rollouts=2", "algorithm.sampling.max_rollouts: 1 -> 2"),
        (
            "algorithm=grpo algorithm.loss.clip_low=.1 algorithm.loss.clip_high=.1 algorithm.loss.dual_clip=3 "
            "algorithm.advantage.epsilon=.1",
            "at most 3 numbers of a loss may be tuned, got 4",
        ),
    ],
)
def test_invalid_request_fails_in_one_line_and_writes_nothing(
    words: str, message: str, score: Score, tmp_path: Path
) -> None:
    code, out, err = score(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_what_is_missing(score: Score, tmp_path: Path) -> None:
    code, out, _ = score("algorithm=sapo", "--dry")
    assert code == 0
    assert "rate: 75 runs: 75 to run" in out  # SAPO, GRPO, GSPO
    assert "staleness and mismatch: 120 to run; with shuffled rewards: 1" in out
    ((minutes, at, one),) = re.findall(
        r"about (\d+) minutes with (\d+) runs at once.* one run took ([\d.]+) minutes", out
    )
    assert float(minutes) == pytest.approx(196 * float(one) / int(at), abs=0.51)
    assert "rate: 18 runs: 18 to run" in (quick := score("algorithm=sapo", "--quick", "--dry")[1])
    assert "shuffled" not in quick
    assert "rate: 9 runs: 9 to run" in score("algorithm=grpo", "--quick", "--dry")[1]  # GRPO is its own anchor
    assert "rate: 18 runs: 18 to run" in score("algorithm=gspo", "--quick", "--dry")[1]  # no anchor of a quick score
    assert not list(tmp_path.iterdir())


# --- a standard at a small size ---------------------------------------------------------------------------------------

SMALL = (
    "hydra/launcher=basic",  # in this process
    *("model=micro", "task.min_length=2", "task.max_length=3", "seed=0,1"),
    *("updates=4", "minibatch_prompts=2", "evaluation.every=4", "evaluation.prompts=8"),
    *("evaluation.pass_k=0", "collapse.patience_updates=4", "collapse.window_updates=4", "cold_start.batch_size=32"),
    *("cold_start.accuracy_low=0", "cold_start.accuracy_high=1", "cold_start.check_every=10"),
    "cold_start.check_prompts=8",
)


@pytest.fixture
def small(score: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The standard at a small size, and a folder of one's own algorithms, which holds GRPO as ``same``."""
    mine = tmp_path / "mine" / "conf" / "algorithm"
    mine.mkdir(parents=True)
    (mine / "same.yaml").write_text((ROOT / "conf" / "algorithm" / "grpo.yaml").read_text())
    on_path(monkeypatch, tmp_path / "mine", "my_losses")
    rate = replace(RATE, overrides=(*SMALL, "updates_per_rollout=2", "optimizer.learning_rate=1e-3,1e-2"))
    staleness = replace(STALENESS, overrides=(*SMALL, "updates_per_rollout=2,4"))
    mismatch = replace(MISMATCH, overrides=(*SMALL, "updates_per_rollout=2", "engine.strength=0.0,0.1"))
    dials = (rate, staleness, mismatch)
    for module in (standard, outcomes, command, board):
        for name, value in {"RATE": rate, "DIALS": dials}.items():
            if name in vars(module):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(command, "QUICK", ("seed=0",))
    hashes = {}
    for dial in dials:
        planned = compose.plan([f"experiment={dial.experiment}", *dial.overrides, "algorithm=grpo"], multirun=True)
        plain = {f"{standard.value_of(dial, run):g}": run.plain for run in planned}
        hashes[dial.name] = {value: identity.config_hash(each | {"seed": None}) for value, each in plain.items()}
    shutil.copytree(standard.FOLDER, tmp_path / "standard")
    (tmp_path / "standard" / standard.MADE).write_text(json.dumps(standard.made() | {"hashes": hashes}))
    monkeypatch.setattr(standard, "FOLDER", tmp_path / "standard")
    return tmp_path


def times(folder: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in folder.rglob("updates.parquet")}


@pytest.fixture
def scored(small: Path, score: Score, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a score of GRPO under another name prints."""
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    monkeypatch.setattr(command, "ANCHORS", (REFERENCE,))
    code, out, err = score("algorithm=same")
    assert code == 0, err
    return out


def test_score_end_to_end(small: Path, score: Score, scored: str) -> None:
    """GRPO under another name scores as GRPO does; again nothing runs."""
    folder = Path("results/scores/steadymoe-2/same")
    table = pd.read_csv(folder / "outcomes.csv")
    for dial in ("rate", "staleness", "mismatch"):
        ours = {
            loss: table[(table["dial"] == dial) & (table["loss"] == loss)].sort_values(["value", "seed"])["sampled"]
            for loss in ("same", "grpo")
        }
        assert ours["same"].tolist() == ours["grpo"].tolist()
        assert len(ours["same"]) >= 4
    assert {"score.html", "profile.png"} <= {path.name for path in folder.iterdir()}
    assert "same" in scored
    before = times(small / "results" / "runs")
    (shuffled,) = (path for path in before if "tolerance_shuffled" in path.parts)
    config = json.loads((shuffled.parent / "run.json").read_text())["config"]
    assert config["rollout"]["shuffle_rewards"]
    assert config["optimizer"]["learning_rate"] == outcomes.best_rate(table, "same")
    assert score("algorithm=same")[0] == 0
    assert times(small / "results" / "runs") == before
    _, out, _ = score("algorithm=same", "--dry")
    assert "staleness and mismatch: 0 to run; with shuffled rewards: 0" in out
    assert "minutes" not in out


def test_gain_from_shuffled_rewards_is_named() -> None:
    table = made({"grpo": 0.0, "mine": 0.0})  # GRPO gains .4
    shuffled = table[table["loss"] == "mine"]
    assert outcomes.gains_without_reward(table, shuffled.assign(sampled=0.48)) == ""
    assert "with shuffled rewards it gains 0.120" in outcomes.gains_without_reward(table, shuffled.assign(sampled=0.52))


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(small: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small standard in a git checkout, from which ``gmpo`` is missing; every algorithm passes ``check``."""
    folder = small / "standard"
    table = pd.read_csv(folder / standard.OUTCOMES)
    table[table["loss"] != "gmpo"].to_csv(folder / standard.OUTCOMES, index=False)
    git(folder, "init")
    git(folder, "add", ".")
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    monkeypatch.setattr(command, "ANCHORS", (REFERENCE,))
    return folder


def test_record_appends_the_loss_and_its_reference(
    checkout: Path, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that gains without rewards is not recorded; one that does not is, once, and then is on the board."""
    files = [checkout / name for name in (standard.OUTCOMES, standard.MADE)]
    before = [path.read_text() for path in files]
    monkeypatch.setattr(outcomes, "gains_without_reward", lambda *tables: "rewards are not why it gains")
    code, out, _ = score("algorithm=gmpo", "--record")
    assert (code, "gmpo cannot be recorded: rewards are not why it gains." in out) == (1, True)
    assert [path.read_text() for path in files] == before

    monkeypatch.setattr(outcomes, "gains_without_reward", lambda *tables: "")
    monkeypatch.setattr(properties, "memory", lambda loss: f"{properties.KEEPS_STATE}: mean")
    code, out, err = score("algorithm=gmpo", "--record")
    assert code == 0, err
    assert "gmpo is with state" in out
    assert files[0].read_text().startswith(before[0])
    measured = pd.read_csv("results/scores/steadymoe-2/gmpo/outcomes.csv")
    suite, block = standard.blocks()
    assert len(suite) == before[0].count("\n") - 1
    pd.testing.assert_frame_equal(block, measured)
    assert set(block["loss"]) == {"gmpo", REFERENCE}
    assert set(block["dial"]) == {"rate", "staleness", "mismatch"}
    facts = standard.made()
    assert facts["also"].pop("gmpo").keys() == {"machine", "revision", "versions", "date", "label"}
    assert facts == json.loads(before[1])

    assert score("--board", "board")[0] == 0
    page = Path("board/board.md").read_text()
    (row,) = [line for line in page.partition("## Headroom")[0].splitlines() if line.startswith("| gmpo ")]
    assert "recorded, with state, n = 2" in row
    assert "next to grpo" in page
    after, runs = files[0].read_text(), times(Path("results/runs"))
    code, out, err = score("algorithm=gmpo", "--record")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "gmpo was recorded before" in err
    assert (files[0].read_text(), times(Path("results/runs"))) == (after, runs)


def test_record_needs_a_checkout_and_a_shipped_loss(checkout: Path, score: Score) -> None:
    """Before anything runs."""
    for words in (["algorithm=same"], ["algorithm=gmpo", "algorithm.loss.log_clip_low=.1"]):
        code, out, err = score(*words, "--record")
        assert (code, out) == (2, "")
        assert f"algorithm of the checkout with the numbers of its YAML, got {' '.join(words)}" in err
    git(checkout, "rm", "--cached", standard.OUTCOMES)
    for leave in (lambda: None, lambda: shutil.rmtree(checkout / ".git")):
        leave()
        code, out, err = score("algorithm=gmpo", "--record")
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert "--record needs a git checkout of steadymoe" in err
    assert not Path("results").exists()


def test_runs_from_several_cold_starts_are_not_recorded(checkout: Path) -> None:
    before = (checkout / standard.OUTCOMES).read_text()
    table = made({REFERENCE: 0.0, "gmpo": 0.0})
    rows = table.assign(start=table["start"].where(table["loss"] == REFERENCE, 0.5))
    with pytest.raises(ConfigError, match="gmpo is not recorded: GRPO's runs began from other cold starts"):
        recorded.append("gmpo", rows, {})
    with pytest.raises(ConfigError, match="gspo was recorded before"):
        recorded.append("gspo", made({REFERENCE: 0.0, "gspo": 0.0}), {})
    assert (checkout / standard.OUTCOMES).read_text() == before


@pytest.mark.check
@pytest.mark.usefixtures("scored")
def test_redo_replaces_outdated_runs_of_every_dial(small: Path, score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the grid's end, too."""
    monkeypatch.setattr(outcomes, "wider", lambda levels, loss, grid: [2 * grid[-1]] if loss == "same" else [])
    assert score("algorithm=same")[0] == 0
    runs = small / "results" / "runs"
    known = {path: json.loads(path.read_text()) for path in runs.rglob("run.json")}
    ours = {path: facts for path, facts in known.items() if facts["algorithm"] == "same"}
    beyond = [path for path, facts in ours.items() if facts["config"]["optimizer"]["learning_rate"] == 0.02]
    assert len(beyond) == 2
    for path in beyond:
        path.write_text(json.dumps(ours[path] | {"algorithm_code": "0" * 16}))
    code, _, err = score("algorithm=same")
    assert (code, "was made with" in err) == (2, True)
    assert "outdated: 2 to replace" in score("algorithm=same", "--redo", "--dry")[1]
    before = times(runs)
    code, _, err = score("algorithm=same", "--redo")
    assert (code, err.count("rerunning ")) == (0, 2)
    redone = {path.parent for path, when in times(runs).items() if when != before[path]}
    assert redone == {path.parent for path in beyond}


def test_tutorial_loss_is_scored_and_changed_numbers_need_redo(
    small: Path, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two files of docs/your_algorithm.md, as they are there; then with another number."""
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    text = (ROOT / "docs" / "your_algorithm.md").read_text()
    (loss, *_), (numbers, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (small / "mine" / "my_losses.py").write_text(loss)
    yaml = small / "mine" / "conf" / "algorithm" / "half_clipped.yaml"
    yaml.write_text(numbers)
    words = ("algorithm=half_clipped", "--quick")
    code, _, err = score(*words)
    assert code == 0, err
    page = "results/scores/steadymoe-2-quick/half_clipped/score.html"
    assert f"STEADYMOE_PATH={small / 'mine'} steadymoe score algorithm=half_clipped --quick" in Path(page).read_text()
    assert page in text
    yaml.write_text(numbers.replace("clip_high: 0.2", "clip_high: 0.3"))
    code, _, err = score(*words)
    assert code == 2
    assert "half_clipped was scored with another config" in err
    code, _, err = score(*words, "--redo")
    assert code == 0, err
    assert "another config (algorithm.loss.clip_high: 0.2 -> 0.3)" in err


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

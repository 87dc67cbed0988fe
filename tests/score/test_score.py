"""Scores: numbers from outcomes that are known, what runs, what is refused and what is recorded."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fixtures import Said, on_path, steadymoe

from steadymoe.bench.check import properties
from steadymoe.bench.runs import compose
from steadymoe.bench.score import command, outcomes, recorded, standard
from steadymoe.bench.score.standard import COLUMNS, DENSE, EXPERIMENT, FREE, MEASURED, PINNED, SIDES, Side
from steadymoe.bench.statistics.tolerance import REFERENCE
from steadymoe.bench.support.errors import ConfigError

ROOT = Path(__file__).parents[2]
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run in a folder of their own."""
    monkeypatch.chdir(tmp_path)


def made(octaves: dict[str, float], sides: dict[str, float] | None = None, seeds: int = 5) -> pd.DataFrame:
    """Outcomes that hold at .8 up to the second rate times 2 ** octaves, of the loss and the side, and fall from there.

    At the best rate routes change by .1 and ratios have a variance of .01.
    """
    generator, rows = np.random.default_rng(0), []
    for side, more in (sides or {FREE.name: 0.0}).items():
        for loss, shift in octaves.items():
            for rate in RATES:
                fall = max(0.0, np.log2(rate / RATES[1]) - shift - more)
                for seed in range(seeds):
                    level = np.clip(0.8 - 0.3 * fall + 0.01 * generator.standard_normal(), 0, 1)
                    rows.append((side, loss, loss, rate, seed, 0.4, 0.6, level, level, 0.1, 0.01))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def test_score_has_a_number_per_side_and_is_ranked() -> None:
    table = made({"grpo": 0.0, "gspo": 1.0, "less": -1.0}, {FREE.name: 0.0, PINNED.name: 0.5, DENSE.name: 0.0})
    found = outcomes.scores(table)
    assert [each.loss for each in found] == ["gspo", "grpo", "less"]
    gspo, grpo, less = found
    for name in ("rate", "dense"):
        assert gspo.numbers[name].ratio == pytest.approx(2, rel=0.1)
        assert grpo.numbers[name].ratio == 1
        assert less.numbers[name].ratio == pytest.approx(0.5, rel=0.1)
    for each in found:  # all lose the same to moving routes
        assert each.numbers["cost"].ratio == pytest.approx(2**0.5, rel=0.1)
        assert each.decided["cost"]
    assert gspo.numbers["pinned"].ratio == pytest.approx(2 * 2**0.5, rel=0.1)
    assert (grpo.closed.n, abs(gspo.closed.mean) < 0.2, gspo.is_raw) == (0, True, False)
    assert (gspo.decided["rate"], grpo.decided["rate"], less.decided["rate"]) == (True, False, True)
    rows = outcomes.table(found)
    assert rows["rate × grpo"].tolist()[1] == "1.00"
    assert rows["rate × grpo"].str.endswith(" *").tolist() == [True, False, True]
    assert "7 tokens × grpo" not in rows


def test_change_of_routes_closes_a_raw_share_of_the_gap() -> None:
    """With free routes it tolerates half an octave of the octave that pinned ones give GRPO."""
    table = made({"grpo": 0.0, "grpo routing=r2": 0.5}, {FREE.name: 0.0, PINNED.name: 1.0})
    table = table[(table["side"] == FREE.name) | (table["loss"] == "grpo")]
    (change, reference) = outcomes.scores(table.assign(algorithm="grpo"))
    assert (change.loss, change.is_raw, "cost" in change.numbers) == ("grpo routing=r2", True, False)
    assert change.closed.mean == pytest.approx(0.5, abs=0.1)
    assert outcomes.table([change, reference])["gap closed"].str.endswith(" raw").tolist() == [True, False]


def test_no_share_of_a_gap_where_a_curve_never_falls() -> None:
    """A bound is no estimate: the gap closed has no number, and the routing cost says why."""
    table = made({"grpo": 0.0, "strong": 9.0}, {FREE.name: 0.0, PINNED.name: 0.5})
    strong, grpo = outcomes.scores(table)
    assert (strong.closed.n, strong.text("cost")) == (0, "free > grid")
    assert grpo.decided["cost"]
    (_, other) = outcomes.scores(made({"grpo": 9.0, "other": 0.0}))
    assert (other.loss, other.text("rate")) == ("other", "grpo > grid")


def test_drift_and_variance_are_those_measured_at_the_best_rate() -> None:
    table = made({"grpo": 0.0})
    best = outcomes.best_rate(table, "grpo")
    measured = table[table["rate"] == best].assign(
        side=MEASURED.name, expert_change=0.02, variance=[1e-4, 1e-2] * 2 + [1e-3]
    )
    (score,) = outcomes.scores(pd.concat([table.assign(expert_change=np.nan, variance=np.nan), measured]))
    assert score.expert_change.mean == pytest.approx(0.02)
    assert (score.variance.mean, score.variance.n) == (pytest.approx(1e-3), 5)  # a geometric mean


def test_levels_use_shared_seeds_and_ratios_all_seeds() -> None:
    found = made({"grpo": 0.0, "gspo": 1.0}, seeds=8)
    fewer = found[(found["loss"] == "grpo") | (found["seed"] < 5)]
    changed = fewer.assign(sampled=fewer["sampled"].where(fewer["seed"] < 5, 0.5 * fewer["sampled"]))
    (gspo, grpo), (few, same) = outcomes.scores(changed), outcomes.scores(fewer[fewer["seed"] < 5])
    assert grpo.sampled == same.sampled
    assert (grpo.seeds, gspo.seeds) == (8, 5)
    assert str(gspo.numbers["rate"]) == str(few.numbers["rate"])
    assert outcomes.start(changed)[0].n == 5


def test_missing_side_and_missing_threshold_are_shown_in_words() -> None:
    (first, _) = outcomes.scores(made({"grpo": 0.0, "gspo": 1.0}))
    assert first.text("dense") == "not run"
    flat = made({"grpo": 0.0}).assign(sampled=0.3)
    (alone,) = outcomes.scores(flat)
    assert alone.text("rate") == "no threshold"


def test_smallest_decidable_ratio_grows_with_noise_and_losses() -> None:
    (number, *_) = (each.numbers["rate"] for each in outcomes.scores(made({"gspo": 1.0, "grpo": 0.0})))
    assert 1 < outcomes.smallest(number, 1) < outcomes.smallest(number, 11)
    wide = replace(number, low=number.low / 2, high=number.high * 2)
    assert outcomes.smallest(wide, 1) > outcomes.smallest(number, 1)
    assert outcomes.smallest(number, 1) == pytest.approx(number.high / number.ratio)
    assert np.isnan(outcomes.smallest(replace(number, high=np.inf), 1))


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_grid_is_extended_at_its_ends(side: Side) -> None:
    levels = made({"grpo": 0.0, "strong": 9.0, "weak": -3.0}, {FREE.name: 0.0} | {side.name: 0.0})
    falls = (levels["loss"] == "weak") & (levels["rate"] > RATES[0])
    levels.loc[falls, "sampled"] -= 0.2
    levels.loc[(levels["loss"] != "weak") & (levels["rate"] == RATES[1]), "sampled"] += 0.1  # the best of both
    assert outcomes.wider(levels, "grpo", side) == []
    assert outcomes.wider(levels, "strong", side) == [2 * RATES[-1]]
    assert outcomes.wider(levels, "weak", side) == [RATES[0] / 2]
    assert outcomes.wider(levels, "missing", side) == []


# --- what was recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_other_settings_than_the_recorded_ones_are_refused(
    side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    """On any side, before anything runs."""
    facts, words = standard.made(), [f"experiment={EXPERIMENT}", "algorithm=grpo", "seed=0"]
    planned = compose.plan([*words, *side.choices, *side.more], multirun=True)
    assert standard.hashes(planned) == facts["hashes"][side.name]
    changed = facts["hashes"] | {side.name: dict.fromkeys(facts["hashes"][side.name], "0")}
    monkeypatch.setattr(standard, "made", lambda: facts | {"hashes": changed})
    assert f"experiment={EXPERIMENT} is not as it was recorded" in refused("score", "algorithm=sapo", "--dry")
    assert not list(tmp_path.iterdir())


# --- the command ------------------------------------------------------------------------------------------------------


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
        ("algorithm=grpo optimizer.learning_rate=1e-3", "got optimizer.learning_rate=1e-3"),
        ("algorithm=grpo routing=nothing", "nothing"),
        ("algorithm=grpo routing=r2,r3", "routing=r2,r3 has several values"),
        ("algorithm=grpo routing=pinned", "changes nothing"),
        ("algorithm=gspo optimizer=adamw", "changes nothing"),
        ("algorithm=grpo optimizer=sgd", "has learning rates of its own"),
        ("algorithm=gspo algorithm.sampling.max_rollouts=2", "algorithm.sampling.max_rollouts: 1 -> 2"),
        (
            "algorithm=grpo algorithm.loss.clip_low=.1 algorithm.loss.clip_high=.1 algorithm.loss.dual_clip=3 "
            "algorithm.advantage.epsilon=.1",
            "at most 3 numbers of a loss may be tuned, got 4",
        ),
    ],
)
def test_invalid_request_fails_in_one_line_and_writes_nothing(
    words: str, message: str, refused: Said, tmp_path: Path
) -> None:
    assert message in refused("score", *words.split())
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_what_is_missing(ran: Said, tmp_path: Path) -> None:
    def planned(*words: str) -> tuple[dict[str, int], str]:
        out = ran("score", *words, "--dry")
        return {side: int(runs) for side, runs in re.findall(r"^(\w+): (\d+) runs?: \d+ to run", out, re.M)}, out

    runs, out = planned("algorithm=sapo")
    assert runs == {"free": 40, "pinned": 40, "dense": 40, "measured": 10, "shuffled": 1}  # SAPO and GRPO
    (minutes,) = re.findall(r"about (\d+) minutes of one core", out)
    assert float(minutes) == pytest.approx(sum(runs.values()) * standard.made()["minutes"], abs=0.51)
    assert planned("algorithm=sapo", "--quick")[0] == {"free": 12, "pinned": 12}
    assert planned("algorithm=grpo", "--quick")[0] == {"free": 6, "pinned": 6}
    # Routes are one thing; a dense model has none, nor has a loss that reads them anything to read there.
    assert planned("algorithm=grpo", "routing=r2")[0] == runs | {"pinned": 20, "dense": 20}
    for words in (["algorithm=rspo_gspo"], ["algorithm=grpo", "optimizer.expert_factor=2"]):
        found, out = planned(*words)
        assert found == runs | {"dense": 20}
        assert "is not scored with dense: " in out
    for words in (
        ["routing=freeze", "optimizer.router_factor=1"],
        ["routing=lagged", "savings.reuse_sampler_logprobs=null"],
    ):
        assert planned("algorithm=grpo", *words, "--quick")[0]["free"] == 12
    assert not list(tmp_path.iterdir())


# --- a standard at a small size ---------------------------------------------------------------------------------------

SMALL = (
    "hydra/launcher=basic",  # in this process
    *("model.config.num_hidden_layers=1", "task.min_forks=1", "task.max_forks=2"),
    *("updates=4", "minibatch_prompts=2", "evaluation.every=4", "evaluation.prompts=8"),
    *("evaluation.pass_k=0", "collapse.patience_updates=4", "collapse.window_updates=4", "cold_start.batch_size=32"),
    *("cold_start.accuracy_low=0", "cold_start.accuracy_high=1", "cold_start.check_every=10"),
    *("cold_start.check_prompts=8", "updates_per_rollout=2"),
)
SWEPT = ("optimizer.learning_rate=1e-3,1e-2",)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The standard at a small size, and a folder of one's own algorithms, which holds GRPO as ``same``."""
    mine = tmp_path / "mine" / "conf" / "algorithm"
    mine.mkdir(parents=True)
    (mine / "same.yaml").write_text((ROOT / "conf" / "algorithm" / "grpo.yaml").read_text())
    on_path(monkeypatch, tmp_path / "mine", "my_losses")
    for name in ("FREE", "PINNED", "DENSE", "MEASURED", "CONTROL"):
        its = getattr(standard, name)
        changed = replace(its, more=(*its.more, *SMALL, *(SWEPT if its in SIDES else ())))
        for module in (standard, outcomes, command):
            if name in vars(module):
                monkeypatch.setattr(module, name, changed)
    sides = (standard.FREE, standard.PINNED, standard.DENSE)
    monkeypatch.setattr(standard, "SIDES", sides)
    monkeypatch.setattr(standard, "SEEDS", "seed=0,1")
    monkeypatch.setattr(standard, "QUICK", ("seed=0",))
    hashes = {}
    for side in sides:
        words = [f"experiment={EXPERIMENT}", *side.choices, *side.more, "algorithm=grpo", "seed=0"]
        hashes[side.name] = standard.hashes(compose.plan(words, multirun=True))
    shutil.copytree(standard.FOLDER, tmp_path / "standard")
    (tmp_path / "standard" / standard.MADE).write_text(json.dumps(standard.made() | {"hashes": hashes}))
    monkeypatch.setattr(standard, "FOLDER", tmp_path / "standard")
    return tmp_path


def times(folder: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in folder.rglob("updates.parquet")}


@pytest.fixture
def scored(small: Path, ran: Said, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a score of GRPO under another name prints."""
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    return ran("score", "algorithm=same")


def test_score_end_to_end(small: Path, ran: Said, scored: str) -> None:
    """GRPO under another name scores as GRPO does; again nothing runs."""
    folder = Path("results/scores/steadymoe-3/same")
    table = pd.read_csv(folder / "outcomes.csv")
    for side in ("free", "pinned", "dense", "measured"):
        ours = {
            loss: table[(table["side"] == side) & (table["loss"] == loss)].sort_values(["rate", "seed"])["sampled"]
            for loss in ("same", "grpo")
        }
        assert ours["same"].tolist() == ours["grpo"].tolist()
        assert len(ours["same"]) >= (2 if side == "measured" else 4)
    measured = table[table["side"] == "measured"]
    assert measured[["expert_change", "variance"]].notna().all(axis=None)
    assert set(measured["rate"]) == {outcomes.best_rate(table, "same")}
    assert {"score.html", "board.png"} <= {path.name for path in folder.iterdir()}
    assert "same" in scored
    before = times(small / "results" / "runs")
    (shuffled,) = (path for path in before if "cell_shuffled" in path.parts)
    config = json.loads((shuffled.parent / "run.json").read_text())["config"]
    assert config["rollout"]["shuffle_rewards"]
    assert config["optimizer"]["learning_rate"] == outcomes.best_rate(table, "same")
    ran("score", "algorithm=same")
    assert times(small / "results" / "runs") == before
    out = ran("score", "algorithm=same", "--dry")
    assert not re.search("[1-9][0-9]* to run", out)
    assert "minutes" not in out


def test_gain_from_shuffled_rewards_is_named() -> None:
    table = made({"grpo": 0.0, "mine": 0.0})  # GRPO gains .4
    for level, expected in ((0.48, ""), (0.52, "with shuffled rewards it gains 0.120")):
        shuffled = table[table["loss"] == "mine"].assign(side="shuffled", sampled=level)
        found = outcomes.gains_without_reward(pd.concat([table, shuffled]))
        assert found.startswith(expected) if expected else not found


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(small: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small standard in a git checkout, with nothing recorded but the cheap side; all pass ``check``."""
    folder = small / "standard"
    table = pd.read_csv(folder / standard.OUTCOMES)
    table[table["side"] == standard.CHEAP].to_csv(folder / standard.OUTCOMES, index=False)
    (folder / standard.MADE).write_text(json.dumps(standard.made() | {"losses": {}}))
    git(folder, "init")
    git(folder, "add", ".")
    monkeypatch.setattr(standard, "SEEDS", "seed=0")
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    return folder


def test_record_appends_a_loss_and_the_next_one_joins_its_block(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ran: Said, refused: Said
) -> None:
    """A loss that gains without rewards is not recorded; one that does not is, once, and then is on the board."""
    files = [checkout / name for name in (standard.OUTCOMES, standard.MADE)]
    before = [path.read_text() for path in files]
    monkeypatch.setattr(outcomes, "gains_without_reward", lambda found: "rewards are not why it gains")
    assert steadymoe(monkeypatch, "score", "algorithm=gmpo", "--record") == 1
    assert "gmpo cannot be recorded: rewards are not why it gains." in capfd.readouterr().out
    assert [path.read_text() for path in files] == before

    monkeypatch.setattr(outcomes, "gains_without_reward", lambda found: "")
    monkeypatch.setattr(properties, "memory", lambda loss: f"{properties.KEEPS_STATE}: mean")
    assert "gmpo is with state" in ran("score", "algorithm=gmpo", "--record")
    assert files[0].read_text().startswith(before[0])
    measured = pd.read_csv("results/scores/steadymoe-3/gmpo/outcomes.csv")
    *_, (name, block) = standard.blocks().items()
    assert name == "gmpo"
    pd.testing.assert_frame_equal(block, measured)
    assert set(block["loss"]) == {"gmpo", REFERENCE}
    assert set(block["side"]) == {"free", "pinned", "dense", "measured", "shuffled"}
    facts = standard.made()
    assert facts["losses"].pop("gmpo").keys() == {"machine", "revision", "versions", "date", "label"}
    assert facts == json.loads(before[1])

    ran("score", "algorithm=grpo", "routing=r2", "--record")
    *_, (name, both) = standard.blocks().items()
    assert (name, set(both["loss"])) == ("gmpo", {"gmpo", REFERENCE, "grpo routing=r2"})
    pd.testing.assert_frame_equal(both[: len(block)], block)

    ran("score", "--board", "board")
    page = Path("board/board.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| gmpo ")]
    assert "| 1, with state |" in row
    assert re.search(r"Recorded on .*: all but 7 tokens\.", page)
    assert "| grpo routing=r2 " in page.partition("## Changes of routing or optimizer")[2]
    after, runs = files[0].read_text(), times(Path("results/runs"))
    assert "gmpo was recorded before" in refused("score", "algorithm=gmpo", "--record")
    assert (files[0].read_text(), times(Path("results/runs"))) == (after, runs)


def test_record_needs_a_checkout_and_a_shipped_loss(checkout: Path, refused: Said) -> None:
    """Before anything runs."""
    for words in (["algorithm=same"], ["algorithm=gmpo", "++algorithm.loss.log_clip_low=.1"]):
        said = refused("score", *words, "--record")
        assert f"algorithm of the checkout with the numbers of its YAML, got {' '.join(words)}" in said
    git(checkout, "rm", "--cached", standard.OUTCOMES)
    for leave in (lambda: None, lambda: shutil.rmtree(checkout / ".git")):
        leave()
        assert "--record needs a git checkout of steadymoe" in refused("score", "algorithm=gmpo", "--record")
    assert not Path("results").exists()


def test_runs_from_several_cold_starts_are_not_recorded(checkout: Path) -> None:
    before, words = (checkout / standard.OUTCOMES).read_text(), ["algorithm=gmpo"]
    table = made({REFERENCE: 0.0, "gmpo": 0.0})
    rows = table.assign(start=table["start"].where(table["loss"] == REFERENCE, 0.5))
    with pytest.raises(ConfigError, match="gmpo is not recorded: GRPO's runs began from other cold starts"):
        recorded.append("gmpo", words, rows, {})
    assert (checkout / standard.OUTCOMES).read_text() == before
    recorded.append("gmpo", words, table, {})
    with pytest.raises(ConfigError, match="gmpo was recorded before"):
        recorded.append("gmpo", words, table, {})


@pytest.mark.check
@pytest.mark.usefixtures("scored")
def test_redo_replaces_outdated_runs_of_every_side(
    small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ran: Said, refused: Said
) -> None:
    """Those beyond the grid's end, too."""
    monkeypatch.setattr(outcomes, "wider", lambda found, loss, side: [0.02] if loss == "same" else [])
    ran("score", "algorithm=same")
    runs = small / "results" / "runs"
    known = {path: json.loads(path.read_text()) for path in runs.rglob("run.json")}
    ours = {path: facts for path, facts in known.items() if facts["algorithm"] == "same"}
    beyond = [path for path, facts in ours.items() if facts["config"]["optimizer"]["learning_rate"] == 0.02]
    assert len(beyond) == 6
    for path in beyond:
        path.write_text(json.dumps(ours[path] | {"algorithm_code": "0" * 16}))
    assert "was made with" in refused("score", "algorithm=same")
    before = times(runs)
    assert steadymoe(monkeypatch, "score", "algorithm=same", "--redo") == 0
    assert capfd.readouterr().err.count("rerunning ") == 6
    redone = {path.parent for path, when in times(runs).items() if when != before[path]}
    assert redone == {path.parent for path in beyond}


def test_tutorial_loss_is_scored_and_changed_numbers_need_redo(
    small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ran: Said, refused: Said
) -> None:
    """The two files of docs/your_algorithm.md, as they are there; then with another number."""
    monkeypatch.setattr(command.check, "check", lambda overrides: 0)
    text = (ROOT / "docs" / "your_algorithm.md").read_text()
    (loss, *_), (numbers, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (small / "mine" / "my_losses.py").write_text(loss)
    yaml = small / "mine" / "conf" / "algorithm" / "half_clipped.yaml"
    yaml.write_text(numbers)
    words = ("score", "algorithm=half_clipped", "--quick")
    ran(*words)
    page = "results/scores/steadymoe-3-quick/half_clipped/score.html"
    assert f"STEADYMOE_PATH={small / 'mine'} steadymoe score algorithm=half_clipped --quick" in Path(page).read_text()
    assert page in text
    yaml.write_text(numbers.replace("clip_high: 0.2", "clip_high: 0.3"))
    assert "half_clipped was scored with another config" in refused(*words)
    assert steadymoe(monkeypatch, *words, "--redo") == 0
    assert "another config (algorithm.loss.clip_high: 0.2 -> 0.3)" in capfd.readouterr().err


def test_an_algorithm_that_fails_check_or_changes_the_setting_is_not_run(
    small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], refused: Said
) -> None:
    monkeypatch.setattr(command.check, "check", lambda overrides: 1)
    assert steadymoe(monkeypatch, "score", "algorithm=same", "--quick") == 2
    assert "is not scored" in capfd.readouterr().err
    path = small / "mine" / "conf" / "algorithm" / "greedy.yaml"
    own = "".join(f"  {line}\n" for line in (path.parent / "same.yaml").read_text().splitlines())
    path.write_text(f"# @package _global_\nrollout:\n  responses: 16\nalgorithm:\n{own}")
    assert "rollout.responses: 8 -> 16" in refused("score", "algorithm=greedy", "--quick")
    assert not (small / "results").exists()

"""``steadymoe run --tune``: which runs it makes, the best rate that it finds in made-up numbers, and a real tuning."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fixtures import Said
from omegaconf import OmegaConf
from small_runs import SMALL

from steadymoe.bench.report import tuning
from steadymoe.bench.runs import compose, execute, record, status
from steadymoe.bench.runs import tuning as config
from steadymoe.bench.runs.overrides import CONF
from steadymoe.bench.support import atomic_files, processes
from steadymoe.bench.training.trainer import Trainer


def planned(*words: str) -> list[compose.Run]:
    return compose.plan(config.overrides(words), multirun=True)


def swept(runs: Sequence[compose.Run]) -> dict[str, list[Any]]:
    settings = {"rate": lambda run: run.config.optimizer.learning_rate, "seed": lambda run: run.config.seed}
    return {name: sorted({of(run) for run in runs}) for name, of in settings.items()}


def test_tuning_section_replaces_seeds_and_rates() -> None:
    runs = planned("experiment=long", "algorithm=gspo")
    section = OmegaConf.load(CONF / "config.yaml").tuning
    own = OmegaConf.load(CONF / "experiment" / "long.yaml").optimizer.learning_rate
    assert swept(runs) == {"rate": [own * factor for factor in section.rate_factors], "seed": section.seeds}
    assert len(runs) == len(section.rate_factors) * len(section.seeds)
    assert {(run.config.experiment_name, run.config.measure) for run in runs} == {("long_tuning", "little")}
    named = planned("experiment=long", "algorithm=gspo", "experiment_name=mine", "measure=all")
    assert {(run.config.experiment_name, run.config.measure) for run in named} == {("mine", "all")}


@pytest.mark.parametrize(
    ("words", "rates", "seeds"),
    [
        (["tuning.rate_factors=[1,3]", "tuning.seeds=[7]", "optimizer.learning_rate=1e-4"], [1e-4, 3e-4], [7]),
        (["optimizer.learning_rate=1e-4,5e-4", "seed=3,4"], [1e-4, 5e-4], [3, 4]),
        (["optimizer.learning_rate=1", "optimizer.learning_rate=1e-4,5e-4", "seed=5"], [1e-4, 5e-4], [5]),
    ],
)
def test_overrides_of_rates_and_seeds_are_respected(words: list[str], rates: list[float], seeds: list[int]) -> None:
    runs = planned("model=micro", *words)
    assert swept(runs) == {"rate": rates, "seed": seeds}
    assert not any("tuning." in run.command for run in runs)


def test_tuning_section_is_not_part_of_a_run() -> None:
    (plain,), (other,) = compose.plan(["model=micro"]), compose.plan(["model=micro", "tuning.seeds=[1]"])
    assert (plain.plain, plain.config_hash, plain.folder) == (other.plain, other.config_hash, other.folder)


def tabled(levels: Mapping[float, Sequence[float]], collapsed: Sequence[float] = ()) -> pd.DataFrame:
    """The table of GSPO's runs with these levels at each rate, by seed; runs of the rates ``collapsed`` collapsed."""
    runs, steps = [], []
    for rate, values in levels.items():
        arm = {"arm": f"gspo learning_rate={rate:g}", "algorithm": "gspo", "learning_rate": rate}
        arm |= {"experiment": "x", "model": "micro", "task": "sort", "axes": f"{rate:g}"}
        verdict = {"status": "finished", "judged_until": 9, "falling_since": np.nan}
        verdict |= {"collapsed_step": 4.0 if rate in collapsed else np.nan}
        for seed, level in enumerate(values):
            runs.append(arm | verdict | {"seed": seed})
            curve = {0: 0.5, 5: 0.99, 10: level}  # neither the first evaluation nor the best one is the level
            steps += [arm | {"seed": seed, "step": k, "metric": "eval_accuracy", "value": v} for k, v in curve.items()]
            rewards = dict.fromkeys(range(1, 6), 0.99) | dict.fromkeys(range(6, 11), level)  # the last five decide
            steps += [arm | {"seed": seed, "step": k, "metric": "reward", "value": v} for k, v in rewards.items()]
    return tuning.table(pd.DataFrame(runs), pd.DataFrame(steps), tuning.REWARD)


@pytest.mark.parametrize(
    ("arm", "without"),
    [
        ("gspo learning_rate=0.0002", "gspo"),
        ("gspo learning_rate=2e-05 routing=r2", "gspo routing=r2"),
        ("gspo cold_start.learning_rate=0.1 optimizer.learning_rate=0.2", "gspo cold_start.learning_rate=0.1"),
        ("gspo learning_rate=0.1 predictor_learning_rate=0.2", "gspo predictor_learning_rate=0.2"),
    ],
)
def test_tuned_arm_is_named_without_its_rate(arm: str, without: str) -> None:
    assert tuning._arms(pd.DataFrame({"arm": [arm]})).tolist() == [without]


def test_best_rate_has_the_highest_mean_level() -> None:
    rows = tabled({4e-4: [0.3, 0.5, 0.1], 1e-4: [0.5, 0.7, 0.3], 2e-4: [0.6, 0.81, 0.39]}, collapsed=[4e-4])
    assert rows["learning rate"].tolist() == [1e-4, 2e-4, 4e-4]
    assert rows["best"].tolist() == ["", "best", ""]
    assert rows["collapsed"].tolist() == [0, 0, 3]
    for column in (tuning.LEVEL, tuning.REWARD):
        np.testing.assert_allclose([each.mean for each in rows[column]], [0.5, 0.6, 0.3])
    assert {each.mean for each in rows["start"]} == {0.5}
    below, _, above = rows["less best"]
    np.testing.assert_allclose([below.mean, above.mean], [-0.1, -0.3])
    assert below.high < 0  # although the seeds' levels overlap
    said = tuning.verdict(rows, "", "", ["experiment=stale", "algorithm=gspo"])
    command = "steadymoe run experiment=stale algorithm=gspo optimizer.learning_rate=2e-4"
    assert said.endswith(command)
    assert "1e-4" not in said.removesuffix(command)
    assert "collapsed" not in said
    assert "3 collapsed" in tuning.verdict(tabled({1e-4: [0.5] * 3, 2e-4: [0.6] * 3}, collapsed=[2e-4]), "", "", [])
    assert tuning.drawn(rows).numbers["series"].tolist() == ["gspo"] * 3 + ["start"]


def test_many_arms_share_panels() -> None:
    levels = {name: 0.2 + 0.05 * place for place, name in enumerate("abcdefghij")}
    arms = [tabled({1e-4: [0.1] * 3, 2e-4: [level] * 3}).assign(arm=name) for name, level in levels.items()]
    together, apart = tuning.drawn(pd.concat(arms[:8])), tuning.drawn(pd.concat(arms))
    assert [len(together.axes), len(apart.blocks)] == [1, 2]
    of_eight = apart.numbers[~apart.numbers["series"].isin(["i", "j"])].sort_values(["series", "x"], ignore_index=True)
    pd.testing.assert_frame_equal(of_eight, together.numbers.sort_values(["series", "x"], ignore_index=True))


@pytest.mark.parametrize(
    ("levels", "wider"),
    [
        ({1e-4: [0.7], 2e-4: [0.6], 4e-4: [0.5]}, "5e-5,1e-4,2e-4,4e-4"),
        ({1e-4: [0.5], 2e-4: [0.6], 4e-4: [0.7]}, "1e-4,2e-4,4e-4,8e-4"),
        ({2e-4: [0.7] * 3}, "1e-4,2e-4,4e-4"),
    ],
)
def test_best_rate_at_an_end_suggests_a_wider_grid(levels: dict[float, list[float]], wider: str) -> None:
    said = tuning.verdict(tabled(levels), "", "", ["algorithm=gspo"])
    assert said.endswith(f"{config.RATE}={wider}")
    assert swept(planned("model=micro", said.rpartition(" ")[2]))["rate"] == [float(each) for each in wider.split(",")]


@pytest.mark.parametrize(
    ("levels", "close"),
    [
        ({1e-4: [0.5], 2e-4: [0.6], 4e-4: [0.1]}, "one seed does not tell it from 1e-4, 4e-4, so confirm all"),
        ({1e-4: [0.5, 0.7, 0.6], 2e-4: [0.61, 0.62, 0.63], 4e-4: [0.1, 0.2, 0.3]}, "1e-4 within one"),
        ({1e-4: [0.5, 0.51, 0.52], 2e-4: [0.61, 0.62, 0.63], 4e-4: [0.1, 0.2, 0.3]}, ""),
    ],
)
def test_rates_within_one_paired_standard_error_are_both_confirmed(
    levels: dict[float, list[float]], close: str
) -> None:
    said = tuning.verdict(tabled(levels), "", "", ["algorithm=gspo"])
    assert (close in said) if close else ("within one" not in said)
    rates = sorted(levels) if "1e-4, 4e-4, so" in said else [1e-4, 2e-4] if close else [2e-4]
    assert said.endswith(
        f"{config.RATE}={','.join(np.format_float_scientific(r, trim='-', exp_digits=1) for r in rates)}"
    )


def test_interrupted_tuning_resumes_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "steps=2", "tuning.rate_factors=[0.5,2]", "tuning.seeds=[100]", "experiment_name=small_tuning"]
    words += [f"results_dir={tmp_path}", "hydra/launcher=basic"]
    runs, step = planned(*words), Trainer.step
    ran("run", "--tune", "--dry", *words)
    assert not list(tmp_path.iterdir())

    def stops(self: Trainer, number: int) -> Any:
        raise processes.Interrupted

    monkeypatch.setattr(Trainer, "step", stops)
    ran("run", "--tune", *words, code=130)
    assert not (tmp_path / "tables").exists()
    assert f"  resume all 2: {shlex.join(['steadymoe', 'run', '--tune', *words])}" in status.lines(tmp_path)
    monkeypatch.setattr(Trainer, "step", step)
    said = ran("run", "--tune", *words).splitlines()[-1]
    assert said.startswith("grpo: ")
    assert [record.status(run.folder) for run in runs] == ["finished"] * 2
    written = {path: path.read_bytes() for path in (tmp_path / "tables").iterdir()}
    rows = pd.read_csv(tmp_path / "tables" / "small_tuning-tuning.csv")
    # Of two rates the best is at an end, beyond which one more runs, once.
    assert len(rows) == 3
    beyond = rows.loc[~rows["learning rate"].isin([5e-4, 2e-3]), "learning rate"].item()
    assert beyond in (2.5e-4, 4e-3)
    finals = [record.read_table(run.folder, "steps")["eval_accuracy"].iloc[-1] for run in runs]
    assert rows.loc[rows["learning rate"] != beyond, f"{tuning.LEVEL} mean"].tolist() == finals
    assert (tmp_path / "figures" / "small_tuning-level_over_rate.png").exists()
    recorded, *_ = tuning._of_todays_code(tmp_path, "small_tuning")
    for typed, is_kept in (([], False), (["measure"], True)):  # in the command that confirms
        ((_, _, shared),) = tuning._by_arm(runs, recorded, typed)
        assert ("measure=little" in shared) is is_kept
    # A stale run of an earlier tuning is ranked neither before its rate runs again nor where it stays out of the grid.
    (folder,) = [Path(each) for each in recorded.loc[recorded["learning_rate"] == beyond, "folder"]]
    facts = record.known(folder)
    atomic_files.write_json(folder / "run.json", facts | {"training_version": 0})
    tuning.report(runs)
    assert "stale runs of earlier tunings, left out: 1;" in capfd.readouterr().out
    assert len(pd.read_csv(tmp_path / "tables" / "small_tuning-tuning.csv")) == 2
    assert ran("run", "--tune", "--redo", *words).splitlines()[-1] == said
    assert record.known(folder)["training_version"] == facts["training_version"]
    for path in written:
        path.unlink()
    monkeypatch.setattr(execute, "execute", lambda *_: pytest.fail("trained again"))
    assert ran("run", "--tune", *words).splitlines()[-1] == said
    assert {path: path.read_bytes() for path in written} == written


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("tuning.rate_factors=[0,1]", "`tuning.rate_factors.0` must be greater than 0"),
        ("tuning.rate_factors=[2]", "`tuning.rate_factors` must have at least 2"),
        ("tuning.rate_factors=[2,2.0]", "`tuning.rate_factors` must not repeat"),
        ("tuning.seeds=[]", "`tuning.seeds` must have at least 1"),
        ("tuning.seeds=[0.5]", "`tuning.seeds.0` must be a valid integer"),
        ("tuning.seed=[1]", "tuning.seeds"),
        ("~tuning", "`tuning`"),
        ("optimizer.learning_rate=0,1e-4", "learning rates above 0"),
        ("optimizer.learning_rate=choice(1e-4)", "two or more"),
        ("optimizer.learning_rate=1e-4,1e-4", "the same run"),
        ("optimizer.learning_rate=abc,def", "optimizer.learning_rate"),
        ("optimizer=adamw,sgd", "optimizers may have rates of their own"),
        ("seed=[", "cannot read"),
        ("experiment=long,stale", "names 2 sweeps"),
    ],
)
def test_invalid_tuning_is_refused_in_one_line(word: str, part: str, refusal_of: Said) -> None:
    assert part in refusal_of("--tune", "model=micro", word)

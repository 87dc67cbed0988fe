"""Claims: each number and verdict against closed forms on made-up runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_figures import USUAL, results_of

from steadymoe.bench.report import claims, command, report_page
from steadymoe.bench.report.claims import Claim
from steadymoe.bench.report.results import Results
from steadymoe.bench.support.errors import UserError

RATES = [1e-4, 2e-4, 4e-4]
FREE: dict[str, Any] = {"experiment": "cell", "algorithm": "grpo", "routing": "off", "model": "micro"}
PINNED = FREE | {"routing": "pinned"}
TWIN = FREE | {"model": "dense_micro"}
# Of ten seeds: GRPO crosses half its gain half way between the first two rates, pinned half way between the last two.
LEVELS = {"off": [0.6, 0.4, 0.3], "pinned": [0.6, 0.6, 0.4], "dense_micro": [0.7, 0.7, 0.2]}


def runs(levels: dict[str, list[float]] = LEVELS, seeds: int = 10, noise: float = 0.005) -> Results:
    rows, generator = [], np.random.default_rng(0)
    for name, by_rate in levels.items():
        arm = {"model": name} if name.startswith("dense") else {"routing": name}
        for seed in range(seeds):
            for rate, level in zip(RATES, by_rate, strict=True):
                keys = USUAL | FREE | arm | {"arm": f"grpo {name} {rate}", "seed": seed, "learning_rate": rate}
                config: dict[str, Any] = {"model": {"config": {"num_hidden_layers": 4}}, "updates": 3}
                config |= {"routing": {"replay": arm.get("routing", "off")}, "evaluation": {"every": len(name)}}
                keys["config"] = json.dumps(config)
                shift = noise * generator.standard_normal()
                start = 0.5 if name.startswith("dense") else 0.4
                rows.append(keys | {"step": 0, "metric": "eval_accuracy", "value": start})
                rows.append(keys | {"step": 3, "metric": "eval_accuracy", "value": level + shift})
                for step in (1, 2, 3):
                    rows.append(keys | {"step": step, "metric": "rollout_kl_k3", "value": 0.1 * step + shift})
    made = results_of(pd.DataFrame(rows))
    made.runs["eval_accuracy"] = made.steps.query("metric == 'eval_accuracy'").groupby("run")["value"].last()
    return made


def claim(*sides: tuple[float, dict[str, Any]], metric: str = "tolerance", **words: Any) -> Claim:
    usual = {"direction": "above", "threshold": 1.0, "smallest": 1.2}
    weighted = [{"weight": weight} | side for weight, side in sides]
    return Claim(claim="made up", source="none", practice="none", metric=metric, sides=weighted, **usual | words)


def judged(recorded: Results | dict[str, Results], *rows: Claim) -> pd.DataFrame:
    of = recorded if isinstance(recorded, dict) else {"cell": recorded}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "ended", lambda _, name: {name: of[name]})
        return claims.judged(list(rows), Path("nowhere"))


def test_ratio_of_tolerances_is_that_of_the_crossings() -> None:
    cost = claim((1, PINNED), (-1, FREE))
    below = claim((1, PINNED), (-1, FREE), direction="below")
    own = claim((1, FREE), (-1, FREE))
    table = judged(runs(), cost, below, own)
    assert table["estimate"].tolist() == pytest.approx([2.0, 2.0, 1.0], rel=0.02)
    assert table["verdict"].tolist() == ["right", "wrong", "open"]
    assert (table.loc[0, "low"] < 2 < table.loc[0, "high"], table.loc[0, "n"]) == (True, 10)


@pytest.mark.parametrize(
    ("direction", "threshold", "verdict"),
    [("above", 1.0, "right"), ("above", 4.0, "open"), ("below", 4.0, "open"), ("below", 1.0, "wrong")],
)
def test_bound_decides_on_one_side_only(direction: str, threshold: float, verdict: str) -> None:
    recorded = runs(LEVELS | {"pinned": [0.6, 0.6, 0.6]})  # pinned never falls below the threshold
    row = judged(recorded, claim((1, PINNED), (-1, FREE), direction=direction, threshold=threshold)).iloc[0]
    assert (row["bound"], row["verdict"]) == (">", verdict)
    assert row["estimate"] == pytest.approx(4 / 2**0.5, rel=0.02)


def test_each_model_has_a_threshold_of_its_own() -> None:
    (row,) = judged(runs(), claim((1, TWIN), (-1, FREE))).to_dict("records")
    # The twin's threshold is .5 + .1: it crosses .2 of the way, of an octave, beyond 2e-4; the MoE at 2^.5 e-4.
    assert row["estimate"] == pytest.approx(2 * 2**0.2 / 2**0.5, rel=0.02)


def test_verdict_waits_for_the_planned_seeds() -> None:
    row = judged(runs(seeds=9), claim((1, PINNED), (-1, FREE))).iloc[0]
    assert (row["verdict"], row["n"], row["p"] < 0.001) == ("open", 9, True)


def test_reference_that_gains_nothing_leaves_a_claim_open() -> None:
    recorded = runs(LEVELS | {"off": [0.3, 0.2, 0.1]})
    row = judged(recorded, claim((1, PINNED), (-1, FREE))).iloc[0]
    assert (row["verdict"], np.isnan(row["estimate"])) == ("open", True)


def test_gain_is_over_the_start_of_the_run() -> None:
    at = {"learning_rate": 2e-4}
    (row,) = judged(runs(), claim((1, TWIN | at), (-1, PINNED | at), metric="gain")).to_dict("records")
    assert row["estimate"] == pytest.approx(0.2 - 0.2, abs=0.01)


def test_measured_dial_takes_the_place_of_its_values() -> None:
    recorded = runs()
    kl = recorded.steps["metric"] == "rollout_kl_k3"
    # What the dial measures is its square, so ratios are too.
    recorded.steps.loc[kl, "value"] = recorded.runs["learning_rate"].reindex(recorded.steps["run"][kl]).to_numpy() ** 2
    by_value, by_kl = (claim((1, PINNED), (-1, FREE), dial=dial) for dial in (None, "rollout_kl_k3"))
    table = judged(recorded, by_value, by_kl)
    assert table.loc[1, "estimate"] == pytest.approx(table.loc[0, "estimate"] ** 2)


@pytest.mark.parametrize(("pinned", "verdict"), [([0.6, 0.6, 0.4], "right"), ([0.6, 0.3, 0.2], "open")])
def test_verdict_that_does_not_repeat_is_open(pinned: list[float], verdict: str) -> None:
    recorded = {"cell": runs(), "cell_autoclip": runs(LEVELS | {"pinned": pinned}, seeds=3)}
    row = judged(recorded, claim((1, PINNED), (-1, FREE), again="_autoclip")).iloc[0]
    assert (row["verdict"], row["repeated"] > 1) == (verdict, verdict == "right")


def test_verdict_whose_repetition_has_no_number_is_open() -> None:
    recorded = {"cell": runs(), "cell_autoclip": runs(LEVELS | {"off": [0.3, 0.2, 0.1]}, seeds=3)}
    rows = [claim((1, PINNED), (-1, FREE), direction="below", again=again) for again in (None, "_autoclip")]
    assert judged(recorded, *rows)["verdict"].tolist() == ["wrong", "open"]


@pytest.mark.parametrize(("key", "usual"), [("updates", 3), ("model.config.num_hidden_layers", 4)])
def test_claim_whose_sides_differ_in_more_than_it_says_is_refused(key: str, usual: int) -> None:
    recorded, at, name = runs(), {"learning_rate": 2e-4}, key.rpartition(".")[2]
    doubled = recorded.runs["config"].str.replace(f'"{name}": {usual}', f'"{name}": {2 * usual}')
    recorded.runs["config"] = doubled.where(recorded.runs["routing"] == "pinned", recorded.runs["config"])
    with pytest.raises(UserError, match=f"also differ in {key}"):
        judged(recorded, claim((1, PINNED | at), (-1, FREE | at), metric="accuracy"))
    if key != "updates":  # said, it is compared
        said = [side | at | {key: layers} for side, layers in ((PINNED, 8), (FREE, 4))]
        row = judged(recorded, claim((1, said[0]), (-1, said[1]), metric="accuracy")).iloc[0]
        assert row["estimate"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("threshold", "direction", "verdict"),
    [
        (0.1, "above", "right"),
        (0.3, "above", "wrong"),
        (0.2, "above", "open"),
        (0.03, "equal", "wrong"),
        (0.3, "equal", "right"),
    ],
)
def test_differences_and_equivalence(threshold: float, direction: str, verdict: str) -> None:
    sides = [(weight, side | {"learning_rate": 2e-4}) for weight, side in ((1, PINNED), (-1, FREE))]
    its = claim(*sides, metric="accuracy", threshold=threshold, direction=direction)
    row = judged(runs(), its).iloc[0]
    assert (row["estimate"], row["verdict"]) == (pytest.approx(0.2, abs=0.01), verdict)


def test_columns_of_a_run_and_their_growth() -> None:
    at = FREE | {"learning_rate": 2e-4}
    rows = [claim((1, at), metric=f"{of}rollout_kl_k3", threshold=0.15) for of in ("", "growth of ")]
    assert judged(runs(), *rows)["estimate"].tolist() == pytest.approx([0.2, 0.2], abs=0.01)


def test_interval_is_students_for_a_paired_difference() -> None:
    at, recorded = {"learning_rate": 1e-4}, runs(noise=0.05)
    row = judged(recorded, claim((1, PINNED | at), (-1, FREE | at), metric="accuracy")).iloc[0]
    runs_of = recorded.runs.query("learning_rate == 1e-4").set_index(["routing", "model", "seed"]).sort_index()
    own = runs_of["eval_accuracy"]
    apart = own["pinned", "micro"] - own["off", "micro"]
    half = 2.2622 * apart.std(ddof=1) / 10**0.5
    assert row["high"] - row["low"] == pytest.approx(2 * half, rel=0.03)
    assert row["estimate"] == pytest.approx(apart.mean())


@pytest.mark.parametrize(
    ("side", "metric", "why"),
    [
        (FREE | {"routing": "r2"}, "accuracy", "has no run of"),
        (FREE, "accuracy", "choose one learning rate"),
        ({key: FREE[key] for key in FREE if key != "routing"} | {"learning_rate": 1e-4}, "accuracy", "one arm"),
        ({key: FREE[key] for key in FREE if key != "routing"}, "tolerance", "one arm"),
        (FREE | {"colour": 1}, "accuracy", "see colour"),
        ({key: FREE[key] for key in FREE if key != "model"}, "accuracy", "see model"),
        (FREE | {"learning_rate": 1e-4}, "nonsense", "no column nonsense"),
    ],
)
def test_claim_without_its_runs_is_refused(side: dict[str, Any], metric: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        judged(runs(), claim((1, side), metric=metric))


def test_command_writes_verdicts_and_names_a_file_without_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "ended", lambda *_: {"cell": runs()})
    path = tmp_path / "claims.yaml"
    path.write_text(
        """
- claim: Moving routes cost GRPO tolerance
  source: ours
  metric: tolerance
  sides:
  - {weight: 1, experiment: cell, algorithm: grpo, routing: pinned, model: micro}
  - {weight: -1, experiment: cell, algorithm: grpo, routing: "off", model: micro}
  direction: above
  threshold: 1.0
  smallest: 1.2
  practice: Pin them.
"""
    )
    words = ["--claims", str(path), "--results", str(tmp_path), "--format", "png"]
    assert command.main(words) == 0
    verdicts = (tmp_path / "tables" / "claims-verdicts.md").read_text()
    assert "| right" in verdicts
    assert (tmp_path / "figures" / "claims.png").stat().st_size > 0
    for text in ("claims: none", "- claim: alone", ":"):
        path.write_text(text)
        with pytest.raises(UserError, match="holds no claims"):
            command.main(words)

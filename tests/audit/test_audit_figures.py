"""Figures and tables of audits, from made-up audits: what is drawn is what is written, over checkpoints, with n."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fixtures import Said
from small_figures import said, shown

from steadymoe.bench.audit import archive, figures, report, tables
from steadymoe.bench.audit.gradients import BLOCKS
from steadymoe.bench.audit.measure import COLUMNS
from steadymoe.bench.runs import record
from steadymoe.bench.support.text import markdown

BANDS = (1e-3, 0.1)
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.27},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    **{f"{name}-{band:g}": {"clip_low": band, "clip_high": band} for name in ("grpo", "gspo") for band in BANDS},
}
SHARES = dict(zip(BLOCKS, (0.5, 0.4, 0.2, -0.1), strict=True))
Numbers = dict[str, float]


def numbers(loss: str, k: int, routing: str, seed: int, strength: float) -> Numbers:
    """The made-up estimates of a loss: known functions of their place."""
    useful = 0.1 * (1 + list(LOSSES).index(loss)) - 0.01 * k + 0.001 * seed + (0.5 - strength) * (routing == "free")
    return {"usefulness": useful, "snr": 2 * useful, "bias": 0.25 * (k > 0)}


def rows_of(k: int, seed: int, strength: float) -> list[dict[str, Any]]:
    """The rows of one table."""
    place = {"seed": seed, "k": k, "router_scale": 1.0}
    of_data = {"routing": "fresh", "loss": "all", "block": "", "cut": "", "replicates": None}
    rows = [place | of_data | {"quantity": "reward", "value": 0.6 - 0.01 * k, "low": 0.5, "high": 0.7, "n": 16}]
    for loss, routing, cut in itertools.product(LOSSES, ("free", "r2"), ("before", "after")):
        own = place | {"routing": routing, "loss": loss, "cut": cut, "n": 4}
        for quantity, value in numbers(loss, k, routing, seed, strength).items():
            kept = [value - 0.01, value, value, value + 0.01]
            whole = {"block": "whole", "value": value, "low": value - 0.1, "high": value + 0.1, "replicates": kept}
            rows.append(own | whole | {"quantity": quantity})
        for block, share in SHARES.items():
            ends = {"low": share - 0.05, "high": share + 0.05, "replicates": None}
            rows.append(own | ends | {"block": block, "quantity": "share", "value": share})
    return rows


def made(results: Path, seeds: int, strengths: tuple[float, ...] = (0.0,), drifts: tuple[int, ...] = (0, 4)) -> None:
    """Audits of an experiment ``noise`` as ``steadymoe audit`` leaves them."""
    for seed, strength in itertools.product(range(seeds), strengths):
        folder = results / "audits" / "noise" / "flat" / "sort" / f"strength={strength}" / f"seed={seed}"
        folder.mkdir(parents=True)
        engine = {"_target_": "steadymoe.models.engine.RouterNoise", "strength": strength, "relative": True}
        told = {name: {"algorithm": name.partition("-")[0]} for name in LOSSES}
        for name in LOSSES:
            if "-" in name:
                told[name] |= {f"algorithm.loss.{key}": value for key, value in LOSSES[name].items()}
        facts = {
            "command": "steadymoe audit experiment=noise",
            "config": {"seed": seed, "engine": engine, "audit": {"drift": list(drifts)}},
            "arms": told,
            "losses": LOSSES,
        }
        (folder / "audit.json").write_text(json.dumps(facts))
        for k in drifts:
            table = pd.DataFrame(rows_of(k, seed, strength), columns=list(COLUMNS))
            table.to_parquet(folder / f"k={k}.parquet", index=False)


def joined(results: Path, *losses: str) -> pd.DataFrame:
    """What figures draw, of some losses or of all."""
    rows = archive.load(results, "noise").rows
    return tables.joined(rows[rows["loss"].isin(["all", *losses])] if losses else rows)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints at one strength."""
    results = tmp_path_factory.mktemp("three")
    made(results, seeds=3)
    return results


@pytest.fixture(scope="module")
def table(results: Path) -> pd.DataFrame:
    return joined(results)


# --- what figures draw -------------------------------------------------------------------------------


def test_usefulness_snr_and_bias_are_drawn_over_the_drift(table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures.over_drift(table)
    assert [axis.get_title() for axis in figure.axes[:2]] == ["free routes", "old routes (R2)"]
    expected = [np.mean([numbers("gspo", k, "free", seed, 0.0)["usefulness"] for seed in range(3)]) for k in (0, 4)]
    assert shown(figure, 0)["gspo"] == pytest.approx(expected)
    assert set(shown(figure, 0)) == set(LOSSES)
    assert shown(figure, 3)["grpo"] == pytest.approx([2 * each for each in shown(figure, 1)["grpo"]])
    assert shown(figure, 4)["grpo"] == [0, 0.25]
    assert "n = 3; shaded: 95 % t interval" in said(figure)
    assert "Reward of fresh samples at the start: 0.60, k = 4: 0.56." in said(figure)
    monkeypatch.setattr(figures, "_MAX_BANDS", 5)
    assert said(figures.over_drift(table)).endswith("k = 4: 0.56. Intervals are in the tables.")


def test_shares_of_blocks_are_stacked_up_and_negative_ones_down(table: pd.DataFrame) -> None:
    figure = figures.blocks(table)
    bars = figure.axes[0].patches
    of_first = bars[:: len(LOSSES)]
    assert [bar.get_height() for bar in of_first] == pytest.approx(list(SHARES.values()))
    assert [bar.get_y() for bar in of_first] == pytest.approx([0, 0.5, 0.9, 0])
    assert len(figure.numbers) == 2 * len(LOSSES) * len(BLOCKS)
    lacking = table[~((table["quantity"] == "share") & (table["loss"] == "gspo"))]
    assert "without a bar: gspo." in said(figures.blocks(lacking))


def test_each_engine_strength_has_its_own_figures(tmp_path: Path) -> None:
    made(tmp_path, seeds=1, strengths=(0.0, 0.25))
    written = report.write(tmp_path, "noise", ["svg"], losses=["grpo"])
    endings = [path.stem.partition("ranked")[2] for path in written.files if path.suffix == ".svg"]
    assert {ending for ending in endings if ending} == {"-strength=0", "-strength=0.25"}
    table = joined(tmp_path, "grpo")
    figure = figures.ranked(table[table["strength"] == 0.25])
    assert figure.numbers.loc[0, "mean"] == pytest.approx(0.06 + 0.25)
    assert "One checkpoint, n = 1; bars: 95 % jackknife interval over mini-batches" in said(figure)


# --- the report --------------------------------------------------------------------------------------


def test_a_report_joins_two_checkpoints_and_names_what_is_unfinished(tmp_path: Path, ran: Said) -> None:
    made(tmp_path, seeds=2)
    words = ["--results", str(tmp_path), "--experiment", "noise", "--format", "svg"]
    words += ["--losses", "gspo", "--against", "grpo"]
    printed = ran("audit", "report", *words)
    assert "noise-audit-part-over_drift.svg" in printed  # a part replaces no whole report
    assert "bands was not drawn: it lacks two symmetric bands" in printed
    ranked = (tmp_path / "figures" / "noise-audit-part-ranked.txt").read_text()
    assert "n = 2; two checkpoints have no interval" in ranked
    contrasts = pd.read_csv(tmp_path / "tables" / "noise-audit-part-contrasts.csv")
    assert set(contrasts["loss"]) == {"GSPO − GRPO"}
    assert contrasts.loc[contrasts["quantity"] == "usefulness", "value"].to_numpy() == pytest.approx(0.1)
    assert set(contrasts["n"]) == set(pd.read_csv(tmp_path / "tables" / "noise-audit-part-over_drift.csv")["n"]) == {2}
    next((tmp_path / "audits").glob("**/seed=1/k=4.parquet")).unlink()
    assert "seed=1 is not finished: steadymoe audit" in ran("audit", "report", *words)
    assert "n = 1 to 2" in (tmp_path / "figures" / "noise-audit-part-over_drift.txt").read_text()


def test_figures_gains_and_contrasts_are_rebuilt_from_an_archive(
    results: Path, tmp_path: Path, table: pd.DataFrame
) -> None:
    (path, missing) = archive.keep(results, "noise", tmp_path)
    assert (path, missing) == (tmp_path / "audits" / "noise" / "audits.parquet", [])
    assert "gain" not in set(pd.read_parquet(path)["quantity"])
    whole, again = (archive.load(place, "noise").rows for place in (results, tmp_path))
    assert len(again) < len(whole)
    for draw in figures.FIGURES.values():
        pd.testing.assert_frame_equal(draw(tables.joined(again)).numbers, draw(table).numbers)
    pd.testing.assert_frame_equal(tables.contrasts(again, "gspo"), tables.contrasts(whole, "gspo"))
    for rows in (whole, again):
        wide = rows[(rows["loss"] == "gspo") & (rows["block"] == "whole")]
        wide = wide.pivot(index=["seed", "k", "routing", "cut"], columns="quantity", values="value")
        gain = wide["usefulness"] / np.sqrt(1 + wide["snr"])
        pd.testing.assert_series_equal(wide["gain"], gain, check_names=False)
        ranked = tables.ranking(rows[rows["seed"] == 0]).set_index(["k", "routing", "loss"])
        assert ranked.loc[(4, "free", "gspo"), "gain"].startswith(f"{gain[0, 4, 'free', 'before']:.3g} [")


REFUSED = {
    "--experiment other": "audits/other",
    "--experiment ../noise": "'../noise'",
    "--experiment noise --losses grop": "'grop'",
    "--experiment noise --against grop": "no loss 'grop'",
    "--experiment noise --drift 3": "choose from 0, 4",
    "--experiment noise --format gif": "gif",
    "--experiment noise --keep kept --losses grpo": "--losses",
    "--drift many": "--drift",
}


@pytest.mark.parametrize(("words", "why"), REFUSED.items())
def test_invalid_report_is_refused_in_one_line_and_writes_nothing(
    words: str, why: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    shutil.copytree(results / "audits", tmp_path / "audits")
    monkeypatch.chdir(tmp_path)
    assert why in refused("audit", "report", *words.split(), "--results", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["audits"]


def test_damaged_table_or_ambiguous_label_fails_in_one_line(tmp_path: Path, refused: Said) -> None:
    made(tmp_path, seeds=2)
    words = ["--results", str(tmp_path), "--experiment", "noise"]
    facts = next((tmp_path / "audits").glob("**/seed=1/audit.json"))
    whole = facts.read_text()
    for text, why in (
        (whole[:40], "cannot be read"),
        (whole.replace('"arms"', '"losses_of"'), "has no valid arms"),
        (whole.replace('"algorithm": "gspo"', '"algorithm": "gmpo"'), "is a different loss in"),
    ):
        facts.write_text(text)
        assert why in refused("audit", "report", *words)
    facts.write_text(whole)
    table = facts.with_name("k=0.parquet")
    for damage in (lambda: pd.DataFrame({"k": [0]}).to_parquet(table), lambda: table.write_bytes(b"PAR1")):
        damage()
        assert str(table) in refused("audit", "report", *words)


def test_names_from_data_start_no_formula_or_markup(tmp_path: Path, results: Path) -> None:
    path, _ = archive.keep(results, "noise", tmp_path)
    rows = pd.read_parquet(path)
    rows.assign(loss=rows["loss"].replace("gspo", "a$_b$|<b>")).to_parquet(path)
    facts = json.loads(path.with_name("audits.json").read_text()) | {"checksum": record.checksum(path)}
    path.with_name("audits.json").write_text(json.dumps(facts))
    report.write(tmp_path, "noise", ["svg"], losses=["grpo", "a$_b$|<b>"])
    assert "a$_b$|&lt;b&gt;</text>" in (tmp_path / "figures" / "noise-audit-part-ranked.svg").read_text()
    assert markdown("a$_b$|<b>") in (tmp_path / "tables" / "noise-audit-part-ranking.md").read_text()

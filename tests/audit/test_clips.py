"""Clip shares over bands: the losses' own marks, closed forms, and an audit of clips alone from words to figures."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fixtures import Said
from small_audits import WORDS, Scene, batch_of, moved, scene
from small_figures import said, shown

from steadymoe.bench.audit import archive, clip_atlas, clips, figures, plan, report
from steadymoe.bench.runs.lifecycle import Damaged
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.training import token_metrics

ALONE = [word for word in WORDS if not word.startswith(("audit.algorithms", "+audit.arms"))]
ALONE += ["audit.algorithms=[]", "audit.clips=true"]
BAND = 0.05


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """GRPO and GSPO at one symmetric band, four updates off policy."""
    torch.set_num_threads(1)
    words = [f"algorithm.loss.clip_low={BAND}", f"algorithm.loss.clip_high={BAND}"]
    losses = {name: [f"algorithm={name}", *words] for name in ("grpo", "gspo")}
    made = scene(tmp_path_factory.mktemp("one"), losses)
    before = found(made)
    assert {each.mean for (_, quantity), each in before.items() if quantity.startswith("clip_share")} == {0.0}
    moved(made, 4)
    return made


def found(made: Scene) -> dict[tuple[str, str], Estimate]:
    return {(loss, quantity): each for loss, quantity, each in clips.estimates(made.truth, made.audited, None)}


@pytest.mark.parametrize(("name", "unit"), [*zip(("grpo", "gspo"), clips.UNITS, strict=True)])
def test_clip_shares_match_the_marks_of_the_losses(one: Scene, name: str, unit: str) -> None:
    loss = next(loss for loss in one.losses if loss.label == name)
    rollout = one.audited.rollout
    marks: dict[str, list[float]] = {"low": [], "high": []}
    for (part,) in one.audited.minibatches:
        with torch.no_grad():
            batch = batch_of(one, loss, part)
        numbers = token_metrics.to_floats(token_metrics.of_update(batch, loss.learner.objective(batch))[0])
        for side in clips.SIDES:
            marks[side].append(numbers[f"clip_fraction_{side}"])
    mine = found(one)
    lengths = [int(rollout.sequences.response_mask_BT[part.rows_M].sum()) for (part,) in one.audited.minibatches]
    for side in clips.SIDES:
        share = mine[clips.name(unit, "old policy"), clips.quantity(side, BAND)]
        if name == "grpo":  # the fraction counts tokens
            assert share.mean == pytest.approx(np.average(marks[side], weights=lengths), abs=1e-6)
        assert (share.mean > 0) == (sum(marks[side]) > 0)
    assert sum(map(sum, marks.values())) > 0


def test_a_wider_band_clips_less_and_the_anchors_agree_without_an_engine(one: Scene) -> None:
    mine = found(one)
    for unit in clips.UNITS:
        for side in clips.SIDES:
            old, sampler = (
                [mine[clips.name(unit, anchor), clips.quantity(side, band)].mean for band in clips.BANDS]
                for anchor in clips.ANCHORS
            )
            assert old == sorted(old, reverse=True)
            assert old == pytest.approx(sampler, abs=2 / len(one.audited.rollout.scores_B))
            assert old[0] > old[-1]


# --- tables ------------------------------------------------------------------------------------------


def rows(share: Any, checkpoints: int = 3, settings: tuple[str, ...] = ("",)) -> pd.DataFrame:
    """Rows of audits whose clip shares, on either side, are ``share(unit, band, checkpoint)``."""
    made: list[dict[str, Any]] = []
    for setting in settings:
        for checkpoint in range(checkpoints):
            place = {"setting": setting, "strength": 0.0, "k": 4, "router_scale": 1.0, "routing": "free"}
            place |= {"checkpoint": checkpoint}
            length = 10.0 + len(setting)
            made.append(place | {"loss": "all", "quantity": "response_length", "value": length})
            for unit in clips.UNITS:
                for band in clips.BANDS:
                    for side in clips.SIDES:
                        loss, name = clips.name(unit, "old policy"), clips.quantity(side, band)
                        made.append(place | {"loss": loss, "quantity": name, "value": share(unit, band, checkpoint)})
    return pd.DataFrame(made)


def falling(unit: str, band: float, checkpoint: int) -> float:
    """A sequence band clips as a token band twenty times as wide."""
    wide = band if unit == clips.UNITS[0] else 20 * band
    return float(0.3 * (wide * 1e4) ** -0.5 * (1 + 0.1 * checkpoint))


def test_an_equivalent_band_clips_the_same_share() -> None:
    table = clip_atlas.equivalent(rows(falling)).set_index("token_band")
    for band in (0.1, 0.2, 0.3):
        assert table.loc[band, "mean"] == pytest.approx(band / 20, rel=1e-6)
        assert table.loc[band, "share"] == pytest.approx(2 * falling(clips.UNITS[0], band, 1))
        assert table.loc[band, "n"] == 3


def test_unreachable_share_has_no_equivalent_band() -> None:
    table = clip_atlas.equivalent(rows(lambda unit, band, _: 0.4 if unit == clips.UNITS[0] else 0.1 * (1 - band)))
    assert table["mean"].isna().all()
    assert (table["n"] == 0).all()


def test_the_atlas_is_the_mean_over_checkpoints_with_its_interval() -> None:
    table = clip_atlas.atlas(rows(falling)).set_index(["unit", "band", "side"])
    both, low = (table.loc[(clips.UNITS[0], 0.2, side)] for side in ("both", "low"))
    assert both["mean"] == pytest.approx(2 * falling(clips.UNITS[0], 0.2, 1))
    assert low["mean"] == pytest.approx(falling(clips.UNITS[0], 0.2, 1))
    assert both["low"] < both["mean"] < both["high"]


def test_the_figure_has_a_column_for_each_length() -> None:
    figure = figures.clip_shares(rows(falling, settings=("", "longer")), "old policy")
    assert [axis.get_title() for axis in figure.axes[:2]] == ["responses of 10 tokens", "responses of 16 tokens"]
    drawn = shown(figure, 0)["k = 4"]
    np.testing.assert_allclose(drawn, [2 * falling(clips.UNITS[0], band, 1) for band in clips.BANDS])
    assert "n = 3" in said(figure)


def test_settings_with_equal_length_are_distinguished() -> None:
    table = pd.concat([rows(falling), rows(falling).assign(strength=1.0)])
    figure = figures.clip_shares(table, "old policy")
    titles = [axis.get_title() for axis in figure.axes[:2]]
    assert [title.partition("\n")[2].strip() for title in titles] == ["strength 0", "strength 1"]


def test_equal_scores_have_no_clip_shares_despite_rounding(one: Scene) -> None:
    scores_B = torch.full_like(one.audited.rollout.scores_B, 0.01)
    equal = replace(one.audited, rollout=replace(one.audited.rollout, scores_B=scores_B))
    shares = [
        each.mean for _, quantity, each in clips.estimates(one.truth, equal, None) if quantity.startswith("clip_share")
    ]
    assert max(shares) == 0


# --- from words to files -----------------------------------------------------------------------------


def test_clips_only_audit_takes_no_gradients_and_is_reported(tmp_path: Path, ran: Said) -> None:
    ran("audit", *ALONE, f"results_dir={tmp_path}")
    found = archive.load(tmp_path, "tiny").rows
    assert set(found["k"]) == {0, 2}
    assert set(found["block"]) == {""}
    made = report.write(tmp_path, "tiny", formats=["png"])
    names = {path.name for path in made.files}
    assert {f"tiny-audit-{name}.csv" for name in ("clips", "equivalent_bands")} <= names
    drawn = itertools.product(("old_policy", "sampler"), ("free", "r2"))
    assert {f"tiny-audit-clips-{anchor}-{routing}.png" for anchor, routing in drawn} <= names
    assert not any("was not drawn" in line for line in made.missing)
    kept, _ = archive.keep(tmp_path, "tiny", tmp_path / "kept")
    (of_checkpoint,) = archive.load(tmp_path / "kept", "tiny").made
    assert of_checkpoint["command"].startswith("steadymoe audit ")
    assert {"revision", "versions", "machine", "config", "audit_hash"} <= set(of_checkpoint)
    (kept.parent / "audits.json").unlink()
    with pytest.raises(Damaged, match="is missing; it records how"):
        archive.load(tmp_path / "kept", "tiny")
    archive.keep(tmp_path, "tiny", tmp_path / "kept")
    report.write(tmp_path / "kept", "tiny", formats=[])
    for name in ("clips", "equivalent_bands"):
        first, second = (place / "tables" / f"tiny-audit-{name}.csv" for place in (tmp_path, tmp_path / "kept"))
        assert first.read_bytes() == second.read_bytes()
    assert kept.exists()


def test_field_at_its_neutral_value_keeps_the_hash(tmp_path: Path) -> None:
    (plain,) = plan.plan([*WORDS, f"results_dir={tmp_path}"])
    (told,) = plan.plan([*WORDS, "audit.clips=false", f"results_dir={tmp_path}"])
    (other,) = plan.plan([*WORDS, "audit.clips=true", f"results_dir={tmp_path}"])
    assert plain.audit_hash == told.audit_hash != other.audit_hash

"""The board: entries are read without running their code, and what reruns found is bound to what ran."""

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from steadymoe.bench.score import board, entry, outcomes, rerun, standard
from steadymoe.bench.score.entry import BadEntry
from steadymoe.bench.score.standard import COLUMNS

ROOT = Path(__file__).parents[2]
GRPO = (ROOT / "conf" / "algorithm" / "grpo.yaml").read_text()
ABOUT = {"standard": standard.VERSION, "name": "mine", "words": "algorithm=mine", "paper": "mine", "machine": "one"}
ABOUT |= {"revision": "abc", "versions": "torch 2", "date": "2026-11-26"}


def numbers(name: str = "mine") -> pd.DataFrame:
    rows = [
        ("rate", loss, loss, rate, rate, seed, 0.4, 0.6, level, level)
        for loss, levels in {"grpo": (0.7, 0.8, 0.5, 0.2), name: (0.7, 0.8, 0.75, 0.4)}.items()
        for rate, level in zip((1e-4, 2e-4, 4e-4, 8e-4), levels, strict=True)
        for seed in range(5)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write(folder: Path, name: str = "mine", table: pd.DataFrame | None = None, **changed: Any) -> Path:
    """An entry, written by hand."""
    place = folder / name
    (place / "conf" / "algorithm").mkdir(parents=True)
    (place / "conf" / "algorithm" / "mine.yaml").write_text(GRPO)
    (place / entry.README).write_text(f"# {name}\n\n## Idea\n\nNone.\n")
    (place / entry.ABOUT).write_text(json.dumps(ABOUT | {"name": name} | changed))
    (numbers(name) if table is None else table).to_csv(place / standard.OUTCOMES, index=False)
    return place


def rows(folder: Path) -> pd.DataFrame:
    return board.rows(board.standings(folder))


def test_entry_is_listed_with_its_own_numbers_until_verified(tmp_path: Path) -> None:
    found = entry.read(write(tmp_path))
    shown = rows(tmp_path).set_index("loss")
    assert shown.loc["mine", "numbers"].startswith("unverified")
    (mine, *_) = outcomes.scores(found.outcomes())
    assert shown.loc["mine", "rate × grpo"].split()[0] == f"{mine.borne['rate'].ratio:.2f}"
    verdicts = {found.digest: {"commit": "1a2b3c4d", "problem": "", "label": "with state"}}
    (tmp_path / "verified").mkdir()
    (tmp_path / "verified" / "verified.json").write_text(json.dumps(verdicts))
    lower = numbers().assign(sampled=lambda table: table["sampled"] - 0.2 * (table["value"] > 2e-4))
    lower.to_csv(tmp_path / "verified" / f"{found.digest}.csv", index=False)
    again = rows(tmp_path).set_index("loss")
    assert again.loc["mine", "numbers"].startswith("verified at 1a2b3c4, with state")
    assert again.loc["mine", "rate × grpo"] != shown.loc["mine", "rate × grpo"]
    assert again.loc["mine", "kind"] == "loss"  # its YAML has GRPO's advantage
    # A rerun that found a problem, with outcomes or without, leaves no row, and the others stay.
    for name in ("verified.json", f"{found.digest}.csv"):
        (tmp_path / "verified" / name).unlink()
    verdicts = {found.digest: {"commit": "1a2b3c4d", "problem": "it fails steadymoe check", "label": ""}}
    (tmp_path / "verified" / "verified.json").write_text(json.dumps(verdicts))
    assert set(rows(tmp_path)["loss"]) == set(standard.recorded()["loss"])
    board.write_board(tmp_path)
    assert "Not verified: mine, it fails steadymoe check." in (tmp_path / "board.md").read_text()
    # Another loss under the same name was not verified.
    (tmp_path / "mine" / "conf" / "algorithm" / "mine.yaml").write_text(GRPO + "# changed\n")
    assert rows(tmp_path).set_index("loss").loc["mine", "numbers"].startswith("unverified")


def test_history_lists_each_new_leader(tmp_path: Path) -> None:
    """An earlier entry with a lower number was the best of its day; a later one with a lower number never was."""
    before = board.standings(tmp_path)
    (first,) = board.history(before)["loss"]
    assert before[0].score.loss == first
    write(tmp_path, "early", date="2026-01-01")
    write(tmp_path, "late", date="2027-01-01")
    found = board.history(board.standings(tmp_path))
    assert found["loss"].tolist() == [first, "early"]
    assert found["since"].tolist()[1] == "2026-01-01"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"standard": "steadymoe-1"}, "standard must be steadymoe-2, got steadymoe-1"),
        ({"name": "../up"}, "name must consist of letters"),
        ({"name": "vespo"}, "the board has a loss named vespo"),
        ({"words": "algorithm=mine model=tiny"}, "words may only choose"),
        ({"words": "algorithm=mine algorithm=grpo"}, "words must choose one"),
        ({"words": "algorithm=grpo"}, "an entry of your own algorithm needs"),
        ({"words": "algorithm=mine algorithm.loss.clip_low=.1"}, "tuned numbers need their table"),
        ({"words": "algorithm=mine " + " ".join(f"algorithm.loss.a{n}=1" for n in range(4))}, "at most 3 numbers"),
        ({"paper": "x" * 2000}, "paper must be a string"),
        ({"machine": 3}, "machine must be a string"),
    ],
)
def test_a_bad_entry_is_refused_in_one_line(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    place = write(tmp_path)
    (place / entry.ABOUT).write_text(json.dumps(ABOUT | changed))
    with pytest.raises(BadEntry, match=message) as raised:
        entry.read(place)
    assert len(str(raised.value).splitlines()) == 1


def test_foreign_files_in_an_entry_are_refused(tmp_path: Path) -> None:
    place = write(tmp_path)
    for make, message in (
        (lambda path: path.symlink_to("/etc/passwd"), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_bytes(b"0" * (2**20 + 1)), "at most 1 MiB"),
        (lambda path: path.write_text("x"), "does not belong"),
    ):
        path = place / "weights.bin"
        make(path)
        with pytest.raises(BadEntry, match=message):
            entry.read(place)
        path.unlink()
    (place / entry.README).write_text("# mine\n")
    with pytest.raises(BadEntry, match="## Idea"):
        entry.read(place)
    with pytest.raises(BadEntry, match="is not an entry"):
        entry.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.assign(sampled=1.5), "out of bounds"),
        (lambda table: table.assign(dial="speed"), "must have the dial rate"),
        (lambda table: table[table["loss"] == "mine"], "must have mine and grpo"),
        (lambda table: pd.concat([table, table.assign(loss="vespo")]), "no other loss"),
        (lambda table: table.drop(columns="seed"), "cannot be read"),
        (lambda table: table.assign(sampled="high"), "cannot be read"),
    ],
)
def test_bad_numbers_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadEntry, match=message):
        entry.read(write(tmp_path, table=change(numbers()))).outcomes()


def test_tuning_table_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1\xff")
    with pytest.raises(BadEntry, match="is not a text file"):
        entry.write(tmp_path / "new", ABOUT, ["algorithm=grpo"], numbers(), tmp_path / "table.parquet")
    assert not (tmp_path / "new").exists()


def test_entry_cannot_take_the_name_of_a_recorded_loss(tmp_path: Path) -> None:
    write(tmp_path, "grpo")
    with pytest.raises(BadEntry, match="the board has a loss named grpo"):
        rows(tmp_path)


def test_seeds_follow_from_the_commit_and_are_fresh() -> None:
    assert rerun.seeds("1a2b3c4d") == rerun.seeds("1A2B3C4D") != rerun.seeds("1a2b3c4e")
    assert min(rerun.seeds("1a2b3c4d")) >= 10**6
    for commit in ("main", "1a2b", "1a2b3c4d; rm"):
        with pytest.raises(BadEntry, match="--commit must be a hash"):
            rerun.seeds(commit)


def test_a_loss_that_gains_from_shuffled_rewards_is_not_verified() -> None:
    table, shuffled = numbers(), numbers()[lambda table: table["loss"] == "mine"]
    assert rerun._gains_without_reward(table, shuffled.assign(sampled=0.45)) == ""
    assert "with shuffled rewards it gains 0.200" in rerun._gains_without_reward(table, shuffled.assign(sampled=0.6))


def test_an_entry_that_changes_the_setting_does_not_run(tmp_path: Path) -> None:
    place = write(tmp_path)
    own = "".join(f"  {line}\n" for line in GRPO.splitlines())
    yaml = f"# @package _global_\nrollout:\n  responses: 16\nalgorithm:\n{own}"
    (place / "conf" / "algorithm" / "mine.yaml").write_text(yaml)
    verdict = rerun.rerun(entry.read(place), "1a2b3c4d")
    assert verdict == ("it changes what the standard fixes: rollout.responses: 8 -> 16", None, False)


def test_the_board_ranks_by_the_ratio_to_grpo_on_the_same_machine(tmp_path: Path) -> None:
    """An entry on whose machine every loss bears half the rate has the same ratio, and the same place."""
    halved = numbers().assign(value=lambda table: table["value"] / 2, rate=lambda table: table["rate"] / 2)
    places = []
    for name, table in (("one", numbers("one")), ("two", halved.replace({"loss": {"mine": "two"}}))):
        write(tmp_path, name, table)
        places.append(rows(tmp_path)["loss"].tolist().index(name))
    assert abs(places[0] - places[1]) <= 1


@pytest.mark.parametrize(
    ("name", "kind"), [("grpo", "loss"), ("gspo", "loss"), ("topr", "recipe"), ("dppo", "recipe"), ("dapo", "recipe")]
)
def test_own_advantage_or_filter_makes_a_recipe(name: str, kind: str) -> None:
    assert board._shipped_kind(name) == board.kind([f"algorithm={name}"]) == kind

"""The board: entries are verified without running their code, and stand where their data put them."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from steadymoe.bench import cli
from steadymoe.bench.scores import board, entry, repeat, submit
from steadymoe.bench.scores.entry import OWN, BadEntry
from steadymoe.bench.scores.standard import GRADIENT, STABILITY, VERSION

NOISE = np.linspace(-0.05, 0.05, 10)
YAML = "conf/algorithm/mine.yaml"
FIRST = {str(seed): {"cold_start": "c0", "loss": [0.0, 0.1], "grad_norm": [0.5, 2.0]} for seed in (0, 1)}
GRPO = Path(__file__).parents[2] / "conf" / "algorithm" / "grpo.yaml"


def outcomes(shift: float) -> pd.DataFrame:
    """Ten seeds of the first part: GRPO around 0.5, GSPO around 0.65, and one's own ``shift`` above GRPO."""
    means = {OWN: 0.5 + shift, "grpo": 0.5, "gspo": 0.65}
    rows = [
        ("stability", arm, seed, mean + NOISE[seed], 0.37) for arm, mean in means.items() for seed in STABILITY.seeds
    ]
    return pd.DataFrame(rows, columns=["part", "arm", "seed", "value", "start"])


def write(folder: Path, name: str, shift: float = 0.1, **said: Any) -> Path:
    about = {"standard": VERSION, "name": name, "words": f"algorithm={name}", "paper": "mine", "equation": "1"}
    about |= {"tuned": False, "tuning": ""} | said
    made = {"machine": "a processor", "revision": "abc", "versions": "torch 2", "first": FIRST}
    return entry.write(folder / name, about, outcomes(shift), made, {"README.md": f"# {name}\n", YAML: "loss: {}\n"})


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = entry.read(write(tmp_path, "mine"))
    assert found.name == "mine"
    assert found.by_seed(STABILITY).tolist() == pytest.approx((0.6 + NOISE).tolist())
    assert found.by_seed(GRADIENT).empty
    assert found.made["machine"] == "a processor"
    with pytest.raises(BadEntry, match="is there already"):
        write(tmp_path, "mine")


def rewrite(folder: Path, **changed: Any) -> None:
    """entry.yaml with other content, and the hashes of what is there."""
    path = folder / "entry.yaml"
    about = yaml.safe_load(path.read_text()) | changed
    path.write_text(yaml.safe_dump({key: value for key, value in about.items() if value is not None}))


def data(folder: Path, table: pd.DataFrame) -> None:
    """Other data, with their own hash: only their content can be refused."""
    table.to_parquet(folder / "outcomes.parquet", index=False)
    about = yaml.safe_load((folder / "entry.yaml").read_text())
    rewrite(folder, files=about["files"] | {"outcomes.parquet": entry._hash(folder / "outcomes.parquet")})


def drop(arm: str) -> Any:
    return lambda folder: data(folder, outcomes(0.1).query("arm != @arm", local_dict={"arm": arm}))


def made(folder: Path, text: str) -> None:
    """Another made.json, with its own hash."""
    (folder / "made.json").write_text(text)
    about = yaml.safe_load((folder / "entry.yaml").read_text())
    rewrite(folder, files=about["files"] | {"made.json": entry._hash(folder / "made.json")})


def first(**changed: Any) -> Any:
    facts = {"machine": "m", "revision": "r", "versions": "v", "first": {"0": FIRST["0"] | changed}}
    return lambda folder: made(folder, json.dumps(facts))


FAULTS = {
    "an edited file": (
        lambda f: (f / YAML).write_text("loss: {x: 1}\n"),
        "is not the file that entry.yaml was written",
    ),
    "a file of another kind": (lambda f: (f / "run.sh").write_text("x"), "run.sh is no file of an entry"),
    "a module that is not named": (lambda f: (f / "more.py").write_text("x"), "more.py is not named in entry.yaml"),
    "a file that names itself allowed": (
        lambda f: ((f / "data.bin").write_text("x"), rewrite(f, files={"data.bin": entry._hash(f / "data.bin")})),
        "data.bin is no file of an entry",
    ),
    "an absent file": (lambda f: (f / YAML).unlink(), "lacks conf/algorithm/mine.yaml"),
    "a link": (lambda f: (f / "data.py").symlink_to("/etc/hostname"), "is a link"),
    "a link in place of entry.yaml": (
        lambda f: ((f / "entry.yaml").unlink(), (f / "entry.yaml").symlink_to("/dev/zero")),
        "is a link",
    ),
    "a pipe": (lambda f: os.mkfifo(f / "wait.py"), "is a link or no plain file"),
    "a large file": (lambda f: (f / "big.py").write_bytes(b"0" * (2**20 + 1)), "larger than 1 MiB"),
    "no entry.yaml": (lambda f: (f / "entry.yaml").unlink(), "is no entry"),
    "no YAML": (lambda f: (f / "entry.yaml").write_text("{"), "cannot be read"),
    "a YAML without end": (lambda f: (f / "entry.yaml").write_text("[" * 5_000), "cannot be read"),
    "a field less": (lambda f: rewrite(f, paper=None), "lacks paper"),
    "a list for a text": (lambda f: rewrite(f, paper=["x"]), "paper must be a text"),
    "another standard": (lambda f: rewrite(f, standard="steadymoe-0"), "is an entry of steadymoe-0"),
    "no name": (lambda f: rewrite(f, name="../x"), "name must be a name"),
    "words that end in a quote": (lambda f: rewrite(f, words="algorithm=mine '"), "words cannot be read"),
    "words for the command": (
        lambda f: rewrite(f, words="algorithm=mine results_dir=/x"),
        "results_dir=/x names no algorithm",
    ),
    "words that look outside": (
        lambda f: rewrite(f, words="algorithm=mine algorithm.loss.x=${oc.env:HOME}"),
        "names no algorithm and none of its numbers",
    ),
    "words without an algorithm": (lambda f: rewrite(f, words="algorithm.loss.x=1"), "must name one algorithm"),
    "a file outside": (
        lambda f: rewrite(f, files=yaml.safe_load((f / "entry.yaml").read_text())["files"] | {"../x": "0"}),
        "lacks ../x",
    ),
    "no anchor": (drop("grpo"), "stability has no runs of grpo"),
    "no own runs": (drop(OWN), "stability has no runs of yours"),
    "no first part": (lambda f: data(f, outcomes(0.1).assign(part="gradient")), "lacks the part stability"),
    "a seed less": (lambda f: data(f, outcomes(0.1).query("seed != 3")), "has other seeds of"),
    "an unknown part": (lambda f: data(f, outcomes(0.1).assign(part="speed")), "there is no part speed"),
    "words for numbers": (lambda f: data(f, outcomes(0.1).assign(value="x")), "a value is no finite number"),
    "no number": (lambda f: data(f, outcomes(float("nan"))), "a value is no finite number"),
    "an infinite number": (lambda f: data(f, outcomes(float("inf"))), "a value is no finite number"),
    "a reward above 1": (lambda f: data(f, outcomes(0.6)), "mean reward lies between 0 and 1"),
    "a column less": (lambda f: data(f, outcomes(0.1).drop(columns="start")), "lacks start"),
    "too many rows": (lambda f: data(f, pd.concat([outcomes(0.1)] * 400)), "has more than 10000 rows"),
    "no parquet": (lambda f: (f / "outcomes.parquet").write_bytes(b"PAR1"), "is not the file"),
    "no facts": (lambda f: made(f, "[]"), "must have machine, revision, versions"),
    "facts without end": (lambda f: made(f, "[" * 100_000), "cannot be read"),
    "no first updates": (
        lambda f: made(f, json.dumps({"machine": "m", "revision": "r", "versions": "v", "first": [1]})),
        "must have the first updates by seed",
    ),
    "words for first updates": (first(loss="x"), "first updates are cold_start, a text, and lists"),
    "no cold start": (first(cold_start=None), "first updates are cold_start, a text, and lists"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_entry_is_one_line_and_exit_2(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, message = FAULTS[fault]
    folder = write(tmp_path, "mine")
    damage(folder)
    monkeypatch.setattr(sys, "argv", ["steadymoe", "board", str(folder), "--page", str(tmp_path / "board.html")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    found = capsys.readouterr()
    assert (stopped.value.code, found.out) == (2, "")
    assert message in found.err
    assert len(found.err.splitlines()) == 1
    assert not (tmp_path / "board.html").exists()


def test_no_code_of_an_entry_is_run_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    files = {
        "README.md": "x",
        "my_loss.py": f"open({str(tmp_path / 'ran')!r}, 'w')",
        YAML: GRPO.read_text().replace("steadymoe.algorithms.grpo.GRPO", "my_loss.X"),
    }
    about = {"standard": VERSION, "name": "mine", "words": "algorithm=mine", "paper": "", "equation": ""}
    facts = {"machine": "m", "revision": "r", "versions": "v", "first": FIRST}
    entry.write(folder, about | {"tuned": False, "tuning": ""}, outcomes(0.1), facts, files)
    (found,) = board.load([folder])
    board.html([found], {})
    assert not (tmp_path / "ran").exists()
    assert repeat.verdict(found) == "check refuses it"
    assert (tmp_path / "ran").exists()
    assert entry.read(folder).name == "mine"  # nothing was added to it, no compiled module


def test_entries_stand_by_their_difference_from_grpo_and_tuned_ones_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shift, tuned in (("good", 0.2, False), ("bad", -0.3, False), ("same", 0.0, False), ("best", 0.4, True)):
        write(tmp_path, name, shift, tuned=tuned)
    found = board.load([tmp_path])
    table = board.standings(found, {"good": "repeated"})
    assert table["entry"].tolist() == ["good", "same", "bad", "best"]
    assert table["stability: less GRPO"].tolist() == [
        "0.2 [0.2, 0.2], n 10",
        "0 [0, 0], n 10",
        "-0.3 [-0.3, -0.3], n 10",
        "0.4 [0.4, 0.4], n 10",
    ]
    assert table["gradient: less GRPO"].unique().tolist() == ["–"]
    assert table["repeated"].tolist() == ["repeated", "unchecked", "unchecked", "unchecked"]
    page = tmp_path / "out" / "board.html"
    assert board.answer(argparse.Namespace(folders=[tmp_path], run=False, page=page)) == 0
    text = page.read_text()
    first, tuned, lacking = re.split("<h2>Tuned</h2>|<h2>Not run</h2>", text)
    assert "good" in first
    assert "best" in tuned
    assert "sapo" in lacking
    assert 'data-order="0.2' in first
    assert 'data-order="nan' not in text
    assert 'data-order="-inf' not in text
    assert "| good" in capsys.readouterr().out


def test_two_entries_of_one_name_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", "mine")
    write(tmp_path / "b", "mine")
    with pytest.raises(BadEntry, match="are both entries of mine"):
        board.load([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(BadEntry, match="there is no folder"):
        board.load([tmp_path / "c"])


def test_a_page_escapes_what_an_entry_says(tmp_path: Path) -> None:
    folder = write(tmp_path, "mine", paper="<script>x</script>")
    assert "<script>x" not in board.html(board.load([folder]), {})


def test_a_further_run_lies_in_the_prediction_interval_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(size=(2000, 11))
    inside = [low <= one <= high for *known, one in draws.tolist() for low, high in [repeat.prediction(known)]]
    assert np.mean(inside) == pytest.approx(0.975, abs=0.015)  # two of them: 0.95


def test_the_files_of_an_entry_are_those_of_its_author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit.own_files(["algorithm=grpo"]) == {}
    folder = tmp_path / "mine"
    texts = {
        "conf/algorithm/gentle.yaml": GRPO.read_text().replace(
            "steadymoe.algorithms.grpo.GRPO", "gentle.losses.Gentle"
        ),
        "gentle/losses.py": "from gentle.band import LOW\nfrom steadymoe.algorithms.grpo import GRPO as Gentle\n",
        "gentle/band.py": "LOW = 0.2\n",
        "gentle/other.py": "UNUSED = 1\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("STEADYMOE_PATH", str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert submit.own_files(["algorithm=gentle"]) == {k: v for k, v in texts.items() if k != "gentle/other.py"}

"""The board: entries are verified without running their code, and ranked by their data."""

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from committed import assert_same
from test_cli import steadymoe

from steadymoe.bench.score import board, command, entry, rerun, standard
from steadymoe.bench.score.entry import OWN, BadEntry
from steadymoe.bench.score.recorded import Arm, Audited, Recorded
from steadymoe.bench.score.standard import ANCHORS, GRADIENT, STABILITY, VERSION

NOISE = np.linspace(-0.05, 0.05, 10)
YAML = "conf/algorithm/mine.yaml"
FIRST = {str(seed): {"cold_start": "c0", "loss": [0.0, 0.1], "grad_norm": [0.5, 2.0]} for seed in STABILITY.seeds}
GRPO = Path(__file__).parents[2] / "conf" / "algorithm" / "grpo.yaml"


def outcomes(shift: float) -> pd.DataFrame:
    """Ten seeds of the first part: GRPO around 0.5, GSPO around 0.65, and one's own ``shift`` above GRPO."""
    means = {OWN: 0.5 + shift, "grpo": 0.5, "gspo": 0.65}
    rows = [("stability", arm, seed, mean + NOISE[seed]) for arm, mean in means.items() for seed in STABILITY.seeds]
    table = pd.DataFrame(rows, columns=["part", "arm", "seed", "value"])
    return table.assign(tokens=1000.0 + table["seed"])


def about(name: str, **changed: Any) -> dict[str, Any]:
    texts = {"standard": VERSION, "name": name, "words": "algorithm=mine", "paper": "mine", "equation": "1"}
    texts |= {"machine": "a processor", "revision": "abc", "versions": "torch 2", "tuning": ""}
    return texts | {"first": FIRST} | changed


def write(folder: Path, name: str, shift: float = 0.1, **changed: Any) -> Path:
    files = {"README.md": f"# {name}\n", YAML: "loss: {}\n"}
    return entry.write(folder / name, about(name, **changed), outcomes(shift), files)


def test_an_entry_is_read_as_it_was_written_and_a_bad_one_is_not_written(tmp_path: Path) -> None:
    found = entry.read(write(tmp_path, "mine"))
    assert (found.name, found.algorithm, found.own_files) == ("mine", "mine", [YAML])
    assert found.by_seed(STABILITY).tolist() == pytest.approx((0.6 + NOISE).tolist(), abs=1e-15)
    assert found.by_seed(STABILITY, "gspo", "tokens").tolist() == [*range(1000, 1010)]
    assert found.by_seed(GRADIENT).empty
    with pytest.raises(BadEntry, match="already exists"):
        write(tmp_path, "mine")
    with pytest.raises(BadEntry, match="name must be a name"):
        write(tmp_path, "my algorithm")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_gradients_that_are_undefined_at_a_checkpoint_are_left_out(tmp_path: Path) -> None:
    seeds, files = list(GRADIENT.seeds), {"README.md": "", YAML: ""}
    tables = [
        pd.DataFrame({"part": "gradient", "arm": arm, "seed": seeds, "value": [np.nan, *np.full(9, value)]})
        for arm, value in ((OWN, 0.5), ("grpo", 0.2), ("gspo", 0.4))
    ]
    rows = pd.concat([outcomes(0.1), *tables])
    difference = board.less_grpo(entry.read(entry.write(tmp_path / "a", about("mine"), rows, files)), GRADIENT)
    assert (difference.mean, difference.n) == (pytest.approx(0.3), 9)
    few = rows.assign(value=rows["value"].where((rows["part"] == "stability") | (rows["seed"] > 308)))
    with pytest.raises(BadEntry, match="gradient has too few defined values"):
        entry.write(tmp_path / "b", about("mine"), few, files)


def content(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "entry.json").read_text()))


def rewrite(folder: Path, **changed: Any) -> None:
    """Change fields of entry.json; None removes one."""
    fields = content(folder) | changed
    (folder / "entry.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def data(folder: Path, text: str) -> None:
    """Replace the data and their hash: only their content can be refused."""
    (folder / "outcomes.csv").write_text(text)
    rewrite(folder, files=content(folder)["files"] | {"outcomes.csv": entry._hash(folder / "outcomes.csv")})


Damage = Callable[[Path], Any]


def table(**changed: Any) -> Damage:
    return lambda folder: data(folder, outcomes(0.1).assign(**changed).to_csv(index=False))


def field(**changed: Any) -> Damage:
    return lambda folder: rewrite(folder, **changed)


def file(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def first(**changed: Any) -> Damage:
    return field(first=FIRST | {"3": FIRST["3"] | changed})


def link_in_place_of_entry(folder: Path) -> None:
    (folder / "entry.json").unlink()
    (folder / "entry.json").symlink_to("/dev/zero")


FAULTS: dict[str, tuple[Damage, str]] = {
    "an edited file": (file(YAML, "loss: {x: 1}\n"), "has changed since"),
    "a file of another kind": (file("run.sh", "x"), "run.sh does not belong in an entry"),
    "a module that is not named": (file("more.py", "x"), "more.py is not named in entry.json"),
    "an absent file": (lambda f: (f / YAML).unlink(), "lacks conf/algorithm/mine.yaml"),
    "a link": (lambda f: (f / "data.py").symlink_to("/etc/hostname"), "is not a regular file"),
    "a link in place of entry.json": (link_in_place_of_entry, "is not a regular file"),
    "a pipe": (lambda f: os.mkfifo(f / "wait.py"), "is not a regular file"),
    "a large file": (file("big.py", "0" * (2**20 + 1)), "larger than 1 MiB"),
    "many files": (lambda f: [(f / f"m{i}.py").write_text("") for i in range(101)], "more than 100 files"),
    "no entry.json": (lambda f: (f / "entry.json").unlink(), "is not an entry"),
    "no JSON": (file("entry.json", "{"), "is not JSON"),
    "a JSON without end": (file("entry.json", "[" * 100_000), "is not JSON"),
    "a list": (file("entry.json", "[]"), "standard must be a text"),
    "a field less": (field(paper=None), "paper must be a text"),
    "a long text": (field(paper="x" * 1001), "paper must be a text of at most 1000"),
    "another standard": (field(standard="steadymoe-0"), "got steadymoe-0"),
    "a name that is a path": (field(name="../x"), "name must be a name"),
    "files as a list": (field(files=[1]), "must hold the hashes of"),
    "words that end in a quote": (field(words="algorithm=mine '"), "words cannot be read"),
    "words for the command": (field(words="algorithm=mine results_dir=/x"), "got results_dir=/x"),
    "words that look outside": (field(words="algorithm=mine algorithm.loss.x=${oc.env:HOME}"), "may only choose"),
    "words without an algorithm": (field(words="algorithm.loss.x=1"), "must choose one algorithm"),
    "words for another algorithm": (field(words="algorithm=gspo"), "must have one YAML"),
    "other numbers than published": (field(words="algorithm=mine algorithm.loss.clip_low=0.1"), "are tuned"),
    "a file outside": (lambda f: rewrite(f, files=content(f)["files"] | {"../x": "0"}), "lacks ../x"),
    "no anchor": (table(arm=lambda t: t["arm"].replace("grpo", "x")), "see grpo, seed 0"),
    "no first part": (table(part="gradient"), "lacks the part stability"),
    "a seed less": (lambda f: data(f, outcomes(0.1).query("seed != 3").to_csv(index=False)), "one row for each seed"),
    "a seed twice": (table(seed=lambda t: t["seed"].replace(3, 4)), "one row for each seed"),
    "an unknown part": (table(part="speed"), "has no part speed"),
    "words for numbers": (table(value="x"), "cannot be read"),
    "no number": (table(value=float("nan")), "too few defined values"),
    "an infinite number": (table(value=float("inf")), "value that is not finite"),
    "a reward above 1": (table(value=1.1), "not in [0, 1]"),
    "tokens below 0": (table(tokens=-1.0), "tokens that is not finite or not in [0, inf]"),
    "a column less": (lambda f: data(f, outcomes(0.1).drop(columns="seed").to_csv(index=False)), "cannot be read"),
    "too many rows": (lambda f: data(f, pd.concat([outcomes(0.1)] * 400).to_csv(index=False)), "more than 10000 rows"),
    "an empty table": (lambda f: data(f, ""), "cannot be read"),
    "no first updates": (field(first=[1]), "for each of the seeds 0"),
    "words for first updates": (first(loss="x"), "first must hold"),
    "a number beyond all": (first(loss=[10**400]), "first must hold"),
    "no cold start": (first(cold_start=None), "first must hold"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_entry_is_refused_in_one_line(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, message = FAULTS[fault]
    folder = write(tmp_path, "mine")
    damage(folder)
    words = ("score", "--verify", str(folder), "--board", str(tmp_path / "out"))
    assert steadymoe(monkeypatch, *words) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert message in printed.err
    assert not (tmp_path / "out").exists()


def test_no_code_of_an_entry_is_run_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "README.md": "x",
        "my_loss.py": f"open({str(tmp_path / 'ran')!r}, 'w')",
        YAML: GRPO.read_text().replace("steadymoe.algorithms.grpo.GRPO", "my_loss.X"),
    }
    folder = entry.write(tmp_path / "board" / "mine", about("mine"), outcomes(0.1), files)
    entries = entry.load([folder])
    board.html(entries, board.table(entries))
    assert not (tmp_path / "ran").exists()
    monkeypatch.chdir(folder)
    assert command.verify([Path()], run=True, to=tmp_path / "out") == 1
    assert (tmp_path / "ran").exists()
    assert entry.read(folder).name == "mine"  # nothing was added to it, no compiled module
    known = board.verdicts(tmp_path / "out")
    assert board.table(entries, known)["repeated"].tolist() == ["its algorithm cannot be built"]  # and saved
    rewrite(folder, paper="another")
    assert board.table(entry.load([folder]), known)["repeated"].tolist() == ["unchecked"]
    (tmp_path / "out" / "checked.json").write_text("[")
    with pytest.raises(BadEntry, match=r"checked\.json does not hold verdicts"):
        board.verdicts(tmp_path / "out")


def test_a_verdict_that_comes_with_an_entry_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "board", "mine")
    claimed = json.dumps({entry.read(folder).digest: "repeated (seeds 0, 1)"})
    for place in (tmp_path / "board", tmp_path):
        (place / "checked.json").write_text(claimed)
    monkeypatch.chdir(tmp_path)
    for named in (folder, folder.parent):
        assert command.verify([named]) == 0
        assert command.verify([named], to=tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert ("unchecked" in said, "| repeated (" in said) == (True, False)


def test_entries_are_ranked_by_their_difference_from_grpo_and_tuned_ones_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shift, tuned in (("good", 0.2, ""), ("bad", -0.3, ""), ("same", 0.0, ""), ("best", 0.4, "clip_low")):
        write(tmp_path, name, shift, tuning=tuned, paper="<script>x</script>")
    (tmp_path / ".git").mkdir()
    rows = board.table(entry.load([tmp_path]))
    assert rows["entry"].tolist() == ["good", "same", "bad", "best"]
    differences = ["0.2", "0", "-0.3", "0.4"]  # equal on all seeds: no interval
    assert rows["stability: less GRPO"].map(str).tolist() == differences
    assert rows["stability: n"].tolist() == [10, 10, 10, 10]
    assert rows["gradient: less GRPO"].unique().tolist() == ["–"]
    assert rows["tokens"].unique().tolist() == ["1,004"]  # 1004.5, rounded to even
    assert command.verify([tmp_path], to=tmp_path / "out") == 0
    text, markdown = ((tmp_path / "out" / f"board.{suffix}").read_text() for suffix in ("html", "md"))
    assert board.text(rows) in markdown
    published, tuned, lacking = re.split("<h2>Tuned</h2>|<summary>Not run</summary>", text)
    assert ("good" in published, "best" in tuned, "sapo" in lacking) == (True, True, True)
    assert 'data-number="nan' not in text
    assert re.search(r"(?<!\\)<script>x", text + markdown) is None
    # The row of the frozen policy in study/claims.md.
    start = "begins at 0.368 [0.339, 0.395], and the mean reward of the frozen policy is 0.366 [0.344, 0.392]"
    assert start in capsys.readouterr().out


def test_anchors_that_differ_from_the_recorded_ones_are_shown(tmp_path: Path) -> None:
    recorded = standard.baselines().of(STABILITY)
    numbers = {name: recorded[recorded["arm"] == shown].set_index("seed")["value"] for name, shown in ANCHORS.items()}
    rows = [
        ("stability", arm, seed, values[seed])
        for arm, values in (numbers | {OWN: numbers["gspo"]}).items()
        for seed in STABILITY.seeds
    ]
    honest = pd.DataFrame(rows, columns=["part", "arm", "seed", "value"]).assign(tokens=math.nan)
    lowered = honest.assign(value=honest["value"] - 0.1 * (honest["arm"] == "grpo"))
    for name, values in (("honest", honest), ("lowered", lowered)):
        entry.write(tmp_path / name, about(name), values, {"README.md": "", YAML: ""})
    found = board.table(entry.load([tmp_path])).set_index("entry")
    assert found["anchors"].to_dict() == {"honest": "agree", "lowered": "differ from the recorded ones"}
    assert set(found["tokens"]) == {"not recorded"}


def test_two_entries_of_one_name_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a", "mine").parent, write(tmp_path / "b", "mine").parent]
    with pytest.raises(BadEntry, match="are both entries of mine"):
        entry.load(folders)
    with pytest.raises(BadEntry, match="is not a folder"):
        entry.load([tmp_path / "c"])


def test_a_further_run_lies_in_the_prediction_interval_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(size=(2000, 11))
    inside = [low <= one <= high for *known, one in draws.tolist() for low, high in [rerun.prediction(known)]]
    assert np.mean(inside) == pytest.approx(0.9875, abs=0.01)  # four of them: 0.95


def test_the_files_of_an_entry_are_those_of_its_author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert entry.own_files(["algorithm=grpo"]) == {}
    folder = tmp_path / "mine"
    yaml = GRPO.read_text().replace("steadymoe.algorithms.grpo.GRPO", "gentle.losses.Gentle")
    texts = {
        "conf/algorithm/gentle.yaml": yaml,
        "gentle/losses.py": "from gentle.band import LOW\nfrom steadymoe.algorithms.grpo import GRPO as Gentle\n",
        "gentle/band.py": "LOW = 0.2\n",
    }
    site_packages = ".venv/lib/python3.11/site-packages"
    unused = {"gentle/other.py": "UNUSED = 1\n", f"{site_packages}/gentle_other.py": ""}
    for name, text in (texts | unused).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("STEADYMOE_PATH", str(folder))
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder / site_packages)])
    importlib.import_module("gentle_other")
    assert entry.own_files(["algorithm=gentle"]) == texts


def test_the_committed_entries_are_of_the_reference_study() -> None:
    root = Path(__file__).parents[2] / "results"
    entries, study = entry.load([root / "board"]), Recorded(root / "reference")
    assert {each.name for each in entries} == {"grpo", "gspo", "reinforce", "vespo", "cispo", "sapo"}
    seeds = list(STABILITY.seeds)
    for each in entries:
        for arm in (OWN, *ANCHORS):
            name = each.name if arm == OWN else arm
            run, audit = Arm(name, STABILITY.source, name), Audited(name, GRADIENT.source, name)
            assert each.by_seed(STABILITY, arm).tolist() == pytest.approx(STABILITY.measure(study, run)[seeds].tolist())
            assert each.by_seed(STABILITY, arm, "tokens").tolist() == study.tokens(run)[seeds].tolist()
            audited = GRADIENT.measure(study, audit).reindex(list(GRADIENT.seeds))
            assert each.by_seed(GRADIENT, arm).tolist() == pytest.approx(audited.tolist(), nan_ok=True)
    assert_same(board.html(entries, board.table(entries)), (root / "board" / "board.html").read_text(), "board.html")

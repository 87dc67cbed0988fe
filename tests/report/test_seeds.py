"""``steadymoe seeds``: the same numbers from every kind of log, fewer seeds where paired, bad logs in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fixtures import Said

from steadymoe.bench.report import seeds
from steadymoe.bench.statistics import comparisons
from steadymoe.bench.support import rows_of_files
from steadymoe.bench.support.errors import UserError

STEPS, SEEDS = (10, 20, 30), (0, 1, 2, 3)
GENERATOR = np.random.default_rng(0)
SHARED = (-0.15, -0.05, 0.05, 0.15)  # of a seed, so of both arms
VALUES = {
    (arm, seed, step): 0.4 + 0.01 * step + (arm == "new") * 0.05 + SHARED[seed] + float(GENERATOR.normal(0, 0.01))
    for arm in ("old", "new")
    for seed in SEEDS
    for step in STEPS
}
ENDS = {arm: {str(seed): VALUES[arm, seed, 30] for seed in SEEDS} for arm in ("old", "new")}
Files = list[tuple[str | None, Path]]


def one_table(folder: Path) -> Files:
    rows = [f"{arm},{seed}.0,{step},{value!r}\n" for (arm, seed, step), value in VALUES.items()]
    (folder / "runs.csv").write_text("arm,seed,step,value\n" + "".join(rows))
    return [(None, folder / "runs.csv")]


def each_run(folder: Path) -> Files:
    files: Files = []
    for arm, seed in dict.fromkeys(key[:2] for key in VALUES):
        rows = [{"global_step": step, "value": VALUES[arm, seed, step], "loss": 1} for step in STEPS]
        path = folder / f"{arm}_seed_{seed}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"global_step": 40, "loss": 0}]))
        files.append((arm, path))
    return files


def folders_of_verl(folder: Path) -> Files:
    files: Files = []
    for arm, path in each_run(folder):
        assert arm
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        place = folder / f"{arm} seed={path.stem[-1]}" / "log.jsonl"
        place.parent.mkdir()
        of_verl = [{"step": row.pop("global_step"), "data": row} for row in rows]
        place.write_text("".join(json.dumps(row) + "\n" for row in of_verl))
        files.append((arm, place))
    return files


def chart(folder: Path) -> Files:
    wide = pd.Series(VALUES).unstack([0, 1])
    wide.columns = [f"{arm}-seed{seed} - value" for arm, seed in wide.columns]
    extremes = wide.add_suffix("__MIN") - 1
    steps = wide.rename(columns=lambda name: name.replace("value", "_step")) * 0
    pd.concat([wide, extremes, steps], axis=1).to_csv(folder / "chart.csv", index_label="Step")
    return [(None, folder / "chart.csv")]


def export(folder: Path) -> Files:
    table = pd.DataFrame([[*key, "value", value] for key, value in VALUES.items()])
    table.columns = pd.Index(["arm", "seed", "step", "metric", "value"])
    pd.concat([table, table.assign(metric="loss", value=-1.0)]).to_csv(folder / "tidy.csv", index=False)
    return [(None, folder / "tidy.csv")]


@pytest.mark.parametrize("written", [one_table, each_run, folders_of_verl, chart, export])
def test_every_log_format_gives_the_same_final_values(written: Callable[[Path], Files], tmp_path: Path) -> None:
    logs = seeds.read(written(tmp_path), "value")
    assert {arm: ends.to_dict() for arm, ends in seeds.ends(logs).items()} == {
        arm: pytest.approx(ends) for arm, ends in ENDS.items()
    }
    late = seeds.ends(logs, last=0.5)["new"]["2"]  # two of three values
    assert late == pytest.approx((VALUES["new", 2, 20] + VALUES["new", 2, 30]) / 2)


def test_pairs_match_the_suites_statistics() -> None:
    arms = {arm: pd.Series(ends) for arm, ends in ENDS.items()}
    paired, unpaired = seeds.pairs(arms, [0.03]).to_dict("records")
    old, new = arms["old"], arms["new"]
    assert paired["difference of"] == "new − old"
    assert paired["difference"] == comparisons.paired_difference(new, old)
    assert unpaired["difference"] == comparisons.welch(new, old).estimate
    assert paired["r"] == pytest.approx(np.corrcoef(old, new)[0, 1])
    assert paired["r"] > 0.9
    fewest = comparisons.seeds_needed((new - old).tolist(), 0.03)
    assert paired["seeds for 0.03"].startswith(f"{fewest} (")
    assert int(unpaired["seeds for 0.03"].split()[0]) > 5 * fewest
    # A difference that four seeds just detect needs four seeds.
    (again, _) = seeds.pairs(arms, [paired["detectable"] * 1.001]).to_dict("records")
    assert next(cell for name, cell in again.items() if name.startswith("seeds for")).startswith("4 (")


def test_arms_without_common_seeds_are_compared_unpaired() -> None:
    old = pd.Series([0.1, 0.2, 0.3], ["0", "1", "2"])
    (row,) = seeds.pairs({"old": old, "new": old.set_axis(["3", "4", "5"])}).to_dict("records")
    assert (row["design"], row["n"]) == ("unpaired", 3)
    paired, _ = seeds.pairs({"old": old, "new": old + 0.1}).to_dict("records")
    assert paired["seeds for 0.02"] == "–"
    assert np.isnan(paired["detectable"])


HEADER = "arm,seed,step,value\n"
THREE = HEADER + "".join(f"{arm},{seed},1,{seed}\n" for arm in "ab" for seed in range(3))


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ({}, "no.csv", "there is no file no.csv"),
        ({"a.csv": HEADER}, "a.csv", "a.csv has no rows"),
        ({"a.csv": "arm,value\n\xff,1\n"}, "a.csv", "not UTF-8"),
        ({"a.csv": "step,value\n1,2\n"}, "a.csv", "no column arm; name its arm: --arm NAME a.csv"),
        ({"a.csv": HEADER + "a,0,1,x\n"}, "a.csv", "line 2: value must be a number; got 'x'"),
        ({"a.csv": HEADER + "a,0,,1\n"}, "a.csv", "line 2: has no step"),
        ({"a.csv": HEADER + "a,0,1,nan\n"}, "a.csv", "a, seed 0: the value to compare is nan"),
        ({"a.csv": HEADER + "a,0,1,1e200\n"}, "a.csv", "a, seed 0: the value to compare is 1e+200"),
        ({"a.csv": HEADER + "a,0,1,1\nb,0,1,2\n"}, "a.csv", "a has one seed; at least 3 are needed"),
        ({"a.csv": HEADER + "a,0,1,1\n"}, "a.csv", "got 1 of 1 arms: a"),
        ({"a.jsonl": '{"value":' * 40 + "1" + "}" * 40 + "\n"}, "a.jsonl", "line 1: not JSON (it has more"),
        ({"a.csv": THREE}, "a.csv a.csv", "a has seed 0 already"),
        ({"a.csv": THREE}, "--arm c a.csv", "c has seed 0 already"),
        ({"a.csv": THREE, "b.csv": "step,loss\n1,2\n"}, "a.csv --arm b b.csv", "no column in common"),
        ({"a.csv": "arm,loss,entropy\na,1,2\n"}, "a.csv", "--metric; the logs share loss, entropy"),
        ({"a.csv": THREE}, "a.csv --metric loss", "no column 'loss'; it has arm, seed, step, value"),
        ({"a.csv": THREE}, "a.csv --step time", "no column 'time'"),
        ({"a.csv": THREE}, "a.csv --difference 0", "--difference: must be above 0"),
        ({"a.csv": THREE}, "a.csv --last 1.5", "--last: must be above 0 and at most 1"),
        ({}, "", "no logs given"),
    ],
)
def test_bad_logs_are_refused_in_one_line(
    content: dict[str, str], words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in content.items():
        Path(name).write_text(text, "latin-1")
    assert message in refused("seeds", *words.split())


def test_a_link_a_large_file_and_too_many_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text(THREE)
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    with pytest.raises(OSError, match="is a link"):
        seeds.read([(None, tmp_path / "b.csv")])
    monkeypatch.setattr(seeds, "MAX_NUMBERS", 5)
    with pytest.raises(UserError, match="more than 5 numbers"):
        seeds.read([(None, tmp_path / "a.csv")])
    monkeypatch.setattr(rows_of_files, "MAX_BYTES", 10)
    with pytest.raises(OSError, match="at most 10 are read"):
        seeds.read([(None, tmp_path / "a.csv")])


def test_ambiguous_logs_are_noted_and_names_are_escaped(tmp_path: Path, ran: Said) -> None:
    more = "a,0,1,5\na,1,2,5\n\x1b[31m,0,1,1\n\x1b[31m,1,1,2\n\x1b[31m,2,1,4\n"
    (tmp_path / "a.csv").write_text(THREE + more + "b,2,9")
    shown = ran("seeds", str(tmp_path / "a.csv"), "--difference", "0.5")
    assert "\x1b" not in shown
    assert r"\\x1b\[31m" in shown
    notes = shown.splitlines()[-3:]
    assert "the last line, which has no line break" in notes[0]
    assert notes[1].startswith("1 values repeat a step of their run")
    assert notes[2].startswith("runs end at steps 1 (a, seed 0) to 2")
    assert "seeds for 0.5" in shown

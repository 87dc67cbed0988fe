"""Logs of other trainers become runs and a report; what is no log is refused in one line, with nothing on disk."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from steadymoe.bench import cli
from steadymoe.bench.measurement import columns
from steadymoe.bench.report import archive
from steadymoe.bench.runs import record
from steadymoe.bench.score.recorded import Arm, Recorded
from steadymoe.bench.trainers import logs
from steadymoe.plugins import verl

STEPS = 40
NAMES = ("--algorithm", "gspo", "--model", "Qwen3-30B-A3B", "--task", "dapo_math", "--updates", "4")
Steady = Callable[..., tuple[int, str, str]]


@pytest.fixture
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Steady:
    """The command line in an empty folder: exit code, stdout, stderr."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def answer(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["steadymoe", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capsys.readouterr()
        return int(stopped.value.code or 0), said.out, said.err

    return answer


def of_verl(seed: int = 0, steps: int = STEPS, **changed: Any) -> list[dict[str, Any]]:
    """The rows of verl's file logger, with the sums of a loss of ours from three unequal micro-batches."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = [{"step": 0, "data": {"val-core/dapo_math/acc/mean@1": 0.1}}]
    for step in range(1, steps + 1):
        data = {
            "critic/score/mean": 0.2 + 0.5 * step / steps + 0.05 * random.random(),
            "actor/pg_loss": 0.01 * random.normal(),
            "actor/grad_norm": 0.3 + 0.1 * random.random(),
            "actor/entropy": 1.5 - step / steps,
            "actor/lr": 1e-6,
            "response_length/mean": 800.0 + step,
            "rollout_corr/k3_kl": 1e-3,
            "timing_s/gen": 40.0,
            "perf/throughput": 123.0,
        }
        rows.append({"step": step, "data": data | changed})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def plain(tmp_path: Path, name: str = "train.csv", seed: int = 0) -> Path:
    """A CSV file without routing, ratio or time."""
    random = np.random.default_rng(seed)
    rows = [
        [n, 0.3 + 0.4 * n / STEPS + 0.02 * random.random(), 0.5, "" if n % 10 else 0.4] for n in range(1, STEPS + 1)
    ]
    return write_csv(tmp_path / name, ["iteration", "score", "grad_norm", "heldout"], rows)


MAPPED = ("--map", "step=iteration", "--map", "reward=score", "--map", "eval_accuracy=heldout")


def run_of(results: Path) -> Path:
    (path,) = results.glob("runs/**/run.json")
    return path.parent


def test_verls_log_becomes_a_run_with_the_columns_that_it_has(tmp_path: Path, steady: Steady) -> None:
    log = write_jsonl(tmp_path / "verl.jsonl", of_verl())
    code, out, err = steady("import", log, *NAMES, "--seed", "3", "--results", tmp_path)
    assert (code, err) == (0, "")
    assert f"read {STEPS} steps of verl.jsonl: step, reward (critic/score/mean)" in out
    assert "left out: step 0" in out
    folder = run_of(tmp_path)
    assert f"wrote {folder}" in out
    assert folder.relative_to(tmp_path / "runs") == Path("imported/gspo/Qwen3-30B-A3B/dapo_math/trainer=verl/seed=3")
    facts = json.loads((folder / "run.json").read_text())
    assert (record.status(folder), facts["origin"], facts["seed"]) == ("finished", "verl verl.jsonl", 3)
    assert (facts["versions"], facts["machine"]["cpu"], facts["revision"]) == ({}, "unknown", None)
    assert facts["correction"] == facts["routing"] == facts["engine"] == "unknown"
    assert facts["imported"]["columns"]["entropy"] == "actor/entropy"
    steps, theirs = record.read_table(folder, "steps"), of_verl()[1:]
    assert steps["step"].tolist() == list(range(1, STEPS + 1))
    for ours, name in facts["imported"]["columns"].items():
        if ours != "step":
            assert steps[ours].tolist() == [row["data"][name] for row in theirs]
    absent = [name for name in columns.TABLES["steps"] if name not in facts["imported"]["columns"]]
    assert "expert_change_rate" in absent
    assert steps[absent].isna().all(axis=None)


def test_the_sums_of_our_losses_in_verls_log_become_columns(tmp_path: Path, steady: Steady) -> None:
    generator = torch.Generator().manual_seed(0)
    old_BT = -torch.rand(6, 4, generator=generator, dtype=torch.float64)
    batch = {"old_log_prob": old_BT, "log_prob": old_BT + torch.randn(6, 4, generator=generator, dtype=torch.float64)}
    batch |= {"advantages": torch.ones_like(old_BT), "response_mask": torch.ones_like(old_BT)}
    parts = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 1), slice(1, 6))]
    sums = [verl.policy_loss("steadymoe/grpo", **part)[1] for part in parts]
    logged = {f"actor/{name}": float(np.mean([each[name] for each in sums])) for name in sums[0]}
    log = write_jsonl(tmp_path / "verl.jsonl", of_verl(steps=3, **logged, **{"actor/pg_clipfrac": 0.9}))
    assert steady("import", log, *NAMES, "--results", tmp_path)[0] == 0
    steps = record.read_table(run_of(tmp_path), "steps")
    ratio_BT = (batch["log_prob"] - old_BT).exp()
    assert steps["token_ratio_variance"].to_numpy() == pytest.approx(float(ratio_BT.var(correction=0)))
    assert steps["clip_fraction"].iloc[0] == pytest.approx(float((ratio_BT > 1.2).double().mean()))  # not 0.9


def test_a_csv_without_routing_becomes_runs_and_a_report_page(tmp_path: Path, steady: Steady) -> None:
    for seed in (0, 1, 2):
        log, more = plain(tmp_path, f"plain{seed}.csv", seed), ("--seed", seed, "--results", tmp_path)
        code, out, err = steady("import", log, *NAMES, *MAPPED, "--trainer", "areal", *more)
        assert (code, err) == (0, "")
        log = write_jsonl(tmp_path / f"verl{seed}.jsonl", of_verl(seed))
        words = ("--algorithm", "grpo", *NAMES[2:], "--axis", "learning_rate=1e-6", "--learning-rate", "1e-6")
        assert steady("import", log, *words, *more)[0] == 0
    code, out, _ = steady("status", "--results", tmp_path)
    assert code == 0
    assert "imported: 6 finished" in out
    assert "made by another trainer, areal plain0.csv" in out
    assert "stale" not in out
    code, out, err = steady("report", "--experiment", "imported", "--format", "svg", "--results", tmp_path)
    assert (code, err) == (0, "")
    page = (tmp_path / "report.html").read_text()
    assert "gspo" in page
    summary = pd.read_csv(tmp_path / "tables" / "imported-summary.csv").set_index("arm")
    assert summary["expert change mean"].isna().all()
    assert summary["final reward mean"].notna().all()
    header, *arms = [line.split("|") for line in out.splitlines() if line.startswith("|") and "---" not in line]
    place = next(place for place, name in enumerate(header) if name.strip() == "expert change")
    assert [line[place].strip() for line in arms] == ["–", "–"]
    assert "nan" not in out
    for suffix in ("csv", "parquet"):
        assert steady("report", "--experiment", "imported", "--export", suffix, "--results", tmp_path)[0] == 0
    tidy = pd.read_parquet(tmp_path / "tables" / "imported-tidy.parquet")
    assert len(tidy[(tidy["metric"] == "reward") & (tidy["algorithm"] == "gspo")]) == 3 * STEPS
    assert not (tidy["metric"] == "expert_change_rate").any()


def test_claims_boards_and_scores_see_no_imported_run(tmp_path: Path, steady: Steady) -> None:
    log = write_jsonl(tmp_path / "verl.jsonl", of_verl())
    assert steady("import", log, *NAMES, "--experiment", "study", "--results", tmp_path)[0] == 0
    assert steady("report", "--keep", tmp_path / "kept", "--results", tmp_path)[0] == 0
    for results in (tmp_path, tmp_path / "kept"):
        assert archive.load(results, "study")["runs"].empty  # what claims, scores and boards are made from
        assert len(archive.load(results, "study", foreign=True)["runs"]) == 1
        assert not Recorded(results).has(Arm("gspo", "study", "gspo", {"trainer": "verl"}))
    code, _, err = steady("study", "--results", tmp_path)
    assert code == 2
    assert err.count("\n") == 1


def test_a_collapse_and_an_end_in_numbers_that_are_not_finite_are_seen(tmp_path: Path, steady: Steady) -> None:
    rows = of_verl(steps=200)
    for row in rows[101:]:
        row["data"]["critic/score/mean"] = 0.01
    steady("import", write_jsonl(tmp_path / "a.jsonl", rows), *NAMES, "--results", tmp_path / "fell")
    facts = json.loads((run_of(tmp_path / "fell") / "run.json").read_text())
    assert facts["status"] == "collapsed"
    assert facts["diverged"]["reason"] == "reward"
    rows = of_verl()
    rows[7]["data"]["actor/grad_norm"] = None  # verl writes nan and infinities as null, and skips such an update
    for row in rows[31:]:
        row["data"]["actor/pg_loss"] = None
    out = steady("import", write_jsonl(tmp_path / "b.jsonl", rows), *NAMES, "--results", tmp_path / "lost")[1]
    assert "grad_norm of step 7 is not finite, and absent" in out
    folder = run_of(tmp_path / "lost")
    facts = json.loads((folder / "run.json").read_text())
    assert facts["diverged"] == {"reason": "not finite", "step": 31, "update": None}
    assert facts["config"]["steps"] == STEPS
    assert record.read_table(folder, "steps")["step"].max() == 31
    (judged,) = archive.load(tmp_path / "lost", "imported", foreign=True)["runs"].to_dict("records")
    assert (judged["collapsed_step"], judged["collapsed_reason"]) == (31, "not finite")
    steps = archive.steps(archive.runs(tmp_path / "lost"))
    rewards = steps[steps["metric"] == "reward"].set_index("step")["value"]
    assert rewards.loc[32:].tolist() == [0.0] * (STEPS - 31)  # as in the suite's own runs


def test_rows_of_one_step_are_joined_and_a_log_may_count_from_0(tmp_path: Path) -> None:
    rows = [{"step": 0, "reward": 0.1}, {"step": 0, "eval_accuracy": 0.2}, {"step": 2, "reward": 0.3, "note": "x"}]
    log = logs.read(write_jsonl(tmp_path / "a.jsonl", rows), {})
    assert log.rows == [{"step": 1, "reward": 0.1, "eval_accuracy": 0.2}, {"step": 3, "reward": 0.3}]
    assert log.notes == ["the log counts its steps from 0, the run from 1"]
    assert not log.is_verl
    rows[0], rows[1] = {"step": 0, "eval_accuracy": 0.2}, {"step": 1, "reward": 0.1}
    assert logs.read(write_jsonl(tmp_path / "b.jsonl", rows), {}).rows[0] == {"step": 1, "reward": 0.1}


BAD = {
    "no steps.jsonl": '{"reward": 1}\n',
    "no rewards.jsonl": '{"step": 1, "score": 1}\n',
    "empty.jsonl": "",
    "empty.csv": "",
    "header.csv": "step,reward\n",
    "before.jsonl": '{"step": 0, "data": {"val-core/acc": 0.1}}\n{"step": 0, "data": {"critic/score/mean": null}}\n',
    "text.csv": "step,reward\n1,good\n",
    "list.jsonl": '{"step": 1, "reward": [1, 2]}\n',
    "true.jsonl": '{"step": 1, "reward": true}\n',
    "huge.jsonl": '{"step": 1, "reward": 1' + "0" * 400 + "}\n",
    "half.jsonl": '{"step": 1.5, "reward": 1}\n',
    "beyond.jsonl": '{"step": 99999999999999999999, "reward": 0.5}\n',
    "tokens.csv": "step,reward,response_tokens\n1,0.5,1e19\n",
    "overflows.csv": "step,reward\n1,1e308\n2,1e308\n",
    "below.jsonl": '{"step": -1, "reward": 1}\n',
    "falls.csv": "step,reward\n2,1\n1,1\n",
    "twice.csv": "step,reward\n1,1\n1,0\n",
    "names.csv": "step,reward,reward\n1,1,2\n",
    "ragged.csv": "step,reward\n1\n",
    "quote.csv": 'step,reward\n1,"1\n',
    "torn.jsonl": '{"step": 1, "reward": 1}\n{"step": 2, "rew',
    "lines.jsonl": "[1, 2]\n",
    "bytes.csv": b"step,reward\n1,\xff\n",
    "sums.jsonl": '{"step": 1, "data": {"critic/score/mean": 1, "actor/steadymoe/tokens": 2}}\n',
    "text.txt": "step,reward\n1,1\n",
    "good.csv": "step,reward,loss\n1,1,0\n",
}


@pytest.mark.parametrize(
    ("file", "more", "said"),
    [
        ("missing.csv", [], "there is no file"),
        ("no steps.jsonl", [], "has no column step; name it by --map step=…: it has reward"),
        ("no rewards.jsonl", [], "has no column reward; name it by --map reward=…: it has step, score"),
        ("empty.jsonl", [], "has no rows, so no steps"),
        ("empty.csv", [], "has no rows, so no steps"),
        ("header.csv", [], "has no rows, so no steps"),
        ("before.jsonl", [], "has no step with a reward"),
        ("text.csv", [], "text.csv, line 2: reward must be a number; got 'good'"),
        ("list.jsonl", [], "reward must be a number; got '[1, 2]'"),
        ("true.jsonl", [], "reward must be a number; got 'True'"),
        ("huge.jsonl", [], "reward must be a number"),
        ("half.jsonl", [], "step must be a whole number between 0 and 1000000000, got 1.5"),
        ("below.jsonl", [], "step must be a whole number between 0 and 1000000000, got -1"),
        ("beyond.jsonl", [], "step must be a whole number between 0 and 1000000000, got 99999999999999999999"),
        ("tokens.csv", [], "response_tokens must be a whole number between 0 and 1000000000, got '1e19'"),
        ("overflows.csv", [], "reward must be between ±1e+100"),
        ("falls.csv", [], "line 3: step 1 comes after step 2; steps must rise"),
        ("twice.csv", [], "line 3: a second reward of step 1"),
        ("names.csv", [], "two columns have the name 'reward'"),
        ("ragged.csv", [], "line 2: has 1 values for 2 columns"),
        ("quote.csv", [], "no CSV"),
        ("torn.jsonl", [], "line 2: no JSON"),
        ("lines.jsonl", [], "line 1: must be an object with named columns"),
        ("bytes.csv", [], "is no text in UTF-8"),
        ("sums.jsonl", [], "the sums of a loss of steadymoe lack"),
        ("text.txt", [], "must be a file .jsonl or .csv"),
        ("good.csv", ["--map", "rewards=loss"], "a step has no column 'rewards'; did you mean reward"),
        ("good.csv", ["--map", "token_ratio_histogram=loss"], "a step has no column 'token_ratio_histogram'"),
        ("good.csv", ["--map", "entropy=H"], "good.csv has no column 'H'; it has step, reward, loss"),
        ("good.csv", ["--map", "entropy"], "--map takes name=value"),
        ("good.csv", ["--map", "entropy=loss", "--map", "entropy=reward"], "each name once"),
        ("good.csv", ["--axis", "trainer=x"], "none of trainer"),
        ("good.csv", ["--axis", "../x=1"], "got '../x'"),
        ("good.csv", ["--updates", "0"], "--updates must be between 1 and"),
        ("good.csv", ["--updates", "9" * 23], "--updates must be between 1 and"),
        ("good.csv", ["--prompts", "9" * 23], "--prompts must be between 1 and"),
        ("good.csv", ["--seed", "-1"], "--seed must be at least 0"),
        ("good.csv", ["--learning-rate", "nan"], "--learning-rate must be at least 0 and finite"),
        ("good.csv", ["--model", "../up"], "model must be letters"),
        ("good.csv", ["--trainer", "a b"], "--trainer must be letters"),
        ("good.csv", ["--engine", "v/llm"], "--engine must be letters"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line_and_nothing_is_touched(
    file: str, more: list[str], said: str, tmp_path: Path, steady: Steady
) -> None:
    log = tmp_path / file
    content = BAD.get(file)
    if content is not None:
        log.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.rglob("*"))
    code, out, err = steady("import", log, *NAMES, *more, "--results", tmp_path / "results")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("steadymoe: ")
    assert said in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_taken_folder_is_refused_and_left_as_it_is(tmp_path: Path, steady: Steady) -> None:
    log = write_jsonl(tmp_path / "verl.jsonl", of_verl())
    assert steady("import", log, *NAMES, "--results", tmp_path)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    code, out, err = steady("import", log, *NAMES, "--results", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds a run that is finished; choose another experiment or axes" in err
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}


def test_names_in_a_log_cannot_write_to_the_terminal_or_the_page(tmp_path: Path, steady: Steady) -> None:
    log = write_csv(tmp_path / "t.csv", ["step", "reward", "\x1b[31m<script>"], [[1, 0.5, 1], [2, 0.5, 2]])
    code, out, _ = steady("import", log, *NAMES, "--map", "loss=\x1b[31m<script>", "--results", tmp_path)
    assert code == 0
    assert "\x1b" not in out
    steady("report", "--format", "svg", "--results", tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text().partition("<body")[2].partition("<script>")[0]

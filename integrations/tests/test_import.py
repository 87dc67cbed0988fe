"""Logs of other trainers become runs and a report; a bad log is refused in one line, with nothing on disk."""

import csv
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from steadymoe.bench import cli
from steadymoe.bench.report import archive
from steadymoe.bench.runs import record
from steadymoe.bench.training import columns
from steadymoe.integrations import command as integrations
from steadymoe.integrations.logs import command
from steadymoe.integrations.logs import read as logs
from steadymoe.integrations.verl import losses as verl

STEPS = 40
NAMES = ("--algorithm", "gspo", "--model", "Qwen3-30B-A3B", "--task", "dapo_math", "--updates", "4")
Steady = Callable[..., tuple[int, str, str]]


@pytest.fixture
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Steady:
    """Run the command line in an empty folder and return exit code, stdout and stderr."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*words: str | Path) -> tuple[int, str, str]:
        name, program = ("steadymoe-integrations", integrations) if words[0] == "import" else ("steadymoe", cli)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            program.main()
        output = capsys.readouterr()
        return int(stopped.value.code or 0), output.out, output.err

    return run


def verl_rows(seed: int = 0, steps: int = STEPS, **changed: Any) -> list[dict[str, Any]]:
    """Rows of verl's file logger; ``changed`` replaces numbers of every step."""
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


def facts_of(results: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the one run below ``results``, and its run.json."""
    (path,) = results.glob("runs/**/run.json")
    return path.parent, json.loads(path.read_text())


def test_verl_log_becomes_a_run_with_its_columns(tmp_path: Path, steady: Steady) -> None:
    log = write_jsonl(tmp_path / "verl.jsonl", verl_rows())
    code, out, err = steady("import", log, *NAMES, "--seed", "3", "--results", tmp_path)
    assert (code, err) == (0, "")
    folder, facts = facts_of(tmp_path)
    assert f"wrote {folder}" in out
    assert folder.relative_to(tmp_path / "runs") == Path("imported/gspo/Qwen3-30B-A3B/dapo_math/trainer=verl/seed=3")
    assert (record.status(folder), facts["origin"], facts["seed"]) == ("finished", "verl verl.jsonl", 3)
    assert (facts["versions"], facts["machine"]["cpu"], facts["revision"]) == ({}, "unknown", None)
    assert facts["correction"] == facts["routing"] == facts["engine"] == "unknown"
    steps, data = record.read_table(folder, "steps"), [row["data"] for row in verl_rows()[1:]]
    assert steps["step"].tolist() == list(range(1, STEPS + 1))
    names = {name: theirs for name, theirs in facts["imported"]["columns"].items() if name != "step"}
    expected = {
        "reward": "critic/score/mean",
        "loss": "actor/pg_loss",
        "grad_norm": "actor/grad_norm",
        "entropy": "actor/entropy",
        "learning_rate": "actor/lr",
        "response_length": "response_length/mean",
        "rollout_kl_k3": "rollout_corr/k3_kl",
        "rollout_seconds": "timing_s/gen",
    }
    assert names == expected
    for ours, theirs in names.items():
        assert steps[ours].tolist() == [row[theirs] for row in data]
    assert steps.drop(columns=["step", *names]).isna().all(axis=None)
    assert "expert_change_rate" in columns.TABLES["steps"].keys() - names.keys()


def test_loss_sums_in_verl_log_become_columns(tmp_path: Path, steady: Steady) -> None:
    generator = torch.Generator().manual_seed(0)
    old_BT = -torch.rand(6, 4, generator=generator, dtype=torch.float64)
    batch = {"old_log_prob": old_BT, "log_prob": old_BT + torch.randn(6, 4, generator=generator, dtype=torch.float64)}
    batch |= {"advantages": torch.ones_like(old_BT), "response_mask": torch.ones_like(old_BT)}
    parts = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 1), slice(1, 6))]
    sums = [verl.policy_loss("steadymoe/grpo", **part)[1] for part in parts]
    logged = {f"actor/{name}": float(np.mean([each[name] for each in sums])) for name in sums[0]}
    log = write_jsonl(tmp_path / "verl.jsonl", verl_rows(steps=3, **logged, **{"actor/pg_clipfrac": 0.9}))
    assert steady("import", log, *NAMES, "--results", tmp_path)[0] == 0
    steps = record.read_table(facts_of(tmp_path)[0], "steps")
    ratio_BT = (batch["log_prob"] - old_BT).exp()
    assert steps["token_ratio_variance"].to_numpy() == pytest.approx(float(ratio_BT.var(correction=0)))
    assert steps["clip_fraction"].iloc[0] == pytest.approx(float((ratio_BT > 1.2).double().mean()))  # not 0.9


def test_imported_runs_are_reported_but_not_scored(tmp_path: Path, steady: Steady) -> None:
    mapped = ("--map", "step=iteration", "--map", "reward=score", "--map", "eval_accuracy=heldout")
    for seed in (0, 1, 2):
        more = ("--seed", seed, "--results", tmp_path)
        random = np.random.default_rng(seed)
        rows = [[n, 0.3 + 0.01 * n + 0.02 * random.random(), "" if n % 10 else 0.4] for n in range(1, STEPS + 1)]
        log = write_csv(tmp_path / f"plain{seed}.csv", ["iteration", "score", "heldout"], rows)
        code, _, err = steady("import", log, *NAMES, *mapped, "--trainer", "areal", *more)
        assert (code, err) == (0, "")
        log = write_jsonl(tmp_path / f"verl{seed}.jsonl", verl_rows(seed))
        words = ("--algorithm", "grpo", *NAMES[2:], "--axis", "learning_rate=1e-6", "--learning-rate", "1e-6")
        assert steady("import", log, *words, *more)[0] == 0
    out = steady("status", "--results", tmp_path)[1]
    assert "imported: 6 finished" in out
    assert "stale" not in out
    code, out, err = steady("report", "--experiment", "imported", "--format", "svg", "--results", tmp_path)
    assert (code, err) == (0, "")
    assert "nan" not in out
    summary = pd.read_csv(tmp_path / "tables" / "imported-summary.csv").set_index("arm")
    assert "expert change mean" not in summary
    assert summary["final reward mean"].notna().all()
    assert steady("report", "--experiment", "imported", "--export", "parquet", "--results", tmp_path)[0] == 0
    tidy = pd.read_parquet(tmp_path / "tables" / "imported-tidy.parquet")
    assert len(tidy[(tidy["metric"] == "reward") & (tidy["algorithm"] == "gspo")]) == 3 * STEPS
    assert not (tidy["metric"] == "expert_change_rate").any()
    assert steady("report", "--keep", tmp_path / "kept", "--results", tmp_path)[0] == 0
    for results in (tmp_path, tmp_path / "kept"):
        assert archive.load(results, "imported")["runs"].empty  # what claims, scores and boards are made from
        assert len(archive.load(results, "imported", foreign=True)["runs"]) == 6


def test_a_collapse_and_a_divergence_are_found(tmp_path: Path, steady: Steady) -> None:
    rows = verl_rows(steps=200)
    for row in rows[101:]:
        row["data"]["critic/score/mean"] = 0.01
    out = steady("import", write_jsonl(tmp_path / "a.jsonl", rows), *NAMES, "--results", tmp_path / "collapsed")[1]
    facts = facts_of(tmp_path / "collapsed")[1]
    assert f"the run collapsed at step {facts['diverged']['step']}: reward\n" in out
    assert (facts["status"], facts["diverged"]["reason"]) == ("collapsed", "reward")
    assert 101 <= facts["diverged"]["step"] <= 130
    rows = verl_rows()
    rows[7]["data"]["actor/grad_norm"] = None  # verl writes nan and infinities as null, and skips such an update
    for row in rows[31:]:
        row["data"]["actor/pg_loss"] = None
    out = steady("import", write_jsonl(tmp_path / "b.jsonl", rows), *NAMES, "--results", tmp_path / "diverged")[1]
    assert "grad_norm of step 7 is not finite" in out
    assert "the run diverged at step 31: not finite\n" in out
    folder, facts = facts_of(tmp_path / "diverged")
    assert facts["diverged"] == {"reason": "not finite", "step": 31, "update": None}
    assert facts["config"]["steps"] == STEPS
    steps = record.read_table(folder, "steps")
    assert (steps["step"].max(), steps["grad_norm"].isna().sum()) == (31, 1)
    (judged,) = archive.load(tmp_path / "diverged", "imported", foreign=True)["runs"].to_dict("records")
    assert (judged["collapsed_step"], judged["collapsed_reason"]) == (31, "not finite")
    steps = archive.steps(archive.runs(tmp_path / "diverged", "imported"))
    rewards = steps[steps["metric"] == "reward"].set_index("step")["value"]
    assert rewards.loc[32:].tolist() == [0.0] * (STEPS - 31)  # as in the suite's own runs


def test_rows_of_one_step_are_merged_and_steps_may_start_at_0(tmp_path: Path) -> None:
    rows = [{"step": 0, "reward": 0.1}, {"step": 0, "eval_accuracy": 0.2}, {"step": 2, "reward": 0.3, "note": "x"}]
    log = logs.read(write_jsonl(tmp_path / "a.jsonl", rows), {})
    missing = {"eval_accuracy": None}
    assert log.steps.to_pylist() == [
        {"step": 1, "reward": 0.1, "eval_accuracy": 0.2},
        {"step": 3, "reward": 0.3} | missing,
    ]
    assert (len(log.notes), log.is_verl) == (1, False)
    rows[0], rows[1] = {"step": 0, "eval_accuracy": 0.2}, {"step": 1, "reward": 0.1}
    first = logs.read(write_jsonl(tmp_path / "b.jsonl", rows), {}).steps.to_pylist()[0]
    assert first == {"step": 1, "reward": 0.1} | missing


def test_resumed_log_keeps_the_later_rows(tmp_path: Path, steady: Steady) -> None:
    """Steps 1 2 3 4 3 4 5, the validation of a step in a row of its own."""
    rows = [(step, first) for first in (0, 10) for step in ((1, 2, 3, 4) if first == 0 else (3, 4, 5))]
    lines = [
        {"step": step} | numbers
        for step, first in rows
        for numbers in ({"reward": (first + step) / 20}, {"eval_accuracy": (first + step) / 40})
    ]
    log = write_jsonl(tmp_path / "resumed.jsonl", lines)
    code, out, _ = steady("import", log, *NAMES, "--results", tmp_path)
    assert code == 0
    assert "later rows replace 2 steps" in out
    steps = record.read_table(facts_of(tmp_path)[0], "steps")
    assert steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert steps["reward"].tolist() == [0.05, 0.1, 0.65, 0.7, 0.75]
    assert steps["eval_accuracy"].tolist() == [0.025, 0.05, 0.325, 0.35, 0.375]
    again = write_csv(tmp_path / "again.csv", ["step", "reward"], [[1, 0.1], [2, 0.2], [2, 0.3], [3, 0.4]])
    assert [row["reward"] for row in logs.read(again, {}).steps.to_pylist()] == [0.1, 0.3, 0.4]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.jsonl", '{"step": 1, "reward": 1}\n{"step": 2, "rew'),
        ("a.jsonl", '{"step": 1, "reward": 1}\n{"step": 2, "reward": 0.5'),
        ("a.jsonl", '{"step": 1, "reward": 1}\n\0\0\0'),
        ("a.csv", "step,reward\n1,1\n2"),
        ("a.csv", "step,reward\n1,1\n2,0."),
        ("a.csv", 'step,reward\n1,1\n2,"0'),
    ],
)
def test_a_torn_last_line_is_left_out_and_noted(file: str, content: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    log = logs.read(tmp_path / file, {})
    assert log.steps.to_pylist() == [{"step": 1, "reward": 1}]
    assert len(log.notes) == 1
    assert log.notes[0].startswith("left out: the last line")


def test_complete_last_jsonl_line_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"step": 1, "reward": 1}\n{"step": 2, "reward": 0.5}')
    log = logs.read(tmp_path / "a.jsonl", {})
    assert ([row["reward"] for row in log.steps.to_pylist()], log.notes) == ([1, 0.5], [])


GOOD = "step,reward,loss\n1,1,0\n"


@pytest.mark.parametrize(
    ("file", "content", "more", "message"),
    [
        ("missing.csv", None, [], "missing.csv"),
        ("a.txt", GOOD, [], ".jsonl or .csv"),
        ("a.jsonl", '{"reward": 1}\n', [], "has no column step; name it with --map step=…"),
        ("a.jsonl", '{"step": 1, "score": 1}\n', [], "has no column reward; name it with --map reward=…"),
        ("a.jsonl", "", [], "no rows"),
        ("a.csv", "step,reward\n", [], "no rows"),
        ("a.jsonl", '{"step": 0, "data": {"critic/score/mean": null}}\n', [], "no step with a reward"),
        ("a.csv", "step,reward\n1,good\n", [], "line 2: reward must be a number; got 'good'"),
        ("a.jsonl", '{"step": 1, "reward": [1, 2]}\n', [], "reward must be a number; got [1, 2]"),
        ("a.jsonl", '{"step": 1, "reward": true}\n', [], "reward must be a number; got True"),
        ("a.jsonl", '{"step": 1, "reward": 1' + "0" * 400 + "}\n", [], "reward must be a number"),
        ("a.jsonl", '{"step": 1.5, "reward": 1}\n', [], "step must be a whole number between 0 and 1000000000"),
        ("a.jsonl", '{"step": -1, "reward": 1}\n', [], "step must be a whole number between 0 and 1000000000"),
        ("a.jsonl", '{"step": NaN, "reward": 1}\n', [], "step must be a whole number between 0 and 1000000000"),
        ("a.jsonl", '{"step": 99999999999999999999, "reward": 0.5}\n', [], "got 99999999999999999999"),
        ("a.csv", "step,reward,response_tokens\n1,0.5,1e19\n", [], "response_tokens must be a whole number"),
        ("a.csv", "step,reward\n1,1e308\n2,1e308\n", [], "reward must be between ±1e+100"),
        ("a.csv", "step,reward\n2,1\n1,1\n", [], "line 3: step 1 comes after step 2"),
        ("a.csv", "step,reward\n1,1\n1,0\n", [], "line 3: step 1 comes after step 1"),
        ("a.csv", "step,reward\n1,1\n1,1\n1,1\n2,0\n2,0\n2,0\n", [], "line 3: step 1 comes after step 1"),
        ("a.csv", "step,reward,reward\n1,1,2\n", [], "'reward'"),
        ("a.csv", "step,reward\n1\n", [], "line 2: must have 2 values"),
        ("a.csv", "step,reward\n1,2,3\n", [], "line 2: must have 2 values"),
        ("a.csv", 'step,reward\n1,"1\n', [], "not CSV"),
        ("a.jsonl", '{"step": 1, "reward": 1}\n{"step": 2, "rew\n', [], "line 2: not JSON"),
        ("a.jsonl", "[1, 2]\n", [], "line 1: must be an object"),
        ("a.csv", b"step,reward\n1,\xff\n", [], "UTF-8"),
        ("a.jsonl", '{"step": 1, "data": {"critic/score/mean": 1, "actor/steadymoe/tokens": 2}}\n', [], "lack ratio_1"),
        ("a.csv", GOOD, ["--map", "rewards=loss"], "no column 'rewards'; did you mean reward"),
        ("a.csv", GOOD, ["--map", "token_ratio_histogram=loss"], "no column 'token_ratio_histogram'"),
        ("a.csv", GOOD, ["--map", "entropy=H"], "no column 'H'; it has step, reward, loss"),
        ("a.csv", GOOD, ["--map", "entropy"], "--map takes name=value"),
        ("a.csv", GOOD, ["--map", "entropy=loss", "--map", "entropy=reward"], "each name once"),
        ("a.csv", GOOD, ["--axis", "trainer=x"], "none of trainer"),
        ("a.csv", GOOD, ["--axis", "../x=1"], "got '../x'"),
        ("a.csv", GOOD, ["--updates", "0"], "--updates: must be between 1 and"),
        ("a.csv", GOOD, ["--prompts", "9" * 23], "--prompts: must be between 1 and"),
        ("a.csv", GOOD, ["--seed", "-1"], "--seed: must be between 0 and"),
        ("a.csv", GOOD, ["--learning-rate", "nan"], "--learning-rate: must be between 0 and"),
        ("a.csv", GOOD, ["--model", "../up"], "model must be letters"),
        ("a.csv", GOOD, ["--trainer", "a b"], "trainer must be letters"),
        ("a.csv", GOOD, ["--engine", "v/llm"], "engine must be letters"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(
    file: str, content: str | bytes | None, more: list[str], message: str, tmp_path: Path, steady: Steady
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.rglob("*"))
    code, out, err = steady("import", tmp_path / file, *NAMES, *more, "--results", tmp_path / "results")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("steadymoe: ")
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_is_not_overwritten(tmp_path: Path, steady: Steady) -> None:
    log = write_jsonl(tmp_path / "verl.jsonl", verl_rows())
    assert steady("import", log, *NAMES, "--results", tmp_path)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    code, out, err = steady("import", log, *NAMES, "--results", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds a run that is finished" in err
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}


def test_names_in_a_log_are_escaped_in_terminal_and_page(tmp_path: Path, steady: Steady) -> None:
    log = write_csv(tmp_path / "t.csv", ["step", "reward", "\x1b[31m<script>"], [[1, 0.5, 1], [2, 0.5, 2]])
    code, out, _ = steady("import", log, *NAMES, "--map", "loss=\x1b[31m<script>", "--results", tmp_path)
    assert code == 0
    assert "\x1b" not in out
    steady("report", "--format", "svg", "--results", tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text().partition("<body")[2].partition("<script>")[0]


# --- size ------------------------------------------------------------------------------------------------------------


def rows_of(path: Path, n: int) -> Path:
    path.write_text("step,reward,entropy\n" + "".join(f"{step},0.5,{step / n}\n" for step in range(1, n + 1)))
    return path


def test_imported_log_is_held_in_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_ROWS_OF_A_PIECE", 500)
    peaks = []
    for n in (4_000, 40_000):
        log = rows_of(tmp_path / f"{n}.csv", n)
        tracemalloc.start()
        names = ["--algorithm", "a", "--model", "m", "--task", "t", "--updates", "1", "--experiment", f"e{n}"]
        assert command.main([str(log), *names, "--results", str(tmp_path)]) == 0
        peaks.append(tracemalloc.get_traced_memory()[1] / n)
        tracemalloc.stop()
    assert peaks[1] < 150  # bytes of a step: the columns of the rule of collapse; a row is a dict of 500


def test_split_log_is_merged_and_replaced_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [*range(20), *range(12, 25), *range(3, 30)]
    log = tmp_path / "log.csv"
    log.write_text(
        "step,reward,loss\n" + "".join(f"{step},{place},\n{step},,{place}\n" for place, step in enumerate(steps))
    )
    whole = logs.read(log, {})
    monkeypatch.setattr(logs, "_ROWS_OF_A_PIECE", 4)
    pieces = logs.read(log, {})
    assert pieces.steps.to_pylist() == whole.steps.to_pylist()
    assert pieces.notes == whole.notes
    assert [row["reward"] for row in whole.steps.to_pylist()] == [0, 1, 2, *range(33, 60)]

"""Names and texts that come from data are shown as they are: no mathematics, no markup, no escape sequence, no path."""

import base64
import functools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from fixtures import RECORDED, Said, edit, make_socket
from rich.console import Console
from small_runs import SMALL

from steadymoe.bench.report import folders, latex, report_page, write
from steadymoe.bench.report.results import Results, bind
from steadymoe.bench.runs import compose, overrides, progress, provenance, run_folder, status
from steadymoe.bench.runs.run_folder import Damaged
from steadymoe.bench.statistics import collapse
from steadymoe.bench.support import text
from steadymoe.bench.training import samples

NAMES = {
    "grpo": r"$x$ \\frac{1}{2} _^{} <script>alert(1)</script>",
    "gspo": "a|b\nc %d & {} $\\undefined$ \x1b[31mred\x1b[0m \u202e",
    "reinforce": "`code` *stars* [/bold] \ud800 \x07 $",
}


@pytest.fixture
def hostile(recorded: Path) -> Path:
    """Recorded runs whose algorithms, values, commands and errors are hostile."""
    for path in recorded.glob("**/run.json"):
        facts = json.loads(path.read_text())
        name = NAMES[facts["algorithm"]]
        facts |= {"algorithm": name, "axes": facts["axes"] | {f"key.{name}": name}, "command": f"steadymoe run {name}"}
        path.write_text(json.dumps(facts))
    return recorded


def test_report_shows_hostile_names_literally(hostile: Path, ran: Said) -> None:
    said = ran("report", "--results", str(hostile), "--format", "svg")
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    page = (hostile / "report.html").read_text()
    assert page.count("<script>") == 1
    assert page.count("&lt;script&gt;") > 3
    images = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    drawn = ["".join(ElementTree.fromstring(base64.b64decode(image)).itertext()) for image in images]
    assert all(any(text.visible(NAMES[name]) in each for each in drawn) for name in ("grpo", "gspo"))
    numbers = pd.read_csv(hostile / "tables" / "small-fig02-clip_fraction.csv")
    assert any(text.visible(NAMES["gspo"]) in name for name in numbers["series"])  # with no backslash of ours


def test_status_escapes_unprintable_characters(hostile: Path) -> None:
    for path in hostile.glob("**/run.json"):
        edit(path, status="failed", error=f"Traceback\nError: {NAMES['gspo'][8:]}")
    told = status.lines(hostile)
    assert all(letter.isprintable() for line in told for letter in line)
    assert any("\\x1b[31mred\\x1b[0m \\u202e" in line for line in told)


@pytest.mark.parametrize("name", [*NAMES.values(), "[x", "*x"])
def test_cell_stays_one_cell_in_markdown_and_latex(name: str) -> None:
    name = name.replace("\ud800", "")  # no table of pandas holds half a character
    table = pd.DataFrame({f"head {name}": [name, "plain"], "n": [1.0, 2.0]})
    shown = write.to_markdown(table).splitlines()
    assert len(shown) == 4
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in shown} == {3}
    assert "<script>" not in shown[2].replace("\\<", "")
    marked = write.to_markdown(pd.DataFrame({"paper": ["![x](y) _x_ a_b &lt; ~~x~~"]})).splitlines()[-1]
    assert r"\!\[x\](y) \_x\_ a_b \&lt; \~\~x\~\~" in marked
    rows = latex.table(table, table.map(write.to_text)).splitlines()
    (first,) = (line for line in rows if line.endswith(r"& 1 \\"))
    plain = re.sub(r"\\text[a-z]+\{\}", "", first)
    assert not re.search(r"(?<!\\)[$%#_{}^]", plain.removeprefix(f"{{{name[0]}}}"))
    assert plain[0] not in "[*", "an argument of the line break before it"
    assert all(letter.isprintable() for letter in first)


def test_dollars_in_names_are_shown_literally() -> None:
    table = pd.DataFrame({"arm": ["$a$", r"\$b", "c", None], "n": [1, 2, 3, 4]})
    drawn = text.without_mathematics(table)
    assert drawn["arm"].tolist()[:3] == [r"\$a\$", r"\\$b", "c"]
    pd.testing.assert_frame_equal(text.as_recorded(drawn), table, check_dtype=False)
    assert text.without_mathematics(table[["n"]]) is not None
    plain = table.iloc[2:3]
    assert text.without_mathematics(plain) is plain
    category = table.iloc[:3].astype({"arm": "category"})
    assert text.without_mathematics(category)["arm"].tolist() == drawn["arm"].tolist()[:3]


def test_markup_in_a_path_or_label_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said) -> None:
    words = ["run", *SMALL, "updates=2", f"results_dir='{tmp_path}/[/bold]'"]
    assert "/[/bold]'" in ran(*words)  # the next command, which a shell can read
    (made,) = compose.plan(words[1:])
    monkeypatch.setattr(progress, "labels", lambda runs: ["[/bold] \x1b[31m"])
    console = Console(force_terminal=True, width=200, record=True)
    console.print(progress._table([made], 1.0))
    assert "[/bold] \\x1b[31m" in console.export_text()


@pytest.mark.parametrize("verb", [[], ["--export", "csv"], ["--keep", "kept"], ["--figure", "fig02"]])
def test_experiment_must_be_an_existing_one(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    shutil.copytree(RECORDED / "runs" / "small", tmp_path / "x" / "runs" / "small")
    (tmp_path / "a" / "b").mkdir(parents=True)
    shutil.copytree(RECORDED / "runs", tmp_path / "a" / "b" / "runs")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.glob("**/*"))
    for name in ("../../x", "..", ".", "", "/etc", "small/..", "x\n"):
        refused("report", *verb, "--results", "a/b", "--experiment", name)
        assert sorted(tmp_path.glob("**/*")) == before


def test_run_with_a_folder_outside_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "is_name", lambda _: True)  # whatever else may fail
    for words in (["algorithm=../algorithm/grpo"], ["model=../model/flat"]):
        with pytest.raises(compose.ConfigError, match="is not a folder below"):
            compose.plan(words)


PROGRAM = [sys.executable, "-m", "steadymoe.bench.cli"]


def test_closed_pipe_ends_a_command_silently(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as | head has by the second line
    done = subprocess.run([*PROGRAM, "report", "--list"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_command_works_with_closed_streams(recorded: Path) -> None:
    words = [*PROGRAM, "report", "--results", str(recorded), "--export", "csv"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", *words], check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(list(recorded.rglob("*.csv"))) == 1


@pytest.mark.parametrize(
    ("locale", "code", "said"),
    [
        ({"LC_ALL": "C"}, 0, b""),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 2, b"PYTHONUTF8=1"),
        ({"PYTHONIOENCODING": "ascii"}, 0, b""),
    ],
)
def test_non_utf_8_locale_is_refused_but_not_a_terminal(locale: dict[str, str], code: int, said: bytes) -> None:
    words = [*PROGRAM, "run", "--help"]  # with an ellipsis
    done = subprocess.run(words, env=os.environ | locale, capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (code, int(code > 0))
    assert said in done.stderr


def test_ctrl_c_ends_processes_at_once_without_tracebacks(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal\nimport time\nfrom pathlib import Path\n"
        "from steadymoe.bench.support.processes import in_processes\n\n"
        "def wait(number):\n    Path(f'begun{number}').touch()\n    time.sleep(60)\n\n"
        # A shell starts its background jobs with SIGINT ignored, and these tests may be one.
        "if __name__ == '__main__':\n    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    try:\n        in_processes(wait, range(4))\n"
        "    except KeyboardInterrupt:\n        raise SystemExit(130)\n"
    )
    child = subprocess.Popen([sys.executable, script], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("begun*")) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    assert child.communicate(timeout=30)[1] == b""
    assert child.returncode == 130


# Folders that were made elsewhere


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of two runs of GRPO and two of GSPO."""
    place = tmp_path_factory.mktemp("small")
    for algorithm in ("grpo", "gspo"):
        for path in sorted((RECORDED / "runs" / "small" / algorithm).rglob("run.json"))[:2]:
            shutil.copytree(path.parent, place / path.parent.relative_to(RECORDED))
    return place


@pytest.fixture
def results(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small, tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the versions of the libraries once."""
    monkeypatch.setattr(provenance, "versions", functools.cache(provenance.versions))


def one_run(results: Path) -> Path:
    return sorted(path.parent for path in (results / "runs" / "small" / "gspo").rglob("run.json"))[0]


ODD: list[Any] = [None, True, -1, 0, 1e10, 1e30, 10**30, math.nan, math.inf, "x", "x" * 200_000, [], [1], {}, {"a": 1}]


def places(facts: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path to every value in a nested object."""
    for key, value in facts.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from places(value, (*before, key))


def with_value(facts: Any, place: tuple[str, ...], value: Any) -> Any:
    """Return a copy with another value at a place; ``ABSENT`` removes it."""
    head, *rest = place
    if rest:
        return facts | {head: with_value(facts[head], tuple(rest), value)}
    return {key: each for key, each in facts.items() if key != head} if value is ABSENT else facts | {head: value}


ABSENT = object()


@pytest.mark.usefixtures("no_figures")
def test_odd_values_in_run_json_do_not_crash_status_or_report(results: Path) -> None:
    path = one_run(results) / "run.json"
    facts = json.loads(path.read_text())
    deep = functools.reduce(lambda inner, _: {"a": inner}, range(600), {})
    cases = [(place, value) for place in places(facts) for value in (*ODD, ABSENT, deep)]
    random.Random(0).shuffle(cases)
    taken = 0
    for place, value in cases[:600]:
        path.write_text(json.dumps(with_value(facts, place, value)))
        state = run_folder.read_state(path.parent)
        assert (state.damage or "").count("\n") == 0
        if state.status != "damaged" and (taken := taken + 1) <= 20 and place != ("status",):
            assert status.lines(results)[0].startswith("small: ")
            runs = folders.read_runs(results, "small")
            listed = report_page._listed(collapse.judged(runs, Results.of_folders(runs[:0]).steps))
            assert len(listed) == 4, place
    path.write_text(json.dumps(facts | {"config": facts["config"] | {"collapse": {"reward_fraction": 1e30}}}))
    report_page.make(results, formats=["svg"])
    summary = pd.read_csv(results / "tables" / "small-summary.csv")
    assert dict(zip(summary["arm"], summary["n"], strict=True)) == {"grpo": 2, "gspo": 1}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("config", "updates"), 10**10),
        (("config", "collapse"), [1]),
        (("config", "collapse", "patience_updates"), 1e30),
        (("seed",), True),
        (("diverged",), {"reason": "not finite", "step": -(10**9)}),
        (("axes",), {"x" * 5000: 1}),
        (("axes",), functools.reduce(lambda inner, _: {"a": inner}, range(600), {})),
        (("algorithm",), "x" * 5000),
        (("wall_seconds",), math.nan),
    ],
)
def test_odd_run_json_is_reported_as_damaged(place: tuple[str, ...], value: Any, results: Path) -> None:
    path = one_run(results) / "run.json"
    path.write_text(json.dumps(with_value(json.loads(path.read_text()), place, value)))
    (line,) = report_page.left_out(results)
    assert str(path.parent) in line
    assert "1 damaged" in status.lines(results)[0]


def with_checksums(folder: Path) -> None:
    """Let ``run.json`` say that the tables are whole."""
    edit(folder / "run.json", tables={path.stem: run_folder.checksum(path) for path in folder.glob("*.parquet")})


def changed(table: pd.DataFrame, name: str, what: str) -> pd.DataFrame:
    """Return the table with an odd column."""
    if what == "absent":
        return table.drop(columns=name)
    values = {"text": "x", "infinite": math.inf, "missing": None, "huge": 1e300, "lists": [1, 2], "equal": 1}
    return table.assign(**{name: [values[what]] * len(table)})


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("name", ["steps", "evaluations", "updates"])
def test_odd_columns_do_not_crash_a_report(name: str, results: Path) -> None:
    folder = one_run(results)
    table = pd.read_parquet(folder / f"{name}.parquet")
    kinds = ["absent", "text", "infinite", "missing", "huge", "lists", "equal"]
    cases = [(column, what) for column in table for what in kinds]
    random.Random(0).shuffle(cases)
    keys = {"step", "update", "reward", "prompt", "score", "token_ratio_histogram", "loss", "entropy", "eval_accuracy"}
    cases = [case for case in cases if case[0] in keys][:9] + [case for case in cases if case[0] not in keys][:2]
    for number, (column, what) in enumerate(cases):
        changed(table, column, what).to_parquet(folder / f"{name}.parquet", index=False)
        with_checksums(folder)
        assert status.lines(results)
        if number == 0:
            report_page.make(results, formats=["svg"])
        loaded = Results.load(results, "small")
        assert loaded.runs["arm"].tolist().count("grpo") == 2
        left_out = report_page.left_out(results)
        assert len(loaded.runs) + len(left_out) == 4
        assert all(str(folder) in line for line in left_out)


@pytest.mark.parametrize("name", ["runs", "steps", "histograms", "evaluations"])
def test_odd_archive_columns_do_not_raise_a_traceback(name: str, small: Path, tmp_path: Path) -> None:
    report_page.keep(small, "small", tmp_path)
    path = tmp_path / "data" / "small" / f"{name}.parquet"
    table = pd.read_parquet(path)
    cases = [(column, what) for column in table for what in ("absent", "text", "infinite", "missing", "lists", "equal")]
    random.Random(0).shuffle(cases)
    said: list[str] = []
    for column, what in cases[:20]:
        changed(table, column, what).to_parquet(path, index=False)
        bind(path.parent)
        try:
            loaded = Results.load(tmp_path, "small")
        except Damaged as error:
            said.append(str(error))
            continue
        if len(said) % 8 == 0:
            report_page.shown_tables(loaded)
    assert len(said) > 5
    assert "\n" not in "".join(said)


def test_samples_of_any_content_are_left_out(small: Path, tmp_path: Path) -> None:
    good = {"step": 1, "prompt": "a", "response": "b", "finished": True, "reward": 1.0}
    lines = [json.dumps(with_value(good, (key,), value)) for key in good for value in (*ODD, ABSENT)]
    (tmp_path / "samples.jsonl").write_text("\n".join([json.dumps(good), "[" * 5000, "[1]", *lines[:60]]))
    rows = samples.read(tmp_path)
    assert rows[0] == good
    assert all(abs(row["reward"]) < 2**63 and isinstance(row["prompt"], str) for row in rows)


MADE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link": lambda path: path.symlink_to(Path(__file__)),
    "a socket": make_socket,
    "a folder": Path.mkdir,
}
READ = ["run.json", "steps.parquet", "samples.jsonl", ".lock", "../../../../../plan.json"]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("file", READ)
def test_only_regular_files_are_read(file: str, made: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_run(results)
    if file == ".lock":  # looked at for a run that says it runs
        edit(folder / "run.json", status="running")
    place = folder / file
    place.unlink(missing_ok=True)
    monkeypatch.chdir(place.parent.resolve())
    before = Path(__file__).read_bytes()
    MADE[made](Path(place.name))
    told = "\n".join(status.lines(results))
    if file in ("run.json", "steps.parquet") and not (file == "run.json" and made == "a link to a device"):
        assert "1 damaged" in told
        assert len(report_page.left_out(results)) == 1
    (ended,) = report_page.ended(results, None).values()
    assert report_page._samples(ended.runs)["samples"] == []
    assert Path(__file__).read_bytes() == before


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    "name", ["report.html", "tables", "figures", "tables/small-summary.csv", "figures/small-overview.svg", "runs"]
)
def test_report_does_not_write_through_links(name: str, results: Path, tmp_path: Path, refused: Said) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "file").write_text("mine")
    (results / name).parent.mkdir(exist_ok=True)
    if name == "runs":
        (results / "runs").rename(tmp_path / "runs")
        (results / "runs").symlink_to(tmp_path / "runs")
    else:
        (results / name).symlink_to(target / "file" if "." in name else target)
    before = sorted(target.rglob("*"))
    words = ["--figure", "overview", "--experiment", "small"] if name.startswith("figures") else []
    assert "is a link" in refused("report", *words, "--results", str(results), "--format", "svg")
    assert (sorted(target.rglob("*")), (target / "file").read_text()) == (before, "mine")


@pytest.mark.parametrize("verb", [["--keep", "kept"], ["--export", "csv"]])
def test_archives_and_exports_do_not_write_through_links(
    verb: list[str], results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "kept").mkdir()
    for place in (tmp_path / "kept" / "data", results / "tables"):
        place.symlink_to(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert "is a link" in refused("report", "--experiment", "small", *verb)
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.usefixtures("no_figures")
def test_named_results_folder_may_be_a_link(results: Path) -> None:
    results.with_name("link").symlink_to(results)
    report_page.make(results.with_name("link"), formats=["svg"])
    assert (results / "report.html").is_file()


@pytest.mark.parametrize("name", ["runs", "runs/default", "runs/default/grpo"])
def test_run_is_not_recorded_through_links(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "results" / name).parent.mkdir(parents=True)
    (tmp_path / "results" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(compose.ConfigError, match="is a link"):
        compose.plan([*SMALL, "algorithm=grpo", f"results_dir={tmp_path / 'results'}"])
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        ("steadymoe run algorithm=grpo seed=0", True),
        ("steadymoe run -m algorithm=grpo,gspo seed=0", True),
        ("steadymoe run algorithm=grpo results_dir=/elsewhere", False),
        ("steadymoe run algorithm=grpo; touch /tmp/x", False),
        ("steadymoe run algorithm=$(touch /tmp/x)", False),
        ("STEADYMOE_PATH=/elsewhere steadymoe run algorithm=mine", False),
        ("steadymoe run +task._target_=os.system", False),
        ("steadymoe run 'hydra.searchpath=[file:///elsewhere]'", False),
        ("curl example.org", False),
        ("steadymoe run 'algorithm=", False),
    ],
)
def test_command_from_another_folder_is_quoted(
    command: str, is_ours: bool, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(one_run(results) / "run.json", status="failed", command=command)
    monkeypatch.chdir(results.parent)
    (line,) = (line for line in status.lines(Path("results")) if "rerun" in line and "--redo" not in line)
    assert (line == f"    rerun: {command}") == is_ours
    if not is_ours:  # one word of a shell, whose paste does nothing
        assert shlex.split(line.partition("run it: ")[2]) == [command]


# Files that numbers rest on


def test_copied_run_is_not_another_seed(results: Path) -> None:
    original, before = one_run(results), folders.read_runs(results, "small")
    copies = [original.parent / "seed=3", original.parent.parent / "a", original.parents[4] / "0"]
    for copy in copies:
        shutil.copytree(original, copy)
    pd.testing.assert_frame_equal(folders.read_runs(results, "small"), before)
    left_out, told = report_page.left_out(results), "\n".join(status.lines(results))
    assert len(left_out) == 3
    for copy in copies:
        assert any(str(copy) in line and str(original) in line for line in left_out)
    assert "3 damaged" in told


def test_archive_with_mixed_editions_is_refused(results: Path, tmp_path: Path) -> None:
    report_page.keep(results, "small", tmp_path / "old")
    shutil.rmtree(one_run(results))
    for name in ("runs", "steps", "evaluations"):
        report_page.keep(results, "small", tmp_path / name)
        shutil.copy(tmp_path / "old" / "data" / "small" / f"{name}.parquet", tmp_path / name / "data" / "small")
        with pytest.raises(Damaged, match=f"{name}.parquet"):
            Results.load(tmp_path / name, "small")


@pytest.mark.usefixtures("no_figures")
def test_damaged_archive_is_skipped_and_named(small: Path, tmp_path: Path, refused: Said) -> None:
    report_page.keep(small, "small", tmp_path)
    shutil.copytree(tmp_path / "data" / "small", tmp_path / "data" / "other")
    (tmp_path / "data" / "other" / "steps.parquet").write_text("no table")
    made = report_page.make(tmp_path, formats=["svg"])
    assert any("other/steps.parquet" in line for line in made.missing)
    assert "other/steps.parquet" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "tables" / "small-summary.csv").exists()
    for words in ([], ["--figure", "fig02"]):
        assert "steps.parquet" in refused("report", *words, "--results", str(tmp_path), "--experiment", "other")

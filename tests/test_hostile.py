"""Names and texts that come from data are shown as they are: no mathematics, no markup, no escape sequence, no path."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from rich.console import Console
from test_cli import RECORDED, steadymoe
from test_execute import SMALL

from steadymoe.bench.config import compose, overrides
from steadymoe.bench.report import write
from steadymoe.bench.runs import progress, status
from steadymoe.bench.support import text

NAMES = {
    "grpo": r"$x$ \\frac{1}{2} _^{} <script>alert(1)</script>",
    "gspo": "a|b\nc %d & {} $\\undefined$ \x1b[31mred\x1b[0m \u202e",
    "reinforce": "`code` *stars* [/bold] \ud800 \x07 $",
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Recorded runs whose algorithms, values, commands and errors are hostile."""
    shutil.copytree(RECORDED / "runs", tmp_path / "runs")
    for path in tmp_path.glob("**/run.json"):
        facts = json.loads(path.read_text())
        name = NAMES[facts["algorithm"]]
        facts |= {"algorithm": name, "axes": facts["axes"] | {f"key.{name}": name}, "command": f"steadymoe run {name}"}
        path.write_text(json.dumps(facts))
    return tmp_path


def test_a_report_of_hostile_names_shows_them_letter_by_letter(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steadymoe(monkeypatch, "report", "--results", str(hostile), "--format", "svg") == 0
    said = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    page = (hostile / "report.html").read_text()
    assert page.count("<script>") == 1
    assert page.count("&lt;script&gt;") > 3
    images = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    drawn = ["".join(ElementTree.fromstring(base64.b64decode(image)).itertext()) for image in images]
    assert any(text.visible(NAMES["grpo"]) in each for each in drawn)
    assert any(text.visible(NAMES["gspo"]) in each for each in drawn)
    numbers = pd.read_csv(hostile / "tables" / "small-fig02-clip_fraction.csv")
    assert any(text.visible(NAMES["gspo"]) in name for name in numbers["series"])  # with no backslash of ours


def test_status_shows_what_does_not_print_as_python_writes_it(hostile: Path) -> None:
    for path in hostile.glob("**/run.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(facts | {"status": "failed", "error": f"Traceback\nError: {NAMES['gspo'][8:]}"}))
    told = status.lines(hostile)
    assert all(letter.isprintable() for line in told for letter in line)
    assert any("\\x1b[31mred\\x1b[0m \\u202e" in line for line in told)


@pytest.mark.parametrize("name", NAMES.values())
def test_a_cell_of_a_table_is_one_cell_in_markdown_and_in_latex(name: str) -> None:
    name = name.replace("\ud800", "")  # no table of pandas holds half a character
    table = pd.DataFrame({f"head {name}": [name, "plain"], "n": [1.0, 2.0]})
    shown = write.to_markdown(table).splitlines()
    assert len(shown) == 4
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in shown} == {3}
    assert "<script>" not in shown[2].replace("\\<", "")
    rows = write.to_latex(table).splitlines()
    (first,) = (line for line in rows if line.endswith(r"& 1 \\"))
    plain = re.sub(r"\\text[a-z]+\{\}", "", first)
    assert not re.search(r"(?<!\\)[$%#_{}^]", plain)
    assert all(letter.isprintable() for letter in first)


def test_dollars_in_names_are_drawn_and_written_as_they_are() -> None:
    table = pd.DataFrame({"arm": ["$a$", r"\$b", "c", None], "n": [1, 2, 3, 4]})
    drawn = text.without_mathematics(table)
    assert drawn["arm"].tolist()[:3] == [r"\$a\$", r"\\$b", "c"]
    pd.testing.assert_frame_equal(text.as_recorded(drawn), table, check_dtype=False)
    assert text.without_mathematics(table[["n"]]) is not None
    plain = table.iloc[2:3]
    assert text.without_mathematics(plain) is plain
    category = table.iloc[:3].astype({"arm": "category"})
    assert text.without_mathematics(category)["arm"].tolist() == drawn["arm"].tolist()[:3]


def test_markup_in_a_path_or_a_label_is_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "[/bold]"
    words = ["run", *SMALL, "steps=1", f"results_dir='{results}'"]
    assert steadymoe(monkeypatch, *words) == 0
    assert "/[/bold]'" in capsys.readouterr().out  # the next command, which a shell can read
    (made,) = compose.plan(words[1:])
    monkeypatch.setattr(progress, "labels", lambda runs: ["[/bold] \x1b[31m"])
    console = Console(force_terminal=True, width=200, record=True)
    console.print(progress._table([made], 1.0))
    assert "[/bold] \\x1b[31m" in console.export_text()


@pytest.mark.parametrize("name", ["../../x", "..", ".", "", "/etc", "small/..", "x\n"])
@pytest.mark.parametrize(
    "verb", [["report"], ["report", "--export", "csv"], ["report", "--keep", "kept"], ["report", "--figure", "fig02"]]
)
def test_an_experiment_is_one_of_those_that_are_there(
    verb: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RECORDED / "runs" / "small", tmp_path / "x" / "runs" / "small")
    (tmp_path / "a" / "b").mkdir(parents=True)
    shutil.copytree(RECORDED / "runs", tmp_path / "a" / "b" / "runs")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.glob("**/*"))
    words = [*verb, "--results", "a/b", "--experiment", name]
    assert steadymoe(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("steadymoe: ")
    assert said.count("\n") == 1
    assert sorted(tmp_path.glob("**/*")) == before


def test_a_run_whose_folder_would_be_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "is_name", lambda _: True)  # whatever else may fail
    for words in (["algorithm=../algorithm/grpo"], ["model=../model/micro"]):
        with pytest.raises(compose.ConfigError, match="is not a folder below"):
            compose.plan(words)


LISTING = [sys.executable, "-m", "steadymoe.bench.cli", "report", "--list"]


def test_a_reader_that_has_gone_ends_a_command_without_a_word(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as | head has by the second line
    done = subprocess.run(LISTING, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_command_whose_streams_are_closed_does_its_work(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(RECORDED, results)
    words = [*LISTING[:-2], "report", "--results", str(results), "--export", "csv"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", *words], check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(list(results.rglob("*.csv"))) == 1


@pytest.mark.parametrize(
    ("locale", "code", "said"),
    [
        ({"LC_ALL": "C"}, 0, b""),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 2, b"PYTHONUTF8=1"),
        ({"PYTHONIOENCODING": "ascii"}, 0, b""),
    ],
)
def test_a_locale_without_utf_8_is_refused_and_a_terminal_without_it_is_not(
    locale: dict[str, str], code: int, said: bytes
) -> None:
    words = [*LISTING[:-2], "check", "--help"]  # with an ellipsis
    done = subprocess.run(words, env=os.environ | locale, capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (code, int(code > 0))
    assert said in done.stderr


def test_ctrl_c_ends_processes_at_once_and_without_tracebacks_of_theirs(tmp_path: Path) -> None:
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

"""The way in from Python: what docs/commands.md shows, and that the command line means the same."""

import io
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pandas as pd
import pytest
from fixtures import RECORDED
from matplotlib.figure import Figure
from small_runs import SMALL

from steadymoe import bench
from steadymoe.bench import schema
from steadymoe.bench.report.figures import CannotDraw
from steadymoe.bench.report.report_page import NothingToReport
from steadymoe.bench.runs import compose, record
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.support.errors import UserError
from steadymoe.models import build

ROOT = Path(__file__).parent.parent
# What the page's run takes, in place of its own size.
TINY = [*(word for word in SMALL if not word.startswith("updates=")), "updates=4", "seed=0"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """What the script of docs/commands.md leaves behind: its folder, and its names."""
    script, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "commands.md").read_text(), re.DOTALL)
    size = '"model=micro", "updates=240", "seed=0,1,2"'
    assert script.count(size) == 1
    folder, names = tmp_path_factory.mktemp("python"), {}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        exec(script.replace(size, ", ".join(map(repr, TINY))), names)  # our own page
    return folder, names


def test_documented_script_trains_reads_and_draws(done: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, names = done
    monkeypatch.chdir(folder)
    recorded_runs = names["recorded"]
    runs, steps = recorded_runs.runs, recorded_runs.joined["steps"]
    assert runs[["arm", "seed", "status"]].to_numpy().tolist() == [["grpo", 0, "finished"], ["gspo", 0, "finished"]]
    for run in runs.to_dict("records"):  # the pandas of the page, by hand
        recorded = record.read_table(Path(run["folder"]), "steps")
        of_run = steps[(steps["arm"] == run["arm"]) & (steps["metric"] == "reward")]
        assert of_run["value"].tolist() == recorded["reward"].tolist()
        gained = recorded["reward"].iloc[-1] - recorded["reward"].iloc[0]
        assert names["table"].loc[(run["arm"], 0), "gained reward"] == gained
        assert run["eval_accuracy"] == recorded["eval_accuracy"].dropna().iloc[-1]
        assert len(pd.read_parquet(f"{run['folder']}/updates.parquet")) == 4
    drawn = names["drawn"]
    assert isinstance(drawn, Figure)
    assert (folder / "first.png").stat().st_size > 10_000
    assert len(pd.read_csv(folder / "first.csv")) == len(drawn.numbers)
    chosen = bench.figure("overview", recorded_runs, ["gspo"]).numbers["series"]
    assert {series.partition(",")[0] for series in chosen} == {"gspo"}
    before = (names["planned"].folder / "run.json").read_bytes()
    assert bench.run(names["planned"]) == "finished"  # it has ended, and is left as it is
    assert (names["planned"].folder / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    "words", [["algorithm=gspo", "seed=3"], ["algorithm=gspo,grpo", "seed=0,1"], ["experiment=quickstart", "seed=4"]]
)
def test_plan_matches_the_command_line(words: list[str]) -> None:
    assert bench.plan(*words) == compose.plan(words, multirun=any("," in word for word in words))


def test_invalid_calls_raise_clear_errors(done: tuple[Path, dict], tmp_path: Path) -> None:
    recorded = done[1]["recorded"]
    with pytest.raises(ConfigError, match="there is no algorithm 'gpso'"):
        bench.plan("algorithm=gpso")
    with pytest.raises(NothingToReport, match="no ended runs below"):
        bench.results("nothing", tmp_path)
    with pytest.raises(CannotDraw, match="there is no figure 'overveiw'; did you mean overview"):
        bench.figure("overveiw", recorded)
    with pytest.raises(UserError, match="there is no arm 'dapo'"):
        bench.figure("overview", recorded, ["dapo"])
    with pytest.raises(CannotDraw, match="fig03 lacks runs with 2 values of routing in first"):
        bench.figure("fig03", recorded)


# Command → packages that it does not import, besides torch and transformers.
CHEAP = {
    "status": {"pandas", "pyarrow", "hydra", "numpy", "jinja2"},
    "run --help": set(),
    "report --list": set(),
    "": {"hydra", "matplotlib", "pandas", "scipy", "jinja2"},
}


@pytest.mark.parametrize("command", CHEAP)
def test_commands_that_train_nothing_import_little(command: str, tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "results")
    called = "cli.main()" if command else "from steadymoe.bench import figure, plan, results, run; exit()"
    code = (
        f"import sys; from steadymoe.bench import cli\ntry: {called}\n"
        "except SystemExit as end: print('EXIT', end.code or 0, *sys.modules)"
    )
    words = [sys.executable, "-c", code, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    code, *modules = done.stdout.rpartition("EXIT ")[2].split()
    assert code == "0", done.stderr
    assert not {"torch", "transformers", *CHEAP[command]} & set(modules)


def test_schema_lists_every_experts_implementation() -> None:
    assert schema.EXPERTS == build.EXPERTS

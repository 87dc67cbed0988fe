"""STEADYMOE_PATH: one place for a user's own modules and configs, never mixed up with the suite's."""

import shlex
import sys
from pathlib import Path

import pytest
from fixtures import Said

from steadymoe.bench.runs import compose
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.support import external, source


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def named(monkeypatch: pytest.MonkeyPatch, *folders: str, **configs: str) -> None:
    monkeypatch.setenv(external.VARIABLE, ":".join(folders))
    for name, text in configs.items():
        path = Path(folders[0]) / "conf" / "engine" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


EXACT = "_target_: steadymoe.models.engine.Exact\nstrength: 0.0\n"


def test_recorded_command_names_its_config_folder_and_composes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "my own", calm=EXACT)
    (made,) = compose.plan(["engine=calm"])
    assert made.command == "STEADYMOE_PATH='my own' steadymoe run engine=calm"
    assert made.choices["engine"] == "calm"
    variable, *words = shlex.split(made.command)
    monkeypatch.setenv(*variable.split("=", 1))
    assert compose.plan(words[2:])[0] == made
    assert compose.plan(["engine=exact"])[0].command == "steadymoe run engine=exact"


def test_duplicate_config_name_is_refused(monkeypatch: pytest.MonkeyPatch, refused: Said) -> None:
    named(monkeypatch, "mine", int8=EXACT)
    config = Path("mine/conf/engine/int8.yaml").absolute()
    assert str(config) in refused("run", "seed=3")
    Path("mine/conf/engine/int8.yaml").rename("mine/conf/engine/calm.yaml")
    named(monkeypatch, "yours", calm=EXACT)
    monkeypatch.setenv(external.VARIABLE, "mine:yours")
    with pytest.raises(ConfigError, match=r"yours/conf/engine/calm\.yaml has the name of a config of .*mine/conf"):
        compose.plan([])


def test_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, refused: Said) -> None:
    monkeypatch.setenv(external.VARIABLE, "mien")
    assert str(Path("mien").absolute()) in refused("run")
    ran("status", "--results", str(tmp_path))


def test_user_modules_come_after_python_and_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "mine")
    Path("mine").mkdir()
    for name in ("torch", "json", "only_mine"):
        Path(f"mine/{name}.py").touch()
    external.activate()
    assert sys.path[-1] == str(Path("mine").absolute())
    assert source.find("only_mine") == Path("mine/only_mine.py").absolute()
    found = source.find("torch")
    assert found is not None
    assert source.is_installed(found)
    assert source.find("steadymoe.algorithms.grpo") == source.SUITE / "algorithms" / "grpo.py"
    assert [source.find(name) for name in ("absent", "..", "", "mine/only_mine", "json/..only_mine")] == [None] * 5

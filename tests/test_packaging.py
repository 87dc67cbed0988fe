"""The wheel holds every package, config and template, and the command line works from it."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from builds import PACKAGES, ROOT


def test_the_wheel_holds_every_module_config_and_template(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"steadymoe/{path.relative_to(ROOT)}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yaml", ".html", ".json")
    }
    assert wanted <= held
    assert {name.split("/")[1] for name in held if name.startswith("steadymoe/")} == set(PACKAGES)
    assert not [name for name in held if name.split("/")[0] in PACKAGES]  # no bare `models` beside others' packages


@pytest.mark.check
def test_installed_wheel_composes_configs(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import steadymoe.bench.runs.compose as c\n"
        "print(c.__file__); print(len(c.plan(['experiment=quickstart'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    where, runs = done.stdout.split()
    assert where.startswith(str(tmp_path / "site"))
    assert runs == "9"


def test_python_files_named_in_the_makefile_exist() -> None:
    command = ["make", "-n", "-C", ROOT, "check", "gpu"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w/.-])(?:tests|benchmarks|integrations)/[\w/]+\.py\b", shown))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []

"""The wheel holds every package, config and template; the command line works from it."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("algorithms", "models", "bench", "conf")


def test_the_list_of_packages_is_the_tree() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for name in PACKAGES[:3] for path in (ROOT / name).rglob("*.py")}
    assert set(listed) == {"steadymoe.conf", *("steadymoe." + ".".join(folder.parts) for folder in folders)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    words = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "--wheel-dir",
        str(place),
    ]
    subprocess.run([sys.executable, *words, str(source)], check=True, capture_output=True)
    return next(place.glob("*.whl"))


def test_the_wheel_holds_every_module_config_and_template(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"steadymoe/{path.relative_to(ROOT)}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yaml", ".html")
    }
    assert wanted <= held
    assert not [name for name in held if name.split("/")[0] in PACKAGES]  # no bare `models` beside others' packages


def test_the_command_composes_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import steadymoe.bench.compose as c\n"
        "print(c.__file__); print(len(c.plan(['experiment=quickstart'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    where, runs = done.stdout.split()
    assert where.startswith(str(tmp_path / "site"))
    assert runs == "9"

"""The two builds of integrations/: the losses alone need torch and PyYAML, the integrations require the suite."""

import json
import re
import runpy
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import torch
from builds import ROOT, build_wheel, pip
from packaging.requirements import Requirement
from safetensors.torch import save_file

SCRIPT = Path(__file__).parent / "losses_alone.py"


@pytest.fixture(scope="module")
def losses(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the losses alone."""
    return build_wheel(source / "integrations" / "losses", tmp_path_factory.mktemp("losses"))


@pytest.fixture(scope="module")
def integrations(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the integrations."""
    return build_wheel(source / "integrations", tmp_path_factory.mktemp("integrations"))


def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def needed(*names: str) -> dict[str, Distribution]:
    """The installed distributions of these names and, in turn, of what they require here."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found[name] = distribution(name)
        requirements = map(Requirement, found[name].requires or [])
        waiting += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.check
def test_standalone_losses_contain_only_equations_and_numbers(losses: Path) -> None:
    archive = zipfile.ZipFile(losses)
    folders = [ROOT / folder for folder in ("algorithms", "integrations/verl", "conf/algorithm")]
    files = [path for folder in folders for path in folder.iterdir() if path.suffix in (".py", ".yaml")]
    files += [ROOT / "conf" / name for name in ("__init__.py", "algorithm.yaml", "advantage.yaml", "correction.yaml")]
    wanted = {f"steadymoe/{path.relative_to(ROOT)}": path.read_bytes() for path in files}
    held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted
    (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.check
def test_standalone_losses_share_name_and_version_with_fewer_requirements(losses: Path, wheel: Path) -> None:
    small, whole = metadata(losses), metadata(wheel)
    assert small["Name"] == whole["Name"]
    assert small["Version"] == f"{whole['Version']}+losses"
    for field in ("Requires-Python", "License-Expression", "Author"):
        assert small[field] == whole[field]
    assert small.get_all("Requires-Dist") == ["torch>=2.6", "PyYAML"]


@pytest.mark.check
def test_integrations_contain_every_module_and_require_the_suite(integrations: Path, wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(integrations).namelist() if ".dist-info/" not in name}
    folder = ROOT / "integrations"
    parts = ("", "trl", "verl")
    assert held == {f"steadymoe/{path.relative_to(ROOT)}" for part in parts for path in (folder / part).glob("*.py")}
    assert metadata(integrations)["Version"] == (version := metadata(wheel)["Version"])
    assert f"steadymoe=={version}" in metadata(integrations).get_all("Requires-Dist")


@pytest.mark.check
def test_standalone_losses_register_the_verl_plugin(losses: Path) -> None:
    archive = zipfile.ZipFile(losses)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    said = archive.read(name).decode()
    assert "[verl.plugins]\nsteadymoe = steadymoe.integrations.verl.plugin\n" in f"{said}\n"
    assert "steadymoe/integrations/verl/plugin.py" in archive.namelist()


@pytest.mark.check
def test_standalone_losses_match_the_suite_with_only_torch_and_yaml(losses: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(losses).extractall(site)
    for each in needed("torch", "PyYAML").values():
        for name in {file.parts[0] for file in each.files or []} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(str(each.locate_file(name)))
    code = (
        f"import importlib.util as i, runpy, sys; sys.path.append({str(site)!r})\n"
        "others = ('transformers', 'hydra', 'omegaconf', 'pandas', 'numpy', 'steadymoe.bench', 'steadymoe.models')\n"
        "assert not [name for name in others if i.find_spec(name)]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    # -S: no site-packages; -I: nothing of the environment or of this folder.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"] == metadata(losses)["Version"]
    assert answer["conf"] == str(site / "steadymoe" / "conf")
    assert answer["numbers"] == runpy.run_path(str(SCRIPT))["numbers"]()


@pytest.mark.check
def test_either_build_replaces_the_other_completely(losses: Path, wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for each in (losses, wheel, losses):
        pip("--python", tmp_path, "install", "--no-deps", "--no-index", "--no-compile", each)
        held = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
        written = {name for name in held if Path(name).name in ("INSTALLER", "REQUESTED", "direct_url.json")}
        assert held - written == set(zipfile.ZipFile(each).namelist())
    pip("--python", tmp_path, "uninstall", "--yes", "steadymoe")
    assert not [path for path in site.rglob("*") if path.is_file()]


@pytest.mark.bare
def test_standalone_losses_install_in_a_new_environment(losses: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    before = {each["name"] for each in json.loads(pip("--python", tmp_path, "list", "--format", "json"))}
    pip("--python", tmp_path, "install", "--constraint", ROOT / "constraints.txt", losses)
    after = {
        each["name"].lower().replace("_", "-")
        for each in json.loads(pip("--python", tmp_path, "list", "--format", "json"))
    }
    assert after - before == {"steadymoe", *needed("torch", "PyYAML")} - before
    pip("--python", tmp_path, "check")
    done = subprocess.run([tmp_path / "bin" / "python", "-I", SCRIPT], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["numbers"] == runpy.run_path(str(SCRIPT))["numbers"]()


@pytest.mark.bare
def test_integrations_install_in_a_new_environment(source: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    constraints = ROOT / "constraints.txt"
    pip("--python", tmp_path, "install", "--constraint", constraints, source, source / "integrations")
    pip("--python", tmp_path, "check")
    layer = {"gate.weight": torch.full((2, 4), 0.5), "experts.0.up_proj.weight": torch.ones(6, 4)}
    save_file({f"layers.0.mlp.{name}": each for name, each in layer.items()}, tmp_path / "model.safetensors")
    command = [tmp_path / "bin" / "steadymoe-integrations", "inspect", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "Your routers step 2 times as far as the other weights" in done.stdout

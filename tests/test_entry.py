"""How much of the suite runs before a trainer exists."""

import subprocess
import sys
from pathlib import Path

import pytest

TRACER = Path(__file__).with_name("tracer.py")


@pytest.mark.check
def test_startup_runs_few_files_and_lines(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, TRACER, tmp_path], capture_output=True, text=True, check=True).stdout
    files, _, lines, _ = said.splitlines()[-1].split()
    assert 20 < int(files) <= 31
    assert 400 < int(lines) <= 745  # a second run in its process: what is cached for a sweep is not done again

"""The fixtures of all tests, tests/fixtures.py, and a run of TRL's trainer."""

from pathlib import Path

import pytest
from fixtures import *  # noqa: F403


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of a run of TRL's trainer on one process, without accumulation; skipped without TRL."""
    pytest.importorskip("trl")
    from trl_runs import trainer

    results = tmp_path_factory.mktemp("whole")
    trainer(results, record=results).train()
    return results

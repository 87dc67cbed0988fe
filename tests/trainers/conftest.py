"""A run of TRL's trainer that tests of several files read; nothing is made without TRL."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of a run on one process without accumulation."""
    pytest.importorskip("trl")
    from trl_runs import trainer

    results = tmp_path_factory.mktemp("whole")
    trainer(results, record=results).train()
    return results

"""One object for each column, and everything that follows from it."""

import hashlib
import runpy
from types import ModuleType

import generate
import pyarrow as pa
import pytest
import torch

from steadymoe.bench.runs import outcome, record
from steadymoe.bench.training import columns, token_metrics

NEW = columns.Column(
    *("spread", "largest spread of a token", "spread of tokens", "spread", ""),
    "int64",
    "largest",
    share=True,
    kept=True,
)


@pytest.fixture
def with_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of the columns of updates with one line more."""
    monkeypatch.setattr(columns, "UPDATE", (*columns.UPDATE, NEW))
    monkeypatch.setattr(columns, "TABLES", columns.tables())


@pytest.mark.usefixtures("with_new")
def test_declared_column_appears_everywhere() -> None:
    for table in ("updates", "steps"):
        assert record.schema(table).field("spread").type == pa.int64()
    assert token_metrics.of_step([{"spread": 1}, {"spread": 5}, {"spread": 3}]) == {"spread": 5}
    assert "spread" in columns.kept()
    assert columns.bounds("spread") == (0.0, 1.0)
    assert (columns.label("spread"), columns.short("spread")) == ("spread of tokens", "spread")
    assert "- `spread`: largest spread of a token (0 to 1, in steps: largest)" in generate.columns_section()
    assert "largest of the updates" in columns.TABLES["steps"]["spread"].meaning


def test_column_names_are_unique_within_a_table() -> None:
    for group in (columns.UPDATE, columns.STEP + columns.COUNTS, columns.LAYER, columns.EVALUATION):
        assert len({each.name for each in group}) == len(group)
    assert not {each.name for each in columns.UPDATE} & {each.name for each in columns.STEP + columns.COUNTS}
    assert all(each.meaning for table in columns.TABLES.values() for each in table.values())


@pytest.mark.parametrize(("module", "name"), [(token_metrics, "ess"), (outcome, "replay_share")])
def test_misspelt_name_fails_at_import(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = {table: {key: its[key] for key in its if key != name} for table, its in columns.TABLES.items()}
    monkeypatch.setattr(columns, "TABLES", without)
    with pytest.raises(KeyError, match=rf"no table has the columns \['{name}'\]"):
        runpy.run_path(str(module.__file__))


def test_histogram_edges_equal_those_of_recorded_runs() -> None:
    # Of linspace(-1, 1, 41) and logspace(-8, 0, 33) on a processor with AVX2; torch's plain kernels round otherwise.
    recorded = {"3c7460e427aa9265": token_metrics._LOG_RATIO_EDGES, "4f480f1602453494": token_metrics._VARIANCE_EDGES}
    for digest, edges in recorded.items():
        assert hashlib.sha256(edges.numpy().tobytes()).hexdigest().startswith(digest)
    assert torch.allclose(token_metrics._LOG_RATIO_EDGES, torch.linspace(-1.0, 1.0, 41), rtol=0, atol=1e-7)
    assert torch.allclose(token_metrics._VARIANCE_EDGES, torch.logspace(-8, 0, 33), rtol=1e-5, atol=0)

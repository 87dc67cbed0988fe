"""What archives and reports tell of the machine that made a run."""

import pytest

from steadymoe.bench.support.text import portable


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("steadymoe run algorithm=grpo results_dir=/mine/runs seed=0", "steadymoe run algorithm=grpo seed=0"),
        ("STEADYMOE_PATH=/mine/controls:/mine/other steadymoe run", "STEADYMOE_PATH=controls:other steadymoe run"),
        ("steadymoe run model.path=/models/small a=1/2 b=/", "steadymoe run model.path=small a=1/2 b=/"),
        ("steadymoe run 'cold_start.path=/my runs/seed=0'", "steadymoe run cold_start.path=seed=0"),
        ("steadymoe run results_dir=results", "steadymoe run"),
        ("not 'a command /mine/x", "not 'a command /mine/x"),
    ],
)
def test_commands_are_shown_without_the_folders_of_a_machine(command: str, shown: str) -> None:
    assert portable(command) == shown
    assert portable(shown) == shown

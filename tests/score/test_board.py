"""The board: losses in blocks of their own are compared with the GRPO beside them, and corrected with all others."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from steadymoe.bench.score import board, outcomes, standard
from steadymoe.bench.score.standard import COLUMNS, FREE
from steadymoe.bench.statistics.tolerance import REFERENCE

LEVELS = {REFERENCE: (0.7, 0.8, 0.5, 0.2), "mine": (0.7, 0.8, 0.6, 0.3)}


def block(name: str = "mine", factor: float = 1.0, seeds: int = 5) -> pd.DataFrame:
    """A loss and GRPO on a machine on which all losses tolerate ``factor`` times the rate."""
    noise = np.random.default_rng(0).normal(scale=0.03, size=(len(LEVELS), seeds, 4))
    rows = [
        (FREE.name, loss, loss, factor * rate, seed, 0.4, 0.6, level, level, np.nan, np.nan)
        for apart, (loss, levels) in zip(noise, LEVELS.items(), strict=True)
        for seed in range(seeds)
        for rate, level in zip((1e-4, 2e-4, 4e-4, 8e-4), np.add(levels, apart[seed]), strict=True)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).replace({"loss": {"mine": name}})


def test_a_loss_is_compared_with_grpo_in_its_own_block() -> None:
    """On another machine every rate is half as high: the same ratio. Own rows among the suite's would be another."""
    suite = standard.blocks()["7 tokens"].assign(side=FREE.name)
    (alone,) = [each for each in outcomes.scores(block()) if each.loss == "mine"]
    found = {each.loss: each for each in outcomes.scores(suite, block(), block("halved", factor=0.5))}
    for name in ("mine", "halved"):
        number = found[name].numbers["rate"]
        assert number is not None
        assert str(number) == str(alone.numbers["rate"])
        assert (found[name].sampled, found[name].seeds) == (alone.sampled, 5)
    before = {each.loss: each for each in outcomes.scores(suite)}
    assert found.keys() == before.keys() | {"mine", "halved"}
    for loss, score in before.items():
        assert str(found[loss].numbers) == str(score.numbers)
        assert (found[loss].sampled, found[loss].best_rate) == (score.sampled, score.best_rate)


def test_holms_correction_is_over_all_blocks() -> None:
    """What is decided alone is not beside many others."""
    (number,) = [each.numbers["rate"] for each in outcomes.scores(block()) if each.loss == "mine"]
    assert number is not None
    assert 0.002 < number.p < 0.05
    for others, is_decided in ((1, True), (int(0.05 / number.p) + 1, False)):
        found = outcomes.scores(*(block(f"mine{place}") for place in range(others)))
        assert {each.decided["rate"] for each in found if each.loss != REFERENCE} == {is_decided}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("grpo", "loss"), ("gspo", "loss"), ("topr", "recipe"), ("dppo", "recipe"), ("dapo", "recipe")),
        ("grpo routing=r2", "change"),
    ],
)
def test_own_advantage_or_filter_makes_a_recipe_and_another_routing_a_change(name: str, kind: str) -> None:
    (score,) = outcomes.scores(block(name)[lambda rows: rows["loss"] == name])
    assert board.kind(replace(score, algorithm=name.partition(" ")[0])) == kind


def test_every_name_of_a_change_is_that_of_a_recorded_one() -> None:
    named = {f"{REFERENCE} {change}" for change in board.CHANGES}
    assert named <= standard.made()["losses"].keys()

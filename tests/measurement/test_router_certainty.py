"""Margins over spread, probabilities and entropies of routers on logits made by hand."""

import math

import pytest
import torch

from steadymoe.bench.measurement.router_certainty import certainty

MASK = torch.tensor([[1, 1, 0]])


def of_logits(rows: list[list[float]], experts_per_token: int) -> dict[str, float]:
    """The certainty of one layer over two response tokens and one place of padding."""
    logits_LBTE = torch.tensor([[*rows, [math.nan] * len(rows[0])]])[None]
    found = certainty(logits_LBTE.log_softmax(-1), experts_per_token, MASK)
    return {name: float(value_L) for name, value_L in vars(found).items()}


def test_margin_over_spread_is_the_mean_of_the_tokens_quotients() -> None:
    found = of_logits([[0.0, 3.0, 1.0, 2.5], [1.0, 0.9, 0.0, -1.0]], 2)
    assert found["margin_over_spread_L"] == pytest.approx(((2.5 - 1) / 3 + 0.9 / 2) / 2, rel=1e-5)
    rows = [sorted(math.exp(each) for each in row)[::-1] for row in ([0.0, 3.0, 1.0, 2.5], [1.0, 0.9, 0.0, -1.0])]
    of_probabilities = [(row[1] - row[2]) / (row[0] - row[3]) for row in rows]
    assert found["margin_over_spread_of_probabilities_L"] == pytest.approx(sum(of_probabilities) / 2, rel=1e-5)
    top1 = [row[0] / sum(row) for row in rows]
    assert found["top1_probability_L"] == pytest.approx(sum(top1) / 2, rel=1e-5)


def test_the_spread_ends_at_the_sixteenth_expert() -> None:
    falling = [float(-each) for each in range(32)]
    assert of_logits([falling, falling], 8)["margin_over_spread_L"] == pytest.approx(1 / 15)
    assert of_logits([falling, falling], 20)["margin_over_spread_L"] == pytest.approx(1 / 20)  # a margin lies inside


def test_a_router_without_an_opinion_has_no_margin_and_all_entropy() -> None:
    found = of_logits([[0.5] * 8] * 2, 2)
    assert found == pytest.approx(
        {
            "margin_over_spread_L": 0.0,
            "margin_over_spread_of_probabilities_L": 0.0,
            "top1_probability_L": 1 / 8,
            "entropy_L": 1.0,
        }
    )


def test_without_an_expert_to_leave_out_there_is_no_margin() -> None:
    assert math.isnan(of_logits([[1.0, 2.0], [0.0, 4.0]], 2)["margin_over_spread_L"])

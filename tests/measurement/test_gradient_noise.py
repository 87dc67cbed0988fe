"""The gradient noise scale on gradients whose signal and noise are known."""

import math

import pytest
import torch
from torch import Tensor

from steadymoe.bench.measurement.gradient_noise import gram, noise, noise_scale


def drawn(prompts: int, generator: torch.Generator, signal: float = 0.3, sigma: float = 0.5) -> list[Tensor]:
    """Gradients of 40 weights: the same signal in each, and independent Gaussian noise."""
    return list(signal + sigma * torch.randn(prompts, 40, generator=generator))


def test_both_parts_are_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    found = [noise(gram(drawn(8, generator))) for _ in range(400)]
    assert sum(each.trace for each in found) / 400 == pytest.approx(40 * 0.5**2, rel=0.03)
    assert sum(each.squared_norm for each in found) / 400 == pytest.approx(40 * 0.3**2, rel=0.06)


def test_they_are_the_papers_estimates_from_batches_of_one_and_of_all_prompts() -> None:
    vectors = drawn(8, torch.Generator().manual_seed(1))
    small = sum(float(each.double().square().sum()) for each in vectors) / 8
    big = float(torch.stack(vectors).double().mean(0).square().sum())
    found = noise(gram(vectors))
    assert found.squared_norm == pytest.approx((8 * big - small) / 7, rel=1e-5)  # 1812.06162, eq. A.1
    assert found.trace == pytest.approx((small - big) / (1 - 1 / 8), rel=1e-5)  # ... and A.2


def test_the_interval_holds_the_known_scale() -> None:
    generator = torch.Generator().manual_seed(2)
    truth = 0.5**2 / 0.3**2
    held = [noise_scale(gram(drawn(32, generator))) for _ in range(40)]
    assert sum(each.low <= truth <= each.high for each in held) >= 34
    assert all(each.low < each.mean < each.high and each.n == 32 for each in held)


def test_gradients_that_agree_have_no_noise_and_gradients_that_cancel_no_signal() -> None:
    same = noise_scale(gram([torch.ones(4)] * 5))
    assert same.mean == 0
    one = torch.tensor([1.0, 2.0])
    assert noise_scale(gram([one, -one, one, -one])).mean == math.inf
    assert math.isnan(noise_scale(gram([torch.zeros(3)] * 4)).mean)

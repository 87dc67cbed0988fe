"""Predicted clip shares: closed forms, draws, the losses' own marks, and recorded log-ratios."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from steadymoe import algorithms
from steadymoe.algorithms import Batch
from steadymoe.bench.measurement.clip_prediction import ClipShare, Moments, above, below, clip_share, measured
from steadymoe.bench.measurement.columns import LOG_RATIO_EDGES

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "data"
EDGES = (-3.0, -1.0, -0.2, 0.3, 1.0, 4.0)


def draws(count: int, seed: int = 0, shift: float = -0.04, spread: float = 0.1, nu: float = 2.0) -> np.ndarray:
    """Variance-gamma log-ratios with the mean 0: heavy tails, the left one longer."""
    generator = np.random.default_rng(seed)
    g = generator.gamma(1 / nu, nu, count)
    return shift * (g - 1) + spread * np.sqrt(g) * generator.standard_normal(count)


# --- closed forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("edge", EDGES)
def test_without_kurtosis_the_tail_is_normal(edge: float) -> None:
    moments = Moments(0.1, 0.25)
    assert below(moments, edge) == pytest.approx(norm.cdf((edge - 0.1) / 0.5), rel=1e-12)
    assert above(moments, edge) == pytest.approx(norm.sf((edge - 0.1) / 0.5), rel=1e-12)


@pytest.mark.parametrize("edge", EDGES)
def test_a_kurtosis_of_3_is_laplaces_distribution(edge: float) -> None:
    tail = 0.5 * math.exp(-math.sqrt(2) * abs(edge))
    moments = Moments(0.0, 1.0, 0.0, 3.0)
    assert above(moments, edge) == pytest.approx(tail if edge > 0 else 1 - tail, rel=1e-3)
    assert below(moments, edge) == pytest.approx(tail if edge < 0 else 1 - tail, rel=1e-3)


@pytest.mark.parametrize("edge", [-0.9, 0.0, 1.0, 4.0])
def test_a_skewness_of_2_with_its_least_kurtosis_is_the_exponential_distribution(edge: float) -> None:
    for kurtosis in (6.0, 0.0):  # 0 is impossible with this skewness, and counts as 6
        assert above(Moments(0.0, 1.0, 2.0, kurtosis), edge) == pytest.approx(math.exp(-edge - 1), rel=1e-9)
    assert below(Moments(0.0, 1.0, -2.0, 6.0), -edge) == pytest.approx(math.exp(-edge - 1), rel=1e-9)


@pytest.mark.parametrize(("skewness", "kurtosis"), [(0.0, 5.0), (-1.0, 4.0), (-3.0, 40.0), (2.0, 9.0)])
def test_shape_and_place_are_apart(skewness: float, kurtosis: float) -> None:
    one, other = Moments(0.0, 1.0, skewness, kurtosis), Moments(0.3, 0.04, skewness, kurtosis)
    for edge in EDGES:
        assert below(other, 0.3 + 0.2 * edge) == pytest.approx(below(one, edge), rel=1e-9)
        assert below(one, edge) + above(one, edge) == pytest.approx(1, abs=1e-4)
    assert below(one, -40) < 1e-3
    assert below(one, 40) > 1 - 1e-3


def test_nothing_moves_before_any_update() -> None:
    still = measured(np.zeros(9))
    assert still == Moments(0.0, 0.0)
    assert clip_share(still, still, 0.2, 0.2, 0.5, 0.5) == ClipShare(0.0, 0.0)


# --- draws -------------------------------------------------------------------------------------------


def test_moments_of_draws_give_the_shares_of_draws() -> None:
    values = draws(2_000_000)
    moments = measured(values)
    for edge in (-0.5, -0.2, -0.1, 0.1, 0.2, 0.4):
        share = (values < edge).mean() if edge < 0 else (values > edge).mean()
        predicted = below(moments, edge) if edge < 0 else above(moments, edge)
        assert abs(predicted - share) < 4 * math.sqrt(share / len(values)) + 0.02 * share


@pytest.mark.parametrize(("length", "correlation"), [(1, 0.0), (8, 0.0), (50, 0.0), (8, 0.3)])
def test_moments_of_tokens_give_the_shares_of_sequences(length: int, correlation: float) -> None:
    rows = min(100_000, 2_000_000 // length)
    own = draws(rows * length).reshape(rows, length)
    variance = own.var() / (1 - correlation)
    shared = np.random.default_rng(1).standard_normal((rows, 1)) * math.sqrt(correlation * variance)
    values = own + shared
    predicted = measured(values.ravel()).of_sequences(length, correlation)
    of_rows = measured(values.mean(-1))
    assert predicted.variance == pytest.approx(of_rows.variance, rel=0.02)
    assert predicted.skewness == pytest.approx(of_rows.skewness, rel=0.1, abs=0.05)
    for edge in (-0.1, -0.03, 0.03, 0.08):
        share = (values.mean(-1) < edge).mean() if edge < 0 else (values.mean(-1) > edge).mean()
        found = below(predicted, edge) if edge < 0 else above(predicted, edge)
        assert found == pytest.approx(share, rel=0.1, abs=1e-3)


@pytest.mark.parametrize(("name", "band"), [("grpo", (0.1, 0.12)), ("gspo", (0.02, 0.03))])
def test_the_prediction_is_what_the_loss_itself_marks(name: str, band: tuple[float, float]) -> None:
    """Tokens and sequences; advantages of both signs and 0 in unequal shares, and updates that move them apart."""
    rows, length = 20_000, 12
    signs = np.random.default_rng(3).choice([1.0, -1.0, 0.0], size=(rows, 1), p=[0.3, 0.5, 0.2])
    log_ratio = torch.tensor(draws(rows * length).reshape(rows, length) + 0.02 * signs)
    advantages = torch.tensor(signs).expand(rows, length)
    loss = algorithms.load(name, clip_low=band[0], clip_high=band[1])
    old = torch.full((rows, length), -5.0, dtype=torch.float64)
    output = loss(
        Batch(
            logprobs_BT=old + log_ratio, old_logprobs_BT=old, advantages_BT=advantages, mask_BT=torch.ones(rows, length)
        )
    )
    positive, negative = (measured(log_ratio[(advantages == sign)].numpy()) for sign in (1, -1))
    if name == "gspo":
        positive, negative = positive.of_sequences(length), negative.of_sequences(length)
    share = (signs > 0).mean(), (signs < 0).mean()
    predicted = clip_share(positive, negative, *band, *share)
    for end, found in (("low", predicted.low), ("high", predicted.high)):
        marked = output.metrics[f"clipped_{end}_BT"].expand(rows, length).double().mean().item()
        assert marked > 0.005
        assert found == pytest.approx(marked, rel=0.06)
    assert predicted.both == predicted.low + predicted.high


# --- records -----------------------------------------------------------------------------------------


def recorded() -> list[np.ndarray]:
    """The token log-ratios of each recorded run of three experiments, as counts by bin."""
    found = []
    for experiment in ("staleness", "gates_noise", "gates_mismatch"):
        table = pd.read_parquet(REFERENCE / experiment / "histograms.parquet")
        for _, run in table[table["metric"] == "token_ratio_histogram"].groupby(["arm", "seed"]):
            counts = np.zeros(len(LOG_RATIO_EDGES) + 1)
            counts[run["bin"].to_numpy()] = run["count"].to_numpy()
            found.append(counts / counts.sum())
    return found


def test_on_recorded_log_ratios_the_tails_are_right_where_normal_ones_are_not() -> None:
    """Moments from bins of 0.05 are rough, and a run's histogram pools its updates: a factor of 1.6 is as near."""
    edges = np.array(LOG_RATIO_EDGES)
    middle = np.concatenate([edges[:1] - 0.025, (edges[1:] + edges[:-1]) / 2, edges[-1:] + 0.025])
    apart: dict[str, list[float]] = {"here": [], "normal": []}
    for share in recorded():
        mean = share @ middle
        variance = share @ (middle - mean) ** 2
        if share[0] + share[-1] > 0.01 or variance < 1e-3:
            continue  # the open bins hide the tails, or all is in one bin
        standard = (middle - mean) / math.sqrt(variance)
        moments = Moments(mean, variance, share @ standard**3, share @ standard**4 - 3)
        for place in (12, 16, 24, 28):  # -0.4, -0.2, 0.2, 0.4
            tail = share[: place + 1].sum() if edges[place] < 0 else share[place + 1 :].sum()
            if tail < 1e-3:
                continue
            for which, each in (("here", moments), ("normal", Moments(mean, variance))):
                found = below(each, edges[place]) if edges[place] < 0 else above(each, edges[place])
                apart[which].append(abs(math.log10(max(found, 1e-12) / tail)))
    assert len(apart["here"]) > 50
    assert np.median(apart["here"]) < 0.2
    assert np.median(apart["normal"]) > 0.6


# --- bad input ---------------------------------------------------------------------------------------


def test_impossible_numbers_are_refused() -> None:
    fine = Moments(0.0, 1.0)
    for band in ((1.0, 0.2), (-0.1, 0.2), (0.2, -0.1)):
        with pytest.raises(ValueError, match="a band has"):
            clip_share(fine, fine, *band, 0.5, 0.5)
    for shares in ((0.7, 0.7), (-0.1, 0.5)):
        with pytest.raises(ValueError, match="shares are at least 0"):
            clip_share(fine, fine, 0.2, 0.2, *shares)
    for length, correlation in ((0, 0.0), (5, 1.5), (5, -0.1)):
        with pytest.raises(ValueError, match="a length is at least 1"):
            fine.of_sequences(length, correlation)
    with pytest.raises(ValueError, match="moments must be finite"):
        Moments(math.nan, 1.0)
    with pytest.raises(ValueError, match="a variance is at least 0"):
        Moments(0.0, -1.0)
    with pytest.raises(ValueError, match="there are no log-ratios"):
        measured(np.array([]))

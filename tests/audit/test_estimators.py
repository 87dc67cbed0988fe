"""The estimators of an audit against gradients whose mean, noise and bias are known."""

import math

import numpy as np
import pytest

from steadymoe.bench.audit import estimators
from steadymoe.bench.audit.estimators import Gradients, Jackknifed, Pair, jackknife

WEIGHTS, MINIBATCHES, GROUPS = 40, 32, 8
EVERY = np.ones(GROUPS, dtype=bool)


def sums_of(gradients_MP: np.ndarray) -> np.ndarray:
    """The sums of eight groups, (G, P)."""
    return gradients_MP.reshape(GROUPS, -1, gradients_MP.shape[1]).sum(1)


def of(gradients_MP: np.ndarray) -> Gradients:
    sums_GP, squares_M = sums_of(gradients_MP), np.square(gradients_MP).sum(1)
    counts_G = np.full(GROUPS, len(gradients_MP) / GROUPS)
    return Gradients(sums_GP @ sums_GP.T, squares_M.reshape(GROUPS, -1).sum(1), counts_G)


def pair_of(own_MP: np.ndarray, reference_MP: np.ndarray) -> Pair:
    return Pair(of(own_MP), of(reference_MP), sums_of(own_MP) @ sums_of(reference_MP).T)


def drawn(mean_P: np.ndarray, noise: float, generator: np.random.Generator) -> np.ndarray:
    """Gradients of mini-batches whose covariance has the trace ``noise``."""
    return mean_P + math.sqrt(noise / WEIGHTS) * generator.normal(size=(MINIBATCHES, WEIGHTS))


def unit(*places: int) -> np.ndarray:
    vector_P = np.zeros(WEIGHTS)
    vector_P[list(places)] = 1 / math.sqrt(len(places))
    return vector_P


def test_signal_and_noise_average_over_pairs_and_minibatches() -> None:
    gradients_MP = drawn(unit(0), 3.0, np.random.default_rng(0))
    products_MM = gradients_MP @ gradients_MP.T
    apart = ~np.eye(MINIBATCHES, dtype=bool)
    assert of(gradients_MP).squared_norm(EVERY) == pytest.approx(products_MM[apart].mean())
    assert of(gradients_MP).trace(EVERY) == pytest.approx(gradients_MP.var(0, ddof=1).sum())
    some_G = EVERY.copy()
    some_G[[1, 5]] = False
    left_MP = gradients_MP.reshape(GROUPS, -1, WEIGHTS)[some_G].reshape(-1, WEIGHTS)
    assert of(gradients_MP).trace(some_G) == pytest.approx(left_MP.var(0, ddof=1).sum())
    reference_MP = drawn(unit(1), 2.0, np.random.default_rng(1))
    assert pair_of(gradients_MP, reference_MP).inner(EVERY) == pytest.approx(
        gradients_MP.mean(0) @ reference_MP.mean(0)
    )
    found = jackknife(lambda kept_G: float(kept_G @ np.arange(GROUPS)), GROUPS)  # a sum, whose replicates are known
    assert found.replicates == pytest.approx([28 - left_out for left_out in range(GROUPS)])
    assert found.high - found.value == pytest.approx(2.3646 * math.sqrt(7 / 8 * 42), rel=1e-4)  # Student, 7 degrees
    noise = jackknife(lambda kept_G: float(kept_G[0]), GROUPS)
    gains = [useful / math.sqrt(2 - (left_out == 0)) for left_out, useful in enumerate(found.replicates)]
    assert estimators.gain(found, noise).replicates == pytest.approx(gains)


def test_without_noise_every_estimate_is_the_closed_form() -> None:
    still, turned = np.tile(2 * unit(0), (MINIBATCHES, 1)), np.tile(3 * unit(0, 1), (MINIBATCHES, 1))
    found = estimators.against_truth(pair_of(turned, still)) | estimators.against_itself(pair_of(turned, still))
    cosine = math.sqrt(0.5)
    assert found["inner"].value == pytest.approx(6 * cosine)
    assert found["cosine"].value == found["staleness_cosine"].value == pytest.approx(cosine)
    assert found["bias"].value == pytest.approx(1 - cosine**2)
    assert found["staleness_bias"].value == pytest.approx((9 + 4 - 2 * 6 * cosine) / 4)
    assert estimators.share(of(turned[:, :1]), of(turned)).value == pytest.approx(0.5)


# Signal 1 and noise 8 of a mini-batch: U of 32 mini-batches is known to a fifth.
TRUE: dict[str, float] = {
    "squared_norm": 1.0,
    "trace": 8.0,
    "snr": 1 / 8,
    "inner": 0.8,
    "usefulness": 0.8 / math.sqrt(8),
    "gain": 0.8 / math.sqrt(1 + 8),
    "cosine": 0.8,
    "bias": 1 - 0.8**2,
    "staleness_bias": 2 - 2 * 0.8,
    "staleness_cosine": 0.8,
}


def draws(count: int) -> dict[str, list[Jackknifed]]:
    """All estimates of ``count`` audits of one gradient at an angle with the cosine 0.8 to its reference."""
    generator, found = np.random.default_rng(2), {name: list[Jackknifed]() for name in TRUE}
    own_P = 0.8 * unit(0) + 0.6 * unit(1)
    for _ in range(count):
        pair = pair_of(drawn(own_P, 8.0, generator), drawn(unit(0), 4.0, generator))
        made = estimators.signal(pair.own) | estimators.against_truth(pair) | estimators.against_itself(pair)
        made["gain"] = estimators.gain(made["usefulness"], made["snr"])
        for name, each in made.items():
            found[name].append(each)
    return found


def test_estimates_are_unbiased_with_nominal_coverage() -> None:
    audits = draws(250)
    for name in ("squared_norm", "trace", "inner"):
        values = np.array([each.value for each in audits[name]])
        assert abs(values.mean() - TRUE[name]) < 4 * values.std() / math.sqrt(len(values)), name
    for name, true in TRUE.items():
        known = [each for each in audits[name] if math.isfinite(each.value)]
        assert len(known) > 0.9 * len(audits[name]), name
        held = np.mean([each.low <= true <= each.high for each in known])
        assert 0.91 < held < 0.99, name  # of 250 audits


def test_no_signal_gives_an_interval_around_0_and_no_cosine() -> None:
    generator, above, cosines = np.random.default_rng(3), 0, 0
    for _ in range(200):
        pair = pair_of(drawn(0 * unit(0), 8.0, generator), drawn(unit(0), 4.0, generator))
        above += pair.own.has_signal
        cosines += math.isfinite(estimators.against_truth(pair)["cosine"].value)
    assert above == cosines <= 0.05 * 200


def test_pairing_by_minibatch_removes_shared_noise() -> None:
    generator = np.random.default_rng(4)
    own_MP = drawn(unit(0), 8.0, generator)
    other_MP = 0.9 * own_MP + 0.01 * generator.normal(size=own_MP.shape)
    one, two = (jackknife(of(each).squared_norm, GROUPS) for each in (own_MP, other_MP))
    apart = one - two
    assert apart.value == pytest.approx(one.value - two.value)
    assert apart.high - apart.low < 0.3 * (one.high - one.low)


def test_usefulness_ranks_a_flipped_sign_last() -> None:
    generator = np.random.default_rng(5)
    good_MP = drawn(unit(0), 4.0, generator)
    losses = {"good": good_MP, "flipped": -good_MP, "elsewhere": drawn(5 * unit(1), 4.0, generator)}
    reference_MP = drawn(unit(0), 4.0, generator)
    pairs = {name: pair_of(own_MP, reference_MP) for name, own_MP in losses.items()}
    useful = {name: estimators.against_truth(pair)["usefulness"].value for name, pair in pairs.items()}
    snr = {name: pair.own.snr(EVERY) for name, pair in pairs.items()}
    assert useful["good"] > useful["elsewhere"] > useful["flipped"]
    assert snr["flipped"] == pytest.approx(snr["good"])
    assert snr["elsewhere"] > 5 * snr["good"]


def test_zero_block_has_no_snr_and_no_interval() -> None:
    found = estimators.signal(of(np.zeros((MINIBATCHES, WEIGHTS))))
    assert found["squared_norm"].value == 0
    assert math.isnan(found["snr"].value)
    assert math.isnan(found["snr"].low)

"""Every algorithm against its equation, written once more as loops over scalars, and against its relatives."""

import math
from collections.abc import Callable

import pytest
import torch
from surrogates import LOSSES, run

from steadymoe.algorithms import Batch, load, names
from steadymoe.bench.check.batches import ADVANTAGES, GROUPS, LENGTHS, RESPONSES, TOKENS, ragged

# --- the equations, as loops -------------------------------------------------------------------------
# Each equation returns the objective of each token of one response and the derivative ∂J/∂log π of each token, before
# the aggregation's weights. Its arguments are r (the ratio to the old policy), u (the ratio to the sampler), the
# log-probabilities p and the advantage a; or the batch and the number of the response, for a loss that reads more.

Pair = tuple[list[float], list[float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, 1 - low), 1 + high)


def ppo(r: list[float], a: float, low: float, high: float, dual: float = math.inf) -> Pair:
    values, slopes = [], []
    for x in r:
        value, slope = min(x * a, clip(x, low, high) * a), x * a
        if (a > 0 and x > 1 + high) or (a < 0 and x < 1 - low):
            slope = 0.0
        if a < 0 and x > dual:
            value, slope = dual * a, 0.0
        values.append(value)
        slopes.append(slope)
    return values, slopes


def weighted(weights: list[float], a: float, p: list[float]) -> Pair:
    return [w * a * q for w, q in zip(weights, p, strict=True)], [w * a for w in weights]


def cispo(r: list[float], a: float, p: list[float], cap: float = 1.2) -> Pair:
    return weighted([min(x, cap) for x in r], a, p)


def gspo_token(r: list[float], a: float, low: float = 3e-4, high: float = 4e-4, width: float = 1.0) -> Pair:
    s = math.prod(r) ** (1 / len(r))
    values, slopes = ppo([s], a, low * width, high * width)
    return values * len(r), slopes * len(r)


def sapo(r: list[float], a: float) -> Pair:
    tau = 1.0 if a > 0 else 1.05
    values = [4 / tau / (1 + math.exp(-tau * (x - 1))) * a for x in r]
    return values, [x / math.cosh(tau * (x - 1) / 2) ** 2 * a for x in r]


def minirl(r: list[float], u: list[float], a: float, p: list[float], cap: float) -> Pair:
    masked = [(a > 0 and x > 1.27) or (a < 0 and x < 0.8) for x in r]
    return weighted([0.0 if gone else min(x, cap) for gone, x in zip(masked, u, strict=True)], a, p)


def vespo(r: list[float], a: float, p: list[float]) -> Pair:
    c1, c2 = (2.0, 3.0) if a > 0 else (3.0, 2.0)
    w = math.prod(r)
    return weighted([w**c1 * math.exp(c2 * (1 - w))] * len(p), a, p)


def gmpo(r: list[float], a: float) -> Pair:
    logs = [math.log(x) for x in r]
    kept = [min(x, 0.4) if a > 0 else max(x, -0.4) if a < 0 else x for x in logs]
    value = math.exp(sum(kept) / len(r)) * a
    return [value] * len(r), [value if x == y else 0.0 for x, y in zip(logs, kept, strict=True)]


def of_row(batch: Batch, name: str, i: int) -> list[float]:
    return batch.get(name)[i, : LENGTHS[i]].tolist()


def ratios(batch: Batch, i: int, anchor: str = "old") -> list[float]:
    new, old = of_row(batch, "logprobs_BT", i), of_row(batch, f"{anchor}_logprobs_BT", i)
    return [math.exp(x - y) for x, y in zip(new, old, strict=True)]


def aspo(r: list[float], a: float) -> Pair:
    values, slopes = [], []
    for x in r:
        masked = (a > 0 and x > 1.2) or (a < 0 and x < 0.8)
        edge = 1.2 if a > 0 else 0.8
        weight = min((1 / edge if a > 0 else edge) if masked else (1 / x if a > 0 else x), 3.0)
        values.append(weight * a)
        slopes.append(0.0 if masked else weight * a)
    return values, slopes


def topr(r: list[float], a: float, p: list[float]) -> Pair:
    return weighted([1.0 if a > 0 else min(math.prod(r), 1.0)] * len(p), a, p)


def fspo(r: list[float], a: float, dual: float = math.inf) -> Pair:
    if a < 0 and math.prod(r) > dual:
        return [dual * a / len(r)] * len(r), [0.0] * len(r)
    total, edge = sum(math.log(x) for x in r), 0.03 * math.sqrt(len(r))
    value = min(math.exp(total) * a, math.exp(min(max(total, -edge), edge)) * a)
    cut = (a > 0 and total > edge) or (a < 0 and total < -edge)
    return [value / len(r)] * len(r), [0.0 if cut else math.exp(total) * a] * len(r)


def times_least_before(r: list[float]) -> list[float]:
    return [min(r[:t], default=1.0) * x for t, x in enumerate(r)]


def dppo(u: list[float], p: list[float], a: float, kind: str, delta: float) -> Pair:
    kept = []
    for x, q in zip(u, p, strict=True):
        pi, mu = math.exp(q), math.exp(q) / x
        far = abs(pi - mu)
        if kind == "kl":
            far = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        kept.append(0.0 if far > delta and a * (x - 1) > 0 else x * a)
    return kept, kept


def opsm(batch: Batch, i: int) -> Pair:
    r, a = ratios(batch, i), ADVANTAGES[i]
    moved = sum(-math.log(x) for x in ratios(batch, i, "rollout")) / LENGTHS[i]
    return ([0.0] * LENGTHS[i],) * 2 if a < 0 and moved > 0.5 else ppo(r, a, 0.2, 0.2)


def shifted(batch: Batch, i: int) -> list[float]:
    """The products r γ̃ of the tokens of a response."""
    gammas = []
    for t in range(LENGTHS[i]):
        shift_LK = batch.get("router_log_ratio_LBTK")[:, i, t]
        gammas.append(max(math.exp(-sum(abs(x) for x in shift_LK.flatten().tolist()) / shift_LK.numel()), 0.8))
    return [x * gamma for x, gamma in zip(ratios(batch, i), gammas, strict=True)]


def gepo(batch: Batch, i: int) -> Pair:
    def likelihood(name: str, j: int) -> float:
        return math.exp(sum(of_row(batch, name, j)) / LENGTHS[j])

    group = [likelihood("rollout_logprobs_BT", j) for j in range(RESPONSES) if GROUPS[j] == GROUPS[i]]
    expected = sum(q * q for q in group) / sum(group)
    values, slopes = ppo([likelihood("logprobs_BT", i) / expected], ADVANTAGES[i], 0.2, 0.2)
    return values * LENGTHS[i], slopes * LENGTHS[i]


def trm(batch: Batch, i: int) -> Pair:
    largest = 0.0
    for t in range(LENGTHS[i]):
        mu = [math.exp(x) for x in batch.get("rollout_top_logprobs_BTK")[i, t].tolist()]
        pi = [math.exp(x) for x in batch.get("top_logprobs_BTK")[i, t].tolist()]
        if mu[2] == 0:
            mu, pi = mu[:2], pi[:2]
        mu, pi = [*mu, 1 - sum(mu)], [*pi, 1 - sum(pi)]
        largest = max(largest, sum(x * math.log(x / y) for x, y in zip(mu, pi, strict=True)))
    kept = [0.0 if largest > 0.05 else x * ADVANTAGES[i] for x in ratios(batch, i, "rollout")]
    return kept, kept


def centred(batch: Batch, i: int, weight: Callable[[float], float]) -> Pair:
    """The head is two tokens and the sampled one, unless it is listed twice; the rest of both policies is the tail."""
    values, slopes, a = [], [], ADVANTAGES[i]
    for t, u in enumerate(ratios(batch, i, "rollout")):
        mu = [math.exp(x) for x in batch.get("rollout_top_logprobs_BTK")[i, t].tolist()]
        pi = [math.exp(x) for x in batch.get("top_logprobs_BTK")[i, t].tolist()]
        head = [(q, x) for q, x in zip(mu, pi, strict=True) if q > 0]
        rho = (1 - sum(q for q, _ in head)) / (1 - sum(x for _, x in head))
        alpha = rho * weight(1 / rho)
        mean = sum((q * weight(x / q) - alpha * x) * math.log(x) for q, x in head)
        values.append(a * (weight(u) * batch.logprobs_BT[i, t].item() - mean))
        slopes.append(a * weight(u))
    return values, slopes


def m2po(batch: Batch, i: int) -> Pair:
    region = {
        (j, t): math.log(x) ** 2
        for j in range(RESPONSES)
        for t, x in enumerate(ratios(batch, j))
        if ADVANTAGES[j] * (x - 1) > 0
    }
    dropped = set()
    while region and sum(region.values()) / len(region) > 0.04:
        furthest = max(region, key=region.__getitem__)
        dropped.add(furthest)
        del region[furthest]
    kept = [0.0 if (i, t) in dropped else x * ADVANTAGES[i] for t, x in enumerate(ratios(batch, i))]
    return kept, kept


def r2vpo(r: list[float], a: float, weight: float, bound: float) -> Pair:
    return [x * a - weight * ((x - 1) ** 2 - bound) for x in r], [x * a - 2 * weight * (x - 1) * x for x in r]


def dis(u: list[float], a: float, p: list[float], low: float, high: float) -> Pair:
    return weighted([x if 1 - low < x < 1 + high else 0.0 for x in u], a, p)


def ipo(u: list[float], a: float, p: list[float], epsilon: float, tau: float) -> Pair:
    values, slopes = [], []
    for x, q in zip(u, p, strict=True):
        kept = x * a if abs(math.exp(q) - math.exp(q) / x) <= epsilon else 0.0
        values.append(kept - tau * math.log(x) ** 2)
        slopes.append(kept - 2 * tau * math.log(x))
    return values, slopes


def mis_po(batch: Batch, i: int) -> Pair:
    old, mu = of_row(batch, "old_logprobs_BT", i), of_row(batch, "rollout_logprobs_BT", i)
    xs = [math.exp(y - z) for y, z in zip(old, mu, strict=True)]
    kept = 0.996 <= math.prod(xs) ** (1 / len(xs)) <= 1.001
    return weighted([float(kept and 0.5 <= x <= 2) for x in xs], ADVANTAGES[i], of_row(batch, "logprobs_BT", i))


def sat(batch: Batch, i: int, whole: bool) -> Pair:
    """``whole`` is GSPO's ratio, one for a response."""
    rows = [ratios(batch, j, "rollout") for j in range(RESPONSES)]
    rows = [[math.prod(r) ** (1 / len(r))] * len(r) for r in rows] if whole else rows
    moved = sorted(abs(math.log(x)) for r in rows for x in r)
    place = 0.9 * (TOKENS - 1)
    u = moved[int(place)] + (place - int(place)) * (moved[int(place) + 1] - moved[int(place)])
    values, slopes = [], []
    for x in rows[i]:
        d = math.log(x)
        narrow = 0.2 / (1 + (d / u) ** 2)
        value, slope = ppo([x], ADVANTAGES[i], narrow if d < -u else 0.2, narrow if d > u else 0.2)
        values += value
        slopes += slope
    return values, slopes


def up(r: list[float], a: float, host: Pair) -> Pair:
    return ([a] * len(r), [a] * len(r)) if a > 0 else host


def cppo(u: list[float], p: list[float], a: float) -> Pair:
    kept, total, weights = [], 0.0, 0.0
    for t, (x, q) in enumerate(zip(u, p, strict=True)):
        w = 1 - 0.2 * t / max(len(u) - 1, 1)
        moved = w * abs(math.exp(q) - math.exp(q) / x)
        masked = a * (x - 1) > 0 and moved > min(0.2, 0.2 + 0.02 * weights - total)
        kept.append(0.0 if masked else x * a)
        total, weights = total + moved, weights + w
    return kept, kept


def flash_reinforce(u: list[float], p: list[float], a: float) -> Pair:
    kl = 0.0
    for x, q in zip(u, p, strict=True):
        pi, mu = math.exp(q), math.exp(q) / x
        kl += (mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))) / len(u)
    return weighted([x if kl <= 3e-3 else 0.0 for x in u], a, p)


def by_response(T: int) -> float:
    """The weight of a token in a response of T tokens, for a mean over responses of means over tokens."""
    return 1 / T / RESPONSES


def by_token(T: int) -> float:
    return 1 / TOKENS


def by_sum(T: int) -> float:
    return 1 / RESPONSES


# name → (the equation of one response, the weight of its tokens)
EQUATIONS: dict[str, tuple[Callable[..., Pair], Callable[[int], float]]] = {
    "reinforce": (lambda r, u, a, p: ([a * q for q in p], [a] * len(p)), by_response),
    "rloo": (lambda r, u, a, p: ([a * q for q in p], [a] * len(p)), by_sum),
    "grpo": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), by_response),
    "grpo_unclipped": (lambda r, u, a, p: ppo(r, a, math.inf, math.inf), by_response),
    "ppo_clip": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), by_token),
    "reinforce_pp": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), by_token),
    "reinforce_pp_baseline": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), by_token),
    "lite_ppo": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), by_token),
    "dapo": (lambda r, u, a, p: ppo(r, a, 0.2, 0.28), by_token),
    "dr_grpo": (lambda r, u, a, p: ppo(r, a, 0.2, 0.2), lambda T: 1 / 10 / RESPONSES),
    "cispo": (lambda r, u, a, p: cispo(r, a, p), by_token),
    "gspo": (lambda r, u, a, p: gspo_token(r, a), by_response),
    "gspo_token": (lambda r, u, a, p: gspo_token(r, a), by_response),
    "gspo_scaled": (lambda r, u, a, p: gspo_token(r, a, width=math.sqrt(4096 / len(r))), by_response),
    # The whole term of a response, T_i s_i, has the gradient T_i (s_i/T_i): s_i on every token.
    "luspo": (lambda r, u, a, p: ppo([math.prod(r) ** (1 / len(r))] * len(r), a, 2e-3, 2.5e-3), by_sum),
    "gmpo": (lambda r, u, a, p: gmpo(r, a), by_response),
    "sapo": (lambda r, u, a, p: sapo(r, a), by_response),
    "minirl": (lambda r, u, a, p: minirl(r, u, a, p, 5.0), by_sum),
    "vespo": (lambda r, u, a, p: vespo(r, a, p), by_token),
    "dppo": (lambda r, u, a, p: dppo(u, p, a, "tv", 0.2), by_sum),
    "dppo_kl": (lambda r, u, a, p: dppo(u, p, a, "kl", 0.05), by_sum),
    "rspo": (lambda batch, i: gmpo(shifted(batch, i), ADVANTAGES[i]), by_response),
    "rspo_grpo": (lambda batch, i: ppo(shifted(batch, i), ADVANTAGES[i], 0.2, 0.2), by_response),
    "rspo_gspo": (lambda batch, i: gspo_token(shifted(batch, i), ADVANTAGES[i]), by_response),
    "opsm": (opsm, by_response),
    "topr": (lambda r, u, a, p: topr(r, a, p), by_response),
    "aspo": (lambda r, u, a, p: aspo(r, a), by_token),
    "fspo": (lambda r, u, a, p: fspo(r, a), by_sum),
    "gepo": (gepo, by_response),
    "trm": (trm, by_sum),
    "m2po": (m2po, by_token),
    "r2vpo": (lambda r, u, a, p: r2vpo(r, a, 1.0, 0.04), by_token),
    "minpro": (lambda r, u, a, p: cispo(times_least_before(r), a, p), by_token),
    "score_centering": (lambda batch, i: centred(batch, i, lambda x: 1.0), by_token),
    "score_centering_tis": (lambda batch, i: centred(batch, i, lambda x: min(x, 2.0)), by_token),
    "score_centering_mis": (lambda batch, i: centred(batch, i, lambda x: x if 0.5 <= x <= 5 else 0.0), by_token),
    "dis": (lambda r, u, a, p: dis(u, a, p, 0.3, 5.0), by_token),
    "dis_code": (lambda r, u, a, p: dis(u, a, p, 0.8, 3.0), by_token),
    "icepop": (lambda r, u, a, p: ([x * a if 0.2 <= x <= 5 else 0.0 for x in u],) * 2, by_token),
    "ipo": (lambda r, u, a, p: ipo(u, a, p, 0.3, 0.0), by_token),
    "mis_po": (mis_po, by_token),
    "sat": (lambda batch, i: sat(batch, i, False), by_response),
    "sat_gspo": (lambda batch, i: sat(batch, i, True), by_response),
    "up_grpo": (lambda r, u, a, p: up(r, a, ppo(r, a, 0.2, 0.2)), by_response),
    "up_gspo": (lambda r, u, a, p: up(r, a, gspo_token(r, a)), by_response),
    "cppo": (lambda r, u, a, p: cppo(u, p, a), by_sum),
    "flash_reinforce": (lambda r, u, a, p: flash_reinforce(u, p, a), by_response),
    "r2vpo_fixed": (lambda r, u, a, p: r2vpo(r, a, 0.04, 0.0), by_token),
    "fspo_dual_clip": (lambda r, u, a, p: fspo(r, a, dual=3.0), by_sum),
    # Presets whose equation no peer's oracle records.
    "cispo@nemo-rl-0.7": (lambda r, u, a, p: cispo(r, a, p, 6.0), by_token),
    "gspo@nemo-rl-0.6": (lambda r, u, a, p: gspo_token(r, a, 0.2, 0.2), by_response),
    "reinforce_pp_baseline@nemo-rl-prorl-2.1": (lambda r, u, a, p: ([a * q for q in p], [a] * len(p)), by_token),
    "ipo@prime-rl-3418": (lambda r, u, a, p: ipo(u, a, p, 0.1, 1e-3), by_token),
    "minpro@xorl": (lambda r, u, a, p: ppo(times_least_before(r), a, 0.2, 0.28), by_token),
    "topr@roll": (lambda r, u, a, p: weighted([1.0 if a > 0 else min(x, 1.0) for x in r], a, p), by_response),
    "topr@verl-6986": (lambda r, u, a, p: topr([math.prod(r) ** (1 / len(r))], a, p), by_response),
}
WITHOUT_CLIP = {"reinforce", "rloo", "grpo_unclipped", "sapo", "vespo", "r2vpo", "score_centering", "r2vpo_fixed"}
WITHOUT_CLIP |= {"reinforce_pp_baseline@nemo-rl-prorl-2.1"}
CAPPED = {"cispo", "minpro", "topr", "score_centering_tis", "topr@roll", "topr@verl-6986"}
CAPPED |= {"ipo@prime-rl-3418", "cispo@nemo-rl-0.7"}  # of IPO the weight is bounded, the gradient stays
# Nothing is beyond the edge of these where log-ratios are about 0.4.
FAR = {"dppo", "dppo_kl", "minpro", "score_centering_tis", "score_centering_mis", "icepop", "ipo", "cppo"}
FAR |= {"cispo@nemo-rl-0.7", "minpro@xorl", "dis_code", "ipo@prime-rl-3418"}


@pytest.mark.parametrize("scale", [0.0005, 0.02, 0.4, 1.5], ids=lambda scale: f"log-ratios of {scale}")
@pytest.mark.parametrize("name", sorted({*names(), *EQUATIONS}))
def test_value_and_gradient_match_the_equation(name: str, scale: float) -> None:
    equation, weight = EQUATIONS[name]
    batch = ragged(scale)
    loss, grad_BT, _ = run(load(name), batch)
    expected, expected_grad_BT = 0.0, torch.zeros_like(grad_BT)
    for i, length in enumerate(LENGTHS):
        r, u, p = ratios(batch, i), ratios(batch, i, "rollout"), of_row(batch, "logprobs_BT", i)
        whole = equation.__code__.co_argcount == 2
        values, slopes = equation(batch, i) if whole else equation(r, u, ADVANTAGES[i], p)
        expected -= weight(length) * sum(values)
        expected_grad_BT[i, :length] = -weight(length) * torch.tensor(slopes, dtype=torch.float64)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(grad_BT, expected_grad_BT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("host", ["grpo", "gspo"])
def test_up_marks_only_bad_responses_as_its_host_does(host: str) -> None:
    (_, _, found), (_, _, of_host) = (run(load(name), ragged(0.4)) for name in (f"up_{host}", host))
    assert not found.metrics["clipped_high_BT"].any()
    assert torch.equal(found.metrics["clipped_low_BT"], of_host.metrics["clipped_low_BT"])


def test_every_preset_is_compared_with_a_peer_or_with_its_equation() -> None:
    peers = {name for name, _ in LOSSES.values()}
    assert {name for name in names(presets=True) if "@" in name} <= peers | set(EQUATIONS)


@pytest.mark.parametrize("name", EQUATIONS)
def test_marks_match_tokens_without_gradient_or_with_capped_weight(name: str) -> None:
    batch = ragged(1.5 if name in FAR else 0.4)
    _, grad_BT, output = run(load(name), batch)
    assert ("clipped_low_BT" not in output.metrics) == (name in WITHOUT_CLIP)
    if name in WITHOUT_CLIP:
        return
    low_BT, high_BT = output.metrics["clipped_low_BT"], output.metrics["clipped_high_BT"]
    assert low_BT.shape == high_BT.shape == batch.mask_BT.shape
    assert not ((low_BT | high_BT) & ~batch.mask_BT.bool()).any()
    assert (low_BT | high_BT).any()
    if name in CAPPED:
        if name == "cispo":
            ratio_BT = (batch.logprobs_BT - batch.get("old_logprobs_BT")).exp()
            assert torch.equal(high_BT, (ratio_BT > 1.2) & batch.mask_BT.bool())
        return
    alive_BT = batch.mask_BT.bool() & (batch.advantages_BT != 0)
    assert torch.equal((low_BT | high_BT) & alive_BT, (grad_BT == 0) & alive_BT)


# --- relatives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_class_defaults_match_the_yaml(name: str) -> None:
    loss = load(name)
    if type(loss).__module__.endswith(f".{name}"):  # not a variant, the same class with other numbers
        assert type(loss)() == loss

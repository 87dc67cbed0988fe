"""Advantages from the rewards of a rollout. Shapes: P prompts, G responses to each prompt, O = G − 1 of the others.

An advantage is a class. Its object is called with the rewards of the responses and with their lengths in tokens, both
(P, G), and returns the advantages of the responses, (P, G).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupMean:
    """Â_i = r_i − mean_G, without the standard deviation: Dr. GRPO (2503.20783), MiniRL (2512.01374)."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards."""
        return _centred(rewards_PG)


@dataclass(frozen=True)
class LeaveOneOut:
    """Â_i = r_i − mean of the other G − 1 rewards: RLOO (2402.14740); G/(G − 1) times ``GroupMean``."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards; G must be at least 2."""
        responses = rewards_PG.shape[1]
        return _centred(rewards_PG) * responses / (responses - 1)


@dataclass(frozen=True)
class _Divided:
    """An advantage that is divided by a deviation; ``epsilon`` keeps the quotient finite."""

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon keeps a group of equal rewards finite, epsilon > 0; got {self.epsilon}")


@dataclass(frozen=True)
class GroupMeanStd(_Divided):
    """Â_i = (r_i − mean_G) / (std_G + ε): GRPO (2402.03300, section 4.1.2), GSPO (2507.18071, eq. 6).

    The standard deviation is the sample standard deviation (divisor G − 1), as in TRL and verl; neither paper names a
    divisor. A group whose rewards are all equal has advantage 0: it carries no signal.
    """

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards; G must be at least 2."""
        return _centred(rewards_PG) / (_above_lowest(rewards_PG).std(-1, keepdim=True) + self.epsilon)


@dataclass(frozen=True)
class LeaveOneOutStd(_Divided):
    """Â_i = (r_i − b_i) / (std_i + ε): NeMo-RL's default.

    b_i and std_i are the mean and the standard deviation of the other G − 1 rewards. If the other rewards are all
    equal, the difference is not divided, as in NeMo-RL.
    """

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Raises ValueError for fewer than 3 responses: a single other reward has no standard deviation."""
        responses = rewards_PG.shape[1]
        if responses < 3:
            raise ValueError("LeaveOneOutStd needs at least 3 responses to a prompt")
        others_GG = ~torch.eye(responses, dtype=torch.bool, device=rewards_PG.device)
        others_PGO = rewards_PG[:, None].expand(-1, responses, -1)[:, others_GG].view(*rewards_PG.shape, -1)
        difference_PG = (rewards_PG[..., None] - others_PGO).mean(-1)
        std_PG = _above_lowest(others_PGO).std(-1)  # exactly 0 for equal rewards
        return torch.where(std_PG > 0, difference_PG / (std_PG + self.epsilon), difference_PG)


@dataclass(frozen=True)
class GroupMeanBatchStd(_Divided):
    """Â_i = (r_i − mean_G) / (std + ε), std over all rewards of the rollout: LitePPO (2508.08221)."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards."""
        return _centred(rewards_PG) / (_above_lowest(rewards_PG.flatten()).std() + self.epsilon)


@dataclass(frozen=True)
class BatchWhitened(_Divided):
    """Â = (x − mean) / √(var + ε), over all response tokens of the rollout: REINFORCE++ (2501.03262).

    x is the reward, or with ``subtract_group_mean`` the reward minus the mean of its group (REINFORCE++-baseline).
    Mean and variance count a response once for each of its tokens, as in verl and NeMo-RL; the variance is the
    sample variance, as in verl. The equation was read in the code of verl and NeMo-RL, not in the paper.
    """

    subtract_group_mean: bool = False
    epsilon: float = 1e-8

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 if all rewards of the rollout are equal; a group of equal rewards may have an advantage."""
        values_PG = _centred(rewards_PG) if self.subtract_group_mean else rewards_PG - rewards_PG.min()
        tokens = lengths_PG.sum()
        centred_PG = values_PG - (values_PG * lengths_PG).sum() / tokens.clamp(min=1)
        return centred_PG * self._square((centred_PG.square() * lengths_PG).sum(), tokens).rsqrt()

    def _square(self, squares: Tensor, tokens: Tensor) -> Tensor:
        """Return the square of the divisor, from the sum of the squared deviations of all tokens."""
        return squares / (tokens - 1).clamp(min=1) + self.epsilon


@dataclass(frozen=True)
class BatchWhitenedPopulation(BatchWhitened):
    """Â = (x − mean) / √max(var, ε), where var is the population variance: ``BatchWhitened`` as NeMo-RL computes it.

    NeMo-RL 0.7, nemo_rl/algorithms/advantage_estimator.py, ReinforcePlusPlusAdvantageEstimator.
    """

    def _square(self, squares: Tensor, tokens: Tensor) -> Tensor:
        return (squares / tokens.clamp(min=1)).clamp(min=self.epsilon)


@dataclass(frozen=True)
class PlusMinus:
    """Â = 2 r − 1, without a baseline: turns a score of 0 or 1 into TOPR's reward of ±1 (2503.14286)."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """A group of equal rewards has an advantage here."""
        return 2 * rewards_PG - 1


@dataclass(frozen=True)
class PlusMinusMixed(PlusMinus):
    """``PlusMinus`` in groups of unequal rewards, 0 in the others: it separates their signal from the signs."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """Exactly 0 in a group of equal rewards."""
        mixed_P1 = rewards_PG.amax(-1, keepdim=True) > rewards_PG.amin(-1, keepdim=True)
        return super().__call__(rewards_PG, lengths_PG) * mixed_P1


@dataclass(frozen=True)
class Reward:
    """Â = r, without a baseline: with rewards of 0 and 1 a response is made likelier or left alone."""

    def __call__(self, rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
        """0 for a reward of 0 only."""
        return rewards_PG.clone()


def _centred(rewards_PG: Tensor) -> Tensor:
    """r_i − mean_G; exactly 0 for equal rewards."""
    above_PG = _above_lowest(rewards_PG)
    return above_PG - above_PG.mean(-1, keepdim=True)


def _above_lowest(rewards: Tensor) -> Tensor:
    """Return rewards less the lowest one along the last dimension, which changes no difference and no deviation.

    Rounding is then relative to the spread of the rewards, not to their size: the mean of equal rewards can miss them
    by a rounding error, which a division by ε magnifies.
    """
    return rewards - rewards.amin(-1, keepdim=True)

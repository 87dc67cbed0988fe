"""Advantages from the rewards of a rollout. Shapes: P prompts, G responses to each."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupMean:
    """Â_i = r_i − mean_G, without the standard deviation: Dr. GRPO (2503.20783), MiniRL (2512.01374)."""

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages of the same shape, (P, G); exactly 0 in a group of equal rewards."""
        return _centred(rewards_PG)


@dataclass(frozen=True)
class LeaveOneOut:
    """Â_i = r_i − mean of the other G − 1 rewards: RLOO (2402.14740); G/(G − 1) times ``GroupMean``."""

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages of the same shape, (P, G); G must be at least 2."""
        responses = rewards_PG.shape[1]
        return _centred(rewards_PG) * responses / (responses - 1)


@dataclass(frozen=True)
class GroupMeanStd:
    """Â_i = (r_i − mean_G) / (std_G + ε): GRPO (2402.03300, section 4.1.2), GSPO (2507.18071, eq. 6).

    The standard deviation is the sample one (divisor G − 1), as TRL and verl compute it; neither paper
    says which. A group whose rewards are all equal has advantage 0: it carries no signal.
    """

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon keeps a group of equal rewards finite, epsilon > 0; got {self.epsilon}")

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages of the same shape, (P, G); G must be at least 2."""
        return _centred(rewards_PG) / (rewards_PG.std(-1, keepdim=True) + self.epsilon)


def _centred(rewards_PG: Tensor) -> Tensor:
    """r_i − mean_G, exactly 0 for equal rewards: their mean can miss them by a rounding error, which 1/ε blows up."""
    equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(-1, keepdim=True)
    return (rewards_PG - rewards_PG.mean(-1, keepdim=True)).masked_fill(equal_P1, 0.0)

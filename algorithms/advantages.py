"""Advantages from the rewards of a rollout. Shapes: P prompts, G responses to each."""

from dataclasses import dataclass

from torch import Tensor


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
        centred_PG = rewards_PG - rewards_PG.mean(-1, keepdim=True)
        advantages_PG = centred_PG / (rewards_PG.std(-1, keepdim=True) + self.epsilon)
        # The mean of equal rewards can miss them by a rounding error, which 1/ε would blow up.
        equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(-1, keepdim=True)
        return advantages_PG.masked_fill(equal_P1, 0.0)

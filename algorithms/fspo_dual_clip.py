"""FSPO with a dual clip: the product ratio of a bad response is bounded from above too.

    J = mean_i max( FSPO's term, c Â_i ) where Â_i < 0,   FSPO's term where Â_i ≥ 0                (2509.09177)

Shaper: min-clip on log-ratios with a dual clip. Differs from ``fspo`` in c, and in the two sides of the band, which the
paper lets differ (``log_clip_low``, ``log_clip_high``).

Ours: c is a bound on the product ratio e^S, as PPO's dual clip (1912.09729, eq. 5); the paper's form and its numbers
were not seen.

Provenance: reconstruction (from the abstracts and a re-implementation, which has no dual clip).
"""

from dataclasses import dataclass

from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.fspo import FSPO


@dataclass(frozen=True, kw_only=True)
class FSPODualClip(FSPO):
    """Sequence-level clipped surrogate of the product ratio, with a bound on bad responses."""

    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dual_clip > 1:
            raise ValueError(f"dual_clip bounds a ratio from above, dual_clip > 1; got {self.dual_clip}")

    def surrogate(self, batch: Batch) -> Surrogate:
        """Return FSPO's terms; a bad response beyond the bound has no gradient and is marked as clipped above."""
        return self._terms(batch, self.dual_clip)

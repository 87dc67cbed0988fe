"""GRPO, group relative policy optimisation: the ratio of every token is clipped.

    J = mean_i (1/T_i) Σ_t min( w_{i,t} Â_{i,t}, clip(w_{i,t}, 1 − ε_low, 1 + ε_high) Â_{i,t} ),
    w_{i,t} = π_θ(y_{i,t}) / π_old(y_{i,t})      (2402.03300, eq. 3; without KL, 2507.18071, eq. 2)

Shaper: min-clip; its code is ``ClippedLoss.surrogate``. This class is ``ClippedLoss`` with its defaults: the token
ratio, the old policy in its denominator, a mean over each response, a band of 0.2. Differs from GSPO in the unit of the
ratio: each token has its own ratio and is clipped alone.

Left out: the KL term to a reference policy. It is a switch here (``algorithm.kl``); GSPO's paper leaves it out "for
brevity", and its first author says to turn it off (verl pull request 2775).

Provenance: paper.
"""

from dataclasses import dataclass

from steadymoe.algorithms.loss import ClippedLoss


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedLoss):
    """Token-level clipped surrogate, averaged over each response and then over responses."""

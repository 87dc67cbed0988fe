"""OPSM, off-policy sequence masking: a plug-in that drops bad responses if the policy has moved away from them.

    J = the host's J, without response i if Â_i < 0 and (1/T_i) Σ_t log μ(y_{i,t})/π_θ(y_{i,t}) > δ
    (DeepSeek-V3.2, according to TRL eq. 9; the equation was read in TRL's and slime's code, not in the report)

Shaper: sequence mask. Differs from the dual clip in its unit, a whole response. The denominators count all responses,
masked ones too.

Provenance: peer's code (TRL's and slime's). The report's equation, as others quote it, has this condition with π_old
instead of μ.
"""

from dataclasses import dataclass, field

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.grpo import GRPO
from steadymoe.algorithms.loss import HostedLoss, RatioLoss, check_positive, drop, one_of


@dataclass(frozen=True, kw_only=True)
class OPSM(HostedLoss):
    """``host`` without the masked responses; μ is the sampler for ``anchor`` rollout, the old policy for old."""

    anchor: str = "rollout"
    max_divergence: float = 0.5
    host: RatioLoss = field(default_factory=GRPO)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("anchor", self.anchor, ("old", "rollout"))
        check_positive(max_divergence=self.max_divergence)

    def surrogate(self, batch: Batch) -> Surrogate:
        """Return the host's surrogate, 0 on masked responses; their tokens are marked as clipped at the lower edge."""
        made = self.host.surrogate(batch)
        log_ratio_BT = ops.log_ratio(batch.logprobs_BT.detach(), batch.get(f"{self.anchor}_logprobs_BT"))
        far_B1 = -ops.sequence_log_ratio(log_ratio_BT, batch.mask_BT)[:, None] > self.max_divergence
        return drop(made, (batch.advantages_BT < 0) & far_B1)

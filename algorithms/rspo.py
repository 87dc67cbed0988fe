"""RSPO: a plug-in on another loss; tokens whose routing moved count less.

    γ_t = exp( −(1/L) Σ_l (1/K) Σ_{e ∈ old top-K} |log p_θ^l(e) − log p_old^l(e)| ),   γ̃ = sg[max(γ, γ_min)]
    before_clip: w̃_t = w_t γ̃_t goes through the host's clip and aggregation                  (2510.23027, v2 and ACL)
    after_clip: the host's objective times γ̃^{sgn Â}, in the unit of its ratio                 (2510.23027, v1)

p^l is the softmax of layer l's router. The paper puts the weight on GMPO; here ``host`` may be any loss with a ratio.
Shaper: router-shift weight. The equations were not read in the paper: v1 is from a digest, v2 from the abstract, γ
from an observer's code.

Left out: nothing known. The paper's γ_min is unknown (reviewers asked for it). Re-implementations differ: one
multiplies over layers (``layers``: product) and drops tokens below 0.7 (``drop_below``).

Provenance: reconstruction (from a digest, an abstract and an observer's code). A survey quotes the equations of v1:
they agree with this γ and ``after_clip`` on GMPO. The equations of v2, the default here, were not seen.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, Surrogate
from steadymoe.algorithms.gmpo import GMPO
from steadymoe.algorithms.loss import HostedLoss, RatioLoss, Traits, drop, one_of


@dataclass(frozen=True, kw_only=True)
class RSPO(HostedLoss):
    """Router-shift weight on the ratio, or on the objective, of ``host``."""

    form: str = "before_clip"
    gamma_min: float = 0.8
    layers: str = "mean"
    drop_below: float | None = None
    host: RatioLoss = field(default_factory=GMPO)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("form", self.form, ("before_clip", "after_clip"))
        one_of("layers", self.layers, ("mean", "product"))
        for name, value in (("gamma_min", self.gamma_min), ("drop_below", self.drop_below)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} bounds a weight from below, 0 < {name} <= 1; got {value}")

    @property
    def traits(self) -> Traits:
        """The traits of the host; the loss also reads the routers' log-ratios."""
        return replace(self.host.traits, routes=True)

    def surrogate(self, batch: Batch) -> Surrogate:
        """Return the host's surrogate, with γ̃ in its ratio or on its objective; a dropped token has no gradient."""
        gamma_BT = self.router_shift(batch)
        log_gamma_BT = gamma_BT.clamp(min=self.gamma_min).log() * batch.mask_BT
        if self.form == "before_clip":
            anchor = f"{self.host.anchor}_logprobs_BT"
            shifted: dict[str, Any] = {anchor: batch.get(anchor) - log_gamma_BT}
            made = self.host.surrogate(replace(batch, **shifted))
        else:
            made = self.host.surrogate(batch)
            log_weight_BT = log_gamma_BT * batch.advantages_BT.sign()
            weight_BT = ops.ratio(log_weight_BT, batch.mask_BT, self.host.unit)
            made = replace(made, values_BT=made.values_BT * weight_BT)
        if self.drop_below is None:
            return made
        return drop(made, gamma_BT < self.drop_below)

    def router_shift(self, batch: Batch) -> Tensor:
        """γ of each token before the floor γ_min, (B, T), without gradient; 1 for unchanged routing."""
        shift_LBT = batch.get("router_log_ratio_LBTK").detach().abs().mean(-1)
        return (-(shift_LBT.mean(0) if self.layers == "mean" else shift_LBT.sum(0))).exp()

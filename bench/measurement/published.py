"""What is published of real MoE models in reinforcement learning: ranges with their sources, as data.

A source gives one number or a range; ``low`` and ``high`` are then equal or its ends. A realism gate
(docs/calibration.md) widens a number that its source calls approximate, and is named here.
"""

import math
from dataclasses import dataclass

EXACT = "exact"


@dataclass(frozen=True)
class Published:
    """The published range of one quantity."""

    key: str
    """The key of the number that it stands beside: a reading of a calibration, or a realism gate."""
    low: float
    high: float
    source: str
    of: str | None = None
    """The case alone that it stands beside: an engine, a number of updates; None for every case of the key but
    ``EXACT``, the engine without a difference."""
    gate: str | None = None
    """The realism gate that the range belongs to."""

    def factor(self, ours: float) -> float:
        """``ours`` as a multiple of the nearer end of the range, and 1 within it; nan for nan."""
        if math.isnan(ours):
            return math.nan
        return ours / self.low if ours < self.low else ours / self.high if ours > self.high else 1.0

    def stands_beside(self, key: str, of: str) -> bool:
        """Whether this is the published range of a reading with this key and case."""
        return self.key == key and (of != EXACT if self.of is None else self.of == of)


def beside(key: str, of: str) -> Published | None:
    """The published range of a reading; of several the first, which is of this case alone; None if there is none."""
    found = [each for each in PUBLISHED if each.stands_beside(key, of)]
    return min(found, key=lambda each: each.of is None, default=None)


_R3 = "R3, 2510.11370"
# fmt: off
PUBLISHED = (
    Published("expert_change", 0.05, 0.15, "GSPO, 2507.18071, 5.3: about 10 %", of="per update", gate="R1"),
    Published("set_change", 0.231, 0.231, "2606.00395: 76.9 % of sets unchanged under GRPO", of="after 2 updates"),
    Published("token_change", 0.5, 1.0, "most, in words", of="per update", gate="R2"),
    Published("token_change", 0.5, 1.0, "most, in words", of="", gate="R2"),  # since the old policy, over all updates
    Published("margin_over_spread", 0.01, 0.02, "JustVugg/colibri #119: 0.011 GLM-5.2, 0.019 Qwen3.6-35B-A3B",
              gate="R6"),
    Published("set_disagreement", 0.05, 0.15, f"{_R3}: about 10 % of routers", gate="R3"),
    Published("token_disagreement", 0.94, 0.984, f"{_R3}: 94 %; streams-rollout-market: 98.4 %"),
    Published("top1_disagreement", 0.051, 0.051, "streams-rollout-market: fp8 beside bf16, 30B-A3B", of="fp8"),
    Published("kl_k3", 8.4e-4, 8.4e-4, f"{_R3}: one engine twice", of=EXACT),
    Published("kl_k3", 5e-4, 3e-3, f"{_R3}: 1.54e-3; MiMo-V2.6: 2.2e-3", gate="R3"),
    Published("f2", 6e-4, 9e-3, f"MiMo-V2.6, healthy; {_R3}: above 0.1 at collapse"),
    Published("routing_share", 0.5, 1.0, f"most, in words: GSPO, 2507.18071, 5.3; {_R3}", gate="R8"),
    Published("ratio_variance_over_dense", 2.4, 2.4, f"{_R3}: KL of sampler from trainer, 1.54e-3 over 6.4e-4",
              gate="R5"),
    Published("clip_share", 0.0005, 0.005, "GSPO, 2507.18071, figure 2: 0.0013", of="GRPO", gate="R4"),
    Published("clip_share", 0.1, 0.4, "GSPO, 2507.18071, figure 2: 0.15; verl #7356: 0.35 to 0.44", of="GSPO",
              gate="R4"),
    Published("ess", 0.70, 0.95, "AIS: 0.95, later 0.70"),
    Published("response_length", 1e2, 1e5, "VESPO: up to 16k; MiMo-V2.6: mean 68k to 103k", gate="R7"),
)
# fmt: on

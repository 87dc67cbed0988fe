"""The old policy, at the weights that sampled: computed by a forward of the trainer, or taken from the sampler."""

from dataclasses import dataclass, field

from torch import Tensor

from steadymoe.algorithms.parts import dimensions
from steadymoe.bench.training.sampling import Rollout

# A token is apart if its log-probabilities in sampler and trainer differ by more than this; the largest share of such
# tokens. A near tie of a router moves a few tokens apart, on a token of a prompt all its responses; a sampler that is
# not the trainer moves most.
_TOLERANCE, _FEW = 1e-4, 0.01


@dataclass(frozen=True)
class OldPolicy:
    """The training forward of a whole rollout at the weights that sampled it, and extra fields that losses read."""

    logprobs_BT: Tensor = field(metadata=dimensions("BT"))
    routes_LBFK: Tensor | None = field(metadata=dimensions("LBFK"))
    """The routers' own choice, whichever experts ran."""
    executed_LBFK: Tensor | None = field(metadata=dimensions("LBFK"))
    """The experts that ran: the routers' own choice, except under R3, PR², lagged and pinned routing."""
    router_logprobs_LBTE: Tensor | None = field(metadata=dimensions("LBTE"))
    router_inputs_LBTH: Tensor | None = field(metadata=dimensions("LBTH"))
    """The inputs of the routers, kept only for PR²."""
    top_logprobs_BTK: Tensor | None = field(metadata=dimensions("BTK"))
    reference_logprobs_BT: Tensor | None = field(metadata=dimensions("BT"))
    """Log-probabilities under the weights of the cold start."""


def as_sampled(rollout: Rollout, reference_logprobs_BT: Tensor | None) -> OldPolicy:
    """Return the old policy as a sampler with the trainer's weights and arithmetic saw it, without a forward.

    The ratio before the first update is then 1 up to rounding, not exactly 1.
    """
    return OldPolicy(
        logprobs_BT=rollout.logprobs_BT,
        routes_LBFK=rollout.routes_LBFK,
        executed_LBFK=rollout.routes_LBFK if rollout.pinned_LBFK is None else rollout.pinned_LBFK,
        router_logprobs_LBTE=rollout.router_logprobs_LBTE,
        router_inputs_LBTH=None,
        top_logprobs_BTK=rollout.top_logprobs_BTK,
        reference_logprobs_BT=reference_logprobs_BT,
    )


def check_sampler(rollout: Rollout, old: OldPolicy, responses: int, temperature: float = 1.0) -> None:
    """Raise RuntimeError unless the sampler and ``old``, a forward, agree on nearly all log-probabilities.

    The ``responses`` to one prompt stand together. Of several prompts, the one whose responses disagree most is left
    out. A ``temperature`` below 1 magnifies rounding.
    """
    mask_BT = rollout.sequences.response_mask_BT.bool()
    is_apart_BT = mask_BT & ~((rollout.logprobs_BT - old.logprobs_BT).abs() <= _TOLERANCE / min(temperature, 1.0))
    apart_P = is_apart_BT.view(-1, responses * is_apart_BT.shape[1]).sum(-1)
    apart = int(apart_P.sum() - apart_P.max() if len(apart_P) > 1 else apart_P.sum())
    share = apart / int(mask_BT.sum())
    if share > _FEW:
        raise RuntimeError(
            f"savings.reuse_sampler_logprobs: {share:.0%} of the tokens differ in log-probability between sampler "
            "and old policy; set it to null"
        )

"""The policy that sampled, as the trainer sees it: by a forward of its own, or taken from the sampler."""

from dataclasses import dataclass

from torch import Tensor

from steadymoe.bench.measurement import token_metrics
from steadymoe.bench.training.sampling import Rollout

# By how much the log-probabilities of the exact sampler may differ from the trainer's, on average.
_APART = 1e-4


@dataclass(frozen=True)
class OldPolicy:
    """The training forward of a whole rollout at the weights that sampled it, and what losses ask for beside it."""

    logprobs_BT: Tensor
    routes_LBFK: Tensor | None
    """The routers' own choice, whatever ran."""
    executed_LBFK: Tensor | None
    """The experts that ran: the routers' own choice, but under R3 and PR²."""
    router_logprobs_LBTE: Tensor | None
    router_inputs_LBTH: Tensor | None
    """Kept for PR² alone."""
    top_logprobs_BTK: Tensor | None
    reference_logprobs_BT: Tensor | None
    """Under the weights of the cold start."""


def as_sampled(made: Rollout, reference_logprobs_BT: Tensor | None) -> OldPolicy:
    """The old policy as the sampler saw it, without a forward: its weights and arithmetic were the trainer's.

    The ratio before the first update is then 1 but for rounding, and not exactly.
    """
    return OldPolicy(
        logprobs_BT=made.logprobs_BT,
        routes_LBFK=made.routes_LBFK,
        executed_LBFK=made.routes_LBFK,
        router_logprobs_LBTE=made.router_logprobs_LBTE,
        router_inputs_LBTH=None,
        top_logprobs_BTK=made.top_logprobs_BTK,
        reference_logprobs_BT=reference_logprobs_BT,
    )


def check_sampler(made: Rollout, old: OldPolicy) -> None:
    """Raise RuntimeError if the sampler is no stand-in for the old policy, whose forward ``old`` is."""
    apart = token_metrics.mean((made.logprobs_BT - old.logprobs_BT).abs(), made.sequences.response_mask_BT)
    if not apart <= _APART:
        raise RuntimeError(
            f"savings.sampler_as_old: the sampler's log-probabilities are {float(apart):.2g} from the old policy's on "
            "average; set it to null"
        )

"""Training forwards of the rows of a rollout, without work that need not be done (``savings`` of the config).

Shapes: B sequences of a rollout, M of them in one mini-batch, T response positions, F positions fed, L MoE layers, K
experts a token, H hidden, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms.objective import Objective
from steadymoe.bench import layout, metrics
from steadymoe.bench.layout import Layout
from steadymoe.bench.policy import Forward, Sequences, forward
from steadymoe.bench.rollout import Rollout
from steadymoe.models import build
from steadymoe.models.routing import NO_ROUTE, routers

# By how much log-probabilities may differ on average where they are computed in another order. A model that cannot
# share prompts is off by about 1.
_APART = {"fp32": 1e-4, "bf16": 5e-2}
# Replays under which the old policy's forward runs the experts that the updates' do, and by the same arithmetic.
_FORCED_ALIKE = ("none", "r3")


@dataclass(eq=False)
class Block:
    """Rows of a rollout that go through one forward together."""

    rows_M: Tensor
    loud: bool
    """Whether they have a gradient."""
    fed: Layout | None = None
    """How they are fed; made by their first forward."""


@dataclass(frozen=True)
class Part:
    """Rows of a rollout that go through one backward together, (M,) in all."""

    loud_M: Tensor
    """Those with a gradient."""
    silent_M: Tensor
    """Those whose advantage is 0: a forward without gradient is enough."""

    @property
    def rows_M(self) -> Tensor:
        """All, in the order in which they are computed."""
        return torch.cat([self.loud_M, self.silent_M])

    @cached_property
    def blocks(self) -> list[Block]:
        """Its forwards, the same for the old policy and for the update."""
        return [Block(rows, loud) for rows, loud in ((self.loud_M, True), (self.silent_M, False)) if len(rows)]


class Forwards:
    """How the rows of a rollout are fed to a model; ``config`` is a composed ``conf/config.yaml``."""

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any], objective: Objective) -> None:
        self.model, self.config, self.objective = model, config, objective
        self._active = build.size(model)["active_parameters"]
        self.unshared: str | None = "savings.share_prompts is off"
        """Why prompts are not shared; None where they are."""
        if config["savings"]["share_prompts"]:
            self.unshared = self._router_loss_refusal() or layout.refusal(model.config)

    @property
    def records_routes(self) -> bool:
        """Whether routes are needed: to be measured, replayed, or weighed by the loss."""
        replays = self.config["routing"]["replay"] != "none"
        router_losses = self._router_loss_refusal() is not None
        return self.config["measure"] == "all" or replays or router_losses or self.objective.traits.routes

    @torch.no_grad()
    def check_sharing(self, sequences: Sequences) -> None:
        """Compare log-probabilities with and without sharing, and share no prompts if they differ.

        Each sequence stands twice behind its prompt: what reached over from one response to the other would show.
        """
        if self.unshared is not None:
            return
        rows = torch.arange(min(len(sequences.tokens_BS), 4), device=sequences.tokens_BS.device).repeat(2)
        twice, precision = sequences.rows(rows), self.config["precision"]
        fed = layout.shared(twice.tokens_BS, twice.mask_BS, twice.response_width, rows)
        plain, shared = (forward(self.model, twice, precision, layout=each) for each in (None, fed))
        apart = metrics.mean((plain.logprobs_BT - shared.logprobs_BT).abs(), twice.response_mask_BT)
        if not apart <= _APART[precision]:
            self.unshared = f"log-probabilities would differ by {float(apart):.2g} on average"

    @torch.no_grad()
    def check_routers(self, sequences: Sequences) -> None:
        """Raise RuntimeError unless routers return the experts that they select, in that order.

        What is recorded where nothing is forced is what they return, and under replay what they select.
        """
        if not self.records_routes or not routers(self.model):
            return
        first = torch.arange(min(len(sequences.tokens_BS), 4), device=sequences.tokens_BS.device)
        few, precision = sequences.rows(first), self.config["precision"]
        free = forward(self.model, few, precision).routes_LBFK
        assert free is not None  # of a model with routers
        none_forced = torch.full_like(free, NO_ROUTE)
        selected = forward(self.model, few, precision, forced_LBFK=none_forced).routes_LBFK
        assert selected is not None
        if not torch.equal(free, selected):
            raise RuntimeError("a router returns other experts than it selects, or in another order")

    @property
    def skips_silent(self) -> bool:
        """Whether responses of advantage 0 need no backward: nothing but the advantage gives a gradient."""
        kl, routing = self.objective.kl, self.config["routing"]
        known = not (kl.coefficient > 0 and kl.place == "reward")  # advantages, before the old policy's forward
        nothing_else = self._router_loss_refusal() is None and routing["replay"] != "pr2"
        free = self.objective.traits.zero_advantage_is_free
        return bool(self.config["savings"]["skip_silent"] and known and nothing_else and free)

    def reuses_first(self, minibatch: list[Part]) -> bool:
        """Whether the old policy's first forward is the first update's too: no weight has changed between the two.

        Not where the mini-batch is computed in parts, whose graphs would all be kept, and not where updates force the
        routes that this forward finds.
        """
        whole = len(minibatch) == 1 and len(minibatch[0].loud_M) > 0
        return bool(
            self.config["savings"]["reuse_first"] and whole and self.config["routing"]["replay"] in _FORCED_ALIKE
        )

    def parts(self, rows_M: Tensor, silent_B: Tensor | None = None) -> list[Part]:
        """The micro-batches that a mini-batch is computed in; one for a loss that needs the whole.

        ``silent_B`` marks the rows of the rollout whose advantage is 0.
        """
        size = self.config["microbatch"]
        whole = size is None or self.objective.traits.whole_minibatch
        none_M = rows_M[:0]
        split = [rows_M] if whole else list(rows_M.split(size))
        if silent_B is None:
            return [Part(rows, none_M) for rows in split]
        return [Part(rows[~silent_B[rows]], rows[silent_B[rows]]) for rows in split]

    def __call__(
        self,
        model: PreTrainedModel,
        made: Rollout,
        block: Block,
        forced_LBFK: Tensor | None = None,
        heads_LHE: list[Tensor] | None = None,
    ) -> Forward:
        """The training forward of a block, with what the objective asks for and the experts forced or predicted."""
        rows = block.rows_M
        top_BTK = None if made.top_tokens_BTK is None else made.top_tokens_BTK[rows]
        entropy_gradient = torch.is_grad_enabled() and self.objective.entropy_bonus > 0
        forced_LBFK = None if forced_LBFK is None else forced_LBFK[:, rows]
        sequences, precision = made.sequences.rows(rows), self.config["precision"]
        if block.fed is None:
            block.fed = self.layout(sequences, rows // self.config["rollout"]["responses"])
        routes = self.records_routes
        return forward(
            model, sequences, precision, top_BTK, entropy_gradient, forced_LBFK, heads_LHE, block.fed, routes
        )

    def layout(self, sequences: Sequences, groups_B: Tensor) -> Layout:
        """How sequences are fed: with the prompt of a group computed once where that is right and cheaper."""
        numbers = sequences.tokens_BS, sequences.mask_BS, sequences.response_width
        trim = self.config["savings"]["trim_padding"]
        if self.unshared is None:
            extents = layout.extents(*numbers, groups_B, trim)
            if layout.is_cheaper(self.model.config, self._active, *extents):
                return layout.shared(*numbers, groups_B, trim=trim)
        return layout.separate(*numbers, trim=trim)

    def _router_loss_refusal(self) -> str | None:
        """A prompt that is computed once would count once among the tokens that router losses average over."""
        routing = self.config["routing"]
        return "router losses" if routing["aux_loss"] > 0 or routing["z_loss"] > 0 else None

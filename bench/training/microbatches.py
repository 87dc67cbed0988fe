"""Micro-batches, the parts of a mini-batch that fit into memory, and the training forward of one of them.

Shapes: B sequences of a rollout, M of them in one micro-batch, T response positions, F positions fed, L MoE layers, K
experts a token, H hidden, E experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.algorithms.objective import Objective
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.training import packing
from steadymoe.bench.training.forward import Extras, Forward, Sequences, forward, sharing_refusal
from steadymoe.bench.training.packing import Layout
from steadymoe.bench.training.sampling import Rollout
from steadymoe.models.routing import routers
from steadymoe.models.selection import NO_ROUTE


@dataclass(eq=False)
class MicroBatch:
    """Rows of a rollout, (M,), that go through one forward and one backward together."""

    rows_M: Tensor
    layout: Layout | None = None
    """How the rows are fed. Their first forward makes the layout; old policy and update then share it."""


class Forwards:
    """Feeds the rows of a rollout to a model."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, objective: Objective) -> None:
        self.model, self.config, self.objective = model, config, objective
        self.unshared: str | None = "savings.share_prompts is off"
        """The reason why prompts are not shared; None if they are shared."""
        if config.savings.share_prompts:
            self.unshared = self._router_loss_refusal() or sharing_refusal(model)

    @property
    def records_routes(self) -> bool:
        """Whether routes are needed: for measurements, replay, balancing, router losses, or a loss that reads them."""
        replays = self.config.routing.replay != "off"
        router_losses = self._router_loss_refusal() is not None
        balances = self.config.routing.bias_speed > 0
        return self.config.measure == "all" or replays or router_losses or balances or self.objective.traits.routes

    @torch.no_grad()
    def check_routers(self, sequences: Sequences) -> None:
        """Raise RuntimeError unless routers return the experts that they select, in the order of selection.

        Without replay the recorder stores what a router returns, under replay what it selects.
        """
        if not self.records_routes or not routers(self.model):
            return
        first = torch.arange(min(len(sequences.tokens_BS), 4), device=sequences.tokens_BS.device)
        few, precision = sequences.rows(first), self.config.precision
        free = forward(self.model, few, precision).routes_LBFK
        assert free is not None  # of a model with routers
        none_forced = torch.full_like(free, NO_ROUTE)
        selected = forward(self.model, few, precision, forced_LBFK=none_forced).routes_LBFK
        assert selected is not None
        if not torch.equal(free, selected):
            raise RuntimeError("a router returns experts other than those it selected, or in another order")

    def split(self, rows_M: Tensor) -> list[MicroBatch]:
        """Return the micro-batches of a mini-batch; a single one if the loss needs the whole mini-batch."""
        size = self.config.microbatch
        whole = size is None or self.objective.traits.whole_minibatch
        return [MicroBatch(rows) for rows in ([rows_M] if whole else rows_M.split(size))]

    def __call__(
        self,
        model: PreTrainedModel,
        rollout: Rollout,
        part: MicroBatch,
        forced_LBFK: Tensor | None = None,
        heads_LHE: list[Tensor] | None = None,
    ) -> Forward:
        """Return the training forward of a micro-batch, with the extra outputs that the objective reads.

        Forced routes have the sampler's gates if the rollout has them; ``heads_LHE`` predicts routes (PR²).
        """
        rows = part.rows_M
        extras = Extras(
            top_tokens_BTK=None if rollout.top_tokens_BTK is None else rollout.top_tokens_BTK[rows],
            entropy_gradient=torch.is_grad_enabled() and self.objective.entropy_bonus > 0,
            routes=self.records_routes,
            kept_BTV=None if rollout.kept_BTV is None else rollout.kept_BTV[rows],
            temperature=self.config.rollout.temperature,
        )
        gates_LBFK = None
        if forced_LBFK is not None:
            forced_LBFK = forced_LBFK[:, rows]
            gates_LBFK = None if rollout.gates_LBFK is None else rollout.gates_LBFK[:, rows]
        sequences, precision = rollout.sequences.rows(rows), self.config.precision
        share = self.config.routing.score_share
        if part.layout is None:
            part.layout = self.layout(sequences, rows // self.config.rollout.responses)
        return forward(model, sequences, precision, extras, forced_LBFK, heads_LHE, part.layout, gates_LBFK, share)

    def layout(self, sequences: Sequences, groups_B: Tensor) -> Layout:
        """Return how sequences are fed. A group's prompt is fed once if that is right and feeds fewer positions."""
        numbers = sequences.tokens_BS, sequences.mask_BS, sequences.response_width
        if self.unshared is None:
            apart, together = packing.extents(*numbers, groups_B, trim=True)
            if math.prod(together) < math.prod(apart):
                return packing.shared(*numbers, groups_B, trim=True)
        return packing.separate(*numbers, trim=True)

    def _router_loss_refusal(self) -> str | None:
        """Return the reason against sharing: router losses average over tokens, a shared prompt would count once."""
        routing = self.config.routing
        return "router losses" if routing.aux_loss > 0 or routing.z_loss > 0 else None

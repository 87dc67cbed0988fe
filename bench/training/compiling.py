"""Decoder layers compiled for a run, each of their graphs before the first step.

torch may write other code for a graph whose first sizes are others. Here the first sizes are always the same: neither a
run's draws, nor a run before it in the process, nor the cache of compiled code changes a bit of a run.

Shapes: B sequences, S positions of prompt and response, W width of the prompts, L MoE layers, F positions fed, K
experts a token.
"""

import sys
from functools import partial

import torch
from transformers import BatchEncoding

from steadymoe.bench.training import packing
from steadymoe.bench.training.forward import Extras, Sequences, forward
from steadymoe.bench.training.learner import Learner
from steadymoe.bench.training.sampling import Decoding, sample
from steadymoe.models import compiled

# Sequences and positions. All differ, since torch takes equal sizes for one size. More than 4096 numbers are added up
# in another way, by a graph of its own; a layer's sums run over positions times 1, experts a token, or heads. The
# products of the two sizes (65 to 5,627) lie on either side of 4096, 2048, 1024 and 512.
_SIZES = ((5, 13), (7, 53), (5, 149), (11, 131), (7, 331), (17, 331))
_RESPONSE = 5  # positions of a response


def compile_layers(learner: Learner) -> None:
    """Compile the layers of the learner's model, and run each graph that its run needs once at each of ``_SIZES``."""
    compiled.compile_layers(learner.model)
    try:
        _run_all(learner)
    except Exception as error:
        if not compiled.is_damage(error):
            raise
        print(f"steadymoe: compiled code cannot be used ({type(error).__name__}); compiling again", file=sys.stderr)
        compiled.set_aside()
        _run_all(learner)


def _run_all(learner: Learner) -> None:
    for sequences, positions in _SIZES:
        _run_graphs(learner, sequences, positions)


def _run_graphs(learner: Learner, count: int, positions: int) -> None:
    """The forwards of a run on made-up sequences: the sampler's, the old policy's, the probe's and the update's."""
    model, config = learner.model, learner.config
    tokens_BS = torch.arange(count * positions, device=model.device).view(count, -1) % model.config.vocab_size
    sequences = Sequences(tokens_BS, torch.ones_like(tokens_BS), _RESPONSE)
    prompts_BW = tokens_BS[:, :-_RESPONSE]
    encoded = BatchEncoding({"input_ids": prompts_BW, "attention_mask": torch.ones_like(prompts_BW)})
    generator = torch.Generator(model.device).manual_seed(0)
    recalls = config.routing.replay == "r3_gates"
    for gates in (False, True) if recalls else (False,):  # evaluation keeps none
        sample(model, encoded, 1, -1, 3, generator, Decoding(precision=config.precision, gates=gates))

    _run_forwards(learner, sequences, None)
    if learner.forwards.unshared is None:
        groups_B = torch.arange(count, device=model.device).repeat_interleave(2)
        twice = sequences.rows(groups_B)
        _run_forwards(learner, twice, packing.shared(twice.tokens_BS, twice.mask_BS, twice.response_width, groups_B))


def _run_forwards(learner: Learner, sequences: Sequences, layout: packing.Layout | None) -> None:
    """The forwards that a run makes of rows of this kind, and an update's backward."""
    config, extras = learner.config, Extras(routes=learner.forwards.records_routes)
    recalls = config.routing.replay == "r3_gates"
    run = partial(forward, learner.model, sequences, config.precision, extras, layout=layout)
    with torch.no_grad():
        routes_LBFK = run().routes_LBFK
        if learner.predictor is not None:
            run(heads_LHE=list(learner.predictor.heads_LHE))
        if routes_LBFK is not None:
            run(forced_LBFK=routes_LBFK)
        gates_LBFK = None if routes_LBFK is None or not recalls else torch.ones(routes_LBFK.shape)
        if gates_LBFK is not None:
            run(forced_LBFK=routes_LBFK, gates_LBFK=gates_LBFK)
    forced_LBFK = None if config.routing.replay == "none" else routes_LBFK
    run(forced_LBFK=forced_LBFK, gates_LBFK=gates_LBFK).logprobs_BT.sum().backward()
    learner.optimizer.zero_grad()

"""Lagged routing: experts of old weights, gates and gradients of today's; its trigger and its state.

Shapes: L MoE layers, M sequences of a mini-batch, F positions fed, N tokens of a forward, K experts a token, E experts.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import advantages, assert_resumes, begun, trainer
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.runs import record
from steadymoe.bench.training import checkpoint
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.snapshots import Lag

FAST = ["optimizer.learning_rate=1e-2", "updates_per_rollout=4", "minibatch_prompts=1", "updates=24"]


def columns_and_weights(made: Trainer, step: int = 1, lagged: bool | None = None) -> list[Tensor]:
    """Loss, gradient norm and all weights after each update of a step; the lag is switched on or off first."""
    if made.learner.lag is not None and lagged is not None:
        made.learner.lag._left = 64 if lagged else 0
    rollout, minibatches, old = begun(made, step)
    found = []
    for parts in minibatches:
        measured = made.learner.update(rollout, old, advantages(rollout), parts)
        found += [measured.overall["loss"], measured.overall["grad_norm"]]
        found += [weight.detach().clone() for weight in made.model.parameters()]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- which experts, which gates ----------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 3, 6])
@pytest.mark.parametrize(
    "words", [[], ["microbatch=3"], ["savings.share_prompts=false"], ["routing.bias_speed=0.02"]], ids=str
)
def test_updates_run_the_experts_chosen_by_lagged_weights(tmp_path: Path, words: list[str], lag: int) -> None:
    """In the old policy those of the rollout's first update; before the first updates those of the start."""
    made = trainer(tmp_path, "routing=lagged", f"routing.lag={lag}", *FAST, *words)
    forwards, history, seen = made.learner.forwards, [copy.deepcopy(made.model)], []

    def routes(age: int, rollout: Any, parts: Any) -> list[Tensor]:
        model = history[max(0, len(history) - 1 - age)]
        with torch.no_grad():
            return [forwards(model, rollout, part).routes_LBFK for part in parts]

    has_differed = False
    for step in (1, 2):
        rollout, minibatches, old = begun(made, step)
        for parts in minibatches:
            for part, lagged, own in zip(parts, routes(lag, rollout, parts), routes(0, rollout, parts), strict=True):
                if len(history) == 1 + 4 * (step - 1):
                    assert torch.equal(old.executed_LBFK[:, part.rows_M], lagged)
                    # Below the first layer the routers' inputs are those of other experts.
                    assert torch.equal(old.routes_LBFK[0, part.rows_M], own[0])
                forced_LBFK = made.learner.replayed(rollout, old, parts)
                assert torch.equal(forced_LBFK[:, part.rows_M], lagged)
                has_differed |= not torch.equal(lagged, own)
            measured = made.learner.update(rollout, old, advantages(rollout), parts).overall
            assert measured["replay_share"] == measured["routing_lagged"] == 1
            seen.append(float(measured["token_ratio_max"]))
            history.append(copy.deepcopy(made.model))
    assert has_differed
    assert seen[0] == seen[4] == 1 != seen[5], "the ratio is 1 before a rollout's first update"


def test_lag_of_a_whole_rollout_equals_r2_on_the_first_rollout(tmp_path: Path) -> None:
    """All updates of the first rollout are at most three from the start: to the bit R2's. A lag of 1 is not."""
    r2, long, short, off = (
        trainer(tmp_path, *words.split(), *FAST)
        for words in ("routing=r2", "routing=lagged routing.lag=3", "routing=lagged routing.lag=1", "routing=off")
    )
    first = columns_and_weights(r2)
    assert same(columns_and_weights(long), first)
    assert not same(columns_and_weights(short), first)
    assert not same(columns_and_weights(off), first)
    assert not same(columns_and_weights(long, 2), columns_and_weights(r2, 2))


def test_old_weights_are_loaded_only_inside_the_block(model: PreTrainedModel) -> None:
    lag, start = Lag(model, 2), copy.deepcopy(model).state_dict()
    for _ in range(3):
        lag.before_step(1.0)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 1
    now = {name: weight.clone() for name, weight in model.state_dict().items()}
    inside: dict[str, Tensor] = {}

    def looks_and_fails() -> None:
        with lag.old_weights():
            inside.update({name: weight.clone() for name, weight in model.state_dict().items()})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        looks_and_fails()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, now[name])
        assert_close(inside[name], start[name] + 1)  # of three updates the last two are undone
    assert len(lag._past.state()) == 2 * len(dict(model.named_parameters()))


# --- the trigger -------------------------------------------------------------------------------------


def test_a_spike_switches_the_lag_on_for_64_updates(model: PreTrainedModel) -> None:
    lag = Lag(model, 1, trigger=3.0)

    def switched(*norms: float) -> list[bool]:
        found = []
        for norm in norms:
            lag.before_step(norm)
            found.append(lag.is_on)
        return found

    assert switched(1, 9, 1, 9, 1, 1, 9, 1) == [False] * 8, "a median of seven calls nothing a spike"
    assert switched(3.0) == [False], "not above 3 × the median of 1"
    assert switched(3.1, *[1] * 64) == [True] * 64 + [False]
    assert switched(3.1, *[1] * 10, 4) == [True] * 12
    state = {name: value.clone() for name, value in lag.state().items()}
    # Of the last 64 norms two others and 29 of these are above 1: the thirtieth is the last spike.
    assert switched(*[5] * 110) == [True] * (29 + 64) + [False] * 17
    assert switched(15, 15.1) == [False, True]
    lag = Lag(model, 1, trigger=3.0)
    lag.load(state)
    assert switched(*[5] * 110) == [True] * (29 + 64) + [False] * 17


def test_trigger_switches_between_free_and_lagged_routing(tmp_path: Path) -> None:
    words = ["routing=lagged", "routing.lag=2", *FAST]
    never, always, off = (
        trainer(tmp_path, *more, *FAST) for more in ([*words, "routing.lag_trigger=1e9"], words, ["routing=off"])
    )
    assert same(columns_and_weights(never, lagged=False), columns_and_weights(off))
    columns_and_weights(always)
    for made in (never, always):
        checkpoint.save(tmp_path / "checkpoint.safetensors", always.learner, always.sampler, 1)
        checkpoint.load(tmp_path / "checkpoint.safetensors", made.learner, made.sampler)
    on = columns_and_weights(never, 2, lagged=True)
    assert same(on, columns_and_weights(always, 2))
    checkpoint.load(tmp_path / "checkpoint.safetensors", never.learner, never.sampler)
    assert not same(columns_and_weights(never, 2, lagged=False), on)


@pytest.mark.parametrize("trigger", ["null", "1.02"])
def test_stopped_run_resumes_with_old_weights_and_trigger_state(tmp_path: Path, trigger: str) -> None:
    words = ["routing=lagged", "routing.lag=6", f"routing.lag_trigger={trigger}", "routing.bias_speed=0.01"]
    whole = assert_resumes(tmp_path, 5, *words, *FAST, "optimizer.learning_rate=1e-3")
    lagged = record.read_table(whole.folder, "updates")["routing_lagged"]
    assert set(lagged) == ({1.0} if trigger == "null" else {0.0, 1.0})

"""Replay that is silently misaligned is told of: at the end of a run, by `steadymoe status` and in reports.

The faults are planted between sampling and training, where trainers had them: SkyRL #1908, verl #7340.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fixtures import Said
from small_runs import SMALL, sharing_starts, trainer

from steadymoe.bench.runs import outcome
from steadymoe.bench.training.probes import replay_columns
from steadymoe.bench.training.sampling import Rollout
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models.routing import RouteRecorder
from steadymoe.models.selection import NO_ROUTE

WORDS = [*SMALL, "updates=8", "probe.every=2", "probe.fraction=1.0", "minibatch_prompts=4"]
WORDS += ["cold_start.check_every=150", "model.config.num_experts=4", "engine=router_noise", "engine.strength=0.5"]


def shifted(rollout: Rollout, by: int) -> Rollout:
    """The rollout with the routes, and the gates if any, of a neighbouring token."""
    assert rollout.routes_LBFK is not None
    moved_LBFK = rollout.routes_LBFK.roll(by, 2)
    both = (rollout.routes_LBFK != NO_ROUTE) & (moved_LBFK != NO_ROUTE)
    gates = rollout.gates_LBFK
    return replace(
        rollout,
        routes_LBFK=torch.where(both, moved_LBFK, rollout.routes_LBFK),
        gates_LBFK=None if gates is None else torch.where(both, gates.roll(by, 2), gates),
    )


def of_other_layers(rollout: Rollout) -> Rollout:
    assert rollout.routes_LBFK is not None
    return replace(rollout, routes_LBFK=rollout.routes_LBFK.flip(0))


FAULTS: dict[str, Callable[[Rollout], Rollout]] = {
    "one token late": lambda rollout: shifted(rollout, 1),
    "one token early": lambda rollout: shifted(rollout, -1),
    "layers in another order": of_other_layers,
}


def planted(patch: pytest.MonkeyPatch, fault: Callable[[Rollout], Rollout]) -> None:
    sample = Trainer.sample

    def faulty(self: Trainer, step: int) -> Any:
        rollout, *others = sample(self, step)
        return (fault(rollout), *others)

    patch.setattr(Trainer, "sample", faulty)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("routing", "fault"),
    [("r3_gates", None), ("r3_gates", "one token late"), ("r3", None), *(("r3", fault) for fault in FAULTS)],
)
def test_misaligned_replay_is_reported_and_sound_replay_is_not(
    routing: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    if fault is not None:
        planted(monkeypatch, FAULTS[fault])
    with sharing_starts(tmp_path / "results"):
        at_the_end = ran("run", *WORDS, f"routing={routing}", "results_dir=results")
    assert "1 finished" in at_the_end
    for said in (at_the_end, ran("status")):
        assert ("replay is misaligned: " in said) == (fault is not None), said
    if fault == "one token late":
        assert "Replay is misaligned: " in ran("report", "--format", "svg")
        assert "Replay is misaligned: " in (tmp_path / "results" / "report.html").read_text()


def test_routers_that_ignore_forced_routes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    force = RouteRecorder.force

    def mixes_layers_up(self: RouteRecorder, routes_LNK: Any, *gates: Any) -> None:
        in_an_update = routes_LNK is not None and torch.is_grad_enabled()
        force(self, routes_LNK.flip(0) if in_an_update else routes_LNK, *gates)

    monkeypatch.setattr(RouteRecorder, "force", mixes_layers_up)
    monkeypatch.chdir(tmp_path)
    with sharing_starts(tmp_path / "results"):
        assert "of the routers ran the replayed experts" in ran("run", *WORDS, "routing=r2", "results_dir=results")


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("routing", ["r3", "r3_gates"])
def test_shifted_routes_fit_best_when_shifted_back(tmp_path: Path, routing: str, by: int) -> None:
    made = trainer(tmp_path, f"routing={routing}", "engine=router_noise", "engine.strength=0.2")
    rollout, _, _ = made.sample(1)
    for found, is_sound in ((rollout, True), (shifted(rollout, by), False)):
        old = made.learner.old_policy(found, made.minibatches(1))
        columns = replay_columns(made.model, found, old.logprobs_BT, rollout.logprobs_BT, "fp32")
        assert (columns["replay_kl"] < 0.5 * columns["replay_kl_shifted"]) == is_sound
        assert (columns["replay_kl"] > 2 * columns["replay_kl_shifted"]) == (not is_sound)
        assert columns["replay_kl_free"] == 0  # the sampler's own numbers


def test_misaligned_replay_rule() -> None:
    sound = pd.DataFrame({"replay_share": [1.0, 1.0], "replay_kl": [0.02, float("nan")]})
    sound = sound.assign(replay_kl_free=[0.3, float("nan")], replay_kl_shifted=[0.5, float("nan")])
    nothing = sound * float("nan")
    for steps in (sound, nothing, sound[:0], sound.assign(replay_kl_free=0.02)):  # an engine that moves no route
        assert outcome.misaligned(steps) is None
    rounding = sound.assign(replay_kl=4e-14, replay_kl_free=9e-15, replay_kl_shifted=9e-15)
    assert outcome.misaligned(rounding) is None
    for columns in ({"replay_share": 0.999}, {"replay_kl": 0.7}, {"replay_kl_shifted": 0.009}):
        assert outcome.misaligned(sound.assign(**columns)) is not None
    rows = [
        sound.assign(run=f"s{seed}", arm="a", seed=seed, replay_share=share) for seed, share in ((0, 1.0), (1, 0.5))
    ]
    wide = pd.concat(rows).set_index("run").reindex(columns=[*outcome.READ, "arm", "seed"])  # ``Results.wide``
    (line,) = outcome.findings_of_arms(wide)
    assert line == "replay is misaligned: a (seed 1): only 0.5000 of the routers ran the replayed experts"

"""Losses, presets, advantages and corrections against the numbers that TRL and verl compute, equal to rounding.

``make oracles`` recorded the numbers of these two peers; neither is needed here. The settings of each case in its peer
stand in ``tests/oracles/<peer>_surrogates.py``. The tables below give our name for each case and the changes with which
our numbers are equal. A preset needs no change.

Shapes: S batches, B responses, T response positions; groups of three responses.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from surrogates import LOSSES, Case, Ours
from torch import Tensor

from steadymoe import conf
from steadymoe.algorithms import Batch, build, load, names

ROOT = Path(__file__).parents[2]
FILES = {"trl": "trl-1.16", "verl": "verl-0.9"}
GROUP = 3


# The correction of the cases that have one, as in conf/correction.yaml, and what is changed in it.
CORRECTED: dict[Case, Ours] = {
    ("trl", "default_corrected"): ("mis_sequence", {"ratio_high": 3.0}),
    ("verl", "vanilla_corrected"): ("tis", {}),
    ("verl", "gspo_corrected"): ("tis", {}),
    ("verl", "dppo_tv_corrected"): ("tis", {}),
}
# verl's DPPO is sg[M r] Â log π where ours is M r Â: another value with the same gradient. Its KL has 1e-8 added to
# probabilities, which moves no token of these batches across the threshold.
LOG_FORM = {("verl", case) for case in ("dppo_tv", "dppo_tv_corrected", "dppo_kl", "dppo_kl_close")}

ROUNDING = 1e-11
# verl adds 1e-8 to the lengths (at least 1) that these divide by.
TOLERANCE = {
    ("verl", case): 5e-8
    for case in (
        "vanilla_by_response",
        "gspo_by_response",
        "gspo_paper",
        "sapo",
        "geo_mean",
        "geo_mean_paper",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    )
}


WEIGHTS: dict[Case, Ours] = {
    ("trl", "default"): ("mis_sequence", {"ratio_high": 3.0}),
    ("trl", "token_truncate"): ("tis", {"ratio_cap": 3.0}),
    ("trl", "token_mask"): ("mis", {"ratio_high": 3.0}),
    ("trl", "icepop"): ("icepop", {}),
    ("trl", "sequence_truncate"): ("tis", {"unit": "product", "ratio_cap": 3.0}),
    ("verl", "token"): ("tis", {}),
    ("verl", "sequence"): ("tis", {"unit": "product"}),
    ("verl", "icepop"): ("icepop", {}),
    # verl's band, 0.9 to 1.5, is on μ/π_old, ours on π_old/μ.
    ("verl", "geometric"): ("geo_rs", {"ratio_low": 1 / 1.5, "ratio_high": 1 / 0.9}),
}

# The advantage of an algorithm of ours, and what is changed in it.
ADVANTAGES: dict[Case, Ours] = {
    ("trl", "default"): ("grpo@trl-1.16", {}),
    ("trl", "none"): ("dr_grpo", {}),
    ("trl", "batch"): ("lite_ppo", {"epsilon": 1e-4}),
    ("verl", "grpo"): ("grpo@verl-0.9", {}),
    ("verl", "rloo"): ("rloo", {}),
    ("verl", "reinforce_plus_plus"): ("reinforce_pp", {}),
    ("verl", "reinforce_plus_plus_baseline"): ("reinforce_pp_baseline", {}),
}


@dataclass(frozen=True)
class Recorded:
    """One peer's file."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]

    def batches(self) -> Iterator[tuple[int, Batch, Tensor]]:
        """The number of a batch, the batch, and its rewards by group."""
        columns = {name.removeprefix("inputs/"): values for name, values in self.tensors.items() if "inputs/" in name}
        for s in range(len(columns["mask"])):
            row = {name: values[s] for name, values in columns.items()}
            batch = Batch(
                logprobs_BT=row["logprobs"].requires_grad_(),
                old_logprobs_BT=row["old_logprobs"],
                rollout_logprobs_BT=row["rollout_logprobs"],
                mask_BT=row["mask"].long(),
                advantages_BT=row["advantages"][:, None].expand(row["mask"].shape),
            )
            yield s, batch, row["rewards"].view(-1, GROUP)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recorded]:
    """What was recorded of each peer."""
    read = {}
    for peer, file in FILES.items():
        with safe_open(ROOT / "tests" / "recorded" / "oracles" / f"{file}.safetensors", "pt") as held:
            about = json.loads(held.metadata()["oracle"])
            read[peer] = Recorded(about, {name: held.get_tensor(name) for name in held.keys()})  # noqa: SIM118
    return read


def ours(kind: str, chosen: Ours) -> Any:
    """The ``loss`` or ``advantage`` of an algorithm, or a ``correction``, with its shipped numbers but ``changes``."""
    name, changes = chosen
    if kind == "loss":
        return load(name, **changes)
    numbers = conf.read("correction", name) if kind == "correction" else conf.read("algorithm", name)["advantage"]
    return build(numbers | changes)


def run(case: Case, chosen: Ours, batch: Batch) -> tuple[Tensor, Tensor]:
    """Our loss, under the correction of the case, and its gradient."""
    if case in CORRECTED:
        batch = replace(batch, weights_BT=ours("correction", CORRECTED[case]).weights(batch))
    output = ours("loss", chosen)(batch)
    return output.loss.detach(), torch.autograd.grad(output.loss, batch.logprobs_BT)[0]


def test_every_case_and_preset_is_compared(recorded: dict[str, Recorded]) -> None:
    kinds = {"loss": LOSSES, "gradient": LOSSES, "weights": WEIGHTS, "advantages": ADVANTAGES}
    for peer, held in recorded.items():
        assert held.about["peer"] == peer
        assert f"{peer}-{held.about['versions'][peer]}".startswith(f"{FILES[peer]}.")
        listed = {f"{kind}/{case}" for kind, table in kinds.items() for of, case in table if of == peer}
        assert set(held.about["cases"]) == listed
    presets = {name for name in names(presets=True) if name.endswith(tuple(f"@{file}" for file in FILES.values()))}
    assert presets == {name for name, changes in LOSSES.values() if "@" in name}
    assert not any(changes for name, changes in LOSSES.values() if "@" in name)


@pytest.mark.parametrize("case", LOSSES, ids="-".join)
def test_loss_and_gradient_match_the_peer(case: Case, recorded: dict[str, Recorded]) -> None:
    peer, name = case
    near, answers = TOLERANCE.get(case, ROUNDING), recorded[peer].tensors
    for s, batch, _ in recorded[peer].batches():
        loss, gradient_BT = run(case, LOSSES[case], batch)
        torch.testing.assert_close(gradient_BT, answers[f"gradient/{name}"][s], rtol=near, atol=1e-12)
        if case in LOG_FORM:
            loss = (gradient_BT * batch.logprobs_BT).sum().detach()
        # Terms of about 1 and of both signs may cancel in it.
        torch.testing.assert_close(loss, answers[f"loss/{name}"][s], rtol=near, atol=near)


@pytest.mark.parametrize("case", WEIGHTS, ids="-".join)
def test_correction_weights_match_the_peer(case: Case, recorded: dict[str, Recorded]) -> None:
    peer, name = case
    for s, batch, _ in recorded[peer].batches():
        weights_BT = ours("correction", WEIGHTS[case]).weights(batch) * batch.mask_BT
        torch.testing.assert_close(weights_BT, recorded[peer].tensors[f"weights/{name}"][s], rtol=ROUNDING, atol=1e-12)


@pytest.mark.parametrize("case", ADVANTAGES, ids="-".join)
def test_advantages_match_the_peer(case: Case, recorded: dict[str, Recorded]) -> None:
    peer, name = case
    for s, batch, rewards_PG in recorded[peer].batches():
        lengths_PG = batch.mask_BT.sum(-1).view(-1, GROUP)
        advantages_BT = ours("advantage", ADVANTAGES[case])(rewards_PG, lengths_PG).view(-1, 1) * batch.mask_BT
        theirs_BT = recorded[peer].tensors[f"advantages/{name}"][s]
        near = TOLERANCE.get(case, ROUNDING)
        torch.testing.assert_close(advantages_BT, theirs_BT, rtol=near, atol=near)

"""The losses as verl calls them, without verl: names with numbers, parts of a mini-batch, sums, refusals.

``test_verl.py`` asks the same of verl itself. Shapes: B responses, T response positions.
"""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steadymoe.algorithms import Batch, load, names
from steadymoe.bench.measurement import token_metrics
from steadymoe.plugins import check_verl, verl

LENGTHS = [5, 1, 3, 4, 2, 5, 3]
# Micro-batches of unequal size.
PARTS = [slice(0, 1), slice(1, 5), slice(5, 7)]
NOT_IN_VERL = {
    *("gepo", "m2po", "r2vpo"),  # need the whole mini-batch
    *("rspo", "rspo_grpo", "rspo_gspo"),  # read routers
    *("dppo", "dppo_kl", "minirl", "opsm", "trm"),  # read the sampler
}


def minibatch() -> dict[str, Tensor]:
    """What verl hands to a loss, of a whole mini-batch."""
    generator = torch.Generator().manual_seed(3)
    old_BT = -0.1 - 2 * torch.rand(len(LENGTHS), 5, generator=generator)
    return {
        "old_log_prob": old_BT,
        "log_prob": old_BT + 0.4 * torch.randn(old_BT.shape, generator=generator),
        "advantages": torch.randn(len(LENGTHS), 1, generator=generator).expand_as(old_BT),
        "response_mask": torch.arange(5) < torch.tensor(LENGTHS)[:, None],
    }


def whole(batch: dict[str, Tensor], **fields: Any) -> Batch:
    return Batch(
        logprobs_BT=batch["log_prob"],
        mask_BT=batch["response_mask"],
        advantages_BT=batch["advantages"],
        old_logprobs_BT=batch["old_log_prob"],
        **fields,
    )


def part(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in batch.items()}


def config(mode: str, dp_size: int = 1) -> dict[str, Any]:
    """verl's settings of an actor, as its worker fills them in for a micro-batch of ``minibatch``."""
    info = {"dp_size": dp_size, "batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS)}
    return verl.settings(verl.named(mode)) | {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "global_batch_info": info}


def test_numbers_ride_in_the_name() -> None:
    assert verl.named("steadymoe/gspo") == load("gspo")
    assert verl.named("steadymoe/gspo@verl-0.9") == load("gspo@verl-0.9")
    assert verl.named("steadymoe/gspo/clip_low:1e-3/clip_high:2e-3") == load("gspo", clip_low=1e-3, clip_high=2e-3)
    assert verl.named("steadymoe/grpo/dual_clip:3.0/aggregation:token-mean") == load(
        "grpo", dual_clip=3.0, aggregation="token-mean"
    )
    assert verl.named("steadymoe/opsm/anchor:old") == load("opsm", anchor="old")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("steadymoe/gsppo", "unknown algorithm 'gsppo'"),
        ("steadymoe/gspo/clip_low", "a number follows the name as /field:value; got 'clip_low'"),
        ("steadymoe/gspo/clip:1e-3", "GSPO has no 'clip'"),
        ("steadymoe/gspo/clip_low:wide", "clip_low must be a number"),
        ("steadymoe/gspo/clip_low:2", "0 <= clip_low < 1"),
        ("steadymoe/gspo/clip_low.x:2", "clip_low"),
        ("steadymoe/gepo", "gepo needs the whole mini-batch at once"),
        ("steadymoe/rspo", "rspo reads the routers' probabilities"),
        ("steadymoe/trm", "trm reads the sampler's 20 most likely tokens"),
        ("steadymoe/dppo", "rollout_logprobs_BT, which this batch does not hold; /anchor:old takes the old policy's"),
    ],
)
def test_what_verl_cannot_feed_is_refused_by_name_in_one_line(mode: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^steadymoe/") as refused:
        verl.named(mode)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_name_is_registered_and_a_loss_that_verl_cannot_feed_says_so_when_called() -> None:
    core_algos = SimpleNamespace(POLICY_LOSS_REGISTRY={"vanilla": None})
    verl.register(core_algos)
    registry, refused = core_algos.POLICY_LOSS_REGISTRY, set()
    assert set(registry) == {"vanilla", *(f"steadymoe/{name}" for name in names(presets=True))}
    for name in names(presets=True):
        mode, batch = f"steadymoe/{name}", minibatch()
        if verl.reason_against(load(name)) is None:
            value, _ = registry[mode](**batch, **_of_config(mode))
            assert torch.equal(value, load(name)(whole(batch)).loss)
            continue
        with pytest.raises(ValueError, match=f"^{mode}: {name} "):
            registry[mode](**batch)
        refused.add(name)
    assert {name for name in refused if "@" not in name} == NOT_IN_VERL
    assert "steadymoe/gspo/clip_low:1e-3" in registry
    assert registry["steadymoe/gspo/clip_low:1e-3"](**minibatch())
    assert "gspo" not in registry
    for name, error in (("gspo", KeyError), ("steadymoe/gsppo", ValueError)):
        with pytest.raises(error):
            registry[name]


def _of_config(mode: str) -> dict[str, Any]:
    given = config(mode)
    return {"config": given, "loss_agg_mode": given["loss_agg_mode"]}


@pytest.mark.parametrize("name", ["grpo", "grpo@verl-0.9", "gspo_token", "dr_grpo", "sapo", "luspo"])
def test_micro_batches_and_processes_add_up_to_the_whole_mini_batch(name: str) -> None:
    mode, batch = f"steadymoe/{name}", minibatch()
    expected = load(name)(whole(batch)).loss
    given = _of_config(mode)
    parts = [verl.policy_loss(mode, **part(batch, rows), **given)[0] for rows in PARTS]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-6, atol=1e-7)
    given["config"] = config(mode, dp_size=2)  # gradients are averaged over two processes
    halves = [verl.policy_loss(mode, **part(batch, rows), **given)[0] for rows in (slice(0, 4), slice(4, 7))]
    torch.testing.assert_close(sum(halves) / 2, expected, rtol=1e-6, atol=1e-7)


def test_verls_own_correction_weighs_tokens() -> None:
    batch = minibatch()
    weights_BT = torch.rand(batch["log_prob"].shape, generator=torch.Generator().manual_seed(4))
    value, _ = verl.policy_loss("steadymoe/gspo", **batch, rollout_is_weights=weights_BT)
    assert torch.equal(value, load("gspo")(whole(batch, weights_BT=weights_BT)).loss)


def test_unequal_micro_batches_recover_the_columns_of_the_whole() -> None:
    batch = minibatch()
    parts = [verl.policy_loss("steadymoe/grpo", **part(batch, rows))[1] for rows in PARTS]
    logged = {f"actor/{name}": float(np.mean([each[name] for each in parts])) for name in parts[0]}
    mask_BT, log_ratio_BT = batch["response_mask"], batch["log_prob"] - batch["old_log_prob"]
    held = whole(batch | {name: batch[name].double() for name in ("log_prob", "old_log_prob")})
    columns, _ = token_metrics.of_update(held, load("grpo")(held))
    found = verl.columns(logged)
    assert set(found) == {
        *("token_ratio_mean", "token_ratio_variance", "sequence_ratio_variance", "ess"),
        *("clip_fraction", "clip_fraction_low", "clip_fraction_high"),
    }
    for name, value in found.items():
        assert value == pytest.approx(float(columns[name]), rel=2e-6), name
    of_parts = [(log_ratio_BT[rows][mask_BT[rows]]).exp().var(correction=0) for rows in PARTS]
    assert (
        abs(torch.stack(of_parts).mean() - found["token_ratio_variance"]) > 0.01
    )  # a mean of variances is no variance
    assert verl.columns({"actor/pg_loss": 1.0}) == {}


def test_at_rest_the_variance_is_exactly_0_and_a_part_without_tokens_adds_nothing() -> None:
    batch = minibatch() | {"log_prob": minibatch()["old_log_prob"]}
    _, at_rest = verl.policy_loss("steadymoe/gspo", **batch)
    assert verl.columns(at_rest)["token_ratio_variance"] == verl.columns(at_rest)["sequence_ratio_variance"] == 0
    value, nothing = verl.policy_loss("steadymoe/gspo", **batch | {"response_mask": batch["response_mask"] & False})
    assert value == 0
    assert set(nothing.values()) == {0.0}
    assert verl.columns(nothing) == {}
    assert not [name for name in nothing if "max" in name or "min" in name]  # verl reduces such names by max and min


@pytest.mark.parametrize(
    ("mode", "changed", "said"),
    [
        ("gspo", {"clip_ratio": 0.1}, "actor_rollout_ref.actor.clip_ratio=0.1 belongs to verl's own losses"),
        ("gspo", {"clip_ratio_c": 2.0}, "steadymoe/gspo/field:value"),
        ("gspo", {"loss_agg_mode": "token-mean"}, "needs actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"),
        ("dr_grpo", {"loss_scale_factor": None}, "needs actor_rollout_ref.actor.loss_scale_factor=10"),
    ],
)
def test_settings_that_contradict_the_loss_are_refused(mode: str, changed: dict[str, Any], said: str) -> None:
    given = config(f"steadymoe/{mode}") | changed
    with pytest.raises(ValueError, match=r"actor_rollout_ref") as refused:
        verl.policy_loss(f"steadymoe/{mode}", **minibatch(), loss_agg_mode=given["loss_agg_mode"], config=given)
    assert said in str(refused.value)


def test_the_lines_that_choose_a_loss() -> None:
    assert verl.lines("steadymoe/dr_grpo/constant_length:8192") == [
        "actor_rollout_ref.actor.policy_loss.loss_mode=steadymoe/dr_grpo/constant_length:8192",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor=8192",
    ]


def test_the_plugin_imports_without_the_suites_requirements() -> None:
    code = (
        "import json, sys, steadymoe.plugins.verl, steadymoe.plugins.check_verl; "
        "print(json.dumps([n for n in ('transformers', 'hydra', 'pandas', 'verl', 'ray') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_check_fails_in_one_line_where_verl_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_verl.answer([]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "the plugin cannot be loaded: ModuleNotFoundError: No module named 'verl'" in said.err
    assert check_verl.answer(["steadymoe/gepo"]) == 2
    assert capsys.readouterr().err == (
        "steadymoe: steadymoe/gepo: gepo needs the whole mini-batch at once, and verl splits it over GPUs and "
        "micro-batches\n"
    )

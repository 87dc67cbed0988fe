"""The losses as verl calls them, without verl: names with numbers, parts of a mini-batch, sums, refusals.

``test_verl.py`` compares with verl itself. Shapes: B responses, T response positions.
"""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steadymoe.algorithms import Batch, load, names
from steadymoe.bench.training import token_metrics
from steadymoe.integrations.verl import check as check_verl
from steadymoe.integrations.verl import losses as verl

LENGTHS = [5, 1, 3, 4, 2, 5, 3]
# Micro-batches of unequal size.
PARTS = [slice(0, 1), slice(1, 5), slice(5, 7)]
NOT_IN_VERL = {
    *("gepo", "m2po", "r2vpo"),  # need the whole mini-batch
    *("rspo", "rspo_grpo", "rspo_gspo"),  # read routers
    *("dppo", "dppo_kl", "minirl", "opsm", "trm"),  # read the sampler
    *("score_centering", "score_centering_tis", "score_centering_mis", "flash_reinforce"),
    *("dis", "dis_code", "icepop", "ipo", "mis_po", "sat", "sat_gspo", "cppo"),
}


def minibatch() -> dict[str, Tensor]:
    """What verl passes to a loss, for a whole mini-batch."""
    generator = torch.Generator().manual_seed(3)
    old_BT = -0.1 - 2 * torch.rand(len(LENGTHS), 5, generator=generator)
    return {
        "old_log_prob": old_BT,
        "log_prob": old_BT + 0.4 * torch.randn(old_BT.shape, generator=generator),
        "advantages": torch.randn(len(LENGTHS), 1, generator=generator).expand_as(old_BT),
        "response_mask": torch.arange(5) < torch.tensor(LENGTHS)[:, None],
    }


def suite_batch(batch: dict[str, Tensor], **fields: Any) -> Batch:
    return Batch(
        logprobs_BT=batch["log_prob"],
        mask_BT=batch["response_mask"],
        advantages_BT=batch["advantages"],
        old_logprobs_BT=batch["old_log_prob"],
        **fields,
    )


def rows_of(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in batch.items()}


def settings(mode: str, dp_size: int = 1, **changed: Any) -> dict[str, Any]:
    """verl's actor config and aggregation, as its worker fills them in for a part of ``minibatch``."""
    info = {"dp_size": dp_size, "batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS)}
    config = verl.settings(verl.named(mode)) | {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "global_batch_info": info}
    config |= changed
    return {"config": config, "loss_agg_mode": config["loss_agg_mode"]}


def test_names_can_set_numbers() -> None:
    gspo = load("gspo", clip_low=1e-3, clip_high=2e-3)
    assert verl.named("steadymoe/gspo/clip_low:1e-3/clip_high:2e-3") == gspo != verl.named("steadymoe/gspo")
    assert verl.named("steadymoe/gspo@verl-0.9") == load("gspo@verl-0.9")
    grpo = load("grpo", dual_clip=3.0, aggregation="token-mean")
    assert verl.named("steadymoe/grpo/dual_clip:3.0/aggregation:token-mean") == grpo
    assert verl.named("steadymoe/opsm/anchor:old") == load("opsm", anchor="old")
    assert verl.lines("steadymoe/dr_grpo/constant_length:8192") == [
        "actor_rollout_ref.actor.policy_loss.loss_mode=steadymoe/dr_grpo/constant_length:8192",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.loss_scale_factor=8192",
    ]


def test_name_without_the_prefix_is_refused() -> None:
    """verl has a gspo of its own."""
    with pytest.raises(ValueError, match="steadymoe/gspo"):
        verl.lines("gspo")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("gsppo", "unknown algorithm 'gsppo'"),
        ("gspo/clip_low", "got 'clip_low'"),
        ("gspo/clip:1e-3", "GSPO has no 'clip'"),
        ("gspo/clip_low:wide", "clip_low must be a number"),
        ("gspo/clip_low:2", "0 <= clip_low < 1"),
        ("gspo/clip_low.x:2", "clip_low"),
        ("gepo", "gepo needs the whole mini-batch"),
        ("rspo", "rspo reads the routers' probabilities"),
        ("trm", "trm reads the sampler's 20 most likely tokens"),
        ("dppo", "rollout_logprobs_BT, which this batch does not hold; /anchor:old"),
    ],
)
def test_a_bad_name_is_refused_in_one_line(mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^steadymoe/") as refusal:
        verl.named(f"steadymoe/{mode}")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("mode", "changed", "message"),
    [
        ("gspo", {"clip_ratio": 0.1}, "actor_rollout_ref.actor.clip_ratio=0.1"),
        ("gspo", {"clip_ratio_c": 2.0}, "steadymoe/gspo/field:value"),
        ("gspo", {"loss_agg_mode": "token-mean"}, "needs actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"),
        ("dr_grpo", {"loss_scale_factor": None}, "needs actor_rollout_ref.actor.loss_scale_factor=10"),
    ],
)
def test_settings_that_contradict_the_loss_are_refused(mode: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"actor_rollout_ref") as refusal:
        verl.policy_loss(f"steadymoe/{mode}", **minibatch(), **settings(f"steadymoe/{mode}", **changed))
    assert message in str(refusal.value)


def test_every_name_is_registered_and_equals_the_suites_loss_or_is_refused() -> None:
    core_algos = SimpleNamespace(POLICY_LOSS_REGISTRY={"vanilla": None})
    verl.register(core_algos)
    registry, refused, batch = core_algos.POLICY_LOSS_REGISTRY, set(), minibatch()
    assert set(registry) == {"vanilla", *(f"steadymoe/{name}" for name in names(presets=True))}
    for name in names(presets=True):
        mode = f"steadymoe/{name}"
        if verl.refusal(load(name)) is None:
            value, _ = registry[mode](**batch, **settings(mode))
            assert torch.equal(value, load(name)(suite_batch(batch)).loss)
            continue
        with pytest.raises(ValueError, match=f"^{mode}: {name} "):
            registry[mode](**batch)
        refused.add(name)
    assert {name for name in refused if "@" not in name} == NOT_IN_VERL
    assert "steadymoe/gspo/clip_low:1e-3" in registry
    assert registry["steadymoe/gspo/clip_low:1e-3"](**batch)
    assert "gspo" not in registry
    for name, error in (("gspo", KeyError), ("steadymoe/gsppo", ValueError)):
        with pytest.raises(error):
            registry[name]


@pytest.mark.parametrize("name", ["grpo", "grpo@verl-0.9", "gspo_token", "dr_grpo", "sapo", "luspo"])
def test_micro_batches_and_processes_add_up_to_the_whole_mini_batch(name: str) -> None:
    mode, batch = f"steadymoe/{name}", minibatch()
    expected = load(name)(suite_batch(batch)).loss
    parts = [verl.policy_loss(mode, **rows_of(batch, rows), **settings(mode))[0] for rows in PARTS]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-6, atol=1e-7)
    two = settings(mode, dp_size=2)  # gradients are averaged over two processes
    halves = [verl.policy_loss(mode, **rows_of(batch, rows), **two)[0] for rows in (slice(0, 4), slice(4, 7))]
    torch.testing.assert_close(sum(halves) / 2, expected, rtol=1e-6, atol=1e-7)


def test_verl_correction_weights_tokens() -> None:
    batch = minibatch()
    weights_BT = torch.rand(batch["log_prob"].shape, generator=torch.Generator().manual_seed(4))
    value, _ = verl.policy_loss("steadymoe/gspo", **batch, rollout_is_weights=weights_BT)
    assert torch.equal(value, load("gspo")(suite_batch(batch, weights_BT=weights_BT)).loss)


def test_sums_of_unequal_micro_batches_give_the_columns_of_the_whole() -> None:
    batch = minibatch()
    parts = [verl.policy_loss("steadymoe/grpo", **rows_of(batch, rows))[1] for rows in PARTS]
    assert not [name for name in parts[0] if "max" in name or "min" in name]  # verl reduces these by max and min
    logged = {f"actor/{name}": float(np.mean([part[name] for part in parts])) for name in parts[0]}
    doubles = suite_batch(batch | {name: batch[name].double() for name in ("log_prob", "old_log_prob")})
    expected, _ = token_metrics.of_update(doubles, load("grpo")(doubles))
    columns = verl.columns(logged)
    assert set(columns) == {
        *("token_ratio_mean", "token_ratio_variance", "sequence_ratio_variance", "ess"),
        *("clip_fraction", "clip_fraction_low", "clip_fraction_high"),
    }
    for name, value in columns.items():
        assert value == pytest.approx(float(expected[name]), rel=2e-6), name
    assert verl.columns({"actor/pg_loss": 1.0}) == {}


def test_equal_policies_have_zero_variance_and_empty_parts_add_nothing() -> None:
    batch = minibatch() | {"log_prob": minibatch()["old_log_prob"]}
    _, at_rest = verl.policy_loss("steadymoe/gspo", **batch)
    assert verl.columns(at_rest)["token_ratio_variance"] == verl.columns(at_rest)["sequence_ratio_variance"] == 0
    value, empty = verl.policy_loss("steadymoe/gspo", **batch | {"response_mask": batch["response_mask"] & False})
    assert value == 0
    assert set(empty.values()) == {0.0}
    assert verl.columns(empty) == {}


def test_the_plugin_imports_without_the_suites_requirements() -> None:
    code = (
        "import json, sys, steadymoe.integrations.verl.losses, steadymoe.integrations.verl.check; "
        "print(json.dumps([n for n in ('transformers', 'hydra', 'pandas', 'verl', 'ray') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_check_prints_help_without_verl(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        check_verl.main(["--help"])
    assert "steadymoe/NAME" in capsys.readouterr().out


def test_the_check_fails_in_one_line_without_verl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_verl.main([]) == 1
    assert "pip install ./integrations/losses" in capsys.readouterr().err  # which alone announces the plugin
    point = EntryPoint("steadymoe", check_verl.MODULE, "verl.plugins")
    monkeypatch.setattr(check_verl, "entry_points", lambda group: [point])
    for words, code, message in (
        ([], 1, "the plugin cannot be loaded: ModuleNotFoundError: No module named 'verl'"),
        (["steadymoe/gepo"], 2, "steadymoe/gepo: gepo needs the whole mini-batch"),
    ):
        assert check_verl.main(words) == code
        output = capsys.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1)
        assert message in output.err

"""The losses inside verl: the plugin loads, shared losses are equal, metrics add up, a broken plugin is reported.

`make check-trainers` runs this file in an environment that has verl and the losses alone. Shapes: B responses,
T response positions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")

from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils.metric import Metric, reduce_metrics
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from steadymoe.algorithms import Batch, load, names
from steadymoe.integrations.verl import check as check_verl
from steadymoe.integrations.verl import losses as plugin

pytestmark = pytest.mark.verl

RESPONSES, WIDTH = 7, 9
# Micro-batches of unequal size.
PARTS = [slice(0, 1), slice(1, 5), slice(5, 7)]
# Our name; verl's name and its settings for which the two are one loss. A clip_ratio_c of 1e9 is no dual clip.
BY_RESPONSE = {"loss_agg_mode": "seq-mean-token-mean"}
EQUAL = [
    ("grpo", "vanilla", {**BY_RESPONSE, "clip_ratio_c": 1e9}),
    ("grpo/dual_clip:3.0/aggregation:token-mean", "vanilla", {}),
    ("grpo@verl-0.9", "vanilla", {}),
    ("gspo_token", "gspo", {**BY_RESPONSE, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("gspo_token/clip_low:0.2/clip_high:0.2/aggregation:token-mean", "gspo", {}),
    ("gspo@verl-0.9", "gspo", {}),
]


def minibatch(scale: float, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old_BT = -0.05 - 6 * torch.rand(RESPONSES, WIDTH, generator=generator)
    lengths_B = torch.randint(1, WIDTH + 1, (RESPONSES,), generator=generator)
    return {
        "old_log_prob": old_BT,
        "log_prob": (old_BT + scale * torch.randn(old_BT.shape, generator=generator)).clamp(max=-1e-3),
        "advantages": torch.randn(RESPONSES, 1, generator=generator).expand_as(old_BT),
        "response_mask": torch.arange(WIDTH) < lengths_B[:, None],
    }


def actor(**fields: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **fields)


def through_verl(mode: str, batch: dict[str, Tensor], config: ActorConfig, **more: Any) -> tuple[Tensor, Tensor]:
    """Return a loss of verl's registry, and its gradient."""
    logprobs_BT = batch["log_prob"].clone().requires_grad_()
    inputs = batch | {"log_prob": logprobs_BT, "loss_agg_mode": config.loss_agg_mode, "config": config} | more
    value, _ = core_algos.get_policy_loss_fn(mode)(**inputs)
    return value.detach(), torch.autograd.grad(value, logprobs_BT)[0]


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables)


def test_importing_verl_registers_every_name() -> None:
    done = python(check_verl.LIST_LOSSES)
    assert done.returncode == 0, done.stderr
    registered = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"vanilla", "gspo", *(f"steadymoe/{name}" for name in names(presets=True))} <= registered
    for mode, message in (("gsppo", "Unsupported loss mode: gsppo"), ("steadymoe/gsppo", "unknown algorithm 'gsppo'")):
        with pytest.raises(ValueError, match=message):
            core_algos.get_policy_loss_fn(mode)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.2, 3.0])
@pytest.mark.parametrize(("name", "verls", "fields"), EQUAL)
def test_losses_in_both_are_exactly_equal(name: str, verls: str, fields: dict[str, Any], scale: float) -> None:
    mode = f"steadymoe/{name}"
    info = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 14}
    weights_BT = torch.rand(RESPONSES, WIDTH, generator=torch.Generator().manual_seed(9))
    for seed in range(3):
        batch = minibatch(scale, seed)
        for more in ({}, {"global_batch_info": info}):
            for weights in (None, weights_BT):
                config = actor(**plugin.settings(plugin.named(mode)), **more)
                value, gradient_BT = through_verl(mode, batch, config, rollout_is_weights=weights)
                expected = through_verl(verls, batch, actor(**fields, **more), rollout_is_weights=weights)
                assert torch.equal(value, expected[0])
                assert torch.equal(gradient_BT, expected[1])
                assert scale == 0 or expected[1].any()


@pytest.mark.parametrize("name", [name for name in names(presets=True) if plugin.refusal(load(name)) is None])
def test_verl_computes_every_loss_like_the_suite(name: str) -> None:
    batch, mode = minibatch(0.3), f"steadymoe/{name}"
    value, gradient_BT = through_verl(mode, batch, actor(**plugin.settings(load(name))))
    logprobs_BT = batch["log_prob"].clone().requires_grad_()
    ours = Batch(
        logprobs_BT=logprobs_BT,
        mask_BT=batch["response_mask"],
        advantages_BT=batch["advantages"],
        old_logprobs_BT=batch["old_log_prob"],
    )
    expected = load(name)(ours).loss
    assert torch.equal(value, expected.detach())
    assert torch.equal(gradient_BT, torch.autograd.grad(expected, logprobs_BT)[0])


def test_verls_worker_computes_the_loss_and_logs_its_sums() -> None:
    batch, mode = minibatch(0.3), "steadymoe/gspo/clip_low:0.1/clip_high:0.1"
    mask_BT = batch["response_mask"]
    lengths_B = mask_BT.sum(-1).tolist()

    def jagged(values_BX: Tensor, part: slice, extra: int = 0) -> Tensor:
        rows = [row[: length + extra] for row, length in zip(values_BX[part], lengths_B[part], strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def data(part: slice) -> TensorDict:
        count = len(lengths_B[part])
        prompts = torch.nested.as_nested_tensor([torch.ones(1, dtype=torch.long)] * count, layout=torch.jagged)
        inputs = {
            "prompts": prompts,
            "responses": jagged(torch.ones_like(mask_BT, dtype=torch.long), part),
            "response_mask": jagged(mask_BT.long(), part),
            "old_log_probs": jagged(batch["old_log_prob"], part),
            "advantages": jagged(batch["advantages"].contiguous(), part),
        }
        made = TensorDict(inputs, batch_size=count)
        for name, value in (("dp_size", 1), ("batch_num_tokens", sum(lengths_B)), ("global_batch_size", RESPONSES)):
            made.set_non_tensor(name, value)
        return made

    # A forward gives a log-probability for each token fed, a token's at the position before it; prompts have one token.
    fed_BX = torch.nn.functional.pad(batch["log_prob"], (0, 1))
    config = actor(policy_loss={"loss_mode": mode}, **BY_RESPONSE)
    parts = [ppo_loss(config, {"log_probs": jagged(fed_BX, part, 1)}, data(part)) for part in PARTS]
    whole = through_verl(mode, batch, actor(**BY_RESPONSE))[0]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    metrics: dict[str, Any] = {}
    for _, each in parts:
        for name, value in each.items():
            name = f"actor/{name}" if name.startswith("steadymoe") else name
            metrics.setdefault(name, value.init_list()).append(value)
    two = {name: [Metric.aggregate_dp([value, value])] for name, value in metrics.items()}  # two equal processes
    logged = reduce_metrics(two)
    ratio_N = (batch["log_prob"] - batch["old_log_prob"])[mask_BT].double().exp()
    columns = plugin.columns(logged)
    assert columns["token_ratio_variance"] == pytest.approx(float(ratio_N.var(correction=0)), rel=1e-6)
    assert columns["token_ratio_mean"] == pytest.approx(float(ratio_N.mean()), rel=1e-6)
    assert logged["actor/pg_loss"] == pytest.approx(float(whole), rel=1e-5)


def test_the_check_lists_losses_and_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_verl.main(["steadymoe/gspo"]) == 0
    output = capsys.readouterr().out
    assert "not in verl: gepo needs the whole mini-batch" in output
    assert output.splitlines()[-2:] == plugin.lines("steadymoe/gspo")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert check_verl.main([]) == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves steadymoe out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("import sys; sys.modules['steadymoe.integrations.verl.plugin'] = None", "ModuleNotFoundError"),
        ("import steadymoe.integrations.verl.losses as v; v.register = lambda _: 1 / 0", "ZeroDivisionError"),
        ("import steadymoe.integrations.verl.losses as v; v.register = lambda _: None", "lacks steadymoe/aspo"),
    ],
)
def test_check_reports_a_broken_plugin_that_verl_ignores(fault: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(fault)
    silent = python(check_verl.LIST_LOSSES, PYTHONPATH=str(tmp_path))
    assert silent.returncode == 0
    assert "steadymoe/" not in silent.stdout
    code = "from steadymoe.integrations.verl.check import main; exit(main([]))"
    checked = python(code, PYTHONPATH=str(tmp_path))
    assert checked.returncode == 1
    assert checked.stderr.splitlines()[-1].startswith("steadymoe: ")
    assert message in checked.stderr.splitlines()[-1]

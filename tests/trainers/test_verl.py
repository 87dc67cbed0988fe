"""The losses inside verl: the plugin loads, equal losses are equal, metrics add up, and a broken plugin is seen.

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

from steadymoe.algorithms import load, names
from steadymoe.plugins import check_verl
from steadymoe.plugins import verl as ours

pytestmark = pytest.mark.verl

RESPONSES, WIDTH = 7, 9
# Micro-batches of unequal size.
PARTS = [slice(0, 1), slice(1, 5), slice(5, 7)]
# Of ours; of verl, its settings, for which the two are one loss. A clip_ratio_c of 1e9 is no dual clip.
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


def asked(mode: str, batch: dict[str, Tensor], config: ActorConfig, **more: Any) -> tuple[Tensor, Tensor]:
    """A loss by verl's registry, and its gradient."""
    logprobs_BT = batch["log_prob"].clone().requires_grad_()
    given = batch | {"log_prob": logprobs_BT, "loss_agg_mode": config.loss_agg_mode, "config": config} | more
    value, _ = core_algos.get_policy_loss_fn(mode)(**given)
    return value.detach(), torch.autograd.grad(value, logprobs_BT)[0]


def in_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables)


def test_a_process_that_imports_verl_has_every_name() -> None:
    done = in_python(check_verl._ASK)
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    assert {f"steadymoe/{name}" for name in names(presets=True)} <= set(there)
    assert {"vanilla", "gspo", "cispo"} <= set(there)
    with pytest.raises(ValueError, match="Unsupported loss mode: gsppo"):
        core_algos.get_policy_loss_fn("gsppo")
    with pytest.raises(ValueError, match="unknown algorithm 'gsppo'"):
        core_algos.get_policy_loss_fn("steadymoe/gsppo")


@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.2, 3.0])
@pytest.mark.parametrize(("name", "theirs", "fields"), EQUAL)
def test_a_loss_that_both_have_is_exactly_equal(name: str, theirs: str, fields: dict[str, Any], scale: float) -> None:
    mode = f"steadymoe/{name}"
    for seed in range(3):
        batch = minibatch(scale, seed)
        info = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 14}
        weights_BT = torch.rand(RESPONSES, WIDTH, generator=torch.Generator().manual_seed(seed))
        for more in ({}, {"global_batch_info": info}):
            for weights in (None, weights_BT):
                found = asked(mode, batch, actor(**ours.settings(ours.named(mode)), **more), rollout_is_weights=weights)
                expected = asked(theirs, batch, actor(**fields, **more), rollout_is_weights=weights)
                assert torch.equal(found[0], expected[0])
                assert torch.equal(found[1], expected[1])
                assert scale == 0 or expected[1].any()


def test_verls_worker_computes_the_loss_and_keeps_its_sums() -> None:
    batch, mode = minibatch(0.3), "steadymoe/gspo/clip_low:0.1/clip_high:0.1"
    mask_BT = batch["response_mask"]
    lengths_B = mask_BT.sum(-1).tolist()
    rows = [1 + length for length in lengths_B]  # a prompt of one token

    def jagged(values: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    def data(part: slice) -> TensorDict:
        def of(values_BT: Tensor) -> Tensor:
            return jagged([row[:length] for row, length in zip(values_BT[part], lengths_B[part], strict=True)])

        count = len(lengths_B[part])
        made = TensorDict(
            {
                "prompts": jagged([torch.ones(1, dtype=torch.long)] * count),
                "responses": of(torch.ones_like(mask_BT, dtype=torch.long)),
                "response_mask": of(mask_BT.long()),
                "old_log_probs": of(batch["old_log_prob"]),
                "advantages": of(batch["advantages"].contiguous()),
            },
            batch_size=count,
        )
        for name, value in (("dp_size", 1), ("batch_num_tokens", sum(lengths_B)), ("global_batch_size", RESPONSES)):
            made.set_non_tensor(name, value)
        return made

    def log_probs(part: slice) -> Tensor:
        """As a forward gives them: one for each token fed, that of a token at the place before it."""
        padded = torch.nn.functional.pad(batch["log_prob"][part], (0, 1))
        return jagged([row[:size] for row, size in zip(padded, rows[part], strict=True)])

    config = actor(policy_loss={"loss_mode": mode}, **BY_RESPONSE)
    found = [ppo_loss(config, {"log_probs": log_probs(part)}, data(part)) for part in PARTS]
    whole = asked(mode, batch, actor(**BY_RESPONSE))[0]
    torch.testing.assert_close(sum(value for value, _ in found), whole)
    metrics: dict[str, Any] = {}
    for _, each in found:
        for name, value in each.items():
            metrics.setdefault(f"actor/{name}" if name.startswith("steadymoe") else name, value.init_list()).append(
                value
            )
    logged = {name: Metric.aggregate_dp([value, value]) for name, value in metrics.items()}  # two equal processes
    logged = reduce_metrics({name: [value] for name, value in logged.items()})
    ratio_N = (batch["log_prob"] - batch["old_log_prob"])[mask_BT].double().exp()
    columns = ours.columns(logged)
    assert columns["token_ratio_variance"] == pytest.approx(float(ratio_N.var(correction=0)), rel=1e-6)
    assert columns["token_ratio_mean"] == pytest.approx(float(ratio_N.mean()), rel=1e-6)
    assert logged["actor/pg_loss"] == pytest.approx(float(whole), rel=1e-5)
    assert load("gspo", clip_low=0.1, clip_high=0.1) == ours.named(mode)


def test_the_check_computes_every_loss_and_says_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_verl.answer(["steadymoe/gspo"]) == 0
    said = capsys.readouterr().out
    assert "verl 0.9" in said
    assert "not in verl: gepo needs the whole mini-batch" in said
    assert said.endswith(
        "actor_rollout_ref.actor.policy_loss.loss_mode=steadymoe/gspo\n"
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean\n"
    )


# What a person may break: verl itself goes on in silence.
BROKEN = {
    "halted": "import sys; sys.modules['steadymoe.plugins.register_verl'] = None",
    "raises": "import steadymoe.plugins.verl as v; v.register = lambda _: 1 / 0",
    "registers nothing": "import steadymoe.plugins.verl as v; v.register = lambda _: None",
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("halted", "the plugin cannot be loaded: ModuleNotFoundError"),
        ("raises", "the plugin cannot be loaded: ZeroDivisionError"),
        ("registers nothing", "a process that imports verl lacks steadymoe/aspo"),
    ],
)
def test_a_broken_plugin_fails_the_check_while_verl_is_silent(fault: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN[fault])
    silent = in_python(check_verl._ASK, PYTHONPATH=str(tmp_path))
    assert silent.returncode == 0
    assert "steadymoe/" not in silent.stdout
    checked = in_python("from steadymoe.plugins.check_verl import answer; exit(answer([]))", PYTHONPATH=str(tmp_path))
    assert checked.returncode == 1
    assert said in checked.stderr.splitlines()[-1]
    assert checked.stderr.splitlines()[-1].startswith("steadymoe: ")


def test_a_policy_that_leaves_the_plugin_out_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert check_verl.answer([]) == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves steadymoe out" in capsys.readouterr().err

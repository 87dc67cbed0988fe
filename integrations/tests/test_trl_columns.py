"""What is measured inside TRL's trainer equals the suite's own measurements.

`make check-trainers` runs this file in an environment that has TRL.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

from trl_runs import PROBED, NoisySampler, assert_equal, disturb, folder_of, rollout_parts, tables, trainer

from steadymoe.algorithms import Batch, load
from steadymoe.bench.runs import record
from steadymoe.bench.training import routing_drift, step_rows, token_metrics
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.old_policy import OldPolicy
from steadymoe.integrations.trl import moments
from steadymoe.integrations.trl.record import gathered
from steadymoe.integrations.trl.trainer import Scored, probed_sequences, sequences_of

pytestmark = pytest.mark.trl


@pytest.mark.parametrize("missing", [0, 3])
def test_known_sampler_noise_gives_the_suites_columns(tmp_path: Path, missing: int) -> None:
    sampler = NoisySampler(noise=0.3, missing=missing)
    trainer(tmp_path, rollout=sampler, record=tmp_path, updates=2, rows=4, accumulation=4).train()
    gaps = np.array(sampler.gaps)
    known = gaps[~np.isnan(gaps)]
    step = tables(tmp_path)["steps"].iloc[0]
    expected = {
        "rollout_kl_k1": -known.mean(),
        "rollout_kl_k3": (np.expm1(known) - known).mean(),
        "rollout_chi2_token": np.exp(2 * known).mean() - 1,
        "rollout_ess": np.exp(known).sum() ** 2 / (np.exp(2 * known).sum() * len(known)),
        "rollout_ratio_mean": np.exp(known).mean(),
        "rollout_outside_share": (np.abs(np.exp(known) - 1) > 0.1).mean(),
        "rollout_extreme_share": (np.abs(known) > np.log(2)).mean(),
        "rollout_logprob_gap_max": np.abs(known).max(),
    }
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    facts = json.loads((folder_of(tmp_path) / "run.json").read_text())
    assert facts["sampler_logprobs_missing"] == np.isnan(gaps).sum()
    assert (np.isnan(gaps).sum() > 0) == bool(missing)


def test_a_missing_logprob_is_not_corrected(tmp_path: Path) -> None:
    adapter = trainer(tmp_path, rollout=NoisySampler(noise=0.3, missing=2), correction="is", loss="grpo")
    (part,) = rollout_parts(adapter)
    adapter._step = 0
    adapter._begin_rollout([part])
    old: Scored = part["steadymoe"]
    weights_BT = adapter.objective.correction.weights(adapter._batch(part, old, old))
    assert weights_BT is not None
    missing_BT = part["sampling_per_token_logps"].isnan()
    assert missing_BT.any()
    assert (weights_BT[missing_BT] == 1).all()
    assert (weights_BT[~missing_BT & part["completion_mask"].bool()] != 1).all()


def test_columns_of_a_frozen_rollout_match_the_suite(tmp_path: Path) -> None:
    adapter = trainer(tmp_path, rows=4, accumulation=4)
    parts = rollout_parts(adapter)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "sampling_per_token_logps")
    whole = {name: torch.cat([part[name] for part in parts]) for name in names}
    rollout = moments.rollout_columns(adapter._begin_rollout(parts))
    sequences = sequences_of(whole)
    mask_BT = sequences.response_mask_BT
    with torch.no_grad():
        old = forward(adapter.model, sequences, "fp32")
        disturb(adapter)
        now = forward(adapter.model, sequences, "fp32")
    for part in parts:
        adapter._compute_loss(adapter.model, part)
        adapter._step += 1
    update = moments.update_columns(gathered(adapter._steps.update))

    assert old.routes_LBFK is not None
    mismatch = token_metrics.of_mismatch(whole["sampling_per_token_logps"], old.logprobs_BT, mask_BT)
    for name, value in mismatch.items():
        assert_close(rollout.overall[name].float(), value.float(), atol=2e-6, rtol=2e-5, msg=name)
    for name, value_L in routing_drift.load(old.routes_LBFK, mask_BT, 4).columns.items():
        assert_close(rollout.layers[name].float(), value_L, atol=1e-6, rtol=1e-6)
    batch = Batch(
        logprobs_BT=now.logprobs_BT,
        mask_BT=mask_BT,
        advantages_BT=whole["advantages"][:, None].expand(mask_BT.shape),
        old_logprobs_BT=old.logprobs_BT,
        entropy_BT=now.entropy_BT,
    )
    numbers, histograms = token_metrics.of_update(batch, adapter.objective(batch))
    numbers |= {"entropy": token_metrics.mean(now.entropy_BT, mask_BT), "loss": adapter.objective(batch).loss.detach()}
    tensors = old.routes_LBFK, old.executed_LBFK, old.router_logprobs_LBTE
    policy = OldPolicy(old.logprobs_BT, *tensors, None, None, None)
    routing = step_rows.routing_columns(policy, now, mask_BT, 4, forced_LMFK=None)
    expected = step_rows.Measured(numbers, {}, histograms) | routing
    for name in ("overall", "layers"):
        ours, suites = getattr(update, name), getattr(expected, name)
        assert ours.keys() == suites.keys()
        for column, value in suites.items():
            assert_close(ours[column].float(), value.float(), atol=2e-6, rtol=2e-5, msg=column)
    assert update.histograms.keys() == expected.histograms.keys()
    assert all(torch.equal(update.histograms[name], counts) for name, counts in expected.histograms.items())
    assert routing.overall["expert_change_rate"] > 0


def test_a_probe_measures_what_each_update_moved(tmp_path: Path, whole: Path) -> None:
    trainer(tmp_path, record=tmp_path, probe=16).train()
    probed, without = tables(tmp_path), tables(whole)
    assert probed["updates"][PROBED].notna().any().all()
    assert without["updates"][PROBED].isna().all().all()
    assert_equal(tables(tmp_path, probed=False), tables(whole, probed=False))
    # All sixteen responses are probed: after an update they moved as far as the next update finds them.
    first, second = (probed["updates"][probed["updates"]["update"] == update] for update in (1, 2))
    moved, change = first["expert_change_per_update"].to_numpy(), second["expert_change_rate"].to_numpy()
    np.testing.assert_allclose(moved, change, atol=1e-6)
    assert (moved > 0).all()
    assert record.read_table(folder_of(tmp_path), "steps")["probe_seconds"].gt(0).all()


def test_probe_selects_responses_with_tokens() -> None:
    tokens_BT, mask_BT = torch.arange(12).view(4, 3), torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    inputs = {"prompt_ids": tokens_BT + 20, "prompt_mask": mask_BT * 0 + 1}
    sequences = probed_sequences(inputs | {"completion_ids": tokens_BT, "completion_mask": mask_BT}, 3)
    assert sequences.tokens_BS[:, 3:].tolist() == [[3, 4, 5], [9, 10, 11], [0, 1, 2]]
    assert sequences.response_mask_BT.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]


def test_a_micro_batch_without_tokens_adds_nothing() -> None:
    zeros_BT = torch.zeros(2, 3)
    fields = {"logprobs_BT": zeros_BT, "advantages_BT": zeros_BT, "old_logprobs_BT": zeros_BT}
    batch = Batch(mask_BT=zeros_BT, entropy_BT=zeros_BT, responses=4, tokens=9, **fields)
    full = replace(batch, mask_BT=zeros_BT + 1, entropy_BT=zeros_BT + 0.5)
    parts = [moments.update_moments(each, load("grpo")(each)) for each in (batch, full)]
    both, alone = (moments.update_columns(moments.pooled(each)) for each in (parts, parts[1:]))
    assert both.overall.keys() == alone.overall.keys()
    assert all(torch.equal(value, alone.overall[name]) for name, value in both.overall.items())


def test_a_router_loss_is_recorded_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, record=tmp_path, updates=2, settings={"router_aux_loss_coef": None}).train()
    assert "coefficient 0.001" in capsys.readouterr().out
    assert json.loads((folder_of(tmp_path) / "run.json").read_text())["router_aux_loss"] == 0.001
    trainer(tmp_path / "without", record=tmp_path / "without", updates=2).train()
    assert "auxiliary" not in capsys.readouterr().out
    with_it, without = (tables(results)["updates"]["loss"] for results in (tmp_path, tmp_path / "without"))
    assert 0.0005 < with_it[0] - without[0] < 0.004  # 0.001 × a balanced load's K = 2


def test_dense_model_has_ratios_but_no_routes(tmp_path: Path) -> None:
    trainer(tmp_path, record=tmp_path, dense=True, updates=2).train()
    updates, layers = (record.read_table(folder_of(tmp_path), name) for name in ("updates", "layers"))
    assert (updates["token_ratio_variance"] > 0).tolist() == [False, True]
    assert updates["expert_change_rate"].isna().all()
    assert layers.empty

"""Instruments of the probe and of the evaluation: the tail of the ratio, relative steps, and permuted routes."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from small_models import shipped
from small_runs import PROMPTS, SMALL, executed, planned, sampled
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.probes import UpdateProbe, tail
from steadymoe.bench.training.sampling import Decoding, roll_out
from steadymoe.models import build
from steadymoe.models.routing import routers


def test_tail_is_the_share_of_the_largest_tokens() -> None:
    log_ratio_N = torch.tensor([3.0, -4.0, 0.0, 0.0] + [0.0] * 1996)
    changed_N = torch.zeros(2000, dtype=torch.bool)
    changed_N[0] = True
    columns = tail(log_ratio_N, changed_N)  # 0.1 % of 2,000 tokens are two
    assert {name: float(value) for name, value in columns.items()} == {
        "log_ratio_moment_top": 1.0,
        "log_ratio_moment_top_changed": pytest.approx(9 / 25),
    }
    assert float(tail(log_ratio_N[:3], changed_N[:3])["log_ratio_moment_top"]) == pytest.approx(16 / 25), "one at least"
    assert tail(torch.zeros(5), changed_N[:5]) == {}


@pytest.mark.parametrize("name", ["micro", "dense_micro"])
def test_relative_steps_cover_routers_and_other_weights(name: str, task: Chain) -> None:
    model = build.build(shipped(name), task.tokenizer, 0, "cpu")
    probe = UpdateProbe(model, sampled(model, task).sequences, "fp32")
    of_routers = {id(weight) for router in routers(model) for weight in router.parameters()}
    for factors in ((1.02, 0.999), (0.97, 1.0)):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factors[0] if id(weight) in of_routers else factors[1])
        overall, _ = probe.after_update(model)
        steps = {key: float(value) for key, value in overall.items() if key.startswith("relative_step_")}
        expected = {"relative_step_routers": abs(factors[0] - 1)} if of_routers else {}
        expected["relative_step_others"] = abs(factors[1] - 1)
        assert steps == pytest.approx(expected, rel=1e-3), "since the last call"


def test_permuted_routes_run_experts_from_the_bank(model: PreTrainedModel, task: Chain) -> None:
    """A bank of one token leaves no chance: all tokens run its experts, in sampling as in a forced forward."""
    own = sampled(model, task)
    bank_LNK = own.routes_LBFK[:, own.sequences.route_mask_BF][:, :1]
    made = roll_out(model, task, PROMPTS, 4, torch.Generator().manual_seed(0), Decoding(bank_LNK=bank_LNK))
    sequences = made.sequences
    forced_LBFK = bank_LNK[:, :, None].expand(-1, *sequences.route_mask_BF.shape, -1)
    mask_BT = sequences.response_mask_BT.bool()
    forced = forward(model, sequences, "fp32", forced_LBFK=forced_LBFK).logprobs_BT[mask_BT]
    free = forward(model, sequences, "fp32").logprobs_BT[mask_BT]
    assert_close(made.logprobs_BT[mask_BT], forced, atol=1e-5, rtol=1e-5)
    assert (forced - free).abs().max() > 1e-3


@pytest.mark.parametrize("dense", [False, True])
def test_route_instruments_do_not_change_training(tmp_path: Path, dense: bool) -> None:
    words = [*SMALL, "model=dense_micro" if dense else "model=micro", "probe.every=2"]
    more = ["evaluation.permuted_routes=true"]
    plain, rich = (planned(tmp_path / name, *words, *extra) for name, extra in (("plain", []), ("rich", more)))
    assert [executed(run) for run in (plain, rich)] == ["finished"] * 2
    for table in ("steps", "evaluations"):
        without, with_them = (pd.read_parquet(run.folder / f"{table}.parquet") for run in (plain, rich))
        (added,) = (name for name in with_them if name.endswith("_permuted"))
        assert without[added].isna().all()
        assert with_them[added].notna().any() != dense
        timed = [name for name in without if "second" in name]
        pd.testing.assert_frame_equal(*(frame.drop(columns=[added, *timed]) for frame in (without, with_them)))

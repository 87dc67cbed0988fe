"""Instruments of the probe and of the evaluation: the tail of the ratio, relative steps, and permuted routes."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from small_runs import SMALL, planned
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.report import archive, report_page
from steadymoe.bench.runs import execute, record
from steadymoe.bench.support.seeding import torch_generator
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.forward import forward
from steadymoe.bench.training.probes import UpdateProbe, tail
from steadymoe.bench.training.sampling import Decoding, Rollout, roll_out
from steadymoe.models.routing import routers


def sampled(model: PreTrainedModel, task: Chain, bank_LNK: Tensor | None = None) -> Rollout:
    return roll_out(
        model, task, ["1+2*3=", "5-1+4="], 3, torch_generator(0, "rows", 0, "cpu"), Decoding(bank_LNK=bank_LNK)
    )


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


def test_relative_steps_cover_routers_and_other_weights(model: PreTrainedModel, task: Chain) -> None:
    probe = UpdateProbe(model, sampled(model, task).sequences, "fp32")
    of_routers = {id(weight) for router in routers(model) for weight in router.parameters()}
    for factors in ((1.02, 0.999), (0.97, 1.0)):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factors[0] if id(weight) in of_routers else factors[1])
        overall, _ = probe.after_update(model)
        steps = [float(overall[f"relative_step_{name}"]) for name in ("routers", "others")]
        assert steps == pytest.approx([abs(factor - 1) for factor in factors], rel=1e-3), "since the last call"


def test_largest_tokens_show_where_the_ratio_moved(model: PreTrainedModel, task: Chain) -> None:
    rollout = sampled(model, task)
    probe, mask_BT = UpdateProbe(model, rollout.sequences, "fp32"), rollout.sequences.response_mask_BT.bool()
    with torch.no_grad():
        before = forward(model, rollout.sequences, "fp32")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch_generator(1, "noise", 0, "cpu")))
    overall, _ = probe.after_update(model)
    with torch.no_grad():
        now = forward(model, rollout.sequences, "fp32")
    log_ratio_BT = (now.logprobs_BT - before.logprobs_BT).detach()
    rows = pd.DataFrame(probe.largest(10_000))
    assert len(rows) == mask_BT.sum()
    assert (rows["log_ratio"].abs().diff().dropna() <= 0).all()
    width = mask_BT.shape[1]
    for row in rows.itertuples():
        at = row.response, row.position
        assert mask_BT[at]
        assert row.log_ratio == pytest.approx(float(log_ratio_BT[at]), abs=1e-5)
        assert row.logprob == pytest.approx(float(before.logprobs_BT[at]), abs=1e-5)
        assert row.entropy == pytest.approx(float(before.entropy_BT[at]), abs=1e-5)
        assert row.token == rollout.sequences.tokens_BS[:, -width:][at]
        old_LK, new_LK = (
            found.routes_LBFK[:, row.response, -width + row.position].sort(-1).values for found in (before, now)
        )
        assert row.layers_changed == (old_LK != new_LK).any(-1).sum()
    assert rows["layers_changed"].max() > 0, "or the test shows nothing"
    assert (rows["log_ratio"] != rows["log_ratio_pinned"]).any()
    top = rows["log_ratio"] ** 2
    assert float(overall["log_ratio_moment_top"]) == pytest.approx(top.iloc[0] / top.sum(), rel=1e-4)
    assert len(probe.largest(3)) == 3


def test_permuted_routes_run_experts_from_the_bank(model: PreTrainedModel, task: Chain) -> None:
    """A bank of one token leaves no chance: all tokens run its experts, in sampling as in a forced forward."""
    own = sampled(model, task)
    bank_LNK = own.routes_LBFK[:, own.sequences.route_mask_BF][:, :1]
    made = sampled(model, task, bank_LNK)
    sequences = made.sequences
    forced_LBFK = bank_LNK[:, :, None].expand(-1, *sequences.route_mask_BF.shape, -1)
    mask_BT = sequences.response_mask_BT.bool()
    forced = forward(model, sequences, "fp32", forced_LBFK=forced_LBFK).logprobs_BT[mask_BT]
    free = forward(model, sequences, "fp32").logprobs_BT[mask_BT]
    assert_close(made.logprobs_BT[mask_BT], forced, atol=1e-5, rtol=1e-5)
    assert (forced - free).abs().max() > 1e-3


@pytest.mark.parametrize("dense", [False, True])
def test_route_instruments_do_not_change_training(tmp_path: Path, dense: bool) -> None:
    words = [*SMALL, "model=dense_micro" if dense else "model=micro", "probe.every=1"]
    more = ["probe.largest=4", "evaluation.permuted_routes=true"]
    plain, rich = (planned(tmp_path / name, *words, *extra) for name, extra in (("plain", []), ("rich", more)))
    assert [execute.execute(run) for run in (plain, rich)] == ["finished"] * 2
    for table in ("steps", "evaluations", "tails"):
        without, with_them = (pd.read_parquet(run.folder / f"{table}.parquet") for run in (plain, rich))
        added = [name for name in with_them if name.endswith("_permuted")]
        assert without[added].isna().all(axis=None) if len(without) else True
        timed = [name for name in without if "second" in name]
        if table != "tails":
            pd.testing.assert_frame_equal(*(frame.drop(columns=[*added, *timed]) for frame in (without, with_them)))
            permuted = with_them[added[0]].notna()
            assert permuted.any() != dense
        else:
            assert without.empty
            assert len(with_them) == (0 if dense else 4 * len(pd.read_parquet(rich.folder / "steps.parquet")))
            assert math.isfinite(with_them["log_ratio"].sum())
    if not dense:
        reported_from_the_archive_as_from_the_runs(tmp_path)


def reported_from_the_archive_as_from_the_runs(folder: Path) -> None:
    """Compare the largest tokens of ``folder/rich`` with those of its archive; ``folder/plain`` has none."""
    (experiment,) = archive.experiments(folder / "rich")
    report_page.keep(folder / "rich", None, folder / "kept")
    data, kept = (archive.load(folder / name, experiment) for name in ("rich", "kept"))
    pd.testing.assert_frame_equal(kept["tails"], data["tails"])
    assert (
        data["tails"]["log_ratio"].tolist()
        == record.read_table(Path(data["runs"]["folder"].iloc[0]), "tails")["log_ratio"].tolist()
    ), "to the last digit"
    (folder / "kept" / "data" / experiment / "tails.parquet").unlink()  # an archive of an earlier version
    archive.bind(folder / "kept" / "data" / experiment)
    for without in (folder / "kept", folder / "plain"):
        assert archive.load(without, experiment)["tails"].empty

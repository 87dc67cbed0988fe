"""What `make engines` makes of vLLM's responses; no test runs vLLM."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from committed import assert_same
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from steadymoe.bench.report import write
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.sampling import Decoding, Rollout, roll_out
from steadymoe.integrations.engines import against_vllm as engines

ROOT = Path(__file__).parents[2]
RESPONSES = 3
PROMPTS = ["1+2=", "3-4+5=", "0+1-2+3=", "5+5=", "2-1="]


def written(rollout: Rollout, prompts: list[list[int]]) -> dict[str, Tensor]:
    """A rollout as the worker writes it: response after response, without padding."""
    sequences = rollout.sequences
    mask_BT, width = sequences.response_mask_BT.bool(), sequences.response_width
    assert rollout.routes_LBFK is not None
    fed = sequences.route_mask_BF
    assert fed.sum(-1).tolist() == [len(ids) + n - 1 for ids, n in zip(prompts, mask_BT.sum(-1).tolist(), strict=True)]
    return {
        "lengths_B": mask_BT.sum(-1),
        "tokens_N": sequences.tokens_BS[:, -width:][mask_BT],
        "logprobs_N": rollout.logprobs_BT[mask_BT],
        "routes_NLK": rollout.routes_LBFK[:, fed].transpose(0, 1),
    }


@pytest.fixture
def sampled(model: PreTrainedModel, task: Chain) -> tuple[Rollout, list[list[int]]]:
    prompts = [task.tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(RESPONSES)]
    generator = torch.Generator().manual_seed(0)
    return roll_out(model, task, PROMPTS, RESPONSES, generator, Decoding(top_k=3)), prompts


def test_worker_output_is_read_back_as_its_rollout(sampled: tuple[Rollout, list[list[int]]]) -> None:
    rollout, prompts = sampled
    read = engines.as_rollout(prompts, written(rollout, prompts))
    assert torch.equal(read.sequences.tokens_BS, rollout.sequences.tokens_BS)
    assert torch.equal(read.sequences.mask_BS, rollout.sequences.mask_BS)
    assert read.routes_LBFK is not None
    assert rollout.routes_LBFK is not None
    assert torch.equal(read.routes_LBFK, rollout.routes_LBFK)
    assert_close(read.logprobs_BT, rollout.logprobs_BT, rtol=0, atol=0)


def test_equal_samplers_agree_and_faults_are_detected(
    model: PreTrainedModel, sampled: tuple[Rollout, list[list[int]]]
) -> None:
    rollout, prompts = sampled

    def numbers(tensors: dict[str, Tensor]) -> pd.Series:
        rows = pd.DataFrame(engines.compared(model, engines.as_rollout(prompts, tensors)))
        return rows.set_index(["quantity", "place"])["value"]

    tensors = written(rollout, prompts)
    equal = numbers(tensors)
    assert equal["mean gap", 0] < 1e-6
    assert equal["changed experts", 0] == 0
    assert equal["tokens", 0] == len(tensors["tokens_N"])
    apart = numbers(tensors | {"logprobs_N": tensors["logprobs_N"] - 0.5})
    assert apart["mean gap", 0] == pytest.approx(0.5, abs=1e-5)
    assert [apart["mean gap of quarter", n] for n in range(1, 5)] == pytest.approx([0.5] * 4, abs=1e-5)
    above = apart["larger gaps"]
    assert above[above.index < 0.49].eq(1).all()
    assert above[above.index > 0.51].eq(0).all()
    shifted = numbers(tensors | {"routes_NLK": tensors["routes_NLK"].roll(1, 0)})
    assert shifted["changed experts", 0] > 0.1
    layers = shifted["changed experts of layer"]
    assert layers.mean() == pytest.approx(shifted["changed experts", 0], abs=1e-6)


def test_factors_are_per_seed_and_the_verdict_over_all_seeds() -> None:
    rows = []
    for setting in engines.SETTINGS:
        for engine in (*engines.REAL, *engines.SIMULATED):
            for seed in (1, 2, 3):
                for stage, factor in (("cold start", 0.5), ("mid-run", 2.0)):  # the geometric mean leaves it
                    k3 = seed * factor * {"bf16": 1.5, "fp8": 8.0, "int8": 0.1}.get(engine, 1.0)
                    k3 *= 1 + 1e-8 * seed * (engine in engines.SIMULATED)  # equal factors would have no interval
                    keys = {"setting": setting, "seed": seed, "checkpoint": stage, "engine": engine, "place": 0.0}
                    for name in ("kl_k3", "mean gap", "logprob_gap_max", "changed experts"):
                        rows.append(keys | {"quantity": name, "value": k3 * 1e-6})
    table = engines.summary(pd.DataFrame(rows)).set_index(["responses", "engine"])
    for setting in engines.SETTINGS:
        verdicts = table.loc[setting, "verdict"]
        assert verdicts["bf16"] == "like"
        assert verdicts["fp8"] == "too harsh by 8"
        assert verdicts["int8"] == "too gentle by 10"
        assert verdicts["vllm bf16"] == "–"
        assert table.loc[(setting, "bf16"), "k3 over vLLM's"].mean == pytest.approx(1.5)
    for low, mean, high in ((0.4, 0.9, 1.5), (0.3, 3.0, 30.0), (1.5, 1.9, 2.4), (float("nan"), 3.0, float("nan"))):
        assert engines.verdict(Estimate(mean, low, high, 3)) == "not decided"
    made = pd.DataFrame(rows)
    is_route = made["quantity"] == "changed experts"
    made["value"] = made["value"].mask((made["engine"] == "vllm fp32") & is_route, 0.0)
    engines.gate(made)
    with pytest.raises(SystemExit, match="does not match the trainer"):
        engines.gate(made.assign(value=1.0))
    one_route = made.assign(value=made["value"].mask((made["engine"] == "vllm fp32") & is_route, 1e-4))
    with pytest.raises(SystemExit, match=r"0\.01% of the experts differ"):
        engines.gate(one_route)


def test_engine_is_compared_once_per_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def compare(python: Path, setting: str, seed: int, missing: list[str]) -> pd.DataFrame:
        asked.append(missing)
        return pd.DataFrame({"engine": missing, "value": float(len(asked))})

    monkeypatch.setattr(engines, "compare", compare)
    path, every = tmp_path / "rows.csv", [*engines.REAL, *engines.SIMULATED]
    first = engines.rows_of(Path("python"), "7 tokens", 1, path)
    assert engines.rows_of(Path("python"), "7 tokens", 1, path).equals(first)
    first[first["engine"] != "fp8"].to_csv(path, index=False)
    again = engines.rows_of(Path("python"), "7 tokens", 1, path).set_index("engine")["value"]
    assert asked == [every, ["fp8"]]
    assert again["fp8"] == 2
    assert (again.drop("fp8") == 1).all()
    assert pd.read_csv(path)["engine"].nunique() == len(every)


def test_page_table_matches_the_recorded_rows() -> None:
    table = write.to_markdown(engines.summary(pd.read_csv(ROOT / "results" / "engines" / "engines.csv"))).strip()
    kept = (ROOT / "results" / "engines" / "tables" / "engines.md").read_text().strip()
    assert_same(table, kept, "engines.md")
    assert kept in (ROOT / "docs" / "engines.md").read_text()

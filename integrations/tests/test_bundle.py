"""Another trainer's rollouts: the same numbers whatever the layout, and one line for what is wrong."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_bundles import Row, jsonl, rollouts

from steadymoe.integrations.rollouts import bundle as bundles
from steadymoe.integrations.rollouts.bundle import BadBundle, Bundle

LOGPROBS = ("rollout_logprobs", "old_logprobs", "logprobs")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundles.read(jsonl(tmp_path, rollouts()))[0]


def same(one: Bundle, other: Bundle) -> bool:
    pairs = [(values, getattr(other, name)) for name, values in vars(one).items()]
    return all(b is None if a is None else torch.equal(a, b) for a, b in pairs)


def test_numbers_are_assigned_to_their_tokens(bundle: Bundle) -> None:
    for number, row in enumerate(rollouts()):
        length = len(row["response"])
        assert bundle.mask_BT[number].tolist() == [1] * length + [0] * (6 - length)
        for name in LOGPROBS:
            values_T = getattr(bundle, f"{name}_BT")[number]
            assert values_T[:length].tolist() == pytest.approx(row[name])
            assert not values_T[length:].any()
        assert bundle.rewards_B[number] == row["rewards"]
        assert (bundle.groups_B[number], bundle.minibatches_B[number]) == (number // 4, number // 4 % 3)
    assert bundle.responses == 4
    assert [rows_M.tolist() for rows_M in bundle.minibatches()][1] == [*range(4, 8), *range(16, 20)]


def test_parquet_and_row_order_do_not_matter(bundle: Bundle, tmp_path: Path) -> None:
    rows = rollouts()
    pq.write_table(pa.Table.from_pylist([row | {"text": "x", "step": 3} for row in rows]), tmp_path / "rows.parquet")
    read, ignored = bundles.read(tmp_path / "rows.parquet")
    assert same(read, bundle)
    assert ignored == ["text", "step"]
    interleaved = [rows[group * 4 + place] for place in range(4) for group in range(6)]
    assert same(bundles.read(jsonl(tmp_path, interleaved))[0], bundle)


def test_log_probability_above_0_by_rounding_becomes_0(tmp_path: Path) -> None:
    rows = rollouts()
    for name in LOGPROBS:
        rows[0][name][0] = 2.4e-7
    read, _ = bundles.read(jsonl(tmp_path, rows))
    for values_BT in (read.rollout_logprobs_BT, read.old_logprobs_BT, read.logprobs_BT):
        assert values_BT is not None
        assert values_BT[0, 0] == 0
    rows[0]["logprobs"][0] = 1e-3
    with pytest.raises(BadBundle, match="row 1: logprobs must be logarithms of probabilities, at most 0"):
        bundles.read(jsonl(tmp_path, rows))


def as_trl(row: Row) -> Row:
    right = 9 - len(row["response"])
    padded = {name: row[name] + [math.nan] * right for name in LOGPROBS}
    return {
        "prompt_ids": [7] * 3 + row["prompt"],
        "prompt_mask": [0] * 3 + [1] * len(row["prompt"]),
        "completion_ids": row["response"] + [7] * right,
        "completion_mask": [1] * len(row["response"]) + [0] * right,
        "sampling_per_token_logps": padded["rollout_logprobs"],
        "old_per_token_logps": padded["old_logprobs"],
        "per_token_logps": padded["logprobs"],
        "rewards": row["rewards"],
        "groups_B": int(row["groups"].split()[1]),
        "minibatches": row["minibatches"],
    }


def as_verl(row: Row) -> Row:
    theirs = as_trl(row)
    right = [0.0] * (9 - len(row["response"]))
    return {
        "prompts": theirs["prompt_ids"],
        "responses": theirs["completion_ids"],
        "input_ids": theirs["prompt_ids"] + theirs["completion_ids"],
        "attention_mask": theirs["prompt_mask"] + theirs["completion_mask"],
        "response_mask": theirs["completion_mask"],
        "token_level_scores": [0.0] * (len(row["response"]) - 1) + [row["rewards"]] + right,
        "uid": row["groups"],
        "rollout_log_probs": row["rollout_logprobs"] + right,
        "old_log_probs": row["old_logprobs"] + right,
        "log_prob": row["logprobs"] + right,
        "minibatches": row["minibatches"],
    }


def as_one_line(row: Row) -> Row:
    """Prompt and response in one list: the mask says where the response begins."""
    before, after = [0.0] * len(row["prompt"]), [0.0] * 2
    mask = [0] * len(row["prompt"]) + [1] * len(row["response"]) + [0] * 2
    numbers = {"lp" if name == "logprobs" else name: before + row[name] + after for name in LOGPROBS}
    return numbers | {"response_mask": mask} | {name: row[name] for name in ("rewards", "groups", "minibatches")}


@pytest.mark.parametrize(
    ("layout", "trainer", "given"),
    [(as_trl, "trl", []), (as_verl, "verl", []), (as_one_line, None, ["logprobs=lp"])],
)
def test_the_layouts_of_trainers_give_the_same_numbers(
    bundle: Bundle, tmp_path: Path, layout: Callable[[Row], Row], trainer: str | None, given: list[str]
) -> None:
    path = jsonl(tmp_path, [layout(row) for row in rollouts()])
    assert same(bundles.read(path, bundles.names(trainer, given))[0], bundle)


def test_advantages_are_one_number_or_one_per_token(bundle: Bundle, tmp_path: Path) -> None:
    rows = [row | {"advantages": row["rewards"] - 0.5} for row in rollouts()]
    spread = [row | {"advantages": [row["advantages"]] * len(row["response"])} for row in rows]
    one, other = (bundles.read(jsonl(tmp_path, given))[0] for given in (rows, spread))
    assert same(one, other)
    assert one.advantages_BT is not None
    assert torch.equal(one.advantages_BT, (bundle.rewards_B - 0.5)[:, None] * bundle.mask_BT)


# --- wrong files -------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[list[Row]], object]:
    return lambda rows: [row.pop(name) for row in rows for name in names]


def put(name: str, value: Any) -> Callable[[list[Row]], object]:
    return lambda rows: rows[2].update({name: value})


def masked(mask: list[int]) -> Callable[[list[Row]], object]:
    """Give every row a mask, and the third this one."""
    return lambda rows: [
        row.update(response_mask=mask if place == 2 else [1] * len(row["response"])) for place, row in enumerate(rows)
    ]


# What is wrong → the change, the place that the message names, and its key.
WRONG: dict[str, tuple[Callable[[list[Row]], object], str, str]] = {
    "no rewards": (without("rewards"), "row 1", "rewards"),
    "no groups": (without("groups"), "row 1", "groups"),
    "no response": (without("response"), "row 1", "response"),
    "no policy": (without("logprobs"), "row 1", "logprobs"),
    "no old policy": (without("rollout_logprobs", "old_logprobs"), "row 1", "old_logprobs"),
    "one row lacks": (lambda rows: rows[3].pop("logprobs"), "row 4", "logprobs"),
    "one row has": (put("response_mask", [1]), "row 3", "response_mask"),
    "ragged": (lambda rows: rows[2]["old_logprobs"].append(-1.0), "row 3", "old_logprobs"),
    "nan": (lambda rows: rows[2]["logprobs"].__setitem__(0, math.nan), "row 3", "logprobs"),
    "above 0": (lambda rows: rows[2]["logprobs"].__setitem__(0, 0.5), "row 3", "logprobs"),
    "inf": (put("rewards", math.inf), "row 3", "rewards"),
    "null": (put("rewards", None), "row 3", "rewards"),
    "text": (put("response", "abc"), "row 3", "response"),
    "true": (put("response", [True]), "row 3", "response"),
    "huge": (put("prompt", [2**70]), "row 3", "prompt"),
    "negative": (put("prompt", [-1]), "row 3", "prompt"),
    "group of a list": (put("groups", [1]), "row 3", "groups"),
    "empty response": (put("response", []), "row 3", "one contiguous span"),
    "hole": (masked([1, 0, 1]), "row 3", "response_mask|a hole"),
    "mask of 2": (masked([2]), "row 3", "response_mask"),
    "group too small": (lambda rows: rows.pop(), "rollouts.jsonl", "one size"),
    "other prompt": (put("prompt", [5, 6, 9]), "rollouts.jsonl", "prompt"),
    "torn by mini-batches": (put("minibatches", 2), "rollouts.jsonl", "minibatches"),
    "no rows": (lambda rows: rows.clear(), "rollouts.jsonl", "no rows"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_file_is_refused_with_its_row_and_column(tmp_path: Path, wrong: str) -> None:
    change, place, key = WRONG[wrong]
    rows = rollouts()
    change(rows)
    with pytest.raises(BadBundle, match=f"{place}.*({key})") as refused:
        bundles.read(jsonl(tmp_path, rows))
    assert "\n" not in str(refused.value)


def test_files_without_rollouts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a.jsonl": (b"{\n", "row 1"), "b.jsonl": (b"[1]\n", "row 1"), "c.jsonl": (b"[" * 60000, "row 1")}
    contents |= {"deep.jsonl": (b'{"a":' * 40 + b"1" + b"}" * 40, "row 1.*levels")}
    contents |= {"d.parquet": (b"PAR1", "parquet"), "e.pkl": (b"", ".jsonl or .parquet")}
    for name, (content, key) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadBundle, match=f"{name}.*{key}"):
            bundles.read(tmp_path / name)
    with pytest.raises(BadBundle, match=r"none\.jsonl"):
        bundles.read(tmp_path / "none.jsonl")
    monkeypatch.setattr(bundles, "MAX_BYTES", 3)
    with pytest.raises(BadBundle, match="at most 3 "):
        bundles.read(tmp_path / "b.jsonl")


def test_one_long_row_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"rewards": 0, "old_logprobs": -1.0, "logprobs": -1.0}
    rows = [
        common | {name: [-1.0] * length for name in ("old_logprobs", "logprobs")} | {"groups": index}
        for index, length in enumerate([400, *[1] * 99])
    ]
    path = jsonl(tmp_path, [row | {"response": [1] * len(row["logprobs"])} for row in rows])
    monkeypatch.setattr(bundles, "MAX_BYTES", path.stat().st_size)
    with pytest.raises(BadBundle, match="100 rows padded to 400 tokens are 320000 bytes"):
        bundles.read(path)


@pytest.mark.parametrize("word", ["a", "a=b", "response=", "a=response", "groups,response=a"])
def test_invalid_column_name_is_refused(word: str) -> None:
    with pytest.raises(BadBundle, match="--map"):
        bundles.names(None, [word])
    with pytest.raises(BadBundle, match="two columns are prompt"):
        bundles._known({"prompt": [], "mine": []}, {"mine": "prompt"})


# Small files of large content: a run of one value, a text that a dictionary repeats, a nested text, many rows.
BOMBS: dict[str, tuple[list[Row], str]] = {
    "values": ([{"logprobs": [-1.0] * 1_000_000}], "decodes to more"),
    "text": ([{"groups": "a" * 200_000}] * 1000, "groups must hold"),
    "nested text": ([{"advantages": ["a" * 2000] * 50}] * 20, "advantages must hold"),
    "rows": ([{}] * 100, "decodes to more than 99 rows"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_parquet_bomb_is_refused_before_decoding(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, key = BOMBS[bomb]
    common = {"response": [1], "rewards": 0.0, "old_logprobs": [-1.0], "logprobs": [-1.0], "groups": "0"}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([common | row for row in rows]), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(bundles, "MAX_BYTES", 2**22)
    monkeypatch.setattr(bundles, "_MAX_TEXT", 2**16)
    monkeypatch.setattr(bundles, "MAX_ROWS", 99 if bomb == "rows" else 2**16)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(BadBundle, match=key):
        bundles.read(path)

"""Rollouts of other trainers become bundles: the same numbers whatever the layout, and one line for what is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import MICRO
from safetensors import SafetensorError
from test_bundle import made, same
from test_cli import steadymoe

from steadymoe.bench.bundles import bundle as bundles
from steadymoe.bench.bundles import convert
from steadymoe.bench.bundles.bundle import BadBundle, Bundle
from steadymoe.bench.tasks.chain import Chain
from steadymoe.models import build

Row = dict[str, Any]


@pytest.fixture(scope="module")
def bundle(task: Chain) -> Bundle:
    torch.set_num_threads(1)
    return made(build.build(MICRO, task.tokenizer, 0, "cpu"), task)


def rows_of(bundle: Bundle) -> list[Row]:
    """What another trainer would record of the same rollouts, without padding."""
    width = bundle.tokens_BS.shape[1] - bundle.response_width
    rows = []
    for index in range(len(bundle.groups_B)):
        begin = width - int(bundle.mask_BS[index, :width].sum())
        length = int(bundle.mask_BT[index].sum())
        row: Row = {
            "prompt": bundle.tokens_BS[index, begin:width].tolist(),
            "response": bundle.tokens_BS[index, width : width + length].tolist(),
            "rewards": bundle.rewards_B[index].item(),
            "groups": f"prompt {int(bundle.groups_B[index])}",
            "minibatches": int(bundle.minibatches_B[index]),  # type: ignore[index]
        }
        for name in ("rollout", "old"):
            logprobs_T = getattr(bundle, f"{name}_logprobs_BT")[index]
            row[f"{name}_logprobs"] = logprobs_T[:length].tolist()
        row["logprobs"] = bundle.logprobs_BT[index, :length].tolist()  # type: ignore[index]
        rows.append(row)
    return rows


def jsonl(folder: Path, rows: list[Row]) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_and_parquet_give_the_bundle_that_was_recorded(bundle: Bundle, tmp_path: Path) -> None:
    rows = rows_of(bundle)
    found, left_out = convert.convert(jsonl(tmp_path, [row | {"text": "x", "step": 3} for row in rows]))
    assert same(found, bundle)
    assert left_out == ["text", "step"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts.parquet")
    assert same(convert.convert(tmp_path / "rollouts.parquet")[0], bundle)


def test_rows_in_any_order_come_together_by_groups(bundle: Bundle, tmp_path: Path) -> None:
    rows = rows_of(bundle)
    interleaved = [rows[group * 4 + place] for place in range(4) for group in range(6)]
    assert same(convert.convert(jsonl(tmp_path, interleaved))[0], bundle)


def padded(row: Row) -> tuple[list[int], list[int], list[int], list[int]]:
    """Prompt with mask, response with mask, padded with a token that must not matter."""
    prompt, response = row["prompt"], row["response"]
    left, right = 3, 9 - len(response)
    return (
        [7] * left + prompt,
        [0] * left + [1] * len(prompt),
        response + [7] * right,
        [1] * len(response) + [0] * right,
    )


def as_trl(row: Row) -> Row:
    prompt, prompt_mask, response, mask = padded(row)
    extra = [math.nan] * (len(response) - len(row["response"]))
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt_mask,
        "completion_ids": response,
        "completion_mask": mask,
        "sampling_per_token_logps": row["rollout_logprobs"] + extra,
        "old_per_token_logps": row["old_logprobs"] + extra,
        "per_token_logps": row["logprobs"] + extra,
        "rewards": row["rewards"],
        "groups_B": int(row["groups"].split()[1]),
        "minibatches": row["minibatches"],
    }


def as_verl(row: Row) -> Row:
    prompt, prompt_mask, response, mask = padded(row)
    zeros = [0.0] * (len(response) - len(row["response"]))
    return {
        "prompts": prompt,
        "responses": response,
        "input_ids": prompt + response,
        "attention_mask": prompt_mask + mask,
        "response_mask": mask,
        "token_level_scores": [0.0] * (len(row["response"]) - 1) + [row["rewards"]] + zeros,
        "uid": row["groups"],
        "rollout_log_probs": row["rollout_logprobs"] + zeros,
        "old_log_probs": row["old_logprobs"] + zeros,
        "log_prob": row["logprobs"] + zeros,
        "minibatches": row["minibatches"],
    }


def as_tokens(row: Row) -> Row:
    prompt, prompt_mask, response, mask = padded(row)
    beside = [0.0] * len(prompt)
    whole = {
        "ids": prompt + response,
        "mask": prompt_mask + mask,
        "response_mask": [0] * len(prompt) + mask,
    }
    logprobs = {
        name: beside + row[name] + [0.0] * (len(response) - len(row["response"]))
        for name in ("rollout_logprobs", "old_logprobs", "logprobs")
    }
    return whole | logprobs | {name: row[name] for name in ("rewards", "groups", "minibatches")}


@pytest.mark.parametrize(
    ("layout", "trainer", "given"),
    [(as_trl, "trl", ""), (as_verl, "verl", ""), (as_tokens, None, "ids=tokens")],
)
def test_the_layouts_of_trainers_give_the_same_numbers(
    bundle: Bundle, tmp_path: Path, layout: Callable[[Row], Row], trainer: str | None, given: str
) -> None:
    path = jsonl(tmp_path, [layout(row) for row in rows_of(bundle)])
    found, _ = convert.convert(path, renamed=convert.names(trainer, given))
    assert same(found, bundle)


def test_advantages_are_one_number_or_one_for_each_token(bundle: Bundle, tmp_path: Path) -> None:
    rows = [row | {"advantages": row["rewards"] - 0.5} for row in rows_of(bundle)]
    spread = [row | {"advantages": [row["advantages"]] * len(row["response"])} for row in rows]
    one, other = (convert.convert(jsonl(tmp_path, each))[0] for each in (rows, spread))
    assert same(one, other)
    assert one.advantages_BT is not None
    assert torch.equal(one.advantages_BT, (bundle.rewards_B - 0.5)[:, None] * bundle.mask_BT)


# --- what is wrong -----------------------------------------------------------------------------------


def without(name: str) -> Callable[[list[Row]], object]:
    return lambda rows: [row.pop(name) for row in rows]


def put(name: str, value: Any) -> Callable[[list[Row]], object]:
    return lambda rows: rows[2].update({name: value})


WRONG: dict[str, tuple[Callable[[list[Row]], object], str]] = {
    "no rewards": (without("rewards"), "row 1: has no column rewards; see docs/bundle.md, and --map"),
    "no groups": (without("groups"), "row 1: has no column groups"),
    "no response": (without("response"), "row 1: has no column response"),
    "no log-probabilities": (
        lambda rows: [without(name)(rows) for name in ("rollout_logprobs", "old_logprobs", "logprobs")],
        "row 1: has no log-probabilities, rollout_logprobs, old_logprobs, logprobs",
    ),
    "one row lacks": (lambda rows: rows[3].pop("logprobs"), "row 4: lacks logprobs, unlike row 1"),
    "one row has": (put("mask", [1]), "row 3: has mask, unlike row 1"),
    "ragged": (lambda rows: rows[2]["old_logprobs"].append(-1.0), "row 3: old_logprobs must have a number for each of"),
    "nan": (lambda rows: rows[2]["logprobs"].__setitem__(0, math.nan), "row 3: logprobs must hold finite numbers"),
    "inf": (put("rewards", math.inf), "row 3: rewards must hold finite numbers; got .inf"),
    "null": (put("rewards", None), "row 3: rewards must hold finite numbers; got .None"),
    "text": (put("response", "abc"), "row 3: response must hold whole numbers"),
    "true": (put("response", [True]), "row 3: response must hold whole numbers"),
    "huge": (put("prompt", [2**70]), "row 3: prompt must hold whole numbers"),
    "group of a list": (put("groups", [1]), "row 3: groups must be a whole number or a text"),
    "no empty response": (put("response", []), "row 3: .*one run of 1; it has none"),
    "positive": (lambda rows: rows[2]["logprobs"].__setitem__(0, 0.5), "logprobs_BT must hold logarithms"),
    "group too small": (lambda rows: rows.pop(), "groups_B must be whole groups of one size"),
    "no rows": (lambda rows: rows.clear(), "has no rows"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_answered_in_one_line_with_its_row_and_column(
    bundle: Bundle, tmp_path: Path, wrong: str
) -> None:
    change, words = WRONG[wrong]
    rows = rows_of(bundle)
    change(rows)
    with pytest.raises(BadBundle, match=words) as refused:
        convert.convert(jsonl(tmp_path, rows))
    assert "\n" not in str(refused.value)


def test_masks_that_do_not_mark_one_response_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    rows = [as_tokens(row) for row in rows_of(bundle)]
    at = rows[0]["response_mask"].index(1)
    for change, words in (
        ({"response_mask": [1, 0, *rows[0]["response_mask"][2:]]}, "one run of 1; it has a hole"),
        ({"response_mask": rows[0]["response_mask"][:-1]}, "response_mask must be a list of 0 and 1 for"),
        ({"mask": [1] * len(rows[0]["mask"])}, "mask marks tokens behind the response"),
        ({"mask": [2] * len(rows[0]["mask"])}, "mask must be a list of 0 and 1"),
        ({"prompt": [1]}, "give tokens, or prompt and response"),
    ):
        wrong = [rows[0] | change, *rows[1:]]
        with pytest.raises(BadBundle, match=words):
            convert.convert(jsonl(tmp_path, wrong), renamed=convert.names(None, "ids=tokens"))
    assert at > 0


def test_files_that_are_no_rollouts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "a.jsonl": (b"{\n", "row 1: not JSON"),
        "b.jsonl": (b"[1]\n", "must be an object"),
        "c.parquet": (b"PAR1", "is not a whole parquet file"),
        "d.pkl": (b"", "must be a file .jsonl or .parquet"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadBundle, match=words):
            convert.convert(tmp_path / name)
    with pytest.raises(BadBundle, match="there is no file"):
        convert.convert(tmp_path / "none.jsonl")
    monkeypatch.setattr(convert, "MOST_BYTES", 3)
    with pytest.raises(BadBundle, match="at most 3 are read"):
        convert.convert(tmp_path / "b.jsonl")


def test_one_long_row_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"prompt": [1], "response": [1] * length, "rewards": 0, "groups": index, "logprobs": [-1.0] * length}
        for index, length in enumerate([400, *[1] * 99])
    ]
    path = jsonl(tmp_path, rows)
    monkeypatch.setattr(convert, "MOST_BYTES", path.stat().st_size)
    with pytest.raises(BadBundle, match=r"100 rows padded to 1 \+ 400 tokens are 320800 bytes"):
        convert.convert(path)


@pytest.mark.parametrize("word", ["a", "a=b", "=tokens", "a=tokens=groups"])
def test_a_wrong_name_is_answered_with_the_right_ones(word: str) -> None:
    with pytest.raises(BadBundle, match="--map takes theirs=ours with ours one of prompt, response, tokens"):
        convert.names(None, word)


def test_the_command_converts_and_refuses_before_anything_is_written(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path, [{"lp": row.pop("logprobs")} | row for row in rows_of(bundle)])
    words = ["bundle", "convert", str(path), str(tmp_path / "made"), "--model", "micro", "--map", "lp=logprobs"]
    assert steadymoe(monkeypatch, *words[:-1], "lp=prompt") == 2
    assert "row 1: two columns are prompt" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert steadymoe(monkeypatch, *words) == 0
    assert same(bundles.read(tmp_path / "made"), bundle)
    assert steadymoe(monkeypatch, *words) == 2
    assert "exists already" in capsys.readouterr().err


# --- small files of large content --------------------------------------------------------------------


def bomb(path: Path, rows: list[Row]) -> Path:
    common = {"prompt": [1], "response": [1], "rewards": 0.0, "logprobs": [-1.0]}
    table = pa.Table.from_pylist([common | {"groups": 0} | row for row in rows])
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 10_000
    return path


def test_a_small_parquet_file_that_decodes_to_much_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one value takes a few bytes, so sizes in the metadata stay small: the number of values does not."""
    path = bomb(tmp_path / "runs.parquet", [{"logprobs": [-1.0] * 1_000_000}])
    monkeypatch.setattr(convert, "MOST_BYTES", 2**22)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(BadBundle, match=r"runs\.parquet decodes to more than 65536 rows or 4194304 bytes"):
        convert.convert(path)


def test_a_text_that_a_dictionary_repeats_is_refused_by_what_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata know one text of 200 KB; a thousand rows repeat it."""
    path = bomb(tmp_path / "texts.parquet", [{"groups": "a" * 200_000}] * 1000)
    monkeypatch.setattr(convert, "MOST_BYTES", 2**22)
    with pytest.raises(BadBundle, match="decodes to more than"):
        convert.convert(path)


def test_more_rows_than_a_bundle_holds_are_refused_by_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(convert.MOST, "B", 99)
    with pytest.raises(BadBundle, match="decodes to more than 99 rows"):
        convert.convert(bomb(tmp_path / "rows.parquet", [{}] * 100))


def test_columns_that_no_bundle_holds_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bomb(tmp_path / "beside.parquet", [{"text": ["a" * 200_000] * 50}] * 20)
    monkeypatch.setattr(convert, "MOST_BYTES", 2**20)
    assert convert.convert(path)[1] == ["text"]
    with pytest.raises(BadBundle, match="text must hold numbers"):
        convert.convert(path, renamed={"text": "advantages"})


def test_a_full_disk_is_answered_in_one_line(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(bundles, "save_file", full)
    file = jsonl(tmp_path, rows_of(bundle))
    assert steadymoe(monkeypatch, "bundle", "convert", str(file), str(tmp_path / "made"), "--model", "micro") == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]

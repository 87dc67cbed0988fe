"""A local checkpoint is the model: its weights, tokenizer, chat template and limits; what cannot be used is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import shipped
from small_runs import SMALL
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch.testing import assert_close
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from steadymoe.bench.runs import compose, execute, record, run_folder
from steadymoe.bench.schema import ConfigError
from steadymoe.bench.tasks import decoded, end_ids
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.sampling import roll_out
from steadymoe.models import build, pretrained

# "=3+4==" for a prompt "3+4=": in characters that the task's own tokenizer has.
TEMPLATE = (
    "{% for message in messages %}={{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
WORDS = [word for word in SMALL if not word.startswith("model")]


@pytest.fixture
def folder(tmp_path: Path, task: Chain, model: PreTrainedModel) -> Path:
    """A checkpoint of a fresh small model with the tokenizer of the task."""
    model.save_pretrained(tmp_path / "checkpoint")
    task.tokenizer.backend_tokenizer.no_padding()  # a call with padding=True leaves it in tokenizer.json
    task.tokenizer.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def planned(folder: Path, *words: str) -> compose.Run:
    given = ["model=pretrained", f"model.path={folder}", f"results_dir={folder.parent / 'results'}"]
    return compose.plan([*WORDS, *given, *words])[0]


def edit(file: Path, **values: Any) -> None:
    """Change values of a JSON file; None takes one out."""
    numbers = (json.loads(file.read_text()) if file.exists() else {}) | values
    file.write_text(json.dumps({key: value for key, value in numbers.items() if value is not None}))


def in_vocabulary(folder: Path, token: str, index: int) -> None:
    """Give the tokenizer, and the model, one more token."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][token] = index
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit(folder / "config.json", vocab_size=32)


def test_checkpoint_loads_completely_and_like_a_built_model(folder: Path, model: PreTrainedModel) -> None:
    loaded = pretrained.load(str(folder), "cpu")
    assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert not any(module.training for module in loaded.modules())
    assert (loaded.config._experts_implementation, loaded.config._attn_implementation) == ("grouped_mm", "sdpa")
    assert pretrained.moe_layers(str(folder)) == 3


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["no template", "chat template"])
def test_training_starts_from_the_checkpoint(folder: Path, model: PreTrainedModel, template: str | None) -> None:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    made = planned(folder, "updates=4", "algorithm.entropy_bonus=1")
    assert execute.execute(made) == "finished"
    facts = run_folder.read_run(made.folder) or {}
    assert facts["cold_start"] == {"checkpoint": str(folder)}
    assert facts["parameters"] == model.num_parameters()
    assert not (folder.parent / "results" / "cold_starts").exists()
    assert len(record.read_table(made.folder, "steps")) == 2
    assert set(record.read_table(made.folder, "layers")["layer"]) == {0, 1, 2}
    prompts = record.read_table(made.folder, "evaluations")["prompt"]
    assert all(prompt[0].isdigit() and prompt.count("=") == 1 for prompt in prompts), "what is recorded is the task's"


def test_prompts_use_the_chat_template_and_left_padding(folder: Path, task: Chain) -> None:
    plain = pretrained.load_tokenizer(str(folder))
    assert plain(["1+2="])["input_ids"] == task.tokenizer(["1+2="])["input_ids"]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chat = pretrained.load_tokenizer(str(folder))
    encoded = chat(["1+2=", "1+2*3="], padding=True, padding_side="left", return_tensors="pt")
    texts = ["=1+2==", "=1+2*3=="]
    assert encoded["input_ids"].tolist() == task.tokenizer(texts, padding=True)["input_ids"]
    assert encoded["attention_mask"].tolist()[0] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert chat.decode(encoded["input_ids"][1].tolist()) == texts[1]
    assert (len(chat), chat.eos_token_id) == (len(task.tokenizer), task.tokenizer.eos_token_id)


def test_pad_token_defaults_to_the_end_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    tokenizer = pretrained.load_tokenizer(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_hash_depends_on_content_not_location(folder: Path) -> None:
    (folder / "folder.json").mkdir()  # no part of it
    copied = folder.parent / "elsewhere"
    shutil.copytree(folder, copied)
    (copied / "README.md").write_text("a checkpoint")
    assert planned(copied).config_hash == planned(folder).config_hash
    for change in (
        lambda: save_file(
            load_file(copied / "model.safetensors") | {"more": torch.ones(1)}, copied / "model.safetensors"
        ),
        lambda: edit(copied / "config.json", num_experts_per_tok=1),
        lambda: (copied / "chat_template.jinja").write_text(TEMPLATE),
    ):
        before = planned(copied).config_hash
        change()
        assert planned(copied).config_hash != before


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def wrong(name: str, **values: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder / f"{name}.json", **values)


CHAT = "chat_template.jinja"


@pytest.mark.parametrize(
    ("spoil", "answer"),
    [
        (shutil.rmtree, "is not a folder with a config.json"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "has no model.safetensors"),
        (write("config.json", "{"), "config in .* cannot be loaded"),
        (write("model.safetensors", "weights"), "model.safetensors in .* is not a safetensors"),
        (write("model.safetensors.index.json", "{"), "is not an index of weights"),
        (wrong("model.safetensors.index", weight_map={"a": 3}), "has no 3"),
        (write("generation_config.json", "{"), "generation_config.json in .* cannot be read"),
        (wrong("config", model_type="mine", auto_map={"AutoConfig": "mine.Config"}), "config in .* cannot be loaded"),
        (wrong("config", model_type="t5"), "T5Config"),
        (wrong("config", quantization_config={"quant_method": "fp8"}), "are quantised"),
        (wrong("config", model_type="phimoe"), "PhimoeTopKRouter"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "has no tokenizer"),
        (wrong("tokenizer_config", eos_token=None), "has no end token"),
        (wrong("config", vocab_size=9), "has 16 tokens, but its model has 9"),
        (write(CHAT, "hello"), "cannot encode the prompts of this task"),
        (write(CHAT, TEMPLATE.replace("content'] }", "content'][1:] }")), "changes the prompt"),
        (write(CHAT, TEMPLATE + "<eos>"), "puts an end token behind"),
        (write(CHAT, "{{ '0123456789' | random }}" + TEMPLATE), "differently each time"),
        (lambda folder: in_vocabulary(folder, "", 16), "has 1 tokens without a text, first 16"),
        (lambda folder: in_vocabulary(folder, "x", 20), "has 17 tokens, but ids up to 20"),
        (wrong("config", max_position_embeddings=8), "need 11 positions; .* has 8"),
        (wrong("generation_config", max_length=10), "need 11 positions; .* has 10"),
        (wrong("generation_config", max_new_tokens=4), "is 5, .* allows responses of 4"),
    ],
)
def test_unusable_checkpoint_is_refused_in_one_line(folder: Path, spoil: Callable[[Path], None], answer: str) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=answer) as refusal:
        planned(folder)
    assert "\n" not in str(refusal.value)


def test_settings_of_built_models_are_refused(folder: Path) -> None:
    for word, message in (
        ("model.path=null", "needs a checkpoint's folder"),
        ("+model.config.num_experts_per_tok=1", "takes its config from the checkpoint"),
        (f"cold_start.path={folder}/model.safetensors", "leave cold_start.path out"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(folder, word)


def test_further_end_tokens_of_the_checkpoint_end_a_response(folder: Path, task: Chain) -> None:
    edit(folder / "config.json", eos_token_id=[1, 15])
    edit(folder / "generation_config.json", eos_token_id=[1, 14])
    task.tokenizer = pretrained.load_tokenizer(str(folder))
    assert end_ids(task.tokenizer) == (1, 14, 15)
    model = pretrained.load(str(folder), "cpu")
    made = roll_out(model, task, ["1+2="] * 64, 8, torch.Generator().manual_seed(0))
    mask_BT = made.sequences.response_mask_BT
    responses_BT = made.sequences.tokens_BS[:, -made.sequences.response_width :]
    ends_BT = torch.isin(responses_BT, torch.tensor([1, 14, 15])) & mask_BT.bool()
    assert {1, 14, 15} == set(responses_BT[ends_BT].tolist())
    assert (ends_BT.sum(-1) <= 1).all()
    assert (ends_BT[:, :-1] & mask_BT[:, 1:].bool()).sum() == 0, "nothing follows an end"


def test_ids_without_a_token_are_never_drawn(folder: Path, task: Chain) -> None:
    model = pretrained.load(str(folder), "cpu")
    model.resize_token_embeddings(32, mean_resizing=False)  # as many real vocabularies are
    with torch.no_grad():
        model.get_output_embeddings().weight[16:] = 100 * model.get_output_embeddings().weight[:16]
    model.save_pretrained(folder)
    made = planned(folder, "updates=2")
    loaded = pretrained.load(str(folder), "cpu")
    task.tokenizer = pretrained.load_tokenizer(str(folder))
    assert loaded.config.vocab_size == loaded.get_output_embeddings().weight.shape[0] == 16
    rollout = roll_out(loaded, task, ["1+2="] * 8, 8, torch.Generator().manual_seed(0))
    assert int(rollout.sequences.tokens_BS.max()) < 16
    assert execute.execute(made) == "finished"


def test_text_that_is_scored_is_that_of_the_drawn_tokens(folder: Path) -> None:
    """A tokenizer that strips the first space of what it decodes, and tidies the others."""
    words = {"<eos>": 0, "=": 1, "▁4": 2, "4": 3, "▁": 4}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert tokenizer.decode([2]) == tokenizer.decode([3]) == "4"
    assert [decoded(tokenizer, [1], [token])[0] for token in (2, 3, 4)] == [" 4", "4", " "]
    assert decoded(tokenizer, [1], [3, 3, 0]) == ("44", True)
    assert decoded(tokenizer, [1], [0]) == ("", True)


def test_dates_in_a_chat_template_do_not_depend_on_the_day(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{%", "{{ strftime_now('%d') }}{%", 1))
    tokenizer = pretrained.load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer(["1+2="])["input_ids"][0]) == "2024-07-26=1+2=="


@pytest.mark.parametrize("before", ["", "    ", "\n", "\n  "])
def test_a_chat_template_keeps_its_own_whitespace(before: str, folder: Path) -> None:
    template = before + "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "1+2="}]
    plain = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    assert pretrained.load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False) == plain


def test_a_default_of_the_config_class_ends_no_response(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    assert pretrained.load_tokenizer(str(folder)).end_ids == (AutoTokenizer.from_pretrained(folder).eos_token_id,)


def test_an_end_token_within_an_answer_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    zero = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("0")
    edit(folder / "config.json", eos_token_id=[1, zero])
    with pytest.raises(ConfigError, match="name the token '0' as an end"):
        planned(folder)


def test_missing_weights_fail_the_run(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in weights.items() if "1.mlp.gate" not in key}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate\.weight"):
        pretrained.load(str(folder), "cpu")
    assert execute.execute(planned(folder)) == "failed"


def test_dense_checkpoint_trains_without_router_settings(tmp_path: Path, task: Chain) -> None:
    build.build(shipped("dense_micro"), task.tokenizer, 0).save_pretrained(tmp_path / "dense")
    task.tokenizer.save_pretrained(tmp_path / "dense")
    assert execute.execute(planned(tmp_path / "dense", "updates=2")) == "finished"
    with pytest.raises(ConfigError, match="has no routers"):
        planned(tmp_path / "dense", "routing=r2")

"""``inspect``: planted ratios are found in every family and layout; what is no MoE checkpoint is refused."""

import json
import math
import os
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Said
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from steadymoe.bench import cli
from steadymoe.bench.runs import compose
from steadymoe.bench.tasks.chain import Chain
from steadymoe.integrations import command
from steadymoe.integrations import inspect as inspecting
from steadymoe.integrations.inspect import RULES, inspect, role_of
from steadymoe.models import build
from steadymoe.models.routing import routers

FAMILIES = (
    "mixtral_micro",
    "qwen2_moe_micro",
    "qwen3_next_micro",
    "olmoe_micro",
    "deepseek_v3_micro",
    "gpt_oss_micro",
    "granitemoe_micro",
    "micro",
)
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLANTED = {"attention": 2.0**-2, "experts": 2.0**-1, "rest": 2.0**-3}  # exact in bf16


def router_rms(layer: int) -> float:
    return 2.0 ** -(4 + layer)


@torch.no_grad()
def planted(name: str, task: Chain, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, list[float]]:
    """A model whose matrices have planted RMS, told apart by its modules, and router over others by layer."""
    config = compose.plan([f"model={name}"])[0].config.model["config"]
    model = build.build(config, task.tokenizer, seed=0, device="cpu").to(dtype)
    of_routers, ratios = {id(router.weight) for router in routers(model)}, []
    for layer in model.get_submodule("model.layers"):
        if not any(id(weight) in of_routers for weight in layer.parameters()):
            continue
        of_attention = {id(w) for key, part in layer.named_children() if "attn" in key for w in part.parameters()}
        squares = count = 0.0
        for key, weight in layer.named_parameters():
            stacked = weight.dim() == 3 and ".experts" in key
            if id(weight) in of_routers:
                rms = router_rms(len(ratios))
            elif (weight.dim() != 2 and not stacked) or key.endswith("bias"):
                rms = 100.0  # counts nowhere
            else:
                rms = PLANTED["experts" if stacked else "attention" if id(weight) in of_attention else "rest"]
                squares, count = squares + weight.numel() * rms**2, count + weight.numel()
            weight.copy_(rms * torch.sign(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) + 1e-9))
        ratios.append(math.sqrt(squares / count) / router_rms(len(ratios)))
    return model, ratios


def stacked(model: PreTrainedModel, folder: Path) -> None:
    """Save by the names of the modules, with experts stacked."""
    folder.mkdir()
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("name", FAMILIES)
def test_planted_ratios_are_found_in_every_family_and_layout(name: str, task: Chain, tmp_path: Path) -> None:
    model, ratios = planted(name, task)
    assert len(set(ratios)) == len(ratios) > 1
    stacked(model, tmp_path / "stacked")
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    bf16, _ = planted(name, task, torch.bfloat16)
    bf16.save_pretrained(tmp_path / "bf16")
    for layout in ("stacked", "single", "sharded", "bf16"):
        found = inspect(tmp_path / layout, rate=1e-5)
        assert len(found["layers"]) == len(ratios)
        for number, (layer, ratio) in enumerate(zip(found["layers"], ratios, strict=True)):
            assert layer["rms"]["router"] == pytest.approx(router_rms(number)), layout
            assert layer["rms"]["attention"] == pytest.approx(PLANTED["attention"]), layout
            assert layer["rms"]["experts"] == pytest.approx(PLANTED["experts"]), layout
            assert layer["router_over_others"]["AdamW"] == pytest.approx(ratio), layout
            assert layer["relative_step"]["AdamW"]["router"] == pytest.approx(1e-5 / router_rms(number)), layout
        assert found["router_over_others"]["AdamW"] == pytest.approx(statistics.median(ratios))
    saved = load_file(tmp_path / "single" / FILE)
    if name not in ("gpt_oss_micro", "granitemoe_micro"):  # those two stack experts in their checkpoints, too
        assert any(".experts.0." in key for key in saved)


@pytest.mark.parametrize(
    ("path", "shape", "role"),
    [
        ("mlp.gate.moe_statics.e_score_correction_bias", (1, 8), None),  # ERNIE
        ("mlp.shared_experts.gate_proj", (8, 96, 64), None),  # Inkling, were it to share as many as it routes
        ("mlp.gate_proj.weight", (96, 64), "rest"),
        ("shared_mlp.input_linear.weight", (192, 64), "rest"),
        ("feed_forward.router.weight", (8, 64), "router"),  # Llama 4, Jamba
        ("feed_forward.gate.weight", (8, 64), "router"),  # LFM2
        ("ffn.router.layer.weight", (8, 64), "router"),  # DBRX
        ("ffn.experts.mlp.w1", (8 * 96, 64), "experts"),
        ("norm_attn_norm.attn.Wqkv.weight", (192, 64), "attention"),
        ("mlp.gate.wg.weight", (8, 64), "router"),  # HunYuan
        ("mixer.gate.weight", (8, 64), "router"),  # Nemotron-H
        ("router.proj.weight", (8, 64), "router"),  # Gemma 4
        ("mlp.router.classifier.weight", (8, 64), "router"),  # LongCat, Switch
        ("mlp.experts.expert_0.wi.weight", (96, 64), "experts"),
        ("self_attention.experts.router.layer.weight", (8, 64), "router"),  # JetMoE routes in attention, too
        ("self_attention.experts.input_linear.weight", (8, 64, 64), "experts"),
        ("self_attn.gate.weight", (64, 64), "attention"),
        ("self_attn.gate_proj.weight", (64, 64), "attention"),
        ("linear_attn.conv1d.weight", (8, 1, 4), None),  # Qwen3-Next
        ("mamba.in_proj.weight", (96, 64), "rest"),
        ("mamba.A_log", (96, 16), None),
        ("input_layernorm.weight", (64,), None),
        ("mlp.experts.gate_up_proj", (8, 0, 64), None),
    ],
)
def test_role_follows_from_name_and_shape(path: str, shape: tuple[int, ...], role: str | None) -> None:
    assert role_of(path, shape, frozenset({8})) == role


@pytest.mark.parametrize("shape", [(8, 48), (48, 8), (32, 32)])
def test_rules_match_the_steps_of_torchs_optimizers(shape: tuple[int, int], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    save_file({"layers.0.mlp.gate.weight": weight, "layers.0.experts.0.w": weight.clone()}, tmp_path / FILE)
    predicted = inspect(tmp_path, rate=1e-3)["layers"][0]["relative_step"]

    def step(optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> float:
        moved = nn.Parameter(weight.clone())
        moved.grad = gradient.clone()
        optimizer([moved], lr=1e-3, weight_decay=0.0, **settings).step()
        return rms(moved.detach() - weight) / rms(weight)

    assert step(torch.optim.AdamW) == pytest.approx(predicted["AdamW"]["router"], rel=1e-3)
    for adjustment in ("original", "match_rms_adamw"):
        # Newton–Schulz leaves singular values around 1.
        rule = predicted[f"Muon ({adjustment})"]["router"]
        assert step(torch.optim.Muon, adjust_lr_fn=adjustment) == pytest.approx(rule, rel=0.2)


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def test_stacked_experts_step_under_muon_as_one_tensor_per_expert(tmp_path: Path) -> None:
    stack, router = torch.randn(4, 24, 16), torch.randn(4, 16)
    for name, experts in (
        ("stacked", {"layers.0.mlp.experts.down_proj": stack}),
        ("each", {f"layers.0.mlp.experts.{e}.down_proj.weight": each.clone() for e, each in enumerate(stack)}),
    ):
        (tmp_path / name).mkdir()
        save_file(experts | {"layers.0.mlp.gate.weight": router}, tmp_path / name / FILE)
    one, other = (inspect(tmp_path / name, rate=1e-6)["layers"][0] for name in ("stacked", "each"))
    for rule in RULES:
        assert one["relative_step"][rule] == pytest.approx(other["relative_step"][rule])


@pytest.fixture(autouse=True)
def integrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ran`` and ``refused`` call ``steadymoe-integrations``."""
    monkeypatch.setattr(cli, "main", partial(cli.main, command._run))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three layers, of which the first is dense, with a router a quarter, then an eighth as large as the rest."""
    tensors = {"model.embed_tokens.weight": torch.full((9, 4), 7.0)}
    for layer, rms in enumerate((1.0, 0.25, 0.125)):
        stem = f"model.layers.{layer}"
        tensors[f"{stem}.mlp.up_proj.weight" if layer == 0 else f"{stem}.mlp.gate.weight"] = torch.full((2, 4), rms)
        tensors |= {f"{stem}.mlp.experts.{e}.up_proj.weight": torch.ones(6, 4) for e in range(2 * (layer > 0))}
    (tmp_path / "moe").mkdir()
    save_file(tensors, tmp_path / "moe" / FILE)
    return tmp_path / "moe"


def test_last_line_and_json_have_the_same_number(checkpoint: Path, ran: Said) -> None:
    before = sorted(checkpoint.parent.rglob("*"))
    *_, last = ran("inspect", str(checkpoint)).splitlines()
    assert last.startswith("Your routers step 6 times as far as the other weights")
    assert "2 layers, from 4 to 8" in last
    found = json.loads(ran("inspect", str(checkpoint), "--json", "--rate", "1e-4"))
    assert found["router_over_others"]["AdamW"] == pytest.approx(6)
    assert [layer["layer"] for layer in found["layers"]] == ["model.layers.1", "model.layers.2"]
    steps = {"router": 8e-4, "experts": 1e-4, "others": 1e-4}
    assert found["layers"][1]["relative_step"]["AdamW"] == pytest.approx(steps)
    assert sorted(checkpoint.parent.rglob("*")) == before


@pytest.mark.parametrize("stem", ["model.layers.3", "mtp.layers.0"])
def test_layers_of_multi_token_prediction_are_left_out(stem: str, checkpoint: Path) -> None:
    before = inspect(checkpoint, 1e-6)
    further = {
        f"{stem}.mlp.gate.weight": torch.full((2, 4), 0.5),
        f"{stem}.mlp.experts.0.up_proj.weight": torch.ones(6, 4),
    }
    if stem.startswith("model"):  # DeepSeek-V3's, behind the main layers
        further |= {f"{stem}.eh_proj.weight": torch.ones(4, 8), f"{stem}.shared_head.head.weight": torch.ones(9, 4)}
    edit(checkpoint, lambda tensors: tensors | further)
    assert inspect(checkpoint, 1e-6) == before


def test_reading_in_pieces_does_not_change_numbers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(checkpoint / FILE)
    save_file({key: torch.randn(value.shape) for key, value in tensors.items()}, checkpoint / FILE)
    whole = inspect(checkpoint, 1e-6)
    monkeypatch.setattr(inspecting, "_PIECE", 5)
    pieces = inspect(checkpoint, 1e-6)
    for one, other in zip(whole["layers"], pieces["layers"], strict=True):
        assert one["rms"] == pytest.approx(other["rms"], rel=1e-12)


def test_name_is_printed_literally(checkpoint: Path, ran: Said) -> None:
    tensors = load_file(checkpoint / FILE)
    save_file({f"\x1b[31m{key}": value for key, value in tensors.items()}, checkpoint / FILE)
    said = ran("inspect", str(checkpoint))
    assert "\x1b" not in said
    assert "\\x1b[31mmodel.layers.1" in said


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / FILE)), folder / FILE)


def shard(folder: Path, **files: str) -> None:
    """Turn the file into a shard, with an index that has ``files`` for the tensors it names."""
    named = dict.fromkeys(load_file(folder / FILE), "model-1.safetensors") | files
    (folder / FILE).rename(folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))


def linked(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "blob")
    (folder / FILE).symlink_to(folder.parent / "blob")


def pickled(folder: Path) -> None:
    (folder / FILE).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if part not in key}


def filled(part: str, value: float, dtype: torch.dtype = torch.float32) -> Callable[..., dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: torch.full_like(each, value, dtype=dtype) if part in key else each for key, each in tensors.items()
        }

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (pickled, "pytorch_model.bin is a pickle, and pickles are not read"),
        (lambda folder: (folder / FILE).unlink(), f"has neither {FILE} nor {INDEX}"),
        (lambda folder: os.truncate(folder / FILE, (folder / FILE).stat().st_size - 8), "not a valid safetensors file"),
        (linked, "is a link, and links are not followed: copy the folder with cp -rL"),
        (lambda folder: ((folder / FILE).unlink(), os.mkfifo(folder / FILE)), "is not a regular file"),
        (lambda folder: shard(folder, x="model-2.safetensors"), "lacks model-2.safetensors, one of 2 files"),
        (lambda folder: shard(folder, x="model-1.safetensors"), "lacks x, which"),
        (lambda folder: shard(folder, x="../moe/model-1.safetensors"), "must name safetensors files in its folder"),
        (lambda folder: shard(folder, x="pytorch_model.bin"), "must name safetensors files in its folder"),
        (lambda folder: (shard(folder), (folder / INDEX).write_text("{}")), "is not an index of weights"),
        (lambda folder: (shard(folder), (folder / INDEX).write_text('{"weight_map": {}}')), "got none"),
        (lambda folder: edit(folder, without("mlp.experts")), "no layer has a router and experts: the model is dense"),
        (lambda folder: edit(folder, without("1.mlp.gate")), "model.layers.1 has experts, but no router"),
        (lambda folder: edit(folder, filled("2.mlp.gate", 0.0)), "model.layers.2 (router) are all zero"),
        (lambda folder: edit(folder, filled("1.up_proj", math.nan)), "model.layers.1 (experts) are all zero or not"),
        (
            lambda folder: edit(folder, filled("1.up_proj", 1, torch.float8_e4m3fn)),
            "model.layers.1 is quantised (F8_E4M3)",
        ),
    ],
)
def test_non_moe_checkpoint_fails_in_one_line(
    spoil: Callable[[Path], None], message: str, checkpoint: Path, refused: Said
) -> None:
    spoil(checkpoint)
    before = sorted(checkpoint.parent.rglob("*"))
    assert message in refused("inspect", str(checkpoint))
    assert sorted(checkpoint.parent.rglob("*")) == before


def test_checkpoint_folder_may_be_a_link(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint.parent / "link").symlink_to(checkpoint)
    assert inspect(checkpoint.parent / "link", 1e-6)["router_over_others"]["AdamW"] == pytest.approx(6)


@pytest.mark.parametrize("rate", ["0", "nan", "2", "fast"])
def test_invalid_rate_is_refused(rate: str, checkpoint: Path, refused: Said) -> None:
    refused("inspect", str(checkpoint), f"--rate={rate}")


def test_unknown_command_is_refused(refused: Said) -> None:
    assert "unknown command 'inspct'; choose from inspect" in refused("inspct")

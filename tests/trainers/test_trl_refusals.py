"""What the TRL adapter refuses, in one line and before any work.

`make check-trainers` runs this file in an environment that has TRL.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("trl")

from accelerate.commands.config import load_config_from_file
from transformers import DistributedConfig
from trl import GRPOConfig, GRPOTrainer
from trl_runs import trainer

from steadymoe.algorithms import load
from steadymoe.algorithms.corrections import TruncatedIS, Uncorrected
from steadymoe.algorithms.objective import KL, Objective
from steadymoe.bench.config.validate import ConfigError
from steadymoe.bench.trainers import objectives, trl_refusals

pytestmark = pytest.mark.trl

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"loss": "gspoo"}, "unknown algorithm"),
        ({"loss": "gspo@trl-9"}, "unknown algorithm"),
        ({"loss": "gepo", "rows": 4, "accumulation": 4}, "needs the whole mini-batch"),
        ({"loss": "trm"}, "most likely tokens"),
        ({"loss": "rspo", "dense": True}, "router_log_ratio_LBTK"),
        ({"loss": load("grpo", anchor="rollout"), "with_rollout": False}, "rollout_logprobs_BT"),
        ({"correction": "tis", "with_rollout": False}, "rollout_logprobs_BT"),
        ({"correction": "tiss"}, "unknown correction"),
        ({"loss": load("grpo", anchor="rollout"), "correction": "tis"}, "another correction"),
        ({"routing": "r3"}, "the sampler's routes"),
        ({"routing": "free"}, "unknown routing"),
        ({"routing": "r2", "dense": True}, "the model is dense"),
        ({"routing": "freeze", "dense": True}, "the model is dense"),
        ({"settings": {"epsilon": 0.3}}, "belongs to TRL's own loss"),
        ({"settings": {"loss_type": "grpo"}}, "belongs to TRL's own loss"),
        ({"settings": {"use_vllm": True}, "correction": "tis"}, "two corrections at once"),
        ({"settings": {"use_vllm": True}}, "TRL's own correction"),
        ({"probe": -1}, "probe is a number of responses"),
        ({"settings": {"model_init_kwargs": {"distributed_config": {"tp_size": 2}}}}, "tp_size=2 processes share"),
        ({"settings": {"model_init_kwargs": {"distributed_config": {"fsdp_size": 4}}}}, "tied embeddings of 14 tokens"),
        ({"rows": 4, "accumulation": 4, "settings": {"steps_per_generation": 6}}, "must be a multiple"),
        ({"task": "a/b", "record": "results"}, "task must be letters"),
    ],
)
def test_bad_requests_are_one_line_before_any_work(
    named: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        trainer(tmp_path, **named)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "results").exists()


def test_sharding_that_would_silently_be_left_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="accelerate does not shard"):
        trainer(tmp_path)


def test_an_unknown_field_names_the_fields() -> None:
    with pytest.raises(TypeError, match="did you mean clip_low"):
        load("gspo", epsilon=0.1)


def test_a_kl_term_is_the_trainers(tmp_path: Path) -> None:
    objective = Objective(loss=load("grpo"), correction=Uncorrected(), kl=KL(coefficient=0.1))
    with pytest.raises(ConfigError, match="the two must be equal"):
        objectives.chosen(objective, "none", beta=0.0)
    with pytest.raises(ConfigError, match="already has a correction"):
        objectives.chosen(replace(objective, correction=TruncatedIS()), "mis", beta=0.1)
    assert objectives.chosen(objective, "tis", beta=0.1).correction == TruncatedIS()


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trl_refusals.check_trl().startswith("1.16.")
    with monkeypatch.context() as changed:
        changed.setattr(trl_refusals, "version", lambda _: "1.17.0")
        with pytest.raises(ConfigError, match=r"made for TRL 1\.16"):
            trl_refusals.check_trl()
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs, more: None)
    with pytest.raises(ConfigError, match="_compute_loss takes"):
        trl_refusals.check_trl()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_is_one_that_trl_accelerate_and_the_adapter_take(path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    if path.stem.startswith("accelerate"):
        loaded = load_config_from_file(str(path))
        assert loaded.fsdp_config["fsdp_version"] == 2
        assert not loaded.use_cpu
        return
    assert given.keys() <= {"model", "axes", "trainer", "settings"}
    settings = {"output_dir": "x", "num_generations": 8, **given["settings"], "use_cpu": True}  # no GPU is at hand
    args, chosen = GRPOConfig(**settings), given.get("trainer", {})
    trl_refusals.check_settings(args, corrects="correction" in chosen)
    trl_refusals.check_routing(chosen.get("routing", "off"), layers=1)
    assert objectives.chosen("gspo", chosen.get("correction", "none"), args.beta)
    assert ("model" in given) == ("Never run." in path.read_text())
    if "model" not in given:
        assert DistributedConfig(**args.model_init_kwargs["distributed_config"]).dp_size == 2

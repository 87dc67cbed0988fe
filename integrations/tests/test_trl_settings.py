"""What the TRL adapter refuses, in one line and before any work.

`make check-trainers` runs this file in an environment that has TRL.
"""

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
from steadymoe.bench.support.errors import UserError
from steadymoe.integrations.trl import settings as trl_settings
from steadymoe.integrations.trl.trainer import SteadyGRPOTrainer

pytestmark = pytest.mark.trl

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"loss": "gspoo"}, "unknown algorithm"),
        ({"loss": "gepo", "rows": 4, "accumulation": 4}, "needs the whole mini-batch"),
        ({"loss": "trm"}, "most likely tokens"),
        ({"loss": "rspo", "dense": True}, "router_log_ratio_LBTK"),
        ({"loss": load("grpo", anchor="rollout"), "with_rollout": False}, "rollout_logprobs_BT"),
        ({"correction": "tis", "with_rollout": False}, "rollout_logprobs_BT"),
        ({"correction": "tiss"}, "unknown correction"),
        ({"loss": load("grpo", anchor="rollout"), "correction": "tis"}, "another correction"),
        ({"routing": "r3"}, "the sampler's routes"),
        ({"routing": "r3_gates"}, "the sampler's routes"),
        ({"routing": "r3_filtered"}, "the sampler's routes"),
        ({"routing": "free"}, "unknown routing"),
        ({"routing": "r2", "dense": True}, "the model is dense"),
        ({"settings": {"epsilon": 0.3}}, "belongs to TRL's own loss"),
        ({"settings": {"loss_type": "grpo"}}, "belongs to TRL's own loss"),
        ({"settings": {"use_vllm": True}, "correction": "tis"}, "would correct twice"),
        ({"settings": {"use_vllm": True}}, "would be ignored"),
        ({"probe": -1}, "probe must be"),
        ({"settings": {"model_init_kwargs": {"distributed_config": {"tp_size": 2}}}}, "tp_size=2 processes share"),
        ({"settings": {"model_init_kwargs": {"distributed_config": {"fsdp_size": 4}}}}, "tied embeddings of 14 tokens"),
        ({"rows": 4, "accumulation": 4, "settings": {"steps_per_generation": 6}}, "must be a multiple"),
        ({"task": "a/b", "record": "results"}, "task must be letters"),
    ],
)
def test_bad_requests_are_refused_in_one_line_before_any_work(
    named: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        trainer(tmp_path, **named)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "results").exists()


def test_sharding_that_accelerate_would_skip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="accelerate does not shard"):
        trainer(tmp_path)


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trl_settings.check_trl(SteadyGRPOTrainer).startswith("1.16.")
    with monkeypatch.context() as changed:
        changed.setattr(trl_settings, "version", lambda _: "1.17.0")
        with pytest.raises(UserError, match=r"made for TRL 1\.16"):
            trl_settings.check_trl(SteadyGRPOTrainer)
    monkeypatch.setattr(GRPOTrainer, "_get_grad_norm", lambda self, norm: None)
    with pytest.raises(UserError, match="_get_grad_norm takes self, norm"):
        trl_settings.check_trl(SteadyGRPOTrainer)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_files_are_accepted(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if path.stem.startswith("accelerate"):
        loaded = load_config_from_file(str(path))
        assert loaded.fsdp_config["fsdp_version"] == 2
        assert not loaded.use_cpu
        return
    assert content.keys() <= {"model", "axes", "trainer", "settings"}
    settings = {"output_dir": "x", "num_generations": 8, **content["settings"], "use_cpu": True}  # there is no GPU
    args, arguments = GRPOConfig(**settings), content.get("trainer", {})
    trl_settings.check_settings(args, corrects="correction" in arguments)
    trl_settings.check_routing(arguments.get("routing", "off"), layers=1)
    assert trl_settings.objective_of("gspo", arguments.get("correction", "off"), args.beta)
    assert ("model" in content) == ("Never run." in path.read_text())
    if "model" not in content:
        assert DistributedConfig(**args.model_init_kwargs["distributed_config"]).dp_size == 2

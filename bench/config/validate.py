"""What a composed config must hold before anything is trained. Answers in one line."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from safetensors import SafetensorError, safe_open

from steadymoe.algorithms import Traits
from steadymoe.algorithms import build as build_algorithm
from steadymoe.algorithms.objective import from_config
from steadymoe.bench.config import memory, token_limits
from steadymoe.bench.config.identity import LONGEST_NAME, flatten
from steadymoe.bench.runs import loggers
from steadymoe.bench.support.blame import users_code
from steadymoe.bench.tasks import Task
from steadymoe.models import build, megablocks, pretrained

# Whole numbers that must be at least this.
_AT_LEAST = {
    "steps": 1,
    "updates_per_rollout": 1,
    "threads": 1,
    "checkpoint_every": 1,
    "rollout.prompts": 1,
    "rollout.responses": 2,  # an advantage compares the responses of a group
    "cold_start.batch_size": 1,
    "cold_start.check_every": 1,
    "cold_start.check_prompts": 1,
    "cold_start.max_updates": 1,
    "evaluation.every": 1,
    "evaluation.prompts": 1,
    "probe.every": 1,
    "probe.responses": 1,
    "collapse.window_updates": 1,
    "collapse.patience_updates": 1,
    "seed": 0,
    "optimizer.learning_rate": 0,  # 0 is the frozen control
    "optimizer.weight_decay": 0,
    "routing.aux_loss": 0,
    "routing.z_loss": 0,
    "algorithm.sampling.max_rollouts": 1,
    "algorithm.overlong.penalty": 0,
}
# A seed above is none for torch or for a table's column.
_LARGEST_SEED = 2**63 - 1
_ABOVE_ZERO = (
    "optimizer.epsilon",
    "optimizer.max_grad_norm",
    "cold_start.learning_rate",
    "collapse.grad_norm_factor",
    "routing.predictor_learning_rate",  # of routing=pr2 alone
)
_SHARES = (
    "cold_start.noise",
    "cold_start.accuracy_low",
    "cold_start.accuracy_high",
    "probe.fraction",
    "collapse.reward_fraction",
    "collapse.least_reward",
    "collapse.entropy_fraction",
    "collapse.solved_reward",
)
_CHOICES = {
    "device": ("cpu", "cuda"),
    "precision": ("fp32", "bf16"),
    "experts": build.EXPERTS,
    "measure": ("all", "little"),
    "retry": ("all", "failed"),
    "routing.replay": ("none", "r2", "r3", "pr2"),
}
# Added keys here are fields of a class, which refuses what it does not know.
_CHECKED_BY_THEIR_CLASS = (
    "model.config.",
    "task.",
    "algorithm.loss.",
    "algorithm.advantage.",
    "advantage.",
    "correction.",
)
# ... and here so is the type of every value, and what may be left out.
_BUILT = ("algorithm.loss.", "algorithm.advantage.", "advantage.", "correction.", "engine.", "algorithm.kl.")
# Where an experiment gives a number, the command line may take it back.
_OR_NULL = ("rollout.minibatch_prompts", "total_updates")
_HARMLESS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class ConfigError(Exception):
    """A config that cannot be run; the message is one line that names the valid choices."""


def check(config: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first thing wrong with ``config``.

    ``reference`` is the same named configs without overrides, flattened: it gives each value's type.
    """
    flat = flatten(config)
    _types(flat, reference)
    _numbers(flat)
    if config["rollout"]["prompts"] % config["updates_per_rollout"]:
        raise ConfigError(
            f"updates_per_rollout ({config['updates_per_rollout']}) must divide rollout.prompts "
            f"({config['rollout']['prompts']}): a mini-batch is made of whole groups"
        )
    _sampler_as_old(config)
    _microbatch(config["microbatch"], max(config["routing"]["aux_loss"], config["routing"]["z_loss"]))
    if not 0 < config["algorithm"]["overlong"]["buffer"] < 1:
        raise ConfigError(
            "algorithm.overlong.buffer is a share of a response's tokens, above 0 and below 1; "
            f"got {config['algorithm']['overlong']['buffer']}"
        )
    if config["cold_start"]["accuracy_low"] >= config["cold_start"]["accuracy_high"]:
        raise ConfigError("cold_start.accuracy_low must be below cold_start.accuracy_high")
    if config["device"] == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device here; use device=cpu")
    why = loggers.why_not(config["log"])
    if why is not None:
        raise ConfigError(why)
    _places(config)
    try:
        has_experts = _model(config["model"])
        task = instantiate(config["task"])
        if "path" not in config["model"]:
            token_limits.check_built(config["model"]["config"], task)
        memory.check(config, task)
        build_algorithm(config["engine"])
        traits = from_config(config["algorithm"], config["correction"]).traits
        _advantage(config, traits)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except InstantiationException as error:
        raise ConfigError(" ".join(str(error.__cause__ or error).split())) from error
    except Exception as error:
        place = users_code(error)
        if place is None:
            raise
        raise ConfigError(f"{type(error).__name__}: {' '.join(str(error).split())} ({place})") from error
    routing = config["routing"]
    for key in ("routing.replay", "engine._target_", "engine.dtype"):
        if flat.get(key) != reference.get(key):  # or a run would be filed under another's name
            group = key.partition(".")[0]
            raise ConfigError(f"{key} is what the name of the {group} stands for; choose another {group} in its place")
    if routing["replay"] == "pr2" and config["updates_per_rollout"] < 2:
        raise ConfigError("routing=pr2 learns from a rollout's second update on; use updates_per_rollout of 2 or more")
    routed = routing["replay"] != "none" or routing["freeze"] or routing["aux_loss"] > 0 or routing["z_loss"] > 0
    if routed and not has_experts:
        raise ConfigError("this model is dense and has no routers to replay, freeze or balance; use routing=off")
    _experts(config, has_experts)
    if traits.routes and not has_experts:
        raise ConfigError("this algorithm weighs tokens by their routers, and the model is dense; choose another")
    if "path" in config["model"]:
        _checkpoint(config)
    elif config["cold_start"]["path"] is not None:
        _weights(config["cold_start"]["path"], config["model"]["config"], task)


def _types(flat: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    for key in reference:
        if key not in flat and reference[key] is not None and not key.startswith(_BUILT):
            raise ConfigError(f"{key} is missing; its usual value is {reference[key]!r}")
    for key, value in flat.items():
        if key not in reference and not key.startswith(_CHECKED_BY_THEIR_CLASS):
            raise ConfigError(f"{key} is nothing that a run reads")
        usual = reference.get(key)
        if value is None and key in _OR_NULL:
            continue
        if usual is None or key.endswith("_target_") or key.startswith(_BUILT):
            continue
        if isinstance(usual, float) and isinstance(value, int) and not isinstance(value, bool):
            continue
        if type(value) is not type(usual):
            names = {
                int: "a whole number",
                float: "a number",
                bool: "true or false",
                str: "text",
                list: "a list",
            }
            raise ConfigError(f"{key} must be {names.get(type(usual), type(usual).__name__)}; got {value!r}")


def _numbers(flat: Mapping[str, Any]) -> None:
    for key, least in _AT_LEAST.items():
        if not flat[key] >= least:
            raise ConfigError(f"{key} must be at least {least}; got {flat[key]}")
    if flat["seed"] > _LARGEST_SEED:
        raise ConfigError(f"seed must be at most {_LARGEST_SEED}; got {flat['seed']}")
    for key in _ABOVE_ZERO:
        if key in flat and not flat[key] > 0:
            raise ConfigError(f"{key} must be above 0; got {flat[key]}")
    for key in _SHARES:
        if not 0 <= flat[key] <= 1:
            raise ConfigError(f"{key} must be between 0 and 1; got {flat[key]}")
    for key, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value) and not key.startswith(_BUILT):
            raise ConfigError(f"{key} must be finite; got {value}")
    for key in ("optimizer.beta1", "optimizer.beta2"):
        if not 0 <= flat[key] < 1:
            raise ConfigError(f"{key} must be at least 0 and below 1; got {flat[key]}")
    for key, choices in _CHOICES.items():
        if flat[key] not in choices:
            raise ConfigError(f"{key} must be one of {', '.join(choices)}; got {flat[key]!r}")


def _advantage(config: Mapping[str, Any], traits: Traits) -> None:
    """Whether the advantage works on groups of this size, and dynamic sampling drops nothing that is learned from."""
    advantage = build_algorithm(config["advantage"] or config["algorithm"].get("advantage"))
    rewards_PG = torch.zeros(3, config["rollout"]["responses"])
    rewards_PG[1:, 0] = 1.0
    rewards_PG[2] = 1.0
    advantages_PG = advantage(rewards_PG, torch.ones_like(rewards_PG))
    free = traits.zero_advantage_is_free and bool((advantages_PG[[0, 2]] == 0).all())
    if config["algorithm"]["sampling"]["max_rollouts"] > 1 and not free:
        raise ConfigError(
            "algorithm.sampling.max_rollouts above 1 drops groups of equal rewards, from which this algorithm or "
            "advantage learns; set it to 1"
        )


def _sampler_as_old(config: Mapping[str, Any]) -> None:
    every = config["savings"]["sampler_as_old"]
    if every is None:
        return
    if not (type(every) is int and every >= 1):
        raise ConfigError(
            f"savings.sampler_as_old is every how many steps it is checked, at least 1, or null for off; got {every!r}"
        )
    exact = config["engine"]["_target_"].endswith(".Exact") and config["precision"] == "fp32"
    if not exact or config["routing"]["replay"] == "pr2":
        raise ConfigError(
            "savings.sampler_as_old needs a sampler that is the trainer: engine=exact, precision=fp32, no routing=pr2"
        )


def _microbatch(size: Any, router_loss: float) -> None:
    if size is None:
        return
    if not (type(size) is int and size >= 1):
        raise ConfigError(
            f"microbatch is a number of responses, at least 1, or null for a whole mini-batch; got {size!r}"
        )
    if router_loss > 0:
        raise ConfigError(
            "routing.aux_loss and routing.z_loss look at a whole mini-batch; set microbatch=null, or both to 0"
        )


def _model(model: Mapping[str, Any]) -> bool:
    """Whether the model has routers; raises ValueError if there can be no such model."""
    if "path" not in model:
        build.check(model["config"])
        return build.has_experts(model["config"])
    if not isinstance(model["path"], str):
        raise ValueError("model=pretrained needs a checkpoint's folder: model.path=…")
    if "config" in model:
        raise ValueError("model=pretrained has the config of its checkpoint; leave model.config out")
    return pretrained.moe_layers(model["path"]) > 0


def _experts(config: Mapping[str, Any], has_experts: bool) -> None:
    usual = build.EXPERTS[0]
    if config["experts"] != usual and not has_experts:
        raise ConfigError(f"this model is dense: experts={config['experts']} would have no effect; use experts={usual}")
    why = megablocks.reason_against(config["device"]) if config["experts"] == megablocks.NAME else None
    if why is not None:
        raise ConfigError(f"experts={megablocks.NAME}: {why}")


def _checkpoint(config: Mapping[str, Any]) -> None:
    if config["cold_start"]["path"] is not None:
        raise ConfigError("with model=pretrained training starts from model.path; leave cold_start.path out")
    try:
        token_limits.check(config["model"]["path"], config["task"])
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _weights(path: str, model_config: Mapping[str, Any], task: Task) -> None:
    """Whether a safetensors file holds the weights of this model, from its header alone."""
    with torch.device("meta"):
        model = build.build(model_config, task.tokenizer, 0)
    try:
        with safe_open(path, framework="pt") as file:
            held = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ConfigError(f"cold_start.path: {path} is no safetensors file ({error})") from error
    found: dict[int, bool] = {}
    names = {}
    for name, weight in model.named_parameters(remove_duplicate=False):  # a tied weight is held under one name
        found[id(weight)] = found.get(id(weight), False) or held.get(name) == weight.shape
        names[id(weight)] = name
    wrong = [names[key] for key, is_found in found.items() if not is_found]
    if wrong:
        raise ConfigError(f"cold_start.path: {path} is not of this model; the first weight that differs is {wrong[0]}")


def _places(config: Mapping[str, Any]) -> None:
    name = config["experiment_name"]
    if not name or set(name) - _HARMLESS or name.startswith("."):
        raise ConfigError(f"experiment_name may hold letters, digits, '.', '_' and '-'; got {name!r}")
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"experiment_name may have {LONGEST_NAME} letters; got {len(name)}")
    results = config["results_dir"]
    if not results.strip():
        raise ConfigError("results_dir must name a folder; its usual value is 'results'")
    if "\0" in results or any(len(os.fsencode(part)) > 255 for part in Path(results).parts):
        raise ConfigError("results_dir must be a path whose folders have names of at most 255 bytes")
    checkpoint = config["cold_start"]["path"]
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise ConfigError(f"cold_start.path: there is no file {checkpoint}")
    place = Path(config["results_dir"]).absolute() / "runs"
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"results_dir={config['results_dir']} cannot be written: {place} is no folder that can be written to"
        )

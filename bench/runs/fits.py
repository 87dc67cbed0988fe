"""Whether the parts of a run can be built and fit: loss, advantage, engine and model to each other, the prompts into
the model's positions, the run into memory, the given weights into the model. All this takes torch and transformers.

The bound of memory is a lower one: a run that it refuses cannot be made. It assumes that responses use their whole
budget of tokens, and counts only tensors that must be in memory at the same time.
"""

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadymoe.algorithms import Traits
from steadymoe.algorithms import build as build_class
from steadymoe.bench.runs.identity import flatten
from steadymoe.bench.schema import EXPERTS, RunConfig
from steadymoe.bench.support.errors import ConfigError, Dense
from steadymoe.bench.support.seeding import numpy_generator
from steadymoe.bench.tasks import Task, check_streams, decoded, end_ids
from steadymoe.models import build, megablocks, pretrained
from steadymoe.models.engine import Engine, Truncated

# Bytes: of a token (id, mask and log-probability) and of a number.
_TOKEN, _NUMBER = 8 + 8 + 4, 4
# The files with a container's memory limit, in version 2 and version 1 of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# The number of prompts that are checked. Training may draw a longer prompt.
_PROMPTS = 64
# Settings that say something about routers alone, each with the value at which it does nothing.
ROUTER_SETTINGS = {
    "experts": EXPERTS[0],
    "optimizer.router_factor": 1.0,
    "optimizer.expert_factor": 1.0,
    **{f"cold_start.{key}": off for key, off in (("router_factor", 1.0), ("aux_loss", 0.0), ("z_loss", 0.0))},
    **{f"routing.{key}": 0.0 for key in ("aux_loss", "z_loss", "bias_speed")},
    **{f"{group}.aux_loss_per_layer": False for group in ("cold_start", "routing")},
}


def check(config: RunConfig) -> None:
    """Raise ConfigError, ValueError or TypeError, in one line, for parts that cannot be built or do not fit.

    Errors of the classes that the config names are left to the caller.
    """
    if config.experts == megablocks.NAME and (why := megablocks.reason_against(config.device)) is not None:
        raise ConfigError(f"experts={megablocks.NAME}: {why}")
    is_dense = not has_experts(config.model)
    if "path" in config.model:
        path = config.model["path"]
        task = _task_of_checkpoint(path, pretrained.digest(path), json.dumps(config.task))
    else:
        task = _task_of_model(json.dumps(config.model["config"]), json.dumps(config.task))
    check_memory(config, task)
    checked = config.cold_start.check_prompts * config.has_own_cold_start
    trained = max(config.prompts, config.cold_start.batch_size * config.has_own_cold_start)
    held_out = max(config.evaluation.prompts, checked)
    _check_streams(json.dumps(config.task), trained, held_out, config.has_own_cold_start)
    _check_start(config, task)
    traits = config.objective().traits
    _advantage(config, traits)
    _engine(config, task, traits)
    if is_dense:
        _dense(config, traits)


def _advantage(config: RunConfig, traits: Traits) -> None:
    """Raise an error if the advantage needs larger groups, or if dynamic sampling drops groups with a signal."""
    advantage = build_class(config.used_advantage)
    n = config.rollout.responses
    rewards_PG = torch.tensor([[0.0] * n, [1.0] + [0.0] * (n - 1), [1.0] * n])  # all wrong, one right, all right
    advantages_PG = advantage(rewards_PG, torch.ones_like(rewards_PG))
    free = traits.zero_advantage_is_free and bool((advantages_PG[[0, 2]] == 0).all())
    if config.algorithm.sampling.max_rollouts > 1 and not free:
        raise ConfigError(
            "algorithm.sampling.max_rollouts above 1 drops groups of equal rewards, but this algorithm or advantage "
            "learns from these groups; set it to 1"
        )


def _engine(config: RunConfig, task: Task, traits: Traits) -> None:
    engine = build_class(config.engine)
    if not isinstance(engine, Engine):
        raise ConfigError(f"an engine must be a steadymoe.models.engine.Engine; got {type(engine).__name__}")
    if not engine.truncates:
        return
    words = len(task.tokenizer)
    if isinstance(engine, Truncated) and engine.top_k >= words and "path" not in config.model:
        raise ConfigError(f"engine.top_k={engine.top_k} keeps all {words} tokens; lower it, or set it to 0")
    if traits.top_k:
        raise ConfigError(
            "this algorithm reads the sampler's most likely tokens, but a truncated sampler gives some of them "
            "probability 0: choose another algorithm, or an engine that keeps every token"
        )


def router_settings(model: Mapping[str, Any], flat: Mapping[str, Any], typed: set[str]) -> dict[str, Any]:
    """Return the settings of routers that a dense model has on, by key, each with its value when off.

    None for a model with experts, and none that is ``typed``, or whose group is.
    """
    if has_experts(model):
        return {}
    return {
        key: off
        for key, off in ROUTER_SETTINGS.items()
        if key not in typed and not ("routing" in typed and key.startswith("routing.")) and flat.get(key, off) != off
    }


def _dense(config: RunConfig, traits: Traits) -> None:
    on = router_settings(config.model, flatten(asdict(config)), set())
    if config.routing.replay != "off" or config.routing.freeze or any(key.startswith("routing.") for key in on):
        raise Dense("this model is dense and has no routers to replay, freeze or balance; use routing=off")
    if key := next((key for key in on if key != "experts"), None):
        raise Dense(f"this model is dense and has no routers or experts: {key} would have no effect; leave it out")
    if "experts" in on:
        raise Dense(f"this model is dense: experts={config.experts} would have no effect; use experts={EXPERTS[0]}")
    if traits.routes:
        raise ConfigError("this algorithm weights tokens by their routing, but the model is dense; choose another")


def has_experts(model: Mapping[str, Any]) -> bool:
    """Return whether the model of a config has routers. Raises ValueError, in one line, if it cannot be used."""
    if "path" not in model:
        return _shape(json.dumps(model["config"])).moe_layers > 0
    if not isinstance(model["path"], str):
        raise ValueError("model=pretrained needs a checkpoint's folder: model.path=…")
    if "config" in model:
        raise ValueError("model=pretrained takes its config from the checkpoint; leave model.config out")
    return pretrained.moe_layers(model["path"]) > 0


# Most points of a sweep share model and task, which come as JSON: the arguments of a cached function must have a hash.
@functools.cache
def _shape(model_config: str) -> build.Shape:
    return build.check(json.loads(model_config))


@functools.cache
def _check_streams(task_config: str, trained: int, held_out: int, demonstrates: bool) -> None:
    check_streams(instantiate(json.loads(task_config)), trained, held_out, demonstrates)


@functools.cache
def _task_of_model(model_config: str, task_config: str) -> Task:
    """Return the task. Raises ValueError if the model has fewer positions than it needs.

    Rotary embeddings would go on beyond these positions; learned embeddings would not.
    """
    task: Task = instantiate(json.loads(task_config))
    longest, positions = max(map(len, task.tokenizer(_prompts(task))["input_ids"])), _shape(model_config).positions
    needed = longest + task.max_new_tokens
    if positions is not None and needed > positions:
        raise ValueError(
            f"prompts of {longest} tokens and responses of {task.max_new_tokens} need {needed} positions; "
            f"model.config.max_position_embeddings is {positions}"
        )
    return task


@functools.cache
def _task_of_checkpoint(path: str, content: str, task_config: str) -> Task:
    """Return the task. Raises ValueError if the checkpoint in ``path``, of the digest ``content``, does not fit it."""
    task, tokenizer = instantiate(json.loads(task_config)), pretrained.load_tokenizer(path)
    new = task.max_new_tokens
    try:
        tokens = tokenizer(_prompts(task))["input_ids"]
    except Exception as error:  # a chat template is a program, and a tokenizer may lack a character
        said = " ".join(str(error).split())
        raise ValueError(
            f"model.path: the tokenizer in {path} cannot encode the prompts of this task: {said}"
        ) from error
    if tokenizer(_prompts(task))["input_ids"] != tokens:
        raise ValueError(f"model.path: the chat template in {path} writes a prompt differently each time")
    _check_texts(path, tokenizer, task, tokens)
    longest, limits = max(map(len, tokens)), pretrained.limits(path)
    if limits.new_tokens is not None and new > limits.new_tokens:
        raise ValueError(
            f"task.max_new_tokens is {new}, and {path} allows responses of {limits.new_tokens} (generation_config.json)"
        )
    if limits.length is not None and longest + new > limits.length:
        raise ValueError(
            f"prompts of {longest} tokens and responses of {new} (task.max_new_tokens) need {longest + new} positions; "
            f"{path} has {limits.length}"
        )
    return task


def _check_texts(path: str, tokenizer: PreTrainedTokenizerBase, task: Task, tokens: list[list[int]]) -> None:
    """Raise ValueError unless the texts of prompts, answers and tokens are what the model reads and what is scored."""
    prompts, ends = _prompts(task), end_ids(tokenizer)
    try:
        answers = task.demonstrations(prompts, 0.0, numpy_generator(0, "limits"))
    except NotImplementedError:  # a checkpoint needs none
        answers = []
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(answer)) for answer in answers]
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, *ends}
    if any(not unknown.isdisjoint(row) for row in (*tokens, *ids)):
        raise ValueError(f"model.path: the tokenizer in {path} has no token for some text of this task")
    for prompt, row in zip(prompts, tokens, strict=True):
        if row[-1] == tokenizer.eos_token_id:  # a chat template may end in another end token, as Phi-3's
            raise ValueError(f"model.path: the tokenizer in {path} puts an end token behind every prompt")
        if prompt not in (text := str(tokenizer.decode(row))):
            raise ValueError(f"model.path: the tokenizer in {path} changes the prompt {prompt!r} to {text!r}")
    for answer, prompt_ids, row in zip(answers, tokens, ids, strict=False):
        if end := next((token for token in row if token in ends), None):
            raise ValueError(
                f"model.path: the configs in {path} name the token {tokenizer.decode([end])!r} as an end (eos_token_id "
                f"{end}), and the answer {answer!r} holds it"
            )
        text, _ = decoded(tokenizer, prompt_ids, row)
        if text.removeprefix(" ") != answer:  # many tokenizers put a space before the first word
            raise ValueError(f"model.path: the tokenizer in {path} changes the answer {answer!r} to {text!r}")
    first = list(tokens[0][-1:])
    plain, behind = str(tokenizer.decode(first)), [[*first, token] for token in range(len(tokenizer))]
    if without := [row[-1] for row, text in zip(behind, tokenizer.batch_decode(behind), strict=True) if text == plain]:
        raise ValueError(
            f"model.path: the tokenizer in {path} has {len(without)} tokens without a text, first {without[0]}: "
            "they would be trained on but not scored"
        )


def _prompts(task: Task) -> list[str]:
    return task.sample(_PROMPTS, numpy_generator(0, "limits"))


def capacity(device: str) -> int:
    """Bytes of memory of ``device``, ``cpu`` or ``cuda``: all of it, used or free."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for path in _LIMITS if path.exists() and (limit := path.read_text().strip()).isdigit()]
    return min([physical, *map(int, limits)])


def memory_need(config: RunConfig, task: Task) -> int:
    """Return a lower bound in bytes of what a run holds at its largest moment: while it samples, or in an update."""
    (prompt,) = task.tokenizer(task.sample(1, numpy_generator(0, "memory")))["input_ids"]
    length, words = len(prompt) + task.max_new_tokens, len(task.tokenizer)
    rollout, evaluation, cold_start = config.rollout, config.evaluation, config.cold_start
    responses, checked = config.prompts * rollout.responses, cold_start.check_prompts * config.has_own_cold_start
    largest = max(responses, evaluation.prompts, evaluation.pass_k, checked)
    sampling = largest * (length * _TOKEN + words * _NUMBER)  # with the probabilities of a response's next token
    masks = responses * task.max_new_tokens * words if config.engine.get("replay_mask") else 0
    held = config.probe.responses * length * _TOKEN
    if "path" in config.model:
        return held + masks + sampling
    shape = _shape(json.dumps(config.model["config"]))
    states = shape.layers * shape.width * _NUMBER  # of a token between layers, which the backward needs
    updating = (config.microbatch or responses // config.updates_per_rollout) * task.max_new_tokens * states
    starting = cold_start.batch_size * len(prompt) * states * config.has_own_cold_start
    if config.routing.lag is not None:
        held += config.routing.lag * _on_meta(config, task).num_parameters() * _NUMBER
    return held + max(masks + sampling, masks + updating, starting)


def check_memory(config: RunConfig, task: Task) -> None:
    """Raise ValueError, in one line, if the run cannot fit into the memory of its device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        return  # the run will look for its GPU where it begins
    there, needed = capacity(config.device), memory_need(config, task)
    if needed > there:
        raise ValueError(
            f"the run needs at least {needed / 2**30:,.0f} GiB of memory, but {config.device} has "
            f"{there / 2**30:,.0f} GiB here; lower the number of prompts or responses (docs/moe.md)"
        )


def _on_meta(config: RunConfig, task: Task) -> PreTrainedModel:
    with torch.device("meta"):
        return build.build(config.model["config"], task.tokenizer, 0)


def _check_start(config: RunConfig, task: Task) -> None:
    """Raise ValueError unless ``cold_start.path``, if given, holds weights of the model, by the header of the file."""
    if (path := config.cold_start.path) is None:
        return
    if "path" in config.model:
        raise ValueError("with model=pretrained training starts from model.path; leave cold_start.path out")
    model = _on_meta(config, task)
    try:
        with safe_open(path, framework="pt") as file:
            held = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"cold_start.path: {path} is not a safetensors file ({error})") from error
    named = list(model.named_parameters(remove_duplicate=False))  # a tied weight is held under one of its names
    found = {id(weight) for name, weight in named if held.get(name) == weight.shape}
    names = {id(weight): name for name, weight in named}
    if wrong := [name for weight, name in names.items() if weight not in found]:
        raise ValueError(
            f"cold_start.path: {path} does not fit this model; the first weight that differs is {wrong[0]}"
        )

"""The dataclasses of the config: they name what the YAMLs name, and refuse what cannot be run."""

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, get_args

import pytest

from steadymoe import conf
from steadymoe.bench.runs import compose
from steadymoe.bench.runs.identity import flatten
from steadymoe.bench.schema import ADDED, AdamWConfig, CollapseConfig, ConfigError, RoutingConfig, RunConfig, read
from steadymoe.bench.statistics.collapse import Rule

# Groups that the class checks which ``_target_`` names.
OF_CLASSES = {"engine", "model", "task", "correction", "algorithm.loss", "algorithm.advantage"}


def groups_of(kind: Any) -> list[type]:
    """The dataclasses that a field of this type may hold."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [group for inner in get_args(kind) for group in groups_of(inner)]


def settings(cls: Any = RunConfig, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every field of the schema by its dotted name, groups before their fields."""
    for field in dataclasses.fields(cls):
        yield f"{prefix}{field.name}", field
        for group in groups_of(field.type):
            yield from settings(group, f"{prefix}{field.name}.")


SETTINGS: dict[str, dataclasses.Field[Any]] = {}
for dotted, setting in settings():
    SETTINGS.setdefault(dotted, setting)  # of the optimizers AdamW is the first
(PLANNED,) = compose.plan(["routing=pr2", "savings.reuse_sampler_logprobs=null"])
PLAIN = PLANNED.plain
# They have the fields that AdamW and the other routings lack.
(WITH_MUON,) = (planned.plain for planned in compose.plan(["optimizer=muon"]))
(WITH_LAG,) = (planned.plain for planned in compose.plan(["routing=lagged", "routing.lag_trigger=3.0"]))


def plain_of(key: str) -> dict[str, Any]:
    """The default config, or another one that has the field."""
    if key.startswith("routing.lag"):
        return WITH_LAG
    is_muons = key.startswith("optimizer.") and key.split(".")[1] not in PLAIN["optimizer"]
    return WITH_MUON if is_muons else PLAIN


def changed(key: str, value: Any) -> dict[str, Any]:
    """A config with one other value, at a dotted key."""
    plain = copy.deepcopy(plain_of(key))
    *groups, name = key.split(".")
    reduce(getitem, groups, plain)[name] = value
    return plain


def refusal(plain: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        read(plain)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_every_default_stands_once() -> None:
    """No YAML of the suite's own groups repeats a default of the schema."""
    for group, kind in (("optimizer", AdamWConfig), ("routing", RoutingConfig)):
        usual = dataclasses.asdict(kind())
        rows = {name: conf.read(group, name) for name in conf.names(group)}
        repeated = [(name, key) for name, row in rows.items() for key in row if row[key] == usual.get(key, ...)]
        assert [each for each in repeated if each[1] not in ("kind", "learning_rate", "momentum")] == []
    assert CollapseConfig.__annotations__.keys() == Rule.__annotations__.keys()
    assert Rule(**dataclasses.asdict(CollapseConfig())) == Rule(), "other trainers' runs are judged by the same"
    for key, value in ADDED.items():
        assert SETTINGS[key].default == value


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=quickstart", "seed=0", "algorithm=grpo"],
        ["routing=pr2", "updates_per_rollout=4", "minibatch_prompts=3", "updates=33"],
        ["correction=tis", "engine=fp8", "task=sort", "cold_start.noise=0.5", "optimizer.learning_rate=1"],
        ["algorithm=dapo", "algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward", "advantage=group_mean"],
    ],
    ids=" ".join,
)
def test_a_config_from_a_file_is_the_composed_config(words: list[str]) -> None:
    made = compose.plan(words)[0]
    assert read(json.loads(json.dumps(made.plain))) == made.config, "as run.json has it"
    as_lists = json.loads(json.dumps(dataclasses.asdict(made.config)))  # a tuple is a list in YAML and JSON
    back = {key: value for key, value in flatten(as_lists).items() if value is not None}
    assert back == {key: value for key, value in flatten(made.plain).items() if value is not None}
    assert {key: type(value) for key, value in back.items()} == {key: type(flatten(made.plain)[key]) for key in back}


@pytest.mark.parametrize("key", SETTINGS)
def test_wrong_type_missing_field_and_unknown_field_are_refused(key: str) -> None:
    usual = flatten(plain_of(key)).get(key)
    for value in (True, 1.5, "abc", [1.5], {"nothing": 1}, float("nan")):
        of_class = isinstance(value, dict) and key in {*OF_CLASSES, "advantage"}
        free_text = isinstance(value, str) and key in ("cold_start.path", "algorithm.correction")
        is_right_type = type(value) is type(usual) and value == value
        if not of_class and not free_text and not is_right_type:
            assert key in refusal(changed(key, value))
    *groups, name = key.split(".")
    without = {field: value for field, value in reduce(getitem, groups, plain_of(key)).items() if field != name}
    plain = changed(".".join(groups), without) if groups else without
    if SETTINGS[key].default is dataclasses.MISSING and key not in ("optimizer.learning_rate", "optimizer.kind"):
        assert refusal(plain) == f"`{key}` is missing"
    if groups_of(SETTINGS[key].type):
        assert f"unknown key `{key}.nothing`" in refusal(changed(f"{key}.nothing", 1))


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("updates", [1, 1_000_000], [0, 1_000_001]),
        ("threads", [1, 1024], [0, 1025]),
        ("seed", [0, 2**63 - 1], [-1, 2**63]),
        ("rollout.responses", [2], [1]),
        ("rollout.temperature", [0.01, 1, 100.0], [0, 0.0, -1.0, 0.009, 101.0, float("nan"), float("inf")]),
        ("optimizer.decay", [0, 1.0], [-0.1, 1.1, float("nan")]),
        ("optimizer.autoclip", [None, 0, 1.0], [-0.1, 1.1, float("nan")]),
        ("optimizer.learning_rate", [0, 0.0], [-1e-9, float("inf")]),
        ("optimizer.beta1", [0.0], [1.0, -1e-9]),
        ("optimizer.momentum", [0.0], [1.0, -1e-9]),
        ("optimizer.ns_steps", [1, 99], [0, 100]),
        ("optimizer.kind", ["adamw"], ["adam", 3, None]),
        ("optimizer.epsilon", [1e-300], [0.0]),
        ("cold_start.accuracy_low", [0.0, 1.0], [-1e-9, 1 + 1e-9]),
        ("algorithm.overlong.buffer", [0.5], [0.0, 1.0]),
        ("routing.replay", ["off", "r2", "r3", "r3_gates", "r3_filtered", "pr2", "lagged"], ["r1"]),
        ("routing.lag", [1, 1000], [0, 1001]),
        ("routing.lag_trigger", [1.01, 3], [1.0, float("inf")]),
        ("routing.bias_speed", [0, 1e-3], [-1e-9, float("inf")]),
        ("experts", ["eager", "megablocks"], ["all"]),
        ("device", ["cpu", "cuda"], ["tpu"]),
        ("algorithm.kl.coefficient", [0.0], [float("inf")]),
        ("microbatch", [1, None], [0, "all"]),
        ("minibatch_prompts", [1], [0, None]),
        ("savings.reuse_sampler_logprobs", [1, None], [0, True]),
        ("cold_start.router_factor", [0.01], [0]),
        ("cold_start.noise", [0, 0.99], [-0.1, 1]),
        ("probe.fraction", [1.0], [1.5]),
        ("evaluation.pass_k", [0, 1024], [-1, 1025]),
        ("collapse.entropy_fraction", [0, 1], [-0.1, 1.5]),
        ("collapse.solved_reward", [0, 1], [-0.1, 1.1]),
        ("collapse.grad_norm_factor", [0.1], [0.0]),
    ],
)
def test_value_at_its_bound_is_accepted_and_beyond_is_refused(key: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        read(changed(key, value))
    for value in outside:
        assert key in refusal(changed(key, value))

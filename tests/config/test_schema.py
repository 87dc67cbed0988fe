"""The dataclasses of the config: they name what the YAMLs name, and refuse what cannot be run."""

import copy
import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from steadymoe.algorithms.objective import KL
from steadymoe.bench.config import compose
from steadymoe.bench.config.identity import flatten
from steadymoe.bench.config.schema import Bounds, Collapse, RunConfig
from steadymoe.bench.config.validate import ConfigError, read
from steadymoe.bench.statistics.collapse import Rule

ROOT = Path(__file__).parents[2]
# Groups that are checked elsewhere: by the class which ``_target_`` names, and by ``audit.arms.words_of``.
OF_CLASSES = {"audit.arms", "engine", "model", "task", "correction", "algorithm.loss", "algorithm.advantage"}


def settings(cls: Any = RunConfig, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every field of the schema by its dotted name, groups before their fields."""
    for each in dataclasses.fields(cls):
        yield f"{prefix}{each.name}", each
        if dataclasses.is_dataclass(each.type):
            yield from settings(each.type, f"{prefix}{each.name}.")


def is_group(setting: dataclasses.Field[Any]) -> bool:
    return dataclasses.is_dataclass(setting.type)


SETTINGS = dict(settings())
# Lists are checked in tests/audit/test_audit.py.
LISTS = {key for key, each in SETTINGS.items() if typing.get_origin(each.type) is tuple}
CHECKED = [key for key in SETTINGS if not key.startswith("algorithm.kl.") and key not in LISTS]
(PLANNED,) = compose.plan(["routing=pr2", "savings.sampler_as_old=null"])
PLAIN = PLANNED.plain


def changed(key: str, value: Any) -> dict[str, Any]:
    """The usual config with one other value, at a dotted key."""
    plain = copy.deepcopy(PLAIN)
    *groups, name = key.split(".")
    inner = plain
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return plain


def refusal(plain: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        read(plain)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_schema_has_the_fields_of_the_yamls_and_no_others() -> None:
    own = yaml.safe_load((compose.CONF / "config.yaml").read_text())
    fields = set(flatten({key: value for key, value in own.items() if key not in ("defaults", "hydra")}))
    routings = (yaml.safe_load(path.read_text()) for path in (compose.CONF / "routing").glob("*.yaml"))
    fields |= {f"routing.{key}" for routing in routings for key in routing}
    assert {key for key, each in SETTINGS.items() if not is_group(each)} == fields | OF_CLASSES


def test_every_setting_has_a_meaning_and_no_number_of_its_own() -> None:
    for key in CHECKED:
        each = SETTINGS[key]
        assert each.type.__doc__ if is_group(each) else each.metadata["meaning"], key
        assert each.default in (dataclasses.MISSING, None), key


def test_the_rule_of_collapse_has_the_fields_of_its_group() -> None:
    assert [each.name for each in dataclasses.fields(Collapse)] == [each.name for each in dataclasses.fields(Rule)]


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=quickstart", "seed=0", "algorithm=grpo"],
        ["routing=pr2", "updates_per_rollout=4", "rollout.minibatch_prompts=3", "total_updates=33"],
        ["correction=tis", "engine=fp8", "task=sort", "cold_start.noise=1", "optimizer.learning_rate=1"],
        ["algorithm=dapo", "algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward", "advantage=group_mean"],
    ],
    ids=" ".join,
)
def test_loading_through_hydra_equals_loading_through_python(words: list[str]) -> None:
    made = compose.plan(words)[0]
    assert read(json.loads(json.dumps(made.plain))) == made.config, "as run.json has it"
    as_lists = json.loads(json.dumps(dataclasses.asdict(made.config)))  # a tuple is a list in YAML and JSON
    back = {key: value for key, value in flatten(as_lists).items() if value is not None}
    assert back == {key: value for key, value in flatten(made.plain).items() if value is not None}
    assert {key: type(value) for key, value in back.items()} == {key: type(flatten(made.plain)[key]) for key in back}


@pytest.mark.parametrize("key", CHECKED)
def test_a_value_of_another_type_is_refused_with_what_the_field_means(key: str) -> None:
    for value in (None, True, 1.5, "abc", [1], {"nothing": 1}):
        kinds = typing.get_args(SETTINGS[key].type) or (SETTINGS[key].type,)
        fits = type(value) in kinds or (isinstance(value, dict) and (key in OF_CLASSES or key == "advantage"))
        if fits or (isinstance(value, dict) and is_group(SETTINGS[key])):  # then an unknown key is refused: below
            continue
        answer = refusal(changed(key, value))
        assert answer.startswith(f"{key} must be ")
        assert repr(value) in answer


@pytest.mark.parametrize("key", CHECKED)
def test_a_field_that_is_missing_and_one_that_nobody_reads_are_refused(key: str) -> None:
    *groups, name = key.split(".")
    inner = PLAIN
    for group in groups:
        inner = inner[group]
    without = {field: value for field, value in inner.items() if field != name}
    plain = changed(".".join(groups), without) if groups else without
    if SETTINGS[key].default is None:
        read(plain)
    else:
        assert refusal(plain).startswith(f"{key} is missing: ")
    if is_group(SETTINGS[key]) and SETTINGS[key].type is not KL:
        assert refusal(changed(f"{key}.nothing", 1)) == f"{key}.nothing is nothing that a run reads"


@pytest.mark.parametrize("key", [key for key in CHECKED if SETTINGS[key].metadata.get("bounds", Bounds()) != Bounds()])
def test_a_value_at_its_bound_is_read_and_one_beyond_is_refused(key: str) -> None:
    bounds: Bounds = SETTINGS[key].metadata["bounds"]
    if bounds.choices:
        for choice in bounds.choices:
            read(changed(key, choice))
        assert refusal(changed(key, "other")).startswith(f"{key} must be one of {', '.join(bounds.choices)}; got")
        return
    is_whole = SETTINGS[key].type in (int, int | None)
    beyond = {
        bounds.at_least: -1 if is_whole else -1e-9,
        bounds.at_most: 1 if is_whole else 1e-9,
    }
    for bound, step in beyond.items():
        if bound is not None:
            read(changed(key, bound))
            assert refusal(changed(key, bound + step)).startswith(f"{key} must be ")
    for bound in (bounds.above, bounds.below):
        if bound is not None:
            assert refusal(changed(key, bound)).startswith(f"{key} must be ")
    if not is_whole:
        for value in (float("nan"), float("inf")):
            assert refusal(changed(key, value)).startswith(f"{key} must be finite")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["~cold_start"], "cold_start is missing: Supervised training before reinforcement"),
        (["cold_start=5"], "cold_start must be a group of fields; got 5"),
        (["cold_start.path=3"], "cold_start.path must be text, or null; got 3"),
        (["~engine"], "engine is missing: what samples"),
        (["rollout=null"], "rollout must be a group of fields; got None"),
        (["~algorithm"], "algorithm.loss is missing"),
        (["updates_per_rollout=0", "total_updates=10"], "updates_per_rollout must be at least 1; got 0"),
        (["updates_per_rollout=abc", "total_updates=10"], "updates_per_rollout must be a whole number; got 'abc'"),
        (["optimizer.beta1=2"], "optimizer.beta1 must be at least 0 and below 1; got 2.0 (decay of the gradient's"),
        (["routing=r2", "+routing.predictor_learning_rate=0.1"], "under routing=pr2 and left out elsewhere"),
        (["routing=pr2", "routing.predictor_learning_rate=null"], "under routing=pr2 and left out elsewhere"),
    ],
)
def test_a_wrong_field_ends_the_command_with_one_line_and_touches_nothing(
    words: list[str], answer: str, refusal_of: Callable[..., str]
) -> None:
    assert answer in refusal_of(*words)


def test_a_config_is_looked_into_by_attributes_outside_of_its_folder() -> None:
    files = [path for path in (ROOT / "bench").rglob("*.py") if path.parent.name != "config"]
    assert [str(path) for path in files if re.search(r"\bconfig\[", path.read_text())] == []

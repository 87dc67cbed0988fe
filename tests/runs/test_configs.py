"""Every shipped config composes and runs; what Hydra builds is what Python builds."""

from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from steadymoe import algorithms, conf
from steadymoe.bench.runs import compose, execute, overrides, record, validate

SHORT = ["minibatch_prompts=4", "updates_per_rollout=2", "updates=4", "evaluation.every=2", "seed=0"]
SHORT += ["evaluation.prompts=4", "evaluation.pass_k=0", "probe.responses=2"]
SHORT += ["rollout.responses=3"]  # the fewest that every advantage takes
SHORT += [f"cold_start.{word}" for word in ("accuracy_low=0", "accuracy_high=1", "batch_size=4")]
SHORT += [f"cold_start.{word}" for word in ("check_every=1", "check_prompts=4")]


def with_needed(name: str) -> list[str]:
    """An algorithm, and what a preset is only true with."""
    config = conf.read("algorithm", name)
    needed = [f"{key}={config[key]}" for key in ("correction", "updates_per_rollout") if key in config]
    return [f"algorithm={name}", *needed]


# A task at a small size.
SHORT_TASK = {
    "sort": ["task.min_length=2", "task.max_length=3"],
    "ledger": ["task.min_forks=1", "task.max_forks=2", "task.fillers=2"],
    "selection": ["task.length=4", "task.passes=2"],
    "chain": ["task.min_operands=2", "task.max_operands=3"],
}


def run_of(words: list[str], waits: bool = True) -> Any:
    """Overrides of a run, which may wait for `make check`."""
    return pytest.param(words, marks=pytest.mark.check if waits else [])


def trained_algorithms() -> list[Any]:
    """Every algorithm; they wait, since test_learning trains the core six, and each loss is called in its own tests."""
    return [run_of([*with_needed(name), "model=micro"]) for name in conf.names("algorithm")]


def trained_models() -> list[Any]:
    """Every model that needs no checkpoint; most wait, since test_families trains them too."""
    quick = ("tiny", "deep", "dense_tiny")
    return [run_of([f"model={name}"], waits=name not in quick) for name in conf.names("model") if name != "pretrained"]


def trained_experiments() -> list[Any]:
    """Every experiment; all but one of each setting wait, and every_algorithm, which test_learning trains."""
    quick = ("dose", "quickstart", "gspo")
    return [run_of([f"experiment={name}"], waits=name not in quick) for name in conf.names("experiment")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder, and in it the cold starts that configs share."""
    return tmp_path_factory.mktemp("configs")


@pytest.mark.parametrize(
    "words",
    [
        *trained_algorithms(),
        *([f"correction={name}", "model=micro"] for name in conf.names("correction")),
        *([f"routing={name}", "model=micro"] for name in conf.names("routing")),
        *([f"engine={name}", "model=micro"] for name in conf.names("engine")),
        *([f"optimizer={name}", "model=micro"] for name in conf.names("optimizer")),
        *trained_models(),
        *([f"task={name}", "model=micro"] for name in conf.names("task")),
        run_of(["task=sort", "task.min_length=150", "task.max_length=200", "model=micro"]),  # 17 s
        *trained_experiments(),
    ],
    ids=" ".join,
)
def test_every_shipped_config_runs_two_steps(words: list[str], results: Path) -> None:
    with overrides.composing():
        short = SHORT_TASK[overrides.compose(words)[1]["task"]]
        points = overrides.points([*SHORT, *short, *words, f"results_dir={results}"], multirun=False)
        made = compose.run(points[0])
    assert execute.execute(made) == "finished"
    assert len(record.read_table(made.folder, "steps")) == made.config.rollouts


def test_a_dense_model_has_no_routing_columns_and_all_others(tmp_path: Path) -> None:
    (made,) = compose.plan(["model=dense_tiny", *SHORT, f"results_dir={tmp_path}"])
    execute.execute(made)
    updates = record.read_table(made.folder, "updates")
    empty = {name for name in updates if updates[name].isna().all()}
    kinds = ("expert_", "router_", "log_ratio_", "routing_", "replay_", "route_")
    routing = {name for name in updates if name.startswith(kinds)}
    routing |= {"token_any_layer_change_rate", "top1_change_rate", "relative_step_routers"}
    assert empty == routing | {"correction_weight", "correction_rejected", "loss_number"}
    assert record.read_table(made.folder, "layers").empty


@pytest.mark.parametrize("name", algorithms.names(presets=True))
def test_loading_through_hydra_equals_loading_through_python(name: str) -> None:
    (made,) = compose.plan(with_needed(name))
    assert algorithms.build(made.config.algorithm.loss) == algorithms.load(name)


def test_values_are_hydras_and_keys_that_yamls_leave_out_need_no_plus() -> None:
    words = ["algorithm=dapo", "engine=fp8", "engine.strength=0.5", "rollout={responses: 4}", "++seed=3", "seed=4"]
    with overrides.composing():
        composed = hydra.compose("config", words)
        ours, choices = overrides.compose([*words, "algorithm.loss.dual_clip=3.0"])
        theirs: Any = OmegaConf.to_container(composed, resolve=True)
        theirs["algorithm"]["loss"]["dual_clip"] = 3.0
    assert ours == theirs
    assert (choices["algorithm"], choices["engine"], ours["seed"]) == ("dapo", "fp8", 4)


def test_dictionaries_of_one_group_are_merged_in_a_sweep_as_in_a_run() -> None:
    words = ["model={config: {num_experts: 8}}", "model={config: {num_hidden_layers: 2}}"]
    (single,), swept = compose.plan(words), compose.plan([*words, "seed=0,1"], multirun=True)
    assert {run.config_hash for run in (single, swept[0])} == {single.config_hash}
    assert {single.axes[f"model.config.{key}"] for key in ("num_experts", "num_hidden_layers")} == {8, 2}


def test_hydra_section_matches_hydras_composition() -> None:
    words = ["experiment=cell_mismatch", "hydra.launcher.n_jobs=2", "results_dir=elsewhere", "experiment_name=mine"]
    with overrides.composing():
        ours, theirs = overrides.settings(words).hydra, hydra.compose("config", words, return_hydra_config=True).hydra
        assert ours.sweep.dir == theirs.sweep.dir == "elsewhere/sweeps/mine"
        for part in ("launcher", "sweeper", "sweep", "runtime"):
            one, other = (OmegaConf.to_container(each[part], resolve=True) for each in (ours, theirs))
            assert one == other


@pytest.mark.parametrize("name", conf.names("experiment"))
def test_experiment_states_its_command_and_number_of_runs(name: str) -> None:
    text, words = conf.text("experiment", name), [f"experiment={name}"]
    with overrides.composing(words):
        points = overrides.points(words, multirun=False)
        compose.run(points[0])
    assert f"steadymoe run experiment={name}" in text
    assert f"{len(points)} runs" in text
    assert yaml.safe_load(text)["experiment_name"] == name


@pytest.mark.check
@pytest.mark.parametrize("name", conf.names("experiment"))
def test_every_run_of_an_experiment_can_be_planned(name: str) -> None:
    assert compose.plan([f"experiment={name}"], left_out=[])  # a dense twin has no routes to pin


@pytest.mark.parametrize(
    ("estimator", "place", "coefficient", "noted"),
    [("k1", "loss", 0.1, 1), ("k1", "loss", 0.0, 0), ("k1", "reward", 0.1, 0), ("k2", "loss", 0.1, 0)],
)
def test_kl_term_without_effect_is_noted(estimator: str, place: str, coefficient: float, noted: int) -> None:
    kl = f"{{estimator: {estimator}, place: {place}, coefficient: {coefficient}}}"
    notes = validate.notes(compose.plan([f"algorithm.kl={kl}"]))
    assert len(notes) == noted
    assert all("estimator=k1" in line for line in notes)

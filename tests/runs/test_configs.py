"""Every shipped config composes and runs; what Hydra builds is what Python builds."""

import shlex
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from fixtures import CORE_SIX
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from steadymoe import algorithms, conf
from steadymoe.bench.runs import command, compose, execute, overrides, record

SHORT = [
    "rollout.prompts=8",
    "rollout.responses=3",  # the fewest that every advantage takes
    "updates_per_rollout=2",
    "steps=2",
    "evaluation.every=1",
    "evaluation.prompts=4",
    "evaluation.pass_k=0",
    "probe.responses=2",
    "cold_start.accuracy_low=0",
    "cold_start.accuracy_high=1",
    "cold_start.check_every=1",
    "cold_start.check_prompts=4",
    "cold_start.batch_size=4",
]


# ... and of experiments with a mini-batch or updates of their own, which SHORT's prompts and steps would contradict.
SHORT_EXPERIMENT = ["rollout.minibatch_prompts=null", "total_updates=null", "evaluation.every_updates=null"]
SHORT_EXPERIMENT += ["probe.every_updates=null", "checkpoint_keep=null", "seed=0"]


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


def run_of(words: list[str], waits: bool) -> Any:
    """Overrides of a run, which may wait for `make check`."""
    return pytest.param(words, marks=pytest.mark.check if waits else [])


def trained_algorithms() -> list[Any]:
    """Every algorithm; all but the core six wait, since each loss is called in tests of its own."""
    return [run_of([*with_needed(name), "model=micro"], waits=name not in CORE_SIX) for name in conf.names("algorithm")]


def trained_models() -> list[Any]:
    """Every model that needs no checkpoint; most wait, since test_families trains them too."""
    quick = ("micro", "tiny", "deep", "dense_tiny", "mixtral_micro", "deepseek_v3_micro", "gpt_oss_micro")
    return [run_of([f"model={name}"], waits=name not in quick) for name in conf.names("model") if name != "pretrained"]


def trained_experiments() -> list[Any]:
    """Every experiment; those that change another one wait."""

    def base(name: str) -> Any:
        return yaml.safe_load(conf.path("experiment", name).read_text())["defaults"][0]

    return [
        run_of([f"experiment={name}", *SHORT_EXPERIMENT], waits=base(name) in conf.names("experiment"))
        for name in conf.names("experiment")
    ]


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
        run_of(["task=sort", "task.min_length=150", "task.max_length=200", "model=micro"], waits=True),  # 17 s
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
    assert len(record.read_table(made.folder, "steps")) == 2


def test_a_dense_model_has_no_routing_columns_and_all_others(tmp_path: Path) -> None:
    (made,) = compose.plan(["model=dense_tiny", *SHORT, f"results_dir={tmp_path}"])
    execute.execute(made)
    updates = record.read_table(made.folder, "updates")
    empty = {name for name in updates if updates[name].isna().all()}
    routing = {
        name
        for name in updates
        if name.startswith(("expert_", "router_", "log_ratio_", "relative_", "routing_", "replay_", "route_"))
    }
    routing |= {"token_any_layer_change_rate", "top1_change_rate"}
    assert empty == routing | {"correction_weight", "correction_rejected", "loss_number"}
    assert record.read_table(made.folder, "layers").empty


@pytest.mark.parametrize("name", algorithms.names(presets=True))
def test_loading_through_hydra_equals_loading_through_python(name: str) -> None:
    (made,) = compose.plan(with_needed(name))
    assert algorithms.build(made.config.algorithm.loss) == algorithms.load(name)


@pytest.mark.parametrize(
    "text",
    [
        "experiment=attribution seed=1 algorithm=grpo",
        "model=micro +model.config.router_scale=3 routing=r2 correction=tis seed=3",
        "algorithm=dapo engine=fp8 engine.strength=0.5 ~engine.scale",
        "experiment=replay '+task.texts.x=\"algorithm=grpo algorithm.loss.clip_low=0.1\"' +task.numbers=[0,1]",
        "advantage=leave_one_out hydra.launcher.n_jobs=2 ++optimizer.learning_rate=3e-3",
        "seed=4 ++seed=3",
        "threads=2 log=null savings.sampler_as_old=10 model.config.hidden_size=64 \"results_dir='a b'\"",
        "optimizer.learning_rate=1 evaluation.permuted_routes=true rollout={prompts:8,responses:4}",
        "seed=3 seed=4 seed=3",
        "cold_start.noise=0.2 ++cold_start={noise:0.3} cold_start.noise=0.4",
        "optimizer.learning_rat=3",
        "task=sort task.max_length=[",
        "algorithm=nothing",
        "+seed=3",
        "seed=1,2",
    ],
)
def test_sweep_point_matches_hydras_composition(text: str) -> None:
    def found(by: Any, words: list[str]) -> Any:
        try:
            return by(words)
        except (HydraException, OmegaConfBaseException) as error:
            return type(error), str(error)

    def by_hydra(words: list[str]) -> Any:
        composed = hydra.compose("config", words, return_hydra_config=True)
        ours = {key: composed[key] for key in composed if key != "hydra"}
        chosen = {group: name for group, name in composed.hydra.runtime.choices.items() if name and "/" not in group}
        return OmegaConf.to_container(OmegaConf.create(ours), resolve=True), chosen

    with overrides.composing():
        words = shlex.split(text)
        assert found(overrides.compose, words) == found(by_hydra, words)
        again = found(overrides.compose, [*words, "steps=7"])  # the cache does not keep a point's own words
        assert found(overrides.compose, words) == found(by_hydra, words)
        assert again == found(by_hydra, [*words, "steps=7"])


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=tolerance_mismatch", "algorithm=grpo_unclipped", "updates_per_rollout=1", "seed=3"],
        ["experiment=attribution", "model=dense_flat", "optimizer.learning_rate=3e-3"],
        ["routing=r2", "advantage=leave_one_out"],
        ["hydra/launcher=basic", "correction=tis"],
    ],
    ids=" ".join,
)
def test_named_configs_of_a_point_match_hydras_full_composition(words: list[str]) -> None:
    with overrides.composing():
        chosen = overrides.compose(words)[1]
        composed = hydra.compose("config", [f"{group}={name}" for group, name in chosen.items()])
        assert overrides.reference(words) == OmegaConf.to_container(composed, resolve=True)


def test_hydra_section_matches_hydras_composition() -> None:
    words = [
        "experiment=tolerance_mismatch",
        "hydra.launcher.n_jobs=2",
        "results_dir=elsewhere",
        "experiment_name=mine",
    ]
    with overrides.composing():
        ours, theirs = overrides.settings(words).hydra, hydra.compose("config", words, return_hydra_config=True).hydra
        assert ours.sweep.dir == theirs.sweep.dir == "elsewhere/sweeps/mine"
        for part in ("launcher", "sweeper", "sweep", "runtime"):
            assert OmegaConf.to_container(ours[part], resolve=True) == OmegaConf.to_container(
                theirs[part], resolve=True
            )


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
    assert compose.plan([f"experiment={name}"])


@pytest.mark.parametrize(
    ("estimator", "place", "coefficient", "noted"),
    [("k1", "loss", 0.1, 1), ("k1", "loss", 0.0, 0), ("k1", "reward", 0.1, 0), ("k2", "loss", 0.1, 0)],
)
def test_kl_term_without_effect_is_noted(estimator: str, place: str, coefficient: float, noted: int) -> None:
    kl = f"{{estimator: {estimator}, place: {place}, coefficient: {coefficient}}}"
    notes = command._notes(compose.plan([f"algorithm.kl={kl}"]))
    assert len(notes) == noted
    assert all("estimator=k1" in line for line in notes)

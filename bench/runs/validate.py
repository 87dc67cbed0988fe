"""Whether the fields of a composed config fit each other, beyond the types and bounds of ``schema``, and whether its
files and packages are there. Every refusal is one line. ``fits`` checks what takes torch: losses, models, memory.
"""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from steadymoe.bench.runs.identity import LONGEST_NAME, is_name
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support.errors import ConfigError

if TYPE_CHECKING:
    from steadymoe.bench.runs.compose import Run

# Fields of a single replay.
_REPLAY_FIELDS = {"predictor_learning_rate": "pr2", "score_share": "r3_filtered", "lag": "lagged"}


def check(config: RunConfig) -> None:
    """Raise ConfigError for the first field that does not fit."""
    _relations(config)
    _places(config)


def notes(runs: Sequence["Run"]) -> list[str]:
    """Return a line about a setting that is allowed and does not do what its name promises, if a run has one."""
    kls = (run.config.algorithm.kl for run in runs)
    if any(kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1" for kl in kls):
        return [
            "note: with algorithm.kl.place=loss, estimator=k1 has an expected gradient of 0 on policy: it only "
            "adds noise; choose k2 or k3, or place=reward"
        ]
    return []


def _relations(config: RunConfig) -> None:
    routing = config.routing
    if config.savings.reuse_sampler_logprobs is not None:
        exact = config.engine.get("_target_", "").endswith(".Exact") and config.precision == "fp32"
        if not exact or routing.replay in ("pr2", "lagged"):
            raise ConfigError(
                "savings.reuse_sampler_logprobs requires a sampler equal to the trainer: engine=exact, precision=fp32, "
                "and neither routing=pr2 nor routing=lagged"
            )
    if config.checkpoint_keep is not None and config.checkpoint_keep > config.updates:
        raise ConfigError(f"checkpoint_keep={config.checkpoint_keep}: the run has {config.updates} updates; lower it")
    for section, given in (("cold_start", config.cold_start), ("routing", routing)):
        if given.aux_loss_per_layer and given.aux_loss == 0:
            raise ConfigError(f"{section}.aux_loss_per_layer requires {section}.aux_loss above 0")
    if config.microbatch is not None and max(routing.aux_loss, routing.z_loss) > 0:
        raise ConfigError(
            "routing.aux_loss and routing.z_loss need the whole mini-batch; set microbatch=null, or both to 0"
        )
    for name, replay in _REPLAY_FIELDS.items():
        if (getattr(routing, name) is None) == (routing.replay == replay):
            raise ConfigError(f"routing.{name} must be set with routing={replay} and left out otherwise")
    if routing.lag_trigger is not None and routing.replay != "lagged":
        raise ConfigError("routing.lag_trigger requires routing=lagged; leave it out otherwise")
    if routing.replay == "pinned" and config.evaluation.permuted_routes:
        raise ConfigError("routing=pinned fixes the experts of an evaluation; set evaluation.permuted_routes=false")
    if routing.replay == "pinned" and routing.bias_speed > 0:
        raise ConfigError("routing=pinned: routing.bias_speed would balance experts that never run; set it to 0")
    updates = config.rollouts * config.updates_per_rollout
    if routing.lag is not None and routing.lag >= updates:
        raise ConfigError(f"routing.lag={routing.lag}: in a run of {updates} updates no weights are that old; lower it")
    if routing.replay == "pr2" and config.updates_per_rollout < 2:
        raise ConfigError("routing=pr2 learns from a rollout's second update on; use updates_per_rollout of 2 or more")
    if routing.replay == "pr2" and config.optimizer.kind != "adamw":
        raise ConfigError("routing=pr2: predictor_learning_rate is a rate for AdamW; use optimizer=adamw")
    if config.optimizer.router_factor != 1 and routing.freeze:
        raise ConfigError("routing=freeze keeps routers: optimizer.router_factor would have no effect; leave it out")
    if config.cold_start.accuracy_low >= config.cold_start.accuracy_high:
        raise ConfigError("cold_start.accuracy_low must be below cold_start.accuracy_high")


def _places(config: RunConfig) -> None:
    if not is_name(name := config.experiment_name):
        raise ConfigError(
            f"experiment_name may hold up to {LONGEST_NAME} letters, digits, '.', '_', '-' and '@', and may not begin "
            f"with '.'; got {name!r}"
        )
    results = config.results_dir
    if not results.strip():
        raise ConfigError("results_dir must name a folder; the default is 'results'")
    if "\0" in results or any(len(os.fsencode(part)) > 255 for part in Path(results).parts):
        raise ConfigError("results_dir must be a path whose folders have names of at most 255 bytes")
    checkpoint = config.cold_start.path
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise ConfigError(f"cold_start.path: there is no file {checkpoint}")
    place = Path(config.results_dir).absolute() / "runs"
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"results_dir={config.results_dir} cannot be written: {place} is not a writable folder")
    if config.log is not None:
        try:
            version(config.log)  # an import would also accept a folder of this name
        except PackageNotFoundError as error:
            raise ConfigError(f"log={config.log} needs its package: pip install 'steadymoe[{config.log}]'") from error

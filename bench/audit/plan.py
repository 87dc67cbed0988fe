"""The audits that a command line asks for: what is refused, where each is saved, and making the missing tables."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from hydra.utils import instantiate

from steadymoe.bench.audit import losses, measure
from steadymoe.bench.audit.rollouts import NEUTRAL
from steadymoe.bench.runs import compose, fits, lifecycle, provenance
from steadymoe.bench.runs.compose import ConfigError, Run
from steadymoe.bench.runs.fits import need_device
from steadymoe.bench.runs.overrides import key_of
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.support import atomic_files, source

# The code that decides the numbers of an audit, apart from the training code.
_MEASURES = (
    *(f"audit/{name}.py" for name in ("losses", "clips", "estimators", "gradients", "measure", "rollouts", "tokens")),
    *(f"training/{name}.py" for name in ("token_metrics", "routing_drift")),
    "statistics/estimates.py",
)
# What ``audit.json`` must have to be compared.
_FIELDS: lifecycle.Fields = {
    **{"audit_hash": str, "audit_code": str, "arms_code": dict, "config": dict},
    **{"algorithm_code": str, "training_version": int, "versions": dict},
}


@dataclass(frozen=True)
class PlannedAudit:
    """One audit: a checked config, its losses, and the folder of its tables."""

    run: Run
    losses: dict[str, Run]
    """By label; audits that differ in seed share them."""
    folder: Path
    audit_hash: str

    @property
    def facts_path(self) -> Path:
        """The JSON file that says what the folder holds."""
        return self.folder / "audit.json"

    @property
    def missing(self) -> list[int]:
        """The drifts without a table."""
        return [k for k in self.run.config.audit.drift if not measure.table_path(self.folder, k).exists()]

    @property
    def is_finished(self) -> bool:
        """Whether tables and facts are complete; a kill after the last table leaves the facts begun. Raises Damaged."""
        facts = lifecycle.read(self.facts_path, _FIELDS) or {}
        return not self.missing and facts.get("status") == "finished"

    def make(self, log: Callable[[str], None], redo: bool = False) -> None:
        """Measure the missing tables, all of them for ``redo``, and complete the facts.

        Raises filelock.Timeout if another process makes this audit, and as ``measure.audit`` does.
        """
        with lifecycle.hold(self.folder):
            if redo:
                for path in [self.facts_path, *self.folder.glob("k=*.parquet")]:
                    path.unlink(missing_ok=True)
            if self.is_finished:
                log(f"finished: {self.folder}")
                return
            facts, begun = self._facts(), monotonic()
            if not self.facts_path.exists():
                atomic_files.write_json(self.facts_path, facts | {"status": "begun"})
            configs = {label: _measured(loss.config) for label, loss in self.losses.items()}
            cold_start = measure.audit(_measured(self.run.config), configs, self.folder, log)
            ended = {"status": "finished", "seconds": round(monotonic() - begun, 1), "cold_start": cold_start}
            atomic_files.write_json(self.facts_path, facts | ended)

    def _facts(self) -> dict[str, Any]:
        """Return the content of ``audit.json``; its ``seconds`` are those of the last command that worked on it."""
        run, config = self.run, self.run.config
        command = run.command.replace("steadymoe run", "steadymoe audit", 1).replace(f" algorithm={NEUTRAL}", "")
        return {
            "experiment": config.experiment_name,
            "seed": config.seed,
            "command": command,
            "config_hash": run.config_hash,
            **self.identity(),
            **provenance.facts(run.plain, config.experts, config.device, config.threads),
            "arms": {label: _changes(loss, run) for label, loss in self.losses.items()},
            "losses": {label: loss.plain["algorithm"]["loss"] for label, loss in self.losses.items()},
        }

    def identity(self) -> dict[str, Any]:
        """Return what tells this audit from another: its config, and the code of its losses and of what measures."""
        arms = {label: provenance.code_hash(loss.plain) for label, loss in self.losses.items()}
        return {"audit_hash": self.audit_hash, "arms_code": arms, "audit_code": _code()}


def plan(overrides: Sequence[str]) -> list[PlannedAudit]:
    """Return the audits of ``overrides``, each checked. Raises ConfigError."""
    for word in overrides:
        if key_of(word).partition(".")[0] in ("algorithm", "advantage"):
            raise ConfigError(
                f"{word}: an audit compares many algorithms; use audit.algorithms=[grpo,gspo], or audit.arms for "
                "other settings"
            )
    runs = compose.plan([*overrides, f"algorithm={NEUTRAL}"], multirun=True)
    for run in runs:
        need_device(run.config.device)
        _check(run)
    composed: dict[str, dict[str, Run]] = {}
    planned = []
    for run in runs:  # no loss depends on the seed
        key = json.dumps({k: v for k, v in run.plain.items() if k != "seed"}, sort_keys=True)
        composed[key] = composed.get(key) or losses.plan(run)
        results = Path(run.config.results_dir).absolute()
        below = run.folder.relative_to(results / "runs" / run.config.experiment_name).parts[1:]  # no algorithm
        folder = results.joinpath("audits", run.config.experiment_name, *below)
        planned.append(PlannedAudit(run, composed[key], folder, _hash(run, composed[key])))
    return planned


def refuse_others(planned: Sequence[PlannedAudit], redo: bool = False) -> None:
    """Raise ConfigError where a folder holds an audit of another config or of other code; with ``redo`` never."""
    for audit in () if redo else planned:
        try:
            before = lifecycle.read(audit.facts_path, _FIELDS)
            lifecycle.refuse(audit.folder, before, {"config": audit.run.plain, **audit.identity()})
        except lifecycle.Damaged as error:
            raise ConfigError(f"{error}; add --redo to measure again") from error


def _measured(config: RunConfig) -> RunConfig:
    """Return ``config`` with everything measured, and an old policy with a forward of its own."""
    return replace(config, measure="all", savings=replace(config.savings, sampler_as_old=None))


def _check(run: Run) -> None:
    """Raise ConfigError for what an audit cannot measure."""
    config, audit, choices = run.config, run.config.audit, run.choices
    has_experts = fits.has_experts(config.model)
    refusals = {
        f"routing={choices['routing']}: an audit sets replay by audit.routing=[free,r2]": choices["routing"] != "off",
        "an audit takes gradients of routers, too; leave routing.freeze at false": config.routing.freeze,
        "an audit takes rewards as they are; leave rollout.shuffle_rewards at false": config.rollout.shuffle_rewards,
        "an audit drifts at a constant rate; leave optimizer.decay at 0": config.optimizer.decay > 0,
        "engine=stale: an audit samples with one set of weights; use audit.drift for staleness": (
            choices["engine"] == "stale"
        ),
        "an audit measures only gradients of losses; leave routing.aux_loss, z_loss and bias_speed at 0": (
            config.routing.aux_loss or config.routing.z_loss or config.routing.bias_speed
        ),
        "an audit feeds each mini-batch in one forward; set microbatch=null, or make mini-batches smaller": (
            config.microbatch is not None
        ),
        "an audit needs audit.algorithms, audit.arms or audit.clips=true": (
            not (audit.algorithms or audit.arms or audit.clips)
        ),
        f"audit.drift must include 0, the weights that sampled; got {list(audit.drift)}": 0 not in audit.drift,
        f"audit.drift={list(audit.drift)}: a rollout has prompts for {config.updates_per_rollout} updates only; raise "
        "updates_per_rollout, or drop larger numbers": max(audit.drift) > config.updates_per_rollout,
        f"audit.groups ({audit.groups}) must divide audit.minibatches ({audit.minibatches})": (
            audit.minibatches % audit.groups
        ),
        f"audit.minibatches ({audit.minibatches}) must be at least twice audit.groups ({audit.groups}): a group of one "
        "mini-batch has no measurable noise": audit.minibatches < 2 * audit.groups,
        "this model is dense and has no routers to replay or to scale; use audit.routing=[free] and "
        "audit.router_scale=[1.0]": (not has_experts and (audit.routing != ("free",) or audit.router_scale != (1.0,))),
        "audit.routing: r3 replays the sampler's routes, which engine=exact shares with r2; use r2": (
            "r3" in audit.routing and choices["engine"] == "exact"
        ),
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(message)
    try:
        measure.prompts(instantiate(config.task), config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _hash(run: Run, of_losses: Mapping[str, Run]) -> str:
    """Return 16 hex digits over everything that changes numbers of an audit."""
    sections = {
        label: {key: loss.plain[key] for key in ("algorithm", "advantage", "correction")}
        for label, loss in of_losses.items()
    }
    # One drift more or less changes no table of another one.
    audit = {k: v for k, v in asdict(run.config.audit).items() if k not in ("drift", "algorithms", "arms")}
    whole = json.dumps([run.config_hash, audit, sections], sort_keys=True, default=dict)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _code() -> str:
    return source.digest([source.SUITE / "bench" / name for name in _MEASURES])


def _changes(loss: Run, run: Run) -> dict[str, Any]:
    """Return a loss's algorithm, and each number that differs from the algorithm's YAML and the audit's config."""
    changed = {k: value for k, value in loss.axes.items() if k not in run.axes or run.axes[k] != value}
    return {"algorithm": loss.choices["algorithm"]} | changed

"""``steadymoe audit`` from its words to its exit code: refusals, what is kept already, the files of each audit."""

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from steadymoe.bench.audit import arms, drift, measure, tables
from steadymoe.bench.config import compose
from steadymoe.bench.config.compose import ConfigError, Run
from steadymoe.bench.config.schema import RunConfig
from steadymoe.bench.runs import provenance
from steadymoe.bench.support import atomic_files, source
from steadymoe.bench.support.revision import revision
from steadymoe.bench.support.text import visible
from steadymoe.bench.training.cold_start import ColdStartError
from steadymoe.models import build, pretrained

HELP = """steadymoe audit key=value … [--dry] [--redo]

Measure the gradients of many losses on the same frozen rollouts, at weights k neutral updates away:
steadymoe audit experiment=audit seed=300,301 'audit.algorithms=[grpo,gspo]'. Takes the overrides of `steadymoe run`;
an override with several values makes several audits. Each is saved to <results_dir>/audits/<experiment>/…/seed=<n>/.
Rerun the command to resume. --dry prints what exists and what would run; --redo reruns everything."""
_FLAGS = ("--dry", "--redo")
# What decides the numbers of an audit, apart from the training code.
_MEASURES = (
    *(
        f"audit/{name}.py"
        for name in ("arms", "clips", "drift", "estimators", "gradients", "measure", "splits", "tokens")
    ),
    "measurement/clip_prediction.py",
    "measurement/token_metrics.py",
    "measurement/routing_drift.py",
    "statistics/estimates.py",
)


@dataclass(frozen=True)
class Planned:
    """One audit: a checked config, its arms, and the place of its files."""

    run: Run
    arms: dict[str, Run]
    folder: Path
    audit_hash: str

    @property
    def config(self) -> RunConfig:
        """The config that everything is measured with."""
        return _measured(self.run.config)

    @property
    def facts(self) -> Path:
        """The file that says what the folder holds."""
        return self.folder / "audit.json"

    @property
    def missing(self) -> list[int]:
        """The drifts whose tables are not written yet."""
        return [k for k in self.run.config.audit.drift if not measure.unit_path(self.folder, k).exists()]


def answer(words: list[str]) -> int:
    """Make the audits that ``words`` ask for and return the exit code.

    0: all are there; 1: a measurement failed; 2: the request is invalid; 130: interrupted.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    console = Console(markup=False, highlight=False)  # its texts come from data
    try:
        planned = plan([word for word in words if word not in _FLAGS])
        refuse_others(planned, "--redo" in words)
        if "--dry" in words:
            for each in planned:
                missing = ", ".join(f"k={k}" for k in each.missing)
                _say(console, f"{each.folder}: {'to do: ' + missing if missing else 'done'}")
            return 0
        planned[0].folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, ValueError, OSError) as error:
        return _refuse(error, 2)
    try:
        for number, each in enumerate(planned, start=1):
            _make(each, f"{number}/{len(planned)}", redo="--redo" in words)
    except Timeout:
        return _refuse(f"another process makes {each.folder}", 1)
    except (ColdStartError, FloatingPointError, ValueError, OSError) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:
        return _refuse("interrupted; the same command goes on from the last table", 130)
    shown = tables.ranking(tables.read([each.folder for each in planned]))
    for line in [*shown.to_markdown(index=False).splitlines(), *(f"in {each.folder}" for each in planned)]:
        _say(console, line)
    return 0


def refuse_others(planned: Sequence[Planned], may_redo: bool = False) -> None:
    """Raise ConfigError where a folder holds an audit of another config or of other code; with ``may_redo`` never."""
    if not may_redo:
        for each in planned:
            _refuse_other(each)


def plan(words: Sequence[str]) -> list[Planned]:
    """The audits that ``words`` ask for, each checked. Raises ConfigError."""
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if word.startswith("-"):
            raise ConfigError(f"{word} is no flag of steadymoe audit; it takes --dry, --redo, --help, key=value")
        if key.partition(".")[0] in ("algorithm", "advantage"):
            raise ConfigError(
                f"{word}: an audit takes many algorithms at once: audit.algorithms=[grpo,gspo], and audit.arms for "
                "other numbers"
            )
    runs = compose.plan([*words, f"algorithm={drift.NEUTRAL}"], multirun=True)
    for run in runs:
        _check(run)
    made: dict[str, dict[str, Run]] = {}
    found = []
    for run in runs:
        key = json.dumps({k: v for k, v in run.plain.items() if k not in ("seed", "start_from")}, sort_keys=True)
        made[key] = made.get(key) or arms.of(run)
        of_seed = {label: _at_seed(arm, run) for label, arm in made[key].items()}
        found.append(Planned(run, of_seed, _folder(run), _hash(run, of_seed)))
    return found


def _at_seed(arm: Run, run: Run) -> Run:
    """The arm at another seed and start of the same audit: no other field of an algorithm depends on these."""
    config = replace(arm.config, seed=run.config.seed, start_from=run.config.start_from)
    return replace(arm, config=_measured(config))


def _measured(config: RunConfig) -> RunConfig:
    """``config`` where everything is measured, and the old policy has a forward of its own."""
    return replace(config, measure="all", savings=replace(config.savings, sampler_as_old=None))


def _check(run: Run) -> None:
    """Raise ConfigError for what an audit cannot measure."""
    config, audit = run.config, run.config.audit
    if run.choices["routing"] != "off":
        raise ConfigError(f"routing={run.choices['routing']}: an audit replays routes by audit.routing=[free,r2]")
    if run.choices["engine"] == "stale":
        raise ConfigError("engine=stale: an audit has one set of weights that samples; audit.drift makes it stale")
    if config.routing.aux_loss or config.routing.z_loss:
        raise ConfigError("an audit takes gradients of losses alone; leave routing.aux_loss and routing.z_loss at 0")
    if config.compile:
        raise ConfigError("compile=true: an audit has many trainers on one model, and was never compiled")
    if config.microbatch is not None:
        raise ConfigError(
            "an audit takes a mini-batch in one forward; set microbatch=null, or make mini-batches smaller"
        )
    if not (audit.algorithms or audit.arms or audit.clips):
        raise ConfigError("an audit needs audit.algorithms, audit.arms or audit.clips=true")
    if 0 not in audit.drift:
        raise ConfigError(f"audit.drift must hold 0, the weights that sampled; got {list(audit.drift)}")
    if max(audit.drift) > config.updates_per_rollout:
        raise ConfigError(
            f"audit.drift={list(audit.drift)}: the prompts of a rollout serve {config.updates_per_rollout} updates; "
            "raise updates_per_rollout, or leave larger numbers out"
        )
    if audit.minibatches % audit.groups:
        raise ConfigError(f"audit.groups ({audit.groups}) must divide audit.minibatches ({audit.minibatches})")
    if audit.minibatches < 2 * audit.groups:
        raise ConfigError(
            f"audit.minibatches ({audit.minibatches}) must be at least twice audit.groups ({audit.groups}): a group of "
            "one mini-batch has no noise of its own"
        )
    model = config.model
    has_experts = pretrained.moe_layers(model["path"]) if "path" in model else build.has_experts(model["config"])
    if not has_experts and (audit.routing != ("free",) or audit.router_scale != (1.0,)):
        raise ConfigError(
            "this model is dense and has no routers to replay or to scale; use audit.routing=[free] and "
            "audit.router_scale=[1.0]"
        )
    if "r3" in audit.routing and run.choices["engine"] == "exact":
        raise ConfigError("audit.routing: r3 replays the sampler's routes, which engine=exact shares with r2; use r2")


def _folder(run: Run) -> Path:
    """Where the files of an audit lie: as a run's, below ``audits`` and without an algorithm."""
    runs = Path(run.config.results_dir).absolute() / "runs" / run.config.experiment_name
    below = run.folder.relative_to(runs).parts[1:]
    return Path(run.config.results_dir).absolute().joinpath("audits", run.config.experiment_name, *below)


def _hash(run: Run, of_arms: Mapping[str, Run]) -> str:
    """16 hex digits over everything that changes numbers of an audit."""
    sections = {
        label: {key: arm.plain[key] for key in ("algorithm", "advantage", "correction")}
        for label, arm in of_arms.items()
    }
    # A drift more or less changes no table of another one.
    audit = {k: v for k, v in asdict(run.config.audit).items() if k not in ("drift", "algorithms", "arms")}
    whole = json.dumps([run.config_hash, audit, sections], sort_keys=True, default=dict)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _code() -> str:
    """A hash of the code that measures."""
    return source.digest([source.SUITE / "bench" / name for name in _MEASURES])


def _refuse_other(planned: Planned) -> None:
    """Raise ConfigError where the folder holds an audit of another config or of other code."""
    path = planned.facts
    if not path.exists():
        return
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        code = provenance.difference(facts).code
        is_other_code = facts["audit_code"] != _code() or facts["arms_code"] != _arms_code(planned)
        is_other = facts["audit_hash"] != planned.audit_hash
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is of no audit; add --redo to make it again") from error
    if code or is_other_code:
        raise ConfigError(f"{path} was made by {code or 'other code'}; add --redo to make it again")
    if is_other:
        raise ConfigError(
            f"{planned.folder} holds an audit of another config; choose another experiment_name, or add --redo"
        )


def _arms_code(planned: Planned) -> dict[str, str | None]:
    return {label: provenance.code_hash(arm.plain) for label, arm in planned.arms.items()}


def _make(planned: Planned, number: str, redo: bool) -> None:
    """Make the tables of one audit that are missing, all of them for ``redo``."""
    planned.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(planned.folder / ".lock", timeout=0):
        if redo:
            planned.facts.unlink(missing_ok=True)
            for path in planned.folder.glob("k=*.parquet"):
                path.unlink()
        if not planned.missing:
            _progress(time.monotonic(), f"audit {number} is there: {planned.folder}")
            return
        facts = _facts(planned)
        if not planned.facts.exists():
            atomic_files.write_json(planned.facts, facts | {"status": "begun"})
        begun = time.monotonic()
        configs = {label: arm.config for label, arm in planned.arms.items()}
        say = partial(_progress, begun)
        made = measure.audit(planned.config, configs, planned.folder, lambda text: say(f"audit {number}: {text}"))
        ended = {"status": "finished", "seconds": round(time.monotonic() - begun, 1), "cold_start": made}
        atomic_files.write_json(planned.facts, facts | ended)


def _facts(planned: Planned) -> dict[str, Any]:
    """The content of ``audit.json``; ``seconds``, added at the end, are of the last command that made a table."""
    run, config = planned.run, planned.run.config
    return {
        "experiment": config.experiment_name,
        "seed": config.seed,
        "command": run.command.replace("steadymoe run", "steadymoe audit", 1).replace(
            f" algorithm={drift.NEUTRAL}", ""
        ),
        "config_hash": run.config_hash,
        "audit_hash": planned.audit_hash,
        "algorithm_code": provenance.code_hash(run.plain),
        "arms_code": _arms_code(planned),
        "audit_code": _code(),
        "training_version": provenance.TRAINING_VERSION,
        "versions": provenance.versions(config.experts),
        "revision": revision(),
        "machine": provenance.machine(config.device, config.threads),
        "arms": {label: _told(arm, run) for label, arm in planned.arms.items()},
        "losses": {label: arm.plain["algorithm"]["loss"] for label, arm in planned.arms.items()},
        "config": run.plain,
    }


def _told(arm: Run, run: Run) -> dict[str, Any]:
    """An arm's algorithm, and every number in which it differs from the algorithm's YAML and the audit's config."""
    return {"algorithm": arm.choices["algorithm"]} | {
        key: each for key, each in arm.axes.items() if key not in run.axes or run.axes[key] != each
    }


def _refuse(why: object, code: int) -> int:
    print(f"steadymoe: {visible(why)}", file=sys.stderr)
    return code


def _say(console: Console, text: str) -> None:
    console.print(visible(text), soft_wrap=True)


def _progress(begun: float, text: str) -> None:
    print(visible(f"{time.monotonic() - begun:4.0f} s  {text}"), file=sys.stderr, flush=True)

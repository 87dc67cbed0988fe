"""The experiments of the reference study, one row each: runs, arms, `make reference` and the pages follow from it.

While `steadymoe study` runs, Hydra composes a row as it composes a file of ``conf/experiment``, which has what a user
runs. ``sets`` is the named config; ``sweep`` and ``also`` are overrides of it, so they are the axes of a run's folder.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from steadymoe.bench.config import branch, compose
from steadymoe.bench.config.compose import CONF, ConfigError
from steadymoe.bench.config.identity import OFF, flatten
from steadymoe.bench.score.recorded import Arm

# The bands of GRPO and of GSPO in GSPO's paper: 2507.18071, section 5.1. GRPO's lower side is ours too.
_PAPER = "algorithm.loss.clip_high=0.27"
GRPO_BAND = f"algorithm.loss.clip_low=0.2 {_PAPER}"
GSPO_BAND = "algorithm.loss.clip_low=3e-4 algorithm.loss.clip_high=4e-4"
_DENSE = "model=dense_flat cold_start.router_factor=1.0 cold_start.aux_loss=0.0"  # a dense model has no routers
_AUDIT = "savings.sampler_as_old=null"  # the audit computes the old policy itself, so that any engine can sample
_GENTLE = f"{_AUDIT} optimizer.learning_rate=3e-4"  # the rate of *learning*: the reward has to stay
_NEUTRAL = "algorithm=grpo_unclipped"  # the loss of an audit's drift
_REWARDS = "measure=little total_updates=192 evaluation.every_updates=192"  # rewards alone, as long as the quick start


@cache
def _groups() -> frozenset[str]:
    return frozenset(path.name for path in CONF.iterdir() if path.is_dir())


@cache
def _parsed(words: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each override."""
    parser, values = OverridesParser.create(), {}
    for each in parser.parse_overrides(words.split()):
        texts = each.sweep_string_iterator() if each.is_sweep_override() else [each.get_value_element_as_str()]
        key = each.key_or_group
        values[key] = tuple(parser.parse_override(f"{key}={text}").value() for text in texts)
    return values


def _single(words: str) -> dict[str, Any]:
    return {key: value for key, (value,) in _parsed(words).items()}


@dataclass(frozen=True)
class Experiment:
    """A sweep of runs, or of audits."""

    name: str
    base: str
    """The experiment that it changes; its own name for a file of ``conf/experiment`` that runs as it is."""
    purpose: str
    sweep: str = ""
    """Overrides, on top of the base's sweep."""
    sets: str = ""
    """The named config: what differs from the base's."""
    also: Sequence[str] = ()
    """Further sweeps into the same records: overrides in place of those of ``sweep``."""
    audits: bool = False
    losses: Mapping[str, str] = field(default_factory=dict)
    """``audit.arms``."""

    @property
    def recorded_as(self) -> str:
        """The experiment's name in results."""
        return str(_single(self.sets).get("experiment_name", self.name))

    @property
    def commands(self) -> list[list[str]]:
        """The overrides of each of its sweeps."""
        return [[f"experiment={self.name}", *words.split()] for words in ("", *self.also)]

    @property
    def node(self) -> dict[str, Any]:
        """The config, as a file of ``conf/experiment`` would hold it."""
        groups = [{f"override /{key}": value} for key, value in _single(self.sets).items() if key in _groups()]
        node: dict[str, Any] = {"defaults": [*([self.base] if self.base else []), *groups, "_self_"]}
        params = dict(word.split("=", 1) for word in self.sweep.split())
        node |= {"experiment_name": self.name, "hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}}
        node |= {"audit": {"arms": dict(self.losses)}} if self.losses else {}
        for key, value in _single(self.sets).items():
            if key not in _groups():
                *parents, name = key.split(".")
                inner = node
                for parent in parents:
                    inner = inner.setdefault(parent, {})
                inner[name] = value
        return node

    @property
    def runs(self) -> int:
        """The number of its runs or audits."""
        return sum(prod(map(len, sweep.values())) for sweep in self._sweeps())

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs, or the cold starts of its audits."""
        return self._swept["seed"]

    def values(self, key: str) -> tuple[Any, ...]:
        """Return the values that it sweeps over."""
        return _parsed(self.sweep)[key]

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the overrides of each run, without its seed."""
        for sweep in self._sweeps():
            keys = [key for key in sweep if key != "seed"]
            for values in itertools.product(*(sweep[key] for key in keys)):
                yield dict(zip(keys, values, strict=True))

    def axes(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the axes of a run's folder (``compose.Run.axes``) from its overrides."""
        (named, groups), (sets, chosen) = _named(Path("config")), _named(Path("experiment") / self.name)
        groups = groups | chosen | {key: value for key, value in point.items() if key in groups}
        for group, name in groups.items():
            if name is not None:
                named = named | {f"{group}.{key}": value for key, value in _named(Path(group) / name)[0].items()}
        named = named | sets
        axes = {key: value for key, value in point.items() if key not in groups and named.get(key) != value}
        axes |= {group: groups[group] for group, off in OFF.items() if groups[group] != off}
        if named["start_from"]:
            axes["start_from"] = branch.read(named["start_from"].replace("${seed}", "0")).axis(Path("results"))
        return axes

    def _sweeps(self) -> list[dict[str, tuple[Any, ...]]]:
        return [self._swept | _parsed(words) for words in ("", *self.also)]

    @property
    def _swept(self) -> dict[str, tuple[Any, ...]]:
        inherited = TABLE[self.base]._swept if self.base in TABLE and self.base != self.name else {}
        return inherited | _parsed(self.sweep)


_REFERENCE = (
    Experiment(
        "study",
        "stale",
        "algorithms at *stale* and two controls: claims 1, 5, 7, 10 and 11",
        "algorithm=grpo,gspo,grpo_unclipped,reinforce,vespo,cispo,sapo seed=range(10)",
    ),
    Experiment(
        "study_paper",
        "study",
        "GRPO at the band of GSPO's paper, without and with R2: claims 1, 3, 15 and 16",
        f"algorithm=grpo {_PAPER} routing=off,r2",
    ),
    Experiment(
        "study_wide",
        "study",
        "GSPO at GRPO's band: claims 1 and 16",
        f"algorithm=gspo {GRPO_BAND}",
        "experiment_name=study_bands",
    ),
    Experiment(
        "study_narrow",
        "study",
        "GRPO at GSPO's band: claims 1 and 16",
        f"algorithm=grpo {GSPO_BAND}",
        "experiment_name=study_bands",
    ),
    # Sampler and trainer are one, so R3 would be R2.
    Experiment("study_replay", "study", "GSPO with R2: claim 3", "algorithm=gspo", "routing=r2"),
    Experiment(
        "study_frozen",
        "study",
        "the control that never moves",
        "algorithm=grpo optimizer.learning_rate=0.0",
        "measure=little",  # routes and ratios cannot change
    ),
    Experiment(
        "study_tuning",
        "study",
        "learning rate and band for GRPO and GSPO, on seeds that no claim uses: claim 1",
        "algorithm=grpo,gspo optimizer.learning_rate=1e-4,2e-4,4e-4,8e-4 seed=range(100,103)",
        _REWARDS,
        also=(f"algorithm=grpo {GSPO_BAND}", f"algorithm=gspo {GRPO_BAND}"),
    ),
    Experiment(
        "study_best",
        "study",
        "GRPO and GSPO as study_tuning found best: claim 1",
        "algorithm=grpo",
        "optimizer.learning_rate=2e-4",
        also=(
            f"algorithm=gspo optimizer.learning_rate=4e-4 {GRPO_BAND}",
            "algorithm=gspo optimizer.learning_rate=4e-4",  # at its own band; added later (docs/protocol.md)
        ),
    ),
    Experiment("study_twin", "study", "GRPO and GSPO on the dense twin: claim 5", "algorithm=grpo,gspo", _DENSE),
    Experiment(
        "study_routes",
        "attribution",
        "expert change and routing's share over depth, experts and margins, one at a time: claims 4 and 12",
        "algorithm=grpo model.config.num_hidden_layers=2,4,8 model.config.num_experts=32 seed=range(8)",
        also=(
            "model.config.num_hidden_layers=4 model.config.num_experts=8,128",
            "model.config.num_hidden_layers=4 cold_start.router_factor=1.0",  # trained margins
        ),
    ),
    Experiment(
        "study_arithmetic",
        "study_routes",
        "experts that a bf16 sampler chooses differently at equal weights, over depth; part of no verdict",
        sets="engine=bf16 savings.sampler_as_old=null",  # the sampler is not the trainer
    ),
    Experiment(
        "first_testbed",
        "",
        "why the first edition carried no verdict: runs collapse on policy too (docs/calibration.md)",
        "algorithm=grpo_unclipped,reinforce updates_per_rollout=16,1 seed=range(100,103)",
        "model=micro task=chain measure=little updates_per_rollout=16 total_updates=640 "
        "rollout.minibatch_prompts=2 "  # some 112 tokens an update
        "task.min_operands=4 task.max_operands=10 task.modulus=10 cold_start.learning_rate=3e-3 cold_start.noise=0.05 "
        "cold_start.accuracy_low=0.6 cold_start.accuracy_high=0.8 optimizer.learning_rate=6e-4",
    ),
    Experiment(
        "study_mismatch",
        "mismatch_noise",
        "the old policy or the sampler as anchor at *mismatch*: claims 8 and 13",
        "algorithm=dppo,gspo algorithm.loss.anchor=old,rollout seed=range(10)",
    ),
    Experiment(
        "study_correction",
        "mismatch_noise",
        "GRPO without and with TIS at *mismatch*, and its exact twin: claim 9",
        "algorithm=grpo correction=none,tis seed=range(10)",
        also=("correction=none engine.strength=0.0",),
    ),
    Experiment(
        "study_minirl",
        "mismatch_noise",
        "MiniRL without and with replay, at few and many updates: claim 6",
        "algorithm=minirl routing=off,r2,r3 updates_per_rollout=4,16 seed=range(10)",
    ),
    Experiment("study_shift", "study", "router-shift weights: claim 10", "algorithm=rspo_grpo,rspo_gspo"),
    Experiment(
        "study_router",
        "study",
        "GRPO with frozen routers, and with a load-balancing loss: claim 15",
        f"algorithm=grpo {_PAPER}",
        "routing=freeze",
        also=("routing=off routing.aux_loss=0.02",),
    ),
    # The mini-batch stays, so that rollouts have 64 and 1,024 prompts next to the 256 of *study*.
    Experiment(
        "study_staleness",
        "study",
        "claim 7 at 4 and 64 updates a rollout",
        "algorithm=grpo,gspo,vespo,cispo,sapo updates_per_rollout=4,64",
    ),
    Experiment(
        "study_audit",
        "stale",
        "gradients of the losses of claims 1, 2, 3, 7 and 16, after updates that keep the reward",
        f"{_NEUTRAL} seed=range(305,325)",
        f"{_GENTLE} audit.algorithms=[gspo,vespo,cispo,sapo] audit.drift=[0,4,16] audit.routing=[free,r2] "
        "audit.clips=true",
        audits=True,
        losses={
            "grpo-paper": f"algorithm=grpo {_PAPER}",
            "gspo-grpo_band": f"algorithm=gspo {GRPO_BAND}",
            "grpo-gspo_band": f"algorithm=grpo {GSPO_BAND}",
        },
    ),
    Experiment(
        "study_audit_twin",
        "study_audit",
        "the same on the dense twin: claim 5",
        sets=f"{_DENSE} audit.algorithms=[gspo] audit.routing=[free] audit.clips=false",
        audits=True,
    ),
    Experiment(
        "core_gradient",
        "standard_gradient",
        "the part *gradient* of the standard, for the recorded algorithms",
        f"{_NEUTRAL} seed=range(305,315)",
        "experiment_name=steadymoe-1-gradient audit.algorithms=[grpo,gspo,reinforce,vespo,cispo,sapo]",
        audits=True,
    ),
)
# On seeds that no claim uses: docs/gates.md.
_GATES = (
    Experiment(
        "gates_stale",
        "stale",
        "gates V3, V5 and V7 of *stale*",
        "algorithm=grpo_unclipped,grpo,gspo seed=range(200,210)",
    ),
    Experiment(
        "gates_twin",
        "stale",
        "gate V2 of *stale*: the control without a clip, on policy",
        "algorithm=grpo_unclipped seed=range(200,210)",
        "updates_per_rollout=1",
    ),
    Experiment(
        "gates_dense",
        "stale",
        "gates V2 dense and R5 of *stale*: the dense twin, stale and on policy",
        "algorithm=grpo_unclipped updates_per_rollout=16,1 seed=range(200,210)",
        _DENSE,
    ),
    Experiment(
        "gates_learning",
        "learning",
        "gate V1 of *learning*: four learning rates",
        "algorithm=grpo optimizer.learning_rate=1.5e-4,3e-4,4.5e-4,6e-4 seed=range(200,205)",
        "optimizer.learning_rate=4.5e-4",
    ),
    Experiment(
        "gates_mismatch",
        "mismatch_fp8",
        "gate V4 of *mismatch fp8*: an exact sampler, and one in fp8",
        "algorithm=grpo engine=exact,fp8 seed=range(200,207)",
    ),
    Experiment(
        "gates_noise",
        "mismatch_noise",
        "gates V4 and V7 of *mismatch*: without and with noise on the sampler's routers",
        "algorithm=grpo engine.strength=0.0,1.0 seed=range(210,215)",
    ),
    Experiment(
        "gates_chaos",
        "stale",
        "the floor of chaos: GRPO of gates_stale, every weight disturbed",
        "algorithm=grpo seed=range(200,205)",
        "weight_noise=1e-7",
    ),
    Experiment(
        "gates_trunk",
        "stale",
        "the first 160 updates of gates_branches, under GRPO",
        "algorithm=grpo seed=range(200,205)",
        "total_updates=160 checkpoint_keep=10",
    ),
    Experiment(
        "gates_branches",
        "stale",
        "the other 320 updates: do branches of one trunk differ with less noise than whole runs?",
        "algorithm=grpo,gspo seed=range(200,205)",
        'total_updates=320 start_from="results/runs/gates_trunk/grpo/flat/sort/seed=${seed}@10"',
    ),
)
# Symmetric bands; 0.999, because a lower side of 1 would clip nothing.
_BANDS = {"1e-4": "1e-4", "3e-4": "3e-4", "1e-3": "1e-3", "3e-3": "3e-3", "1e-2": "1e-2", "3e-2": "3e-2"}
_BANDS |= {"1e-1": "0.1", "3e-1": "0.3", "1": "0.999"}
# docs/audit.md.
_AUDITS = (
    Experiment(
        "audit_trunk",
        "stale",
        "on-policy runs whose checkpoints audit_mid begins at",
        f"{_NEUTRAL} seed=range(300,305)",
        f"{_AUDIT} updates_per_rollout=1 total_updates=160 checkpoint_keep=160",
    ),
    Experiment("audit", "audit", "gradients after updates of 8e-4", f"{_NEUTRAL} seed=range(300,305)", audits=True),
    Experiment(
        "audit_gentle",
        "audit",
        "gradients after updates of 3e-4, which keep the reward",
        sets=f"{_GENTLE} audit.drift=[0,1,4,16]",  # the rate was chosen after audit was seen
        audits=True,
    ),
    Experiment(
        "audit_mid",
        "audit_gentle",
        "the same at mid-run checkpoints",
        sets='audit.drift=[0,4,16] start_from="results/runs/audit_trunk/grpo_unclipped/flat/sort/seed=${seed}@160"',
        audits=True,
    ),
    Experiment(
        "audit_dense",
        "audit_gentle",
        "the dense twin of audit_gentle",
        # Without the losses that read routers.
        sets=f"{_DENSE} audit.routing=[free] audit.algorithms="
        "[grpo,gspo,dr_grpo,dapo,cispo,gmpo,sapo,vespo,dppo,minirl,grpo_unclipped,reinforce]",
        audits=True,
    ),
    Experiment(
        "audit_dense_fast",
        "audit_dense",
        "the dense twin after updates of 8e-4",
        "optimizer.learning_rate=8e-4",
        "audit.drift=[0,16]",
        audits=True,
    ),
    Experiment(
        "audit_bands",
        "stale",
        "token and sequence ratios at the same bands, and at those of their papers",
        f"{_NEUTRAL} seed=range(300,303)",
        f"{_GENTLE} audit.algorithms=[gspo] audit.drift=[0,4,16] audit.routing=[free]",
        audits=True,
        losses={
            "grpo-paper": f"algorithm=grpo {_PAPER}",
            **{
                f"{name}-{label}": f"algorithm={name} algorithm.loss.clip_low={end} algorithm.loss.clip_high={end}"
                for name in ("grpo", "gspo")
                for label, end in _BANDS.items()
            },
        },
    ),
    Experiment(
        "audit_noise",
        "stale",
        "noise on the sampler's routers × replay",
        f"{_NEUTRAL} engine.strength=0.0,1.0 seed=range(300,303)",
        # Strengths are multiples of the spread of a token's logits; r3: the noisy sampler's own routes.
        f"{_GENTLE} engine=router_noise engine.relative=true audit.algorithms=[grpo,gspo,grpo_unclipped] "
        "audit.drift=[0,16] audit.routing=[free,r2,r3]",
        audits=True,
    ),
    Experiment(
        "clip_atlas",
        "clip_atlas",
        "clipped shares over band, length and staleness",
        f"{_NEUTRAL} task.min_operands=11,51,101 seed=range(300,303)",
        audits=True,
    ),
    Experiment(
        "clip_atlas_fp8",
        "clip_atlas",
        "the same behind a sampler in fp8",
        "engine=fp8 task.min_operands=51",
        audits=True,
    ),
)
# Two positive controls, and the frontier of *stale*: figures 14 to 16, on seeds that no claim uses.
_CONTROLS = (
    Experiment(
        "attribution",
        "stale",
        "positive control of the attribution: routing's share from nothing, with two experts, to most of the log-ratio",
        "algorithm=grpo model.config.num_experts=2,4,8,32 seed=range(220,223)",  # two of them are active
        "total_updates=64 evaluation.every_updates=64 evaluation.prompts=64 probe.every_updates=16 "
        "probe.fraction=0.25 "  # few tokens change their route, and all of the difference is theirs
        "optimizer.learning_rate=5e-5",  # routing's share grows as updates shrink; chosen on seed 225
    ),
    Experiment(
        "dose",
        "mismatch_noise",
        "positive control of replay: noise on the sampler's routers against GRPO without and with R3",
        "algorithm=grpo routing=off,r3 engine.strength=0.0,0.5,1.0 seed=range(220,223)",
        "total_updates=240",
    ),
    Experiment(
        "frontier_stale",
        "stale",
        "where training learns around *stale*, over learning rate and staleness, with twins on policy and dense",
        "algorithm=grpo_unclipped,grpo,gspo updates_per_rollout=4,16,32 "
        "optimizer.learning_rate=2e-4,4e-4,8e-4,1.6e-3 seed=range(210,213)",
        _REWARDS,
        also=(
            f"{_NEUTRAL} updates_per_rollout=1",
            f"{_NEUTRAL} updates_per_rollout=16 {_DENSE}",
        ),
    ),
)
# Experiments by the name of their part, which `steadymoe study run` takes too.
PARTS = {"reference": _REFERENCE, "gates": _GATES, "audits": _AUDITS, "controls": _CONTROLS}
TABLE = {each.name: each for part in PARTS.values() for each in part}
# Their arms stand next to arms of other experiments on the pages, so reports have no figures of them alone.
COMPARED_ELSEWHERE = {each.recorded_as for part in (_REFERENCE, _GATES) for each in part}
COMPARED_ELSEWHERE -= {"study", "study_bands", "study_arithmetic", "first_testbed"}


def register() -> None:
    """Let Hydra compose the table's experiments in this process."""
    for each in TABLE.values():
        if each.base != each.name:
            compose.add_experiment(each.name, each.node, ("steadymoe", "study", "run", each.name))


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments that names of experiments or parts mean, all without names. Raises ConfigError."""
    known = {name: (each,) for name, each in TABLE.items()} | PARTS
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no experiment {name!r} in the study; see: steadymoe study list")
    return [each for name in names or PARTS for each in known[name]]


def arm(label: str, experiment: str, algorithm: str, overrides: str = "") -> Arm:
    """Return the arm of an experiment with this algorithm and these of its overrides; of several, the plainest.

    Raises LookupError where the experiment has no such arm.
    """
    row, asked = TABLE[experiment], {"algorithm": algorithm, **_single(overrides)}
    found = sorted((point for point in row.points() if asked.items() <= point.items()), key=len)
    if not found or (len(found) > 1 and len(found[0]) == len(found[1])):
        raise LookupError(f"{label}: {len(found)} arms of {experiment} have {asked}")
    return Arm(label, row.recorded_as, algorithm, row.axes(found[0]))


@cache
def _named(config: Path) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return what a named config sets, with its bases: dotted key → value, and config group → name."""
    row = TABLE.get(config.name) if config.parent.name == "experiment" else None
    if row is not None and row.base != row.name:
        node = row.node
    else:
        node = OmegaConf.to_container(OmegaConf.load(CONF / f"{config}.yaml"), resolve=False)  # type: ignore[assignment]
    values: dict[str, Any] = {}
    groups: dict[str, str | None] = {}
    for default in node.pop("defaults", ()):
        if isinstance(default, dict):
            groups |= {key.removeprefix("override /"): name for key, name in default.items() if "hydra/" not in key}
        elif default != "_self_":
            inherited, theirs = _named(config.parent / default)
            values, groups = values | inherited, groups | theirs
    node.pop("hydra", None)
    return values | flatten(node), groups

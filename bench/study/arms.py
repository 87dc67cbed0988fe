"""The arms and audited losses of the reference study by name, from the rows of ``experiments``."""

from collections.abc import Mapping

from steadymoe.bench.score.arms import (
    AUDITED,
    FROZEN,
    GRPO,
    GSPO,
    GSPO_R2,
    NARROW,
    OTHERS,
    PAPERS,
    PAPERS_R2,
    REINFORCE,
    UNCLIPPED,
    WIDE,
)
from steadymoe.bench.score.recorded import Arm
from steadymoe.bench.study.experiments import CONSTANTS, TABLE, arm

_RATE, _UPDATES = "optimizer.learning_rate", "updates_per_rollout"

# --- the setting *stale*: mean reward decides -----------------------------------------------------------------------

# On the gates' seeds: it learns, so what the stale arms lose is lost to staleness.
ON_POLICY = arm("GRPO unclipped, on policy", "gates_twin", "grpo_unclipped")
DENSE = {name: arm(f"{name.upper()}, dense", "study_twin", name) for name in ("grpo", "gspo")}
SHIFT = {name: arm(f"{name.upper()} + shift", "study_shift", f"rspo_{name}") for name in ("grpo", "gspo")}
FREEZE = arm("GRPO 0.2/0.27, frozen routers", "study_router", "grpo")
BALANCED = arm("GRPO 0.2/0.27, balanced", "study_router", "grpo", "routing=off")
# Updates a rollout → algorithm → arm; 16 are the study's own.
STALENESS = {
    updates: {
        name: arm(f"{name.upper()}, {updates} updates", "study_staleness", name, f"{_UPDATES}={updates}")
        for name in ("grpo", "gspo", *OTHERS)
    }
    for updates in TABLE["study_staleness"].values(_UPDATES)
}
# The first edition's setting, whose mini-batches are so small that it also falls on policy (docs/calibration.md). On
# policy REINFORCE is GRPO without a clip.
FIRST_TESTBED = (
    arm("GRPO unclipped, on policy", "first_testbed", "grpo_unclipped", f"{_UPDATES}=1"),
    arm("GRPO unclipped", "first_testbed", "grpo_unclipped", f"{_UPDATES}=16"),
    arm("REINFORCE", "first_testbed", "reinforce", f"{_UPDATES}=16"),
)

# --- tuning: no claim uses its seeds --------------------------------------------------------------------------------

RATES: tuple[float, ...] = TABLE["study_tuning"].values(_RATE)
# Algorithm → rate and band → arm; the first band is the algorithm's own.
TUNED: Mapping[str, Mapping[tuple[float, str], Arm]] = {
    name: {
        (rate, band): arm(f"{name.upper()} {band}, lr {rate:g}", "study_tuning", name, f"{_RATE}={rate} {overrides}")
        for rate in RATES
        for band, overrides in bands.items()
    }
    for name, bands in (
        ("grpo", {"0.2/0.2": "", "3e-4/4e-4": CONSTANTS["gspo_band"]}),
        ("gspo", {"3e-4/4e-4": "", "0.2/0.27": CONSTANTS["grpo_band"]}),
    )
}
# With ten seeds. The last one was added after the protocol: the tuning put it 0.003 behind the setting it chose.
BEST = {
    "grpo": arm("GRPO 0.2/0.2, lr 2e-4", "study_best", "grpo"),
    "gspo": arm("GSPO 0.2/0.27, lr 4e-4", "study_best", "gspo", CONSTANTS["grpo_band"]),
    "gspo, own band": arm("GSPO 3e-4/4e-4, lr 4e-4", "study_best", "gspo"),
}

# --- dose and response: claims 4 and 12 -----------------------------------------------------------------------------

_LAYERS, _EXPERTS = "model.config.num_hidden_layers", "model.config.num_experts"
_FLAT = arm("flat", "study_routes", "grpo", f"{_LAYERS}=4 {_EXPERTS}=32")
# Dial → value → arm, one dial at a time around the model flat.
DIALS: Mapping[str, Mapping[float, Arm]] = {
    "layers": {n: arm(f"{n} layers", "study_routes", "grpo", f"{_LAYERS}={n}") if n != 4 else _FLAT for n in (2, 4, 8)},
    "experts": {
        n: arm(f"{n} experts", "study_routes", "grpo", f"{_EXPERTS}={n}") if n != 32 else _FLAT for n in (8, 32, 128)
    },
    "margin": {0.02: _FLAT, 1: arm("trained margins", "study_routes", "grpo", "cold_start.router_factor=1.0")},
}
# The same with a sampler in bf16: what arithmetic alone changes. Added after the protocol, part of no verdict.
BF16 = {
    layers: arm(f"{dialled.label}, bf16 sampler", "study_arithmetic", "grpo", f"{_LAYERS}={layers}")
    for layers, dialled in DIALS["layers"].items()
}
DIALLED = {dialled.label: dialled for values in DIALS.values() for dialled in values.values()}

# --- the setting *mismatch*: held-out accuracy decides --------------------------------------------------------------

_ANCHORS = {"old": "old policy", "rollout": "sampler"}
ANCHORED = {
    (name, anchor): arm(
        f"{name.upper()}, anchor at the {place}", "study_mismatch", name, f"algorithm.loss.anchor={anchor}"
    )
    for name in ("dppo", "gspo")
    for anchor, place in _ANCHORS.items()
}
NOISY = arm("GRPO, noisy sampler", "study_correction", "grpo", "correction=none")
TIS = arm("GRPO + TIS, noisy sampler", "study_correction", "grpo", "correction=tis")
EXACT = arm("GRPO, exact sampler", "study_correction", "grpo", "engine.strength=0.0")
MINIRL = {
    (routing, updates): arm(
        f"MiniRL {routing}, {updates} updates", "study_minirl", "minirl", f"routing={routing} {_UPDATES}={updates}"
    )
    for routing in ("off", "r2", "r3")
    for updates in (4, 16)
}

# --- the frontier of *stale*: contrasts 2 and 4 ---------------------------------------------------------------------

# The learning rates at which the on-policy control learns; at 1.6e-3 it falls.
FRONTIER_RATES: tuple[float, ...] = TABLE["frontier_stale"].values(_RATE)[:-1]
# Algorithm, learning rate and updates a rollout → arm, three seeds and 192 updates each.
FRONTIER = {
    (name, rate, updates): arm(
        f"{name}, lr {rate:g}, {updates} updates", "frontier_stale", name, f"{_RATE}={rate} {_UPDATES}={updates}"
    )
    for name in ("grpo", "gspo", "grpo_unclipped")
    for rate in FRONTIER_RATES
    for updates in TABLE["frontier_stale"].values(_UPDATES)
}

# --- the setting *long*: held-out accuracy at the end decides -------------------------------------------------------

_ROUTERS = {
    "fast routers": "optimizer.router_factor=1.0",
    "slow routers": "optimizer.router_factor=0.1",
    "frozen routers": "routing=freeze",
    "dense": "model=dense_flat",
}
# Loss and routers → arm, eight updates a rollout; and routers → arm on policy, where all losses are one.
LONG = {
    (name, mode): arm(f"long, {loss}, {mode}", "routers", name, overrides)
    for name, loss in (("grpo_unclipped", "unclipped"), ("gspo", "GSPO"))
    for mode, overrides in _ROUTERS.items()
}
LONG_ON_POLICY = {
    mode: arm(f"long, on policy, {mode}", "routers", "grpo_unclipped", f"{_UPDATES}=1 {overrides}")
    for mode, overrides in _ROUTERS.items()
    if mode != "frozen routers"
}

LONG_BEST = {
    name: arm(f"long, {name.upper()}, tuned", "long_best", name) for name in ("grpo", "gspo", *OTHERS, "reinforce")
}
# Learning rate and routing → arm.
LONG_REPLAY = {
    (rate, routing): arm(f"long, GRPO, lr {rate:g}{replay}", "long_replay", "grpo", f"routing={routing} {_RATE}={rate}")
    for rate in TABLE["long_replay"].values(_RATE)
    for routing, replay in (("off", ""), ("r2", " + R2"))
}
# At *stale*.
SLOW = {
    name: arm(f"{loss}, slow routers", "study_slow", name)
    for name, loss in (("grpo_unclipped", "GRPO unclipped"), ("grpo", "GRPO"), ("gspo", "GSPO"))
}

# --- samplers that differ from the trainer: held-out accuracy decides -------------------------------------------------

TRUNCATED = {
    (name, top_p, mask): arm(
        f"{name.upper()}, top-p {top_p:g}{', mask replay' if mask else ''}",
        "truncation",
        name,
        f"engine.top_p={top_p} engine.replay_mask={str(mask).lower()}",
    )
    for name in ("grpo", "gspo")
    for top_p in TABLE["truncation"].values("engine.top_p")
    for mask in (False, True)
}
GATES = {
    routing: arm(f"GRPO, noisy sampler, {label}", "gates", "grpo", f"routing={routing}")
    for routing, label in (("off", "free routes"), ("r3", "R3"), ("r3_gates", "R3 with gates"))
}
# Loss → its algorithm and overrides in `centering`.
_WEIGHTED = {
    **{"REINFORCE": ("reinforce", ""), "SC": ("score_centering", ""), "TIS + SC": ("score_centering_tis", "")},
    **{
        "TIS": ("cispo", f"{CONSTANTS['tis']} {_RATE}=1e-4"),
        "MIS": ("dis", CONSTANTS["mis"]),
        "IcePop": ("icepop", ""),
    },
    **{"DIS": ("dis", ""), "IPO": ("ipo", ""), "FlashREINFORCE": ("flash_reinforce", ""), "GRPO": ("grpo", "")},
}
# Loss, noise on the sampler's weights and updates a rollout → arm.
CENTERING = {
    (loss, strength, updates): arm(
        f"long, {loss}, noise {strength:g}" + ("" if updates == 8 else ", 1 update"),
        "centering",
        name,
        f"{overrides} engine.strength={strength} {_UPDATES}={updates}",
    )
    for loss, (name, overrides) in _WEIGHTED.items()
    for strength in TABLE["centering"].values("engine.strength")
    for updates in TABLE["centering"].values(_UPDATES)
}
TIS_AT_SC = arm(
    "long, TIS, lr 2e-4, noise 0.2", "centering", "cispo", f"{CONSTANTS['tis']} {_RATE}=2e-4 engine.strength=0.2"
)
# Noise → arm with one rollout and all columns.
DISTANCE = {
    strength: arm(f"noise {strength:g}", "centering_distance", "reinforce", f"engine.strength={strength}")
    for strength in TABLE["centering_distance"].values("engine.strength")
}

# --- all by label ---------------------------------------------------------------------------------------------------

ARMS = {
    each.label: each
    for each in (
        *(GRPO, GSPO, *OTHERS.values(), UNCLIPPED, REINFORCE, FROZEN, PAPERS, PAPERS_R2, GSPO_R2, WIDE, NARROW),
        *(ON_POLICY, *DENSE.values(), *SHIFT.values(), FREEZE, BALANCED, *BEST.values(), *DIALLED.values()),
        *(*ANCHORED.values(), NOISY, TIS, EXACT, *MINIRL.values(), *BF16.values(), *FRONTIER.values()),
        *(*LONG.values(), *LONG_ON_POLICY.values(), *LONG_BEST.values(), *LONG_REPLAY.values(), *SLOW.values()),
        *(*TRUNCATED.values(), *GATES.values(), *CENTERING.values(), TIS_AT_SC, *DISTANCE.values()),
        *(stale for by_name in STALENESS.values() for stale in by_name.values()),
    )
}
# Every arm at *stale* with a learning rate of its own above 0, whose runs may collapse.
MAY_COLLAPSE = (GRPO, GSPO, *OTHERS.values(), UNCLIPPED, REINFORCE, PAPERS, PAPERS_R2, GSPO_R2, WIDE, NARROW)
# Losses of the audits, which have the labels of the arms.
LOSSES = {loss.label: loss for loss in AUDITED.values()}
LOSSES |= {
    loss.label: loss
    for paper in (LOSSES["GSPO"], LOSSES["GRPO 0.2/0.27"])
    for loss in (paper.replayed(), paper._replace(label=f"{paper.label}, dense", experiment="study_audit_twin"))
}

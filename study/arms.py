"""The arms and audited losses of the reference study by name, from the rows of ``experiments``."""

from collections.abc import Mapping

from study import experiments
from study.experiments import CONSTANTS, TABLE
from study.recorded import Arm, Audited

# Updates between the old policy and the audited weights (study/protocol.md).
DRIFT = 16

# The bands of GRPO and of GSPO in GSPO's paper: 2507.18071, section 5.1.
_GRPOS: dict[str, object] = {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.27}
_GSPOS: dict[str, object] = {"algorithm.loss.clip_low": 3e-4, "algorithm.loss.clip_high": 4e-4}
# conf/algorithm/grpo.yaml already has the paper's lower side.
_PAPERS: dict[str, object] = {"algorithm.loss.clip_high": 0.27}
_R2: dict[str, object] = {"routing": "r2"}

GRPO, GSPO = Arm("GRPO", "study", "grpo"), Arm("GSPO", "study", "gspo")
OTHERS = {name: Arm(name.upper(), "study", name) for name in ("vespo", "cispo", "sapo")}
UNCLIPPED, REINFORCE = Arm("GRPO unclipped", "study", "grpo_unclipped"), Arm("REINFORCE", "study", "reinforce")
# The policy stays at the cold start.
FROZEN = Arm("frozen", "study_frozen", "grpo", {"optimizer.learning_rate": 0.0})
CONTROLS = (FROZEN, UNCLIPPED, REINFORCE)
PAPERS = Arm("GRPO 0.2/0.27", "study_paper", "grpo", _PAPERS)
PAPERS_R2 = Arm("GRPO 0.2/0.27 + R2", "study_paper", "grpo", _PAPERS | _R2)
GSPO_R2 = Arm("GSPO + R2", "study_replay", "gspo", _R2)
WIDE = Arm("GSPO 0.2/0.27", "study_bands", "gspo", _GRPOS)
NARROW = Arm("GRPO 3e-4/4e-4", "study_bands", "grpo", _GSPOS)

# By the labels of the experiment study_audit.
AUDITED = {
    label: Audited(shown, "study_audit", label)
    for label, shown in (
        ("gspo", "GSPO"),
        ("grpo-paper", "GRPO 0.2/0.27"),
        ("gspo-grpo_band", "GSPO 0.2/0.27"),
        ("grpo-gspo_band", "GRPO 3e-4/4e-4"),
        ("vespo", "VESPO"),
        ("cispo", "CISPO"),
        ("sapo", "SAPO"),
    )
}

_RATE, _UPDATES = "optimizer.learning_rate", "updates_per_rollout"
# The arms of claims and contrasts by their label in claims.yaml.
ARMS = {arm.label: arm for arm in (GRPO, GSPO, *OTHERS.values(), UNCLIPPED, REINFORCE, FROZEN)}
ARMS |= {arm.label: arm for arm in (PAPERS, PAPERS_R2, GSPO_R2, WIDE, NARROW)}


def arm(label: str, experiment: str, algorithm: str, overrides: str = "") -> Arm:
    """Return an arm of the table of experiments (``experiments.arm``) that claims can name by its label."""
    if label in ARMS:
        raise ValueError(f"two arms have the label {label!r}")
    return ARMS.setdefault(label, experiments.arm(label, experiment, algorithm, overrides))


# --- the setting *stale*: mean reward decides -----------------------------------------------------------------------

# On the gates' seeds: it learns, so what the stale arms lose is lost to staleness.
ON_POLICY = arm("GRPO unclipped, on policy", "gates_twin", "grpo_unclipped")
DENSE = {name: arm(f"{name.upper()}, dense", "study_twin", name) for name in ("grpo", "gspo")}
SHIFT = {name: arm(f"{name.upper()} + shift", "study_shift", f"rspo_{name}") for name in ("grpo", "gspo")}
FREEZE = arm("GRPO 0.2/0.27, frozen routers", "study_router", "grpo")
BALANCED = arm("GRPO 0.2/0.27, balanced", "study_router", "grpo", "routing=off")
for _updates in TABLE["study_staleness"].values(_UPDATES):  # 16 are the study's own
    for _name in ("grpo", "gspo", *OTHERS):
        arm(f"{_name.upper()}, {_updates} updates", "study_staleness", _name, f"{_UPDATES}={_updates}")
# The first edition's setting, whose mini-batches are so small that it also falls on policy (study/calibration.md). On
# policy REINFORCE is GRPO without a clip.
FIRST_TESTBED = (
    experiments.arm("GRPO unclipped, on policy", "first_testbed", "grpo_unclipped", f"{_UPDATES}=1"),
    experiments.arm("GRPO unclipped", "first_testbed", "grpo_unclipped", f"{_UPDATES}=16"),
    experiments.arm("REINFORCE", "first_testbed", "reinforce", f"{_UPDATES}=16"),
)

# --- tuning: no claim uses its seeds --------------------------------------------------------------------------------

RATES: tuple[float, ...] = TABLE["study_tuning"].values(_RATE)
# Algorithm → rate and band → arm; the first band is the algorithm's own.
TUNED: Mapping[str, Mapping[tuple[float, str], Arm]] = {
    name: {
        (rate, band): experiments.arm(f"{name} {band}, {rate:g}", "study_tuning", name, f"{_RATE}={rate} {overrides}")
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

# Twelve losses as stale_tuning found best: GSPO at half the rate of study_best.
STALE_BEST = {
    name: arm(f"stale, {label}, tuned", "stale_best", name)
    for label, name in (
        *((name.upper(), name) for name in ("grpo", "gspo", "vespo", "cispo", "sapo", "reinforce")),
        *((name.upper(), name) for name in ("m2po", "topr", "dppo", "gmpo")),
        *(("MiniRL", "minirl"), ("RSPO on GSPO", "rspo_gspo")),
    )
}
arm("stale, GSPO, lr 4e-4", "stale_best", "gspo", f"{_RATE}=4e-4")  # as BEST, with the cold starts of STALE_BEST
for _routing, _replay, _rate in (("r2", " + R2", "2e-4"), ("r2", " + R2", "3e-4"), ("off", "", "3e-4")):
    # Without R2 at 2e-4 it is STALE_BEST.
    arm(f"stale, GRPO{_replay}, lr {_rate}", "stale_replay", "grpo", f"routing={_routing} {_RATE}={_rate}")

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

for _name in ("dppo", "gspo"):
    for _anchor, _place in (("old", "old policy"), ("rollout", "sampler")):
        arm(f"{_name.upper()}, anchor at the {_place}", "study_mismatch", _name, f"algorithm.loss.anchor={_anchor}")
arm("GRPO, noisy sampler", "study_correction", "grpo", "correction=none")
arm("GRPO + TIS, noisy sampler", "study_correction", "grpo", "correction=tis")
EXACT = arm("GRPO, exact sampler", "study_correction", "grpo", "engine.strength=0.0")
for _routing in ("off", "r2", "r3"):
    for _updates in (4, 16):
        _overrides = f"routing={_routing} {_UPDATES}={_updates}"
        arm(f"MiniRL {_routing}, {_updates} updates", "study_minirl", "minirl", _overrides)

# --- the frontier of *stale*: contrasts 2 and 4 ---------------------------------------------------------------------

# Algorithm, learning rate and updates a rollout → arm, three seeds and 192 updates each. At the last rate, 1.6e-3, even
# the on-policy control falls.
FRONTIER = {
    (name, rate, updates): arm(
        f"{name}, lr {rate:g}, {updates} updates", "frontier_stale", name, f"{_RATE}={rate} {_UPDATES}={updates}"
    )
    for name in ("grpo", "gspo", "grpo_unclipped")
    for rate in TABLE["frontier_stale"].values(_RATE)[:-1]
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
# The same on the second task, without a clip.
for _mode, _overrides in _ROUTERS.items():
    arm(f"selection, {_mode}", "routers_selection", "grpo_unclipped", _overrides)

LONG_BEST = {
    name: arm(f"long, {name.upper()}, tuned", "long_best", name) for name in ("grpo", "gspo", *OTHERS, "reinforce")
}
SELECTION_BEST = {
    name: arm(f"selection, {name.upper()}, tuned", "selection_best", name)
    for name in TABLE["selection_best"].values("algorithm")
}
for _rate in TABLE["long_replay"].values(_RATE):
    for _routing, _replay in (("off", ""), ("r2", " + R2")):
        arm(f"long, GRPO, lr {_rate:g}{_replay}", "long_replay", "grpo", f"routing={_routing} {_RATE}={_rate}")
for _name, _loss in (("grpo_unclipped", "GRPO unclipped"), ("grpo", "GRPO"), ("gspo", "GSPO")):
    arm(f"{_loss}, slow routers", "study_slow", _name)  # at *stale*
# The settings *longer* and *slow*: the gates' arms. The first sweep of *longer* names its updates, stale or on policy.
LONGER, SLOW = (
    {
        "grpo_unclipped": arm(f"{setting}, unclipped", f"gates_{setting}", "grpo_unclipped", stale),
        "on policy": arm(f"{setting}, on policy", f"gates_{setting}", "grpo_unclipped", f"{_UPDATES}=1"),
        "dense": arm(f"{setting}, unclipped, dense", f"gates_{setting}", "grpo_unclipped", "model=dense_flat"),
        "grpo": arm(f"{setting}, GRPO", f"gates_{setting}", "grpo"),
        "gspo": arm(f"{setting}, GSPO", f"gates_{setting}", "gspo"),
    }
    for setting, stale in (("longer", f"{_UPDATES}=8"), ("slow", ""))
)

# --- samplers that differ from the trainer: held-out accuracy decides -------------------------------------------------

for _name in ("grpo", "gspo"):
    for _top_p in TABLE["truncation"].values("engine.top_p"):
        for _mask, _replay in (("false", ""), ("true", ", mask replay")):
            _overrides = f"engine.top_p={_top_p} engine.replay_mask={_mask}"
            arm(f"{_name.upper()}, top-p {_top_p:g}{_replay}", "truncation", _name, _overrides)
for _routing, _label in (("off", "free routes"), ("r3", "R3"), ("r3_gates", "R3 with gates")):
    arm(f"GRPO, noisy sampler, {_label}", "gates", "grpo", f"routing={_routing}")
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
for _strength in TABLE["centering"].values("engine.strength"):
    _dials = f"{CONSTANTS['tis']} {_RATE}=2e-4 engine.strength={_strength}"
    arm(f"long, TIS, lr 2e-4, noise {_strength:g}", "centering", "cispo", _dials)
# Noise → arm with one rollout and all columns.
DISTANCE = {
    strength: arm(f"noise {strength:g}", "centering_distance", "reinforce", f"engine.strength={strength}")
    for strength in TABLE["centering_distance"].values("engine.strength")
}

# --- groups ----------------------------------------------------------------------------------------------------------

_CLIPPED = (GRPO, PAPERS, PAPERS_R2, NARROW, GSPO, GSPO_R2, WIDE, *OTHERS.values())
_MENDED = (*SHIFT.values(), FREEZE, BALANCED)
# Arms of the study at *stale*: all but the frozen one, and those of the early warning.
AT_STALE = (*_CLIPPED, *_MENDED, UNCLIPPED, REINFORCE, *DENSE.values())
MAY_COLLAPSE = (*_CLIPPED, UNCLIPPED, REINFORCE)
# Losses of the audits, which have the labels of the arms.
LOSSES = {loss.label: loss for loss in AUDITED.values()}
LOSSES |= {
    loss.label: loss
    for paper in (LOSSES["GSPO"], LOSSES["GRPO 0.2/0.27"])
    for loss in (paper.replayed(), paper._replace(label=f"{paper.label}, dense", experiment="study_audit_twin"))
}

"""The arms of the reference study: the runs of ``conf/experiment/study*.yaml`` by name, and their limits."""

from steadymoe.bench.claims.study import Arm


def _rate(number: float) -> dict[str, object]:
    return {"optimizer.learning_rate": number}


# The limits that all claims share, and the limits that the claims about a sampler with router noise share.
SMALL = "0.45 M parameters, responses of 4 to 10 tokens, 40 steps, one task"
NOISE = "one strength of router noise, at a third of the study's learning rate, without a control of its own"
STUDYS_RATE = 6e-4  # conf/experiment/study.yaml
# The bands of both papers: conf/algorithm/grpo.yaml and gspo.yaml.
_GRPOS = {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.2}
_GSPOS = {"algorithm.loss.clip_low": 3e-4, "algorithm.loss.clip_high": 4e-4}
_NOISY, _SHOWN = {"engine": "router_noise"}, {"grpo": "GRPO", "gspo": "GSPO", "grpo_unclipped": "GRPO unclipped"}

GRPO, GSPO = Arm("GRPO", "study", "grpo"), Arm("GSPO", "study", "gspo")
UNCLIPPED = Arm("GRPO unclipped", "study", "grpo_unclipped")
# The policy stays at the cold start: GRPO at a learning rate of 0, with an exact sampler.
FROZEN = Arm("frozen", "study_frozen", "grpo", _rate(0.0))
CONTROLS = (UNCLIPPED, Arm("REINFORCE", "study", "reinforce"), FROZEN)
OTHERS = {name: Arm(name.upper(), "study", name) for name in ("cispo", "sapo", "vespo")}
CONTENDERS = (GRPO, GSPO, *OTHERS.values())
WIDE = Arm("GSPO, band 0.2", "study_bands", "gspo", _GRPOS)
NARROW = Arm("GRPO, band 3e-4", "study_bands", "grpo", _GSPOS)
SLOW = {name: Arm(f"{_SHOWN[name]}, lr 2e-4", "study_rates", name, _rate(2e-4)) for name in ("grpo", "gspo")}
DENSE = {name: Arm(f"{shown}, dense", "study_twin", name) for name, shown in _SHOWN.items()}
R2 = {name: Arm(f"{_SHOWN[name]} + R2", "study_replay", name, {"routing": "r2"}) for name in ("grpo", "gspo")}
SHIFT = {name: Arm(f"{_SHOWN[name]} + shift", "study_shift", f"rspo_{name}") for name in ("grpo", "gspo")}
MINIRL = {
    (routing, updates): Arm(
        f"MiniRL {routing}, {updates} updates",
        "study_minirl",
        "minirl",
        {"engine": "fp8"}
        | ({} if routing == "off" else {"routing": routing})
        | ({} if updates == 16 else {"updates_per_rollout": updates}),
    )
    for routing in ("off", "r2", "r3")
    for updates in (4, 16)
}
# Each algorithm has one anchor by default: conf/algorithm/dppo.yaml and gspo.yaml.
ANCHORED = {
    (name, anchor): Arm(
        f"{name.upper()}, anchor {anchor}",
        "study_mismatch",
        name,
        _NOISY | ({} if anchor == own else {"algorithm.loss.anchor": anchor}),
    )
    for name, own in (("dppo", "rollout"), ("gspo", "old"))
    for anchor in ("old", "rollout")
}
TIS = {
    "without": Arm("GRPO", "study_correction", "grpo", _NOISY),
    "with": Arm("GRPO + TIS", "study_correction", "grpo", {"correction": "tis"} | _NOISY),
}
DEPTH = {
    layers: Arm(f"{layers} layers", "study_depth", "grpo", {"model.config.num_hidden_layers": layers})
    for layers in (2, 8)
}
# The settings over which the two algorithms of claim 1 are tuned (docs/protocol.md, "Tuning"). No claim uses the seeds
# of the tuning.
TUNED = {
    name: {
        (rate, band): Arm(
            f"{_SHOWN[name]}, band {band}, lr {rate:g}",
            "study_tuning",
            name,
            ({} if rate == STUDYS_RATE else _rate(rate)) | ({} if band == own else other),
        )
        for rate in (2e-4, STUDYS_RATE)
        for band in ("0.2", "3e-4")
    }
    for name, own, other in (("grpo", "0.2", _GSPOS), ("gspo", "3e-4", _GRPOS))
}

"""From a config of revision 75f16656 to the same config here: counts in gradient updates, other names."""

from typing import Any

from steadymoe.algorithms import complete
from steadymoe.bench.runs import compose, identity
from steadymoe.bench.schema import read


def convert(old: dict[str, Any]) -> dict[str, Any]:
    """Return the plain config here of a recorded config; its section ``audit`` and what left in neutral go."""
    new = {key: dict(value) if isinstance(value, dict) else value for key, value in old.items()}
    for key, value in {"compile": False, "start_from": None, "weight_noise": 0.0}.items():
        assert new.pop(key, value) == value, key
    assert new["probe"].pop("largest", 0) == 0
    new.pop("audit", None)
    per_rollout, rollout = new["updates_per_rollout"], new["rollout"]
    prompts, minibatch = rollout.pop("prompts"), rollout.pop("minibatch_prompts", None)
    new["minibatch_prompts"] = minibatch or prompts // per_rollout
    assert minibatch or prompts % per_rollout == 0
    steps, updates = new.pop("steps"), new.pop("total_updates", None)
    new["updates"] = updates or steps * per_rollout
    for group in ("evaluation", "probe"):
        every, given = new[group].pop("every"), new[group].pop("every_updates", None)
        new[group]["every"] = given or every * per_rollout
    for key in ("checkpoint_every", "checkpoint_keep"):
        if new.get(key) is not None:
            new[key] *= per_rollout
    if "savings" in new:
        new["savings"]["reuse_sampler_logprobs"] = new["savings"].pop("sampler_as_old", None)
    if new["routing"].get("replay") == "none":
        new["routing"]["replay"] = "off"
    return compose.plain(read(identity.of_classes(new, complete)))

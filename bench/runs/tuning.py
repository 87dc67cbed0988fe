"""``steadymoe run --tune``: a sweep of learning rates on tuning seeds, in place of a setting's own rate and seeds."""

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from steadymoe.bench.runs import compose
from steadymoe.bench.runs.overrides import key_of, settings, swept
from steadymoe.bench.schema import read, read_tuning
from steadymoe.bench.support.errors import ConfigError

RATE = "optimizer.learning_rate"
# What a tuning measures less of than its setting, unless the user chooses.
MEASURED = ("measure", "evaluation.permuted_routes")


def overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides of the tuning sweep that ``words`` ask for. Raises ConfigError.

    The section ``tuning`` of the config gives seeds and rates, the latter as factors of the setting's own rate. A sweep
    of rates in ``words`` replaces these rates; seed, experiment name and ``measure`` stay as ``words`` have them.
    """
    whole: Any = OmegaConf.to_container(settings(words))
    section, several = read_tuning(whole.get("tuning")), swept(words)
    config = read(compose.unchecked([word for word in words if word not in several])[0])
    given = {key_of(word): word for word in words}
    if given.get("optimizer") in several and given.get(RATE) not in several:
        raise ConfigError(
            f"--tune: optimizers may have rates of their own; tune one at a time, or list rates: {RATE}=1e-4,…"
        )
    tuned = {
        "seed": ",".join(map(str, section.seeds)),
        "experiment_name": f"{config.experiment_name}_tuning",
        "measure": "little",  # only the level is compared
    }
    if "measure" not in given:  # what a setting measures beside the level
        tuned |= {"evaluation.permuted_routes": "false"} if config.evaluation.permuted_routes else {}
    tuned = {key: value for key, value in tuned.items() if key not in given}
    if given.get(RATE) not in several:
        # 12 digits: no rounding error of a product names a folder.
        rates = [f"{factor * config.optimizer.learning_rate:.12g}" for factor in section.rate_factors]
        tuned[RATE] = ",".join(dict.fromkeys(rates))
    own = [word for word in words if not word.startswith("tuning.")]
    return own + [f"{key}={value}" for key, value in tuned.items()]


def check(runs: Sequence[compose.Run]) -> None:
    """Raise ConfigError unless ``runs`` have two or more learning rates, all above 0."""
    rates = sorted({run.config.optimizer.learning_rate for run in runs})
    if len(rates) < 2 or rates[0] == 0:
        raise ConfigError(f"--tune needs two or more learning rates above 0, got {RATE}={','.join(map(str, rates))}")

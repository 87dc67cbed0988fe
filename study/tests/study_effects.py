"""Effects of the reference study from its parquet files by pandas and numpy alone: means, differences, exact p.

    python study/tests/study_effects.py > study/tests/study_effects.csv

Nothing of steadymoe is imported, so that this is a second opinion on study/claims.md. study/tests/test_reference.py
runs it again, and compares it with its recorded output and with the table of claims.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
# Of 30 steps of 16 updates the last five only confirm a collapse: a patience of 96 updates counts its first step.
COUNTED = 25
# Name → experiment, algorithm, a word that the arm's axes hold, and a word that they do not hold.
ARMS = {
    "GRPO": ("study", "grpo", "", "none"),
    "GSPO": ("study", "gspo", "", "none"),
    "GRPO unclipped": ("study", "grpo_unclipped", "", "none"),
    "REINFORCE": ("study", "reinforce", "", "none"),
    "VESPO": ("study", "vespo", "", "none"),
    "CISPO": ("study", "cispo", "", "none"),
    "SAPO": ("study", "sapo", "", "none"),
    "frozen": ("study_frozen", "grpo", "", "none"),
    "GRPO 0.2/0.27": ("study_paper", "grpo", "", "r2"),
    "GRPO 0.2/0.27 + R2": ("study_paper", "grpo", "r2", "none"),
    "GSPO + R2": ("study_replay", "gspo", "r2", "none"),
    "GSPO 0.2/0.27": ("study_bands", "gspo", "", "none"),
    "GRPO 3e-4/4e-4": ("study_bands", "grpo", "", "none"),
    "GRPO, dense": ("study_twin", "grpo", "", "none"),
    "GSPO, dense": ("study_twin", "gspo", "", "none"),
    "GRPO + shift": ("study_shift", "rspo_grpo", "", "none"),
    "GSPO + shift": ("study_shift", "rspo_gspo", "", "none"),
    "GRPO 0.2/0.27, frozen routers": ("study_router", "grpo", "freeze", "none"),
    "GRPO 0.2/0.27, balanced": ("study_router", "grpo", "aux_loss", "none"),
    "DPPO, anchor at the sampler": ("study_mismatch", "dppo", "", "anchor=old"),
    "DPPO, anchor at the old policy": ("study_mismatch", "dppo", "anchor=old", "none"),
    "GSPO, anchor at the sampler": ("study_mismatch", "gspo", "anchor=rollout", "none"),
    "GSPO, anchor at the old policy": ("study_mismatch", "gspo", "", "anchor=rollout"),
    "GRPO, noisy sampler": ("study_correction", "grpo", "", "tis|strength"),
    "GRPO + TIS, noisy sampler": ("study_correction", "grpo", "tis", "none"),
    "MiniRL r2, 4 updates": ("study_minirl", "minirl", "r2", "updates"),
    "MiniRL r3, 4 updates": ("study_minirl", "minirl", "r3", "updates"),
    "MiniRL r2, 16 updates": ("study_minirl", "minirl", "r2.*updates|updates.*r2", "none"),
    "MiniRL r3, 16 updates": ("study_minirl", "minirl", "r3.*updates|updates.*r3", "none"),
}
ARMS |= {
    "stale, GRPO, lr 3e-4": ("stale_replay", "grpo", "learning_rate=0.0003", "r2"),
    "stale, GRPO + R2, lr 2e-4": ("stale_replay", "grpo", "learning_rate=0.0002.*r2", "none"),
    "stale, GRPO + R2, lr 3e-4": ("stale_replay", "grpo", "learning_rate=0.0003.*r2", "none"),
    "stale, GSPO, lr 4e-4": ("stale_best", "gspo", "0.0004", "none"),
}
ARMS |= {
    f"stale, {name.upper()}, tuned": ("stale_best", name, "", "0.0004")
    for name in ("grpo", "gspo", "vespo", "cispo", "sapo")
}
# At *long*; a dense model has settings of the cold start in its axes.
ARMS |= {
    f"long, {loss}, {routers}": ("routers", algorithm, there + staleness, absent)
    for loss, algorithm, staleness in (
        ("unclipped", "grpo_unclipped", ""),
        ("GSPO", "gspo", ""),
        ("on policy", "grpo_unclipped", "updates_per_rollout=1"),
    )
    for routers, there, absent in (
        ("fast routers", "router_factor=1.0.*", "freeze|cold_start" + ("|updates" if not staleness else "")),
        ("slow routers", "", "router_factor" + ("|updates" if not staleness else "")),
        ("frozen routers", "freeze", "none"),
    )
}
ARMS |= {
    f"long, {name.upper()}, tuned": ("long_best", name, "", "none")
    for name in ("gspo", "grpo", "cispo", "sapo", "vespo", "reinforce")
}
ARMS |= {
    f"long, GRPO, lr {rate}{' + R2' if there else ''}": ("long_replay", "grpo", there + at, absent)
    for rate, at, not_at in (("0.0002", "", "learning_rate"), ("0.0004", "learning_rate=0.0004", "none"))
    for there, absent in (("", f"r2|{not_at}"), ("(?=.*r2)", not_at))
}
ARMS |= {
    f"{name.upper()}, top-p 0.8{', mask replay' if mask else ''}": (
        *("truncation", name),
        *(("replay_mask=True", "top_p=0.95") if mask else ("", "replay_mask=True|top_p=0.95")),
    )
    for name in ("grpo", "gspo")
    for mask in (False, True)
}
ARMS |= {
    "GRPO, noisy sampler, R3": ("gates", "grpo", "r3", "r3_gates"),
    "GRPO, noisy sampler, R3 with gates": ("gates", "grpo", "r3_gates", "none"),
}
ARMS |= {
    f"long, {loss}, noise 0.2": ("centering", algorithm, f"strength=0.2{rate}", r"updates_per_rollout=1\b")
    for loss, algorithm, rate in (
        *(("SC", "score_centering", ""), ("REINFORCE", "reinforce", "")),
        ("TIS", "cispo", ".*learning_rate=0.0001"),
    )
}
ARMS |= {f"longer, {name.upper()}": ("gates_longer", name, "", "none") for name in ("grpo", "gspo")}
RUNS = [
    ("GSPO", "GRPO 0.2/0.27"),
    ("GSPO", "GRPO 0.2/0.27 + R2"),
    ("GSPO 0.2/0.27", "GRPO 0.2/0.27"),
    ("GSPO", "GRPO 3e-4/4e-4"),
    ("GSPO", "GSPO 0.2/0.27"),
    ("GRPO 3e-4/4e-4", "GRPO 0.2/0.27"),
    ("GRPO 0.2/0.27 + R2", "GRPO 0.2/0.27"),
    ("GSPO + R2", "GSPO"),
    ("VESPO", "CISPO"),
    ("VESPO", "SAPO"),
    ("VESPO", "GSPO"),
    ("GSPO", "GRPO"),
    ("GRPO", "GRPO unclipped"),
    ("GSPO, dense", "GRPO, dense"),
    ("GRPO + shift", "GRPO"),
    ("GSPO + shift", "GSPO"),
    ("GRPO 0.2/0.27, frozen routers", "GRPO 0.2/0.27 + R2"),
    ("GRPO 0.2/0.27, balanced", "GRPO 0.2/0.27 + R2"),
    ("stale, GRPO + R2, lr 2e-4", "stale, GRPO, tuned"),
    ("stale, GRPO + R2, lr 3e-4", "stale, GRPO, lr 3e-4"),
]
ACCURACIES = [
    ("DPPO, anchor at the sampler", "DPPO, anchor at the old policy"),
    ("GSPO, anchor at the sampler", "GSPO, anchor at the old policy"),
    ("GRPO + TIS, noisy sampler", "GRPO, noisy sampler"),
    ("MiniRL r2, 4 updates", "MiniRL r3, 4 updates"),
    ("MiniRL r3, 16 updates", "MiniRL r2, 16 updates"),
    *((f"long, {loss}, fast routers", f"long, {loss}, slow routers") for loss in ("unclipped", "on policy", "GSPO")),
    *((f"long, {loss}, slow routers", f"long, {loss}, frozen routers") for loss in ("unclipped", "GSPO")),
    *((f"long, {loss}, tuned", "long, GRPO, tuned") for loss in ("GSPO", "VESPO", "CISPO", "SAPO", "REINFORCE")),
    *((f"long, GRPO, lr {rate} + R2", f"long, GRPO, lr {rate}") for rate in ("0.0002", "0.0004")),
    *((f"{name}, top-p 0.8, mask replay", f"{name}, top-p 0.8") for name in ("GRPO", "GSPO")),
    ("GRPO, noisy sampler, R3 with gates", "GRPO, noisy sampler, R3"),
    *((f"long, {loss}, noise 0.2", "long, TIS, noise 0.2") for loss in ("SC", "REINFORCE")),
    ("longer, GSPO", "longer, GRPO"),
    *(("stale, VESPO, tuned", f"stale, {loss}, tuned") for loss in ("CISPO", "SAPO")),
    ("stale, VESPO, tuned", "stale, GSPO, lr 4e-4"),
    ("stale, GSPO, tuned", "stale, GRPO, tuned"),
]
# Name → label of the loss in the audit, and routing.
LOSSES = {
    "GSPO": ("gspo", "free"),
    "GRPO 0.2/0.27": ("grpo-paper", "free"),
    "GSPO 0.2/0.27": ("gspo-grpo_band", "free"),
    "GRPO 3e-4/4e-4": ("grpo-gspo_band", "free"),
    "GSPO + R2": ("gspo", "r2"),
    "GRPO 0.2/0.27 + R2": ("grpo-paper", "r2"),
    "VESPO": ("vespo", "free"),
    "CISPO": ("cispo", "free"),
    "SAPO": ("sapo", "free"),
}
GRADIENTS = [
    ("GSPO", "GRPO 0.2/0.27"),
    ("GSPO 0.2/0.27", "GRPO 0.2/0.27"),
    ("GRPO 3e-4/4e-4", "GRPO 0.2/0.27"),
    ("GSPO", "GSPO 0.2/0.27"),
    ("GRPO 0.2/0.27 + R2", "GRPO 0.2/0.27"),
    ("GSPO + R2", "GSPO"),
    ("VESPO", "CISPO"),
    ("VESPO", "SAPO"),
    ("VESPO", "GSPO"),
]


def curves(name: str, metric: str) -> pd.DataFrame | None:
    """A metric of every run of an arm: seed, step, value; None if the arm has not run."""
    experiment, algorithm, there, absent = ARMS[name]
    path = REFERENCE / "data" / experiment / "steps.parquet"
    if not path.exists():
        return None
    steps = pd.read_parquet(path)
    runs = pd.read_parquet(path.with_name("runs.parquet"))
    axes = runs["axes"].astype(str)
    axes = axes.where(~axes.str.contains("~"), runs["command"])  # long names of axes end in a hash
    arms = runs[(runs["algorithm"] == algorithm) & axes.str.contains(there) & ~axes.str.contains(absent)]
    mine = steps[steps["arm"].isin(arms["arm"]) & (steps["metric"] == metric)]
    return mine[["seed", "step", "value"]] if len(mine) else None


def mean_rewards(name: str) -> pd.Series | None:
    """Mean reward over the steps that count, by seed; None if the arm has not run."""
    found = curves(name, "reward")
    return None if found is None else found[found["step"] <= COUNTED].groupby("seed")["value"].mean()


def accuracies(name: str) -> pd.Series | None:
    """The last evaluation, by seed; None if the arm has not run."""
    found = curves(name, "eval_accuracy")
    return None if found is None else found.loc[found.groupby("seed")["step"].idxmax()].set_index("seed")["value"]


def usefulness(name: str) -> pd.Series | None:
    """Usefulness after sixteen updates, by seed; None without audits."""
    path = REFERENCE / "audits" / "study_audit" / "audits.parquet"
    if not path.exists():
        return None
    loss, routing = LOSSES[name]
    rows = pd.read_parquet(path).query("quantity == 'usefulness' and block == 'whole' and cut == 'before' and k == 16")
    return rows[(rows["loss"] == loss) & (rows["routing"] == routing)].set_index("seed")["value"]


def p_of_sign_flips(differences: np.ndarray) -> float:
    """The share of all patterns of signs whose mean lies as far from 0 as the observed mean."""
    n = len(differences)
    sums = np.zeros(1)
    for size in np.abs(differences):
        sums = np.concatenate([sums - size, sums + size])
    return float((np.abs(sums) >= abs(differences.sum()) - 1e-12 * n).mean())


def main() -> None:
    """Print what, ours, theirs, n, mean, standard deviation and p against 0."""
    rows = []
    asked = (
        ("mean reward", RUNS, mean_rewards),
        ("held-out accuracy", ACCURACIES, accuracies),
        ("usefulness", GRADIENTS, usefulness),
    )
    for what, pairs, number in asked:
        for ours, theirs in pairs:
            found = number(ours), number(theirs)
            if found[0] is None or found[1] is None:
                continue
            apart = (found[0] - found[1]).dropna().to_numpy()
            rows.append((what, ours, theirs, len(apart), apart.mean(), apart.std(ddof=1), p_of_sign_flips(apart)))
    names = ["what", "ours", "theirs", "n", "mean", "sd", "p"]
    pd.DataFrame(rows, columns=names).to_csv(sys.stdout, index=False, float_format="%.10g")


if __name__ == "__main__":
    main()

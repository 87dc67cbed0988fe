"""The end of a run in words: how it ended, whether it can have learned anything, and whether replay worked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadymoe.bench.runs import compose, record, run_folder
from steadymoe.bench.training.columns import names

if TYPE_CHECKING:
    import pandas as pd

# How a run ends, and what the collapse rule says about it; docs/metrics.md, "Collapse", has the rule.
TERMS = {
    "finished": "Reached its last step without a collapse.",
    "collapsed": "The reward fell below half of its best, or, without a gain in reward, entropy collapsed or the "
    "gradient norm exploded, and it stayed so for the patience of the rule. The run continues to its last step.",
    "diverged": "Loss, gradient or sampling distribution stopped being finite. The run ends there; tables count it as "
    "collapsed.",
    "falling": "Met a criterion of collapse when it ended, but not for long enough. Tables do not count it as "
    "collapsed.",
    "not judged": "Too short for the collapse rule; tables show –.",
}
_REASONS = ("not finite", "reward", "entropy", "gradient norm")
# The algorithm that is meant to break.
_CONTROL = "grpo_unclipped"
# Replay is misaligned if the KL of sampler from trainer is more than this many times the KL with free or with shifted
# routes, plus rounding. Over six probed steps with each engine on micro and flat it was at most 1.1 times as large if
# routes were sound, and at least 3.5 times if they were shifted by a token. Router noise of 5 and more hides that fault
# from R3 (1.2 to 2.3), as it leaves little of the routers' choice.
_MAX_KL_FACTOR, _ROUNDING = 2.0, 1e-6
_KL = names("replay_kl", "replay_kl_free", "replay_kl_shifted")
REWARD, GRAD_NORM, REPLAY_SHARE = names("reward", "grad_norm", "replay_share")
# The metrics that ``findings`` reads.
READ = (REWARD, GRAD_NORM, REPLAY_SHARE, *_KL)


def lines(runs: Sequence[compose.Run], states: Mapping[Path, run_folder.State]) -> list[str]:
    """Return a line for each run that collapsed or diverged, with reason and step, and for each of its ``findings``."""
    lines = []
    for label, run in zip(compose.labels(runs), runs, strict=True):
        state = states[run.folder]
        if not state.has_ended:
            continue
        if event := state.facts["diverged"]:
            is_control = run.choices["algorithm"] == _CONTROL
            expected = " (expected: this is the control without a clip)" if is_control else ""
            lines.append(f"{state.status}: {label}: {reason(event)}{expected}")
        problems = findings(record.read_table(run.folder, "steps"))
        lines += [f"{problem}: {label}: {why}" for problem, why in problems.items()]
    return lines


def reason(event: Mapping[str, Any]) -> str:
    """Return the fact ``diverged`` of a run as text: "reward at step 10"."""
    update = "" if event.get("update") is None else f", update {event['update']}"
    return f"{event['reason'] if event['reason'] in _REASONS else 'unknown reason'} at step {event['step']}{update}"


def judged(run: Mapping[str, Any]) -> str:
    """Return what the rule of collapse says of a row of ``collapse.judged``."""
    if run["collapsed_step"] > 0:
        event = {"reason": run["collapsed_reason"], "step": int(run["collapsed_step"])}
        return f"{run_folder.final_status(event)} ({reason(event)})"
    if run["falling_since"] > 0:
        return f"falling since step {run['falling_since']:.0f}"
    return f"no collapse up to step {run['judged_until']:.0f}" if run["judged_until"] > 0 else "not judged"


def findings(steps: "pd.DataFrame") -> dict[str, str]:
    """Return what a run's ``steps`` table says against it, each finding with its reason."""
    problems = {"nothing to learn from": silent(steps), "replay is misaligned": misaligned(steps)}
    return {problem: why for problem, why in problems.items() if why is not None}


def misaligned(steps: "pd.DataFrame") -> str | None:
    """Return why replayed routes cannot be those of the tokens that they were forced on, or None.

    Every router must run the experts that it is given, and the trainer must be no further from the sampler than with
    the routers' own choice, or with the routes of the next or the last token (SkyRL #1908, verl #7340).
    """
    whys, (replayed, free, shifted) = [], steps[list(_KL)].dropna().mean()
    if (share := steps[REPLAY_SHARE].min()) < 1:
        whys.append(f"only {share:.4f} of the routers ran the replayed experts")
    if replayed > _MAX_KL_FACTOR * min(free, shifted) + _ROUNDING:
        whys.append(
            f"the KL of sampler from trainer is {replayed:.2g} with the replayed routes, {free:.2g} with free "
            f"routes and {shifted:.2g} with routes shifted by a token"
        )
    return ", ".join(whys) or None


def silent(steps: "pd.DataFrame") -> str | None:
    """Return why a run with this ``steps`` table cannot have learned from its rewards, or None.

    The column ``grad_norm`` is the mean over the updates of a step, so it is 0 only if every update's norm is 0.
    """
    why = {REWARD: "reward 0 in every step", GRAD_NORM: "gradient norm 0 in every update"}
    zero = [name for name in why if len(values := steps[name].dropna()) and (values == 0).all()]
    return ", ".join(why[name] for name in zero) or None


def findings_of_arms(wide: "pd.DataFrame") -> list[str]:
    """``findings`` for every run of ``Results.wide(*READ)``: one line for each arm and reason."""
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for _, steps in wide.groupby("run"):
        arm, seed = steps[["arm", "seed"]].iloc[0]
        for finding, why in findings(steps).items():
            seeds.setdefault((finding, str(arm), why), []).append(str(seed))
    return [f"{finding}: {arm} (seed {', '.join(found)}): {why}" for (finding, arm, why), found in seeds.items()]

"""``docs/gates.md``: every gate with its number, interval, n and state."""

from collections.abc import Mapping, Sequence

import pandas as pd

from steadymoe.bench.report import tables
from steadymoe.bench.report.realism import Realism, to_table
from steadymoe.bench.score.recorded import Recorded
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.study.designs import Design, designs, seconds_an_update
from steadymoe.bench.study.gates import LEAST_KEPT, Gate, kept
from steadymoe.bench.study.realism import realism

_HEAD = """# Gates of the standard settings

`steadymoe study --results results/reference --pages docs` makes this page from recorded runs; a test makes it
again and compares. A *validity gate* says whether a setting can carry a verdict: a claim that needs a gate that is not
passed is "not testable here". A *realism gate* says by which factor a number differs from what is
published of real MoE models ([calibration.md](calibration.md) names the sources). It blocks no verdict, but where
neither R5 ≥ 2 nor R8 ≥ 0.5 holds, verdicts on claims about MoE read "under stress only". All runs are on seeds that no
claim uses. Numbers are means over n seeds with a nominal 95 % interval.

The settings: `experiment=learning`, `stale`, `mismatch_noise` (*mismatch*) and `mismatch_fp8`. The *on-policy twin* of
an arm has one update a rollout (`updates_per_rollout=1`), with the same learning rate, mini-batch and number of
updates. *Held-out accuracy* is the mean of a run's last five evaluations of 1,024 prompts. The *primary outcome* of
*stale* is the mean reward over the steps that count: the steps at which a collapse could begin and still be seen.
"""

_KEPT = f"""As fixed before the study, V5 asks GRPO and GSPO alone. This table has the same number for every arm of the
study at *stale*, on the study's seeds: the reward of the second rollout over the first. An arm below
{LEAST_KEPT:.0%} was damaged within one rollout."""

_REALISM = """*Factor* is the number over the nearer end of the published range. *Not recorded*: the archive lacks the
column, or no dense model has run at that setting. R5 compares an MoE with a dense twin that has other cold
starts, so its interval is Welch's. The calibrated rows come from [one cold start](calibration.md) at seed 200, because
archives of runs lack these columns. Noise on the sampler's routers (*mismatch*) is a stress test, not a picture of an
engine."""

# A realism gate that misses its range by more than this factor is named above the table.
_FAR = 5

_DESIGNS = """## What a seed buys

Differences at *stale*, seed by seed. *Whole runs* begin at the cold start. *Branches of one trunk* share the first 160
updates, under GRPO, and differ in the 320 updates after them, so their difference is another quantity than the
difference of whole runs. The *floor of chaos* compares GRPO with itself, all weights disturbed by 1e-7 at the start.
The last two columns say how many seeds find a difference of 0.05 with 80 % power, and how many minutes of one core
their runs take: the updates of both arms and of a trunk, at the pace of the quickest arm here, cold starts left out.
*Final reward* is the mean of the last five steps.
"""


def validity(measured: Sequence[Gate]) -> pd.DataFrame:
    """The validity gates as a table."""
    return pd.DataFrame(
        [
            {"gate": each.need.gate, "setting": each.need.setting, "passes when": each.passes, "number": each.number}
            | {"n": each.number.n, "state": each.state, "what was seen": each.measured}
            for each in measured
        ]
    )


def _realism(measured: Sequence[Realism]) -> list[str]:
    if not measured:
        return ["No run of a realism gate has ended."]
    far = [f"{each.gate} ({each.setting})" for each in measured if each.factor > _FAR or each.factor < 1 / _FAR]
    named = f"{_REALISM} Off by a factor of more than {_FAR}: {', '.join(dict.fromkeys(far)) or 'none'}."
    return [named, "", tables.to_markdown(to_table(measured))]


def by_arm(kept: Mapping[str, Estimate]) -> str:
    """Gate V5 for every arm of the study: the arms below its threshold in a sentence, and a table."""
    below = [arm for arm, each in kept.items() if each.mean < LEAST_KEPT]
    table = pd.DataFrame(
        [
            {"arm": arm, "reward kept": each if each.n else "not recorded", "n": each.n or "–"}
            | {"V5": "–" if not each.n else "below" if arm in below else "kept"}
            for arm, each in kept.items()
        ]
    )
    return f"{_KEPT} Below: {', '.join(below) or 'none'}.\n\n{tables.to_markdown(table)}"


def _designs(compared: Sequence[Design], pace: float | None) -> list[str]:
    """The designs of a comparison; ``pace`` is the seconds of an update."""
    rows = [
        {"design": each.name, "compared": each.compared, "outcome": each.outcome, "difference": each.difference}
        | {"standard deviation": f"{each.deviation:.2g}", "n": each.difference.n, "seeds for 0.05": each.seeds}
        | {"core minutes": "–" if pace is None else f"{each.updates * pace / 60:.0f}"}
        for each in compared
    ]
    return ["", _DESIGNS, tables.to_markdown(pd.DataFrame(rows))] if rows else []


def counts(measured: Sequence[Gate]) -> str:
    """A sentence with the number of validity gates that are passed, and the others by name."""
    passed = sum(each.state == "passed" for each in measured)
    sentence = f"**Of {len(measured)} validity gates {passed} are passed"
    for state in ("failed", "not measured"):
        names = ", ".join(str(each.need) for each in measured if each.state == state)
        sentence += f"; {state}: {names}" if names else ""
    return f"{sentence}.**"


def text(study: Recorded, measured: Sequence[Gate]) -> str:
    """The text of the page; ``measured`` are the validity gates."""
    lines = [_HEAD, counts(measured), "", "## Validity", "", tables.to_markdown(validity(measured)), ""]
    lines += ["## V5 for each arm", "", by_arm(kept(study)), "", "## Realism", "", *_realism(realism(study))]
    lines += _designs(designs(study), seconds_an_update(study))
    return "\n".join(lines) + "\n"


def texts(measured: Sequence[Gate]) -> dict[str, str]:
    """The table of the validity gates as text, by file name."""
    table = validity(measured)
    return {
        "gates.md": tables.to_markdown(table) + "\n",
        "gates.csv": tables.to_numbers(table).to_csv(index=False),
    }

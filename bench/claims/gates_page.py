"""``docs/gates.md`` and the tables of ``steadymoe gates``: every gate with its number, interval, n and state."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from steadymoe.bench.claims import testbed
from steadymoe.bench.claims.designs import Design, designs, seconds_an_update
from steadymoe.bench.report import tables
from steadymoe.bench.score.recorded import NotRun, Recorded
from steadymoe.bench.statistics.estimates import Estimate
from steadymoe.bench.support import atomic_files

_HEAD = """# Gates of the standard settings

`steadymoe gates --results results/reference --page docs/gates.md` makes this page from recorded runs; a test makes it
again and compares. A *validity gate* says whether a setting can carry a verdict: a claim that needs a gate that is not
passed is "not testable here". A *realism gate* says by which factor a number differs from what is
published of real MoE models ([calibration.md](calibration.md) names the sources). It blocks no verdict, but where
neither R5 ≥ 2 nor R8 ≥ 0.5 holds, verdicts on claims about MoE read "under stress only". All runs are on seeds that no
claim uses. Numbers are means over n seeds with a 95 % interval.

The settings: `experiment=learning`, `stale`, `mismatch_noise` (*mismatch*) and `mismatch_fp8`. The *on-policy twin* of
an arm has one update a rollout (`updates_per_rollout=1`), with the same learning rate, mini-batch and number of
updates. *Held-out accuracy* is the mean of a run's last five evaluations of 1,024 prompts. The *primary outcome* of
*stale* is the mean reward over the steps that count: the steps at which a collapse could begin and still be seen.
"""

_KEPT = f"""As fixed before the study, V5 asks GRPO and GSPO alone. This table has the same number for every arm of the
study at *stale*, on the study's seeds: the reward of the second rollout over the first. An arm below
{testbed.LEAST_KEPT:.0%} was damaged within one rollout."""

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


def validity(results: Sequence[testbed.Result]) -> pd.DataFrame:
    """The validity gates as a table."""
    return pd.DataFrame(
        [
            {"gate": each.gate, "setting": each.setting, "passes when": each.passes, "number": each.number}
            | {"n": each.number.n, "state": each.state, "what was seen": each.seen}
            for each in results
        ]
    )


def realism(found: Sequence[testbed.Realism]) -> pd.DataFrame:
    """The realism gates as a table."""
    rows = []
    for each in found:
        published, recorded = each.published, each.number.n > 0
        spans = "–" if published is None else f"{published.low:g} to {published.high:g}"
        rows.append(
            {"gate": each.gate, "setting": each.setting, "what": each.what, "measured on": each.arm}
            | {"here": each.number if recorded else "not recorded", "n": f"{each.number.n} {each.unit}"}
            | {"published": spans, "factor": f"{each.factor:.2g}", "source": published.source if published else "–"}
            | ({} if recorded else {"n": "–", "factor": "–"})
        )
    names = ["gate", "setting", "what", "measured on", "here", "n", "published", "factor", "source"]
    return pd.DataFrame(rows, columns=names)


def _far(found: Sequence[testbed.Realism]) -> str:
    far = [f"{each.gate} ({each.setting})" for each in found if each.factor > _FAR or each.factor < 1 / _FAR]
    return f"{_REALISM} Off by a factor of more than {_FAR}: {', '.join(dict.fromkeys(far)) or 'none'}."


def kept(by_arm: Mapping[str, Estimate]) -> str:
    """Gate V5 for every arm of the study: the arms below its threshold in a sentence, and a table."""
    below = [arm for arm, each in by_arm.items() if each.mean < testbed.LEAST_KEPT]
    table = pd.DataFrame(
        [
            {"arm": arm, "reward kept": each if each.n else "not recorded", "n": each.n or "–"}
            | {"V5": "–" if not each.n else "below" if arm in below else "kept"}
            for arm, each in by_arm.items()
        ]
    )
    return f"{_KEPT} Below: {', '.join(below) or 'none'}.\n\n{tables.to_markdown(table)}"


def of_designs(compared: Sequence[Design], pace: float | None) -> pd.DataFrame:
    """The designs of a comparison as a table; ``pace`` is the seconds of an update."""
    return pd.DataFrame(
        [
            {"design": each.name, "compared": each.compared, "outcome": each.outcome, "difference": each.difference}
            | {"standard deviation": f"{each.deviation:.2g}", "n": each.difference.n, "seeds for 0.05": each.seeds}
            | {"core minutes": "–" if pace is None else f"{each.updates * pace / 60:.0f}"}
            for each in compared
        ]
    )


def page(
    results: Sequence[testbed.Result],
    found: Sequence[testbed.Realism],
    by_arm: Mapping[str, Estimate],
    compared: Sequence[Design],
    pace: float | None,
) -> str:
    """The text of ``docs/gates.md``; ``by_arm`` is ``testbed.kept``, ``pace`` the seconds of an update."""
    failed = [f"{each.gate} ({each.setting})" for each in results if each.state == "failed"]
    missing = [f"{each.gate} ({each.setting})" for each in results if each.state == "not measured"]
    passed = sum(each.state == "passed" for each in results)
    counts = f"**Of {len(results)} validity gates {passed} are passed"
    counts += f"; failed: {', '.join(failed)}" if failed else ""
    counts += f"; not measured: {', '.join(missing)}" if missing else ""
    lines = [_HEAD, f"{counts}.**", "", "## Validity", "", tables.to_markdown(validity(results)), ""]
    lines += ["## V5 for each arm", "", kept(by_arm), "", "## Realism", ""]
    lines += [_far(found), "", tables.to_markdown(realism(found))] if found else ["No run of a realism gate has ended."]
    if compared:
        lines += ["", _DESIGNS, tables.to_markdown(of_designs(compared, pace))]
    return "\n".join(lines) + "\n"


def texts(results: Sequence[testbed.Result]) -> dict[str, str]:
    """The table of the validity gates as text, by file name."""
    table = validity(results)
    return {
        "gates.md": tables.to_markdown(table) + "\n",
        "gates.csv": tables.to_numbers(table).to_csv(index=False),
    }


def make(results: Path, page_path: Path | None = None) -> tuple[str, list[Path]]:
    """Write ``tables/gates.*`` below ``results`` and, if given, the page; return the table and the paths written.

    Raises NotRun if no run of any gate has ended.
    """
    study = Recorded(results)
    gates, found = testbed.results(study), testbed.realism(study)
    if all(gate.state == "not measured" for gate in gates) and not found:
        raise NotRun("no run of a gate has ended; begin with: steadymoe run experiment=gates_stale")
    written = {results / "tables" / name: text for name, text in texts(gates).items()}
    if page_path is not None:
        written[page_path] = page(gates, found, testbed.kept(study), designs(study), seconds_an_update(study))
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, partial(Path.write_text, data=text))
    return tables.to_markdown(validity(gates)), list(written)

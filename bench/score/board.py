"""The board: three numbers a loss, as Markdown and as a page; recorded by the suite, or an entry's.

A board is a folder: entries below it, and ``verified/`` with what reruns found (``verified.json``) and their outcomes
(``<hash of the algorithm>.csv``). An entry's own outcomes stand on the board as *unverified* until it is rerun; one
that its rerun does not bear out is named below the table.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from steadymoe import conf
from steadymoe.algorithms import registry
from steadymoe.bench.report import paper, write
from steadymoe.bench.report.figures import bearable, style
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.runs import compose
from steadymoe.bench.score import entry, outcomes, rerun, standard
from steadymoe.bench.score.entry import ABOUT, BadEntry, Entry
from steadymoe.bench.score.outcomes import Score
from steadymoe.bench.score.standard import ANCHORS, DIALS, RATE, REFERENCE, VERSION
from steadymoe.bench.statistics.bearable import SHARE
from steadymoe.bench.support import atomic_files, regular_files
from steadymoe.bench.support.text import markdown, visible

_VERIFIED = "verified.json"
# The losses of the picture, beside the two anchors.
_SHOWN = (*ANCHORS, "grpo_unclipped", "vespo")
TERMS = {
    "number": f"The value of a dial where a loss's mean held-out accuracy first falls below the line, in multiples of "
    f"{REFERENCE}'s, with an uncorrected 95 % interval over paired seeds.",
    "line": f"The start plus {SHARE:.0%} of what {REFERENCE} gains at its best value of the dial.",
    "rate": "The learning rate, at 64 updates per rollout.",
    "staleness": f"Updates per rollout, at four times {REFERENCE}'s best rate, where stale data do harm.",
    "mismatch": "Noise on the sampler's weights, at each loss's best rate.",
    "*": "The number differs from 1: t test on the logarithm, Holm-corrected over all losses on the dial.",
    "> x": "The loss never falls below the line on the grid, so its number is at least x.",
    "> grid": "The interval has no upper end, because too many draws of the bootstrap never fall below the line.",
    "–": "The loss never rises to the line. Under Headroom: a best rate is at an end of the grid, or the curve never "
    "falls below the line.",
    "n": "Seeds on the rate's dial; those beyond the first five were added after a look at these. The other dials have "
    "five or more.",
    "sampled, greedy": "Accuracy at the best rate, on the seeds all losses share. They helped choose the rate, which "
    "biases it upwards, so it is not ranked.",
    "headroom": f"How far beyond its best rate a loss goes until it falls below the line, over the same for "
    f"{REFERENCE}. The other factor of the rate's number is the best rate over {REFERENCE}'s (the top of a parabola "
    "through the highest level and its neighbours); smaller steps at every rate raise only that.",
    "recipe": f"A loss has {REFERENCE}'s advantage; a recipe changes it, or something else around the loss.",
    "unverified": "An entry's own numbers, not measured again.",
    "with state": "The loss remembers other batches, which could hide a schedule.",
}


def verify(folder: Path, commit: str, to: Path) -> bool:
    """Rerun the entry in ``folder``, keep what was found in the board ``to``, and return whether it stands.

    Raises BadEntry for a folder that is no entry.
    """
    found = entry.read(folder)
    print(visible(f"{found.name}: check, {len(rerun.seeds(commit))} fresh seeds beside {REFERENCE}, shuffled rewards"),
          file=sys.stderr, flush=True)  # fmt: skip
    problem, table, keeps_state = rerun.rerun(found, commit)
    label = "with state" if keeps_state else ""
    verdicts = verified(to) | {found.digest: {"commit": commit, "problem": problem, "label": label}}
    texts = {_VERIFIED: json.dumps(verdicts, indent=1) + "\n"}
    texts |= {} if table is None else {f"{found.digest}.csv": table.to_csv(index=False)}
    for path in write.files(to, texts, "verified"):
        print(visible(f"wrote {path}"))
    print(visible(f"{found.name}: {problem or ', '.join(filter(None, ['verified', label]))}"))
    return not problem


def verified(board: Path) -> dict[str, dict[str, str]]:
    """Return digest of an entry's algorithm → commit, problem and label of its rerun.

    Raises BadEntry for another content.
    """
    try:
        found = regular_files.read_json(board / "verified" / _VERIFIED)
        return {
            str(key): {name: str(facts[name]) for name in ("commit", "problem", "label")}
            for key, facts in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise BadEntry(f"{board / 'verified' / _VERIFIED} does not hold verdicts; remove it") from error


def entries(board: Path) -> list[Entry]:
    """Return the entries in the folders of a board. Raises BadEntry for a bad one, and for two of one name."""
    found = [entry.read(path.parent) for path in sorted(board.glob(f"*/{ABOUT}"))]
    names = [each.name for each in found] + list(standard.recorded()["loss"].unique())
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadEntry(f"two entries of the board are named {twice[0]}")
    return found


class Standing(NamedTuple):
    """A loss on the board."""

    score: Score
    kind: str
    numbers: str
    """Whose they are: recorded, verified, or its author's own."""
    date: str
    """The day of its runs."""


def standings(board: Path) -> list[Standing]:
    """Return every loss of a board, the highest bearable rate first; entries that were rerun in vain are left out."""
    known, verdicts, facts = standard.recorded(), verified(board), standard.made()
    found = []
    for score in outcomes.scores(known):
        date = facts["also"].get(score.loss, facts)["date"]
        found.append(Standing(score, _shipped_kind(score.loss), "recorded", date))
    for each in entries(board):
        if (verdict := verdicts.get(each.digest)) is None:
            own, whose = each.outcomes(), "unverified"
        elif verdict["problem"]:
            continue
        else:
            own = pd.read_csv(board / "verified" / f"{each.digest}.csv")
            whose = ", ".join(filter(None, [f"verified at {verdict['commit'][:7]}", verdict["label"]]))
        with rerun.composing(each, each.folder):
            of_kind = kind(each.overrides)
        scored = (score for score in outcomes.scores(own) if score.loss == each.name)
        found += [Standing(score, of_kind, whose, each.about["date"]) for score in scored]
    return sorted(found, key=lambda each: -_ratio(each.score))


def rows(found: Sequence[Standing]) -> pd.DataFrame:
    """Return a row for each loss: kind, three numbers, level, whose numbers they are, seeds on the rate's dial."""
    table = outcomes.table([each.score for each in found]).drop(columns="best rate")
    table.insert(1, "kind", [each.kind for each in found])
    return table.assign(numbers=[f"{visible(each.numbers)}, n = {each.score.seeds}" for each in found])


def headroom(found: Sequence[Standing]) -> pd.DataFrame:
    """Return the factors of what each loss bears of the learning rate, in multiples of GRPO's."""
    shown = []
    for each in found:
        number = each.score.borne.get(RATE.name)
        factors = ("–", "–") if number is None else (number.own_best, number.headroom)
        shown.append((each.score.loss, each.score.text(RATE), *factors))
    columns = ("loss", f"{RATE.name} × {REFERENCE}", f"best rate × {REFERENCE}", f"headroom × {REFERENCE}")
    return pd.DataFrame(shown, columns=list(columns))


def history(found: Sequence[Standing]) -> pd.DataFrame:
    """Return the losses that bore a higher rate than all before them, the latest first."""
    best, shown = -np.inf, []
    for each in sorted(found, key=lambda each: (each.date, -_ratio(each.score))):
        if _ratio(each.score) > best:
            best = _ratio(each.score)
            shown.append({"since": visible(each.date), "loss": each.score.loss, "kind": each.kind})
            shown[-1] |= {f"{RATE.name} × {REFERENCE}": each.score.text(RATE), "numbers": visible(each.numbers)}
    return pd.DataFrame(shown[::-1])


def _ratio(score: Score) -> float:
    """The bearable rate over GRPO's on the same machine; below all others where it is not known."""
    number = score.borne.get(RATE.name)
    return -1.0 if number is None or np.isnan(number.ratio) else number.ratio


def refuted(board: Path) -> list[str]:
    """Return a line for each entry that its rerun did not bear out."""
    verdicts = verified(board)
    problems = {each.name: verdicts[each.digest]["problem"] for each in entries(board) if each.digest in verdicts}
    return [f"Not verified: {name}, {problem}." for name, problem in problems.items() if problem]


def kind(overrides: Sequence[str]) -> str:
    """Return ``loss`` for an algorithm with GRPO's advantage and nothing around it, else ``recipe``."""
    one = [f"experiment={RATE.experiment}", "optimizer.learning_rate=1e-4", "seed=0"]
    ours, theirs = (
        compose.plan([*one, *words], with_parts=False)[0].plain["algorithm"]
        for words in (overrides, [f"algorithm={REFERENCE}"])
    )
    return _kind(ours, theirs)


def _shipped_kind(loss: str) -> str:
    """Return ``kind`` of a shipped algorithm without composing it."""
    return _kind(conf.read("algorithm", loss), conf.read("algorithm", REFERENCE))


def _kind(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    around = (ours.keys() | theirs.keys()) - {"loss", "advantage"}
    same = ours["advantage"]["_target_"] == theirs["advantage"]["_target_"]
    return "loss" if same and all(ours.get(key) == theirs.get(key) for key in around) else "recipe"


def write_board(board: Path) -> list[Path]:
    """Write ``board.md``, ``board.html`` and the picture ``profile.png`` to the folder ``board``; return the paths."""
    found, known, facts = standings(board), standard.recorded(), standard.made()
    table = rows(found)
    sampled, greedy = outcomes.start(known)
    made = [f"Recorded on {facts['machine']}, {facts['date']}"]
    losses = set(known["loss"])
    for what, elsewhere in facts["also"].items():
        unpaired = f", from other cold starts than {REFERENCE}'s and so unpaired" if what in losses else ""
        made.append(f"{what} on {elsewhere['machine']}, {elsewhere['date']}{unpaired}")
    lines = [f"Without training: {sampled} sampled, {greedy} greedy. {'; '.join(made)}."]
    if unread := sorted(loss for loss in losses if registry.provenance(loss) == "reconstruction"):
        lines.append(f"Reconstructions, which may differ from their papers: {', '.join(unread)}.")
    lines += refuted(board)
    groups = {"Losses": table[table["kind"] == "loss"], "Recipes": table[table["kind"] == "recipe"]}
    groups = {title: group.drop(columns="kind") for title, group in groups.items() if len(group)}
    groups["Headroom"] = headroom(found)
    groups["The highest estimate so far"] = history(found)
    shown = known[known["loss"].isin(_SHOWN)]
    paths = draw(shown, board)
    sections = "\n\n".join(f"## {title}\n\n{write.to_markdown(group)}" for title, group in groups.items())
    picture = "![Held-out accuracy over three dials](profile.png)"
    terms = "\n".join(f"- **{markdown(term)}**: {markdown(text)}" for term, text in TERMS.items())
    notes = f"{' '.join(map(markdown, lines))}\n\n## How to read this\n\n{terms}"
    text = f"# Board of {VERSION}\n\n{picture}\n\n{sections}\n\n{notes}\n"
    html = page(f"Board of {VERSION}", shown, groups, lines, REFERENCE)
    return [*paths, *write.files(board, {"board.md": text, "board.html": html})]


def profile(found: pd.DataFrame) -> DataFigure:
    """Return the picture of losses over the dials."""
    return bearable.profile({d.name: (d.levels(found), d.column, d.at) for d in DIALS if d.name in set(found["dial"])})


def draw(found: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the picture of losses, ``profile.png`` and ``profile.svg``, to a folder and return the paths."""
    drawn, paths = profile(found), [regular_files.folder(folder) / f"profile.{suffix}" for suffix in ("png", "svg")]
    with paper.used(paper.Paper(caption=True)):  # the page of the board shows the picture alone
        for path in paths:
            atomic_files.write(path, partial(drawn.write, suffix=path.suffix[1:]))
    return paths


def page(
    title: str,
    found: pd.DataFrame,
    tables: Mapping[str, pd.DataFrame],
    notes: Sequence[str],
    own: str,
    command: str = "",
) -> str:
    """Return a page: the picture of ``found``, the tables, the notes; the row whose loss is ``own`` stands out."""
    with paper.used(paper.Paper(caption=True)):
        pictures = [draw(partial(profile, found)) for draw in (style.svg, style.narrow_svg)]
    return write.html(
        "score",
        "page.html",
        title=title,
        pictures=pictures,
        tables=dict(tables),
        own=visible(own),
        notes=[visible(note) for note in notes],
        terms=TERMS,
        command=visible(command),
    )

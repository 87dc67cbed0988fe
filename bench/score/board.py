"""The board: three numbers for each recorded loss, as Markdown and as a page."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from steadymoe import conf
from steadymoe.algorithms import registry
from steadymoe.bench.report import paper, write
from steadymoe.bench.report.figures import style, tolerance
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.score import outcomes, standard
from steadymoe.bench.score.outcomes import Score
from steadymoe.bench.score.standard import ANCHORS, DIALS, RATE, REFERENCE, VERSION
from steadymoe.bench.statistics.tolerance import SHARE
from steadymoe.bench.support import files
from steadymoe.bench.support.text import markdown, visible

# The losses of the picture, beside the two anchors.
_SHOWN = (*ANCHORS, "grpo_unclipped", "vespo")
TERMS = {
    "tolerance": f"The value of a dial where a loss's mean held-out accuracy first falls below the threshold, in "
    f"multiples of {REFERENCE}'s, with an uncorrected 95 % interval over paired seeds.",
    "threshold": f"The start plus {SHARE:.0%} of what {REFERENCE} gains at its best value of the dial.",
    "rate": "The learning rate, at 64 updates per rollout.",
    "staleness": f"Updates per rollout, at four times {REFERENCE}'s best rate, where stale data do harm.",
    "mismatch": "Noise on the sampler's weights, at each loss's best rate.",
    "*": "The tolerance differs from 1: t test on the logarithm, Holm-corrected over all losses on the dial.",
    "> x": "The loss never falls below the threshold on the grid, so its tolerance is at least x.",
    "> grid": "The interval has no upper end, because too many draws of the bootstrap never fall below the threshold.",
    "–": "The loss never rises to the threshold. Under Headroom: a best rate is at an end of the grid, or the curve "
    "never falls below the threshold.",
    "n": "Seeds on the rate's dial; those beyond the first five were added after a look at these. The other dials have "
    "five or more.",
    "sampled, greedy": "Accuracy at the best rate, on the seeds all losses share. They helped choose the rate, which "
    "biases it upwards, so it is not ranked.",
    "headroom": f"How far beyond its best rate a loss goes until it falls below the threshold, over the same for "
    f"{REFERENCE}. The other factor of the rate's tolerance is the best rate over {REFERENCE}'s (the top of a parabola "
    "through the highest level and its neighbours); smaller steps at every rate raise only that.",
    "recipe": f"A loss has {REFERENCE}'s advantage; a recipe changes it, or something else around the loss.",
    "with state": "The loss remembers other batches, which could hide a schedule.",
}


def scores() -> list[Score]:
    """Return every recorded loss, that with the highest multiple of GRPO's rate on the same machine first."""
    return sorted(outcomes.scores(*standard.blocks()), key=lambda each: -_ratio(each))


def rows(found: Sequence[Score]) -> pd.DataFrame:
    """Return a row for each loss: kind, three numbers, level, whose numbers they are, seeds on the rate's dial."""
    table, also = outcomes.table(found).drop(columns="best rate"), standard.made()["also"]
    table.insert(1, "kind", [kind(each.loss) for each in found])
    parts = [("recorded", also.get(each.loss, {}).get("label"), f"n = {each.seeds}") for each in found]
    return table.assign(numbers=[", ".join(filter(None, each)) for each in parts])


def headroom(found: Sequence[Score]) -> pd.DataFrame:
    """Return the factors of what each loss tolerates of the learning rate, in multiples of GRPO's."""
    numbers = {each.loss: each.tolerances.get(RATE.name) for each in found}
    factors = [("–", "–") if each is None else (each.own_best, each.headroom) for each in numbers.values()]
    columns = ["loss", *(f"{what} × {REFERENCE}" for what in (RATE.name, "best rate", "headroom"))]
    shown = [(each.loss, each.text(RATE), *pair) for each, pair in zip(found, factors, strict=True)]
    return pd.DataFrame(shown, columns=columns)


def _ratio(score: Score) -> float:
    """The tolerated rate over GRPO's on the same machine; below all others where it is not known."""
    number = score.tolerances.get(RATE.name)
    return -1.0 if number is None or np.isnan(number.ratio) else number.ratio


def kind(loss: str) -> str:
    """Return ``loss`` for an algorithm with GRPO's advantage and nothing around it, else ``recipe``."""
    ours, theirs = (conf.read("algorithm", name) for name in (loss, REFERENCE))
    around = (ours.keys() | theirs.keys()) - {"loss", "advantage"}
    same = ours["advantage"]["_target_"] == theirs["advantage"]["_target_"]
    return "loss" if same and all(ours.get(key) == theirs.get(key) for key in around) else "recipe"


def write_board(board: Path) -> list[Path]:
    """Write ``board.md``, ``board.html`` and the picture ``profile.png`` to the folder ``board``; return the paths."""
    found, known, facts = scores(), standard.recorded(), standard.made()
    table = rows(found)
    sampled, greedy = outcomes.start(known)
    made = [f"Recorded on {facts['machine']}, {facts['date']}"]
    losses, unpaired = {each.loss for each in found}, f", from other cold starts than {REFERENCE}'s and so unpaired"
    for what, elsewhere in facts["also"].items():
        beside = unpaired if what in set(known["loss"]) else f", next to {REFERENCE}" if what in losses else ""
        made.append(f"{what} on {elsewhere['machine']}, {elsewhere['date']}{beside}")
    lines = [f"Without training: {sampled} sampled, {greedy} greedy. {'; '.join(made)}."]
    if unread := sorted(loss for loss in losses if registry.provenance(loss) == "reconstruction"):
        lines.append(f"Reconstructions, which may differ from their papers: {', '.join(unread)}.")
    groups = {"Losses": table[table["kind"] == "loss"], "Recipes": table[table["kind"] == "recipe"]}
    groups = {title: group.drop(columns="kind") for title, group in groups.items() if len(group)}
    groups["Headroom"] = headroom(found)
    shown = known[known["loss"].isin(_SHOWN)]
    paths = draw(shown, board)
    sections = "\n\n".join(f"## {title}\n\n{write.to_markdown(group)}" for title, group in groups.items())
    picture = "![Held-out accuracy over three dials](profile.png)"
    terms = "\n".join(f"- **{markdown(term)}**: {markdown(text)}" for term, text in TERMS.items())
    notes = f"{' '.join(map(markdown, lines))}\n\n## How to read this\n\n{terms}"
    text = f"# Board of {VERSION}\n\n{picture}\n\n{sections}\n\n{notes}\n"
    html = page(f"Board of {VERSION}", shown, groups, lines, REFERENCE)
    return [*paths, *write.text_files(board, {"board.md": text, "board.html": html})]


def profile(found: pd.DataFrame) -> DataFigure:
    """Return the picture of losses over the dials."""
    return tolerance.profile({d.name: (d.levels(found), d.column, d.at) for d in DIALS if d.name in set(found["dial"])})


def draw(found: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the picture of losses, ``profile.png`` and ``profile.svg``, to a folder and return the paths."""
    drawn, paths = profile(found), [files.folder(folder) / f"profile.{suffix}" for suffix in ("png", "svg")]
    with paper.used(paper.Paper(caption=True)):  # the page of the board shows the picture alone
        for path in paths:
            files.write(path, partial(drawn.write, suffix=path.suffix[1:]))
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

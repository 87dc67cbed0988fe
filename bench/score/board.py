"""The board: what each recorded loss tolerates and what moving routes cost it, as Markdown and as a page."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pandas as pd

from steadymoe import conf
from steadymoe.algorithms import registry
from steadymoe.bench.report import paper, write
from steadymoe.bench.report.figures import style, tolerance
from steadymoe.bench.report.figures.style import DataFigure
from steadymoe.bench.score import outcomes, standard
from steadymoe.bench.score.outcomes import RATIOS, Score
from steadymoe.bench.score.standard import VERSION
from steadymoe.bench.statistics.tolerance import REFERENCE, SHARE
from steadymoe.bench.support import files
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.support.text import markdown, visible

TERMS = {
    RATIOS["rate"].title: f"The learning rate where mean held-out accuracy first falls below the threshold, the start "
    f"plus {SHARE:.0%} of what {REFERENCE} gains at its best rate, in multiples of {REFERENCE}'s, with an uncorrected "
    "95 % interval over paired seeds. Routes are free, 32 updates per rollout, responses of 19 tokens.",
    RATIOS["cost"].title: "What a loss tolerates with every route pinned to the choice of the start, over what it "
    "tolerates with free routes, at the same threshold.",
    RATIOS["dense"].title: "The same as the first on the MoE's dense twin, by the gain on the twin.",
    RATIOS["cheap"].title: "The same as the first at responses of 7 tokens and 64 updates per rollout.",
    "gap closed": f"The share of {REFERENCE}'s routing cost that a loss does not pay, 1 − log of its cost / log of "
    f"{REFERENCE}'s; what helps with pinned routes alike closes nothing. raw: of a change that means nothing with "
    "pinned routes. No number where a curve never falls below the threshold; no interval where that holds in more than "
    f"2.5 % of the bootstrap's draws, or while the interval of {REFERENCE}'s cost reaches 1.",
    "*": "The ratio differs from 1: t test on the logarithm, Holm-corrected over all losses of the column; p is at "
    "least twice the share of the bootstrap's draws that have no ratio.",
    "> x": "The loss never falls below the threshold on its grid, so the ratio is at least x.",
    "> grid": "The interval has no upper end: too many draws never fall below the threshold.",
    f"{REFERENCE} > grid, free > grid": f"{REFERENCE}, or the loss itself with free routes, never falls below the "
    "threshold, so no ratio is known.",
    "–": "The loss never rises to the threshold, or the number does not apply.",
    "n": "Seeds; 7 tokens have five or ten.",
    "sampled, greedy": "Accuracy at the best rate with free routes, on the seeds that chose the rate: biased upwards, "
    "not ranked.",
    "experts changed": "Mean share of routed experts that change with an update, at the best rate with free routes.",
    "ratio variance": "Variance of the token ratio there: median over updates, geometric mean over seeds.",
    "recipe": f"A loss has {REFERENCE}'s advantage; a recipe changes it, or something else around the loss."
    " A change is one of routing or optimizer.",
    "with state": "The loss remembers other batches, which could hide a schedule.",
}
# Recorded changes of GRPO by the names that papers give them, for the picture.
CHANGES = {
    "routing=r2": "R2",
    "optimizer.router_factor=1 routing=freeze": "frozen routers",
    "optimizer.expert_factor=2": "experts × 2",
    "optimizer.router_factor=0.01": "routers × 0.1",
    "optimizer=muon": "Muon",
    "routing.bias_speed=1e-3": "bias balancing",
}
_ALONE = "7 tokens alone"
_GROUPS = {"loss": "Losses", "recipe": "Recipes", "change": "Changes of routing or optimizer", _ALONE: f"At {_ALONE}"}


def rows(found: Sequence[Score]) -> pd.DataFrame:
    """Return a row for each loss: kind, its numbers, whose numbers they are."""
    table, known = outcomes.table(found), standard.made()["losses"]
    table.insert(1, "kind", [kind(each) for each in found])
    parts = [(str(each.seeds), known.get(each.loss, {}).get("label")) for each in found]
    return table.assign(n=[", ".join(filter(None, each)) for each in parts])


def kind(score: Score) -> str:
    """Return ``loss`` for an algorithm with GRPO's advantage and nothing around it, else ``recipe`` or ``change``.

    ``_ALONE`` if it did not run with free routes.
    """
    if not score.seeds:
        return _ALONE
    if score.loss != score.algorithm:
        return "change"
    ours, theirs = (conf.read("algorithm", name) for name in (score.algorithm, REFERENCE))
    around = (ours.keys() | theirs.keys()) - {"loss", "advantage"}
    same = ours["advantage"]["_target_"] == theirs["advantage"]["_target_"]
    return "loss" if same and all(ours.get(key) == theirs.get(key) for key in around) else "recipe"


def write_board(board: Path) -> list[Path]:
    """Write ``board.md``, ``board.html`` and the picture ``board.png`` to the folder ``board``; return the paths."""
    blocks, facts = [*standard.blocks().values()], standard.made()
    found = outcomes.scores(*blocks)
    table = rows(found)
    ran = [block for block in blocks if standard.FREE.name in set(block["side"])]
    if not ran:
        raise UserError("nothing is recorded with free routes: steadymoe score algorithm=grpo --record")
    sampled, greedy = outcomes.start(ran[0])
    where: dict[str, list[str]] = {}
    for loss, its in facts["losses"].items():
        where.setdefault(its["machine"], []).append(loss)
    lines = [f"Without training: {sampled} sampled, {greedy} greedy."]
    for machine, losses in where.items():
        lines.append(f"Recorded on {machine}: {', '.join(losses) if len(where) > 1 else 'all but 7 tokens'}.")
    lines += [facts["cheap"]]
    if unread := sorted(each.loss for each in found if registry.provenance(each.algorithm) == "reconstruction"):
        lines.append(f"Reconstructions, which may differ from their papers: {', '.join(unread)}.")
    groups = {title: table[table["kind"] == name].drop(columns="kind") for name, title in _GROUPS.items()}
    groups[_GROUPS[_ALONE]] = groups[_GROUPS[_ALONE]][["loss", RATIOS["cheap"].title]]
    groups = {title: group for title, group in groups.items() if len(group)}
    sections = "\n\n".join(f"## {title}\n\n{write.to_markdown(group)}" for title, group in groups.items())
    terms = "\n".join(f"- **{markdown(term)}**: {markdown(text)}" for term, text in TERMS.items())
    notes = f"{' '.join(map(markdown, lines))}\n\n## How to read this\n\n{terms}"
    text = f"# Board of {VERSION}\n\n![What moving routes cost](board.png)\n\n{sections}\n\n{notes}\n"
    html = page(f"Board of {VERSION}", found, groups, lines, REFERENCE)
    return [*draw(found, board), *write.text_files(board, {"board.md": text, "board.html": html})]


def picture(found: Sequence[Score]) -> DataFigure:
    """Return the picture of the losses that ran with free routes."""
    shown = {each.loss: paper.shown(each.loss, each.algorithm) for each in found}
    numbers = {
        side: {shown[each.loss]: each.numbers[name] for each in found if {name, "rate"} <= each.numbers.keys()}
        for side, name in (("free", "rate"), ("pinned", "pinned"), ("dense", "dense"))
    }
    return tolerance.routing_costs(numbers, {shown[each.loss]: each.closed for each in found if each.closed.n})


def draw(found: Sequence[Score], folder: Path) -> list[Path]:
    """Write the picture, ``board.png`` and ``board.svg``, to a folder and return the paths."""
    paths = [files.folder(folder) / f"board.{suffix}" for suffix in ("png", "svg")]
    with _published():
        drawn = picture(found)
        for path in paths:
            files.write(path, partial(drawn.write, suffix=path.suffix[1:]))
    return paths


def _published() -> AbstractContextManager[None]:
    names = paper.published()
    changes = {f"{REFERENCE} {change}": f"{names[REFERENCE]}, {name}" for change, name in CHANGES.items()}
    return paper.used(paper.Paper(caption=True, names=names | changes))


def page(
    title: str,
    found: Sequence[Score],
    tables: Mapping[str, pd.DataFrame],
    notes: Sequence[str],
    own: str,
    command: str = "",
) -> str:
    """Return a page: the picture of ``found``, the tables, the notes; the row whose loss is ``own`` stands out."""
    with _published():
        pictures = [draw(partial(picture, found)) for draw in (style.svg, style.narrow_svg)]
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

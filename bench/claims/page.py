"""``docs/claims.md``: the verdicts of the recorded runs, with a figure for each claim and one of all."""

import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from steadymoe.bench import atomic, draw, pool, tables
from steadymoe.bench.claims.arms import CONTENDERS, TUNED, UNCLIPPED
from steadymoe.bench.claims.effects import best
from steadymoe.bench.claims.registry import CLAIMS
from steadymoe.bench.claims.study import Arm, NotRun, Study
from steadymoe.bench.claims.verdict import Claim, Finding, Verdict, findings, learning, testbed
from steadymoe.bench.figures import FIGURES, FORMATS, Paper, points
from steadymoe.bench.stats import over_seeds

_HEADLINE = Paper("outcomes", "outcomes", points.outcomes, "study", takes=("outcomes",))
_HEAD = """# What papers claim, and what the reference study found

Made by `make figures` from `results/reference/data`; a test makes it again and compares. Questions, outcomes and
thresholds were fixed in [protocol.md](protocol.md) before the runs; `make reference` runs them again. Effects are
means over seeds with a 95 % interval (from ten seeds a BCa bootstrap), differences seed by seed, ratios geometric
means; areas under ROC curves have Newcombe's interval. *Supported*: the whole interval lies where it was claimed;
*contradicted*: wholly elsewhere; otherwise *not decided*. All of it at this scale: 0.45 M parameters and one task.
"""


class Verdicts:
    """Every claim on what is recorded below ``results``. Raises NotRun if the testbed itself has not run."""

    def __init__(self, results: Path) -> None:
        self.study = Study(results)
        self.valid, self.testbed = testbed(self.study, UNCLIPPED, CONTENDERS)
        self.found = {
            claim.number: findings(self.study, claim.outcomes, self.valid or not claim.stability) for claim in CLAIMS
        }

    def of(self, claim: Claim) -> Verdict:
        """The verdict of a whole claim."""
        return claim.verdict([each.verdict for each in self.found[claim.number]])

    def told(self, claim: Claim) -> str:
        """The same, and where its outcomes disagree, that they do."""
        verdicts = {each.verdict for each in self.found[claim.number]}
        mixed = {"supported", "contradicted"} <= verdicts
        return f"{self.of(claim)}: in part supported, in part contradicted" if mixed else self.of(claim)

    def table(self) -> pd.DataFrame:
        """One row per outcome: claim, outcome, effect, n, claimed, verdict, what would decide it."""
        return pd.DataFrame([_row(number, each) for number, found in self.found.items() for each in found])

    def texts(self) -> dict[str, str]:
        """File name → text of the table."""
        rows = self.table()
        return {
            "claims.md": tables.to_markdown(rows) + "\n",
            "claims.csv": tables.to_numbers(rows).to_csv(index=False),
            "claims.tex": tables.to_latex(rows),
        }

    def page(self, figures: str) -> str:
        """``docs/claims.md``; ``figures`` is the folder of the figures, from the page's own."""
        shown = f"![{_HEADLINE.caption}]({figures}/{draw.stem(_HEADLINE, 'claims')}.png)"
        lines = [
            _HEAD,
            self.testbed,
            "",
            learning(self.study, CONTENDERS),
            "",
            self.tuned(),
            "",
            shown,
            "",
            self.summary(),
        ]
        for claim in CLAIMS:
            lines += ["", f"## Claim {claim.number}", "", f"{claim.statement} ({claim.source})", ""]
            rows = [_row(claim.number, each) for each in self.found[claim.number]]
            lines += [tables.to_markdown(pd.DataFrame(rows).drop(columns="claim")), ""]
            lines += [f"**{self.told(claim).capitalize()}.** {claim.limits}", ""]
            if rows := [_row(claim.number, each) for each in findings(self.study, claim.exploratory, valid=False)]:
                looked_at = pd.DataFrame(rows)[["outcome", "effect", "n"]]
                lines += ["Exploratory, part of no verdict:", "", tables.to_markdown(looked_at), ""]
            lines += [
                *self._shown(claim, figures),
                f"Runs: {', '.join(f'`experiment={name}`' for name in claim.experiments)}.",
            ]
        return "\n".join(lines) + "\n"

    def tuned(self) -> str:
        """The settings that were best on the seeds that were left out."""
        try:
            found = [best(self.study, algorithm).label for algorithm in TUNED]
        except NotRun as missing:
            return f"Nothing is tuned: {missing} has not run."
        return f"Best on the two seeds that were left out: {'; '.join(found)}."

    def summary(self, page: str = "") -> str:
        """The verdict on each claim, with links into ``page``."""
        rows = [
            f"| [{claim.number}]({page}#claim-{claim.number}) | {claim.statement} | {self.told(claim)} |"
            for claim in CLAIMS
        ]
        return "\n".join(["| | claim | verdict |", "|---|---|---|", *rows])

    def _shown(self, claim: Claim, figures: str) -> list[str]:
        """The arms of a claim as a table, and its figure."""
        arms = self.arms(claim)
        if arms.empty:
            return []
        paper = FIGURES[claim.figure] if claim.number in self.drawn else None
        figure = [f"![{paper.caption}]({figures}/{draw.stem(paper, name(claim))}.png)", ""] if paper else []
        return [tables.to_markdown(arms), "", *figure]

    def arms(self, claim: Claim) -> pd.DataFrame:
        """Of each arm that has run: n, collapsed runs, reward of the first and of the last steps; the highest first."""
        rows: list[dict[str, Any]] = []
        for arm in sorted(self.there(claim), key=lambda arm: -self.study.final(arm).mean()):
            collapsed, n = self.study.collapsed(arm)
            ends = {"first reward": self.study.first(arm), "final reward": self.study.final(arm)}
            estimates = {what: over_seeds(values.tolist()) for what, values in ends.items()}
            rows.append({"arm": arm.label, "n": n, "collapsed": collapsed} | estimates)
        return pd.DataFrame(rows)

    def there(self, claim: Claim) -> list[Arm]:
        """The arms of a claim that have run."""
        return [arm for arm in claim.arms if self.study.has(arm)]

    @cached_property
    def drawn(self) -> dict[int, dict[str, pd.DataFrame]]:
        """By claim the tables that its figure is drawn from, where all of its arms have run and nothing is lacking."""
        found = {}
        for claim in CLAIMS:
            if self.there(claim) == list(claim.arms):
                data = draw.data(self.study.tables(claim.arms), FIGURES[claim.figure].takes)
                if FIGURES[claim.figure].lacks(data) is None:
                    found[claim.number] = data
        return found

    def figures(self) -> list[tuple[Paper, str, dict[str, pd.DataFrame]]]:
        """Every figure that can be drawn: the paper's, what it is named by, and the tables it is drawn from."""
        in_reward = [
            {"claim": number, "outcome": each.outcome.what, "side": each.outcome.side}
            | {"threshold": each.outcome.threshold, "effect": each.effect, "verdict": each.verdict}
            for number, found in self.found.items()
            for each in found
            if each.outcome.unit == "reward" and each.effect.n
        ]
        every = [(_HEADLINE, "claims", {"steps": pd.DataFrame(), "outcomes": pd.DataFrame(in_reward)})]
        by_number = {claim.number: claim for claim in CLAIMS}
        claims = [(by_number[number], data) for number, data in self.drawn.items()]
        return every + [(FIGURES[claim.figure], name(claim), data) for claim, data in claims]


def make(results: Path, page: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write ``tables/claims.*`` and the figures below ``results``, and the page. Raises NotRun as ``Verdicts`` does.

    Figures in ``formats``, and as png, which the page shows.
    """
    verdicts = Verdicts(results)
    figures = Path(os.path.relpath(results / "figures", page.parent)).as_posix()
    texts = {results / "tables" / file: text for file, text in verdicts.texts().items()} | {
        page: verdicts.page(figures)
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, partial(Path.write_text, data=text))
    written = list(texts)
    papers, *others = zip(*verdicts.figures(), strict=True)
    drawn_as = tuple(dict.fromkeys((*formats, "png")))
    drawn = pool.in_processes(partial(_draw, results, drawn_as), [paper.id for paper in papers], *others)
    return written + [path for files in drawn for path in files]


def _draw(results: Path, formats: Sequence[str], id: str, named: str, data: dict[str, pd.DataFrame]) -> list[Path]:
    paper = _HEADLINE if id == _HEADLINE.id else FIGURES[id]
    return draw.write(paper, paper.figure(data), results, named, formats)


def name(claim: Claim) -> str:
    """What the files of a claim begin with."""
    return f"claim{claim.number:02}"


def _row(number: int, found: Finding) -> dict[str, Any]:
    outcome = found.outcome
    row = {"claim": number, "outcome": outcome.what, "effect": found.effect, "n": found.effect.n}
    return row | {"claimed": outcome.claimed, "verdict": found.verdict, "what would decide it": found.decides}

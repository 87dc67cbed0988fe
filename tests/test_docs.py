"""Links and commands of the pages work, and generated pages are fresh."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import generate
import pytest
from builds import ROOT
from fixtures import on_path, tutorial, write_all

from steadymoe.bench import cli
from steadymoe.bench.runs import compose
from steadymoe.bench.runs.overrides import composing, swept

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
PAGES += [page for folder in ("docs", "integrations") for page in (ROOT / folder).glob("*.md")]


def prose(path: Path) -> str:
    """A page without its blocks of code, in which brackets are no links and # is no heading."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What a link into a page can name: its headings, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_has_a_target() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append((page.name, link))
    assert not broken


def test_commands_of_the_pages_exist_with_their_flags_and_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a sweep the first point is composed; the tutorial's own configs are those that it has a user write."""
    write_all(tmp_path, tutorial())
    on_path(monkeypatch, tmp_path, "my_losses", "my_tasks")
    lines: set[str] = set()
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        lines |= set(re.findall(r"^(?:STEADYMOE_PATH=\S+ )?steadymoe (.*)$", text, re.MULTILINE))
        lines |= set(re.findall(r"`steadymoe (run [^`…<]+=[^`…<]+)`", prose(page)))
    assert len(lines) > 20
    for line in sorted(lines):
        verb, *words = shlex.split(line, comments=True)
        flags = {word for word in words if word.startswith("--")}
        if flags:
            monkeypatch.setattr(sys, "argv", ["steadymoe", verb, *filter(str.isidentifier, words[:1]), "--help"])
            with pytest.raises(SystemExit):
                cli.main()
            assert flags <= set(re.findall(r"--[\w-]+", capsys.readouterr().out)), line
        overrides = [word for word in words if "=" in word and not re.search(r"\(|^(hydra|log=)", word)]
        if verb in ("run", "score") and overrides:
            several = swept(overrides)
            with composing():
                assert compose.run([word.partition(",")[0] if word in several else word for word in overrides])


@pytest.mark.parametrize(
    ("page", "generated"), [("algorithms.md", generate.algorithms_page), ("metrics.md", generate.columns_section)]
)
def test_generated_pages_are_up_to_date(page: str, generated: Callable[[], str]) -> None:
    assert (ROOT / "docs" / page).read_text().endswith(generated())

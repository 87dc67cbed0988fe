"""Docstrings, comments, messages and pages name the noun itself, in place of a word that points back to it."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_BENCH = (
    *("support", "tasks", "statistics", "config", "training", "runs", "report", "claims", "speed"),
    *("audit", "bundles", "calibration", "check", "trainers", "scores"),
)
ROOMS = ("algorithms", "models", "plugins", *(f"bench/{room}" for room in OF_BENCH))
# docs/protocol.md is left out: it was committed before the runs and stays as it was registered.
PAGES = (
    *("metrics", "routing", "models", "sweeps", "speed", "backends", "shapes", "algorithms", "claims", "choices"),
    *("architecture", "commands", "glossary", "python", "quickstart", "calibration", "audit", "bundle"),
    *("conformance", "on_your_trainer", "your_algorithm", "board", "gates", "first_testbed", "clipping"),
)
POINTERS = re.compile(
    r"\b(that of|those of|that on|those on|the latter|the former|likewise|of which|for which|from which|what there is"
    r"|who wants|the same of)\b",
    re.IGNORECASE,
)


def prose(path: Path) -> str:
    """Comments and texts of a Python file, comments of a YAML file, or a whole page, without code between backticks."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
        text = "\n".join(token.string for token in tokens if token.type in kinds)
    elif path.suffix == ".yaml":
        text = "\n".join(line.partition("#")[2] for line in text.splitlines())
    return " ".join(re.sub(r"`[^`\n]+`", "", text).split())


def files() -> list[Path]:
    code = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    configs = (ROOT / "conf").rglob("*.yaml")
    return sorted([*code, *configs, ROOT / "results" / "README.md", *(ROOT / "docs" / f"{page}.md" for page in PAGES)])


@pytest.mark.parametrize("room", [*ROOMS, "conf", "docs", "results"])
def test_no_sentence_points_back_to_a_noun_that_it_could_name(room: str) -> None:
    inside = [path for path in files() if path.is_relative_to(ROOT / room)]
    assert inside
    found = {
        f"{path.relative_to(ROOT)}: …{text[max(0, match.start() - 40) : match.end() + 20]}…"
        for path in inside
        for text in [prose(path)]
        for match in POINTERS.finditer(text)
    }
    assert not found


def test_the_words_are_seen_in_comments_and_in_texts(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""The rule is that of\nthe paper."""\nname = that_of  # the latter\nshown = f"{name}, likewise"\n'
    )
    assert [match.lower() for match in POINTERS.findall(prose(module))] == ["that of", "the latter", "likewise"]

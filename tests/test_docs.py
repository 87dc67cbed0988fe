"""Links, commands, names and tables of README, CONTRIBUTING and docs/ are right, and generated pages are fresh."""

import pkgutil
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import generate
import pytest
from fixtures import on_path, tutorial, write_all
from small_runs import SMALL

from steadymoe import bench, conf
from steadymoe.algorithms import names, provenance
from steadymoe.bench import cli
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.runs import compose
from steadymoe.bench.runs.overrides import composing, swept

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
PAGES += [page for folder in ("docs", "integrations") for page in (ROOT / folder).glob("*.md")]
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "results" / "reference"
# Packages of an extra, which the environment of these tests need not have.
EXTRAS = {"accelerate", "datasets", "trl", "trainer", "register"}
# A user's own files, which pages show and the checkout does not have.
USERS = {"conf/algorithm/half_clipped.yaml", "conf/algorithm/mine.yaml", "conf/task/reverse.yaml"}
USERS |= {"conf/model/shallow.yaml", "conf/experiment/reversal.yaml"}


def prose(path: Path) -> str:
    """A page without its blocks of code, in which brackets are no links and # is no heading."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What a link into a page can name: its headings, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    seen: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def commands(page: str) -> list[list[str]]:
    """The words of every command ``steadymoe …`` of a page that stands on a line of its own."""
    lines = re.findall(r"^((?:STEADYMOE_PATH=\S+ )?steadymoe .*)$", (ROOT / page).read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_index_has_every_page_once() -> None:
    linked = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert sorted(["README.md", *linked]) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_modules_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    folders = "bench|models|algorithms|integrations|tests|conf|examples"
    files = set(re.findall(rf"(?<![\w/.<])(?:{folders})/[\w/@.<>-]+\.\w+", text)) - USERS
    places = (ROOT, page.parent)
    missing = {name for name in files if "<" not in name and not any((place / name).exists() for place in places)}
    for name in set(re.findall(r"\bsteadymoe(?:\.\w+)+", text)):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            if getattr(error, "name", None) not in EXTRAS:
                missing.add(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_named_in_the_docs_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    assert set(re.findall(r"`make ([\w-]+)", text)) | set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) <= targets


def assert_composes(overrides: list[str]) -> None:
    """The overrides of a command name existing fields and choices; of a sweep its first point is composed."""
    several = swept(overrides)
    with composing():
        assert compose.run([word.partition(",")[0] if word in several else word for word in overrides])


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md", "docs/your_algorithm.md"])
def test_commands_in_the_docs_exist_with_their_flags(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["steadymoe", *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None), words
        return capsys.readouterr().out

    for words in commands(page):
        verb, *rest = words[words.index("steadymoe") + 1 :]
        flags = {word for word in rest if word.startswith("--")}
        if flags:
            text = shown(verb, *(word for word in rest[:1] if word.isidentifier()))
            assert flags <= set(re.findall(r"--[\w-]+", text)), words
        overrides = [word for word in rest if "=" in word and "(" not in word]
        is_own = re.search("half_clipped|reversal", " ".join(words))  # the tutorial's
        if verb in ("run", "score") and overrides and not is_own:
            assert_composes(overrides)


def test_inline_commands_are_parsed() -> None:
    found = {line for page in PAGES for line in re.findall(r"`steadymoe run ([^`]+=[^`]+)`", prose(page))}
    lines = [line.split() for line in found if not set(line) & {"…", "<"} and "--" not in line]
    assert len(lines) >= 2
    for words in lines:
        assert_composes([word for word in words if not word.startswith("-")])


def test_sweep_of_the_tutorial_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["my_losses.py", "conf/algorithm/half_clipped.yaml"]
    files = tutorial()  # test_cli.py, tests/check and tests/report run them
    assert list(files)[:2] == ours
    assert files["my_losses.py"].count("\n") <= 18
    write_all(tmp_path / "mine", {name: files[name] for name in ours})
    (command,) = [words for words in commands("docs/your_algorithm.md") if words[:3] == ["steadymoe", "run", "-m"]]
    monkeypatch.chdir(tmp_path)
    on_path(monkeypatch, tmp_path / "mine", "my_losses")
    planned = bench.plan(*command[3:], *(word for word in SMALL if word != "model=micro"), "updates=2")
    assert [(run.choices["algorithm"], run.config.seed) for run in planned] == [
        (name, seed) for name in ("half_clipped", "grpo") for seed in range(3)
    ]


def test_the_readme_names_every_reconstruction() -> None:
    limits = README.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in limits for name in names() if provenance(name) == "reconstruction")


def test_figure_table_lists_every_figure_and_experiment() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| .+ \| `(\w+)`, `(\w+)` \| `(\w+)` \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted((each.id, each.name, each.experiment) for each in FIGURES.values())


@pytest.mark.parametrize(
    ("page", "generated"),
    [
        ("algorithms.md", generate.algorithms_page),
        ("metrics.md", generate.columns_section),
    ],
)
def test_generated_pages_are_up_to_date(page: str, generated: Callable[[], str]) -> None:
    assert (ROOT / "docs" / page).read_text().endswith(generated())


def test_every_config_group_is_documented() -> None:
    assert {"algorithm", *generate._GROUPS} == set(conf.groups())


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "bench").glob("*/__init__.py"):
        assert f"| `bench/{path.parent.name}/` |" in text

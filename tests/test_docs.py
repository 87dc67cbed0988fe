"""Links, commands, names and tables of README, CONTRIBUTING and docs/ are right, and generated pages are fresh."""

import pkgutil
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from test_execute import SMALL

from steadymoe import bench
from steadymoe.algorithms import names, provenance
from steadymoe.bench import cli
from steadymoe.bench.check import request as check_request
from steadymoe.bench.config import compose
from steadymoe.bench.measurement import columns, columns_page
from steadymoe.bench.report import algorithm_page, archive, choices_page, tables
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.runs import outcome
from steadymoe.bench.score import arguments as score_arguments
from steadymoe.bench.statistics.comparisons import seeds_needed
from steadymoe.bench.statistics.estimates import DIFFERENCE, over_seeds
from steadymoe.bench.study import experiments
from steadymoe.bench.support import external
from steadymoe.bench.support.findings import ask

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md", *(ROOT / "docs").glob("*.md")]
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "results" / "reference"
# Packages of an extra, which the environment of these tests need not have.
EXTRAS = {"accelerate", "datasets", "trl", "register_verl"}
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
def test_every_link_leads_somewhere(page: Path) -> None:
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
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    folders = "bench|models|algorithms|plugins|tests|conf|losses|examples"
    files = set(re.findall(rf"(?<![\w/.<])(?:{folders})/[\w/@.<>-]+\.\w+", text)) - USERS
    missing = {name for name in files if "<" not in name and not (ROOT / name).exists()}
    for name in set(re.findall(r"\bsteadymoe(?:\.\w+)+", text)):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            if getattr(error, "name", None) not in EXTRAS:
                missing.add(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    assert set(re.findall(r"`make ([\w-]+)", text)) | set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md"])
def test_every_command_is_understood(page: str) -> None:
    made = set(archive.experiments(REFERENCE))
    for words in commands(page):
        if words[0].startswith("STEADYMOE_PATH="):
            made |= {word.partition("=")[2] for word in words if word.startswith("experiment_name=")}
            continue  # test_the_readmes_own_loss_is_trained
        if words[1] == "run":
            runs = compose.plan([word for word in words[2:] if word != "-m"], multirun="-m" in words)
            made |= {run.config.experiment_name for run in runs}
        elif words[1] == "audit" and words[2] != "report":
            assert compose.plan([word for word in words[2:] if not word.startswith("--")], multirun=True)
        elif words[1:3] == ["study", "run"]:
            assert experiments.chosen([word for word in words[3:] if "=" not in word and not word.startswith("--")])
        elif words[1] == "check":
            assert check_request.read(words[2:]).name in names(presets=True)
        elif words[1] == "score":
            given = score_arguments.read(cli._Parser(), words[2:])
            assert given.verify or check_request.read(given.overrides).name in names(presets=True)
        else:
            given = cli._parser().parse_args(words[1:])
            made |= {given.experiment} if words[1] == "import" else set()
            assert words[1] == "audit" or getattr(given, "experiment", None) in {None, *made}, words
    assert {words[1] for words in commands("README.md")} >= {"run", "report", "figures", "status"}


def test_commands_within_a_sentence_are_understood() -> None:
    found = {line for page in PAGES for line in re.findall(r"`steadymoe run ([^`]+=[^`]+)`", prose(page))}
    asked = [line.split() for line in found if not set(line) & {"…", "<"} and "--" not in line]
    assert len(asked) >= 2
    with compose._hydra():
        for words in asked:
            plain = [word for word in words if not word.startswith("-")]
            swept = compose.swept(plain)  # of a sweep its first point
            assert compose.run([word.partition(",")[0] if word in swept else word for word in plain])


def test_the_readmes_own_loss_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = re.findall(r"`~/mine/([\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)```", README, re.DOTALL)
    assert [name for name, _ in files] == ["my_losses.py", "conf/algorithm/half_clipped.yaml"]
    assert files[0][1].count("\n") <= 18
    for name, text in files:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    (command,) = [words for words in commands("README.md") if words[0].startswith(external.VARIABLE)]
    assert command[:4] == [f"{external.VARIABLE}=~/mine", "steadymoe", "run", "-m"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(external.VARIABLE, str(tmp_path / "mine"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    planned = bench.plan(*command[4:], *(word for word in SMALL if word != "model=micro"), "steps=1")
    assert [(run.choices["algorithm"], run.config.seed) for run in planned] == [
        (name, seed) for name in ("half_clipped", "grpo") for seed in range(3)
    ]
    config = compose.plan(["algorithm=half_clipped"])[0].config
    asked = check_request.questions(check_request.read(["algorithm=half_clipped"]), config)
    assert all(found.passed for found in ask({name: asked[name] for name in asked if name != "share of a step"}))
    assert bench.run(planned[0]) == "finished"
    assert bench.results("mine")["runs"]["arm"].tolist() == ["half_clipped"]


def test_the_files_that_the_readme_says_are_written_are_those_of_the_reference() -> None:
    wrote = re.findall(r"`wrote results/([^`]+)`", README)
    assert wrote[-1] == "report.html"
    assert all((REFERENCE / name).exists() for name in wrote[:-1])


def test_what_the_quick_starts_page_says_is_in_its_data() -> None:
    kept = archive.load(REFERENCE, "quickstart")
    steps = kept["steps"]
    curves = steps[steps["metric"] == "reward"].sort_values("step").groupby(["arm", "seed"], observed=True)["value"]
    ends = {arm: curves.get_group(arm).iloc[-5:].mean() for arm in curves.groups}
    risen = {name: sum(ends[arm] > curves.get_group(arm).iloc[0] for arm in ends if arm[0] == name) for name, _ in ends}
    assert risen == {"gspo": 3, "grpo": 3, "grpo_unclipped": 0}

    def mean(metric: str, **where: int) -> pd.Series:
        chosen = steps[steps["metric"] == metric]
        for name, value in where.items():
            chosen = chosen[chosen[name] == value]
        return chosen.groupby("arm", observed=True)["value"].mean()

    assert mean("expert_change_per_update").between(0.045, 0.06).all()
    assert mean("expert_change_rate", step=1).between(0.35, 0.45).all()
    assert mean("expert_change_per_update", step=1).between(0.095, 0.105).all()
    last = mean("expert_change_rate", step=12).round(2)
    assert last.to_dict() == {"gspo": 0.09, "grpo": 0.09, "grpo_unclipped": 0.16}
    variances = tables.summary(steps, kept["runs"]).set_index("arm")["token-ratio variance"]
    assert variances["grpo_unclipped"].mean > 5 * max(variances[arm].mean for arm in ("grpo", "gspo"))
    gain = [ends["gspo", seed] - ends["grpo", seed] for seed in range(3)]
    assert min(gain) > 0
    difference = over_seeds(gain, bounds=DIFFERENCE)
    assert difference.low < 0 < difference.mean
    clipped = mean("clip_fraction")
    assert 3 < clipped["gspo"] / clipped["grpo"] < 10


def test_the_readme_names_every_reconstruction() -> None:
    limits = README.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in limits for name in names() if provenance(name) == "reconstruction")


def test_the_page_of_figures_has_every_figure_its_command_and_its_experiment() -> None:
    page = (ROOT / "docs" / "figures.md").read_text()
    rows = re.findall(r"^\| .+ \| `(\w+)`, `(\w+)` \| `steadymoe figures (\w+)` \| `(\w+)` \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted((each.id, each.name, each.id, each.experiment) for each in FIGURES.values())


@pytest.mark.parametrize(
    ("page", "made"), [("algorithms.md", algorithm_page.markdown), ("choices.md", choices_page.markdown)]
)
def test_a_generated_page_is_fresh(page: str, made) -> None:
    assert (ROOT / "docs" / page).read_text() == made()


def test_the_glossary_has_every_word_for_the_end_of_a_run() -> None:
    section = (ROOT / "docs" / "glossary.md").read_text().partition("\n## How a run ends\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z ]+) \| .+ \|$", section, re.MULTILINE) == ["word", *outcome.TERMS]


@pytest.mark.parametrize("table", columns.TABLES)
def test_every_column_is_explained(table: str) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text.endswith(columns_page.section())
    assert not {name for name in columns.TABLES[table] if f"| `{name}` |" not in text}


@pytest.mark.parametrize("group", choices_page._GROUPS)
def test_every_choice_is_on_its_page(group: str) -> None:
    text = (ROOT / "docs" / "choices.md").read_text()
    for path in (compose.CONF / group).glob("*.yaml"):
        assert f"| `{path.name.removesuffix('.yaml')}` | {choices_page.told(group, path.name[:-5])} |" in text
    assert set(choices_page._GROUPS) == {path.name for path in compose.CONF.iterdir() if path.is_dir()}


# What must stand in the first file that docs/architecture.md names as the answer to a question.
ANSWERS = {
    "the clip of GSPO?": "clip_low: 3",
    "what all clipped losses share?": "class ClippedLoss",
    "what TRL's trainer does under the suite's losses, and what is refused there?": "class SteadyGRPOTrainer",
    "how columns add up over micro-batches and processes?": "def pooled(",
    "how verl calls the losses, and what it cannot feed?": "def reason_against(",
    "which columns of another trainer's log are read?": "VERL = {",
    "what `steadymoe check` asks of a loss, and on what data?": "def zero_advantage(",
    "what a score is made of?": "STABILITY = Part(",
    "what an entry of the board may hold, and how the board ranks?": "def _problems(",
    "how rewards become advantages?": "class GroupMeanStd",
    "the order of the stages of a step?": "def step(",
    "the definition of expert change?": "def change(",
    "a column's meaning or type?": "expert_change_rate",
    "what is written after a step?": "class StepRows",
    "the rule of collapse?": "class Rule",
    "how a confidence interval is computed?": "bootstrap",
    "the colour of GRPO?": "COLOURS",
    "which figures there are, and what each needs?": "fig05",
    "the text of an error about a config?": "ConfigError",
    "what makes two runs the same run?": "def config_hash",
    "what `steadymoe run` refuses before it starts?": "def refuse_others",
    "how runs reach Hydra's launchers, and what a job does first?": "def _job(",
    "which gates a claim needs?": "STRESS",
    "what the study runs, and under which names?": "_REFERENCE = (",
    "the gates of the standard settings, and their thresholds?": "LEAST_TWIN_GAIN",
    "how many seeds a comparison takes, by its design?": "class Design",
    "the published numbers of real models, and what is compared with them?": "ROWS = (",
    "what `steadymoe audit` measures, and the formula of each estimate?": "def audit(",
    "the tables and figures of audits, and how audits are joined?": "def over_drift",
    "what a bundle holds, and what is checked when it is read?": "class Bundle",
    "the columns that `steadymoe bundle convert` reads?": "COLUMNS",
    "the lines that another trainer must pass?": "def lines(",
    "what the sampler does differently from the trainer?": "class RouterNoise",
    "how routes are replayed?": "replay",
    "what is compiled?": "class _CompiledLayer",
    "the prompts and the score of a task?": "def score(",
}


def test_the_architecture_answers_where_to_change_what() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where do I change")[2]
    rows = dict(re.findall(r"^\| (.*?\?) \| (.*) \|$", table, re.MULTILINE))
    assert len(rows) >= 10
    assert rows.keys() == ANSWERS.keys()
    for question, answer in rows.items():
        places = re.findall(r"`([\w/.]+)`", answer)
        assert places
        assert all((ROOT / place).exists() for place in places), question
        assert ANSWERS[question] in (ROOT / places[0]).read_text(), question


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "bench").glob("*/__init__.py"):
        assert f"| `bench/{path.parent.name}/` |" in text


def test_the_cost_of_a_decision_is_that_of_the_gates_page_and_of_the_recorded_audit() -> None:
    def cells(page: str) -> list[list[str]]:
        lines = (ROOT / "docs" / page).read_text().splitlines()
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]

    told = {(row[0], row[1]): row[2:] for row in cells("speed.md") if len(row) == 5}
    gates = {(row[0], row[2]): [row[4], row[6], row[7]] for row in cells("gates.md") if len(row) == 8}
    assert len(told) == 8  # with the head
    for key, numbers in told.items():
        if key[0] in ("whole runs", "branches of one trunk"):
            assert numbers == gates[key]
    audits = pd.read_parquet(ROOT / "results" / "reference" / "audits" / "audit" / "audits.parquet")
    chosen = (audits["quantity"] == "usefulness") & (audits["block"] == "whole") & (audits["k"] == 16)
    chosen &= (audits["cut"] == "before") & (audits["routing"] == "free")
    by_loss = audits[chosen].pivot_table(index="checkpoint", columns="loss", values="value")
    apart = by_loss["gspo"] - by_loss["grpo"]
    needed = seeds_needed(apart.tolist(), 0.05)
    assert told["audit", "usefulness"] == [f"{apart.std():.2g}", str(needed), f"{needed * 8.5:.0f}"]

"""What a paper asks of figures: captions beside them, its names, its style and width; nothing of it by accident."""

import itertools
import re
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from fixtures import RECORDED, Said
from legibility import faults
from PIL import Image
from small_figures import NAMES, arms, data, long_table

from steadymoe import conf
from steadymoe.bench.report import paper, report_page
from steadymoe.bench.report.figures import FIGURES, colours, style
from steadymoe.bench.report.paper import Paper
from steadymoe.bench.report.results import Results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Results.load(RECORDED, "small").keep("small", tmp_path)
    return tmp_path


@pytest.fixture
def drawn(folder: Path, ran: Said) -> Said:
    """The SVG of fig02, drawn with some flags."""

    def draw(*words: str, suffix: str = "svg") -> str:
        common = ["--figure", "fig02", "--experiment", "small", "--results", str(folder), "--format", suffix]
        assert "small-fig02-clip_fraction.csv" in ran("report", *common, *words)
        return (folder / "figures" / f"small-fig02-clip_fraction.{suffix}").read_text(errors="replace")

    return draw


def test_caption_is_beside_or_inside_the_figure(folder: Path, drawn: Said) -> None:
    beside = folder / "figures" / "small-fig02-clip_fraction.txt"
    assert "mean over steps" not in drawn()
    text = beside.read_text()
    assert text.startswith(FIGURES["fig02"].caption)
    assert "Bar: mean over steps and seeds (n = 3); dots: seeds. No clip: REINFORCE." in text
    beside.unlink()
    assert "mean over steps" in drawn("--caption")
    assert not beside.exists()


def test_names_come_from_papers_the_user_or_the_command_line(folder: Path, ran: Said, drawn: Said) -> None:
    table = folder / "tables" / "small-fig02-clip_fraction.csv"

    def series() -> list[str]:
        return [line.split(",")[1] for line in table.read_text().splitlines()[1:]]

    drawn()
    assert series() == ["GRPO", "GSPO"]
    assert ">Ours<" in drawn("--names", "gspo = Ours")
    assert series() == ["GRPO", "Ours"]
    drawn("--names", "", "--arms", "gspo")
    assert series() == ["gspo"]
    drawn("--arms", "GSPO")
    assert series() == ["GSPO"]
    kept = Results.load(folder, "small").runs
    ran("report", "--results", str(folder), "--keep", str(folder / "again"))
    assert Results.load(folder / "again", "small").runs["arm"].tolist() == kept["arm"].tolist()


def test_algorithm_names_are_unique() -> None:
    names = paper.published()
    shipped = {name for name in conf.names("algorithm") if "@" not in name}
    assert set(names) == shipped
    assert len(set(names.values())) == len(names)
    assert (names["grpo"], names["dr_grpo"], names["minirl"]) == ("GRPO", "Dr. GRPO", "MiniRL")


def test_renaming_does_not_change_the_look() -> None:
    steps = long_table({"reward": lambda arm, seed: 0.5}, arms(algorithm=["grpo", "dr_grpo", "gspo@verl-0.9"]))
    variant = steps[steps["algorithm"] == "grpo"].assign(arm="grpo routing=r2", routing="r2")
    for table in (steps, pd.concat([steps, variant])):
        plain = colours.of_lines(table)
        full = {"grpo routing=r2": "GRPO + R2"}
        with paper.used(Paper(names=paper.published() | full)):
            renamed = paper.rename(table)
            named = colours.of_lines(renamed)
            algorithms = dict(zip(renamed["arm"], renamed["algorithm"], strict=True))
            back = {paper.recorded(name, algorithms[name]): look for name, look in named.items()}
        assert set(named) <= {"GRPO", "Dr. GRPO", "GSPO@verl-0.9", "GRPO + R2"}
        assert back == plain


def test_columns_set_the_width_of_every_figure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ran: Said, drawn: Said
) -> None:
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"], FIGURES["fig02"]])  # for time
    ran("report", "--results", str(folder), "--experiment", "small", "--format", "png", "--columns", "1")
    pictures = list((folder / "figures").glob("*.png"))
    assert len(pictures) == 2
    assert {Image.open(path).width for path in pictures} == {1020}
    drawn("--columns", "2", suffix="png")
    assert Image.open(folder / "figures" / "small-fig02-clip_fraction.png").width == 2040


@pytest.mark.parametrize("count", [9, *(pytest.param(many, marks=pytest.mark.check) for many in (1, 3, len(NAMES)))])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_legible_from_one_arm_to_all_algorithms(name: str, count: int) -> None:
    figure = FIGURES[name].figure(data(name, sorted(NAMES, key=len, reverse=True)[:count]))
    figure.draw_without_rendering()
    assert faults(figure) == []


@pytest.mark.parametrize("columns", [1, pytest.param(2, marks=pytest.mark.check)])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_legible_in_either_width(name: str, columns: int) -> None:
    with paper.used(Paper(columns=columns)):
        figure = FIGURES[name].figure(data(name, ["dr_grpo", "gspo"]))
        figure.draw_without_rendering()
        assert figure.get_figwidth() == {1: style.ONE_COLUMN, 2: style.TWO_COLUMNS}[columns]
        assert faults(figure) == []


def test_the_users_matplotlibrc_changes_no_figure(drawn: Said) -> None:
    before = drawn(suffix="png")
    for theirs in ({"savefig.bbox": "tight", "lines.linewidth": 4, "font.family": "serif"}, {"text.usetex": True}):
        with mpl.rc_context(theirs):
            assert drawn(suffix="png") == before
            assert all(mpl.rcParams[key] in (value, [value]) for key, value in theirs.items()), "theirs are back"


def test_overview_stacks_its_panels_on_a_narrow_screen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"]])  # for time
    report_page.make(folder, "small", ["svg"])
    page = (folder / "report.html").read_text()
    assert len(re.findall(r'<source media="\(max-width: 40rem\)" srcset="data:image/svg', page)) == 1
    assert "Mean over seeds" in page  # the caption is on the page, as it is in no image
    with paper.used(Paper(columns=1, stacked=True)):
        figure = FIGURES["overview"].figure(Results.load(RECORDED, "small"))
    figure.draw_without_rendering()
    boxes = [axis.get_window_extent() for axis in figure.axes]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert faults(figure) == []

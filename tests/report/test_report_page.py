"""The report is made from recorded runs alone: ``tests/recorded`` holds nine small ones, really made."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from fixtures import RECORDED, edit, on_path, tutorial, write_all
from small_figures import curve_table
from small_runs import finished

from steadymoe.bench.report import figures, folders, report_page, tables, write
from steadymoe.bench.report.figures import FIGURES
from steadymoe.bench.report.results import Results
from steadymoe.bench.runs import identity, record, run_folder
from steadymoe.bench.statistics import collapse, estimates
from steadymoe.bench.support import external
from steadymoe.bench.support.errors import UserError
from steadymoe.bench.training import samples


@pytest.fixture(scope="module")
def data() -> Results:
    return Results.load(RECORDED, "small")


def test_the_long_table_holds_every_recorded_number_once(data: Results) -> None:
    runs, steps = data.runs, data.joined["steps"]
    assert len(runs) == 9
    assert set(steps["arm"]) == {"grpo", "gspo", "reinforce"}
    keys = ["arm", "seed", "step", "metric"]
    assert not steps.duplicated(keys).any()
    for run in runs.to_dict("records"):
        recorded = record.read_table(Path(run["folder"]), "steps").set_index("step")["reward"]
        chosen = steps[(steps["arm"] == run["arm"]) & (steps["seed"] == run["seed"]) & (steps["metric"] == "reward")]
        assert chosen.set_index("step")["value"].tolist() == recorded.tolist()
    assert "clip_fraction" not in set(steps.loc[steps["arm"] == "reinforce", "metric"])


def test_arms_are_named_by_what_differs() -> None:
    frame = pd.DataFrame([["e", "grpo", "tiny", "chain", ""]] * 2, columns=folders.ARM_KEYS)
    shared = {"cold_start.noise": 0.3}
    axes = [shared, shared | {"optimizer.learning_rate": 0.1, "routing": "r2"}]
    numbers = [{"optimizer.learning_rate": 0.3, "steps": 9}, {"optimizer.learning_rate": 0.1, "steps": 9}]
    # The usual number is named beside another one; a choice that is off is not.
    named = folders.name_arms(frame, axes, numbers)
    assert named == ["grpo learning_rate=0.3", "grpo learning_rate=0.1 routing=r2"]
    frame["model"] = ["tiny", "deep"]
    both = ["grpo tiny learning_rate=0.3", "grpo deep learning_rate=0.1 routing=r2"]
    assert folders.name_arms(frame, axes, numbers) == both
    factors = [{"optimizer.router_factor": factor, "cold_start.router_factor": 1 - factor} for factor in (0.1, 1.0)]
    named = folders.name_arms(frame.assign(model="tiny"), factors, [{}, {}])
    assert named[0] == "grpo cold_start.router_factor=0.9 optimizer.router_factor=0.1"


def test_paths_and_hashes_are_short_in_the_names_of_arms() -> None:
    one, other = "/data/" + "a" * 90 + "/0123456789abcdef.safetensors", "/data/b/fedcba9876543210.safetensors"
    assert identity.shortener([one, other])(one) == "01234567"
    assert identity.shortener([one, one.replace("89abcdef", "00000000")])(one) == "0123456789abcdef"
    alike = ["/a/x/start.safetensors", "/a/y/start.safetensors"]
    assert identity.shortener(alike)(alike[0]) == "x/start"
    assert identity.shortener([])("start.safetensors") == "start.safetensors"  # no path
    assert identity.shortener([one])(4e-4) == "0.0004"
    frame = pd.DataFrame([["e", "grpo", "tiny", "chain", ""]] * 2, columns=folders.ARM_KEYS)
    axes = [{"cold_start.path": one}, {"cold_start.path": other}]
    assert folders.name_arms(frame, axes, [{}, {}]) == ["grpo path=01234567", "grpo path=fedcba98"]


def test_curves_are_smoothed_within_seeds_and_averaged_over_them() -> None:
    table = curve_table({"a": [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0], [4.0, 5.0]]})
    plain = estimates.curves(table, "reward")
    assert plain["mean"].tolist() == [2.0, 3.0, 3.0]
    assert plain["n"].tolist() == [3, 3, 2]  # one seed ended early
    assert plain["low"].isna().tolist() == [False, False, True]
    smooth = estimates.curves(table, "reward", window=2)
    assert smooth["mean"].tolist() == [2.0, 2.5, 2.5]
    geometric = estimates.curves(curve_table({"a": [[1e-4], [1e-2], [1e-3]]}), "reward", log=True)
    np.testing.assert_allclose(geometric["mean"], 1e-3)
    assert geometric["low"].item() > 0


def test_summary_matches_the_runs(data: Results) -> None:
    runs, steps = data.runs, data.joined["steps"]
    summary = tables.summary(steps, runs).set_index("arm")
    assert summary["n"].tolist() == [3, 3, 3]
    assert summary["collapsed"].isna().all()  # 24 gradient updates are too few to say
    rule = collapse.Rule(window_updates=4, patience_updates=6).text()
    judged = tables.summary(steps, collapse.judged(runs.assign(collapse_rule=rule), steps))
    assert judged["collapsed"].tolist() == judged["falling"].tolist() == [0, 0, 0]
    finals = [
        record.read_table(Path(folder), "steps")["reward"].tail(5).mean()
        for folder in runs.loc[runs["arm"] == "gspo", "folder"]
    ]
    np.testing.assert_allclose(summary.loc["gspo", "final reward"].mean, np.mean(finals))
    begun = steps[(steps["metric"] == "reward") & (steps["step"] == 1)].groupby("arm")["value"].mean()
    assert summary["start"].map(write.to_number).to_dict() == pytest.approx(begun.to_dict())
    assert summary.loc["reinforce", "clip fraction"].n == 0
    numbers = write.to_numbers(summary.reset_index())
    np.testing.assert_allclose(numbers.loc[1, "final reward mean"], np.mean(finals))


DRAWN = ["overview", "fig01", "fig02"]  # what runs of three algorithms have the data for


def test_held_out_curves_start_at_the_cold_start(data: Results) -> None:
    accuracy = data.joined["steps"].query("metric == 'eval_accuracy'")
    assert (accuracy.groupby(["arm", "seed"])["step"].min() == 0).all()
    first = data.runs.iloc[0]
    evaluations = record.read_table(Path(first["folder"]), "evaluations")
    ours = accuracy[(accuracy["arm"] == first["arm"]) & (accuracy["seed"] == first["seed"]) & (accuracy["step"] == 0)]
    np.testing.assert_allclose(ours["value"], evaluations.loc[evaluations["step"] == 0, "score"].mean())
    held_out = FIGURES["fig01"].figure(data).numbers.query("panel == 'held-out accuracy'")
    assert (held_out.groupby("series")["x"].min() == 0).all()  # nothing is spent before the first step


def test_histograms_are_sums_over_the_steps_of_a_run(data: Results) -> None:
    counts, first = data.joined["histograms"], data.runs.iloc[0]
    recorded = record.read_table(Path(first["folder"]), "steps")["token_ratio_histogram"]
    ours = counts[(counts["arm"] == first["arm"]) & (counts["seed"] == first["seed"])]
    chosen = ours[ours["metric"] == "token_ratio_histogram"].sort_values("bin")
    assert chosen["count"].tolist() == np.sum(recorded.tolist(), axis=0).tolist()
    assert chosen["updates_per_rollout"].unique().tolist() == [2]
    assert chosen["minibatch_prompts"].unique().tolist() == [2]


class Page(HTMLParser):
    """What the page of a results folder shows, what of it is not folded, and what it would fetch."""

    def __init__(self, results: Path) -> None:
        super().__init__()
        self.text, self.sources, self.tags, self.folds = "", [], [], 0
        self.feed((results / "report.html").read_text())

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]
        self.folds += tag == "details"
        if not self.folds:
            self.tags.append((dict(attributes).get("class") or "") if tag == "p" else tag)

    def handle_endtag(self, tag: str) -> None:
        self.folds -= tag == "details"


def test_report_is_built_from_recorded_runs(recorded: Path) -> None:
    made = report_page.make(recorded)
    assert all(path.stat().st_size > 0 for path in made.files)
    names = {path.name for path in made.files}
    assert {*(f"small-summary.{suffix}" for suffix in ("md", "tex", "csv")), "small-runs.csv", "report.html"} <= names
    stems = [FIGURES[name].stem("small") for name in DRAWN]
    assert {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg", "pdf", "csv")} <= names
    # No experiment of the suite would supply a user's own numbers.
    lacking = [each.id for each in FIGURES.values() if each.id not in DRAWN and not each.needs_own]
    assert "fig18" not in lacking
    assert [line.split()[0] for line in made.missing] == lacking
    assert "fig10 drift lacks ended runs of drift: steadymoe run experiment=drift" in made.missing
    page = Page(recorded)
    assert page.sources
    assert all(source.startswith("data:") for source in page.sources)  # self-contained
    numbers = pd.read_csv(recorded / "tables" / "small-summary.csv")
    assert f"{numbers.loc[0, 'final reward mean']:.3g}" in page.text
    assert "steadymoe run algorithm=gspo" in page.text
    assert page.tags.index("lead") < page.tags.index("img") < page.tags.index("table")
    assert page.tags.count("table") == 1
    assert page.tags.count("th") <= 6


@pytest.mark.usefixtures("no_figures")
def test_page_truncates_and_escapes_samples(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report_page._samples(folders.read_runs(recorded, "small")) == {"samples": [], "left_out": 0}
    places = sorted(path.parent for path in (recorded / "runs").glob("**/run.json"))
    row = {"step": 1, "prompt": "2+2=", "response": "<script>4</script>", "finished": True, "reward": 1.0}
    for folder in places:
        lines = [row, row | {"response": "x" * 10_000}, {"step": 1}, row | {"reward": "none"}]
        (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"torn')
        assert len(samples.read(folder)) == 2
    report_page.make(recorded)
    page = (recorded / "report.html").read_text()
    assert len(re.findall(r"<summary>\w+ seed=\d</summary>", page)) == 9
    assert "&lt;script&gt;4&lt;/script&gt;" in page
    assert page.count("<script") == 1
    assert "x" * (samples.CHARACTERS - 1) + "…" in page
    assert "x" * samples.CHARACTERS not in page
    monkeypatch.setattr(report_page, "_MAX_CHARACTERS", 1000)
    found = report_page._samples(folders.read_runs(recorded, "small"))
    shown = [f"{arm} seed={seed}" for arm, seed in (("grpo", 0), ("gspo", 0), ("reinforce", 0), ("grpo", 1))]
    assert ([each["run"] for each in found["samples"]], found["left_out"]) == (shown, 5)


def test_a_sweep_over_a_dial_leads_with_what_losses_tolerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).parents[2] / "results" / "ruler" / "data" / "tolerance_decay"
    shutil.copytree(source, tmp_path / "data" / "tolerance_decay")
    monkeypatch.setattr(report_page, "figures_of", lambda *_: [FIGURES["overview"], FIGURES["fig17"]])
    report_page.make(tmp_path, "tolerance_decay", ["svg"])
    page = Page(tmp_path)
    assert page.text.partition("Tolerated learning rate: ")[2].startswith("gspo has the highest, > ")
    assert 0 < page.text.index("fig17: Tolerance") < page.text.index("overview: ")
    assert (tmp_path / "report.html").read_text().count("<picture>") == 1


@pytest.mark.usefixtures("no_figures")
def test_arms_can_be_selected_by_name_or_algorithm(recorded: Path) -> None:
    report_page.make(recorded, "small", ["svg"], ["gspo", "grpo"])
    assert pd.read_csv(recorded / "tables" / "small-summary.csv")["arm"].tolist() == ["gspo", "grpo"]
    page = Page(recorded)
    assert "Only the arms gspo, grpo." in page.text
    assert "reinforce" not in page.text.partition("Figures without data")[0]
    with pytest.raises(UserError, match="no arm 'sapo'; choose from grpo, gspo, reinforce"):
        report_page.make(recorded, "small", ["svg"], ["gspo", "sapo"])
    files = report_page.draw(FIGURES["fig02"], recorded, "small", ["svg"], ["gspo"])
    assert [path.name for path in files if path.suffix == ".svg"] == ["small-fig02-clip_fraction.svg"]
    assert pd.read_csv(next(path for path in files if path.suffix == ".csv"))["series"].tolist() == ["gspo"]


def test_user_figure_is_found_listed_drawn_and_reported(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = recorded / "mine"
    text = "from beside import HOME\n" + tutorial()["my_figures.py"].replace('"quickstart"', "HOME")
    write_all(mine, {"my_figures.py": text, "beside.py": 'HOME = "small"\n'})
    on_path(monkeypatch, mine)
    (spec,) = figures.find(["response_lengths"])
    drawn = report_page.draw(spec, recorded, None, ["svg"])
    assert (recorded / "figures" / "small-lengths-response_lengths.svg") in drawn
    numbers = pd.read_csv(recorded / "tables" / "small-lengths-response_lengths.csv")
    assert numbers["series"].tolist() == ["grpo", "gspo", "reinforce"]
    assert spec in report_page.figures_of("small")
    listed = report_page.listing(recorded).set_index("id")["data on disk"]
    assert listed["lengths"] == "yes"
    (mine / "my_figures.py").write_text(text.replace('FigureSpec("lengths"', 'FigureSpec("fig05"'))
    figures._own.cache_clear()
    with pytest.raises(figures.CannotDraw, match=r"my_figures.py: FIGURES must hold a FigureSpec"):
        figures.every()
    (mine / "my_figures.py").write_text("1 / 0")
    with pytest.raises(figures.CannotDraw, match=r"my_figures.py: ZeroDivisionError: division by zero"):
        figures.every()
    monkeypatch.delenv(external.VARIABLE)
    assert figures.every() == FIGURES


@pytest.mark.usefixtures("no_figures")
def test_unfinished_runs_are_listed_but_not_counted(recorded: Path) -> None:
    path = next((recorded / "runs" / "small" / "gspo").glob("**/run.json"))
    path.write_text(path.read_text().replace('"status": "finished"', '"status": "failed"'))
    assert "1 of 9 runs have not ended" in report_page.make(recorded).text
    assert "1 of 9 runs have not ended" in (recorded / "report.html").read_text()
    numbers = pd.read_csv(recorded / "tables" / "small-summary.csv").set_index("arm")
    assert numbers["n"].to_dict() == {"grpo": 3, "gspo": 2, "reinforce": 3}
    assert pd.isna(numbers.loc["gspo", "final reward low"])
    assert "failed" in pd.read_csv(recorded / "tables" / "small-runs.csv")["status"].tolist()


def shown_of(**rewards: list[float]) -> dict[str, tuple[pd.DataFrame, str]]:
    """The tables of runs of constant reward, from arm → the reward of each seed; the arm ``lost`` collapses."""
    steps = curve_table({arm: [[value] * 40 for value in values] for arm, values in rewards.items()})
    runs = steps[["arm", "seed"]].drop_duplicates().assign(status="finished", judged_until=30, falling_since=np.nan)
    runs["collapsed_step"] = [3.0 if arm == "lost" else np.nan for arm in runs["arm"]]
    answers = pd.DataFrame(columns=["arm", "seed", "prompt", "score"])
    made = {"summary": tables.summary(steps, runs), "head_to_head": tables.head_to_head(steps, answers)}
    return {kind: (table, "") for kind, table in made.items() if not table.empty}


def test_summary_counts_collapses_and_has_their_median_step() -> None:
    steps = curve_table({arm: [[0.5] * 40] * 4 for arm in "ab"})
    runs = steps[["arm", "seed"]].drop_duplicates().assign(judged_until=31, falling_since=np.nan)
    runs["collapsed_step"] = [10, 20, np.nan, np.nan, *[np.nan] * 4]
    runs.loc[runs["seed"] == 2, "falling_since"] = 35.0
    summary = tables.summary(steps, runs).set_index("arm")[["n", "collapsed", "median collapse step", "falling"]]
    np.testing.assert_array_equal(summary.loc[["a", "b"]], [[4, 2, 15, 1], [4, 0, np.nan, 1]])
    short = runs.assign(judged_until=0, collapsed_step=np.nan)
    assert tables.summary(steps, short)["collapsed"].isna().all()


def test_headline_names_the_leader_the_decision_and_collapses() -> None:
    shown = shown_of(a=[0.5, 0.6, 0.7, 0.5, 0.6], b=[0.3, 0.4, 0.52, 0.3, 0.4], lost=[0.2, 0.3, 0.1, 0.2, 0.2])
    said = " ".join(tables.sentences(shown))
    difference = estimates.over_seeds([0.2, 0.2, 0.18, 0.2, 0.2], bounds=estimates.DIFFERENCE)
    assert said.startswith("a has the highest final reward: 0.58 [")
    assert f"It leads b, the next arm, by {difference}, n = 5: decided, p (Holm) = " in said
    assert "Collapsed: lost (5 of 5)." in said
    first = tables.headline(shown)
    assert first["arm"].tolist() == ["a", "b", "lost"]
    assert first.columns.tolist() == ["arm", "n", "final reward", "less a", "collapsed"]
    assert first["less a"].map(write.to_number).tolist()[1] == pytest.approx(-difference.mean)
    levels: dict[str, list[float]] = {"a": [0.5, 0.6, 0.7, 0.5, 0.6], "b": [0.6, 0.5, 0.6, 0.5, 0.6]}
    said = " ".join(tables.sentences(shown_of(**levels, c=[0.1, 0.2, 0.3, 0.15, 0.1])))
    assert re.search(r"n = 5: not decided, p \(Holm\) = 0\.\d+\. Its lead over c is decided\. No run collapsed\.", said)
    assert "leads" not in " ".join(tables.sentences(shown_of(a=[0.5, 0.6, 0.7])))


def test_headline_names_arms_that_end_below_their_start() -> None:
    """Those below their start on every seed, decoded greedily; sampled accuracy says nothing about that."""

    def steps_of(**ends: list[float]) -> pd.DataFrame:
        curves = {arm: [[0.5, end] for end in values] for arm, values in ends.items()}
        return curve_table(curves, "eval_greedy").assign(learning_rate=4e-4)

    steps = steps_of(lost=[0.1, 0.3], mixed=[0.1, 0.6], level=[0.5, 0.5], once=[0.1])
    (said,) = tables.knowledge_lost(steps)
    assert said.startswith("At a learning rate of 0.0004 lost (0.50 to 0.20) ends below")
    other = steps_of(also=[0.4, 0.4]).assign(learning_rate=1e-4)
    (said,) = tables.knowledge_lost(pd.concat([steps, other]))
    assert said.startswith("also (0.50 to 0.40), lost (0.50 to 0.20) end below")
    assert tables.knowledge_lost(steps.assign(metric="eval_accuracy")) == []


def test_best_rate_of_each_arm_is_named_and_an_end_of_the_grid_is_said() -> None:
    ends = {
        "grpo": {1e-4: [0.5, 0.7], 2e-4: [0.9, 0.5], 4e-4: [0.1, 0.2]},  # by the mean, not by the highest run
        "gspo routing=r2": {1e-4: [0.5, 0.6], 2e-4: [0.6, 0.7], 4e-4: [0.8, 0.9]},
        "rloo": {2e-4: [0.7, 0.6], 4e-4: [0.3, 0.2]},
        "once": {4e-4: [0.9, 0.9]},
    }
    parts = [
        curve_table({f"{arm} learning_rate={rate:g}": [[1.0, end] for end in values]}, "eval_accuracy")
        for arm, levels in ends.items()
        for rate, values in levels.items()
    ]
    steps = pd.concat(parts)
    steps["learning_rate"] = steps["arm"].str.rpartition("=")[2].astype(float)
    (said,) = tables.best_rates(steps)
    best = "grpo 0.0002, gspo routing=r2 0.0004 (the highest of its grid: extend it), rloo 0.0002 (the lowest of its"
    assert said.startswith(f"Best learning rate by mean held-out accuracy at the end: {best}")
    assert "once" not in said
    assert tables.best_rates(steps[steps["learning_rate"] == 4e-4]) == []
    assert tables.best_rates(steps.assign(metric="reward")) == []


def test_fewer_than_five_seeds_decide_nothing() -> None:
    said = " ".join(tables.sentences(shown_of(a=[0.5, 0.6, 0.7], b=[0.3, 0.4, 0.52], c=[0.1, 0.2, 0.3])))
    assert "n = 3, on every seed; three seeds decide nothing." in said
    assert "decided" not in said
    said = " ".join(tables.sentences(shown_of(a=[0.5, 0.6], b=[0.6, 0.1])))
    assert "n = 2; two seeds decide nothing." in said
    said = " ".join(tables.sentences(shown_of(a=[0.5, 0.6, 0.7], b=[0.5, 0.6, 0.7])))
    assert "It is level with b, the next arm, n = 3." in said
    assert str(estimates.Estimate(-0.0, -0.0, 0.0, 3)) == "0 [0, 0]"


def test_headline_counts_arms_if_too_many_to_name() -> None:
    low = {f"low{number}": [0.1, 0.2, 0.3, 0.12, 0.21, 0.13, 0.2] for number in range(6)}
    level = {"a": [0.5, 0.6, 0.7, 0.5, 0.6, 0.6, 0.5], "b": [0.6, 0.5, 0.6, 0.5, 0.6, 0.7, 0.4]}
    said = " ".join(tables.sentences(shown_of(**level, **low)))
    assert "Its lead over 6 of the other 7 arms is decided." in said
    shown = shown_of(a=level["a"], **low)
    shown["summary"][0]["collapsed"] = [0, 3, 3, 3, 2, 1, 0]
    assert "Collapsed: 5 arms, 12 of 49 runs." in " ".join(tables.sentences(shown))


def lose(results: Path, step: int) -> pd.DataFrame:
    """Let the runs of GSPO end at a number that was not finite; return all runs."""
    for path in (results / "runs" / "small" / "gspo").glob("**/run.json"):
        steps = pq.read_table(path.parent / "steps.parquet")
        pq.write_table(steps.slice(0, step), path.parent / "steps.parquet")
        checksums = {table.stem: run_folder.checksum(table) for table in path.parent.glob("*.parquet")}
        lost = {"reason": "not finite", "step": step, "update": 1}
        edit(path, status="diverged", diverged=lost, tables=checksums)
    return folders.read_runs(results, "small")


@pytest.mark.parametrize("step", [5, 12])
def test_diverged_run_counts_as_0_from_there_on(recorded: Path, step: int) -> None:
    runs = lose(recorded, step)
    steps = Results.of_folders(runs).joined["steps"]
    for metric, first in (("reward", step + 1), ("eval_accuracy", step)):  # a step is evaluated after its updates
        ours = steps[(steps["arm"] == "gspo") & (steps["metric"] == metric) & (steps["step"] >= first)]
        assert ours["value"].tolist() == [0.0] * 3 * (13 - first)
    lost = tables.summary(steps, collapse.judged(runs, steps)).set_index("arm").loc["gspo"]
    assert lost["collapsed"] == 3
    assert lost["final held-out accuracy"].mean == 0
    assert (lost["final reward"].mean > 0) == (step == 12)  # sampled before the updates that lose it
    assert (lost["best minus final reward"].mean > 0.2) or step == 12
    answers = Results.load(recorded, "small").joined["evaluations"].query("arm == 'gspo'")["score"]
    assert (len(answers) > 0, answers.max()) == (True, 0)


@pytest.mark.usefixtures("no_figures")
def test_mixing_configs_or_versions_is_reported(recorded: Path) -> None:
    report_page.make(recorded)
    assert "These runs differ" not in (recorded / "report.html").read_text()
    path = next((recorded / "runs").glob("**/run.json"))
    path.write_text(re.sub(r'"torch": "[^"]*"', '"torch": "9.9"', path.read_text()))
    report_page.make(recorded)
    gspo, (grpo, *_, last) = ([*(recorded / "runs" / "small" / name).rglob("run.json")] for name in ("gspo", "grpo"))
    edit(gspo[0], config_hash_without_seed="another", algorithm_code="ast1:0")
    edit(grpo, config=json.loads(grpo.read_text())["config"] | {"precision": "bf16"}, algorithm_code="ast1:0")
    edit(last, algorithm_code="ast1:1")
    differ = "These runs differ in versions, settings besides the axes, config (gspo), algorithm code (grpo)"
    assert differ in report_page.make(recorded).text
    assert differ in (recorded / "report.html").read_text()


def test_terminal_table_has_five_columns_and_fits_100_characters() -> None:
    rows = pd.DataFrame({"arm": [f"{'long ' * 9}{place}" for place in range(25)], "n": 3, "final reward": 1 / 3})
    rows = rows.assign(accuracy=[estimates.Estimate(0.1234567, 0.01, 0.9, 3)] * 25, collapsed=np.nan)
    lines = write.to_terminal(rows).splitlines()
    assert max(map(len, lines)) <= 100
    assert (len(lines), lines[-1], lines[2].split()[-1]) == (2 + 2 * 20 + 1, "… and 5 more", "–")
    assert [line.split()[-1] for line in lines[3:-1:2]] == [f"{place}" for place in range(20)]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_export_holds_every_number_exactly_once(recorded: Path, data: Results, suffix: str) -> None:
    path = report_page.export(recorded, None, suffix)
    found = pd.read_parquet(path) if suffix == "parquet" else pd.read_csv(path)
    assert list(found)[-4:] == ["step", "update", "metric", "value"]
    assert not found.duplicated(["arm", "seed", "step", "update", "metric"]).any()
    for run in data.runs.to_dict("records"):
        ours = found[(found["arm"] == run["arm"]) & (found["seed"] == run["seed"])]
        updates = record.read_table(Path(run["folder"]), "updates").set_index(["step", "update"])
        of_updates = ours[(ours["metric"] == "token_ratio_variance") & ours["update"].notna()]
        of_updates = of_updates.set_index(["step", "update"])["value"]
        np.testing.assert_allclose(of_updates, updates["token_ratio_variance"], rtol=1e-12)
        of_steps = ours[(ours["metric"] == "reward") & ours["update"].isna()]
        rewards = record.read_table(Path(run["folder"]), "steps")["reward"]
        np.testing.assert_allclose(of_steps["value"], rewards, rtol=1e-12)
    with pytest.raises(report_page.NothingToReport):
        report_page.export(recorded, "none", suffix)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """What a real browser without a network makes of a page, and what it wrote to its console."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"the report was not looked at: no browser found among {', '.join(BROWSERS)}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    flags += ["--enable-logging=stderr", f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run([browser, *flags], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.check
def test_the_page_opens_in_a_browser_and_its_table_sorts(recorded: Path) -> None:
    report_page.make(recorded, formats=["svg"])
    page = recorded / "report.html"
    shown, complaints = opened(page, recorded / "profile")
    assert complaints == []
    assert "steadymoe report" in shown
    # The same page with clicks appended, and a script that must show up as an error: the console is really read.
    clicked = recorded / "clicked.html"
    by_arm = 'document.querySelectorAll("table.sortable th button")[0]'
    clicked.write_text(page.read_text() + f"<script>{by_arm}.click(); {by_arm}.click(); nowhere();</script>")
    shown, complaints = opened(clicked, recorded / "profile")
    assert len(complaints) == 1
    assert "nowhere is not defined" in complaints[0]
    rows = re.findall(r"<tr><td[^>]*>(\w+)</td>", shown)[:3]
    assert rows == ["reinforce", "gspo", "grpo"]  # descending at the second click
    assert 'aria-sort="descending"' in shown


@pytest.mark.check
def test_an_moe_stands_beside_its_dense_twin_in_one_report(tmp_path: Path) -> None:
    for model in ("model=micro", "model=dense_micro"):
        for seed in ("seed=0", "seed=1"):
            finished(tmp_path, "experiment_name=twins", "updates=4", model, seed)
    made = report_page.make(tmp_path, "twins", ["svg"]).files
    page = (tmp_path / "report.html").read_text()
    assert "could not be drawn" not in page
    drawn = " ".join(path.name for path in made if path.suffix == ".svg")
    assert "overview" in drawn
    assert "ratio_distributions" in drawn
    assert "drift" not in drawn  # the MoE alone does not vary in anything
    steps = Results.load(tmp_path, "twins").joined["steps"]
    assert tables.starts_differ(steps)
    assert steps.groupby("seed")["start"].nunique().tolist() == [2, 2]


def test_a_figure_that_cannot_be_drawn_is_named_and_costs_nothing_else(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise ValueError("Number of rows must be a positive integer, not 0")

    whole = report_page.make(recorded, "small", ["svg"]).files
    monkeypatch.setitem(FIGURES, "fig01", replace(FIGURES["fig01"], draw=fails))
    made = report_page.make(recorded, "small", ["svg"]).files
    assert [path for path in whole if path not in made] == [path for path in whole if "fig01" in path.name]
    page = (recorded / "report.html").read_text()
    assert "could not be drawn: ValueError: Number of rows must be a positive integer, not 0" in page

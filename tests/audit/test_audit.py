"""``steadymoe audit`` at tiny size: its files are made once, its numbers are a run's, wrong words touch nothing."""

import json
import shlex
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from filelock import FileLock, Timeout
from fixtures import MICRO, Said, steadymoe
from small_audits import WORDS
from small_runs import planned
from transformers import PreTrainedModel

from steadymoe.algorithms import Batch, Surrogate
from steadymoe.algorithms.grpo import GRPO
from steadymoe.bench.audit import measure, plan, rollouts, tables
from steadymoe.bench.audit.tokens import deciles
from steadymoe.bench.runs import identity
from steadymoe.bench.runs.compose import ConfigError
from steadymoe.bench.support import external
from steadymoe.bench.tasks.chain import Chain
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build


@dataclass(frozen=True, kw_only=True)
class Nothing(GRPO):
    """A loss without a gradient."""

    def surrogate(self, batch: Batch) -> Surrogate:
        made = super().surrogate(batch)
        return replace(made, values_BT=0 * made.values_BT)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of one audit through the command line."""
    results = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert steadymoe(monkeypatch, "audit", *WORDS, f"results_dir={results}") == 0
    return results


@pytest.fixture(scope="module")
def folder(results: Path) -> Path:
    (found,) = (results / "audits" / "tiny").glob("**/audit.json")
    return found.parent


@pytest.fixture(scope="module")
def asked(results: Path) -> plan.PlannedAudit:
    (found,) = plan.plan([*WORDS, f"results_dir={results}"])
    return found


@pytest.fixture(scope="module")
def table(folder: Path) -> pd.DataFrame:
    return tables.read([folder])


def value(table: pd.DataFrame, **place: Any) -> float:
    """The value of the one row at ``place``, of the whole gradient before the cut where that is open."""
    is_of_data = table.loc[table["quantity"] == place["quantity"], "block"].eq("").all()
    whole = {"block": "", "cut": ""} if is_of_data else {"block": "whole", "cut": "before"}
    for key, wanted in (whole | place).items():
        table = table[table[key] == wanted]
    assert len(table) == 1
    return float(table["value"].iloc[0])


def test_staleness_bias_compares_with_fresh_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, against_itself = [], measure.estimators.against_itself
    monkeypatch.setattr(measure.estimators, "against_itself", lambda pair: pairs.append(pair) or against_itself(pair))
    (audit,) = plan.plan([*WORDS, "audit.drift=[0]", "audit.routing=[free]", f"results_dir={tmp_path}"])
    audit.make(lambda _: None)
    assert len(pairs) >= len(audit.losses)
    assert all(pair.own is not pair.reference for pair in pairs)


# --- files -------------------------------------------------------------------------------------------


def test_folder_holds_a_table_per_drift_and_provenance(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"k=0.parquet", "k=2.parquet", "audit.json", ".lock"}
    assert folder.parts[-4:-2] == ("micro", "chain")
    assert folder.name == "seed=0"
    facts = json.loads((folder / "audit.json").read_text())
    assert facts["status"] == "finished"
    assert facts["command"].startswith("steadymoe audit ")
    assert "grpo_unclipped" not in facts["command"]
    band = {"clip_low": 3e-4, "clip_high": 4e-4}
    changed = {f"algorithm.loss.{key}": number for key, number in band.items()}
    assert facts["arms"] == {"grpo": {"algorithm": "grpo"}, "narrow": {"algorithm": "grpo"} | changed}
    assert facts["losses"]["narrow"] == facts["losses"]["grpo"] | band
    assert {"versions", "machine", "revision", "config", "cold_start", "seconds"} <= set(facts)


@pytest.mark.parametrize(("after", "missing"), [("wrote k=0", [2]), ("wrote k=2", [])])
def test_killed_audit_resumes_to_the_same_bytes(
    after: str, missing: list[int], asked: plan.PlannedAudit, results: Path, folder: Path, tmp_path: Path
) -> None:
    """From the same cold start, in another folder; after the last table a kill leaves the facts begun."""
    shutil.copytree(results / "cold_starts", tmp_path / "cold_starts")
    there = replace(asked.run.config, results_dir=str(tmp_path))
    again = replace(asked, run=replace(asked.run, config=there), folder=tmp_path / "audit")

    def kill(text: str) -> None:
        if after in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again.make(kill)
    assert (again.missing, again.is_finished) == (missing, False)
    assert json.loads(again.facts_path.read_text())["status"] == "begun"
    before = {path: path.stat().st_mtime_ns for path in again.folder.glob("*.parquet")}
    again.make(lambda _: None)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for name in ("k=0.parquet", "k=2.parquet"):
        assert (again.folder / name).read_bytes() == (folder / name).read_bytes()
    facts, whole = (json.loads(path.read_text()) for path in (again.facts_path, folder / "audit.json"))
    assert (facts["status"], facts.keys()) == ("finished", whole.keys())
    with FileLock(again.folder / ".lock"), pytest.raises(Timeout):
        again.make(lambda _: None)


def test_a_finished_audit_is_shown_and_not_measured_again(
    results: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    monkeypatch.setattr(measure, "audit", lambda *_: pytest.fail("measured again"))
    words = [*WORDS, f"results_dir={results}"]
    assert "usefulness" in ran("audit", *words)
    (folder / "k=2.parquet").rename(folder / "kept")
    assert ran("audit", "--dry", *words).endswith("to do: k=2\n")
    (folder / "kept").rename(folder / "k=2.parquet")
    facts = (folder / "audit.json").read_text()
    (folder / "audit.json").write_text(facts.replace('"finished"', '"begun"'))  # killed after the last table
    assert ran("audit", "--dry", *words).endswith("to do: audit.json\n")
    assert ran("audit", "--dry", "--redo", *words).endswith("to do: k=0, k=2\n")
    (folder / "audit.json").write_text(facts)


def test_audits_of_other_numbers_or_code_are_not_mixed(
    asked: plan.PlannedAudit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.refuse_others([asked])
    other = replace(asked, audit_hash="0" * 16)
    plan.refuse_others([other], redo=True)
    with pytest.raises(ConfigError, match="another config"):
        plan.refuse_others([other])
    whole = (folder / "audit.json").read_text()
    damages = ({"versions": None}, {"algorithm_code": 1}, {"config": {}}, {"config": {"algorithm": 1}})
    for damaged in (whole[:50], *(json.dumps(json.loads(whole) | damage) for damage in damages)):
        (folder / "audit.json").write_text(damaged)
        with pytest.raises(ConfigError, match="add --redo"):
            plan.refuse_others([asked])
    (folder / "audit.json").write_text(whole)
    monkeypatch.setattr(plan, "_code", lambda: "other")
    with pytest.raises(ConfigError, match="other code"):
        plan.refuse_others([asked])


# --- numbers -----------------------------------------------------------------------------------------


def test_before_the_drift_every_ratio_is_one_and_replay_is_the_identity(table: pd.DataFrame) -> None:
    at_start = {"k": 0, "loss": "all"}
    assert 0 <= value(table, routing="fresh", quantity="reward", **at_start) <= 1
    for routing in ("free", "r2"):
        assert value(table, routing=routing, quantity="ess", **at_start) == 1
        assert value(table, routing=routing, quantity="token_ratio_variance", **at_start) == 0
        assert value(table, routing=routing, quantity="expert_change", **at_start) == 0
        assert value(table, routing=routing, quantity="clip_fraction", k=0, loss="narrow") == 0
    here = table[(table["k"] == 0) & (table["block"] != "")]
    free, replayed = (here[here["routing"] == each].drop(columns=["routing", "replicates"]) for each in ("free", "r2"))
    pd.testing.assert_frame_equal(free.reset_index(drop=True), replayed.reset_index(drop=True), rtol=1e-3, atol=1e-5)
    grpo, narrow = (here[(here["loss"] == each) & (here["routing"] == "free")]["value"] for each in ("grpo", "narrow"))
    assert grpo.to_numpy() == pytest.approx(narrow.to_numpy(), nan_ok=True)  # no band cuts a ratio of 1


def test_after_the_drift_a_narrow_band_clips_more_and_routes_have_moved(table: pd.DataFrame) -> None:
    free = partial(value, table, k=2, routing="free")
    assert free(loss="narrow", quantity="clip_fraction") > free(loss="grpo", quantity="clip_fraction")
    assert free(loss="all", quantity="expert_change") > 0
    assert value(table, k=2, routing="r2", loss="all", quantity="expert_change") > 0, "the routers' own choice"
    drifted = table[(table["k"] == 2) & (table["block"] != "") & table["value"].notna()]
    gradients_of = drifted.pivot(index=["loss", "block", "quantity"], columns="routing", values="value")
    assert ((gradients_of["free"] - gradients_of["r2"]).abs() > 1e-6 * gradients_of["free"].abs()).any(), "replay"
    moments = [free(loss="all", quantity=f"log_ratio_moment_{each}") for each in ("pinned", "free")]
    assert free(loss="all", quantity="routing_share") == pytest.approx(1 - moments[0] / moments[1], rel=1e-6)
    for loss in ("grpo", "narrow"):
        masses = [free(loss=loss, quantity=f"mass_in_decile_{tenth}") for tenth in range(1, 11)]
        assert sum(masses) == pytest.approx(1)
        assert 0 <= free(loss=loss, quantity="mass_on_changed_routes") <= 1


def test_losses_are_ranked_by_usefulness(table: pd.DataFrame) -> None:
    useful = table["loss"].map({"grpo": -0.1, "narrow": 0.2})
    known = table.assign(value=table["value"].where(table["quantity"] != "usefulness", useful))
    ranked = tables.ranking(known)
    assert ranked.loc[(ranked["k"] == 2) & (ranked["routing"] == "free"), "loss"].tolist() == ["narrow", "grpo"]
    undefined = table.assign(value=table["value"].where(table["quantity"] != "usefulness"))
    unranked = tables.ranking(undefined)
    assert len(unranked) == len(ranked)
    assert set(unranked["usefulness"]) == {"–"}
    assert "–" not in set(unranked["snr"])


def test_drift_matches_a_run_with_the_neutral_loss(task: Chain, model: PreTrainedModel, tmp_path: Path) -> None:
    config = planned(tmp_path, "algorithm=grpo_unclipped").config
    trainer, other = (Trainer(each, task, config) for each in (model, build.build(MICRO, task.tokenizer, 0, "cpu")))
    rollout, _, _ = trainer.sample(1)
    ks = []
    for k in rollouts.drifted(trainer, rollout, [2, 0, 1]):
        ks.append(k)
        if k:
            continue
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        with rollouts.scaled_routers(trainer, 0.5):
            now = model.state_dict()
            assert {name for name in now if not torch.equal(now[name], before[name])} == {
                name for name in now if name.endswith("mlp.gate.weight")
            }
        assert all(torch.equal(now[name], before[name]) for name in now)
    assert ks == [0, 1, 2]
    other.step(1)  # both took both updates of the rollout
    for mine, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_prompt_splits_are_disjoint_and_too_few_prompts_are_refused(task: Chain) -> None:
    found = rollouts.prompts(task, 0, 20, 30)
    every = [prompt for prompts in found for prompt in prompts]
    assert len(set(every)) == len(every) == 80
    assert found != rollouts.prompts(task, 1, 20, 30)
    with pytest.raises(ValueError, match="different prompts"):
        rollouts.prompts(Chain(min_operands=2, max_operands=2, modulus=2, spare_tokens=2), 0, 20, 30)


def test_each_decile_holds_a_tenth_of_the_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs_BT, mask_BT = -torch.rand(6, 10, generator=generator), torch.ones(6, 10, dtype=torch.long)
    mask_BT[:, 8:] = 0
    found_N = deciles(logprobs_BT, mask_BT)[mask_BT.bool()]
    assert sorted(torch.bincount(found_N).tolist()) == [4, 4, *[5] * 8]  # of 48 tokens
    order_N = logprobs_BT[mask_BT.bool()].argsort()
    assert (found_N[order_N].diff() >= 0).all()


def test_audit_section_does_not_change_runs(tmp_path: Path) -> None:
    one, other = (planned(tmp_path, *words) for words in ([], ["audit.minibatches=48", "audit.drift=[0,1]"]))
    assert (one.config_hash, one.folder, one.axes) == (other.config_hash, other.folder, other.axes)
    older = {key: each for key, each in one.plain.items() if key != "audit"}
    assert identity.config_hash(older) == one.config_hash
    assert identity.difference(older, other.plain) == ""


# --- refusals ----------------------------------------------------------------------------------------

REFUSED = {
    "model=dense_flat task=sort audit.routing=[r2]": "dense and has no routers",
    "algorithm=gspo": "audit.algorithms=[grpo,gspo]",
    "routing=r2": "audit.routing",
    "engine=stale engine.strength=2": "engine=stale",
    "audit.algorithms=[grop]": "grop",
    "+audit.arms.wide=3": "audit.arms.wide",
    """'+audit.arms.wide="algorithm=grpo seed=3"'""": "audit.arms.wide",
    f"""'+audit.arms.none="algorithm=grpo algorithm.loss._target_={__name__}.Nothing"'""": "no gradient",
    "--fast": "--fast",
    "audit.algorithms=[]": "audit.algorithms",
    "audit.router_scale=[a]": "must be a valid number, got 'a'",
    "audit.routing=[free,r9]": "must be 'free', 'r2' or 'r3'",
    "audit.routing=[free,r3]": "use r2",
    "audit.drift=[0,32]": "a rollout has prompts for",
    "audit.drift=[1]": "must include 0",
    "audit.groups=5": "must divide",
    "audit.groups=24": "at least twice",
    "microbatch=4": "microbatch=null",
    "model=micro task=chain task.min_operands=2 task.max_operands=2 task.modulus=3 --dry": "different prompts",
    "routing.freeze=true": "routing.freeze",
    "rollout.shuffle_rewards=true": "rollout.shuffle_rewards",
    "optimizer.decay=0.5": "optimizer.decay",
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_audit_is_refused_in_one_line_before_any_work(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "audit", lambda *_: pytest.fail("measured"))
    assert REFUSED[words] in refused("audit", *shlex.split(words))
    assert list(tmp_path.iterdir()) == []


# --- elsewhere ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("clip_atlas", "experiment=clip_atlas"),
        ("mine", "experiment=mine"),
        ("other", "experiment=audit experiment_name=other"),
    ],
)
def test_report_without_an_audit_says_how_to_make_one(
    experiment: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Said
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").touch()
    monkeypatch.setenv(external.VARIABLE, str(tmp_path))
    said = refused("audit", "report", "--experiment", experiment, "--results", str(tmp_path / "results"))
    assert said.endswith(f"make one: steadymoe audit {words}\n")

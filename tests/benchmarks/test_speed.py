"""The timings are of real steps, and docs/commands.md shows what was recorded."""

import json
import time
from pathlib import Path

import pytest
import speed
import torch
from small_runs import SMALL
from torch.testing import assert_close

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / speed.PAGE).read_text()
RECORDED = json.loads((ROOT / speed.RECORDED).read_text())
TINY = " ".join(word for word in SMALL if not word.startswith(("steps", "evaluation", "cold_start", "algorithm")))


class Fake:
    """A trainer whose steps take a known time on a patched clock."""

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes, self.steps = clock, takes, 0

    def step(self) -> None:
        self.steps += 1
        self.clock[0] += self.takes


def test_trainers_take_turns_and_the_first_block_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    fast, slow = Fake(clock, 1.0), Fake(clock, 2.5)
    taken = speed.interleaved({"fast": fast, "slow": slow}, blocks=3)
    assert taken == {"fast": [1.0] * 3, "slow": [2.5] * 3}
    assert fast.steps == slow.steps == 4 * speed.BLOCK
    assert speed.ratio(taken["fast"], taken["slow"]) == {"median": 2.5, "least": 2.5, "most": 2.5}
    assert speed.ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == {"median": 0.5, "least": 0.25, "most": 1.0}


def test_every_group_has_a_signal() -> None:
    suite = speed.Suite(f"{TINY} minibatch_prompts=16")
    suite.step()
    (row,) = suite.rows
    assert row["reward"] == pytest.approx(0.5, abs=0.1)
    assert row["groups_without_signal"] == 0


def test_plain_transformers_train_too() -> None:
    plain = speed.Plain(TINY)
    before = [weight.detach().clone() for weight in plain.model.parameters()]
    plain.step()
    assert any((weight != was).any() for weight, was in zip(plain.model.parameters(), before, strict=True))


@pytest.mark.parametrize("setting", ["micro", "long"])
def test_handwritten_loop_matches_the_transformers_model(setting: str) -> None:
    by_hand, plain = (loop(speed.SETTINGS[setting]) for loop in (speed.ByHand, speed.Plain))
    sequences = by_hand.generate(by_hand.encoded(1, 2))
    with torch.no_grad():
        ours, theirs = by_hand._logprobs(sequences), plain._logprobs(sequences)
    assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert ours.exp().mean() < 0.5  # of a policy that draws


def test_setting_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "VARIANTS", {"ours": "", "ours, little": "measure=little"})
    monkeypatch.setattr(speed, "find_spec", lambda _: None)
    numbers = speed.measure(TINY, 1)
    assert set(numbers["seconds"]) == {"ours", "ours, little", "plain transformers", "by hand"}
    assert sum(numbers["stages"].values()) == pytest.approx(1)
    little = numbers["beside"]["ours, little"]
    assert little["median"] == pytest.approx(numbers["seconds"]["ours, little"] / numbers["seconds"]["ours"])
    by = {"machine": {"cpu": "Abacus"}, "versions": {"torch": "1.2"}, "blocks": 1}
    assert f"{numbers['seconds']['ours']:.3f}" in speed.markdown({"mine": by | numbers})


@pytest.mark.parametrize("setting", speed.SETTINGS)
def test_settings_are_valid_runs(setting: str) -> None:
    assert speed.config_of(speed.SETTINGS[setting])


def test_record_replaces_the_settings_measured_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (speed.PAGE, speed.RECORDED):
        path.parent.mkdir(parents=True)
        path.write_text((ROOT / path).read_text())
    assert speed.markdown(RECORDED) in PAGE
    other = {key: value for key, value in RECORDED["micro"].items() if key not in ("machine", "versions", "blocks")}
    monkeypatch.setattr(speed, "measure", lambda *_: other | {"seconds": {"ours": 1234.5}})
    words = ["--setting", "micro", "tokens50", "--blocks", "3"]
    speed.main(words)
    assert (speed.PAGE.read_text(), json.loads(speed.RECORDED.read_text())) == (PAGE, RECORDED)
    assert json.loads(speed.MEASURED.read_text()).keys() == {"micro", "tokens50"}
    speed.main([*words, "--record"])
    numbers = json.loads(speed.RECORDED.read_text())
    assert numbers == RECORDED | {"micro": numbers["micro"], "tokens50": numbers["tokens50"]}
    assert numbers["tokens50"]["blocks"] == 3
    assert "1234.500" in speed.markdown(numbers)
    assert speed.PAGE.read_text() == PAGE.replace(speed.markdown(RECORDED), speed.markdown(numbers))


def test_section_is_replaced_between_its_markers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PAGE", tmp_path / "page.md")
    speed.PAGE.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n")
    speed.section("x", "new\n")
    assert speed.PAGE.read_text() == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(ValueError, match="markers"):
        speed.section("y", "new")

"""``steadymoe check`` as a command: an algorithm outside the checkout, bad input, and what stays on the disk."""

import re
import sys
from pathlib import Path

import pytest
from fixtures import Said, on_path, tutorial, write_all

LINES = [
    *("shapes", "gradient", "padding", "masked tokens", "no tokens", "order", "micro-batches"),
    *("zero advantage", "ratio 1", "extreme ratios", "random numbers", "memory"),
]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The loss of the tutorial in a folder that STEADYMOE_PATH names; the working folder is another, and empty."""
    told = tutorial()
    write_all(tmp_path / "mine", {name: told[name] for name in ("my_losses.py", "conf/algorithm/half_clipped.yaml")})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    on_path(monkeypatch, tmp_path / "mine", "my_losses", "odd_losses")
    return tmp_path / "mine"


def contents(folder: Path) -> dict[str, bytes]:
    """Path → bytes of every file below a folder, without what Python keeps of modules."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def findings(text: str) -> dict[str, tuple[bool, str]]:
    """Line → whether it passed, and its sentence; the last line is left out."""
    matches = [re.fullmatch(r"(passes|FAILS ) {2}([^:]+): (.*)", line) for line in text.splitlines()[:-1]]
    return {match[2]: (match[1] == "passes", match[3]) for match in matches if match}


def test_user_algorithm_is_checked_with_a_line_per_fault(
    mine: Path, monkeypatch: pytest.MonkeyPatch, ran: Said
) -> None:
    before = contents(mine.parent)
    printed = ran("check", "algorithm=half_clipped")
    lines = findings(printed)
    assert list(lines) == LINES
    assert all(passed for passed, _ in lines.values())
    assert printed.splitlines()[-1] == f"half_clipped passes all {len(LINES)}"
    assert contents(mine.parent) == before

    monkeypatch.delitem(sys.modules, "my_losses")
    code = mine / "my_losses.py"
    code.write_text(code.read_text().replace("self.ratio_of(batch)", "self.ratio_of(batch).detach() * 1.0"))
    printed = ran("check", "algorithm=half_clipped", code=1)
    lines = findings(printed)
    assert [name for name in LINES if not lines[name][0]] == ["gradient", "ratio 1"]
    assert printed.splitlines()[-1] == f"half_clipped passes {len(LINES) - 2} of {len(LINES)}"


@pytest.mark.parametrize("body", ["self.ratio_of(batch) * batch.advantages_BT", "1 / 0", "exit(0)", "stop()"])
def test_uncallable_loss_fails_in_one_line_and_skips_the_rest(body: str, mine: Path, ran: Said) -> None:
    code = mine / "my_losses.py"
    text = re.sub(r"return ops\.clipped_surrogate\(.*\)", f"return {body}", code.read_text())
    code.write_text(f"{text}\n\ndef stop():\n    raise KeyboardInterrupt\n")
    shapes, count = ran("check", "algorithm=half_clipped", code=1).splitlines()
    assert shapes.startswith("FAILS   shapes: ")
    assert ("must return a Surrogate" in shapes) == body.startswith("self")
    assert count.startswith(f"half_clipped passes 0 of {len(LINES)}; {len(LINES) - 1} were")


WRONG = {
    "": "got none",
    "algorithm=grpo algorithm=gspo": "got 2",
    "algorithm=gpro": "grpo",
    "algorithm=glob(*)": "algorithm=glob(*)",
    "algorithm=grpo model=micro": "got model=micro",
    "algorithm=grpo -m": "-m",
    "algorithm=grpo algorithm.loss.clip_low=-1": "clip_low",
    "algorithm=grpo algorithm.kl.estimator=k9": "algorithm.kl.estimator",
    "algorithm=grpo algorithm.loss._target_=my_losses.Nothing": "my_losses.Nothing",
    "algorithm=grpo algorithm.loss._target_=steadymoe.algorithms.advantages.GroupMean": "has no 'aggregation'",
    "algorithm=misnamed": "has no 'epsilon_high'; did you mean clip_high?",
    "algorithm=broken": "broken.Broken (ZeroDivisionError: division by zero, ",
    "algorithm=exiting": "SystemExit: 0 (",
    "algorithm=leaving": "SystemExit: 0 (",
    "algorithm=traitless": "must be a Traits, got Named",
    "algorithm=stateful": "Stateful has a state",
}
BASE = """from dataclasses import dataclass
from types import SimpleNamespace
from steadymoe.algorithms.grpo import GRPO

class Named(SimpleNamespace):
    whole_minibatch = False

@dataclass(frozen=True, kw_only=True)
class Traitless(GRPO):
    @property
    def traits(self):
        return Named()

@dataclass(frozen=True, kw_only=True)
class Stateful(GRPO):
    def initial_state(self):
        return {"seen": 0}

@dataclass(frozen=True, kw_only=True)
class Leaving(GRPO):
    def __post_init__(self):
        raise SystemExit(0)
"""


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_fails_in_one_line_and_writes_nothing(words: str, mine: Path, refused: Said) -> None:
    write_all(mine, {"broken.py": "1 / 0\n", "exiting.py": "import sys\n\nsys.exit(0)\n", "odd_losses.py": BASE})
    targets = {"broken": "broken.Broken", "exiting": "exiting.Exiting"}
    targets |= {name: f"odd_losses.{name.capitalize()}" for name in ("traitless", "stateful", "leaving")}
    text = tutorial()["conf/algorithm/half_clipped.yaml"]
    for name, target in targets.items():
        write_all(mine, {f"conf/algorithm/{name}.yaml": text.replace("my_losses.HalfClipped", target)})
    write_all(mine, {"conf/algorithm/misnamed.yaml": text.replace("clip_high: 0.2", "epsilon_high: 0.2")})
    before = contents(mine.parent)
    assert WRONG[words] in refused("check", *words.split())
    assert contents(mine.parent) == before

"""Whether verl's processes here have the losses: ``python -m steadymoe.plugins.check_verl [steadymoe/NAME …]``.

verl hides the error of a plugin. This command shows it in one line, computes every loss through verl, and prints the
lines that choose the named losses. Exit code 0, 1 if verl has not got the losses, 2 for a name that verl cannot feed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from typing import Any

import torch

from steadymoe.algorithms import names
from steadymoe.plugins import verl as ours

MODULE = "steadymoe.plugins.register_verl"
# Of ours and of verl: the same loss, with verl's defaults.
EQUAL = {"grpo@verl-0.9": "vanilla", "gspo@verl-0.9": "gspo"}
# What a process of verl has after it has imported verl.
_ASK = "import json; from verl.trainer.ppo import core_algos; print(json.dumps(list(core_algos.POLICY_LOSS_REGISTRY)))"


class BrokenPlugin(RuntimeError):
    """verl has not got the losses; the message is one line and says why."""


@dataclass(frozen=True)
class Found:
    """What ``check`` has seen."""

    computed: list[str]
    """The losses that verl can compute."""
    refused: dict[str, str]
    """The others → a sentence that says why not."""


def check() -> Found:
    """Load the plugin as verl does, in a process of its own, and compute every loss through verl's registry.

    Raises BrokenPlugin where verl would train without the losses, or where one that both have is not equal.
    """
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    found = [each for each in entry_points(group="verl.plugins") if each.value == MODULE]
    if not found:
        raise BrokenPlugin(f"no installed package has the entry point {MODULE} of verl.plugins: pip install ./losses")
    if policy != "auto" and found[0].name not in [name.strip() for name in policy.split(",")]:
        raise BrokenPlugin(f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves {found[0].name} out; unset it, or add the name")
    try:
        found[0].load()  # verl hides what is raised here
        from verl.trainer.ppo import core_algos
    except Exception as error:
        raise BrokenPlugin(f"the plugin cannot be loaded: {type(error).__name__}: {_one_line(error)}") from error
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if asked.returncode:
        raise BrokenPlugin(f"verl cannot be imported in a process of its own: {_one_line(asked.stderr[-300:])}")
    there = json.loads(asked.stdout.splitlines()[-1])
    missing = [name for name in names(presets=True) if ours.PREFIX + name not in there]
    if missing:
        raise BrokenPlugin(f"a process that imports verl lacks {', '.join(ours.PREFIX + name for name in missing)}")
    return _computed(core_algos)


def _computed(core_algos: Any) -> Found:
    """Every loss on a few tokens, as verl's workers call it."""
    computed, refused = [], {}
    for name in names(presets=True):
        try:
            loss = ours.named(ours.PREFIX + name)
        except ValueError as error:
            refused[name] = str(error).partition(": ")[2]
            continue
        value, gradient_BT = of_verl(core_algos, ours.PREFIX + name, **ours.settings(loss))
        if not (value.isfinite() and gradient_BT.isfinite().all()):
            raise BrokenPlugin(f"{ours.PREFIX}{name} is not finite in verl")
        computed.append(name)
    for name, theirs in EQUAL.items():
        pairs = zip(of_verl(core_algos, ours.PREFIX + name), of_verl(core_algos, theirs), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise BrokenPlugin(f"{ours.PREFIX}{name} is not verl's {theirs}: this is verl {version('verl')}, not 0.9")
    return Found(computed, refused)


def of_verl(core_algos: Any, mode: str, **fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss by its name in verl and its gradient on a few random tokens; ``fields`` are settings of verl's actor."""
    from verl.workers.config import ActorConfig

    # A dynamic batch size lifts a demand for sizes of micro-batches, which no loss looks at.
    config = ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, **fields)
    generator = torch.Generator().manual_seed(0)
    old_BT, moved_BT = -torch.rand(4, 5, generator=generator), 0.5 * torch.randn(4, 5, generator=generator)
    logprobs_BT = (old_BT + moved_BT).requires_grad_()
    value, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=old_BT,
        log_prob=logprobs_BT,
        advantages=torch.tensor([1.0, -0.5, 0.8, -1.2])[:, None].expand(4, 5),
        response_mask=torch.arange(5) < torch.tensor([5, 3, 1, 4])[:, None],
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )
    return value.detach(), torch.autograd.grad(value, logprobs_BT)[0]


def answer(modes: Sequence[str]) -> int:
    """Print what was found, and the lines that choose ``modes``; return the exit code."""
    try:
        chosen = [line for mode in modes for line in ours.lines(mode)]
    except ValueError as error:
        print(f"steadymoe: {_one_line(error)}", file=sys.stderr)
        return 2
    try:
        found = check()
    except BrokenPlugin as error:
        print(f"steadymoe: {error}", file=sys.stderr)
        return 1
    print(f"verl {version('verl')} has {len(found.computed)} losses: {', '.join(found.computed)}")
    for why in found.refused.values():
        print(f"not in verl: {why}")
    print("".join(f"{line}\n" for line in chosen), end="")
    return 0


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


if __name__ == "__main__":
    sys.exit(answer(sys.argv[1:]))

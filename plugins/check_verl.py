"""Check that verl's processes have the losses: ``python -m steadymoe.plugins.check_verl [steadymoe/NAME …]``.

verl hides the error of a plugin. This command shows it in one line, computes every loss through verl, and prints the
arguments that choose the named losses. Exit code 0; 1 if verl lacks the losses; 2 for a name that verl cannot feed.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from typing import Any

import torch

from steadymoe.algorithms import names
from steadymoe.plugins import verl as plugin

MODULE = "steadymoe.plugins.register_verl"
# Our preset → verl's own loss, which equals it at verl's defaults.
EQUAL = {"grpo@verl-0.9": "vanilla", "gspo@verl-0.9": "gspo"}
# Prints the losses that a new process has after importing verl.
LIST_LOSSES = (
    "import json; from verl.trainer.ppo import core_algos; print(json.dumps(list(core_algos.POLICY_LOSS_REGISTRY)))"
)


class BrokenPlugin(RuntimeError):
    """verl does not have the losses; the message is one line and says why."""


def main(words: list[str]) -> int:
    """Check the plugin, print what verl can compute and the arguments for the losses named; return the exit code."""
    try:
        arguments = [line for mode in words for line in plugin.lines(mode)]
        computed, refused = check()
    except (ValueError, BrokenPlugin) as error:
        print(f"steadymoe: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, BrokenPlugin) else 2
    print(f"verl {version('verl')} has {len(computed)} losses: {', '.join(computed)}")
    for name, reason in refused.items():
        print(f"not in verl: {name} {reason}")
    print("".join(f"{line}\n" for line in arguments), end="")
    return 0


def check() -> tuple[list[str], dict[str, str]]:
    """Load the plugin as verl does, in a separate process, and compute every loss through verl's registry.

    Returns the names that verl can compute, and the others with what they need. Raises BrokenPlugin if verl would train
    without the losses, or if one that both have is not equal.
    """
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    plugins = [point for point in entry_points(group="verl.plugins") if point.value == MODULE]
    if not plugins:
        raise BrokenPlugin(f"no installed package has the entry point {MODULE} of verl.plugins: pip install ./losses")
    if policy != "auto" and plugins[0].name not in [name.strip() for name in policy.split(",")]:
        raise BrokenPlugin(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves {plugins[0].name} out; unset it, or add the name"
        )
    try:
        plugins[0].load()  # verl hides errors raised here
        from verl.trainer.ppo import core_algos
    except Exception as error:
        raise BrokenPlugin(f"the plugin cannot be loaded: {type(error).__name__}: {error}") from error
    listed = subprocess.run([sys.executable, "-c", LIST_LOSSES], capture_output=True, text=True)
    if listed.returncode:
        raise BrokenPlugin(f"verl cannot be imported in a separate process: {listed.stderr[-300:]}")
    registered = json.loads(listed.stdout.splitlines()[-1])
    absent = [plugin.PREFIX + name for name in names(presets=True) if plugin.PREFIX + name not in registered]
    if absent:
        raise BrokenPlugin(f"a process that imports verl lacks {', '.join(absent)}")
    return _compute(core_algos)


def _compute(core_algos: Any) -> tuple[list[str], dict[str, str]]:
    """Compute every loss on a few tokens, as verl's workers do."""
    computed, refused = [], {}
    for name in names(presets=True):
        loss = plugin.load(name)
        if (reason := plugin.refusal(loss)) is not None:
            refused[name] = reason
            continue
        value, gradient_BT = through_verl(core_algos, plugin.PREFIX + name, **plugin.settings(loss))
        if not (value.isfinite() and gradient_BT.isfinite().all()):
            raise BrokenPlugin(f"{plugin.PREFIX}{name} is not finite in verl")
        computed.append(name)
    for name, verls in EQUAL.items():
        pairs = zip(through_verl(core_algos, plugin.PREFIX + name), through_verl(core_algos, verls), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise BrokenPlugin(f"{plugin.PREFIX}{name} is not verl's {verls}: this is verl {version('verl')}, not 0.9")
    return computed, refused


def through_verl(core_algos: Any, mode: str, **fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss of verl's registry and its gradient on random tokens; ``fields`` are settings of verl's actor."""
    from verl.workers.config import ActorConfig

    # A dynamic batch size lifts the need for micro-batch sizes, which no loss reads.
    config = ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, **fields)
    generator = torch.Generator().manual_seed(0)
    old_BT, change_BT = -torch.rand(4, 5, generator=generator), 0.5 * torch.randn(4, 5, generator=generator)
    logprobs_BT = (old_BT + change_BT).requires_grad_()
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

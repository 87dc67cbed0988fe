"""Cold start: supervised training on noisy demonstrations, so that reinforcement has something to improve.

A policy that has learnt the format, is right about half of the time, and has entropy to lose. It is made
once for each model, task and seed, and shared by all algorithms: their comparison is paired.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import load_model
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadymoe.algorithms.ops import aggregate
from steadymoe.bench.schema import ColdStartConfig, RunConfig
from steadymoe.bench.support import files
from steadymoe.bench.support.seeding import numpy_generator, seeded_globals, torch_generator
from steadymoe.bench.support.text import visible
from steadymoe.bench.tasks import Task, sample
from steadymoe.bench.training import checkpoint, optimizers
from steadymoe.bench.training.forward import Sequences, forward, router_losses
from steadymoe.bench.training.sampling import Decoding, roll_out

# The time left is judged by the slope of the accuracy over the last half of the checks, so many at least.
_SLOPE_CHECKS = 5
# Far below the band, by so many standard deviations of its accuracy, this share of the prompts is enough.
_FEW, _FAR = 0.25, 3.0
# Accuracy is taken to rise by at most this much an update; in the shipped settings it rises by .014. Checks at which
# it cannot be in the band are left out, but few in a row, so that a smaller ``check_every`` means something.
_STEEPEST, _MOST_LEFT_OUT = 0.015, 3

# Told of every check of the accuracy: updates so far, accuracy, seconds left by ``updates_left``.
OnCheck = Callable[[int, float, float], None]
# Checks so far: (updates, accuracy).
Checks = list[tuple[int, float]]


class ColdStartError(Exception):
    """The policy did not reach its accuracy band; the message says what to change."""


def load_or_make(
    model: PreTrainedModel, task: Task, config: RunConfig, cache: Path, on_check: OnCheck = lambda *_: None
) -> dict[str, Any]:
    """Bring ``model`` to its cold start: from ``cold_start.path``, from ``cache``, or by training it now.

    Returns what is known of it (accuracy, updates, checksum). Of two runs that want the same cold start at once,
    one makes it and the other waits. One that was interrupted goes on after its last check, to the same bytes.
    A cached one whose weights are not those that were trained is put aside and trained again. ``on_check`` is told of
    every check. Raises ColdStartError if training misses its band.
    """
    if config.cold_start.path is not None:
        load_model(model, config.cold_start.path, device=str(model.device))
        return {"path": config.cold_start.path}
    name = config.cold_start_fingerprint
    weights, facts = cache / f"{name}.safetensors", cache / f"{name}.json"
    partial = cache / f"{name}.partial.safetensors"
    files.folder(cache.parent, cache.name)
    with FileLock(files.replaceable(cache / f".{name}.lock")):
        damaged = _damaged(facts, weights)
        if damaged is not None:
            facts.unlink()
            if os.path.lexists(weights):
                weights.replace(weights.with_name(f"{weights.name}.damaged"))
        if not os.path.lexists(facts):
            try:
                outcome = train(model, task, config, on_check, partial)
                checkpoint.save_weights(weights, model)
                outcome |= {"sha256": _checksum(weights)} | ({} if damaged is None else {"rebuilt": damaged})
            except ColdStartError as error:  # the same config would fail alike: nobody else need try
                outcome = {"error": str(error)}
            files.write_json(facts, outcome)  # last: its presence says that the weights are whole
        partial.unlink(missing_ok=True)
        outcome = files.read_json(facts)
        if "error" in outcome:
            raise ColdStartError(outcome["error"])
        load_model(model, weights, device=str(model.device))
        return outcome


def _damaged(facts: Path, weights: Path) -> str | None:
    """Return why a cached cold start is not the one that was trained; None if it is, or if there is none."""
    try:
        outcome = files.read_json(facts)
        if "error" in outcome or outcome.get("sha256") == _checksum(weights):
            return None
    except FileNotFoundError:
        return "its weights were missing" if os.path.lexists(facts) else None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"it could not be read: {error}"
    return f"its weights were damaged, and are kept in {weights.name}.damaged"


def _checksum(path: Path) -> str:
    with files.opened(path, sys.maxsize) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def train(
    model: PreTrainedModel,
    task: Task,
    config: RunConfig,
    on_check: OnCheck = lambda *_: None,
    partial: Path | None = None,
) -> dict[str, Any]:
    """Supervised updates until the sampled held-out accuracy lies in the band; see ``schema.ColdStartConfig``.

    What is needed to go on is kept in ``partial`` after every check, and taken from there. Raises ColdStartError when
    the accuracy jumps over the band or does not reach it in time.
    """
    numbers, seed = config.cold_start, config.seed
    optimizer = optimizers.adamw(model, numbers.learning_rate, numbers.router_factor, weight_decay=0.0)
    low, high, most = numbers.accuracy_low, numbers.accuracy_high, numbers.max_updates
    checks = [] if partial is None else _resume(partial, model, optimizer)
    first, begun = checks[-1][0] if checks else 0, time.monotonic()
    for update in range(first + 1, most + 1):
        is_checked = update >= next_check(checks, numbers)
        with seeded_globals(seed, "cold_start", update):
            _update(model, optimizer, task, numpy_generator(seed, "cold_start", update), config)
            accuracy = _checked(model, task, config, update) if is_checked else 0.0
        if is_checked:
            checks.append((update, accuracy))
            pace = (time.monotonic() - begun) / (update - first)
            on_check(update, accuracy, pace * updates_left(checks, low, most))
            if accuracy > high:
                raise ColdStartError(
                    f"the cold start jumped over its band: accuracy {accuracy:.2f} > {high} after {update} updates; "
                    "raise cold_start.noise or lower cold_start.check_every"
                )
            if accuracy >= low:
                return {"accuracy": accuracy, "updates": update}
            if partial is not None:
                _keep(partial, model, optimizer, checks)
    accuracy = checks[-1][1] if checks else 0.0
    raise ColdStartError(
        f"the cold start reached only accuracy {accuracy:.2f} < {low} in {most} updates; "
        "lower cold_start.noise, or raise cold_start.max_updates or cold_start.learning_rate"
    )


def next_check(checks: Sequence[tuple[int, float]], numbers: ColdStartConfig) -> int:
    """Return the update of the next check: the first multiple of ``check_every`` at which the band may be reached.

    ``checks`` are those so far. The last multiple up to ``max_updates`` is always checked.
    """
    (update, accuracy), every = checks[-1] if checks else (0, 0.0), numbers.check_every
    left_out = math.ceil((numbers.accuracy_low - accuracy) / (_STEEPEST * every)) - 1
    due, last = update + every * (1 + min(max(left_out, 0), _MOST_LEFT_OUT)), numbers.max_updates // every * every
    return last if update < last < due else due


def updates_left(checks: Sequence[tuple[int, float]], goal: float, most: int) -> float:
    """Updates until the accuracy is ``goal`` if it keeps rising as over the last checks, and at most ``most`` in all.

    ``checks``: updates and accuracy of each, at least one. A line is fitted by least squares through the last half of
    the checks; if it does not rise, the result is the updates left until ``most``.
    """
    update, accuracy = checks[-1]
    updates, accuracies = np.array(checks[-max(_SLOPE_CHECKS, len(checks) // 2) :]).T
    rising = np.polyfit(updates, accuracies, 1)[0] if len(updates) > 1 else 0.0
    bound = float(most - update)
    return min(bound, max(0.0, goal - accuracy) / float(rising)) if rising > 0 else bound


def _update(
    model: PreTrainedModel, optimizer: Optimizer, task: Task, generator: np.random.Generator, config: RunConfig
) -> None:
    prompts = sample(task, config.cold_start.batch_size, generator)
    answers = task.demonstrations(prompts, config.cold_start.noise, generator)
    sequences = demonstrate(prompts, answers, task.tokenizer, model.device)
    now = forward(model, sequences, config.precision)
    loss = -aggregate(now.logprobs_BT, sequences.response_mask_BT, "seq-mean-token-mean")
    given = config.cold_start
    (loss + router_losses(now, sequences, given.aux_loss, given.z_loss, given.aux_loss_per_layer)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _keep(partial: Path, model: PreTrainedModel, optimizer: Optimizer, checks: Checks) -> None:
    """Write what an interrupted cold start goes on with. Randomness needs nothing: see ``seeding``."""
    tensors, metadata = checkpoint.training_state(model, optimizer), {"checks": json.dumps(checks)}
    checkpoint.write_tensors(partial, tensors, metadata)


def _resume(partial: Path, model: PreTrainedModel, optimizer: Optimizer) -> Checks:
    """Restore what ``_keep`` wrote and return its checks; none without such a file, and, with a line, of a bad one."""
    try:
        tensors, metadata = checkpoint.read_tensors(partial)
        checks = [(int(update), float(accuracy)) for update, accuracy in json.loads(metadata["checks"])]
        checkpoint.restore_training(model, optimizer, tensors)
    except FileNotFoundError:
        return []
    except (OSError, KeyError, TypeError, ValueError) as error:
        why = visible(f"{partial} cannot be used: {error}")
        print(f"steadymoe: restarting the cold start, because {why}", file=sys.stderr)
        return []
    return checks


def demonstrate(
    prompts: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Sequences:
    """Prompts padded on the left, answers with their end token padded on the right."""
    left = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    ended = [answer + tokenizer.eos_token for answer in answers]
    right = tokenizer(ended, padding=True, padding_side="right", return_tensors="pt")

    def joined(key: str) -> Tensor:
        return torch.cat([left[key], right[key]], dim=1).to(device)

    return Sequences(joined("input_ids"), joined("attention_mask"), right["input_ids"].shape[1])


def _checked(model: PreTrainedModel, task: Task, config: RunConfig, update: int) -> float:
    """Return the sampled accuracy on held-out prompts: all of them, unless few show that it is far below the band."""
    numbers = config.cold_start
    few, low = round(_FEW * numbers.check_prompts), numbers.accuracy_low
    deviation = math.sqrt(low * (1 - low) / few) if few else math.inf
    if low > _FAR * deviation:
        accuracy = _accuracy(model, task, few, config, update)
        if accuracy < low - _FAR * deviation:
            return accuracy
    return _accuracy(model, task, numbers.check_prompts, config, update)


def _accuracy(model: PreTrainedModel, task: Task, prompts: int, config: RunConfig, update: int) -> float:
    held_out = sample(task, prompts, numpy_generator(config.seed, "cold_start_accuracy", update), held_out=True)
    generator = torch_generator(config.seed, "cold_start_accuracy", update, model.device.type)
    decoding = Decoding(precision=config.precision, routes=False)
    return roll_out(model, task, held_out, 1, generator, decoding).scores_B.mean().item()

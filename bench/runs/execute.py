"""One run from its config to its folder: cold start, steps, checkpoints, and its end."""

import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from hydra.utils import instantiate
from transformers import PreTrainedModel

from steadymoe.bench.runs import compose, identity, loggers, progress, provenance, record, run_folder, start_evaluation
from steadymoe.bench.runs.record import Record
from steadymoe.bench.schema import RunConfig
from steadymoe.bench.statistics.collapse import Rule, judge
from steadymoe.bench.support import blame, processes
from steadymoe.bench.support.errors import ConfigError
from steadymoe.bench.support.seeding import derive, repeatable
from steadymoe.bench.support.text import visible
from steadymoe.bench.tasks import Task
from steadymoe.bench.training import checkpoint, cold_start, samples
from steadymoe.bench.training.columns import names
from steadymoe.bench.training.trainer import Trainer
from steadymoe.models import build, pretrained

REWARD, TOKENS_SAMPLED = names("reward", "tokens_sampled")


def execute(run: compose.Run) -> str:
    """Run to completion, from the checkpoint if there is one, and return the status.

    A run that has ended is left as it is. A run that another process holds is left too (status ``running``). Whatever
    a run raises, SystemExit too, is written to ``run.json`` as ``failed`` and does not stop other runs; Ctrl-C and
    SIGTERM do. Raises ConfigError if the folder holds a run of another config.
    """
    try:
        with Record(run.folder, _facts(run)) as recorded:
            state = run_folder.state_of(run)
            if state.has_ended or (run.config.retry == "failed" and state.status != "failed"):
                return state.status
            if state.damage is not None:
                place = run_folder.move_away(run.folder, Path(run.config.results_dir), "damaged")
                why = f"the run that was here was damaged ({state.damage}) and is now in {place}"
                recorded.run["restarted"] = why
            try:
                _train(run, recorded)
            except BaseException as error:  # a user's code may call sys.exit()
                if processes.is_interrupt(error):
                    recorded.update(status="interrupted")
                    raise
                try:
                    recorded.update(status="failed", error=blame.failure(error))
                except OSError:  # a full disk, say: the old run.json stays, and its status is not an end
                    print(f"steadymoe: {run.folder}: {blame.failure(error)}", file=sys.stderr)
                    return "failed"
            return recorded.run["status"]
    except Timeout:
        return "running"


def _train(run: compose.Run, recorded: Record) -> None:
    config = run.config
    if config.device == "cuda" and not torch.cuda.is_available():  # perhaps another machine than composed the run
        raise ConfigError("device=cuda, but torch finds no CUDA device here; use device=cpu")
    resume_from = _resume_from(recorded, config.kept_rollout)
    recorded.begin(resume_from)
    samples.keep_until(recorded.folder, resume_from)

    task, model, made = at_start(
        config, lambda *check: recorded.update(progress=dict(zip(progress.CHECK, check, strict=True)))
    )
    trainer = Trainer(model, task, config)
    savings = {"share_prompts": trainer.learner.forwards.unshared or True}
    recorded.update(cold_start=recorded.run["cold_start"] | made, savings=savings, **build.size(model))

    if resume_from is None:
        start = start_evaluation.of_start(config, made, _starts(config), partial(trainer.evaluate, 0))
        recorded.append({"evaluations": start})
    else:
        checkpoint.load(recorded.checkpoint, trainer.learner, trainer.sampler)
    diverged, first = None, (resume_from or 0) + 1
    rewards = record.read_table(recorded.folder, "steps")[REWARD].dropna().tolist()
    begun = time.monotonic()
    with loggers.sending(config, recorded.folder, resumed=resume_from is not None) as send:
        for step in range(first, config.rollouts + 1):
            result = trainer.step(step)
            samples.append(recorded.folder, list(result.samples))
            recorded.append(result.rows)
            send(result.rows)
            row = result.rows["steps"][0]
            rewards += [row[REWARD]] if REWARD in row else []
            shown = {name: row.get(name) for name in progress.METRICS}
            shown["best_reward"] = max(rewards, default=None)
            shown["seconds_per_step"] = (time.monotonic() - begun) / (step - first + 1)
            recorded.update(progress={"step": step, "steps": config.rollouts} | shown)
            if result.diverged_at_update is not None:
                diverged = {"reason": "not finite", "step": step, "update": result.diverged_at_update}
                break
            if step == config.kept_rollout:  # first: a run that is killed between the two resumes before this step
                checkpoint.save_weights(run_folder.weights_path(recorded.folder, step), model)
            if step % config.in_rollouts(config.checkpoint_every) == 0 and step < config.rollouts:
                checkpoint.save(recorded.checkpoint, trainer.learner, trainer.sampler, step)

    steps = record.read_table(recorded.folder, "steps")
    collapse = judge(steps, Rule(**asdict(config.collapse)), config.updates_per_rollout).collapse
    if diverged is None and collapse is not None:
        diverged = {"reason": collapse.reason, "step": collapse.step, "update": None}
    recorded.end(diverged, tokens=int(steps[TOKENS_SAMPLED].sum()))


def at_start(config: RunConfig, on_check: cold_start.OnCheck) -> tuple[Task, PreTrainedModel, dict[str, Any]]:
    """Return the task, the model at its cold start, and what is known of that start.

    ``on_check`` is told of every check of a cold start that is made now. Raises ColdStartError if it misses its band.
    """
    repeatable(config.device, config.threads)
    task: Task = instantiate(config.task)
    if "path" in config.model:
        task.tokenizer = pretrained.load_tokenizer(config.model["path"])
        model = pretrained.load(config.model["path"], config.device, config.experts)
        return task, model, {"checkpoint": config.model["path"]}
    seed = derive(config.seed, "model")
    model = build.build(config.model["config"], task.tokenizer, seed, config.device, config.experts)
    return task, model, cold_start.load_or_make(model, task, config, _starts(config), on_check)


def _starts(config: RunConfig) -> Path:
    return Path(config.results_dir) / "cold_starts"


def _resume_from(recorded: Record, keep: int | None) -> int | None:
    """Return the step of the checkpoint in the folder; None to start anew.

    The checkpoint must be made with these library versions and this code, no row up to it may be lost, and the
    weights of step ``keep``, if that step is over, must have been kept. If not, a line and ``run.json``, under
    ``restarted``, give the reason.
    """
    if not recorded.checkpoint.exists():
        return None
    before, step = run_folder.read_run(recorded.folder), checkpoint.step_of(recorded.checkpoint)
    if before is None or provenance.difference(before, imported=True) != provenance.Difference(None, None, None):
        reason = "the library versions or the code have changed since its checkpoint"
    elif step is None:
        reason = "its checkpoint is damaged"
    elif not recorded.holds(step):
        reason = "rows of steps before its checkpoint are lost"
    elif keep is not None and keep <= step and not run_folder.weights_path(recorded.folder, keep).exists():
        reason = f"the weights of step {keep} were not kept"
    else:
        return step
    recorded.run["restarted"] = reason
    print(f"steadymoe: {visible(recorded.folder)}: restarted at step 1, because {reason}", file=sys.stderr)
    return None


def _facts(run: compose.Run) -> dict[str, Any]:
    config = run.config
    return {
        "status": "running",
        "experiment": config.experiment_name,
        **{group: run.choices[group] for group in run_folder.GROUPS},
        "axes": run.axes,
        "axes_name": identity.axes_name(run.axes),
        "not_applicable": list(run.not_applicable),
        "seed": config.seed,
        "config_hash": run.config_hash,
        "config_hash_without_seed": identity.config_hash(run.plain | {"seed": None}),
        "command": run.command,
        # A cached cold start has a fingerprint; a given one has a path, added later.
        "cold_start": {"fingerprint": config.cold_start_fingerprint} if config.has_own_cold_start else {},
        **provenance.facts(run.plain, config.experts, config.device, config.threads),
        "diverged": None,
        "error": None,
    }

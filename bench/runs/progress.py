"""One screen for all runs of a sweep, read from their ``run.json``; plain lines without a terminal."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from steadymoe.bench.runs import run_folder
from steadymoe.bench.runs.compose import Run, labels
from steadymoe.bench.support.text import visible
from steadymoe.bench.training.columns import names

# What ``run.json`` calls the three numbers of a check of a cold start (``training.cold_start.OnCheck``).
CHECK = ("cold_start_update", "cold_start_accuracy", "cold_start_seconds_left")
# The metrics that ``run.json`` holds of the last step.
METRICS = REWARD, _, EXPERT_CHANGE_RATE = names("reward", "eval_accuracy", "expert_change_rate")

_SECONDS_BETWEEN_LOOKS = 0.5
# More runs than this do not fit a screen; the screen then shows only the runs in progress.
_ROWS = 24
# Without a terminal a line appears when a run starts, ends, or passes one of these shares of its steps,
_SHARES_SHOWN = (0.25, 0.5, 0.75)
# and, while a cold start is trained, this many seconds after the run's last line.
_SECONDS_BETWEEN_CHECKS = 10


# The runs that came before those watched, and all of which they are a part; 0: they are all.
_part = (0, 0)


@contextmanager
def counted(before: int, total: int) -> Iterator[None]:
    """Count the runs that the block watches as some of ``total``, after ``before`` others."""
    global _part
    outer, _part = _part, (before, total)
    try:
        yield
    finally:
        _part = outer


@contextmanager
def watch(runs: Sequence[Run], console: Console | None = None) -> Iterator[None]:
    """Show the progress of ``runs`` until the block ends, on stdout unless a ``console`` is given."""
    console = console or Console(markup=False, highlight=False)
    stop = threading.Event()
    show = _show_live if console.is_terminal else _show_lines
    thread = threading.Thread(target=show, args=(runs, console, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _show_live(runs: Sequence[Run], console: Console, stop: threading.Event) -> None:
    begun, last = time.monotonic(), False
    with Live(console=console, refresh_per_second=2) as live:
        while not last:
            last = stop.wait(_SECONDS_BETWEEN_LOOKS)
            live.update(_table(runs, time.monotonic() - begun))


def _table(runs: Sequence[Run], elapsed: float) -> Table:
    states, names = [_state(run) for run in runs], labels(runs)
    done = sum(state["status"] in run_folder.ENDED for state in states)
    counts = f"{_part[0] + done} of {_part[1] or len(runs)} runs done"
    title = f"{counts} · {_clock(elapsed)} elapsed · {_left(states)} left{_totals(states)}"
    table = Table(title=Text(visible(title)), title_justify="left")
    for name in ("run", "status", "step", "reward", "expert change", "left"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right")
    for label, state in zip(names, states, strict=True):
        if len(runs) > _ROWS and (state["status"] == "waiting" or state["status"] in run_folder.ENDED):
            continue
        left = _left([state]) if state["status"] == "running" else ""
        table.add_row(
            Text(visible(label)),
            state["status"],
            f"{state['step']}/{state['steps']}",
            _number(state.get(REWARD), ".2f"),
            _number(state.get(EXPERT_CHANGE_RATE), ".4f"),
            left if state["cold_start_left"] is None else _clock(state["cold_start_left"]),
        )
    return table


def _show_lines(runs: Sequence[Run], console: Console, stop: threading.Event) -> None:
    names = labels(runs)
    shown: list[tuple[str, int] | None] = [None] * len(runs)
    printed = [-float("inf")] * len(runs)
    last = False
    while not last:
        last = stop.wait(_SECONDS_BETWEEN_LOOKS)
        states = [_state(run) for run in runs]
        done = sum(state["status"] in run_folder.ENDED for state in states)
        for index, state in enumerate(states):
            share, now = state["step"] / state["steps"], time.monotonic()
            mark = (state["status"], sum(share >= shown_at for shown_at in _SHARES_SHOWN))
            is_checked = state["cold_start_left"] is not None and now - printed[index] >= _SECONDS_BETWEEN_CHECKS
            if state["status"] == "waiting" or (mark == shown[index] and not is_checked):
                continue
            shown[index], printed[index] = mark, now
            left = "" if (remaining := _left(states)) == "?" else f", about {remaining} left"
            line = f"[{_part[0] + done}/{_part[1] or len(runs)}] {names[index]}: {_line(state)}{left}{_totals(states)}"
            console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def _line(state: dict[str, Any]) -> str:
    if state["status"] in ("cold start", "loading"):
        left = state["cold_start_left"]
        said = (state["status"], state["cold_start"], "" if left is None else f"about {_clock(left)} of it left")
        return ", ".join(filter(None, said))
    return (
        f"{state['status']}, step {state['step']}/{state['steps']}, reward {_number(state.get('reward'), '.2f')}, "
        f"expert change {_number(state.get('expert_change_rate'), '.4f')}"
    )


def _state(run: Run) -> dict[str, Any]:
    """Return the progress of a run, read from its folder, with its status, number of steps, and cold start."""
    facts = run_folder.known(run.folder)
    progress = facts.get("progress") or {}
    status = run_folder.current_status(run.folder, facts) if facts else "waiting"
    made, left = "", None
    if status == "running" and not progress.get("step", 0):
        update, accuracy, left = (progress.get(name) for name in CHECK)
        is_given = "path" in run.config.model or run.config.cold_start.path is not None
        status = "loading" if is_given else "cold start"
        if update is not None and accuracy is not None:
            needed = run.config.cold_start.accuracy_low
            made = f"{update} updates, accuracy {accuracy:.2f}, {needed:g} needed"
            left = left if accuracy >= needed / 2 else None  # before, a guess by an accuracy that hardly moves
    now = {"status": status, "cold_start": made, "cold_start_left": left}
    return {"step": 0} | progress | now | {"steps": run.config.rollouts}


def _totals(states: Sequence[dict[str, Any]]) -> str:
    best = [state["best_reward"] for state in states if state.get("best_reward") is not None]
    counts = Counter(state["status"] for state in states)
    parts = [f"best {max(best):.2f}"] if best else []
    parts += [f"{counts[status]} {status}" for status in ("collapsed", "diverged", "failed") if counts[status]]
    return "".join(f" · {part}" for part in parts)


def _left(states: Sequence[dict[str, Any]]) -> str:
    """Return the remaining time of all runs at their pace so far, without cold starts; "?" without a pace."""
    timed = [state for state in states if state["step"] > 1]  # the first step also warms up
    paces = [state["seconds_per_step"] for state in timed if state.get("seconds_per_step") is not None]
    if not paces:
        return "?"
    steps = sum(state["steps"] - state["step"] for state in states if state["status"] not in run_folder.ENDED)
    at_once = max(1, sum(state["status"] == "running" for state in states))
    return _clock(steps * sum(paces) / len(paces) / at_once)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

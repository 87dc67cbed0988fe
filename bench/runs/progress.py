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

from steadymoe.bench.config.compose import Run, labels
from steadymoe.bench.runs import record
from steadymoe.bench.support.text import visible
from steadymoe.bench.training.cold_start import CHECK

_SECONDS_BETWEEN_LOOKS = 0.5
# More runs than this do not fit a screen; the screen then shows only the runs in progress.
_ROWS = 24
# Without a terminal a line appears when a run starts, ends, or passes one of these shares of its steps,
_SHARES_SHOWN = (0.25, 0.5, 0.75)
# and, while a cold start is trained, this many seconds after the run's last line.
_SECONDS_BETWEEN_CHECKS = 10


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
    begun = time.monotonic()
    with Live(console=console, refresh_per_second=2) as live:
        while not stop.wait(_SECONDS_BETWEEN_LOOKS):
            live.update(_table(runs, time.monotonic() - begun))
        live.update(_table(runs, time.monotonic() - begun))


def _table(runs: Sequence[Run], elapsed: float) -> Table:
    states = [_state(run) for run in runs]
    done = sum(state["status"] in record.ENDED for state in states)
    left, names = _left(states), labels(runs)
    title = f"{done} of {len(runs)} runs done · {_clock(elapsed)} gone · {left} left{_best_and_worst(names, states)}"
    table = Table(title=Text(visible(title)), title_justify="left")
    for name in ("run", "status", "step", "reward", "expert change", "left"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right")
    for label, state in zip(names, states, strict=True):
        if len(runs) > _ROWS and (state["status"] == "waiting" or state["status"] in record.ENDED):
            continue
        table.add_row(
            Text(visible(label)),
            state["status"],
            f"{state['step']}/{state['steps']}",
            _number(state["reward"], ".2f"),
            _number(state["expert_change_rate"], ".4f"),
            _clock(state["cold_start_left"])
            if state["cold_start_left"] is not None
            else _left([state])
            if state["status"] == "running"
            else "",
        )
    return table


def _show_lines(runs: Sequence[Run], console: Console, stop: threading.Event) -> None:
    names = labels(runs)
    shown: list[Any] = [None] * len(runs)
    told = [-float("inf")] * len(runs)
    last = False
    while not last:
        last = stop.wait(_SECONDS_BETWEEN_LOOKS)
        states = [_state(run) for run in runs]
        for index, state in enumerate(states):
            share, now = state["step"] / state["steps"], time.monotonic()
            at = (state["status"].partition(",")[0], sum(share >= each for each in _SHARES_SHOWN))
            checked = state["cold_start_left"] is not None and now - told[index] >= _SECONDS_BETWEEN_CHECKS
            mark = (*at, state["status"] if checked or shown[index] is None else shown[index][-1])
            if mark == shown[index] or state["status"] == "waiting":
                continue
            shown[index], told[index] = mark, now
            done = sum(each["status"] in record.ENDED for each in states)
            said = f"[{done}/{len(runs)}] {names[index]}: {_line(state)}"
            said += f"{_left_of_all(states)}{_best_and_worst(names, states)}"
            console.print(
                visible(said),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _line(state: dict[str, Any]) -> str:
    """The words of a line for one run."""
    if state["cold_start_left"] is not None:
        return f"{state['status']}, about {_clock(state['cold_start_left'])} left of it"
    if state["status"] in ("cold start", "loading", "compiling layers"):
        return state["status"]
    return (
        f"{state['status']}, step {state['step']}/{state['steps']}, reward {_number(state['reward'], '.2f')}, "
        f"expert change {_number(state['expert_change_rate'], '.4f')}"
    )


def _left_of_all(states: Sequence[dict[str, Any]]) -> str:
    """The words for the remaining time of all runs; "" if no run has a pace."""
    left = _left(states)
    return "" if left == "?" else f", about {left} left"


def _state(run: Run) -> dict[str, Any]:
    """The progress of a run, read from its folder."""
    facts = record.known(run.folder)
    progress = facts.get("progress") or {}
    step, steps = progress.get("step", 0), run.config.steps
    status = record.current_status(run.folder, facts) if facts else "waiting"
    left = None
    if status == "running" and not step:
        update, accuracy, left = (progress.get(name) for name in CHECK)
        goal = run.config.cold_start.accuracy_low
        given = "path" in run.config.model or run.config.cold_start.path is not None
        status = "loading" if given else "cold start"
        if progress.get("compiling"):
            status = "compiling layers"
        status += "" if update is None else f", {update} updates, accuracy {accuracy:.2f} of {goal:g}"
    return {
        "status": status,
        "step": step,
        "steps": steps,
        "reward": progress.get("reward"),
        "best_reward": progress.get("best_reward"),
        "expert_change_rate": progress.get("expert_change_rate"),
        "seconds_per_step": progress.get("seconds_per_step"),
        "cold_start_left": left,
    }


def _best_and_worst(names: Sequence[str], states: Sequence[dict[str, Any]]) -> str:
    """The words for the highest reward and its run, and for the numbers of collapsed, diverged and failed runs."""
    best = [state["best_reward"] for state in states]
    known = [(reward, name) for reward, name in zip(best, names, strict=True) if reward is not None]
    said = f" · best {max(known)[0]:.2f} ({max(known)[1]})" if known else ""
    counts = Counter(state["status"] for state in states)
    return said + "".join(
        f" · {counts[status]} {status}" for status in ("collapsed", "diverged", "failed") if counts[status]
    )


def _left(states: Sequence[dict[str, Any]]) -> str:
    """The remaining time of all runs at the pace of their steps so far, without cold starts; "?" without a pace."""
    paces = [state["seconds_per_step"] for state in states if state["seconds_per_step"] is not None]
    if not paces:
        return "?"
    steps = sum(state["steps"] - state["step"] for state in states if state["status"] not in record.ENDED)
    at_once = max(1, sum(state["status"] == "running" for state in states))
    return _clock(steps * sum(paces) / len(paces) / at_once)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

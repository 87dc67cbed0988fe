"""One screen for all runs of a sweep, read from their ``run.json``; plain lines without a terminal."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from steadymoe.bench import record
from steadymoe.bench.compose import Run, labels

_SECONDS_BETWEEN_LOOKS = 0.5
# Without a terminal: a line when a run starts, ends, or passes one of these shares of its steps.
_SHARES_SHOWN = (0.25, 0.5, 0.75)


@contextmanager
def watch(runs: Sequence[Run], console: Console) -> Iterator[None]:
    """Show the progress of ``runs`` until the block ends."""
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
    left = _left(states, elapsed)
    table = Table(title=f"{done} of {len(runs)} runs done · {_clock(elapsed)} gone · {left} left", title_justify="left")
    for name in ("run", "status", "step", "reward", "expert change", "left"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right")
    for label, state in zip(labels(runs), states, strict=True):
        table.add_row(
            label,
            state["status"],
            f"{state['step']}/{state['steps']}",
            _number(state["reward"], ".2f"),
            _number(state["expert_change_rate"], ".4f"),
            _clock(state["left"]) if state["left"] is not None and state["status"] == "running" else "",
        )
    return table


def _show_lines(runs: Sequence[Run], console: Console, stop: threading.Event) -> None:
    begun = time.monotonic()
    names = labels(runs)
    shown: list[tuple[str, int]] = [("", -1)] * len(runs)
    last = False
    while not last:
        last = stop.wait(_SECONDS_BETWEEN_LOOKS)
        states = [_state(run) for run in runs]
        for index, state in enumerate(states):
            share = state["step"] / state["steps"]
            now = (state["status"].partition(",")[0], sum(share >= each for each in _SHARES_SHOWN))
            if now == shown[index] or state["status"] == "waiting":
                continue
            shown[index] = now
            done = sum(each["status"] in record.ENDED for each in states)
            console.print(
                f"[{done}/{len(runs)}] {names[index]}: {state['status']}, step {state['step']}/{state['steps']}, "
                f"reward {_number(state['reward'], '.2f')}, "
                f"expert change {_number(state['expert_change_rate'], '.4f')}, "
                f"about {_left(states, time.monotonic() - begun)} left",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _state(run: Run) -> dict[str, Any]:
    """Where a run is, as its folder tells."""
    facts = record.read_run(run.folder)
    progress = (facts or {}).get("progress") or {}
    step, steps = progress.get("step", 0), run.config["steps"]
    status = "waiting" if facts is None else record.status(run.folder)
    if status == "running" and not step:
        accuracy = progress.get("cold_start_accuracy")
        status = "cold start" if accuracy is None else f"cold start, accuracy {accuracy:.2f}"
    left = None
    if facts is not None and step:
        left = facts["wall_seconds"] / step * (steps - step)
    return {
        "status": status,
        "step": step,
        "steps": steps,
        "reward": progress.get("reward"),
        "expert_change_rate": progress.get("expert_change_rate"),
        "left": left,
    }


def _left(states: Sequence[dict[str, Any]], elapsed: float) -> str:
    """Time left for all, from the share of steps done so far: rough until the cold starts are made."""
    done = sum(1.0 if state["status"] in record.ENDED else state["step"] / state["steps"] for state in states)
    return _clock(elapsed / done * (len(states) - done)) if done else "?"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

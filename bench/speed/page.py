"""The measured numbers as tables in Markdown, and their figure."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd

from steadymoe.bench.report.figures import looks, style
from steadymoe.bench.speed import measure
from steadymoe.bench.speed.measure import TimeRatio

_BASES = {"ours": "not compiled", "compiled": "compiled"}
_BESIDE = {
    "TRL": "TRL takes",
    "plain transformers": "plain transformers take",
    "dense twin": "the dense twin, not compiled, takes",
}


def markdown(numbers: Mapping[str, Any]) -> str:
    """The numbers as tables in Markdown; parts that were not measured are left out."""
    machine = numbers["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in numbers["versions"].items())
    head = (
        f"{machine['cores']} cores of {machine['cpu']}, one thread; {versions}; fp32 matmul peak "
        f"{numbers['matmul_gflops']:.0f} GFLOP/s. 32 prompts × 8 responses; 4 updates on chain (micro, tiny), "
        f"2 updates on sort (stale). Medians of {numbers['blocks']} blocks of {measure.BLOCK} steps, ratios of the "
        "same blocks with their range."
    )
    parts: dict[str, Callable[[Any], str]] = {
        "settings": partial(_of_settings, numbers["matmul_gflops"]),
        "lengths": _of_lengths,
        "two_processes": _of_two,
        "begins": _of_begins,
        "peak_mib": _of_memory,
        "losses": _of_losses,
        "scaling": _of_scaling,
    }
    return "\n\n".join([head, *(told(numbers[part]) for part, told in parts.items() if part in numbers)]) + "\n"


def _of_settings(peak_gflops: float, settings: Mapping[str, Any]) -> str:
    return _table(_rows(peak_gflops), settings)


def _of_lengths(lengths: Mapping[str, Any]) -> str:
    rows: dict[str, Callable[[Any], str]] = {
        "seconds a step, compiled": lambda one: f"{one['seconds']['compiled']:.2f}",
        "not compiled takes": lambda one: f"{TimeRatio(**one['not compiled'])} × the time",
        **{f"share of {each.replace('_', ' ')}": partial(_stage, each, "compiled") for each in _STAGES},
    }
    said = "Longer responses with the model of *stale*, 8 responses a prompt, 2 updates:"
    return f"{said}\n\n{_table(rows, lengths)}"


def _of_two(ratios: Mapping[str, float]) -> str:
    return (
        f"Two processes of *stale* at once make {ratios['ours']:.2f} times the steps of one, compiled "
        f"{ratios['compiled']:.2f}; of plain transformers {ratios['plain']:.2f}."
    )


def _of_begins(begins: Mapping[str, float]) -> str:
    return (
        f"A process of *stale* makes its first step after {begins['not compiled']:.1f} s if it is not compiled, after "
        f"{begins['empty cache']:.0f} s with an empty cache of compiled code, and after {begins['filled cache']:.1f} s "
        "with the filled one (imports included, one process each)."
    )


def _of_memory(held: Mapping[str, float]) -> str:
    told = ", ".join(f"{setting} {mib:,.0f}" for setting, mib in held.items())
    return f"Most memory that a process holds, MiB, interpreter and libraries included: {told}."


def _of_losses(shares: Mapping[str, float]) -> str:
    dearest = sorted(shares.items(), key=lambda each: -each[1])[:3]
    told = ", ".join(f"{name} {share:.1%}" for name, share in dearest)
    return (
        f"Share of a loss, forward and backward, in an update of micro, the three dearest algorithms: {told}; median "
        f"of all {statistics.median(shares.values()):.1%}."
    )


def _of_scaling(rows: list[dict[str, Any]]) -> str:
    lines = ["Seconds a step of micro as one dial is turned:", "", "| dial | seconds |", "|---|---|"]
    for dial, group in pd.DataFrame(rows).groupby("dial", sort=False):
        cells = ", ".join(f"{value}: {each:.3f}" for value, each in zip(group["value"], group["seconds"], strict=True))
        lines.append(f"| {dial} | {cells} |")
    return "\n".join(lines)


_STAGES = ("rollout", "old_policy", "update", "probe")


def _rows(peak_gflops: float) -> dict[str, Callable[[Any], str]]:
    """What the rows of the first table are called, and how a cell comes from a setting's numbers."""
    rows: dict[str, Callable[[Any], str]] = {
        f"seconds a step, {how}": partial(_seconds, at) for at, how in _BASES.items()
    }
    rows["not compiled takes"] = partial(_times, "compiled", "ours")
    for name, said in _BESIDE.items():
        rows |= {f"{said}, beside {how}": partial(_times, at, name) for at, how in _BASES.items()}
    rows["without shared prompts, not compiled"] = partial(_times, "ours", "no sharing")
    rows["with `savings.sampler_as_old=10`, compiled"] = partial(_times, "compiled", "sampler as old")
    rows |= {f"with `measure=little`, {how}": partial(_times, at, f"{at}, little") for at, how in _BASES.items()}
    rows |= {f"sampling beside `generate`, {how}": partial(_generate, at) for at, how in _BASES.items()}
    for at, how in _BASES.items():
        rows[f"rollout tokens/s, {how}"] = partial(_rate, at, "rollout_tokens_per_second")
        rows[f"training tokens/s, {how}"] = partial(_rate, at, "training_tokens_per_second")
        rows[f"useful arithmetic of training, {how}"] = partial(_useful, at, peak_gflops)
        rows |= {f"share of {each.replace('_', ' ')}, {how}": partial(_stage, each, at) for each in _STAGES}
    return rows


def _seconds(at: str, one: Mapping[str, Any]) -> str:
    return f"{one['seconds'][at]:.3f}"


def _generate(at: str, one: Mapping[str, Any]) -> str:
    return f"{TimeRatio(**one[at]['generate'])} times as fast"


def _rate(at: str, name: str, one: Mapping[str, Any]) -> str:
    return f"{one[at][name]:,.0f}"


def _useful(at: str, peak_gflops: float, one: Mapping[str, Any]) -> str:
    return f"{one[at]['useful_gflops']:.1f} GFLOP/s, {one[at]['useful_gflops'] / peak_gflops:.0%} of peak"


def _table(rows: Mapping[str, Callable[[Any], str]], columns: Mapping[str, Any]) -> str:
    head = f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    return head + "\n".join(
        f"| {name} | {' | '.join(cell(one) for one in columns.values())} |" for name, cell in rows.items()
    )


def _times(base: str, name: str, one: Mapping[str, Any]) -> str:
    found = one[base]["beside"].get(name)
    return "–" if found is None else f"{TimeRatio(**found)} × the time"


def _stage(stage: str, at: str, one: Mapping[str, Any]) -> str:
    return f"{one[at]['stages'][stage]:.0%}"


def scaling_figure(rows: pd.DataFrame) -> style.DataFigure:
    """Seconds of a step over each dial, on logarithmic axes."""
    dials = list(dict.fromkeys(rows["dial"]))
    with style.figure_style():
        figure, axes = style.panels(2, 3, 3.2, width=style.TWO_COLUMNS, sharey=True)
        for axis, dial in zip(axes, dials, strict=False):
            ours = rows[rows["dial"] == dial]
            axis.plot(ours["value"], ours["seconds"], "o-", color=looks.COLOURS[0], linewidth=1.1, markersize=3)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(ours["value"], [str(value) for value in ours["value"]])
            axis.set_xlabel(dial)
            shown = pd.DataFrame({"x": ours["value"], "mean": ours["seconds"]})
            style.note(axis, dial, shown, "seconds a step")
        for axis in axes[len(dials) :]:
            axis.remove()
        for axis in (axes[0], axes[3]):
            axis.set_ylabel("seconds a step")
        return style.finish(
            figure, None, "Processor seconds of one thread, a step's share of four of micro; no interval."
        )

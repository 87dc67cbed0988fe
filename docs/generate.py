"""Generated pages: every algorithm and other choice (algorithms.md), and every column (the end of metrics.md).

``python docs/generate.py`` writes both.
"""

import importlib
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from steadymoe.algorithms import RatioLoss, load, names, provenance
from steadymoe.bench.runs.overrides import CONF
from steadymoe.bench.training import columns

DOCS = Path(__file__).parent
_HEAD = """# Algorithms

Every loss with its equation, source and numbers. Generated from code and configs by \
`python docs/generate.py`. `tests/algorithms/test_family.py` repeats every \
equation as loops over scalars and compares value and gradient; `tests/algorithms/test_oracles.py` compares losses \
with what other trainers compute.

**Symbols.** J is the objective, to be maximised; the loss is −J. π_θ is the policy being trained, π_old the policy \
before the updates on a rollout, μ the policy that sampled. Â is the advantage, r or w the ratio of a token, s the \
ratio of a response (a sequence). G is the number of responses to a prompt, T_i the number of tokens of response i. \
sg[·] stops the gradient.

**Columns.** *Ratio* is the unit of the ratio and *anchor* the policy in its denominator. *Shaper* is the function \
that bounds the effect of the ratio, and *bounds* are its numbers. *Aggregation* says how tokens are averaged. \
Override ratio, anchor and aggregation with `algorithm.loss.ratio`, `algorithm.loss.anchor` and \
`algorithm.loss.aggregation`.

**Provenance** says where we read the equation. *paper*: in the paper itself. *peer's code*: in the code of the \
paper's authors or of a trainer, not in the paper. *reconstruction*: in neither; the loss follows an abstract, a \
digest or someone else's re-implementation, and may differ from the paper. A preset is always a peer's code. A claim \
about a reconstruction is a claim about this suite's version of the algorithm.
"""
_CHOICES = """Every other name that `steadymoe run` takes, with the first sentence of its YAML in `conf/`. Settings \
that take a value are in [commands.md](commands.md#settings).
"""
# Config group → how to choose from it.
_GROUPS = {
    "advantage": "`advantage=group_mean`: how rewards become advantages, instead of the algorithm's own way.",
    "correction": "`correction=tis`: a weight for the mismatch ρ = π_old/μ between trainer and sampler. An algorithm "
    "whose ratio is anchored at the sampler takes no correction.",
    "routing": "`routing=r2`: which experts a training forward runs. The routers' own choice is recorded either way; "
    "see [models.md](models.md#routing).",
    "engine": "`engine=fp8 engine.strength=0.5`: how the sampler differs from the trainer, and by how much; see "
    "[engines.md](engines.md#the-axis-engine).",
    "optimizer": "`optimizer=muon`: how gradients move weights. `optimizer.learning_rate` and its other fields keep "
    "their names; those of an experiment replace the optimizer's own.",
    "model": "`model=micro`: a small model with random weights, or a checkpoint. `model.config.num_experts=32` "
    "overrides a field of its config, `+model.config.head_dim=32` adds a field. [models.md](models.md) has the sizes.",
    "task": "`task=chain`: prompts, and the score of a response.",
    "experiment": "`experiment=quickstart`: a sweep saved as a file, with its number of runs and the time they took.",
}
_BOUNDS = ("clip", "cap", "max_", "tau", "c1_", "c2_", "gamma", "floor", "ratio_", "sequence_", "quantile", "budget")


def algorithms_page() -> str:
    """Return docs/algorithms.md."""
    lines = [_HEAD]
    lines += [
        "| algorithm | paper | provenance | ratio | anchor | shaper | aggregation | advantage | bounds |",
        "|---" * 9 + "|",
    ]
    lines += [_row(name) for name in names()]
    lines += ["", "## The same algorithms in other trainers", ""]
    lines += ["A preset is an algorithm with one trainer's numbers. Run it like an algorithm.", ""]
    lines += ["| preset | |", "|---|---|"]
    presets = [name for name in names(presets=True) if "@" in name]
    lines += [f"| `{name}` | {summary('algorithm', name)} |" for name in presets]
    lines += [""]
    first: dict[str, str] = {}
    for name in [*names(), *presets]:
        module = _module(name)
        lines += [f"## {name}", ""]
        if module in first:
            lines += [f"Same equation as [{first[module]}](#{first[module]}), with other numbers.", ""]
        else:
            first[module] = name
            lines += ["```", _doc(module), "```", ""]
        lines += ["```yaml", _yaml(name), "```", ""]
    return "\n".join([*lines, *_choices()])


def _choices() -> list[str]:
    """Return a table for each config group but algorithms, which have theirs above."""
    lines = ["## Other choices", "", _CHOICES]
    for group, usage in _GROUPS.items():
        names = sorted(path.name.removesuffix(".yaml") for path in (CONF / group).glob("*.yaml"))
        rows = [f"| `{name}` | {summary(group, name)} |" for name in names]
        lines += [f"### {group.capitalize()}", "", usage, "", "| name | |", "|---|---|", *rows, ""]
    return lines


def summary(group: str, name: str) -> str:
    """Return the first sentence of a config's first comment; all of a preset's, and the size of an experiment.

    Raises ValueError for a config that does not begin with a comment.
    """
    lines = [line for line in (CONF / group / f"{name}.yaml").read_text().splitlines() if line != "# @package _global_"]
    comment = [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines)]
    if not comment:
        raise ValueError(f"conf/{group}/{name}.yaml must begin with a comment that says what it is")
    prose = " ".join(line for line in comment if not line.startswith(" "))
    sentence = prose if "@" in name else re.split(r"(?<!\bDr\.)(?<=\.) (?=[A-Za-z`])", prose, maxsplit=1)[0]
    if group == "experiment":
        sizes = re.findall(rf"steadymoe run experiment={name} +(\d.*)", "\n".join(comment))
        sentence += f" {sizes[0]}." if sizes else ""
    return sentence.replace("|", "\\|")


def _row(name: str) -> str:
    """Return one line of the table. Raises ValueError for a docstring that does not name its shaper."""
    loss, doc = load(name), _doc(_module(name))
    host = getattr(loss, "host", loss)
    ratio, anchor = (host.ratio, host.anchor) if isinstance(host, RatioLoss) else ("–", "–")
    paper = re.search(r"\b\d{4}\.\d{5}\b", doc)
    shaper = re.search(r"Shaper: ([^.,;]+)", doc)
    if shaper is None:
        raise ValueError(f"the docstring of {_module(name)} does not name its shaper")
    sections = yaml.safe_load(_yaml(name))
    bounds = ", ".join(f"{key} {value}" for key, value in _bounds(sections["loss"]).items())
    cells = [
        f"[{name}](#{name})",
        f"[{paper[0]}](https://arxiv.org/abs/{paper[0]})" if paper else "–",
        provenance(name),
        ratio,
        anchor,
        shaper[1].replace("\n", " ") + (f" on {type(host).__name__}" if host is not loss else ""),
        getattr(host, "aggregation", "–"),
        sections["advantage"]["_target_"].rpartition(".")[2],
        bounds or "–",
    ]
    return "| " + " | ".join(cells) + " |"


def _bounds(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return field → number of every clip, cap and mask, also in a host loss; a bound that is off is left out."""
    bounds: dict[str, Any] = {}
    for key, value in numbers.items():
        if isinstance(value, dict):
            bounds |= _bounds(value)
        elif any(part in key for part in _BOUNDS) and value is not None:
            bounds[key] = value
    return bounds


def _yaml(name: str) -> str:
    return (CONF / "algorithm" / f"{name}.yaml").read_text().rstrip()


def _module(name: str) -> str:
    return yaml.safe_load(_yaml(name))["loss"]["_target_"].rpartition(".")[0]


def _doc(module: str) -> str:
    return (importlib.import_module(module).__doc__ or "").strip()


# --- columns ---------------------------------------------------------------------------------------------------------

COLUMNS = "\n## Columns\n"
_TABLES = {
    "steps": "One row per rollout. Also has every column of `updates` except `update`, reduced as listed there.",
    "updates": "One row per gradient update. *In steps* says how a step reduces its updates.",
    "layers": "One row per MoE layer and gradient update, and for the rollout before the first update.",
    "evaluations": "One row per held-out prompt and evaluation.",
    "tails": "The tokens that moved most, after the last update of a probed step; empty unless `probe.largest` is set.",
}
_COLUMNS_HEAD = """
Every column of every table. A column that a run does not have is null. *Warns* is the direction that early warnings \
look for. With `threads=1`, only columns ending in `_seconds` or `_per_second` differ between two runs of one config. \
This section is generated by `python docs/generate.py`.

Archives (`results/*/data`) keep these columns of the steps: KEPT.
"""


def _columns_of(table: str) -> str:
    """Return the columns of one table as Markdown; of steps without the columns of updates."""
    of_updates = {column.name for column in columns.UPDATE}
    rows = [["column", "meaning", "unit", "warns", "in steps"], ["---"] * 5]
    for column in columns.TABLES[table].values():
        if table == "steps" and column.name in of_updates:
            continue
        # Keys, counts and timings warn of nothing.
        is_silent = column.type != "float64" or column.name.endswith(("_seconds", "_per_second"))
        warns = "" if is_silent else "falls" if column.worse == "lower" else "rises"
        unit = "0 to 1" if column.share else column.unit
        reduced = column.over_updates if column.name in of_updates else ""
        rows.append([f"`{column.name}`", column.meaning.replace("|", "&#124;"), unit, warns, reduced])
    width = 5 if table == "updates" else 4
    return "\n".join(f"| {' | '.join(row[:width])} |" for row in rows)


def columns_section() -> str:
    """Return the section of docs/metrics.md, from its heading on."""
    kept = ", ".join(f"`{name}`" for name, column in columns.TABLES["steps"].items() if column.kept)
    parts = [f"### {table}\n\n{about}\n\n{_columns_of(table)}\n" for table, about in _TABLES.items()]
    return "\n".join([COLUMNS + _COLUMNS_HEAD.replace("KEPT", kept), *parts])


def main() -> None:
    """Write both pages."""
    (DOCS / "algorithms.md").write_text(algorithms_page())
    metrics = DOCS / "metrics.md"
    metrics.write_text(metrics.read_text().partition(COLUMNS)[0] + columns_section())


if __name__ == "__main__":
    main()

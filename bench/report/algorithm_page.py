"""``docs/algorithms.md``: the docstring and the config of every algorithm and preset.

``python -m steadymoe.bench.report.algorithm_page > docs/algorithms.md``
"""

import importlib
import re
from typing import Any

import yaml

from steadymoe.algorithms import RatioLoss, load, names, provenance
from steadymoe.bench.config.compose import CONF

_HEAD = """# Algorithms

Made from the code and the configs by `python -m steadymoe.bench.report.algorithm_page > docs/algorithms.md`; a test
fails when it is stale. Every equation is also written once more, as loops over scalars, in
`tests/algorithms/test_family.py`, where value and gradient are compared; where a trainer has the same loss,
`tests/algorithms/test_oracles.py` compares with what that trainer computed.

J is the objective, to be maximised; the loss is −J. r, w: token ratio; s: sequence ratio; sg[·]: no gradient; G
responses to a prompt, T_i tokens of response i, μ the policy that sampled. The unit, the anchor and the aggregation of
every row are switches: `algorithm.loss.ratio`, `.anchor`, `.aggregation`.

Where the equation of a loss was read: **paper**, in the paper's own text; **peer's code**, not in the paper, but in
the code of its authors or of a trainer; **reconstruction**, in neither: the loss follows an abstract, a digest or
somebody else's re-implementation, and may differ from the paper. A preset is always a peer's code. A claim about a
reconstruction is a claim about this suite's version of it.
"""
_BOUNDS = ("clip", "cap", "max_", "tau", "c1_", "c2_", "gamma", "floor")


def markdown() -> str:
    """The text of the page."""
    lines = [_HEAD]
    lines += [
        "| algorithm | paper | provenance | ratio | anchor | shaper | aggregation | advantage | bounds |",
        "|---" * 9 + "|",
    ]
    lines += [_row(name) for name in names()]
    lines += ["", "## What trainers make of them", ""]
    lines += ["Presets, run like algorithms; each says first how it differs from its paper.", ""]
    lines += ["| preset | |", "|---|---|"]
    presets = [name for name in names(presets=True) if "@" in name]
    lines += [f"| `{name}` | {_yaml(name).splitlines()[0].removeprefix('# ')} |" for name in presets]
    lines += [""]
    first: dict[str, str] = {}
    for name in [*names(), *presets]:
        module = _module(name)
        lines += [f"## {name}", ""]
        if module in first:
            lines += [f"The equation of [{first[module]}](#{first[module]}) with other numbers.", ""]
        else:
            first[module] = name
            lines += ["```", _doc(module), "```", ""]
        lines += ["```yaml", _yaml(name), "```", ""]
    return "\n".join(lines)


def _row(name: str) -> str:
    """The row of an algorithm in the table. Raises ValueError if its docstring names no shaper."""
    loss, doc = load(name), _doc(_module(name))
    host = getattr(loss, "host", loss)
    ratio, anchor = (host.ratio, host.anchor) if isinstance(host, RatioLoss) else ("–", "–")
    paper = re.search(r"\b\d{4}\.\d{5}\b", doc)
    shaper = re.search(r"Shaper: ([^.,;]+)", doc)
    if shaper is None:
        raise ValueError(f"the docstring of {_module(name)} does not name its shaper")
    config = yaml.safe_load(_yaml(name))
    bounds = ", ".join(f"{key} {value}" for key, value in _bounds(config["loss"]).items())
    cells = [
        f"[{name}](#{name})",
        f"[{paper[0]}](https://arxiv.org/abs/{paper[0]})" if paper else "–",
        provenance(name),
        ratio,
        anchor,
        shaper[1].replace("\n", " ") + (f" on {type(host).__name__}" if host is not loss else ""),
        getattr(host, "aggregation", "–"),
        config["advantage"]["_target_"].rpartition(".")[2],
        bounds or "–",
    ]
    return "| " + " | ".join(cells) + " |"


def _bounds(numbers: dict[str, Any]) -> dict[str, Any]:
    """Field → number of every clip, cap and mask, also in a host loss; a bound that is off is left out."""
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


if __name__ == "__main__":
    print(markdown(), end="")

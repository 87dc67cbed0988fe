"""``docs/algorithms.md``: every algorithm as its docstring and its config tell it.

``python -m steadymoe.bench.catalogue > docs/algorithms.md``
"""

import importlib

import yaml

from steadymoe.algorithms import names
from steadymoe.bench.compose import CONF


def markdown() -> str:
    """The whole page."""
    lines = [
        "# Algorithms",
        "",
        "Made from the code and the configs by `python -m steadymoe.bench.catalogue > docs/algorithms.md`; a test",
        "fails when it is stale. Every equation is also written once more, as loops over scalars, in",
        "`tests/test_family.py`, where value and gradient are compared.",
        "",
        "J is the objective, to be maximised; the loss is −J. r, w: token ratio; s: sequence ratio; sg[·]: no",
        "gradient; G responses to a prompt, T_i tokens of response i, μ the policy that sampled.",
        "",
    ]
    for name in names():
        config = (CONF / "algorithm" / f"{name}.yaml").read_text().rstrip()
        module = importlib.import_module(yaml.safe_load(config)["loss"]["_target_"].rpartition(".")[0])
        doc = (module.__doc__ or "").strip()
        lines += [f"## {name}", "", "```", doc, "```", "", "```yaml", config, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")

"""``docs/choices.md``: every name that a command line can choose, as the first comment of its YAML tells it.

``python -m steadymoe.bench.report.choices_page > docs/choices.md``
"""

import re

from steadymoe.bench.config.compose import CONF

_HEAD = """# Choices

Every name that `steadymoe run` takes, with the first sentence of its YAML in `conf/`. The page is made from these files
by `python -m steadymoe.bench.report.choices_page > docs/choices.md`; a test fails when it is stale. Settings that are
no file stand in [commands.md](commands.md#settings).
"""
# Config group → heading, and what it chooses.
_GROUPS = {
    "algorithm": (
        "Algorithms",
        "`algorithm=gspo`: the loss and its advantage. `reinforce` (no ratio, no clip) and `grpo_unclipped` are the "
        "controls. [algorithms.md](algorithms.md) has the equation, the paper and the numbers of each.",
    ),
    "advantage": (
        "Advantages",
        "`advantage=group_mean`: how rewards become advantages, in place of the algorithm's own way.",
    ),
    "correction": (
        "Corrections",
        "`correction=tis`: a weight for the mismatch ρ = π_old/μ between trainer and sampler. An algorithm whose ratio "
        "is anchored at the sampler takes none.",
    ),
    "routing": (
        "Routing",
        "`routing=r2`: which experts a training forward runs. The routers' own choice is recorded all the same. "
        "[routing.md](routing.md) says more.",
    ),
    "engine": (
        "Engines",
        "`engine=fp8 engine.strength=0.5`: how the sampler differs from the trainer, and how much. "
        "[routing.md](routing.md#the-axis-engine) says more.",
    ),
    "model": (
        "Models",
        "`model=micro`: a small model with random weights, or a checkpoint. `model.config.num_experts=32` overrides a "
        "field of its config, `+model.config.head_dim=32` adds a field. [models.md](models.md) has the sizes.",
    ),
    "task": ("Tasks", "`task=chain`: prompts, and the score of a response."),
    "experiment": (
        "Experiments",
        "`experiment=quickstart`: a sweep that is kept as a file, with its number of runs and the time they took.",
    ),
}
_PRESETS = (
    "`algorithm=gspo@verl-0.9`: what a trainer runs under an algorithm's name, and how that differs from the paper."
)


def markdown() -> str:
    """The whole page."""
    lines = [_HEAD]
    for group, (heading, what) in _GROUPS.items():
        names = sorted(path.name.removesuffix(".yaml") for path in (CONF / group).glob("*.yaml"))
        lines += [*_section(group, heading, what, [name for name in names if "@" not in name])]
        if group == "algorithm":
            lines += [*_section(group, "Presets", _PRESETS, [name for name in names if "@" in name])]
    return "\n".join(lines)


def _section(group: str, heading: str, what: str, names: list[str]) -> list[str]:
    """A heading, a sentence, and a row for each name."""
    rows = [f"| `{name}` | {told(group, name)} |" for name in names]
    return [f"## {heading}", "", what, "", "| name | |", "|---|---|", *rows, ""]


def told(group: str, name: str) -> str:
    """What the first comment of a config says: its first sentence; of a preset all of it, of an experiment its size.

    Raises ValueError for a config that does not begin with a comment.
    """
    lines = [line for line in (CONF / group / f"{name}.yaml").read_text().splitlines() if line != "# @package _global_"]
    comment = []
    for line in lines:
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    if not comment:
        raise ValueError(f"conf/{group}/{name}.yaml must begin with a comment that says what it is")
    prose = " ".join(line for line in comment if not line.startswith(" "))
    sentence = prose if "@" in name else re.split(r"(?<!\bDr\.)(?<=\.) (?=[A-Za-z`])", prose, maxsplit=1)[0]
    if group == "experiment":
        sizes = re.findall(rf"steadymoe run experiment={name} +(\d.*)", "\n".join(comment))
        sentence += f" {sizes[0]}." if sizes else ""
    return sentence.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")

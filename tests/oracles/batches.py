"""The random batches that a peer's code is asked about, and the file that its answers go to.

Shapes: S batches, B responses of a batch in groups of ``GROUP``, T response positions.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

RECORDED = Path(__file__).parent.parent / "recorded" / "oracles"

# Standard deviations of the log-ratios: within the narrowest bands, about a usual band's edges, outside, far outside.
SCALES = (0.001, 0.2, 0.7, 3.0)
SEEDS = (0, 1)
RESPONSES, LENGTH, GROUP = 6, 7, 3


def draw() -> dict[str, Tensor]:
    """One batch for each scale and seed, stacked, in float64; padding holds numbers too, which must not matter."""
    batches = [_one(scale, seed) for scale in SCALES for seed in SEEDS]
    return {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}


def _one(scale: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + int(1000 * scale))

    def normal_BT() -> Tensor:
        return torch.randn(RESPONSES, LENGTH, generator=generator, dtype=torch.float64)

    old_BT = -0.05 - 6 * torch.rand(RESPONSES, LENGTH, generator=generator, dtype=torch.float64)
    lengths_B = torch.randint(1, LENGTH + 1, (RESPONSES,), generator=generator)
    lengths_B[0] = LENGTH  # a batch is padded to its longest response
    advantages_B = normal_BT()[:, 0]
    advantages_B[1::2] = -advantages_B[::2].sign() * advantages_B[1::2].abs()  # as many of one sign as of the other
    # Quarters are exact in float32, in which a peer may hold rewards; in the first batch's last group all are equal.
    rewards_B = torch.randint(0, 5, (RESPONSES,), generator=generator).double() / 4
    if seed == 0:
        rewards_B[-GROUP:] = rewards_B[-1]
    return {
        "logprobs": (old_BT + scale * normal_BT()).clamp(max=-1e-3),
        "old_logprobs": old_BT,
        "rollout_logprobs": (old_BT + scale * normal_BT()).clamp(max=-1e-3),
        "mask": torch.arange(LENGTH) < lengths_B[:, None],
        "advantages": advantages_B,
        "rewards": rewards_B,
    }


def each(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The batches one by one."""
    for s in range(len(inputs["mask"])):
        yield {name: stacked[s] for name, stacked in inputs.items()}


def write(path: Path, peer: str, inputs: Mapping[str, Tensor], answers: Mapping[str, Tensor]) -> None:
    """Inputs as ``inputs/<name>`` and answers as ``<kind>/<case>``, with the versions that gave them."""
    tensors = {f"inputs/{name}": values for name, values in inputs.items()} | dict(answers)
    versions = {name: version(name) for name in (peer, "torch", "transformers")}
    about = {"peer": peer, "versions": versions, "cases": sorted(answers)}
    # One entry: safetensors writes several in an order that changes from process to process.
    metadata = {"oracle": json.dumps(about, sort_keys=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: values.contiguous() for name, values in sorted(tensors.items())}, path, metadata)

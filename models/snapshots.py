"""Past weights of a model, for a stale sampler (``engine.Sampler``) and for lagged routing (``Lag``).

Lagged routing (anticipatory routing: DeepSeek-V4, 2606.19348, section 4.2.3): features are those of the weights now,
experts are chosen with the weights of Δ updates ago.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steadymoe.models.balancing import biases

# Updates over which a spike's median is taken, and for which the lag stays on after it; the report has no number.
_WINDOW = 64
# A median of fewer gradient norms calls nothing a spike.
_FEWEST = 8


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what training changes, by name: parameters, and the biases of bias balancing."""
    return dict(model.named_parameters()) | biases(model)


class Snapshots:
    """Copies of a model's weights, the last ``count`` that were taken; each is as large as the model."""

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        self._model = model
        self._taken: deque[dict[str, Tensor]] = deque(maxlen=count)

    def take(self) -> None:
        """Copy the model's current weights; beyond ``count`` copies, drop the oldest."""
        self._taken.append({name: weight.detach().clone() for name, weight in weights_of(self._model).items()})

    @property
    def oldest(self) -> Mapping[str, Tensor]:
        """The weights of the oldest copy, by name; the current ones before any was taken."""
        return self._taken[0] if self._taken else weights_of(self._model)

    def state(self) -> dict[str, Tensor]:
        """Return all copies, as ``<number>/<name>``, oldest first, for a checkpoint."""
        return {f"{number}/{name}": weight for number, past in enumerate(self._taken) for name, weight in past.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the copies from ``state()``."""
        past: dict[int, dict[str, Tensor]] = {}
        for key, weight in state.items():
            number, _, name = key.partition("/")
            past.setdefault(int(number), {})[name] = weight.to(self._model.device)
        self._taken.clear()
        self._taken.extend(past[number] for number in sorted(past))


class Lag:
    """The weights that choose experts under lagged routing: those of ``updates`` updates ago, at first the start's.

    It holds ``updates`` copies of the weights. With a ``trigger`` the lag is on only after a spike, an update whose
    gradient norm exceeds ``trigger`` × the median of the (up to 64, at least 8) norms before it, and for the 64 updates
    that follow. The report also rolls back a little after a spike; here training goes on.
    """

    def __init__(self, model: PreTrainedModel, updates: int, trigger: float | None = None) -> None:
        self._model, self._trigger = model, trigger
        self._past = Snapshots(model, updates)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._left = 0

    @property
    def is_on(self) -> bool:
        """Whether the next update's experts are chosen with old weights."""
        return self._trigger is None or self._left > 0

    @contextmanager
    def old_weights(self) -> Iterator[None]:
        """Give the model its old weights while the ``with`` block is open. No gradient may be taken across its end."""
        weights = weights_of(self._model)
        now = {name: weight.data for name, weight in weights.items()}
        old = self._past.oldest
        try:
            for name, weight in weights.items():
                weight.data = old[name].data
            yield
        finally:
            for name, weight in weights.items():
                weight.data = now[name]

    def before_step(self, grad_norm: float) -> None:
        """Copy the weights that an update with this gradient norm is about to change, and look for a spike."""
        self._past.take()
        if self._trigger is None:
            return
        is_spike = len(self._norms) >= _FEWEST and grad_norm > self._trigger * median(self._norms)
        self._left = _WINDOW if is_spike else max(0, self._left - 1)
        self._norms.append(grad_norm)

    def state(self) -> dict[str, Tensor]:
        """Return old weights, norms and the updates left of a spike, for a checkpoint."""
        numbers = {"norms": torch.tensor(self._norms, dtype=torch.float64), "left": torch.tensor(self._left)}
        return {f"weights/{name}": weight for name, weight in self._past.state().items()} | numbers

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore from ``state()``."""
        self._left, norms = int(state["left"]), state["norms"].tolist()
        self._norms.clear()
        self._norms.extend(norms)
        kind = "weights/"
        self._past.load({key.removeprefix(kind): value for key, value in state.items() if key.startswith(kind)})

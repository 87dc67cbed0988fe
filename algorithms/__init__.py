"""Policy-optimisation algorithms: tensors in, (loss, metrics) out.

A loss is a frozen dataclass in a file of its own. It is a ``PolicyLoss`` and is called with a ``Batch``. What its paper
fixes stands in ``conf/algorithm/<name>.yaml`` with its source, its variants in ``conf/algorithm.yaml``; every other
number is a default of the dataclass.
"""

from steadymoe.algorithms import ops
from steadymoe.algorithms.batch import Batch, LossOutput, Surrogate
from steadymoe.algorithms.loss import ClippedLoss, HostedLoss, PolicyLoss, RatioLoss, TokenLoss, Traits
from steadymoe.algorithms.registry import (
    PROVENANCES,
    build,
    class_of,
    complete,
    load,
    meant,
    minimal,
    names,
    provenance,
)

__all__ = [
    "PROVENANCES",
    "Batch",
    "ClippedLoss",
    "HostedLoss",
    "LossOutput",
    "PolicyLoss",
    "RatioLoss",
    "Surrogate",
    "TokenLoss",
    "Traits",
    "build",
    "class_of",
    "complete",
    "load",
    "meant",
    "minimal",
    "names",
    "ops",
    "provenance",
]

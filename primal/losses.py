"""The loss a primal model trains with: the task's, plus the KSVD objective of its layers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from primal.functional import KSVDTerms, Reduction, Trace, ksvd_objective


class Loss(NamedTuple):
    """A loss and its parts, so that both can be logged."""

    total: Tensor  # (), what to call backward() on
    task: Tensor  # ()
    ksvd: Tensor  # (), mean over the layers of J², before its weight


def with_ksvd(
    task: Tensor,
    terms: Sequence[KSVDTerms],
    weight: float,
    *,
    reduction: Reduction = "sample",
    trace: Trace = "weights",
) -> Loss:
    """Return ``task + weight · mean over layers of J²``, or the task alone without such layers.

    ``weight`` is the paper's η; it tunes over 0 to 0.5.

    >>> with_ksvd(torch.tensor(1.5), terms=(), weight=0.1).total
    tensor(1.5000)
    """
    if not terms:
        return Loss(task, task, task.new_zeros(()))
    objectives = [ksvd_objective(t, reduction=reduction, trace=trace) for t in terms]
    ksvd = torch.stack(objectives).mean()
    return Loss(task + weight * ksvd, task, ksvd)

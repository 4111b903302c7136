"""What steps cost, summed where they run, so that nobody waits for the device between them."""

from typing import NamedTuple

import torch
from torch import Tensor


class SampleLosses(NamedTuple):
    """What a batch costs, per sample."""

    task: Tensor  # (B,)
    ksvd: Tensor  # (B, layers), J² of each primal layer; of width 0 without such layers
    score: Tensor  # (B,), what to show: 1 where right, or the error

    def sums(self) -> Tensor:  # (3 + layers,), task, score, samples, then J² of each layer
        ones = torch.ones_like(self.task)
        return torch.cat([torch.stack([self.task, self.score, ones]).sum(1), self.ksvd.sum(0)])


class Means(NamedTuple):
    """Over an epoch so far."""

    loss: float
    score: float
    ksvd: list[float]  # of each layer

    @property
    def objective(self) -> float:
        return sum(self.ksvd) / max(1, len(self.ksvd))


class Tally:
    """Sums over an epoch, steps done, and the first step whose loss was no number."""

    def __init__(self, examples: int, device: torch.device) -> None:
        self.sums: Tensor | None = None  # as SampleLosses.sums
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_step = torch.full((), -1, device=device)
        self.bad_examples = torch.zeros(examples, dtype=torch.bool, device=device)

    def add(self, index: Tensor, losses: Tensor, sums: Tensor, norm: Tensor | None) -> None:
        """Count a step: the losses (B,) of its examples, its sums, its gradient's norm."""
        self.sums = torch.zeros_like(sums).double() if self.sums is None else self.sums
        self.sums += sums
        checked = sums if norm is None else torch.cat([sums, norm[None]])
        first = ~torch.isfinite(checked).all() & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(first, self.steps, self.bad_step))
        self.bad_examples[index] |= first & ~torch.isfinite(losses)
        self.steps += 1

    def means(self) -> Means:
        assert self.sums is not None
        task, score, samples, *ksvd = self.sums.tolist()
        return Means(task / samples, score / samples, [value / samples for value in ksvd])

    def begin_epoch(self) -> None:
        if self.sums is not None:
            self.sums.zero_()  # in place: a recorded step adds to it there

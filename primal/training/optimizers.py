"""Optimizers by PyTorch's fused kernels, and a running average of the weights.

A step may be recorded in a CUDA graph: what changes from step to step is set before it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Name = Literal["adamw", "adam", "radam"]
BETAS = (0.9, 0.999)


class Optimizer:
    """AdamW, Adam, or RAdam, which is Adam at a rectified rate.

    A parameter has a gradient from the first step on, or never.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], name: Name, weight_decay: float) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.name = name
        device = self.parameters[0].device
        # A graph that was recorded reads the rate from where it was.
        self._rate = torch.zeros((), device=device) if device.type == "cuda" else None
        self._momentum = 0.0
        # Vectors (biases, norms, Λ) are scales and offsets: nothing draws them to zero.
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        self.adam = kind(
            [group for group in groups if group["params"]],
            lr=0.0 if self._rate is None else self._rate,
            betas=BETAS,
            fused=True,
            capturable=self._rate is not None,
        )
        # The steps before a recording are no mistake to warn about.
        self.adam._warned_capturable_if_run_uncaptured = True

    def prepare(self, rate: float, number: int) -> None:
        """Set the rate of step ``number``, counted from 1."""
        self._momentum = 0.0
        if self.name == "radam":
            rectified = rate * rectification(number)
            if not rectified:
                self._momentum = rate / (1 - BETAS[0] ** number)
            rate = rectified
        if self._rate is not None:
            self._rate.fill_(rate)
            return
        for group in self.adam.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        self.adam.step()
        if self._momentum:  # RAdam's first steps; Adam, at rate zero, kept the moments
            moving = [p for p in self.parameters if p.grad is not None]
            means = [self.adam.state[p]["exp_avg"] for p in moving]
            with torch.no_grad():
                torch._foreach_add_(moving, means, alpha=-self._momentum)

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the moments by parameter and name, 3/exp_avg for instance."""
        return {
            f"{i}/{name}": value
            for i, p in enumerate(self.parameters)
            for name, value in self.adam.state.get(p, {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for key, value in state.items():
            i, _, name = key.partition("/")
            p = self.parameters[int(i)]
            self.adam.state[p][name] = value.to(p.device)


def rectification(step: int, beta: float = BETAS[1]) -> float:
    """Return what RAdam multiplies Adam's rate by, Liu et al. 2020, eq. (4).

    It is zero as long as too few gradients were seen to divide by their second moment.

    >>> [round(rectification(step), 3) for step in (1, 5, 6, 100, 10_000)]
    [0.0, 0.0, 0.026, 0.215, 1.0]
    """
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * step * beta**step / (1 - beta**step)
    if length <= 5:
        return 0.0
    part = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return float(part**0.5)


class Average:
    """A running average of the weights: at first a plain mean, so that the start soon fades."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.decay = decay
        self.weights = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, steps: Tensor) -> None:  # () steps before this one, on the weights' device
        decay = torch.clamp((1.0 + steps) / (10.0 + steps), max=self.decay).float()
        torch._foreach_sub_(self.weights, self.parameters)
        torch._foreach_mul_(self.weights, decay)
        torch._foreach_add_(self.weights, self.parameters)

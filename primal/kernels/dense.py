"""A feed-forward network's parts on a CPU: products by oneDNN, dropout from few random bits.

PyTorch takes MKL's float32 products, which on AMD's processors are slower than oneDNN's, and draws
a random number for each element of a dropout. benchmarks/train_step.py measures both at work.
"""

from typing import Any

import torch
from torch import Tensor

from primal.kernels.blocked import is_batched

LEVELS = 2**16  # a dropout's probability is rounded to one of these


def linear_fits(x: Tensor) -> bool:
    """Say whether ``linear`` can take float32 x, and is worth its set-up."""
    available = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(available) and x.dtype == torch.float32 and x.numel() >= 2**13


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (..., in) -> (..., out)
    """Return ``x Wᵀ + b``."""
    rows: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # What will be differentiated again, or is batched by vmap, PyTorch itself must see.
        plain = torch.is_grad_enabled() or is_batched(d_out)
        times = torch.nn.functional.linear if plain else _times
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            times(d_out, weight.mT) if need_x else None,
            times(d_out.mT, x.mT) if need_weight else None,
            d_out.sum(0) if need_bias else None,
        )


def _times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def keep_mask(x: Tensor, probability: float) -> Tensor:
    """Draw what a dropout multiplies with: 0, or what keeps the mean, four from each 64 bits."""
    dropped = min(round(probability * LEVELS), LEVELS - 1)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
    drawn = bits.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    # Compared where it is: PyTorch walks over bool, and from it, several times as slowly.
    kept = drawn.to(x.dtype).ge_(dropped - LEVELS // 2)
    return kept.mul_(LEVELS / (LEVELS - dropped))

"""Which implementation of a fused operation runs: decided here, and nowhere else.

``torch`` is the definition: plain differentiable PyTorch, any device, any dtype, any transform.
``blocked`` walks over the tokens in blocks that stay in a CPU's cache, with a hand-written
backward. ``auto`` takes the fastest that fits; an explicit wish never falls back silently.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from primal.errors import require_choice

Backend = Literal["auto", "torch", "blocked"]
BACKENDS: tuple[Backend, ...] = ("auto", "torch", "blocked")


def use_blocked(backend: Backend, *tensors: Tensor) -> bool:
    """Say whether the blocked CPU implementation is to run on ``tensors``."""
    require_choice("backend", backend, BACKENDS)
    if backend == "torch":
        return False
    fits = all(t.device.type == "cpu" for t in tensors) and (
        len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in (torch.float32, torch.float64)
    )
    if backend == "blocked":
        if not fits:
            given = ", ".join(sorted({f"{t.dtype} on {t.device.type}" for t in tensors}))
            raise ValueError(
                "backend='blocked' needs every tensor on the CPU in one dtype, float32 or "
                f"float64, got {given}; use backend='torch'."
            )
        return True
    # A compiler fuses the plain definition itself, and must see it; autocast decides dtypes per
    # operation, which one opaque operation would hide from it.
    return (
        fits
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not _in_transform()
    )


def _in_transform() -> bool:
    """Say whether torch.func or forward-mode differentiation is active.

    Only the definition composes with them.
    """
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0

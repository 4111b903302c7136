"""What every attention layer is: (B, N, width) in, values and objective terms out."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal.errors import require_positive
from primal.functional import KSVDTerms, mask_from_lengths


class AttentionOutput(NamedTuple):
    """What a layer returns; terms travel as values, so checkpointing, compile and DDP see them."""

    values: Tensor  # (B, N, width), zero at padding
    terms: KSVDTerms | None  # what ksvd_objective reads; None where no kernel machine is trained


class StepOutput(NamedTuple):
    """What one step of decoding returns."""

    values: Tensor  # (B, width)
    state: Any  # give it to the next step; a new object, the old one is left as it was


class Attention(nn.Module, ABC):
    """A layer that lets tokens read each other.

    ``mask`` is (B, N) bool with True at real tokens, or (B,) integer lengths. What padding holds
    (even NaN) changes no valid output, no gradient and no objective; its own outputs are zero.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        require_positive("width", width)
        require_positive("heads", heads)
        self.width, self.heads, self.causal = width, heads, causal

    @abstractmethod
    def forward(
        self,
        x: Tensor,  # (B, N, width)
        context: Tensor | None = None,  # (B, M, context_width); None is self-attention
        *,
        mask: Tensor | None = None,  # (B, N) bool, or (B,) lengths
        context_mask: Tensor | None = None,  # (B, M) bool, or (B,) lengths
    ) -> AttentionOutput: ...

    @abstractmethod
    def kernel(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # (B, H, N, M)
        """Return the N×M matrix the layer stands for: for looking at, never for training."""

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Return the state before the first token, for ``step``."""
        raise ValueError(
            f"{type(self).__name__} decodes step by step only if built with causal=True."
        )

    def step(self, x: Tensor, state: Any, *, mask: Tensor | None = None) -> StepOutput:
        """Read one token (B, width); ``mask`` (B,) False leaves a sequence's state as it was."""
        raise ValueError(
            f"{type(self).__name__} decodes step by step only if built with causal=True."
        )

    @abstractmethod
    def reset_parameters(self) -> None: ...


def check_tokens(name: str, x: Tensor, width: int, like: Tensor | None = None) -> None:
    """Raise a ValueError unless x is (B, N, width), N >= 1, and floating point."""
    if x.ndim != 3 or x.shape[-1] != width or x.shape[1] < 1:
        hint = "unsqueeze the batch dimension" if x.ndim == 2 else "project it to that width first"
        hint = "give at least one token" if x.ndim == 3 and x.shape[1] < 1 else hint
        raise ValueError(
            f"{name} must be (batch, tokens, {width}) with at least one token, "
            f"got {tuple(x.shape)}; {hint}."
        )
    if not x.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, got {x.dtype}; "
            "embed token ids, or convert numbers with x.float()."
        )
    if like is not None and like.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name} must have the batch size of x, got {x.shape[0]} and {like.shape[0]}; "
            "expand or repeat the smaller one."
        )


def check_step(x: Tensor, batch: int, width: int) -> None:
    """Raise a ValueError unless x is one token per sequence of the state."""
    if x.shape != (batch, width):
        raise ValueError(
            f"step reads one token per sequence of the state, ({batch}, {width}), "
            f"got {tuple(x.shape)}; call it once per token, or forward for whole sequences."
        )


def as_mask(name: str, mask: Tensor | None, x: Tensor) -> Tensor | None:  # (B, N) bool
    """Check a mask or lengths against x (B, N, ·) and return the mask."""
    if mask is None:
        return None
    batch, tokens = x.shape[:2]
    if mask.ndim == 1 and mask.dtype in (torch.int64, torch.int32) and mask.shape[0] == batch:
        longest = None if torch.compiler.is_compiling() or mask.is_cuda else int(mask.max())
        if longest is not None and longest > tokens:
            raise ValueError(
                f"lengths must be at most the {tokens} tokens given, got {longest}; "
                "pad x further, or cut the lengths."
            )
        mask = mask_from_lengths(mask, tokens)
    if mask.dtype != torch.bool or mask.shape != (batch, tokens):
        raise ValueError(
            f"{name} must be bool of shape ({batch}, {tokens}), True at real tokens, or integer "
            f"lengths ({batch},), got {mask.dtype} {tuple(mask.shape)}; "
            "convert a 0/1 mask with mask.bool()."
        )
    # Reading the mask's values would stall an accelerator and cannot be traced: there, a sequence
    # without tokens gives zeros instead of an error.
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"{name} must leave every sequence at least one token, got none in row(s) "
                f"{empty[:8]}; drop these sequences from the batch."
            )
    return mask


def zero_rows(x: Tensor, mask: Tensor | None) -> Tensor:  # (B, N, width), (B, N)
    """Put zeros where the mask is False, even over NaN."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def split_heads(x: Tensor, heads: int) -> Tensor:  # (B, N, H·D) -> (B, H, N, D), a view
    apart: Tensor = x.unflatten(-1, (heads, -1))
    return apart.transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:  # (B, H, N, D) -> (B, N, H·D)
    return x.transpose(1, 2).flatten(2)

"""Attention as kernel PCA: RPC-Attention and Scaled Attention (Teo & Nguyen, NeurIPS 2024)."""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal import functional
from primal.attention.base import (
    Attention,
    AttentionOutput,
    as_mask,
    check_tokens,
    join_heads,
    split_heads,
    zero_rows,
)
from primal.errors import require_choice, require_divides, require_positive


class _SelfAttention(Attention):
    """Bidirectional self-attention with one fused projection: what the two layers here share."""

    def __init__(self, width: int, heads: int, parts: int, *, bias: bool) -> None:
        super().__init__(width, heads)
        require_divides("width", width, "heads", heads)
        self.parts = parts
        self.to_parts = nn.Linear(width, parts * width, bias=bias)
        self.to_output = nn.Linear(width, width)

    def reset_parameters(self) -> None:
        self.to_parts.reset_parameters()
        self.to_output.reset_parameters()

    def _read(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, context_mask: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:  # parts x (B, H, N, D), (B, N)
        if context is not None:
            raise ValueError(
                f"{type(self).__name__} needs as many queries as keys and takes no context; "
                "use SoftmaxAttention or PrimalAttention(scores='left') for cross-attention."
            )
        if context_mask is not None:
            raise ValueError("context_mask needs a context, got none; self-attention takes mask=.")
        check_tokens("x", x, self.width)
        mask = as_mask("mask", mask, x)
        parts = self.to_parts(zero_rows(x, mask)).chunk(self.parts, dim=-1)
        return [split_heads(part, self.heads) for part in parts], mask


@final
class RobustAttention(_SelfAttention):
    """RPC-Attention: principal-component pursuit splits the keys into attention and corruption.

    ``symmetric=True`` (as published) takes the keys as queries. Each step uses the size of the
    whole sequence, so there is no causal form. ``variant="admm"`` is the textbook iteration,
    ``"released"`` what the authors' code computes; see ``functional.principal_component_pursuit``.

    >>> layer = RobustAttention(48, heads=3, iterations=2, sparsity=4.0)
    >>> layer(torch.randn(2, 17, 48)).values.shape
    torch.Size([2, 17, 48])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        iterations: int = 4,
        sparsity: float = 4.0,
        variant: functional.Variant = "admm",
        symmetric: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        require_positive("iterations", iterations)
        require_choice("variant", variant, ("released", "admm"))
        if not sparsity > 0:
            raise ValueError(
                f"sparsity must be above 0, got {sparsity}; float('inf') keeps every key as it is."
            )
        super().__init__(width, heads, parts=2 if symmetric else 3, bias=bias)
        self.iterations, self.sparsity, self.variant = iterations, sparsity, variant
        self.symmetric, self.dropout = symmetric, dropout

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> AttentionOutput:
        (*query, key, value), mask = self._read(x, context, mask, context_mask)
        attended = functional.principal_component_pursuit(
            key,
            value,
            None if self.symmetric else query[0],
            mask,
            iterations=self.iterations,
            sparsity=self.sparsity,
            variant=self.variant,
            dropout=self.dropout if self.training else 0.0,
        )
        return AttentionOutput(zero_rows(self.to_output(join_heads(attended)), mask), None)

    def kernel(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # (B, H, N, N)
        """Return the attention weights of the last step."""
        (*query, key, value), mask = self._read(x, context, mask, context_mask)
        clean = functional.pursued_keys(
            key,
            value,
            None if self.symmetric else query[0],
            mask,
            iterations=self.iterations,
            sparsity=self.sparsity,
            variant=self.variant,
        )
        reader = clean if self.symmetric else query[0]
        return functional.attention_weights(reader, clean, _attended(mask), mask)

    def extra_repr(self) -> str:
        return (
            f"width={self.width}, heads={self.heads}, iterations={self.iterations}, "
            f"sparsity={self.sparsity}, variant={self.variant!r}, symmetric={self.symmetric}"
        )


@final
class ScaledAttention(_SelfAttention):
    """``softmax(Q Kᵀ/√D) (I − S) V``: the centring of kernel PCA, learned from S = 0 on.

    ``tokens=N`` gives every head an N×N matrix S (shorter sequences use its corner);
    ``tokens=None`` a scalar multiple of the symmetric attention matrix, ``S = α softmax(K Kᵀ/√D)``,
    for any length.

    >>> ScaledAttention(48, heads=3, tokens=17)(torch.randn(2, 17, 48)).values.shape
    torch.Size([2, 17, 48])
    """

    def __init__(
        self, width: int, heads: int, *, tokens: int | None = None, bias: bool = True
    ) -> None:
        super().__init__(width, heads, parts=3, bias=bias)
        if tokens is not None:
            require_positive("tokens", tokens)
        self.tokens = tokens
        self.centring = nn.Parameter(torch.zeros(1 if tokens is None else (heads, tokens, tokens)))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.centring)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> AttentionOutput:
        (query, key, value), mask = self._read(x, context, mask, context_mask)
        value = functional.zero_padding(value, mask)
        allowed = _attended(mask)
        if self.tokens is None:
            smoothed = F.scaled_dot_product_attention(key, key, value, attn_mask=allowed)
            centred = value - self.centring * smoothed
        else:
            count = x.shape[1]
            if count > self.tokens:
                raise ValueError(
                    f"x must have at most tokens={self.tokens} tokens, got {count}; build the "
                    f"layer with tokens={count}, or with tokens=None for any length."
                )
            centred = value - self.centring[:, :count, :count] @ value
        attended = F.scaled_dot_product_attention(query, key, centred, attn_mask=allowed)
        return AttentionOutput(zero_rows(self.to_output(join_heads(attended)), mask), None)

    def kernel(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # (B, H, N, N)
        """Return the attention weights, before the centring of the values."""
        (query, key, _), mask = self._read(x, context, mask, context_mask)
        return functional.attention_weights(query, key, _attended(mask), mask)

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, tokens={self.tokens}"


def _attended(mask: Tensor | None) -> Tensor | None:  # (B, N) -> (B, 1, 1, N)
    return None if mask is None else mask[:, None, None]

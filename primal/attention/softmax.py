"""Canonical attention over PyTorch's fused kernels: the baseline, and Primal.+'s partner."""

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal import functional
from primal.attention.base import (
    Attention,
    AttentionOutput,
    StepOutput,
    as_mask,
    check_step,
    check_tokens,
    join_heads,
    split_heads,
    zero_rows,
)
from primal.errors import require_divides


class SoftmaxState(NamedTuple):
    """The keys and values of every token so far: the cache that grows with the past."""

    key: Tensor  # (B, H, past, D)
    value: Tensor  # (B, H, past, D)
    mask: Tensor  # (B, past)


@final
class SoftmaxAttention(Attention):
    """``softmax(Q Kᵀ / √D) V``: attention in its dual form; ``terms`` is None.

    >>> layer = SoftmaxAttention(64, heads=4, causal=True)
    >>> layer(torch.randn(2, 100, 64)).values.shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int | None = None,
        context_width: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, heads, causal=causal)
        if head_width is None:
            require_divides("width", width, "heads", heads)
            head_width = width // heads
        self.head_width, self.dropout = head_width, dropout
        self.context_width = width if context_width is None else context_width
        self.to_query = nn.Linear(width, heads * head_width, bias=bias)
        self.to_key = nn.Linear(self.context_width, heads * head_width, bias=bias)
        self.to_value = nn.Linear(self.context_width, heads * head_width, bias=bias)
        self.to_output = nn.Linear(heads * head_width, width)

    def reset_parameters(self) -> None:
        for layer in (self.to_query, self.to_key, self.to_value, self.to_output):
            layer.reset_parameters()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> AttentionOutput:
        x, context, mask, context_mask = self._check(x, context, mask, context_mask)
        allowed = self._allowed(x.shape[1], context_mask)
        attended = F.scaled_dot_product_attention(
            split_heads(self.to_query(x), self.heads),
            split_heads(self.to_key(context), self.heads),
            split_heads(self.to_value(context), self.heads),
            attn_mask=allowed,
            is_causal=self.causal and allowed is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return AttentionOutput(zero_rows(self.to_output(join_heads(attended)), mask), None)

    def kernel(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # (B, H, N, M)
        """Return the attention weights ``softmax(Q Kᵀ / √D)``."""
        x, context, mask, context_mask = self._check(x, context, mask, context_mask)
        query = split_heads(self.to_query(x), self.heads)
        key = split_heads(self.to_key(context), self.heads)
        allowed = self._allowed(x.shape[1], context_mask)
        if self.causal and allowed is None:
            allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return functional.attention_weights(query, key, allowed, mask)

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> SoftmaxState:
        if not self.causal:
            super().init_state(batch)
        weight = self.to_key.weight
        empty = torch.empty(
            (batch, self.heads, 0, self.head_width),
            device=weight.device if device is None else device,
            dtype=weight.dtype if dtype is None else dtype,
        )
        return SoftmaxState(
            empty, empty, torch.empty((batch, 0), dtype=torch.bool, device=empty.device)
        )

    def step(self, x: Tensor, state: SoftmaxState, *, mask: Tensor | None = None) -> StepOutput:
        if not self.causal:
            super().step(x, state)
        batch = state.mask.shape[0]
        check_step(x, batch, self.width)
        real = (
            torch.ones(batch, 1, dtype=torch.bool, device=x.device)
            if mask is None
            else mask[:, None]
        )
        token = zero_rows(x[:, None], real)
        key = split_heads(self.to_key(token), self.heads)
        value = split_heads(self.to_value(token), self.heads)
        state = SoftmaxState(
            torch.cat((state.key, key), dim=2),
            torch.cat((state.value, value), dim=2),
            torch.cat((state.mask, real), dim=1),
        )
        allowed = state.mask.clone()
        allowed[:, -1] = True  # a padding token reads itself, so that no row is without keys
        attended = F.scaled_dot_product_attention(
            split_heads(self.to_query(token), self.heads),
            state.key,
            state.value,
            attn_mask=allowed[:, None, None],
        )
        return StepOutput(zero_rows(self.to_output(join_heads(attended)), real)[:, 0], state)

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        context_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        check_tokens("x", x, self.width)
        mask = as_mask("mask", mask, x)
        x = zero_rows(x, mask)
        if context is None:
            if context_mask is not None:
                raise ValueError(
                    "context_mask needs a context, got none; self-attention takes mask=."
                )
            check_tokens("context", x, self.context_width)
            return x, x, mask, mask
        if self.causal:
            raise ValueError(
                "a causal layer takes no context: its order is that of x; use causal=False."
            )
        check_tokens("context", context, self.context_width, like=x)
        context_mask = as_mask("context_mask", context_mask, context)
        return x, zero_rows(context, context_mask), mask, context_mask

    def _allowed(self, tokens: int, mask: Tensor | None) -> Tensor | None:  # (B, 1, N or 1, M)
        if mask is None:
            return None
        if not self.causal:
            return mask[:, None, None]
        past = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        itself = torch.eye(tokens, dtype=torch.bool, device=mask.device)
        return past & (mask[:, None, None] | itself)  # padding reads itself: no row without keys

    def extra_repr(self) -> str:
        causal = ", causal=True" if self.causal else ""
        return f"width={self.width}, heads={self.heads}{causal}"

"""The encoder every model here is built from: pre- or post-norm blocks around any attention."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from primal import functional
from primal.attention.base import Attention, as_mask, check_tokens, zero_rows
from primal.errors import require_choice, require_positive
from primal.functional import KSVDTerms
from primal.layers import Dropout, Linear

Norm = Literal["pre", "post"]


class EncoderOutput(NamedTuple):
    """What an encoder returns."""

    values: Tensor  # (B, N, width), zero at padding
    terms: tuple[KSVDTerms, ...]  # one per primal layer, first layer first


class EncoderStep(NamedTuple):
    """What one step of decoding returns."""

    values: Tensor  # (B, width)
    state: tuple[Any, ...]  # one per layer


@final
class Block(nn.Module):
    """Attention and a feed-forward network, each with its residual and norm."""

    def __init__(
        self, attention: Attention, feedforward: int, *, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        require_positive("feedforward", feedforward)
        require_choice("norm", norm, ("pre", "post"))
        width = attention.width
        self.norm = norm
        self.attention = attention
        self.feedforward = nn.Sequential(
            Linear(width, feedforward),
            nn.GELU(),
            Dropout(dropout),
            Linear(feedforward, width),
        )
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, KSVDTerms | None]:
        attended, terms = self.attention(self._before(x, self.attention_norm), mask=mask)
        return self._after_attention(x, attended, mask), terms

    def step(self, x: Tensor, state: Any, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Do the same for one token (B, width)."""
        attended, state = self.attention.step(
            self._before(x, self.attention_norm), state, mask=mask
        )
        return self._after_attention(x, attended), state

    def _after_attention(self, x: Tensor, attended: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self._after(x + self.dropout(attended), self.attention_norm)
        mixed = functional.each_token(
            self.feedforward, self._before(x, self.feedforward_norm), mask
        )
        return self._after(x + self.dropout(mixed), self.feedforward_norm)

    def _before(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        normed: Tensor = norm(x) if self.norm == "pre" else x
        return normed

    def _after(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        normed: Tensor = norm(x) if self.norm == "post" else x
        return normed

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}"


@final
class Encoder(nn.Module):
    """A stack of blocks, one per attention given; layers may differ in kind.

    >>> from primal import PrimalAttention, SoftmaxAttention
    >>> layers = [SoftmaxAttention(32, heads=4), PrimalAttention(32, heads=4, rank=8)]
    >>> values, terms = Encoder(layers, feedforward=64)(torch.randn(2, 10, 32))
    >>> values.shape, len(terms)
    (torch.Size([2, 10, 32]), 1)
    """

    def __init__(
        self,
        attention: Sequence[Attention],
        feedforward: int,
        *,
        norm: Norm = "pre",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = {layer.width for layer in attention}
        if len(widths) != 1:
            raise ValueError(
                "attention needs at least one layer, all of one width, got widths "
                f"{sorted(widths)}; build every layer with the encoder's width."
            )
        (self.width,) = widths
        self.blocks = nn.ModuleList(
            Block(layer, feedforward, norm=norm, dropout=dropout) for layer in attention
        )
        # Pre-norm leaves the residual stream unscaled; post-norm ends in a norm already.
        self.final_norm = nn.LayerNorm(self.width) if norm == "pre" else nn.Identity()

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> EncoderOutput:
        """Encode tokens (B, N, width); ``mask`` is (B, N) bool, True = real, or (B,) lengths."""
        check_tokens("x", x, self.width)
        mask = as_mask("mask", mask, x)
        x = zero_rows(x, mask)
        collected = []
        for block in self.blocks:
            x, terms = block(x, mask)
            if terms is not None:
                collected.append(terms)
        return EncoderOutput(zero_rows(self.final_norm(x), mask), tuple(collected))

    def init_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Any, ...]:
        """Return the state before the first token; every layer must be causal."""
        return tuple(
            layer.init_state(batch, device=device, dtype=dtype) for layer in self.attention
        )

    def step(self, x: Tensor, state: tuple[Any, ...], *, mask: Tensor | None = None) -> EncoderStep:
        """Encode one token (B, width) after those the state has seen."""
        if mask is not None:
            x = x.masked_fill(~mask[:, None], 0.0)
        states = []
        for block, layer_state in zip(self._blocks(), state, strict=True):
            x, after = block.step(x, layer_state, mask)
            states.append(after)
        values = self.final_norm(x)
        if mask is not None:
            values = values.masked_fill(~mask[:, None], 0.0)
        return EncoderStep(values, tuple(states))

    @property
    def attention(self) -> list[Attention]:
        """The attention layers, first layer first."""
        return [block.attention for block in self._blocks()]

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

"""A classifier of sequences of vectors: embedding, positions, encoder, pooling, head."""

import math
from dataclasses import replace
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from primal.attention.base import as_mask, check_tokens, zero_rows
from primal.errors import require_choice, require_positive
from primal.functional import KSVDTerms
from primal.layers import Dropout
from primal.models.build import EncoderConfig, build_encoder

Positions = Literal["learned", "sinusoidal", "none"]
Pooling = Literal["mean", "flatten"]


class ClassifierOutput(NamedTuple):
    """What a classifier returns."""

    logits: Tensor  # (B, classes)
    terms: tuple[KSVDTerms, ...]  # one per primal layer, first layer first


@final
class SequenceClassifier(nn.Module):
    """Classify sequences of ``channels``-wide vectors, ``max_tokens`` long or shorter.

    Args:
        channels: width of a token.
        classes: of the output; a regression has 1.
        max_tokens: the longest sequence. Neither sinusoidal nor absent positions are bound by it.
        config: of the encoder.
        positions: how a token says where it stands.
        pooling: "mean" over the tokens, or "flatten": the head has weights for each position, as
            published for time series.
        stem: how many neighbouring tokens the embedding reads, 1 is none but its own.

    >>> model = SequenceClassifier(channels=12, classes=9, max_tokens=29)
    >>> model(torch.randn(4, 29, 12), mask=torch.tensor([29, 7, 15, 20])).logits.shape
    torch.Size([4, 9])
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        max_tokens: int,
        config: EncoderConfig | None = None,
        *,
        positions: Positions = "learned",
        pooling: Pooling = "mean",
        stem: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (
            ("channels", channels),
            ("classes", classes),
            ("max_tokens", max_tokens),
            ("stem", stem),
        ):
            require_positive(name, value)
        require_choice("positions", positions, ("learned", "sinusoidal", "none"))
        require_choice("pooling", pooling, ("mean", "flatten"))
        config = EncoderConfig() if config is None else config
        projection = config.projection or ("shared" if config.causal else "anchors")
        if config.anchors is None and projection in ("anchors", "feature_anchors"):
            # As published: more anchors than tokens would only read some of them twice.
            config = replace(config, anchors=min(max_tokens, 10 * config.rank))
        self.channels, self.max_tokens, self.pooling = channels, max_tokens, pooling
        self.bounded = positions == "learned" or pooling == "flatten"
        self.embed = nn.Linear(channels, config.width)
        # Two convolutions, and their input beside them: the embedding alone is where they start.
        self.stem = _stem(config.width, stem) if stem > 1 else None
        self.positions = (
            nn.Parameter(torch.empty(max_tokens, config.width)) if positions == "learned" else None
        )
        self.sinusoidal = positions == "sinusoidal"
        self.dropout = Dropout(config.dropout)
        self.encoder = build_encoder(config)
        pooled = config.width * (max_tokens if pooling == "flatten" else 1)
        self.head = nn.Linear(pooled, classes)
        if self.positions is not None:
            nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> ClassifierOutput:
        """Classify x (B, N, channels); ``mask`` is (B, N) bool, True = real, or (B,) lengths."""
        check_tokens("x", x, self.channels)
        tokens = x.shape[1]
        if self.bounded and tokens > self.max_tokens:
            raise ValueError(
                f"x must have at most max_tokens={self.max_tokens} tokens, got {tokens}; crop "
                "or resample the series, or build the model with a larger max_tokens."
            )
        mask = as_mask("mask", mask, x)
        embedded = self.embed(zero_rows(x, mask))
        if self.stem is not None:
            for layer in self.stem:
                near = layer(zero_rows(embedded, mask).mT).mT
                embedded = embedded + nn.functional.gelu(near)
        if self.positions is not None:
            embedded = embedded + self.positions[:tokens]
        elif self.sinusoidal:
            embedded = embedded + sinusoids(tokens, embedded)
        values, terms = self.encoder(self.dropout(embedded), mask=mask)
        return ClassifierOutput(self.head(self._pool(values, mask)), terms)

    def _pool(
        self, values: Tensor, mask: Tensor | None
    ) -> Tensor:  # (B, N, width), zero at padding
        if self.pooling == "flatten":
            # As published: an activation and a dropout before the head that reads every position.
            active = zero_rows(self.dropout(nn.functional.gelu(values)), mask)
            missing = self.max_tokens - values.shape[1]
            return nn.functional.pad(active, (0, 0, 0, missing)).flatten(1)
        if mask is None:
            return values.mean(dim=1)
        return values.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def sinusoids(tokens: int, like: Tensor) -> Tensor:  # (tokens, width)
    """Return the fixed positions of the first Transformer, at a tenth of their size."""
    width = like.shape[-1]
    steps = torch.arange(tokens, device=like.device, dtype=torch.float32)
    rates = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10000.0) / width))
    angles = steps[:, None] * rates
    waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]
    return (0.1 * waves).to(like.dtype)


def _stem(width: int, size: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Conv1d(width, width, size, padding="same") for _ in range(2))

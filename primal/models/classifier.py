"""A classifier of sequences of vectors: embedding, positions, encoder, mean, head."""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from primal.attention.base import as_mask, check_tokens, zero_rows
from primal.errors import require_positive
from primal.functional import KSVDTerms
from primal.models.build import EncoderConfig, build_encoder


class ClassifierOutput(NamedTuple):
    """What a classifier returns."""

    logits: Tensor  # (B, classes)
    terms: tuple[KSVDTerms, ...]  # one per primal layer, first layer first


@final
class SequenceClassifier(nn.Module):
    """Classify sequences of ``channels``-wide vectors, ``max_tokens`` long or shorter.

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
    ) -> None:
        super().__init__()
        for name, value in (
            ("channels", channels),
            ("classes", classes),
            ("max_tokens", max_tokens),
        ):
            require_positive(name, value)
        config = EncoderConfig() if config is None else config
        projection = config.projection or ("shared" if config.causal else "anchors")
        if config.anchors is None and projection in ("anchors", "feature_anchors"):
            # As published: more anchors than tokens would only read some of them twice.
            config = replace(config, anchors=min(max_tokens, 10 * config.rank))
        self.channels, self.max_tokens = channels, max_tokens
        self.embed = nn.Linear(channels, config.width)
        self.positions = nn.Parameter(torch.empty(max_tokens, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = build_encoder(config)
        self.head = nn.Linear(config.width, classes)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> ClassifierOutput:
        """Classify x (B, N, channels); ``mask`` is (B, N) bool, True = real, or (B,) lengths."""
        check_tokens("x", x, self.channels)
        if x.shape[1] > self.max_tokens:
            raise ValueError(
                f"x must have at most max_tokens={self.max_tokens} tokens, got {x.shape[1]}; crop "
                "or resample the series, or build the model with a larger max_tokens."
            )
        mask = as_mask("mask", mask, x)
        embedded = self.embed(zero_rows(x, mask)) + self.positions[: x.shape[1]]
        values, terms = self.encoder(self.dropout(embedded), mask=mask)
        if mask is None:
            pooled = values.mean(dim=1)
        else:
            pooled = values.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return ClassifierOutput(self.head(pooled), terms)

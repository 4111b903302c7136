"""A model of events in time: at each event, which kind comes next, given when."""

from __future__ import annotations

import math
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from primal.attention.base import as_mask, zero_rows
from primal.errors import require_positive
from primal.functional import KSVDTerms
from primal.models.encoder import Encoder, EncoderOutput
from primal.time_encodings import TimeEncoding, relative_times


class EventOutput(NamedTuple):
    """What an event model returns."""

    logits: Tensor  # (B, N, kinds)
    terms: tuple[KSVDTerms, ...]  # one per primal layer, first layer first


@final
class PlainTime(TimeEncoding):
    """The time and its logarithm, as numbers: what an encoding is compared with."""

    unit: Tensor  # its dtype is that of the features

    def __init__(self, *, shortest: float = 1.0, longest: float = 1e4) -> None:
        super().__init__(2, shortest, longest)
        self.register_buffer("unit", torch.ones(()))

    def reset_parameters(self) -> None:
        """Do nothing: there are none."""

    def _encode(self, times: Tensor) -> Tensor:
        whole = math.log1p(self.longest / self.shortest)
        logarithm = times.sign() * (times.abs() / self.shortest).log1p() / whole
        return torch.stack((times / self.longest, logarithm), dim=-1).to(self.unit)


@final
class Recurrence(nn.Module):
    """An LSTM in the place of a causal encoder: what attention is compared with."""

    def __init__(self, width: int, depth: int = 1, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        between = dropout if depth > 1 else 0.0  # PyTorch puts it between layers alone
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> EncoderOutput:
        mask = as_mask("mask", mask, x)  # padding comes last, and is read by nothing before it
        values, _ = self.lstm(zero_rows(x, mask))
        return EncoderOutput(zero_rows(self.dropout(values), mask), ())


@final
class EventPredictor(nn.Module):
    """Predict the kind of each next event from the events so far and the time it happens.

    A token joins, by concatenation, its event's embedding with the encodings of its own time, of
    the time asked about, and of the span between the two. So one causal pass predicts at every
    position: its query knows the time asked, its keys the times of the past.

    Args:
        kinds: of events.
        embedding: width of an event's embedding.
        encoder: causal, an Encoder or a Recurrence.
        encoding: of times; None leaves times out.
        positions: how many learnt positions to add; None leaves them out.

    >>> from primal.models.build import primalformer
    >>> from primal.time_encodings import Bochner
    >>> encoder = primalformer(width=32, rank=4, causal=True, projection="contextual")
    >>> model = EventPredictor(kinds=22, embedding=16, encoder=encoder, encoding=Bochner(32))
    >>> kinds, times = torch.randint(22, (2, 7)), torch.rand(2, 8).double().cumsum(1)
    >>> model(kinds, times[:, :-1], asked=times[:, 1:]).logits.shape
    torch.Size([2, 7, 22])
    """

    def __init__(
        self,
        kinds: int,
        embedding: int,
        encoder: Encoder | Recurrence,
        *,
        encoding: TimeEncoding | None = None,
        positions: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_positive("kinds", kinds)
        require_positive("embedding", embedding)
        if isinstance(encoder, Encoder) and not all(a.causal for a in encoder.attention):
            raise ValueError(
                "the next event needs a causal encoder, or it would be shown; build it with "
                "causal=True."
            )
        self.kinds = kinds
        self.embed = nn.Embedding(kinds, embedding)
        self.encoding = encoding
        joined = embedding + (0 if encoding is None else 3 * encoding.features)
        self.join = nn.Linear(joined, encoder.width)
        self.positions = (
            None if positions is None else nn.Parameter(torch.empty(positions, encoder.width))
        )
        self.dropout = nn.Dropout(dropout)
        self.encoder = encoder
        self.head = nn.Linear(encoder.width, kinds)
        if self.positions is not None:
            nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(
        self,
        kinds: Tensor,  # (B, N) int64
        times: Tensor,  # (B, N), of the events
        asked: Tensor,  # (B, N), of the events to predict
        *,
        mask: Tensor | None = None,  # (B, N) bool, or (B,) lengths; padding comes last
    ) -> EventOutput:
        """Return the logits of the next kind at every event."""
        mask = self._check(kinds, times, asked, mask)
        parts = [self.embed(kinds if mask is None else kinds.masked_fill(~mask, 0))]
        if self.encoding is not None:
            since, until = relative_times(times), relative_times(asked, times[:, 0])
            seen = torch.stack((since, until, until - since))
            if mask is not None:
                seen = seen.masked_fill(~mask, 0.0)
            # One call, so that a random spectrum is the same for all three.
            encoded = self.encoding(seen)
            # A feature of n others is about n^-½ long: give the linear map rows of unit scale.
            parts += list(encoded * encoded.shape[-1] ** 0.5)
        joined = self.join(torch.cat(parts, dim=-1))
        if self.positions is not None:
            joined = joined + self.positions[: joined.shape[1]]
        values, terms = self.encoder(self.dropout(joined), mask=mask)
        return EventOutput(self.head(values), terms)

    def _check(
        self, kinds: Tensor, times: Tensor, asked: Tensor, mask: Tensor | None
    ) -> Tensor | None:
        if kinds.ndim != 2 or kinds.dtype != torch.int64:
            raise ValueError(
                f"kinds must be int64 of shape (batch, events), got {kinds.dtype} "
                f"{tuple(kinds.shape)}; number the kinds of events from 0."
            )
        if times.shape != kinds.shape or asked.shape != kinds.shape:
            raise ValueError(
                f"times and asked must have the shape of kinds, {tuple(kinds.shape)}, got "
                f"{tuple(times.shape)} and {tuple(asked.shape)}; asked[:, n] is when event n + 1 "
                "happens."
            )
        if self.positions is not None and kinds.shape[1] > len(self.positions):
            raise ValueError(
                f"a sequence must have at most {len(self.positions)} events, got "
                f"{kinds.shape[1]}; keep its last ones, or build the model with more positions."
            )
        return as_mask("mask", mask, kinds[..., None])

"""A model of series fitted in seconds, without gradient descent.

Random convolutions of a series and of its differences, and the scores of primal attention between
the two, are pooled over time; ridge regressions read them, the leave-one-out error chooses how much
each is shrunk, and what they predict for cases left out tells how far to trust each of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal.attention.base import as_mask, check_tokens, zero_rows
from primal.errors import require_positive
from primal.functional import mask_from_lengths
from primal.models.classifier import ClassifierOutput
from primal.models.dilated import Steps, averaged, spread_dilations
from primal.models.ridge import blend, fit_ridge
from primal.models.summaries import AttentionScores, Contests, Excesses, Outline, Summary
from primal.models.warping import warped

SAMPLE = 64  # training cases that thresholds and directions are fitted to
OUTLINE = 2048  # random features of the outline
BATCH = 64  # cases at a time, at most: what is pooled step by step should stay in the cache
RESPONSES = 2**24  # numbers that exist at one time, per family
FEATURES = 25 * 10**7  # numbers the regressions read: more cases, fewer features
LIMIT = 5.0  # standard deviations: a case unlike all others shall not be extrapolated to
WIDEST = 8192  # cases or features whose Gram matrix is factorised
# Cases and steps of them all, warped copies among them: with more, copies cost much, teach little.
FEW_CASES, FEW_STEPS = 1200, 200_000


@dataclass(frozen=True, kw_only=True)
class ClosedFormConfig:
    """The sizes of a model of series that is fitted in closed form."""

    dilations: int = 8
    """At most so many, spread from neighbouring steps to the whole series."""
    thresholds: int = 32
    """Per filter of MiniRocket, shared out among the dilations; 0 does without."""
    groups: int = 32
    """Of eight competing filters, per dilation; 0 does without."""
    width: int = 64
    """Of the tokens of primal attention."""
    rank: int = 16
    """Directions of primal attention per side and dilation; 0 does without."""
    points: int = 16
    """Through which the outline of a series is drawn; 0 does without."""
    copies: int = 4
    """Warped copies of each training case, where cases are few; 0 does without."""
    most_steps: int = 4096
    """Longer series are averaged over neighbouring steps until they are this short."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch's threads out: operations this small spend more time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@final
class ClosedFormModel(nn.Module):
    """Classify series, or predict numbers (``outputs=1``), after one ``fit`` in closed form.

    Args:
        channels: width of a step.
        outputs: classes, or 1 for a regression.
        max_tokens: the longest series of training; others may be longer or shorter.

    >>> x, classes = torch.randn(20, 30, 3), torch.arange(20) % 2
    >>> model = ClosedFormModel(3, 2, 30).fit(x, torch.full((20,), 30), classes)
    >>> model(torch.randn(4, 50, 3), mask=torch.tensor([50, 7, 1, 20])).logits.shape
    torch.Size([4, 2])
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    fitted: Tensor

    def __init__(
        self, channels: int, outputs: int, max_tokens: int, config: ClosedFormConfig | None = None
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("outputs", outputs), ("steps", max_tokens)):
            require_positive(name, value)
        config = ClosedFormConfig() if config is None else config
        self.channels, self.outputs, self.copies = channels, outputs, config.copies
        self.stride = -(-max_tokens // config.most_steps)
        dilations = spread_dilations(-(-max_tokens // self.stride), config.dilations)
        shares = [
            config.thresholds // len(dilations) + (i < config.thresholds % len(dilations))
            for i in range(len(dilations))
        ]
        self.outline = nn.ModuleList(
            [Outline(channels, config.points, OUTLINE)] if config.points else []
        )
        self.attention = nn.ModuleList(
            AttentionScores(channels, dilation, config.width, config.rank, thresholds=4)
            for dilation in dilations
            if config.rank
        )
        self.of_series, self.of_changes = (
            nn.ModuleList(
                [
                    *(
                        Excesses(channels, d, b)
                        for d, b in zip(dilations, shares, strict=True)
                        if b
                    ),
                    *(Contests(channels, d, config.groups) for d in dilations if config.groups),
                ]
            )
            for _ in range(2)
        )
        features = sum(summary.features for summary, _ in self._summaries())
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.zeros(features))
        self.register_buffer("weight", torch.zeros(features, outputs))
        self.register_buffer("bias", torch.zeros(outputs))
        self.register_buffer("fitted", torch.tensor(False))

    @_one_thread()
    @torch.no_grad()
    def fit(
        self, x: Tensor, lengths: Tensor, targets: Tensor, *, seed: int = 0
    ) -> "ClosedFormModel":
        """Fit to series x (B, N, channels) and targets: (B,) classes, or numbers."""
        generator = torch.Generator().manual_seed(seed)
        x = zero_rows(x, mask_from_lengths(lengths, x.shape[1])).to(self.weight)
        n, few = len(x), min(FEW_CASES // len(x), FEW_STEPS // (len(x) * x.shape[1]))
        copies = max(1, min(1 + self.copies, few))
        x = torch.cat([x, *(warped(x, lengths, generator) for _ in range(copies - 1))])
        self._draw(x[:n], lengths, generator)
        features, kept = self._training_features(x, lengths.repeat(copies), generator)
        self.mean.zero_()
        self.mean[kept] = features[:n].mean(0)
        features -= self.mean[kept]
        spread = features[:n].square().mean(0).sqrt()
        # A feature that is constant in training says nothing, whatever it is later.
        self.scale.zero_()
        self.scale[kept] = torch.where(spread > 1e-6, 1 / spread, 0.0)
        features.mul_(self.scale[kept]).clamp_(-LIMIT, LIMIT)
        wanted = targets[:, None].float()
        if self.outputs > 1:
            wanted = 2 * F.one_hot(targets, self.outputs).float() - 1
        parts = self._heads(kept)
        heads = [(part, fit_ridge(features[:n, part], wanted)) for part in parts]
        if copies > 1:
            heads.append((parts[-1], fit_ridge(features[:, parts[-1]], wanted, copies)))
        trust = blend([ridge.held_out for _, ridge in heads], targets)
        self.weight.zero_()
        self.bias.zero_()
        for (part, ridge), share in zip(heads, trust.tolist(), strict=True):
            self.weight[kept[part]] += share * ridge.weight
            self.bias += share * ridge.bias
        self.fitted.fill_(True)
        return self

    @_one_thread()
    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> ClassifierOutput:
        """Predict for x (B, N, channels); ``mask`` is (B, N) bool, True = real, or (B,) lengths."""
        check_tokens("x", x, self.channels)
        if not self.fitted:
            raise RuntimeError("the model must be fitted before it predicts; call fit first.")
        mask = as_mask("mask", mask, x)
        if mask is None:
            lengths = torch.full((len(x),), x.shape[1], device=x.device)
        else:
            lengths = mask.sum(1).clamp(min=1)
        x = zero_rows(x, mask).to(self.weight)
        logits = x.new_empty(len(x), self.outputs)
        for cases, steps in self._batches(x, lengths):
            standard = ((self._features(steps) - self.mean) * self.scale).clamp(-LIMIT, LIMIT)
            logits[cases] = standard @ self.weight + self.bias
        return ClassifierOutput(logits, ())

    def _summaries(self) -> Iterator[tuple[Summary, bool]]:
        """Yield each family, and whether it reads the differences, in the order of the features."""
        for part in (self.outline, self.attention, self.of_series, self.of_changes):
            for summary in part:
                assert isinstance(summary, Summary)
                yield summary, part is self.of_changes

    def _draw(self, x: Tensor, lengths: Tensor, generator: torch.Generator) -> None:
        chosen = torch.randperm(len(x), generator=generator)[:SAMPLE].to(x.device)
        sample = self._steps(x[chosen], lengths[chosen])
        for summary, of_changes in self._summaries():
            summary.draw(sample.changes() if of_changes else sample, generator)

    def _features(self, steps: Steps) -> Tensor:  # (n, features)
        changes = steps.changes()
        return torch.cat(
            [
                summary(changes if of_changes else steps)
                for summary, of_changes in self._summaries()
            ],
            dim=1,
        )

    def _training_features(
        self, x: Tensor, lengths: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:  # (n, kept), (kept,)
        """Return as many features as fit, of many cases drawn at random, and which they are."""
        total, n = len(self.mean), len(x)
        most = FEATURES // n if n <= WIDEST else min(FEATURES // n, WIDEST)
        kept = torch.arange(total)
        if most < total:
            kept = torch.randperm(total, generator=generator)[:most].sort().values
        kept = kept.to(x.device)
        features = x.new_empty(n, len(kept))
        for cases, steps in self._batches(x, lengths):
            features[cases] = self._features(steps)[:, kept]
        return features, kept

    def _heads(self, kept: Tensor) -> list[slice]:
        """Return what each regression reads: the outline, the attention, all but the outline."""
        outline, attention = (
            sum(summary.features for summary in part if isinstance(summary, Summary))
            for part in (self.outline, self.attention)
        )
        ends = kept.new_tensor([outline, outline + attention])
        first, second = torch.searchsorted(kept, ends).tolist()
        parts = {(0, first), (first, second), (first, len(kept))}
        return [slice(*part) for part in sorted(parts) if part[1] > part[0]]

    def _batches(self, x: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Steps]]:
        """Yield cases of like length, few enough for the memory and the cache."""
        order = lengths.argsort(stable=True)
        begin = 0
        while begin < len(order):
            cases = order[begin : begin + BATCH]
            steps = -(-int(lengths[cases[-1]]) // self.stride)  # of the longest in reach
            cases = cases[: max(1, RESPONSES // (256 * steps))]  # 256 filters at a time
            longest = int(lengths[cases[-1]])
            yield cases, self._steps(x[cases, :longest], lengths[cases])
            begin += len(cases)

    def _steps(self, x: Tensor, lengths: Tensor) -> Steps:
        x, lengths = averaged(x, lengths, self.stride)
        return Steps(x.transpose(0, 1).contiguous(), lengths)

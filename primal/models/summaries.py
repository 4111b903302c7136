"""What is kept of a series, whatever its length: four families of features, none of them trained.

Each draws its random part, and fits the rest to a sample of training series, in ``draw``.

Shape letters: T steps, n cases, C channels, K filters, B thresholds, P token width, S components.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from primal.feature_maps import Cosine, RandomFourier
from primal.functional import primal_scores
from primal.models import dilated
from primal.models.dilated import Steps

GROUP = 8  # filters that compete with each other
OUTLINED = 64  # channels at most, drawn by lot, for the map's cost is cubic in their number
TOKENS = 2048  # from which the directions of primal attention are found


class Summary(nn.Module, ABC):
    """A family of features of series."""

    features: int

    @abstractmethod
    def draw(self, sample: Steps, generator: torch.Generator) -> None: ...

    @abstractmethod
    def forward(self, steps: Steps) -> Tensor: ...  # (n, features)


@final
class Excesses(Summary):
    """MiniRocket's filters and MultiRocket's four poolings: what exceeds thresholds, and when.

    Tan, Dempster, Bergmeir, Webb, "MultiRocket", 2022.
    """

    filters: Tensor
    whole: Tensor
    mix: Tensor
    thresholds: Tensor

    def __init__(self, channels: int, dilation: int, thresholds: int) -> None:
        super().__init__()
        self.dilation = dilation
        filters = dilated.ternary_filters()
        count = filters.shape[1]
        self.features = 4 * thresholds * count
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer("whole", torch.arange(count) % 2 == 0, persistent=False)
        self.register_buffer("mix", torch.zeros(channels, count))
        self.register_buffer("thresholds", torch.zeros(thresholds, count))

    def draw(self, sample: Steps, generator: torch.Generator) -> None:
        self.mix.copy_(dilated.channel_mix(self.mix.shape, generator))
        self.thresholds.copy_(
            dilated.draw_thresholds(*self._responses(sample), len(self.thresholds), generator)
        )

    def forward(self, steps: Steps) -> Tensor:
        return dilated.pool_excesses(*self._responses(steps), self.thresholds).flatten(1)

    def _responses(self, steps: Steps) -> tuple[Tensor, Tensor]:  # (T, n, K) each
        response = dilated.responses(steps, self.mix, self.filters, self.dilation)
        # Every other filter is read only where all of its window is inside the series.
        inner = dilated.inside(steps, self.dilation * (dilated.TAPS // 2))[..., None]
        return response, inner | (self.whole & dilated.inside(steps)[..., None])


@final
class Contests(Summary):
    """Hydra's counts: which of a group of filters fits best, and which worst, at each step.

    Dempster, Schmidt, Webb, "Hydra", 2023.
    """

    mix: Tensor
    filters: Tensor

    def __init__(self, channels: int, dilation: int, groups: int) -> None:
        super().__init__()
        self.dilation, self.features = dilation, 2 * groups * GROUP
        self.register_buffer("mix", torch.zeros(channels, groups))
        self.register_buffer("filters", torch.zeros(dilated.TAPS, groups * GROUP))

    def draw(self, sample: Steps, generator: torch.Generator) -> None:
        self.mix.copy_(dilated.channel_mix(self.mix.shape, generator))
        self.filters.copy_(dilated.normal_filters(self.filters.shape[1], generator))

    def forward(self, steps: Steps) -> Tensor:
        mix = self.mix.repeat(1, GROUP)
        response = dilated.responses(steps, mix, self.filters, self.dilation)
        counts = dilated.pool_contests(response, dilated.inside(steps), GROUP)
        return counts.flatten(1).clamp(min=0).sqrt()


def ksvd_directions(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    # φ_q and φ_k of tokens, (N, P) each -> W_e, W_r, (P, S) each
    """Return the weights of the KSVD of ``K = Φ_q Φ_kᵀ``, K itself unseen.

    With Φ = Q R on either side K = Q_q (R_q R_kᵀ) Q_kᵀ. Let U Σ Vᵀ be the SVD of the middle: then
    H_e = Q_q U and H_r = Q_k V, so that W_e = Φ_kᵀ H_r = R_kᵀ V and W_r = Φ_qᵀ H_e = R_qᵀ U.
    """
    left, right = (torch.linalg.qr(side.double(), mode="r").R for side in (query, key))
    u, _, v = torch.linalg.svd(left @ right.mT)
    return right.mT @ v.mT[:, :rank], left.mT @ u[:, :rank]


@final
class AttentionScores(Summary):
    """Primal attention between what a series is and how it changes, its scores pooled over time.

    Queries are random convolutions of the series, keys of its differences; with φ the cosine map
    their kernel φ(q)ᵀφ(k) is asymmetric. Its KSVD over tokens of the training series gives W_e and
    W_r, in closed form, and with them the scores e and r of every token of any series.
    """

    mixes: Tensor
    filters: Tensor
    directions: Tensor
    thresholds: Tensor

    def __init__(
        self, channels: int, dilation: int, width: int, rank: int, thresholds: int
    ) -> None:
        super().__init__()
        self.dilation, self.phi = dilation, Cosine(width)
        self.features = 2 * rank * (4 * thresholds + 4)
        self.register_buffer("mixes", torch.zeros(2, channels, width))
        self.register_buffer("filters", torch.zeros(2, dilated.TAPS, width))
        self.register_buffer("directions", torch.zeros(2, width, rank))  # W_e, W_r
        self.register_buffer("thresholds", torch.zeros(thresholds, 2 * rank))

    def draw(self, sample: Steps, generator: torch.Generator) -> None:
        for mix, filters in zip(self.mixes, self.filters, strict=True):
            mix.copy_(dilated.channel_mix(mix.shape, generator))
            filters.copy_(dilated.normal_filters(filters.shape[1], generator))
        valid = dilated.inside(sample)
        query, key = (features[valid] for features in self._features(sample))
        rank = self.directions.shape[2]
        chosen = torch.randperm(len(query), generator=generator)[:TOKENS].to(query.device)
        if len(chosen) < rank:  # repeating all tokens alike changes no direction
            chosen = chosen.repeat(-(-rank // len(chosen)))
        weights = torch.stack(ksvd_directions(query[chosen], key[chosen], rank))
        self.directions.copy_(nn.functional.normalize(weights, dim=1))
        scores = self._scores(sample)
        self.thresholds.copy_(
            dilated.draw_thresholds(
                scores, valid[..., None].expand_as(scores), len(self.thresholds), generator
            )
        )

    def forward(self, steps: Steps) -> Tensor:
        scores, valid = self._scores(steps), dilated.inside(steps)[..., None]
        excesses = dilated.pool_excesses(scores, valid, self.thresholds).flatten(1)
        return torch.cat((excesses, dilated.pool_moments(scores, valid).flatten(1)), dim=1)

    def _features(self, steps: Steps) -> list[Tensor]:  # φ(q) and φ(k), (T, n, P) each
        parts = zip((steps, steps.changes()), self.mixes, self.filters, strict=True)
        return [
            self.phi(dilated.responses(part, mix, filters, self.dilation))
            for part, mix, filters in parts
        ]

    def _scores(self, steps: Steps) -> Tensor:  # e and r, (T, n, 2S)
        return torch.cat(primal_scores(*self._features(steps), *self.directions), dim=-1)


@final
class Outline(Summary):
    """The series itself, drawn through a few points, in random features of the RBF kernel."""

    chosen: Tensor
    center: Tensor
    scale: Tensor

    def __init__(self, channels: int, points: int, features: int) -> None:
        super().__init__()
        self.channels, self.points, self.features = channels, points, features
        width = points * min(channels, OUTLINED) + 1
        self.register_buffer("chosen", torch.arange(min(channels, OUTLINED)))
        self.phi = RandomFourier(width, features, generator=torch.Generator())
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("scale", torch.ones(()))

    def draw(self, sample: Steps, generator: torch.Generator) -> None:
        if self.channels > OUTLINED:
            lot = torch.randperm(self.channels, generator=generator)
            self.chosen.copy_(lot[:OUTLINED].sort().values)
        self.phi.resample(generator)
        outlines = self._outlines(sample)
        self.center.copy_(outlines.mean(0))
        spread = (outlines - self.center).square().sum(1).mean()
        # The map's kernel is exp(−‖x − y‖² / 2√D): at the mean distance it shall be 1/e.
        width = len(self.center)
        self.scale.copy_((width**0.5 / spread.clamp(min=1e-12)).sqrt())

    def forward(self, steps: Steps) -> Tensor:
        features: Tensor = self.phi((self._outlines(steps) - self.center) * self.scale)
        return features

    def _outlines(self, steps: Steps) -> Tensor:  # (n, points · C + 1)
        values, lengths = steps.values[..., self.chosen], steps.lengths
        at = torch.linspace(0, 1, self.points, device=values.device)[:, None] * (lengths - 1)
        before = at.long()
        after = torch.minimum(before + 1, lengths - 1)
        case = torch.arange(len(lengths), device=values.device)
        drawn = torch.lerp(values[before, case], values[after, case], (at - before)[..., None])
        return torch.cat((drawn.transpose(0, 1).flatten(1), lengths.log()[:, None]), dim=1)

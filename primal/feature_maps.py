"""Feature maps φ: vectors of width D become features of width P with ``k(x, y) = φ(x)ᵀφ(y)``.

To add one: write the class, add it to FEATURE_MAPS; the contract tests pick it up from there.
"""

import math
from abc import ABC, abstractmethod
from itertools import combinations_with_replacement
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal import functional
from primal.errors import require_choice, require_positive


class FeatureMap(nn.Module, ABC):
    """Maps vectors of ``width`` D to vectors of ``features`` P, on the last dimension."""

    positive: ClassVar[bool] = (
        False  # every feature >= 0: the kernel can be normalised by its row sums
    )

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        require_positive("width", width)
        require_positive("features", features)
        self.width, self.features = width, features

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...  # (..., D) -> (..., P)

    def extra_repr(self) -> str:
        return f"width={self.width}, features={self.features}"


@final
class Cosine(FeatureMap):
    """``φ(x) = x / ‖x‖``: the cosine similarity, bounded at any scale of x. The published map."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cosine(x)


@final
class Identity(FeatureMap):
    """``φ(x) = x``: the linear kernel, attention without its exponential."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


@final
class EluPlusOne(FeatureMap):
    """``φ(x) = elu(x) + 1``, positive in every feature (Katharopoulos et al., ICML 2020)."""

    positive = True

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


@final
class Polynomial(FeatureMap):
    """All monomials up to ``degree``, weighted so that ``k(x, y) = (1 + xᵀy / √D)^degree`` exactly.

    P grows as D^degree / degree!, and the cost per token as P²: meant for narrow heads.
    """

    monomials: Tensor
    weights: Tensor

    def __init__(self, width: int, degree: int = 2) -> None:
        if degree not in (2, 3):
            raise ValueError(f"degree must be 2 or 3, got {degree!r}; Identity is degree 1.")
        # A monomial of the homogenised (1, x) is a multiset of `degree` indices out of D + 1.
        monomials = list(combinations_with_replacement(range(width + 1), degree))
        super().__init__(width, len(monomials))
        self.degree = degree
        counts = [[m.count(i) for i in range(width + 1)] for m in monomials]
        multinomial = [
            math.factorial(degree) / math.prod(math.factorial(c) for c in count) for count in counts
        ]
        root = [w**0.5 for w in multinomial]
        self.register_buffer("monomials", torch.tensor(monomials), persistent=False)
        self.register_buffer("weights", torch.tensor(root, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x[..., :1])
        homogeneous = torch.cat((ones, x * self.width**-0.25), dim=-1)
        factors = homogeneous[..., self.monomials]  # (..., P, degree)
        return factors.prod(-1) * self.weights.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.degree}"


class RandomMap(FeatureMap):
    """A map whose kernel holds in expectation over ``frequencies``, orthogonal in blocks of D."""

    frequencies: Tensor  # (draws, D)

    def __init__(
        self, width: int, features: int, draws: int, generator: torch.Generator | None
    ) -> None:
        super().__init__(width, features)
        self.register_buffer("frequencies", torch.empty(draws, width))
        self.resample(generator)

    @torch.no_grad()
    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw new frequencies: each standard normal, orthogonal to the others of its block."""
        draws, width = self.frequencies.shape
        blocks = []
        for _ in range(-(-draws // width)):
            square = torch.randn(width, width, generator=generator, dtype=torch.float64)
            direction, triangle = torch.linalg.qr(square)
            direction *= triangle.diagonal().sign()  # LAPACK fixes signs: undo it, or exp is biased
            length = torch.randn(width, width, generator=generator, dtype=torch.float64).norm(dim=1)
            blocks.append(direction.mT * length[:, None])
        self.frequencies.copy_(torch.cat(blocks)[:draws])

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (..., draws), (..., 1)
        """Return ``ωᵀx`` and ``‖x‖²`` of x / D^¼, in float32 at least."""
        with functional.full_precision(x):
            scaled = x.to(torch.promote_types(x.dtype, torch.float32)) * self.width**-0.25
            projected = scaled @ self.frequencies.to(scaled.dtype).mT
            return projected, scaled.square().sum(-1, keepdim=True)


@final
class PositiveRandom(RandomMap):
    """FAVOR+: ``E k(x, y) = exp(xᵀy / √D)``, the softmax kernel (Choromanski et al., ICLR 2021).

    ``resample()`` between training steps draws new directions; nothing calls it unasked.
    """

    positive = True

    def __init__(
        self, width: int, features: int | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        features = 2 * width if features is None else features
        super().__init__(width, features, features, generator)

    def forward(self, x: Tensor) -> Tensor:
        projected, square = self._project(x)
        return (torch.exp(projected - square / 2) / math.sqrt(self.features)).to(x.dtype)


@final
class RandomFourier(RandomMap):
    """``E k(x, y) = exp(−‖x − y‖² / 2√D)``, the RBF kernel (Rahimi & Recht, NeurIPS 2007)."""

    def __init__(
        self, width: int, features: int | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        features = 2 * width if features is None else features
        if features % 2:
            raise ValueError(
                f"features must be even (a cos and a sin per frequency), got {features}; "
                f"use {features - 1} or {features + 1}."
            )
        super().__init__(width, features, features // 2, generator)

    def forward(self, x: Tensor) -> Tensor:
        projected, _ = self._project(x)
        pairs = torch.cat((projected.cos(), projected.sin()), dim=-1)
        return (pairs / math.sqrt(self.features // 2)).to(x.dtype)


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "cosine": Cosine,
    "elu": EluPlusOne,
    "identity": Identity,
    "polynomial": Polynomial,
    "positive_random": PositiveRandom,
    "random_fourier": RandomFourier,
}


def feature_map(name: str, width: int, **settings: int) -> FeatureMap:
    """Build the feature map called ``name`` for vectors of ``width``.

    >>> feature_map("polynomial", width=4, degree=3)
    Polynomial(width=4, features=35, degree=3)
    """
    require_choice("feature map", name, FEATURE_MAPS)
    return FEATURE_MAPS[name](width, **settings)

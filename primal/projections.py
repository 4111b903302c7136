"""Projections: where the directions W_e and W_r of the scores come from.

At a KSVD solution the directions are combinations of features, ``W_e = Σ_j φ_k(x_j) h_jᵀ`` and
``W_r = Σ_i φ_q(x_i) h_iᵀ``, with one dual vector h per token. The projections differ in what stands
for h:

    FromAnchors   a parameter per anchor slot; anchors are evenly spaced tokens       (as published)
    Contextual    a learned function of the token: permutation-equivariant, any length, also causal
    Shared        nothing: W_e and W_r are parameters, the same for every input

Data-dependent directions are how a bidirectional layer mixes tokens at all: with Shared ones the
output at a token depends on that token alone, unless causal means or a short convolution mix before
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from primal import functional
from primal.errors import require_choice, require_divides, require_positive


class Shape(NamedTuple):
    """The sizes a projection is built for."""

    heads: int
    features: int  # P
    rank: int  # S
    width: int  # of the tokens attended to, the keys' side
    query_width: int  # of the tokens that attend
    positive: bool = False  # whether no feature is ever negative


class Tokens(NamedTuple):
    """What a projection may look at: one side of an attention layer, queries or keys."""

    inputs: Tensor  # (B, N, width), the layer's input, zero at padding
    features: Tensor | None  # (B, H, N, P), zero at padding; None unless the projection reads them
    mask: Tensor | None  # (B, N), True = real token


class Directions(NamedTuple):
    """The directions of one forward pass, and how strongly the two sides are coupled."""

    left: Tensor  # (B, H, P, S) or (H, P, S), W_{e|X}
    right: Tensor  # like left, W_{r|X}
    coupling: (
        Tensor  # (B, H) or (H,), tr(W_eᵀ W_r) of the weights; of the data where there are none
    )


class Projection(nn.Module, ABC):
    """Gives the directions of the primal scores."""

    data_dependent: ClassVar[bool] = True
    reads_features: bool = False  # whether forward looks at Tokens.features

    @abstractmethod
    def forward(self, queries: Tokens, keys: Tokens) -> Directions: ...

    @abstractmethod
    def reset_parameters(self) -> None: ...


@final
class FromAnchors(Projection):
    """``W_{e|X} = f(X)ᵀ W_e``, f(X) from evenly spaced tokens, W_e (H, A, S) parameters.

    ``source="tokens"`` takes f(X) from the layer's input, split by heads (as published; needs P to
    be the width of such a slice); ``"features"`` takes φ_k at the anchors for W_e and φ_q for W_r,
    as stationarity says, for every feature map. Anchors are chosen among the valid tokens of each
    sequence; a sequence with fewer tokens than anchors reads some of them more than once.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        anchors: int | None = None,
        source: Literal["tokens", "features"] = "tokens",
    ) -> None:
        super().__init__()
        heads, features, rank, width, *_ = shape
        require_choice("source", source, ("tokens", "features"))
        anchors = 10 * rank if anchors is None else anchors  # the paper's "multiplier" of 10
        require_positive("anchors", anchors)
        if source == "tokens":
            require_divides("width", width, "heads", heads)
            if width // heads != features:
                raise ValueError(
                    "source='tokens' needs as many features as a head's slice of the input is "
                    f"wide, got features={features} and width // heads = {width // heads}; "
                    "use projection='feature_anchors', which fits every map and width."
                )
        self.heads, self.anchors, self.source = heads, anchors, source
        self.reads_features = source == "features"
        self.left = nn.Parameter(torch.empty(heads, anchors, rank))
        self.right = nn.Parameter(torch.empty(heads, anchors, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.left)
        nn.init.orthogonal_(self.right)

    def forward(self, queries: Tokens, keys: Tokens) -> Directions:
        coupling = functional.coupling(self.left, self.right)
        if self.reads_features:
            left = self._directions(self._at_anchors(keys), self.left)
            right = self._directions(self._at_anchors(queries), self.right)
            return Directions(left, right, coupling)
        weights = torch.cat((self.left, self.right), dim=-1)  # both read the same anchors
        left, right = self._directions(self._at_anchors(keys), weights).chunk(2, dim=-1)
        return Directions(left, right, coupling)

    def _directions(self, source: Tensor, weights: Tensor) -> Tensor:  # (B, H, P, S)
        """Return ``f(X)ᵀ W``: one product for each head, all sequences in its rows."""
        with functional.full_precision(source):
            return torch.einsum("bhap,has->bhps", source, weights.to(source.dtype))

    def _at_anchors(self, tokens: Tokens) -> Tensor:  # (B, H, A, P)
        count = tokens.inputs.shape[1]
        if self.reads_features:
            assert tokens.features is not None
            source = tokens.features
        else:
            source = tokens.inputs.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if tokens.mask is None:
            length = torch.full((1,), count, device=source.device)
            return source.index_select(2, functional.evenly_spaced(length, self.anchors)[0])
        # The n-th valid token, wherever padding lies: sort positions with the padding put last.
        position = torch.arange(count, device=source.device)
        order = torch.where(tokens.mask, position, position + count).argsort(dim=-1)
        lengths = tokens.mask.sum(-1).clamp(min=1)
        index = order.gather(1, functional.evenly_spaced(lengths, self.anchors))
        index = index[:, None, :, None].expand(-1, self.heads, -1, source.shape[-1])
        return source.gather(2, index)

    def extra_repr(self) -> str:
        return f"anchors={self.anchors}, source={self.source!r}"


@final
class Contextual(Projection):
    """``W_{e|X} = mean φ_k(x) w_e(x)ᵀ``, ``W_{r|X} = mean φ_q(x) w_r(x)ᵀ``, with w linear in x.

    The dual vectors become functions of the token, as in the out-of-sample extension of singular
    vectors. Then ``e_n = mean_j κ(x_n, x_j) w_e(x_j)``: attention is the case w_e = values, and r
    is the side it throws away. No slots and no length: permuting the tokens permutes the output. A
    positive map's kernel is divided by its row sums, so that e_n is a weighted average, as in
    attention.
    """

    reads_features = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.positive = shape.heads, shape.positive
        self.left = nn.Linear(shape.width, shape.heads * shape.rank, bias=False)
        self.right = nn.Linear(shape.query_width, shape.heads * shape.rank, bias=False)

    def reset_parameters(self) -> None:
        self.left.reset_parameters()
        self.right.reset_parameters()

    def forward(self, queries: Tokens, keys: Tokens) -> Directions:
        left_weight, right_weight = self.coefficients(queries, keys)
        left = _mean_outer(keys, left_weight)
        right = _mean_outer(queries, right_weight)
        return Directions(left, right, functional.coupling(left, right))

    def coefficients(self, queries: Tokens, keys: Tokens) -> tuple[Tensor, Tensor]:
        """Return w_e on the keys (B, H, M, S) and w_r on the queries (B, H, N, S)."""
        left = self.left(keys.inputs).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        right = self.right(queries.inputs).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return left, right

    def causal_scores(self, queries: Tokens, keys: Tokens) -> tuple[Tensor, Tensor]:
        """Return e and r (B, H, N, S) with every mean and row sum taken over j <= n."""
        assert queries.features is not None
        assert keys.features is not None
        left_weight, right_weight = self.coefficients(queries, keys)
        return (
            self._causal_side(queries.features, keys.features, left_weight, queries.mask),
            self._causal_side(keys.features, queries.features, right_weight, queries.mask),
        )

    def _causal_side(
        self, reader: Tensor, read: Tensor, weight: Tensor, mask: Tensor | None
    ) -> Tensor:  # (B, H, N, S)
        dtype, precise = reader.dtype, torch.promote_types(reader.dtype, torch.float32)
        # Sums over a long sequence pass the end of float16: divide before rounding.
        reader, read, weight = reader.to(precise), read.to(precise), weight.to(precise)
        if self.positive:  # the row sum is one more column of the state
            ones = torch.ones_like(weight[..., :1])
            sums = functional.causal_scores(reader, read, torch.cat((weight, ones), dim=-1))
            return (sums[..., :-1] / functional.row_sums(sums[..., -1:])).to(dtype)
        sums = functional.causal_scores(reader, read, weight)
        if mask is None:
            count = torch.arange(1, sums.shape[-2] + 1, device=sums.device)[:, None]
        else:
            count = mask.cumsum(-1).clamp(min=1)[:, None, :, None]
        return (sums / count).to(dtype)


def _mean_outer(tokens: Tokens, weight: Tensor) -> Tensor:  # (B, H, P, S), mean of φ wᵀ
    assert tokens.features is not None
    precise = torch.promote_types(weight.dtype, torch.float32)
    with functional.full_precision(weight):
        count = functional.token_count(tokens.features, tokens.mask)[:, None, None, None]
        return tokens.features.to(precise).mT @ (weight.to(precise) / count)


@final
class Shared(Projection):
    """``W_e`` and ``W_r`` (H, P, S) are parameters.

    Published for causal models, over cumulative means. Without causality such a layer mixes no
    tokens: use FromAnchors or Contextual there.
    """

    data_dependent = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(shape.heads, shape.features, shape.rank))
        self.right = nn.Parameter(torch.empty(shape.heads, shape.features, shape.rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.left)
        nn.init.orthogonal_(self.right)

    def forward(self, queries: Tokens, keys: Tokens) -> Directions:
        return Directions(self.left, self.right, functional.coupling(self.left, self.right))


PROJECTIONS: dict[str, Callable[[Shape], Projection]] = {
    "anchors": FromAnchors,
    "feature_anchors": partial(FromAnchors, source="features"),
    "contextual": Contextual,
    "shared": Shared,
}

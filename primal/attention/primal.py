"""Primal-Attention: attention from the leading singular directions of its kernel. READ SECOND."""

from collections.abc import Callable
from functools import partial
from typing import Literal, final

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
from primal.attention.decoding import PrimalState, mean_step, recurrent_step
from primal.backend import BACKENDS, Backend
from primal.errors import require_choice, require_divides, require_positive
from primal.feature_maps import Cosine, FeatureMap, feature_map
from primal.functional import KSVDTerms
from primal.layers import Linear
from primal.projections import (
    PROJECTIONS,
    Contextual,
    FromAnchors,
    Projection,
    Shape,
    Shared,
    Tokens,
)


@final
class PrimalAttention(Attention):
    """Attention as the primal of a kernel SVD, O(N) in the tokens.

    Chen, Tao, Tonin, Suykens, NeurIPS 2023. ``o_n = C [e_n ; r_n]`` with the scores ``e_n = W_eᵀ
    φ(q_n)`` and ``r_n = W_rᵀ φ(k_n)``, then an output projection. Train with
    ``primal.ksvd_objective(output.terms)`` added to the task's loss.

    >>> import primal
    >>> layer = primal.PrimalAttention(64, heads=4, rank=8)
    >>> values, terms = layer(torch.randn(2, 100, 64), mask=torch.tensor([100, 37]))
    >>> values.shape, primal.ksvd_objective(terms).shape
    (torch.Size([2, 100, 64]), torch.Size([]))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        rank: int,
        *,
        head_width: int | None = None,
        context_width: int | None = None,
        feature_map: str | FeatureMap = "cosine",
        projection: str | Callable[[Shape], Projection] | None = None,
        anchors: int | None = None,
        scores: Literal["both", "left", "right"] = "both",
        causal: bool = False,
        short_convolution: int = 0,
        bias: bool = True,
        overcomplete: bool = False,
        backend: Backend = "auto",
    ) -> None:
        """Build the layer.

        Args:
            width: of the tokens that come in and go out.
            rank: S, the singular directions kept per head; at most the P features of the map,
                unless ``overcomplete`` (as published for rank 96 on heads of width 64).
            head_width: D; by default ``width // heads``.
            context_width: of the tokens attended to in cross-attention; by default ``width``.
            feature_map: a name from FEATURE_MAPS or a FeatureMap for vectors of width D.
            projection: where W_e and W_r come from: "anchors", "feature_anchors", "contextual",
                "shared", or a function of a Shape. By default as published: "anchors", and "shared"
                if causal. A bidirectional layer needs data-dependent directions, since shared ones
                mix no tokens.
            anchors: how many, for the two anchor projections; by default ``10 * rank``.
            scores: which the output reads; the objective always sees both. Cross-attention takes
                "left", since r lives on the tokens attended to.
            causal: a token reads the past only. With "shared" through cumulative means of q and k
                (as published), with "contextual" through a recurrence; anchors would show the
                future.
            short_convolution: width of a depthwise convolution (causal if the layer is) over the
                tokens before q, k and Contextual coefficients; starts as the identity, 0 leaves it
                out. It reads neighbours by position, so padding must lie at the ends.
            backend: of the fused pass over the tokens, see ``primal.backend``.
        """
        super().__init__(width, heads, causal=causal)
        require_positive("rank", rank)
        require_choice("scores", scores, ("both", "left", "right"))
        require_choice("backend", backend, BACKENDS)
        if head_width is None:
            require_divides("width", width, "heads", heads)
            head_width = width // heads
        self.head_width, self.rank, self.scores, self.backend = head_width, rank, scores, backend
        self.context_width = width if context_width is None else context_width
        self.feature_map = _feature_map(feature_map, head_width)
        shape = Shape(
            heads,
            self.feature_map.features,
            rank,
            self.context_width,
            width,
            self.feature_map.positive,
        )
        if rank > shape.features and not overcomplete:
            raise ValueError(
                f"rank must be at most the {shape.features} features of {self.feature_map}, the "
                f"rank its kernel can have, got rank={rank}; lower it, widen the heads, or pass "
                "overcomplete=True."
            )
        self.to_query = Linear(width, heads * head_width, bias=bias)
        self.to_key = Linear(self.context_width, heads * head_width, bias=bias)
        self.projection = _projection(projection, shape, anchors, causal)
        self.convolution = _convolution(width, short_convolution, self.context_width)
        # A signed kernel has no row sums to divide by: its mixture is brought to scale per head.
        normalise = isinstance(self.projection, Contextual) and not self.feature_map.positive
        self.head_norm = nn.RMSNorm(head_width, eps=1e-6) if normalise else None
        self.combine = nn.Linear((2 if scores == "both" else 1) * rank, head_width)
        self.to_output = nn.Linear(heads * head_width, width)
        self.scale = nn.Parameter(torch.empty(heads, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.to_query, self.to_key, self.projection, self.combine, self.to_output):
            layer.reset_parameters()
        nn.init.uniform_(self.scale)
        if self.head_norm is not None:
            self.head_norm.reset_parameters()
        if self.convolution is not None:  # start as the identity: every token reads itself
            nn.init.zeros_(self.convolution.weight)
            with torch.no_grad():
                self.convolution.weight[:, 0, self._before] = 1.0

    def forward(
        self,
        x: Tensor,  # (B, N, width)
        context: Tensor | None = None,  # (B, M, context_width)
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> AttentionOutput:
        """Attend from x to ``context``, or to x itself."""
        query, key, queries, keys = self._read(x, context, mask, context_mask)
        left, right, coupling = self.projection(queries, keys)
        if self.causal and isinstance(self.projection, Contextual):
            left_scores, right_scores = self.projection.causal_scores(queries, keys)
            mixed = self._combine(left_scores, right_scores)
            left_energy = _mean_square(left_scores, queries.mask)
            right_energy = _mean_square(right_scores, queries.mask)
        else:
            mixed, left_energy, right_energy = functional.primal_attention(
                query,
                key,
                left,
                right,
                *self._combination(),
                queries.mask,
                keys.mask,
                unit_norm=queries.features is None and isinstance(self.feature_map, Cosine),
                backend=self.backend,
            )
        data_coupling = functional.coupling(left, right)
        terms = KSVDTerms(left_energy, right_energy, self.scale, coupling, data_coupling)
        return AttentionOutput(zero_rows(self._output(mixed), queries.mask), terms)

    def primal_scores(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # (B, H, N, S), (B, H, M, S)
        """Return the scores e and r, which forward itself never forms."""
        query, key, queries, keys = self._read(x, context, mask, context_mask)
        if self.causal and isinstance(self.projection, Contextual):
            return self.projection.causal_scores(queries, keys)
        left, right, _ = self.projection(queries, keys)
        if queries.features is None:
            query, key = self.feature_map(query), self.feature_map(key)
        query = functional.zero_padding(query, queries.mask)
        key = functional.zero_padding(key, keys.mask)
        return functional.primal_scores(query, key, left, right)

    def kernel(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # (B, H, N, M)
        """Return ``E Λ Rᵀ / √(NM)``, the rank-S kernel of the layer; causal: its lower part.

        The root is what Λ absorbs of the objective's means: at J = 0 it is √(NM) Σ⁻¹, not Σ⁻¹.
        """
        left, right = self.primal_scores(x, context, mask=mask, context_mask=context_mask)
        rows = functional.token_count(left, as_mask("mask", mask, x))
        columns = rows
        if context is not None:
            context_mask = as_mask("context_mask", context_mask, context)
            columns = functional.token_count(right, context_mask)
        kernel = functional.implied_kernel(left, right, self.scale)
        kernel = kernel / (rows * columns).sqrt()[:, None, None, None].to(kernel.dtype)
        return kernel.tril() if self.causal else kernel

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PrimalState:
        if not self.causal:
            super().init_state(batch)
        like = self.to_query.weight if dtype is None else self.to_query.weight.to(dtype)
        like = like.to(device=device, dtype=torch.promote_types(like.dtype, torch.float32))
        contextual, features = isinstance(self.projection, Contextual), self.feature_map.features
        total = like.new_zeros(batch, self.heads, features if contextual else self.head_width)
        outer = like.new_zeros(batch, self.heads, features, self.rank) if contextual else None
        window = like.new_zeros(batch, self._before, self.width)
        return PrimalState(
            like.new_zeros(batch),
            total,
            total,
            outer,
            outer,
            None if self.convolution is None else window,
        )

    def step(self, x: Tensor, state: PrimalState, *, mask: Tensor | None = None) -> StepOutput:
        if not self.causal:
            super().step(x, state)
        check_step(x, state.seen.shape[0], self.width)
        real = torch.ones_like(state.seen, dtype=torch.bool) if mask is None else mask
        token = zero_rows(x[:, None], real[:, None])  # (B, 1, width)
        if self.convolution is not None and state.window is not None:
            seen = torch.cat((state.window, token), dim=1).to(token.dtype)
            token = self.convolution(seen.mT).mT
            state = state._replace(
                window=torch.where(real[:, None, None], seen[:, 1:], state.window)
            )
        query = split_heads(self.to_query(token), self.heads)
        key = split_heads(self.to_key(token), self.heads)
        if isinstance(self.projection, Contextual):
            query, key = self.feature_map(query), self.feature_map(key)
            left, right, state = recurrent_step(self.projection, token, query, key, state, real)
        else:
            query, key, state = mean_step(query, key, state, real)
            directions = self.projection(Tokens(token, None, None), Tokens(token, None, None))
            query, key = self.feature_map(query), self.feature_map(key)
            left, right = functional.primal_scores(query, key, directions.left, directions.right)
        values = self._output(self._combine(left, right))
        return StepOutput(zero_rows(values, real[:, None])[:, 0], state)

    # --- parts ---------------------------------------------------------------------------------

    def _read(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        context_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tokens, Tokens]:
        """Return queries and keys (features, or raw for a fused map) and the tokens they are of."""
        check_tokens("x", x, self.width)
        mask = as_mask("mask", mask, x)
        x = self._convolve(x, mask)
        query = split_heads(self.to_query(x), self.heads)
        if context is None:
            if context_mask is not None:
                raise ValueError(
                    "context_mask needs a context, got none; self-attention takes mask=."
                )
            if self.context_width != self.width:
                raise ValueError(
                    f"a context of width {self.context_width} is required, got none; "
                    "pass context=, or build the layer without context_width for self-attention."
                )
            context, context_mask = x, mask
        else:
            self._check_context(x, context)
            context_mask = as_mask("context_mask", context_mask, context)
            context = self._convolve(context, context_mask)
        key = split_heads(self.to_key(context), self.heads)
        if self.causal and isinstance(self.projection, Shared):
            query, key = (functional.cumulative_mean(t, mask) for t in (query, key))
        queries, keys = Tokens(x, None, mask), Tokens(context, None, context_mask)
        if self.projection.reads_features or not isinstance(self.feature_map, Cosine):
            query = functional.zero_padding(self.feature_map(query), mask)
            key = functional.zero_padding(self.feature_map(key), context_mask)
            queries, keys = queries._replace(features=query), keys._replace(features=key)
            if (
                isinstance(self.projection, Contextual)
                and self.feature_map.positive
                and not self.causal
            ):
                query, key = (
                    functional.row_normalise(query, key, context_mask),
                    functional.row_normalise(key, query, mask),
                )
        return query, key, queries, keys

    def _check_context(self, x: Tensor, context: Tensor) -> None:
        check_tokens("context", context, self.context_width, like=x)
        if self.scores != "left":
            raise ValueError(
                f"cross-attention needs scores='left', got scores={self.scores!r}: r lives on the "
                "context's tokens and cannot be joined to e; build the layer with scores='left'."
            )
        if self.causal:
            raise ValueError(
                "a causal layer takes no context: its order is that of x; use causal=False."
            )

    def _convolve(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = zero_rows(x, mask)
        if self.convolution is None:
            return x
        after = self.convolution.kernel_size[0] - 1 - self._before
        padded = F.pad(x.mT, (self._before, after))
        return zero_rows(self.convolution(padded).mT, mask)

    @property
    def _before(self) -> int:
        """How many tokens before its own the convolution reads."""
        if self.convolution is None:
            return 0
        others = self.convolution.kernel_size[0] - 1
        return others if self.causal else others // 2

    def _combination(self) -> tuple[Tensor | None, Tensor | None]:  # (D, S) each
        """Cut the combination's weight into what it does to e and what it does to r."""
        weight = self.combine.weight
        if self.scores == "left":
            return weight, None
        if self.scores == "right":
            return None, weight
        return weight[:, : self.rank], weight[:, self.rank :]

    def _combine(self, left: Tensor, right: Tensor) -> Tensor:  # (B, H, N, S) twice -> (B, H, N, D)
        chosen = {"both": (left, right), "left": (left,), "right": (right,)}[self.scores]
        return F.linear(torch.cat(chosen, dim=-1), self.combine.weight)

    def _output(self, mixed: Tensor) -> Tensor:  # (B, H, N, D) -> (B, N, width)
        """Project the joined heads; the combination's bias, alike for all, joins the output's."""
        if self.head_norm is not None:  # PyTorch fuses it, and is silent, in one dtype only
            mixed = self.head_norm(mixed.to(self.head_norm.weight.dtype)).to(mixed.dtype)
        weight, bias = self.to_output.weight, self.combine.bias.repeat(self.heads)
        bias = F.linear(bias, weight, self.to_output.bias)
        return functional.linear(join_heads(mixed), weight, bias)

    def extra_repr(self) -> str:
        parts = [f"width={self.width}", f"heads={self.heads}", f"rank={self.rank}"]
        if self.scores != "both":
            parts.append(f"scores={self.scores!r}")
        if self.causal:
            parts.append("causal=True")
        return ", ".join(parts)


def _mean_square(scores: Tensor, mask: Tensor | None) -> Tensor:  # (B, H, N, S) -> (B, H, S)
    precise = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return precise.square().sum(-2) / functional.token_count(scores, mask)[:, None, None]


def _feature_map(chosen: str | FeatureMap, head_width: int) -> FeatureMap:
    if isinstance(chosen, str):
        return feature_map(chosen, head_width)
    if chosen.width != head_width:
        raise ValueError(
            f"the feature map must take vectors of the head width {head_width}, got {chosen}; "
            f"build it with width={head_width}, or pass head_width={chosen.width}."
        )
    return chosen


def _projection(
    chosen: str | Callable[[Shape], Projection] | None,
    shape: Shape,
    anchors: int | None,
    causal: bool,
) -> Projection:
    chosen = ("shared" if causal else "anchors") if chosen is None else chosen
    if isinstance(chosen, str):
        require_choice("projection", chosen, PROJECTIONS)
    make = PROJECTIONS[chosen] if isinstance(chosen, str) else chosen
    if anchors is not None:
        if chosen not in ("anchors", "feature_anchors"):
            raise ValueError(
                "anchors needs projection='anchors' or 'feature_anchors', "
                f"got projection={chosen!r}; drop anchors=."
            )
        source: Literal["tokens", "features"] = "tokens" if chosen == "anchors" else "features"
        make = partial(FromAnchors, anchors=anchors, source=source)
    projection = make(shape)
    if causal and isinstance(projection, FromAnchors):
        raise ValueError(
            "a causal layer needs projection='contextual' or 'shared', got anchors, which show "
            "every token the future; choose one of the two."
        )
    return projection


def _convolution(width: int, size: int, context_width: int) -> nn.Conv1d | None:
    if size == 0:
        return None
    require_positive("short_convolution", size)
    if context_width != width:
        raise ValueError(
            f"short_convolution needs context_width == width (one convolution reads both), got "
            f"{context_width} and {width}; use short_convolution=0."
        )
    return nn.Conv1d(width, width, size, groups=width, bias=False)

"""Decoding with Primal-Attention: the past in a state of constant size, one token at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from primal import functional
from primal.projections import Contextual, Tokens


class PrimalState(NamedTuple):
    """All that decoding remembers: its size does not depend on how long the past is."""

    seen: Tensor  # (B,), valid tokens so far
    query: Tensor  # (B, H, D) running sum of q; with Contextual directions (B, H, P), of φ(q)
    key: Tensor  # the same of k
    left: Tensor | None  # (B, H, P, S), Σ φ(k) w_eᵀ; Contextual only
    right: Tensor | None  # (B, H, P, S), Σ φ(q) w_rᵀ; Contextual only
    window: (
        Tensor | None
    )  # (B, tokens, width), the latest inputs, which the short convolution reads


def mean_step(
    query: Tensor,  # (B, H, 1, D)
    key: Tensor,
    state: PrimalState,
    real: Tensor,  # (B,), whether the token is one
) -> tuple[Tensor, Tensor, PrimalState]:  # the means (B, H, 1, D)
    """Return the cumulative means of q and k after one more token."""
    query_sum, key_sum = (
        _add(state.query, query[:, :, 0], real),
        _add(state.key, key[:, :, 0], real),
    )
    after = state._replace(seen=state.seen + real, query=query_sum, key=key_sum)
    divisor = after.seen.clamp(min=1)[:, None, None]
    query, key = ((t / divisor)[:, :, None].to(query.dtype) for t in (query_sum, key_sum))
    return query, key, after


def recurrent_step(
    projection: Contextual,
    x: Tensor,  # (B, 1, width), the layer's input
    query: Tensor,  # (B, H, 1, P), features
    key: Tensor,
    state: PrimalState,
    real: Tensor,  # (B,), whether the token is one
) -> tuple[Tensor, Tensor, PrimalState]:  # the scores (B, H, 1, S)
    """Add one token to ``Σ φ(k) w_eᵀ`` and ``Σ φ(q) w_rᵀ``, and read the scores from them."""
    assert state.left is not None
    assert state.right is not None
    tokens = Tokens(x, None, None)
    left_weight, right_weight = projection.coefficients(tokens, tokens)  # (B, H, 1, S)
    left_state = _add(state.left, key.mT * left_weight, real)
    right_state = _add(state.right, query.mT * right_weight, real)
    after = PrimalState(
        state.seen + real,
        _add(state.query, query[:, :, 0], real),
        _add(state.key, key[:, :, 0], real),
        left_state,
        right_state,
        state.window,
    )
    query, key = query.to(left_state.dtype), key.to(right_state.dtype)
    if projection.positive:
        left_sum = query @ after.key[..., None]
        right_sum = key @ after.query[..., None]
    else:
        left_sum = right_sum = after.seen[:, None, None, None]
    left = query @ left_state / functional.row_sums(left_sum)
    right = key @ right_state / functional.row_sums(right_sum)
    return left.to(x.dtype), right.to(x.dtype), after


def _add(total: Tensor, x: Tensor, real: Tensor) -> Tensor:
    """Add x where the token is real, in the precision of the total."""
    keep = real.view(-1, *[1] * (total.ndim - 1))
    return total + torch.where(keep, x, 0.0).to(total.dtype)

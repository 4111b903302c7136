"""The token map of Primal-Attention on a CPU: one pass forward, one backward, in blocks that stay
in cache.

What eager PyTorch would send to memory between its operations (the normalised vectors, their copy
in the layout of a batched product, partial sums of gradients) lives in one small block of tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-6  # a vector no longer than this has no direction: its unit vector is zero
BLOCK_ELEMENTS = 2**18  # 1 MiB in float32; benchmarks/core_cpu.py --blocks compares sizes

Mapped = tuple[Tensor, Tensor, Tensor]
Definition = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, bool], Mapped]


def map_tokens(
    query: Tensor,  # (B, H, N, P)
    key: Tensor,  # (B, H, M, P)
    query_map: Tensor | None,  # (B, H, P, D)
    key_map: Tensor | None,  # (B, H, P, D); with both maps, M = N
    unit_norm: bool,
    definition: Definition,  # the same in plain PyTorch: it differentiates the backward pass
) -> Mapped:  # (B, H, N, D), (B, H, P, P), (B, H, P, P)
    """Return ``q̂ Q + k̂ K``, ``q̂ᵀq̂`` and ``k̂ᵀk̂``; the hats normalise, if asked to."""
    values, query_gram, key_gram = _MapTokens.apply(  # type: ignore[no-untyped-call]
        query, key, query_map, key_map, unit_norm, definition
    )
    return values, query_gram, key_gram


class _MapTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_map: Tensor | None,
        key_map: Tensor | None,
        unit_norm: bool,
        definition: Definition,
    ) -> Mapped:
        query_inverse = _inverse_norm(query) if unit_norm else None
        key_inverse = _inverse_norm(key) if unit_norm else None
        mapped, weight = (query, query_map) if query_map is not None else (key, key_map)
        assert weight is not None
        values = _empty_by_token(mapped, weight.shape[-1])
        query_gram, key_gram = _zeros_gram(query), _zeros_gram(key)
        sides = (
            (query, query_inverse, query_map, query_gram),
            (key, key_inverse, key_map, key_gram),
        )
        # Both maps write the same values, so their blocks are walked together; a side without a
        # map may have another number of tokens and gives its Gram matrix alone.
        together = query_map is not None and key_map is not None
        for group in (sides,) if together else ((side,) for side in sides):
            for block in _blocks(group[0][0]):
                total: Tensor | None = None
                for x, inverse, side_map, gram in group:
                    unit = _gather(x, inverse, block)
                    gram.baddbmm_(unit.mT, unit)
                    if side_map is None:
                        continue
                    flat_map = side_map.reshape(-1, *side_map.shape[-2:])
                    if total is None:
                        total = torch.bmm(unit, flat_map)
                    else:
                        total.baddbmm_(unit, flat_map)
                if total is not None:
                    values[:, :, block] = total.view(values[:, :, block].shape)
        ctx.save_for_backward(query, key, query_map, key_map, query_inverse, key_inverse)
        ctx.unit_norm, ctx.definition = unit_norm, definition
        ctx.set_materialize_grads(False)
        return values, _by_head(query_gram, query), _by_head(key_gram, key)

    @staticmethod
    def backward(
        ctx: Any, d_values: Tensor | None, d_query_gram: Tensor | None, d_key_gram: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, query_map, key_map, query_inverse, key_inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the caller will differentiate this again
            return _differentiable_backward(ctx, (d_values, d_query_gram, d_key_gram))
        d_query, d_query_map = _backward(query, query_inverse, query_map, d_values, d_query_gram)
        d_key, d_key_map = _backward(key, key_inverse, key_map, d_values, d_key_gram)
        return d_query, d_key, d_query_map, d_key_map, None, None


def _backward(
    x: Tensor,  # (B, H, N, P), query or key
    inverse: Tensor | None,  # (B, H, N, 1), 1/‖x‖; None where x is not normalised
    weight: Tensor | None,  # (B, H, P, D)
    d_values: Tensor | None,  # (B, H, N, D)
    d_gram: Tensor | None,  # (B, H, P, P)
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and its map: ``dx̂ = dv Wᵀ + x̂ (dG + dGᵀ)``, ``dW = x̂ᵀ dv``."""
    if weight is None or d_values is None:
        weight = d_values = None
    if d_values is None and d_gram is None:
        return None, None
    d_x = _empty_by_token(x, x.shape[-1])
    d_weight = None if weight is None else torch.zeros_like(weight).flatten(0, 1)
    d_norm = None if d_gram is None else (d_gram + d_gram.mT).flatten(0, 1)
    for block in _blocks(x):
        unit = _gather(x, inverse, block)
        d_unit = torch.zeros_like(unit) if d_norm is None else torch.bmm(unit, d_norm)
        if d_values is not None and weight is not None and d_weight is not None:
            d_block = _gather(d_values, None, block)
            d_weight.baddbmm_(unit.mT, d_block)
            d_unit.baddbmm_(d_block, weight.flatten(0, 1).mT)
        if inverse is not None:  # normalising forgets the length: remove the radial part
            radial = torch.linalg.vecdot(unit, d_unit).unsqueeze(-1)
            d_unit.addcmul_(unit, radial, value=-1).mul_(_gather(inverse, None, block))
        d_x[:, :, block] = d_unit.view(d_x[:, :, block].shape)
    return d_x, None if d_weight is None or weight is None else d_weight.view(weight.shape)


def _differentiable_backward(
    ctx: Any, gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    inputs, needed = ctx.saved_tensors[:4], ctx.needs_input_grad[:4]
    outputs = ctx.definition(*inputs, ctx.unit_norm)
    reached = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in reached],
            [x for x, wanted in zip(inputs, needed, strict=True) if wanted],
            [gradient for _, gradient in reached],
            create_graph=True,
            allow_unused=True,
        )
    )
    return *(next(found) if wanted else None for wanted in needed), None, None


def _inverse_norm(x: Tensor) -> Tensor:  # (B, H, N, P) -> (B, H, N, 1)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > EPSILON, norm.reciprocal(), 0.0)


def _gather(x: Tensor, inverse: Tensor | None, block: slice) -> Tensor:  # (B * H, block, width)
    """Copy a block of tokens into the layout of a batched product, normalising on the way."""
    part = x[:, :, block]
    packed = x.new_empty(part.shape)
    if inverse is None:
        packed.copy_(part)
    else:
        torch.mul(part, inverse[:, :, block], out=packed)
    return packed.flatten(0, 1)


def _empty_by_token(like: Tensor, width: int) -> Tensor:  # (B, H, N, width)
    """Allocate with the heads of a token side by side, so that joining them copies nothing."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _zeros_gram(x: Tensor) -> Tensor:  # (B, H, N, P) -> (B * H, P, P)
    return x.new_zeros(x.shape[0] * x.shape[1], x.shape[-1], x.shape[-1])


def _by_head(gram: Tensor, x: Tensor) -> Tensor:  # (B * H, P, P) -> (B, H, P, P)
    return gram.view(*x.shape[:2], *gram.shape[1:])


def _blocks(x: Tensor) -> Iterator[slice]:
    """Cut the tokens of x so that a block of all heads holds about BLOCK_ELEMENTS."""
    batch, heads, tokens, width = x.shape
    size = max(16, BLOCK_ELEMENTS // max(1, batch * heads * width))
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))

"""Primal-Attention's pass over the tokens on a CPU, in blocks that stay in cache.

What eager PyTorch would send to memory between its operations (the normalised vectors, their copy
in the layout of a batched product, partial sums of gradients) lives in one small block of tokens.
"""

import math
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
        mapped, weight = (query, query_map) if query_map is not None else (key, key_map)
        assert weight is not None
        values = _empty_by_token(mapped, weight.shape[-1])
        query_gram, query_inverse = _forward(query, query_map, unit_norm, values, add=False)
        both = query_map is not None
        key_gram, key_inverse = _forward(key, key_map, unit_norm, values, add=both)
        ctx.save_for_backward(query, key, query_map, key_map, query_inverse, key_inverse)
        ctx.unit_norm, ctx.definition = unit_norm, definition
        ctx.set_materialize_grads(False)
        return values, query_gram, key_gram

    @staticmethod
    def backward(
        ctx: Any, d_values: Tensor | None, d_query_gram: Tensor | None, d_key_gram: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, query_map, key_map, query_inverse, key_inverse = ctx.saved_tensors
        gradients = d_values, d_query_gram, d_key_gram
        # create_graph=True: the caller will differentiate this again. is_grads_batched=True: what
        # writes in place has no batched form.
        if torch.is_grad_enabled() or any(map(_is_batched, gradients)):
            return _plain_backward(ctx, gradients)
        d_query, d_query_map = _backward(query, query_inverse, query_map, d_values, d_query_gram)
        d_key, d_key_map = _backward(key, key_inverse, key_map, d_values, d_key_gram)
        return d_query, d_key, d_query_map, d_key_map, None, None


def _forward(
    x: Tensor,  # (B, H, N, P), query or key
    weight: Tensor | None,  # (B, H, P, D)
    unit_norm: bool,
    values: Tensor,  # (B, H, N, D), written to if there is a weight
    *,
    add: bool,  # to what the values hold
) -> tuple[Tensor, Tensor | None]:
    """Walk over one side; return its Gram matrix and, if it was normalised, 1/‖x‖ (B, H, N, 1)."""
    inverse = x.new_empty(*x.shape[:3], 1) if unit_norm else None
    gram = x.new_zeros(*x.shape[:2], x.shape[-1], x.shape[-1])
    unit, mapped = _buffers(x, x.shape[-1], 0 if weight is None else weight.shape[-1])
    for block in _blocks(x):
        part = x[:, :, block]
        if inverse is not None:
            norm = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
            norm.masked_fill_(norm <= EPSILON, math.inf)  # 1/∞ = 0
            inverse[:, :, block] = norm.reciprocal_()
        unit.fill(part, inverse, block)
        gram.flatten(0, 1).baddbmm_(unit.rows(block).mT, unit.rows(block))
        if weight is None:
            continue
        torch.bmm(unit.rows(block), weight.flatten(0, 1), out=mapped.rows(block))
        if add:
            values[:, :, block] += mapped.by_head(block)
        else:
            values[:, :, block] = mapped.by_head(block)
    return gram, inverse


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
    d_weight = None if weight is None else x.new_zeros(weight.shape)
    symmetric = None if d_gram is None else (d_gram + d_gram.mT).flatten(0, 1)
    unit, d_unit, product, packed = _buffers(
        x, *3 * (x.shape[-1],), 0 if weight is None else weight.shape[-1]
    )
    for block in _blocks(x):
        unit.fill(x[:, :, block], inverse, block)
        rows, d_rows = unit.rows(block), d_unit.rows(block)
        if symmetric is None:
            d_rows.zero_()
        else:
            torch.bmm(rows, symmetric, out=d_rows)
        if d_values is not None and weight is not None and d_weight is not None:
            packed.fill(d_values[:, :, block], None, block)
            d_weight.flatten(0, 1).baddbmm_(rows.mT, packed.rows(block))
            d_rows.baddbmm_(packed.rows(block), weight.flatten(0, 1).mT)
        if inverse is None:
            d_x[:, :, block] = d_unit.by_head(block)
        else:  # normalising forgets the length of x: no gradient along it
            radial = torch.mul(rows, d_rows, out=product.rows(block)).sum(-1, keepdim=True)
            d_rows.addcmul_(rows, radial, value=-1)
            torch.mul(d_unit.by_head(block), inverse[:, :, block], out=d_x[:, :, block])
    return d_x, d_weight


def _plain_backward(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Differentiate the definition."""
    needed, create_graph = ctx.needs_input_grad[:4], torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one input may be computed from another, or be the same tensor: a gradient
        # must stop at the input itself.
        inputs: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors[:4]]
        outputs = ctx.definition(*inputs, ctx.unit_norm)
    reached = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in reached],
            [x for x, wanted in zip(inputs, needed, strict=True) if wanted],
            [gradient for _, gradient in reached],
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return *(next(found) if wanted else None for wanted in needed), None, None


def _is_batched(gradient: Tensor | None) -> bool:
    return gradient is not None and (
        torch._C._functorch.is_legacy_batchedtensor(gradient)
        or torch._C._functorch.is_batchedtensor(gradient)
    )


class _Buffer:
    """Memory for one block of tokens in the layout of a batched product, used again for each."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # (B, H, block, width)

    def by_head(self, block: slice) -> Tensor:  # (B, H, block, width)
        return self.memory[:, :, : block.stop - block.start]

    def rows(self, block: slice) -> Tensor:  # (B·H, block, width)
        return self.by_head(block).flatten(0, 1)

    def fill(self, part: Tensor, scale: Tensor | None, block: slice) -> None:
        """Copy a block in, times its part of scale (B, H, N, 1) if there is one."""
        if scale is None:
            self.by_head(block).copy_(part)
        else:
            torch.mul(part, scale[:, :, block], out=self.by_head(block))


def _buffers(like: Tensor, *widths: int) -> list[_Buffer]:
    """Allocate buffers of these widths for blocks of ``like``, all at once.

    One large piece comes back from the allocator warm at the next call; several smaller ones are
    returned to the system each time, and every page of them must be mapped and zeroed anew.
    """
    batch, heads, tokens, _ = like.shape
    rows = batch * heads * min(tokens, _block_size(like))
    pieces = like.new_empty(rows * sum(widths)).split([rows * width for width in widths])
    return [
        _Buffer(piece.view(batch, heads, -1, width)) if width else _Buffer(piece)
        for piece, width in zip(pieces, widths, strict=True)
    ]


def _empty_by_token(like: Tensor, width: int) -> Tensor:  # (B, H, N, width)
    """Allocate with the heads of a token side by side, so that joining them copies nothing."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _block_size(x: Tensor) -> int:
    """Return how many tokens, over all heads and samples, hold about BLOCK_ELEMENTS."""
    batch, heads, _, width = x.shape
    return max(16, BLOCK_ELEMENTS // max(1, batch * heads * width))


def _blocks(x: Tensor) -> Iterator[slice]:
    size = _block_size(x)
    for start in range(0, x.shape[2], size):
        yield slice(start, min(start + size, x.shape[2]))

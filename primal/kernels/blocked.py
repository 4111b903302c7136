"""Primal-Attention's pass over the tokens on a CPU, in blocks that stay in cache.

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
        mapped, some_map = (query, query_map) if query_map is not None else (key, key_map)
        assert some_map is not None
        values = _empty_by_token(mapped, some_map.shape[-1])
        query_gram, key_gram = (
            x.new_zeros(*x.shape[:2], x.shape[-1], x.shape[-1]) for x in (query, key)
        )
        sides = ((query, query_map, query_gram), (key, key_map, key_gram))
        for block in _blocks(query, key):
            mixed = None
            for x, weight, gram in sides:
                if block.start >= x.shape[2]:  # the shorter side has ended
                    continue
                unit = _Unit(x[:, :, block], unit_norm).by_head
                gram.flatten(0, 1).baddbmm_(unit.mT, unit)
                if weight is not None:
                    matrix = weight.flatten(0, 1)
                    mixed = unit @ matrix if mixed is None else mixed.baddbmm_(unit, matrix)
            if mixed is not None:
                values[:, :, block] = mixed.unflatten(0, values.shape[:2])
        ctx.save_for_backward(query, key, query_map, key_map)
        ctx.unit_norm, ctx.definition = unit_norm, definition
        ctx.set_materialize_grads(False)
        return values, query_gram, key_gram

    @staticmethod
    def backward(
        ctx: Any, d_values: Tensor | None, d_query_gram: Tensor | None, d_key_gram: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, query_map, key_map = ctx.saved_tensors
        gradients = d_values, d_query_gram, d_key_gram
        # create_graph=True: the caller will differentiate this again. is_grads_batched=True: what
        # writes in place has no batched form.
        if torch.is_grad_enabled() or any(map(is_batched, gradients)):
            return _plain_backward(ctx, gradients)
        d_query, d_query_map = _backward(query, query_map, ctx.unit_norm, d_values, d_query_gram)
        d_key, d_key_map = _backward(key, key_map, ctx.unit_norm, d_values, d_key_gram)
        return d_query, d_key, d_query_map, d_key_map, None, None


def _backward(
    x: Tensor,  # (B, H, N, P), query or key
    weight: Tensor | None,  # (B, H, P, D)
    unit_norm: bool,
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
    for block in _blocks(x):
        unit = _Unit(x[:, :, block], unit_norm)
        d_unit = None if symmetric is None else unit.by_head @ symmetric
        if d_values is not None and weight is not None and d_weight is not None:
            upstream = d_values[:, :, block].flatten(0, 1)
            d_weight.flatten(0, 1).baddbmm_(unit.by_head.mT, upstream)
            back = weight.flatten(0, 1).mT
            d_unit = upstream @ back if d_unit is None else d_unit.baddbmm_(upstream, back)
        assert d_unit is not None
        d_x[:, :, block] = unit.gradient(d_unit)
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


def is_batched(gradient: Tensor | None) -> bool:
    return gradient is not None and (
        torch._C._functorch.is_legacy_batchedtensor(gradient)
        or torch._C._functorch.is_batchedtensor(gradient)
    )


class _Unit:
    """A block of tokens, normalised if asked to, in the layout of a batched product.

    PyTorch fuses the normalisation of rows, and its gradient, in what its weight norm is made of.
    """

    def __init__(self, part: Tensor, unit_norm: bool) -> None:  # (B, H, n, P)
        self.shape = part.shape
        self.rows = self.norm = None
        if unit_norm:
            self.rows = part.transpose(1, 2).flatten(0, 2).contiguous()
            self.length = self.rows.new_ones(len(self.rows), 1)
            unit, self.norm = torch._weight_norm_interface(self.rows, self.length, 0)
            self.short = self.norm <= EPSILON
            self.any_short = bool(self.short.any())
            if self.any_short:
                unit.masked_fill_(self.short, 0)
            part = self._split(unit)
        self.by_head = part.flatten(0, 1)  # (B·H, n, P)

    def gradient(self, d_unit: Tensor) -> Tensor:  # (B·H, n, P) -> (B, H, n, P)
        """Return the gradient of the block itself."""
        d_unit = d_unit.unflatten(0, self.shape[:2])
        if self.rows is None:
            return d_unit
        d_rows, _ = torch.ops.aten._weight_norm_interface_backward(
            d_unit.transpose(1, 2).flatten(0, 2).contiguous(), self.rows, self.length, self.norm, 0
        )
        if self.any_short:
            d_rows.masked_fill_(self.short, 0)
        return self._split(d_rows)

    def _split(self, rows: Tensor) -> Tensor:  # (B·n·H, P) -> (B, H, n, P)
        batch, heads, tokens, width = self.shape
        return rows.view(batch, tokens, heads, width).transpose(1, 2)


def _empty_by_token(like: Tensor, width: int) -> Tensor:  # (B, H, N, width)
    """Allocate with the heads of a token side by side, so that joining them copies nothing."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _block_size(x: Tensor) -> int:
    """Return how many tokens, over all heads and samples, hold about BLOCK_ELEMENTS."""
    batch, heads, _, width = x.shape
    return max(16, BLOCK_ELEMENTS // max(1, batch * heads * width))


def _blocks(*sides: Tensor) -> Iterator[slice]:
    """Cut the tokens of the longest side into slices."""
    size = min(_block_size(x) for x in sides)
    for start in range(0, max(x.shape[2] if x.numel() else 0 for x in sides), size):
        yield slice(start, start + size)

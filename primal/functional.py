"""Self-attention as a kernel machine: the mathematics, as plain PyTorch functions. READ FIRST.

Shape letters, the same in every file of this package:
    B batch   H heads   N tokens   M tokens attended to   D head width   P feature width   S rank
    A anchors

The machine (Chen, Tao, Tonin, Suykens, NeurIPS 2023). Attention's kernel κ(x_i, x_j) = φ_q(x_i)ᵀ
φ_k(x_j) is asymmetric, so its analysis is a kernel SVD. With directions W_e, W_r (P×S) the primal
scores are

    e(x) = W_eᵀ φ_q(x)        r(x) = W_rᵀ φ_k(x)

and at the SVD of K the objective J = ½ Σ eᵀΛe + ½ Σ rᵀΛr − tr(W_eᵀ W_r) is zero (docs/theory.md
proves it). Attention outputs a linear map of [e ; r] and never forms K; training adds J² to the
task's loss.

Half-precision inputs keep their dtype in the outputs; norms, energies, running sums and the
objective are computed in float32.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal.backend import Backend, use_blocked
from primal.errors import require_choice
from primal.kernels import blocked, dense

Reduction = Literal["sample", "batch"]
Trace = Literal["weights", "data"]
Variant = Literal["released", "admm"]


# --- tokens ------------------------------------------------------------------------------------


def mask_from_lengths(lengths: Tensor, tokens: int) -> Tensor:  # (B,) -> (B, N)
    """Return the mask whose row b is True for the first ``lengths[b]`` tokens.

    >>> mask_from_lengths(torch.tensor([1, 3]), tokens=3).int()
    tensor([[1, 0, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:  # (B, H, N, D), (B, N) -> (B, H, N, D)
    """Put zeros, which every sum over tokens ignores, where the mask is False (even over NaN)."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def token_count(x: Tensor, mask: Tensor | None) -> Tensor:  # (B, H, N, D), (B, N) -> (B,) or (1,)
    """Return how many tokens are valid, at least 1, in a dtype to divide by."""
    if mask is None:
        return torch.full((1,), x.shape[-2], dtype=_precise(x.dtype), device=x.device)
    return mask.sum(-1).clamp(min=1).to(_precise(x.dtype))


def cumulative_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, H, N, D), (B, N)
    """Return the mean of each token and the valid tokens before it: the published causal form.

    >>> cumulative_mean(torch.tensor([2.0, 4.0, 9.0]).view(1, 1, 3, 1)).flatten()
    tensor([2., 3., 5.])
    """
    total = zero_padding(x, mask).cumsum(dim=-2, dtype=_precise(x.dtype))
    if mask is None:
        count = torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=total.dtype)[:, None]
    else:
        count = mask.cumsum(dim=-1).clamp(min=1)[:, None, :, None]
    return (total / count).to(x.dtype)


def evenly_spaced(lengths: Tensor, anchors: int) -> Tensor:  # (B,) -> (B, A)
    """Return ``anchors`` positions from 0 to ``length - 1``; a short sequence repeats positions.

    Rounds as ``torch.linspace(0, length - 1, anchors, dtype=torch.int64)`` does (from both ends
    towards the middle, in float64), because that is what published weights were trained with.

    >>> evenly_spaced(torch.tensor([9, 2]), anchors=5)
    tensor([[0, 2, 4, 6, 8],
            [0, 0, 0, 0, 1]])
    """
    last = (lengths - 1).to(torch.float64)[:, None]
    if anchors == 1:
        return torch.zeros_like(last, dtype=torch.int64)
    index = torch.arange(anchors, device=lengths.device)
    step = last / (anchors - 1)
    from_left, from_right = step * index, last - step * (anchors - 1 - index)
    return torch.where(index < anchors // 2, from_left, from_right).to(torch.int64)


# --- features and scores -----------------------------------------------------------------------


def cosine(x: Tensor) -> Tensor:  # (..., D) -> (..., D)
    """Return ``x / ‖x‖``, the feature map of the cosine kernel; zero, with zero gradient, at zero.

    >>> cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    precise = x.to(_precise(x.dtype))
    norm = torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
    # The gradient is 1/‖x‖ large: float16 ends at 65504, so there shorter vectors count as zero.
    directed = norm > max(blocked.EPSILON, 2 / torch.finfo(x.dtype).max)
    # 1/∞ is 0, and so is its gradient.
    return (precise * torch.where(directed, norm, torch.inf).reciprocal()).to(x.dtype)


def row_normalise(
    features: Tensor,  # (B, H, N, P)
    others: Tensor,  # (B, H, M, P), zero at padding
    mask: Tensor | None = None,  # (B, M), of the others
) -> Tensor:  # (B, H, N, P)
    """Rescale each token to kernel values of mean one over the others; for positive maps.

    >>> query, key = torch.rand(2, 1, 1, 6, 3)
    >>> torch.allclose((row_normalise(query, key) @ key.mT).mean(-1), torch.ones(()))
    True
    """
    precise = _precise(features.dtype)
    with full_precision(features):
        mean = others.to(precise).sum(-2) / token_count(others, mask)[:, None, None]  # (B, H, P)
        total = features.to(precise) @ mean[..., None]  # (B, H, N, 1)
        return (features / row_sums(total)).to(features.dtype)


def row_sums(total: Tensor) -> Tensor:
    """Return the sums of a kernel's rows, to divide by: 1 where a row has vanished.

    Next to zero the gradient of the quotient would leave the range of the dtype, hence the root.
    """
    return torch.where(total > torch.finfo(total.dtype).tiny ** 0.5, total, 1.0)


def primal_scores(
    query_features: Tensor,  # (B, H, N, P)
    key_features: Tensor,  # (B, H, M, P)
    left: Tensor,  # (H, P, S) or (B, H, P, S), W_e
    right: Tensor,  # like left, W_r
) -> tuple[Tensor, Tensor]:  # (B, H, N, S), (B, H, M, S)
    """Return ``e_n = W_eᵀ φ_q(x_n)`` and ``r_m = W_rᵀ φ_k(y_m)``: the definition, for diagnostics.

    Training never calls it: ``primal_attention`` gives what e and r are needed for without them.
    """
    return query_features @ left.to(query_features.dtype), key_features @ right.to(
        key_features.dtype
    )


def implied_kernel(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    # (B, H, N, S), (B, H, M, S), (H, S) -> (B, H, N, M)
    """Return ``E Λ Rᵀ`` with ``Λ^½ = diag(scale)``: the N×M kernel matrix the scores stand for.

    At the KSVD, E = H_e Σ and R = H_r Σ with Λ = Σ⁻¹, so this is the rank-S truncation of K itself.
    """
    return (left * scale.square()[:, None].to(left.dtype)) @ right.mT


# --- attention ---------------------------------------------------------------------------------


class PrimalOutput(NamedTuple):
    """One pass over the tokens: what attention returns, and all the objective needs."""

    values: Tensor  # (B, H, N, D)
    left_energy: Tensor  # (B, H, S), mean over the valid tokens of e²
    right_energy: Tensor  # (B, H, S), mean over the valid tokens of r²


def primal_attention(
    query: Tensor,  # (B, H, N, P) features, or vectors still to be normalised (unit_norm)
    key: Tensor,  # (B, H, M, P)
    left: Tensor,  # (H, P, S) or (B, H, P, S), W_e
    right: Tensor,  # like left, W_r
    left_combine: Tensor | None,  # (D, S), what the output makes of e; None drops e
    right_combine: Tensor | None,  # (D, S), what the output makes of r; None drops r
    query_mask: Tensor | None = None,  # (B, N), True = real token
    key_mask: Tensor | None = None,  # (B, M)
    *,
    unit_norm: bool = False,
    backend: Backend = "auto",
) -> PrimalOutput:
    """Return ``C_e e + C_r r`` per token and the energies of e and r, without e and r.

    The output folds into one P×D map per side, ``C_e W_eᵀ φ_q(x)``; the energies into one P×P Gram
    matrix per side, ``mean_n e_ns² = w_sᵀ (mean_n φφᵀ) w_s``. So a token costs O(P·D + P²) whatever
    the rank, no N×S tensor exists, and the backward pass needs query, key and the output's gradient
    alone.

    With N ≠ M (cross-attention) r lives on the keys: pass ``right_combine=None``.

    >>> query, key = torch.randn(2, 1, 4, 16, 8)  # B=1 H=4 N=16 P=8
    >>> left, right = torch.randn(2, 4, 8, 3)  # S=3
    >>> combine = torch.randn(5, 3)  # D=5
    >>> out = primal_attention(query, key, left, right, combine, None)
    >>> left_scores, _ = primal_scores(query, key, left, right)
    >>> torch.allclose(out.values, left_scores @ combine.mT, atol=1e-4)
    True
    >>> torch.allclose(out.left_energy, left_scores.square().mean(-2), atol=1e-4)
    True
    """
    if left_combine is None and right_combine is None:
        raise ValueError("an output needs left_combine, right_combine or both, got neither.")
    query, key = zero_padding(query, query_mask), zero_padding(key, key_mask)
    heads = query.shape[:2]
    query_map, key_map = (
        None if combine is None else _fold(directions, combine, heads).to(query.dtype)
        for directions, combine in ((left, left_combine), (right, right_combine))
    )
    if use_blocked(backend, *(t for t in (query, key, query_map, key_map) if t is not None)):
        mapped = blocked.map_tokens(query, key, query_map, key_map, unit_norm, map_tokens)
    else:
        mapped = map_tokens(query, key, query_map, key_map, unit_norm)
    values, query_gram, key_gram = mapped
    return PrimalOutput(
        values,
        _energy(query_gram, left, token_count(query, query_mask)),
        _energy(key_gram, right, token_count(key, key_mask)),
    )


def map_tokens(
    query: Tensor,  # (B, H, N, P)
    key: Tensor,  # (B, H, M, P)
    query_map: Tensor | None,  # (B, H, P, D)
    key_map: Tensor | None,  # (B, H, P, D)
    unit_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # (B, H, N, D), (B, H, P, P), (B, H, P, P)
    """Return ``q̂ Q + k̂ K``, ``q̂ᵀq̂``, ``k̂ᵀk̂``: the pass over the tokens that kernels/ fuses."""
    if unit_norm:
        query, key = cosine(query), cosine(key)
    values = sum(x @ m for x, m in ((query, query_map), (key, key_map)) if m is not None)
    assert isinstance(values, Tensor)
    with full_precision(query):
        precise_query, precise_key = query.to(_precise(query.dtype)), key.to(_precise(key.dtype))
        return values, precise_query.mT @ precise_query, precise_key.mT @ precise_key


def causal_scores(
    query_features: Tensor,  # (B, H, N, P)
    key_features: Tensor,  # (B, H, N, P)
    coefficients: Tensor,  # (B, H, N, S)
    chunk: int = 64,
) -> Tensor:  # (B, H, N, S)
    """Return ``e_n = Σ_{j≤n} κ(x_n, x_j) w_j``, the recurrence ``state += φ_k(x_j) w_jᵀ``.

    Inside a chunk the kernel is formed; from chunk to chunk only the P×S state travels. A token
    costs O((chunk + P)·S).

    >>> q, k, w = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64)
    >>> torch.allclose(causal_scores(q, k, w, chunk=3), (q @ k.mT).tril() @ w)
    True
    """
    tokens, dtype = query_features.shape[-2], query_features.dtype
    # An exported graph would hold for one chunk or for several alone: there, show it several.
    chunks = (tokens + chunk - 1) // chunk + (2 if torch.compiler.is_exporting() else 0)
    padding = (0, 0, 0, chunks * chunk - tokens)
    with full_precision(query_features):
        query, key, weight = (
            F.pad(x.to(_precise(dtype)), padding).unflatten(-2, (chunks, chunk))
            for x in (query_features, key_features, coefficients)
        )  # each (B, H, chunks, chunk, ·)
        after = (key.mT @ weight).cumsum(dim=2)  # (B, H, chunks, P, S), the state after each chunk
        before = F.pad(after[:, :, :-1], (0, 0, 0, 0, 1, 0))
        scores = query @ before + (query @ key.mT).tril() @ weight
    flat: Tensor = scores.flatten(2, 3)[:, :, :tokens]
    return flat.to(dtype)


# --- the KSVD objective ------------------------------------------------------------------------


class KSVDTerms(NamedTuple):
    """What the objective of one layer needs, computed in the same pass as the layer's output."""

    left_energy: Tensor  # (B, H, S), mean over the valid tokens of e²
    right_energy: Tensor  # (B, H, S), mean over the valid tokens of r²
    scale: Tensor  # (H, S), the diagonal of Λ^½: a parameter of any sign keeps Λ positive
    coupling: Tensor  # (H,) or (B, H), tr(W_eᵀ W_r) of the weights themselves
    data_coupling: Tensor  # (H,) or (B, H), the same trace of the data's W_{e|X} and W_{r|X}


def coupling(left: Tensor, right: Tensor) -> Tensor:  # (..., P, S) twice -> (...)
    """Return ``tr(W_eᵀ W_r)``, in float32 at least."""
    return (left.to(_precise(left.dtype)) * right.to(_precise(right.dtype))).sum((-2, -1))


def ksvd_residual(
    terms: KSVDTerms, *, reduction: Reduction = "sample", trace: Trace = "weights"
) -> Tensor:  # (B,), or () for reduction="batch"
    """Return ``J = ½ mean‖Λ^½ e‖² + ½ mean‖Λ^½ r‖² − tr(W_eᵀ W_r)``, over heads and tokens.

    ``trace`` says whose W couple: the layer's "weights", or what they become on the "data"
    (W_{·|X}).
    """
    require_choice("reduction", reduction, ("sample", "batch"))
    require_choice("trace", trace, ("weights", "data"))
    energy = (terms.left_energy + terms.right_energy) * terms.scale.to(terms.left_energy.dtype) ** 2
    coupled = terms.coupling if trace == "weights" else terms.data_coupling
    residual = energy.sum(-1).mean(-1) / 2 - coupled.mean(-1)
    return residual if reduction == "sample" else residual.mean()


def ksvd_objective(
    terms: KSVDTerms, *, reduction: Reduction = "sample", trace: Trace = "weights"
) -> Tensor:  # ()
    """Return J² of one layer: zero at every KSVD, where J alone is unbounded below.

    ``reduction="sample"`` squares per sample and then averages (as released for time series,
    decision transformers and language); ``"batch"`` averages first (as released for Long Range
    Arena, vision).

    >>> energy = torch.full((2, 1, 3), 4.0)  # B=2 H=1 S=3
    >>> scale, coupling = torch.full((1, 3), 0.5), torch.tensor([3.0])
    >>> ksvd_objective(KSVDTerms(energy, energy, scale, coupling, coupling))
    tensor(0.)
    """
    return ksvd_residual(terms, reduction=reduction, trace=trace).square().mean()


# --- robust attention: principal-component pursuit ------------------------------------------------


def soft_threshold(x: Tensor, threshold: Tensor) -> Tensor:
    """Return ``sign(x) · max(|x| − threshold, 0)``, the proximal map of the ℓ1 norm.

    >>> soft_threshold(torch.tensor([-3.0, 0.5, 2.0]), torch.tensor(1.0))
    tensor([-2., 0., 1.])
    """
    return x.sign() * (x.abs() - threshold).clamp(min=0)


def principal_component_pursuit(
    key: Tensor,  # (B, H, N, D)
    value: Tensor,  # (B, H, N, D)
    query: Tensor | None = None,  # (B, H, N, D); None is symmetric attention, keys as queries
    mask: Tensor | None = None,  # (B, N)
    *,
    iterations: int = 4,
    sparsity: float = 4.0,
    variant: Variant = "admm",
    model_width: int | None = None,
    dropout: float = 0.0,
) -> Tensor:  # (B, H, N, D)
    """Split K = L + S into attention's output L and a sparse S (Teo & Nguyen, NeurIPS 2024).

    Alternates, from L = Y = 0 and with μ = N·C / (4‖K‖₁), C the model's width (H·D unless given):

        S ← shrink(K − L + Y/μ, t)     L ← softmax(Q K₂ᵀ/√D) V     Y ← Y + μ (K − L − S)

    ``variant="admm"`` is the textbook iteration, t = λ/μ and K₂ = K − S + Y/μ. ``"released"`` is
    what the authors' code computes, t = λμ and K₂ = K − S − Y/μ; compare with it, use the other. λ
    is ``sparsity``: at λ = ∞ and one iteration both are softmax attention. In symmetric attention Q
    = K₂.
    """
    value = zero_padding(value, mask)
    query = None if query is None else zero_padding(query, mask)
    clean = pursued_keys(
        key,
        value,
        query,
        mask,
        iterations=iterations,
        sparsity=sparsity,
        variant=variant,
        model_width=model_width,
    )
    return F.scaled_dot_product_attention(
        clean if query is None else query,
        clean,
        value,
        attn_mask=None if mask is None else mask[:, None, None],
        dropout_p=dropout,
    )


def pursued_keys(
    key: Tensor,  # (B, H, N, D)
    value: Tensor,  # (B, H, N, D)
    query: Tensor | None,
    mask: Tensor | None,
    *,
    iterations: int,
    sparsity: float,
    variant: Variant,
    model_width: int | None = None,
) -> Tensor:  # (B, H, N, D)
    """Return the cleaned keys K₂ that the last iteration of the pursuit attends with."""
    require_choice("variant", variant, ("released", "admm"))
    width = key.shape[1] * key.shape[3] if model_width is None else model_width
    dtype, precise = key.dtype, _precise(key.dtype)
    key, value = zero_padding(key, mask).to(precise), zero_padding(value, mask)
    count = token_count(key, mask)[:, None, None, None]
    size = key.abs().sum((-2, -1), keepdim=True)
    penalty = count * width / (4 * size.clamp(min=blocked.EPSILON))  # μ, (B, H, 1, 1)
    threshold = sparsity * penalty if variant == "released" else sparsity / penalty
    sign = -1 if variant == "released" else 1
    attended = None if mask is None else mask[:, None, None]
    low_rank = dual = torch.zeros_like(key)  # dual is Y/μ, which stays finite however large μ is
    for remaining in reversed(range(iterations)):
        shifted = key - low_rank + dual
        # λ = ∞ is written out: its gradient through the threshold would be 0 · ∞.
        sparse = (
            torch.zeros_like(key) if math.isinf(sparsity) else soft_threshold(shifted, threshold)
        )
        clean = key - sparse + sign * dual
        if remaining:
            read = clean.to(dtype)
            reader = read if query is None else query
            low_rank = F.scaled_dot_product_attention(reader, read, value, attn_mask=attended)
            dual = dual + (key - low_rank - sparse)
    return clean.to(dtype)


def attention_weights(
    query: Tensor,  # (B, H, N, D)
    key: Tensor,  # (B, H, M, D)
    allowed: Tensor | None = None,  # broadcasts to (B, H, N, M), True where n may read m
    query_mask: Tensor | None = None,  # (B, N)
) -> Tensor:  # (B, H, N, M)
    """Return ``softmax(Q Kᵀ/√D)``, zero in rows of padding: for looking at, not for training."""
    logits = query @ key.mT * key.shape[-1] ** -0.5
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return zero_padding(logits.softmax(dim=-1), query_mask)


# --- a feed-forward network ----------------------------------------------------------------------


def linear(
    x: Tensor,  # (..., in)
    weight: Tensor,  # (out, in)
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (..., out)
    """Return ``x Wᵀ + b``, by the products that are fastest on a CPU."""
    if use_blocked("auto", x, weight) and dense.linear_fits(x):
        return dense.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def each_token(
    function: Callable[[Tensor], Tensor],  # (tokens, width) -> (tokens, width)
    x: Tensor,  # (B, N, width)
    mask: Tensor | None,  # (B, N)
) -> Tensor:  # (B, N, width)
    """Apply a function of single tokens; on a CPU to the real ones alone, zero at the others."""
    if mask is None or not use_blocked("auto", x):
        return function(x)
    real = mask.flatten().nonzero()[:, 0]
    found = function(x.flatten(0, 1).index_select(0, real))
    return found.new_zeros(mask.numel(), found.shape[-1]).index_copy(0, real, found).view_as(x)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Return x with each element zero at ``probability``, the others so much larger."""
    if 0 < probability < 1 and use_blocked("auto", x):
        return x * dense.keep_mask(x, probability)
    return F.dropout(x, probability)


# --- precision -----------------------------------------------------------------------------------


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Suspend autocast, if it is on, for what must not be rounded to half precision."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _fold(directions: Tensor, combine: Tensor, heads: torch.Size) -> Tensor:  # (B, H, P, D)
    with full_precision(directions):
        precise = _precise(directions.dtype)
        folded = directions.to(precise) @ combine.to(precise).mT
    return folded.expand(*heads, *folded.shape[-2:])


def _energy(gram: Tensor, directions: Tensor, count: Tensor) -> Tensor:  # (B, H, S)
    """Return ``w_sᵀ G w_s / n`` for every direction."""
    with full_precision(gram):
        directions = directions.to(gram.dtype)
        return ((gram @ directions) * directions).sum(-2) / count[:, None, None]

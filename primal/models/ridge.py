"""Ridge regression in closed form, its strength chosen by the exact leave-one-out error."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

STRENGTHS = 10.0 ** torch.arange(-4.0, 4.1, 0.5, dtype=torch.float64)  # times the mean of ‖z‖²

LARGE = 4096  # of cases and features: a larger Gram matrix is not decomposed but factorised, once
BLOCK = 2**24  # numbers that are centered at one time


class Ridge(NamedTuple):
    """A fitted ridge regression."""

    weight: Tensor  # (p, c)
    bias: Tensor  # (c,)
    held_out: Tensor  # (n, c), what the fit without each case predicts for it
    strength: float


def fit_ridge(
    features: Tensor,  # (n · copies, p), copy by copy
    targets: Tensor,  # (n, c)
    copies: int = 1,
    strengths: Tensor = STRENGTHS,
) -> Ridge:
    """Fit ``features @ weight + bias``; ``strengths`` λ are relative to the mean of ‖z‖².

    One eigendecomposition, of the smaller of ZZᵀ and ZᵀZ, gives all of them. With K = ZZᵀ, N rows
    and G = (K + λI)⁻¹ the residuals are λGy. Without the rows b, a case and its copies, they are

        (λ G_bb − 1/N)⁻¹ (λ G y)_b

    where 1/N is the bias, which is not penalised. What counts is the error at the first copy.
    """
    rows, p = features.shape
    if min(rows, p) > LARGE and copies == 1:
        return _fit_large(features, targets, strengths)
    n = rows // copies
    center, offset = features.mean(0), targets.double().mean(0)
    z, y = features - center, (targets.double() - offset).repeat(copies, 1)
    dual = rows <= p
    values, vectors = _decomposed((z @ z.mT if dual else z.mT @ z).double())
    scale = float(values.sum()) / rows or 1.0
    # λG = I − P diag(1/(s + λ)) Pᵀ with the leading directions P = Z V = U √s.
    directions = vectors * values.sqrt() if dual else z.double() @ vectors
    of_case = directions.unflatten(0, (copies, n)).transpose(0, 1)  # (n, copies, ·)
    rotated = directions.mT @ y
    own = (
        torch.eye(copies).to(y) * (1 + 1e-9) - 1 / rows
    )  # a case alone leaves nothing to divide by
    best = None
    for strength in (strengths.to(values) * scale).tolist():
        shrunk = 1 / (values + strength)
        residual = y - directions @ (rotated * shrunk[:, None])
        block = own - (of_case * shrunk) @ of_case.mT
        residual = residual.unflatten(0, (copies, n)).transpose(0, 1)
        residual = torch.linalg.solve(block, residual)[:, 0]
        error = float(residual.square().mean())
        if best is None or error < best[0]:
            best = error, strength, residual
    assert best is not None
    _, strength, residual = best
    shrunk = 1 / (values + strength)[:, None]
    if dual:
        weight = z.mT @ (vectors @ (shrunk * (vectors.mT @ y))).to(z)
    else:
        weight = (vectors @ (shrunk * rotated)).to(z)
    bias = offset - center.double() @ weight.double()
    return Ridge(weight, bias, targets.double() - residual, strength / scale)


def _decomposed(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and vectors of a positive semidefinite matrix."""
    try:
        values, vectors = torch.linalg.eigh(gram)
    except RuntimeError:  # LinAlgError: divide and conquer gives up on a rare matrix
        vectors, values, _ = torch.linalg.svd(gram)
    return values.clamp(min=0), vectors


def _fit_large(features: Tensor, targets: Tensor, strengths: Tensor) -> Ridge:
    """Fit many cases with many features at the strength that is best for some of the cases."""
    rows, p = features.shape
    some = torch.linspace(0, rows - 1, LARGE // 2, device=features.device).long()
    strength = fit_ridge(features[some], targets[some], 1, strengths).strength
    center, offset = features.mean(0), targets.double().mean(0)
    y, dual = targets.double() - offset, rows <= p

    def parts() -> Iterator[tuple[slice, Tensor]]:  # of the longer side, centered
        longer, shorter = max(rows, p), min(rows, p)
        for begin in range(0, longer, max(1, BLOCK // shorter)):
            part = slice(begin, begin + max(1, BLOCK // shorter))
            yield part, features[:, part] - center[part] if dual else features[part] - center

    gram = features.new_zeros(min(rows, p), min(rows, p))
    for _, z in parts():
        gram += z @ z.mT if dual else z.mT @ z
    shrinking = strength * float(gram.trace()) / rows
    gram = gram.double()
    gram.diagonal().add_(shrinking)
    factor = torch.linalg.cholesky(gram)
    if dual:
        alpha = torch.cholesky_solve(y, factor)
        weight = torch.cat([z.mT @ alpha.to(z) for _, z in parts()])
        residual = shrinking * alpha
        own = shrinking * torch.cholesky_inverse(factor).diagonal()
    else:
        moment = torch.zeros(p, y.shape[1]).to(y)
        for part, z in parts():
            moment += z.mT.double() @ y[part]
        weight = torch.cholesky_solve(moment, factor).to(features)
        fitted, own = torch.empty_like(y), torch.empty_like(y[:, 0])
        for part, z in parts():
            half = torch.linalg.solve_triangular(factor, z.mT.double(), upper=False)
            fitted[part], own[part] = (z @ weight).double(), 1 - half.square().sum(0)
        residual = y - fitted
    residual = residual / (own - 1 / rows)[:, None]
    bias = offset - center.double() @ weight.double()
    return Ridge(weight, bias, targets.double() - residual, strength)


def blend(held_out: list[Tensor], targets: Tensor) -> Tensor:  # heads of (n, c), (n,) -> (heads,)
    """Return weights >= 0 of the heads whose sum predicts best what none of them had seen.

    The loss is that of a softmax for classes, so that the sum gives probabilities too, and squared
    for numbers. There are few weights, and a slight penalty keeps them finite where all is right.
    """
    heads = torch.stack(held_out)
    weights = heads.new_zeros(len(heads))
    active = list(range(len(heads)))
    while active:
        best = _newton(heads[active], targets)
        if bool((best >= 0).all()):
            weights[active] = best
            break
        active.pop(int(best.argmin()))
    return weights


def _newton(heads: Tensor, targets: Tensor) -> Tensor:  # (h, n, c), (n,) -> (h,)
    n, penalty = heads.shape[1], 0.1 / heads.shape[1]
    classes = not targets.is_floating_point()

    def loss(weights: Tensor) -> Tensor:
        predicted = torch.einsum("h,hnc->nc", weights, heads)
        if classes:
            error = F.cross_entropy(predicted, targets)
        else:
            error = (predicted[:, 0] - targets).square().mean() / 2
        return error + penalty * weights.square().sum() / 2

    weights = heads.new_full((len(heads),), 1 / len(heads))
    for _ in range(50):
        predicted = torch.einsum("h,hnc->nc", weights, heads)
        if classes:
            chances = predicted.softmax(1)
            wrong = chances - F.one_hot(targets, heads.shape[2])
            centred = heads - (heads * chances).sum(2, keepdim=True)
            curvature = torch.einsum("hnc,knc,nc->hk", centred, centred, chances)
        else:
            wrong = predicted - targets[:, None]
            curvature = torch.einsum("hnc,knc->hk", heads, heads)
        slope = torch.einsum("hnc,nc->h", heads, wrong) / n + penalty * weights
        curvature = curvature / n + penalty * torch.eye(len(heads)).to(curvature)
        step = torch.linalg.solve(curvature, slope)
        size, before = 1.0, loss(weights)
        while size > 1e-3 and loss(weights - size * step) > before:
            size /= 2
        weights = weights - size * step
        if float((step * slope).sum()) < 1e-10:
            break
    return weights

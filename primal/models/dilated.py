"""Dilated windows of series: random filters at every position, and what is kept of them over time.

Shape letters: T steps, n cases, K filters, B thresholds. Time comes first: a window is nine slices,
summed in one order whatever the batch, so a case's responses do not depend on its neighbours.
"""

from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

TAPS = 9  # steps a window reads
TOLERANCE = 1e-5  # of standardised data: what is smaller is rounding, and ties must not hang on it
IN_CACHE = 2**15  # numbers of one operation: more of them leave the cache, and wake threads


def spread_dilations(longest: int, most: int) -> list[int]:
    """Return up to ``most`` dilations, equal ratios apart, whose windows fit into ``longest``.

    >>> spread_dilations(100, 8), spread_dilations(5, 8)
    ([1, 2, 4, 6, 8, 12], [1])
    """
    largest = max((longest - 1) / (TAPS - 1), 1.0)
    exponents = torch.linspace(0, 1, most, dtype=torch.float64)
    return sorted({int(largest**e + 1e-9) for e in exponents.tolist()})


def ternary_filters() -> Tensor:  # (9, 84)
    """Return MiniRocket's filters: six taps of -1 and three of 2, in all orders; each sums to 0."""
    filters = torch.full((TAPS, 84), -1.0)
    for i, chosen in enumerate(combinations(range(TAPS), 3)):
        filters[list(chosen), i] = 2.0
    return filters


def normal_filters(count: int, generator: torch.Generator) -> Tensor:  # (9, K)
    """Draw filters of mean 0 and absolute sum 1."""
    filters = torch.randn(TAPS, count, generator=generator)
    filters -= filters.mean(0)
    return filters / filters.abs().sum(0)


def channel_mix(shape: torch.Size, generator: torch.Generator, most: int = 9) -> Tensor:  # (C, K)
    """Draw for each filter how many channels it sums, up to ``most`` and seldom many; and which."""
    channels, count = shape
    most = min(channels, most)
    sizes = (2 ** (torch.rand(count, generator=generator) * torch.tensor(most + 1.0).log2())).int()
    order = torch.rand(channels, count, generator=generator).argsort(0).argsort(0)
    return (order < sizes.clamp(1, most)).float()


def averaged(x: Tensor, lengths: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    # (n, T, C), zero at padding; (n,)
    """Return the means of every ``stride`` steps, and how many there are; the last may be of fewer.

    >>> averaged(torch.tensor([1.0, 3, 5, 7, 8]).view(1, 5, 1), torch.tensor([5]), 2)[0].flatten()
    tensor([2., 6., 8.])
    """
    if stride == 1:
        return x, lengths
    filled = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % stride))
    sums = filled.unflatten(1, (-1, stride)).sum(2)
    starts = torch.arange(sums.shape[1], device=x.device) * stride
    counts = (lengths[:, None] - starts).clamp(1, stride)
    return sums / counts[..., None], -(-lengths // stride)


class Steps(NamedTuple):
    """Series, time first."""

    values: Tensor  # (T, n, C), zero from each case's end on
    lengths: Tensor  # (n,)

    def changes(self) -> "Steps":
        """Return the differences from step to step; of a series of one step, one zero."""
        values, lengths = self
        later = torch.cat((values[1:], torch.zeros_like(values[:1])))
        last = torch.arange(len(values), device=lengths.device)[:, None] >= lengths - 1
        difference = (later - values).masked_fill(last[..., None], 0.0)
        return Steps(difference, (lengths - 1).clamp(min=1))


def responses(steps: Steps, mix: Tensor, filters: Tensor, dilation: int) -> Tensor:  # (T, n, K)
    """Filter sums of channels, (C, K), at every position; zeros surround each series."""
    values = steps.values
    mixed = values @ mix if values.shape[-1] > 1 else values
    margin = dilation * (TAPS // 2)
    around = torch.nn.functional.pad(mixed, (0, 0, 0, 0, margin, margin))
    out = values.new_empty(*values.shape[:2], filters.shape[1])
    size = max(1, IN_CACHE // out[0].numel())
    for begin in range(0, len(out), size):
        block = out[begin : begin + size]
        for tap, weights in enumerate(filters):
            start = begin + tap * dilation
            part = around[start : start + len(block)]
            if tap:
                block.addcmul_(part, weights)
            else:
                torch.mul(part, weights, out=block)
    return out


def inside(steps: Steps, margin: int = 0) -> Tensor:  # (T, n)
    """Tell which positions are of the series, ``margin`` from its ends if it is that long."""
    lengths = steps.lengths
    margins = torch.where(lengths > 2 * margin, margin, 0)
    at = torch.arange(len(steps.values), device=lengths.device)[:, None]
    return (at >= margins) & (at < lengths - margins)


def draw_thresholds(
    response: Tensor,  # (T, n, K)
    valid: Tensor,  # (T, n, K)
    count: int,
    generator: torch.Generator,
) -> Tensor:  # (B, K)
    """Return quantiles of the responses, each of one case that is drawn for it."""
    filters = response.shape[-1]
    cases = torch.randint(response.shape[1], (count, filters), generator=generator)
    # Multiples of the golden ratio spread evenly however many there are.
    levels = ((torch.arange(count * filters) + 1) * 0.6180339887498949 % 1).view(count, filters)
    response = response.masked_fill(~valid, torch.inf)
    drawn = []
    for case, level in zip(cases.to(response.device), levels.to(response), strict=True):
        index = case[None, None].expand(len(response), 1, -1)
        ordered = response.gather(1, index)[:, 0].sort(0).values  # (T, K)
        last = (valid.gather(1, index)[:, 0].sum(0) - 1).clamp(min=0)
        place = (level * last).to(torch.int64)
        ends = ordered.gather(0, torch.stack((place, torch.minimum(place + 1, last))))
        drawn.append(torch.lerp(ends[0], ends[1], level * last - place))
    return torch.stack(drawn) + TOLERANCE


def pool_excesses(response: Tensor, valid: Tensor, thresholds: Tensor) -> Tensor:
    # (T, n, K), (T, n, K) or (T, n, 1), (B, K) -> (n, 4, B, K)
    """Pool what exceeds a threshold: how often, how far, when on average, how long at a stretch."""
    response = response.masked_fill(~valid, -torch.inf)
    n, (b, k) = response.shape[1], thresholds.shape
    often, far, when, best, run, excess, above = (response.new_zeros(n, b, k) for _ in range(7))
    for t, step in enumerate(response):
        torch.sub(step[:, None], thresholds, out=excess)
        torch.gt(excess, 0, out=above)
        often += above
        far += excess.clamp_(min=0)
        when.add_(above, alpha=t)
        run.add_(1).mul_(above)
        torch.maximum(best, run, out=best)
    count = valid.sum(0).clamp(min=1).to(response)[:, None]  # (n, 1, K or 1)
    start = valid.to(torch.uint8).argmax(0)[:, None]
    hits = often.clamp(min=1)
    when = torch.where(often > 0, (when / hits - start) / count, -1.0 / count)
    return torch.stack((often / count, far / hits, when, best / count), dim=1)


def pool_contests(response: Tensor, valid: Tensor, group: int) -> Tensor:
    # (T, n, K), (T, n) -> (n, 2, K)
    """Let groups of ``group`` filters compete at each position: wins by size, and losses."""
    rivals = response.unflatten(-1, (group, -1))  # (T, n, group, K / group)
    wins, losses, equal = (torch.zeros_like(rivals[0]) for _ in range(3))
    for step, real in zip(rivals, valid[..., None, None], strict=True):
        most, least = step.amax(1, keepdim=True), step.amin(1, keepdim=True)
        # Where nothing happens nobody wins: rounding would decide.
        idle = ~(real & (most - least > TOLERANCE))
        torch.eq(step, most.masked_fill_(idle, torch.inf), out=equal)
        wins.addcmul_(equal, step)
        torch.eq(step, least.masked_fill_(idle, torch.inf), out=equal)
        losses += equal
    count = valid.sum(0).clamp(min=1)[:, None]
    return torch.stack((wins.flatten(1) / count, losses.flatten(1) / count), dim=1)


def pool_moments(response: Tensor, valid: Tensor) -> Tensor:  # (T, n, K), (T, n, 1) -> (n, 4, K)
    """Pool mean, standard deviation, greatest and least."""
    count = valid.sum(0).clamp(min=1)
    zeroed = response.masked_fill(~valid, 0.0)
    mean = zeroed.sum(0) / count
    deviation = (response - mean).masked_fill(~valid, 0.0).square().sum(0).div(count).sqrt()
    most = response.masked_fill(~valid, -torch.inf).amax(0)
    least = response.masked_fill(~valid, torch.inf).amin(0)
    return torch.stack((mean, deviation, most, least), dim=1)

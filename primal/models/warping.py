"""Copies of series that run a little faster here and slower there, as another recording would."""

import torch
from torch import Tensor

PIECES = 5  # of a series, each of its own speed
SPEED = 0.3  # standard deviation of a piece's log speed
SIZE = 0.1  # and of a channel's size, about 1


def warped(x: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:  # (n, T, C), (n,)
    """Return the series with their time warped and their channels resized; lengths stay.

    >>> x = torch.linspace(0, 1, 9).view(1, 9, 1)
    >>> again = warped(x, torch.tensor([9]), torch.Generator().manual_seed(0))
    >>> bool((again.diff(dim=1) > 0).all())
    True
    """
    n, longest, channels = x.shape
    speeds = (SPEED * torch.randn(n, PIECES, generator=generator)).exp().to(x)
    sizes = 1 + SIZE * torch.randn(n, 1, channels, generator=generator).to(x)
    reached = torch.nn.functional.pad(speeds.cumsum(1), (1, 0))
    reached = reached / reached[:, -1:]
    last = (lengths - 1)[:, None]
    steps = torch.arange(longest, device=x.device)
    piece = (steps / last.clamp(min=1)).clamp(max=1) * PIECES  # (n, T)
    begin = piece.long().clamp(max=PIECES - 1)
    at = torch.lerp(reached.gather(1, begin), reached.gather(1, begin + 1), piece - begin) * last
    before = at.long()
    after = torch.minimum(before + 1, last)
    case = torch.arange(n, device=x.device)[:, None]
    drawn = torch.lerp(x[case, before], x[case, after], (at - before)[..., None])
    return drawn * sizes * (steps < lengths[:, None])[..., None]

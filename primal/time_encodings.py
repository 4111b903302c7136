"""Functional encodings of time: t becomes features with ``φ(t)ᵀφ(s) = K(t − s)``.

To add one: write the class, add it to TIME_ENCODINGS; the contract tests pick it up from there.
Join it to events by concatenation: ``torch.cat((embedded, encoding(times)), dim=-1)``. The unit of
time is yours: periods are given in it, and frequencies f in turns per unit, ``ω = 2πf``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from primal.errors import require_choice, require_divides, require_positive

FLOAT32_INTEGERS = 2.0**24  # from here on float32 skips whole units of time


class TimeEncoding(nn.Module, ABC):
    """Maps times (...) to features (..., ``features``) in the dtype of the module.

    Times are float64 or float32. Phases are computed in float64 and reduced to one turn before
    they are rounded, so that seconds since 1970 lose nothing.
    """

    def __init__(self, features: int, shortest: float, longest: float) -> None:
        super().__init__()
        require_positive("features", features)
        if not 0 < shortest < longest < math.inf:
            raise ValueError(
                "the periods must be 0 < shortest < longest, in the unit of the times, got "
                f"shortest={shortest} and longest={longest}; use for instance the shortest gap "
                "that matters and the length of a sequence."
            )
        self.features, self.shortest, self.longest = features, shortest, longest

    def forward(self, times: Tensor) -> Tensor:  # (...) -> (..., features)
        check_times(times)
        return self._encode(times.double())

    @abstractmethod
    def _encode(self, times: Tensor) -> Tensor: ...  # float64 (...) -> (..., features)

    @abstractmethod
    def reset_parameters(self) -> None: ...

    def _grid(self, count: int) -> Tensor:  # (count,)
        """Return the logarithms of ``count`` frequencies, from 1 / longest to 1 / shortest."""
        return torch.linspace(-math.log(self.longest), -math.log(self.shortest), count)

    def extra_repr(self) -> str:
        return f"features={self.features}, shortest={self.shortest:g}, longest={self.longest:g}"


@final
class Sinusoidal(TimeEncoding):
    """Fixed frequencies in geometric progression: the first Transformer's positions, of a time."""

    log_frequencies: Tensor  # (features / 2,)

    def __init__(self, features: int, *, shortest: float = 1.0, longest: float = 1e4) -> None:
        super().__init__(features, shortest, longest)
        self.register_buffer("log_frequencies", torch.empty(_pairs(features)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.log_frequencies.copy_(self._grid(len(self.log_frequencies)))

    def _encode(self, times: Tensor) -> Tensor:
        return _unit_waves(times, self.log_frequencies.double().exp(), self.log_frequencies.dtype)


@final
class Bochner(TimeEncoding):
    """``φ(t) = [cos ωt ; sin ωt] / √d``: d frequencies ω from a spectrum that is learnt.

    Any continuous translation-invariant kernel is ``K(τ) = E cos ωτ`` (Bochner), and φ(t)ᵀφ(s) is
    its mean over d draws (Xu et al., NeurIPS 2019, arXiv 1911.12864). The ``spectrum``:

    - "free": the frequencies are the parameters.
    - "normal": ``ω = μ + σ ε``, one normal per pair; ε is drawn anew in each training pass.
    - "inverse_cdf": ``ω = F⁻¹(u)`` with a small network for F⁻¹ and u uniform, drawn anew in each
      training pass, one in each of d equal parts of (0, 1). Nothing keeps F⁻¹ rising: sorted, it is
      the inverse CDF of the same spectrum.

    Evaluation uses one fixed draw. Two times meet in one pass only: encode what is to be compared
    in a single call.
    """

    draws: Tensor  # (d,), of evaluation

    def __init__(
        self,
        features: int,
        spectrum: Literal["free", "normal", "inverse_cdf"] = "free",
        *,
        shortest: float = 1.0,
        longest: float = 1e4,
        hidden: int = 32,
    ) -> None:
        super().__init__(features, shortest, longest)
        require_choice("spectrum", spectrum, ("free", "normal", "inverse_cdf"))
        require_positive("hidden", hidden)
        pairs = _pairs(features)
        self.spectrum = spectrum
        self.log_frequencies = nn.Parameter(torch.empty(pairs)) if spectrum == "free" else None
        self.log_mean = nn.Parameter(torch.empty(pairs)) if spectrum == "normal" else None
        self.log_deviation = nn.Parameter(torch.empty(pairs)) if spectrum == "normal" else None
        self.inverse_cdf = (
            nn.Sequential(
                nn.Linear(1, hidden),
                nn.Tanh(),
                nn.Linear(hidden, hidden),
                nn.Tanh(),
                nn.Linear(hidden, 1),
            )
            if spectrum == "inverse_cdf"
            else None
        )
        self.register_buffer("draws", torch.empty(pairs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        grid = self._grid(len(self.draws))
        with torch.no_grad():
            if self.log_frequencies is not None:
                self.log_frequencies.copy_(grid)
            if self.log_mean is not None and self.log_deviation is not None:
                self.log_mean.copy_(grid)
                self.log_deviation.copy_(grid + math.log(0.1))
            if self.inverse_cdf is not None:
                for layer in self.inverse_cdf:
                    if isinstance(layer, nn.Linear):
                        layer.reset_parameters()
        self.draws.copy_(self._draw(training=False))

    def frequencies(self) -> Tensor:  # (d,), float64
        """Return the frequencies of one pass, in turns per unit of time."""
        if self.log_frequencies is not None:
            return self.log_frequencies.double().exp()
        drawn = (self._draw(training=True) if self.training else self.draws).double()
        if self.log_mean is not None and self.log_deviation is not None:
            return self.log_mean.double().exp() + self.log_deviation.double().exp() * drawn
        assert self.inverse_cdf is not None
        # Around the log-uniform spectrum, so that the network starts from every scale of time.
        low, high = -math.log(self.longest), -math.log(self.shortest)
        learnt = self.inverse_cdf(drawn.to(self.draws.dtype)[:, None] * 2 - 1)[:, 0].double()
        frequencies: Tensor = (low + (high - low) * drawn + learnt).exp()
        return frequencies

    def _draw(self, *, training: bool) -> Tensor:
        """Draw ε or u; for evaluation u is the middle of its part."""
        if self.spectrum == "inverse_cdf":
            part = torch.arange(len(self.draws), device=self.draws.device, dtype=self.draws.dtype)
            inside = torch.rand_like(self.draws) if training else 0.5
            return (part + inside) / len(self.draws)
        return torch.randn_like(self.draws)

    def _encode(self, times: Tensor) -> Tensor:
        return _unit_waves(times, self.frequencies(), self.draws.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, spectrum={self.spectrum!r}"


@final
class Mercer(TimeEncoding):
    """Harmonics of learnt periods, weighted: the eigenfunctions of periodic kernels.

    For each of k periods P: ``√c_0, √c_j cos(2πjt/P), √c_j sin(2πjt/P)`` for j = 1 ... degree, that
    is k (2 degree + 1) features, whose kernel is ``Σ c_j cos(2πjτ/P)`` (Mercer; Xu et al., NeurIPS
    2019). All coefficients are positive and sum to 1.

    ``form``: "tied" has one c_j for a cosine and its sine, without which K depends on more than
    t − s. "sum" is what the authors released: each period's harmonics, weighted freely, are added
    up to a single feature and a bias. Its kernel is not translation-invariant, and φ has no unit
    norm.
    """

    def __init__(
        self,
        features: int,
        degree: int = 5,
        *,
        form: Literal["tied", "sum"] = "tied",
        shortest: float = 1.0,
        longest: float = 1e4,
    ) -> None:
        super().__init__(features, shortest, longest)
        require_positive("degree", degree)
        require_choice("form", form, ("tied", "sum"))
        if form == "tied":
            require_divides("features", features, "2 * degree + 1", 2 * degree + 1)
        self.degree, self.form = degree, form
        periods = features // (2 * degree + 1) if form == "tied" else features
        self.log_frequencies = nn.Parameter(torch.empty(periods))
        per_period = degree + 1 if form == "tied" else 2 * degree
        self.coefficients = nn.Parameter(torch.empty(periods, per_period))
        self.bias = nn.Parameter(torch.empty(periods)) if form == "sum" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_frequencies.copy_(self._grid(len(self.log_frequencies)))
            if self.bias is not None:
                nn.init.xavier_uniform_(self.coefficients)
                nn.init.zeros_(self.bias)
                return
            # c_j = 2^-j: a kernel that is smooth, and peaked within its period.
            decay = -math.log(2) * torch.arange(self.degree + 1.0)
            self.coefficients.copy_(decay.expand_as(self.coefficients))

    def weights(self) -> Tensor:  # (k, degree + 1)
        """Return the coefficients c of the tied form."""
        return self.coefficients.flatten().softmax(0).view_as(self.coefficients)

    def _encode(self, times: Tensor) -> Tensor:
        harmonic = torch.arange(1, self.degree + 1, device=times.device)
        frequencies = self.log_frequencies.double().exp()[:, None] * harmonic  # (k, degree)
        dtype = self.coefficients.dtype
        cos, sin = _waves(times, frequencies, dtype)  # (..., k, degree)
        if self.bias is not None:
            return (torch.cat((cos, sin), dim=-1) * self.coefficients).sum(-1) + self.bias
        root = (self.coefficients.flatten().log_softmax(0) / 2).exp().view_as(self.coefficients)
        constant = root[:, :1].expand(*cos.shape[:-1], 1)
        waves = (constant, cos * root[:, 1:], sin * root[:, 1:])
        return torch.cat(waves, dim=-1).flatten(-2).to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.degree}, form={self.form!r}"


def relative_times(times: Tensor, origin: Tensor | None = None) -> Tensor:  # (..., N), (...)
    """Return the times since ``origin``, by default since the first of each sequence, in float64.

    >>> relative_times(torch.tensor([1.3e9, 1.3e9 + 0.25], dtype=torch.float64))
    tensor([0.0000, 0.2500], dtype=torch.float64)
    """
    check_times(times)
    first = times[..., :1] if origin is None else origin[..., None]
    check_times(first)
    return times.double() - first.double()


def check_times(times: Tensor) -> None:
    """Raise a ValueError unless the times keep what they were measured with."""
    if times.dtype not in (torch.float64, torch.float32):
        raise ValueError(
            f"times must be float64, or float32 if small, got {times.dtype}; "
            "convert them with times.double()."
        )
    # Looking at values would stall an accelerator, and cannot be traced.
    unseen = times.device.type != "cpu" or torch.compiler.is_compiling()
    if times.dtype == torch.float64 or unseen or not times.numel():
        return
    largest = float(times.detach().abs().max())
    if largest >= FLOAT32_INTEGERS:
        raise ValueError(
            f"times in float32 must stay below {FLOAT32_INTEGERS:.0f}, from where on whole units "
            f"are lost, got {largest:.9g}; read them as float64 (seconds since 1970 do not "
            "survive float32), or make them relative before rounding."
        )


def _pairs(features: int) -> int:
    require_positive("features", features)
    if features % 2:
        raise ValueError(
            f"features must be even (a cos and a sin per frequency), got {features}; "
            f"use {features - 1 or 2} or {features + 1}."
        )
    return features // 2


def _waves(times: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (..., *frequencies.shape); the whole turns go before the rounding does."""
    turns = times[(..., *[None] * frequencies.ndim)] * frequencies
    phase = (2 * math.pi * (turns - turns.detach().round())).to(dtype)
    return phase.cos(), phase.sin()


def _unit_waves(times: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(_waves(times, frequencies, dtype), dim=-1) / math.sqrt(len(frequencies))


TIME_ENCODINGS: dict[str, Callable[..., TimeEncoding]] = {
    "sinusoidal": Sinusoidal,
    "bochner": Bochner,
    "bochner_normal": partial(Bochner, spectrum="normal"),
    "bochner_inverse_cdf": partial(Bochner, spectrum="inverse_cdf"),
    "mercer": Mercer,
    "mercer_sum": partial(Mercer, form="sum"),
}


def time_encoding(name: str, features: int, **settings: Any) -> TimeEncoding:
    """Build the encoding called ``name``.

    >>> time_encoding("mercer", features=22, degree=5, shortest=1.0, longest=365.0)
    Mercer(features=22, shortest=1, longest=365, degree=5, form='tied')
    """
    require_choice("time encoding", name, TIME_ENCODINGS)
    return TIME_ENCODINGS[name](features, **settings)

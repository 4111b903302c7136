"""Every encoding keeps one contract; each has its own law, and the released sum breaks one."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal.time_encodings import (
    TIME_ENCODINGS,
    Bochner,
    Mercer,
    Sinusoidal,
    TimeEncoding,
    relative_times,
    time_encoding,
)

FEATURES = {"mercer": 22, "mercer_sum": 6}
INVARIANT = sorted(set(TIME_ENCODINGS) - {"mercer_sum"})
SPECTRA: list[Any] = ["free", "normal", "inverse_cdf"]


def build(name: str) -> Any:
    """Build an encoding, to look into."""
    return time_encoding(name, FEATURES.get(name, 16), shortest=0.5, longest=50).double().eval()


@pytest.fixture(params=sorted(TIME_ENCODINGS))  # a new one is tested the moment it is registered
def encoding(request) -> TimeEncoding:
    return build(request.param)


@pytest.fixture(params=INVARIANT)
def invariant(request) -> TimeEncoding:
    return build(request.param)


def uniform(*shape: int, span: float = 100.0) -> Tensor:
    return span * torch.rand(shape, dtype=torch.float64)


def gram(encoding: TimeEncoding, times: Tensor) -> Tensor:
    features = encoding(times)
    return features @ features.mT


# --- the contract --------------------------------------------------------------------------------


def test_features_states_the_width_of_the_output(encoding):
    for shape in ((), (5,), (2, 3, 5), (2, 0)):
        assert encoding(uniform(*shape)).shape == (*shape, encoding.features)


def test_times_are_encoded_one_by_one(encoding):
    times = uniform(2, 3, 5)
    torch.testing.assert_close(encoding(times)[1, 2, 3], encoding(times[1, 2, 3]))


def test_features_have_the_dtype_of_the_module(encoding):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert encoding.to(dtype)(uniform(3)).dtype == dtype


def test_gram_is_positive_semidefinite(encoding):
    assert torch.linalg.eigvalsh(gram(encoding, uniform(30))).min() > -1e-12


def test_features_have_unit_norm(invariant):
    norms = invariant(uniform(200)).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-14)


def test_kernel_depends_on_differences_alone(invariant):
    for parameter in invariant.parameters():  # wherever training may lead
        nn.init.normal_(parameter, std=0.5)
    times = uniform(20)
    expected = gram(invariant, times)
    torch.testing.assert_close(gram(invariant, times + 12.34), expected, rtol=0, atol=1e-12)


def test_the_released_sum_depends_on_more_than_differences():
    encoding, times = build("mercer_sum"), uniform(20)
    assert (gram(encoding, times + 12.34) - gram(encoding, times)).abs().max() > 0.1


def test_every_parameter_has_a_gradient(encoding):
    encoding.train()
    torch.manual_seed(3)
    weight = torch.randn(encoding.features, dtype=torch.float64)
    parameters = dict(encoding.named_parameters())
    if isinstance(encoding, Sinusoidal):
        assert not parameters
        return
    (encoding(uniform(7)) @ weight).square().sum().backward()
    assert [n for n, p in parameters.items() if p.grad is None or not p.grad.abs().max()] == []


def test_gradients_are_those_of_finite_differences(encoding):
    times = uniform(4, span=5.0).requires_grad_()
    parameters = tuple(encoding.parameters())
    assert torch.autograd.gradcheck(lambda t, *_: encoding(t), (times, *parameters))


def test_evaluation_repeats_itself(encoding):
    times = uniform(5)
    assert torch.equal(encoding(times), encoding(times))
    copy = build_like(encoding)
    copy.load_state_dict(encoding.state_dict())
    assert torch.equal(copy(times), encoding(times))


def build_like(encoding: TimeEncoding) -> TimeEncoding:
    settings = {"shortest": encoding.shortest, "longest": encoding.longest}
    kind = type(encoding)
    for name in ("spectrum", "degree", "form"):
        if hasattr(encoding, name):
            settings[name] = getattr(encoding, name)
    return kind(encoding.features, **settings).double().eval()


def test_resetting_starts_anew(encoding):
    for parameter in encoding.parameters():
        nn.init.constant_(parameter, 0.3)
    encoding.reset_parameters()
    torch.manual_seed(0)
    fresh = build_like(encoding)
    for name, p in encoding.named_parameters():
        if "inverse_cdf" not in name and name != "coefficients":  # drawn
            assert torch.equal(p, dict(fresh.named_parameters())[name])
        assert not (p == 0.3).all()


# --- precision -----------------------------------------------------------------------------------


def test_seconds_since_1970_lose_nothing(invariant):
    encoding = invariant.float()
    apart = torch.tensor([0.0, 0.25, 3.0, 40.0], dtype=torch.float64)
    exact, late = encoding(apart), gram(encoding, apart + 1.3e9)
    # 1.3e9 has steps of 2e-7 in float64; in float32 they are 128.
    torch.testing.assert_close(late, exact @ exact.mT, rtol=0, atol=2e-5)


def test_relative_times_are_exact_and_float64():
    times = torch.tensor([[1.3e9, 1.3e9 + 0.25], [5.0, 7.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 0.25], [0.0, 2.0]], dtype=torch.float64)
    assert torch.equal(relative_times(times), expected)
    assert torch.equal(relative_times(times, times[:, 1]), expected - expected[:, 1:])
    assert relative_times(torch.tensor([1.0, 3.0])).dtype == torch.float64


def test_what_float32_has_lost_is_refused(encoding):
    for read in (encoding, relative_times):
        with pytest.raises(
            ValueError, match=r"float32 .* below 16777216.* got 1.3e\+09; read them"
        ):
            read(torch.tensor([0.0, 1.3e9]))
        with pytest.raises(ValueError, match=r"float64.* got torch.int64; .*times.double\(\)"):
            read(torch.tensor([0, 5]))
        with pytest.raises(ValueError, match=r"got torch\.float16"):
            read(torch.tensor([0.0, 5.0], dtype=torch.float16))


# --- Bochner -------------------------------------------------------------------------------------


def normal_kernel(lag: Tensor, mean: float, deviation: float) -> Tensor:
    angle = 2 * math.pi * lag
    return (angle * mean).cos() * (-((angle * deviation) ** 2) / 2).exp()


def of_one_normal(features: int, mean: float, deviation: float) -> Any:
    encoding = Bochner(features, "normal").double()
    nn.init.constant_(encoding.log_mean, math.log(mean))
    nn.init.constant_(encoding.log_deviation, math.log(deviation))
    return encoding


def test_monte_carlo_error_falls_with_the_root_of_the_draws():
    lags = uniform(40, span=4.0)

    def error(pairs: int) -> float:
        encoding = of_one_normal(2 * pairs, 0.3, 0.2)
        with torch.no_grad():
            sups = [
                (
                    gram(encoding, torch.cat((lags.new_zeros(1), lags)))[0, 1:]
                    - normal_kernel(lags, 0.3, 0.2)
                )
                .abs()
                .max()
                for _ in range(100)
            ]
        return float(torch.stack(sups).mean())

    rates = [error(pairs) * math.sqrt(pairs) for pairs in (16, 64, 256, 1024)]
    assert max(rates) < 1.3 * min(rates)  # without the root it would be 8
    assert 0.5 < min(rates) < 2.0


@pytest.mark.parametrize("spectrum", ["normal", "inverse_cdf"])
def test_spectra_are_drawn_anew_in_training_alone(spectrum):
    encoding, times = Bochner(16, spectrum), uniform(5)
    assert not torch.equal(encoding(times), encoding(times))
    encoding.eval()
    assert torch.equal(encoding(times), encoding(times))


def test_one_pass_has_one_draw():
    encoding, times = Bochner(16, "normal"), uniform(5)
    twice = encoding(torch.stack((times, times)))
    assert torch.equal(twice[0], twice[1])


def test_draws_of_the_inverse_cdf_are_uniform_and_one_in_each_part():
    encoding = Bochner(8, "inverse_cdf", shortest=1.0, longest=math.e**4).double()
    for parameter in encoding.inverse_cdf[-1].parameters():
        nn.init.zeros_(parameter)  # what is left is the log-uniform spectrum
    draws = torch.stack([encoding.frequencies() for _ in range(2000)]).log() / 4 + 1
    low = torch.arange(4) / 4
    assert (draws >= low - 1e-6).all()
    assert (draws <= low + 0.25 + 1e-6).all()
    torch.testing.assert_close(draws.mean(0), low.double() + 1 / 8, rtol=0, atol=0.01)
    encoding.eval()
    torch.testing.assert_close(encoding.frequencies().log() / 4 + 1, low.double() + 1 / 8)


def test_frequencies_start_between_the_periods():
    for spectrum in SPECTRA:
        encoding = Bochner(64, spectrum, shortest=2.0, longest=200.0).eval()
        periods = 1 / encoding.frequencies()
        assert 1 < periods.min() < 4
        assert 100 < periods.max() < 400


def test_free_frequencies_recover_a_known_spectrum():
    """A normal of mean 1.5 and deviation 0.7 (in angles) is found from its kernel."""
    lags = torch.linspace(0, 6, 200, dtype=torch.float64)
    target = (1.5 * lags).cos() * (-0.245 * lags**2).exp()
    encoding = Bochner(64, shortest=2.0, longest=50.0).double()
    optimizer = torch.optim.Adam(encoding.parameters(), lr=0.03)
    for _ in range(800):
        features = encoding(lags)
        loss = (features @ features[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    angular = 2 * math.pi * encoding.frequencies().detach()
    assert loss.item() < 1e-4
    assert abs(angular.mean() - 1.5) < 0.05
    assert abs(angular.std() - 0.7) < 0.05


def test_normal_spectrum_recovers_its_mean_and_deviation():
    lags = torch.linspace(0, 4, 50, dtype=torch.float64)
    target = normal_kernel(lags, 0.3, 0.1)
    encoding = of_one_normal(64, 0.25, 0.05)
    optimizer = torch.optim.Adam(encoding.parameters(), lr=0.01)
    for _ in range(600):
        features = encoding(lags)
        loss = (features @ features[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean, deviation = encoding.log_mean.exp(), encoding.log_deviation.exp()
    spread = (deviation.square().mean() + mean.var(unbiased=False)).sqrt()  # of the mixture
    assert abs(mean.mean().item() - 0.3) < 0.02
    assert abs(spread.item() - 0.1) < 0.03


# --- Mercer --------------------------------------------------------------------------------------


def test_mercer_coefficients_are_positive_and_sum_to_one():
    encoding = build("mercer")
    nn.init.normal_(encoding.coefficients, std=3.0)
    assert (encoding.weights() > 0).all()
    torch.testing.assert_close(encoding.weights().sum().item(), 1.0)


def test_mercer_is_periodic():
    encoding = Mercer(11, 5, shortest=1.0, longest=7.0).double()  # one period: the longest
    times = uniform(20)
    torch.testing.assert_close(encoding(times + 7.0), encoding(times), rtol=0, atol=1e-6)
    assert (encoding(times + 3.5) - encoding(times)).abs().max() > 0.1


def test_mercer_kernel_is_its_fourier_series():
    encoding = build("mercer")
    nn.init.normal_(encoding.coefficients)
    lags = uniform(30)
    kernel = gram(encoding, torch.cat((lags.new_zeros(1), lags)))[0, 1:]
    frequencies = encoding.log_frequencies.exp()
    expected = sum(
        c * (2 * math.pi * j * f * lags).cos()
        for f, row in zip(frequencies, encoding.weights(), strict=True)
        for j, c in enumerate(row)
    )
    torch.testing.assert_close(kernel, expected)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_mercer_truncation_error_is_the_tail_of_the_coefficients(degree):
    c = torch.tensor([0.4**j for j in range(65)], dtype=torch.float64)
    lags = torch.linspace(0, 7, 101, dtype=torch.float64)
    turns = torch.arange(65.0).double() * lags[:, None] / 7
    kernel = (c * (2 * math.pi * turns).cos()).sum(-1)
    encoding = Mercer(2 * degree + 1, degree, shortest=1.0, longest=7.0).double()
    with torch.no_grad():
        encoding.coefficients.copy_(c[: degree + 1].log())
        encoding.log_frequencies.fill_(-math.log(7))
    features = encoding(lags) * c[: degree + 1].sum().sqrt()
    error = (features @ features[0] - kernel).abs().max()
    torch.testing.assert_close(error, c[degree + 1 :].sum())


# --- in an attention -----------------------------------------------------------------------------


def test_weights_that_rotate_pairs_keep_logits_when_all_times_shift():
    encoding, times = build("bochner"), uniform(20)
    a, b = torch.randn(2, 8, dtype=torch.float64)
    rotating = torch.cat(
        (torch.cat((a.diag(), -b.diag()), dim=1), torch.cat((b.diag(), a.diag()), dim=1))
    )
    mixing = torch.randn(16, 16, dtype=torch.float64)

    def logits(weight, shift):
        features = encoding(times + shift)
        return features @ weight @ features.mT

    torch.testing.assert_close(logits(rotating, 12.34), logits(rotating, 0.0))
    assert (logits(mixing, 12.34) - logits(mixing, 0.0)).abs().max() > 0.1


# --- wrong settings ------------------------------------------------------------------------------


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"time encoding must be one of .* Did you mean 'mercer'"):
        time_encoding("mercr", 16)
    with pytest.raises(ValueError, match=r"features must be even .* got 7; use 6 or 8"):
        Bochner(7)
    with pytest.raises(ValueError, match=r"features must be even .* got 1; use 2 or 2"):
        Sinusoidal(1)
    with pytest.raises(ValueError, match=r"multiple of 2 \* degree \+ 1, got features=20"):
        Mercer(20, 5)
    with pytest.raises(ValueError, match=r"0 < shortest < longest.*got shortest=5 and longest=2"):
        Sinusoidal(4, shortest=5, longest=2)
    with pytest.raises(ValueError, match="spectrum must be one of"):
        Bochner(8, "cauchy")  # type: ignore[arg-type]


def test_printing_an_encoding_tells_its_settings():
    printed = repr(Bochner(8, "normal", shortest=2, longest=30))
    assert "features=8, shortest=2, longest=30, spectrum='normal'" in printed

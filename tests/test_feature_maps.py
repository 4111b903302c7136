"""Every feature map keeps one contract; each has its own closed form."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from primal.feature_maps import (
    FEATURE_MAPS,
    Cosine,
    EluPlusOne,
    FeatureMap,
    Identity,
    Polynomial,
    PositiveRandom,
    RandomFourier,
    RandomMap,
    feature_map,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RANDOM = [PositiveRandom, RandomFourier]


def randn(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


def assert_equal(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=atol)


@pytest.fixture(params=sorted(FEATURE_MAPS))  # a new map is tested the moment it is registered
def phi(request) -> FeatureMap:
    return feature_map(request.param, width=6).double()


# --- the contract --------------------------------------------------------------------------------


def test_features_states_the_width_of_the_output(phi):
    for shape in ((6,), (5, 6), (2, 3, 5, 6), (2, 3, 0, 6)):
        assert phi(randn(*shape)).shape == (*shape[:-1], phi.features)
    assert phi.width == 6


def test_tokens_are_mapped_one_by_one(phi):
    x = randn(2, 3, 5, 6)
    assert_equal(phi(x)[1, 2, 3], phi(x[1, 2, 3]))


def test_kernel_is_positive_semidefinite(phi):
    features = phi(randn(20, 6))
    assert torch.linalg.eigvalsh(features @ features.mT).min() > -1e-10


def test_positive_says_whether_a_feature_can_be_negative(phi):
    features = phi(3 * randn(200, 6))
    assert bool((features >= 0).all()) == phi.positive


def test_gradient(phi):
    assert gradcheck(phi, randn(3, 6, requires_grad=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", [torch.float32, None], ids=["float32 map", "same dtype"])
def test_dtype_is_kept(phi, dtype, parameters):
    x = torch.randn(4, 6)
    features = phi.to(parameters or dtype)(x.to(dtype))
    assert features.dtype == dtype
    exact = phi.double()(x.to(dtype).double())
    torch.testing.assert_close(features.double(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_projections_are_float32_under_autocast(dtype):
    x = torch.randn(50, 6)
    for name in ("positive_random", "random_fourier"):
        phi = feature_map(name, 6)
        with torch.autocast("cpu", dtype):
            features = phi(x)
        torch.testing.assert_close(features, phi(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_has_finite_features_and_gradients(phi, dtype):
    x = torch.zeros(3, 6, dtype=dtype, requires_grad=True)
    features = phi.to(dtype)(x)
    (gradient,) = torch.autograd.grad(features, x, torch.ones_like(features))
    assert features.isfinite().all()
    assert gradient.isfinite().all()


def test_two_calls_agree_in_training_and_evaluation(phi):
    x = randn(4, 6)
    assert torch.equal(phi.train()(x), phi(x))
    assert torch.equal(phi.eval()(x), phi.train()(x))


def test_a_saved_state_restores_the_features(phi):
    x, other = randn(4, 6), type(phi)(width=6).double()
    other.load_state_dict(phi.state_dict())
    assert torch.equal(other(x), phi(x))


def test_printing_tells_the_sizes(phi):
    assert repr(phi).startswith(f"{type(phi).__name__}(width=6, features={phi.features}")


def test_an_unknown_name_is_answered_with_the_known_ones():
    message = r"feature map must be one of \['cosine', .*\], got 'cosin'. Did you mean 'cosine'\?"
    with pytest.raises(ValueError, match=message):
        feature_map("cosin", width=4)


@pytest.mark.parametrize("width", [0, -3, 2.0, True])
def test_a_width_is_a_positive_integer(width):
    message = rf"width must be a positive integer, got {width}; 1 is the smallest"
    for kind in (Cosine, Identity, EluPlusOne):
        with pytest.raises(ValueError, match=message):
            kind(width)


# --- closed forms --------------------------------------------------------------------------------


def test_cosine_kernel_is_the_cosine_of_the_angle():
    x, y = randn(20, 6), randn(20, 6)
    kernel = (Cosine(6)(x) * Cosine(6)(y)).sum(-1)
    assert_equal(kernel, torch.nn.functional.cosine_similarity(x, y, dim=-1))


def test_identity_kernel_is_linear():
    x = randn(20, 6)
    assert Identity(6)(x) is x


def test_elu_plus_one_is_linear_above_zero_and_exponential_below():
    x = randn(20, 6)
    assert_equal(EluPlusOne(6)(x), torch.where(x > 0, x + 1, x.exp()))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_polynomial_kernel_is_exact(width, degree):
    phi = Polynomial(width, degree).double()
    x, y = randn(20, width), randn(20, width)
    assert_equal(phi(x) @ phi(y).mT, (1 + x @ y.mT / math.sqrt(width)) ** degree, atol=1e-11)
    assert phi.features == math.comb(width + degree, degree)
    assert f"degree={degree}" in repr(phi)


@pytest.mark.parametrize("degree", [0, 1, 4, 2.5])
def test_polynomial_of_another_degree_is_refused(degree):
    with pytest.raises(ValueError, match=f"degree must be 2 or 3, got {degree}; Identity is"):
        Polynomial(4, degree)


# --- random maps ---------------------------------------------------------------------------------


def softmax_kernel(x, y):
    return (x @ y.mT / math.sqrt(x.shape[-1])).exp()


def rbf_kernel(x, y):
    return (-torch.cdist(x, y).square() / (2 * math.sqrt(x.shape[-1]))).exp()


EXPECTED = [(PositiveRandom, softmax_kernel), (RandomFourier, rbf_kernel)]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("kind", "kernel"), EXPECTED)
def test_random_kernel_is_unbiased(kind, kernel, width):
    x, y = randn(5, width) / 2, randn(5, width) / 2  # short: exp of long ones has no use for a mean
    blocks = 2000  # independent: one orthogonal set of frequencies each
    phi = kind(width, 2 * width * blocks).double()
    features_x, features_y = phi(x), phi(y)  # (5, P)
    products = features_x[:, None] * features_y * phi.features  # (5, 5, P)
    products = products.unflatten(-1, (-1, blocks, width)).mean((-3, -1))  # (5, 5, blocks)
    error = (products.mean(-1) - kernel(x, y)).abs()
    assert (error < 5 * products.std(-1) / math.sqrt(blocks)).all()


@pytest.mark.parametrize(("kind", "kernel"), EXPECTED)
def test_random_kernel_error_falls_with_the_root_of_the_features(kind, kernel):
    x, y = randn(10, 4) / 4, randn(10, 4) / 4

    def error(features):
        maps = (kind(4, features).double() for _ in range(100))
        return (
            sum(float((phi(x) @ phi(y).mT - kernel(x, y)).square().mean()) for phi in maps) ** 0.5
        )

    rates = [error(features) * math.sqrt(features) for features in (16, 64, 256, 1024)]
    assert max(rates) < 2 * min(rates)  # without the root it would be 8


@pytest.mark.parametrize("kind", RANDOM)
def test_frequencies_are_orthogonal_in_blocks(kind):
    frequencies = kind(4, 20).double().frequencies  # 20 or 10 draws: the last block may be cut
    for block in frequencies.split(4):
        gram = block @ block.mT
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_every_frequency_is_standard_normal(width):
    draws = 4000
    samples = torch.stack([PositiveRandom(width, width).frequencies for _ in range(draws)])
    for frequency in samples.double().unbind(1):  # each position in the block by itself
        assert frequency.mean(0).abs().max() < 5 / math.sqrt(draws)
        covariance = frequency.mT @ frequency / draws
        assert (covariance - torch.eye(width)).abs().max() < 5 * math.sqrt(2 / draws)
        assert (frequency**4).mean(0).sub(3).abs().max() < 5 * math.sqrt(96 / draws)


@pytest.mark.parametrize("kind", RANDOM)
def test_a_generator_makes_the_frequencies_reproducible(kind):
    def seeded():
        return torch.Generator().manual_seed(12345)

    first, second, other = kind(4, generator=seeded()), kind(4, generator=seeded()), kind(4)
    assert torch.equal(first.frequencies, second.frequencies)
    assert not torch.equal(first.frequencies, other.frequencies)
    other.resample(seeded())
    assert torch.equal(first.frequencies, other.frequencies)


@pytest.mark.parametrize("kind", RANDOM)
def test_resampling_changes_the_frequencies_in_place(kind):
    phi, x = kind(4).double(), randn(3, 4)
    before, storage, features = phi.frequencies.clone(), phi.frequencies.data_ptr(), phi(x)
    phi.resample()
    assert (phi.frequencies != before).all()
    assert phi.frequencies.data_ptr() == storage
    assert phi.frequencies.dtype == torch.float64
    assert not torch.equal(phi(x), features)


@pytest.mark.parametrize("kind", RANDOM)
def test_random_maps_have_twice_as_many_features_as_the_width_by_default(kind):
    phi: RandomMap = kind(5)
    assert phi.features == 10
    assert not list(phi.parameters())  # drawn, not trained


def test_fourier_features_have_unit_length():
    x = randn(20, 6)
    assert_equal(RandomFourier(6, 10).double()(x).norm(dim=-1), torch.ones(20).double())


def test_an_odd_number_of_fourier_features_is_refused():
    with pytest.raises(ValueError, match=r"features must be even .* got 7; use 6 or 8"):
        RandomFourier(4, 7)

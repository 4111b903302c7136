"""The mathematics of primal/functional.py: the KSVD theorem, definitions, laws, gradients."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from primal import functional
from primal.backend import Backend
from primal.functional import KSVDTerms, PrimalOutput, Variant, primal_attention
from primal.kernels import blocked

HALF = [torch.bfloat16, torch.float16]
BACKENDS: list[Backend] = ["torch", "blocked"]
VARIANTS: list[Variant] = ["released", "admm"]
INFINITY = float("inf")

# Padding on the left, in the middle and on the right.
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1, 0]], dtype=torch.bool)


def randn(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


def assert_equal(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=atol)


def assert_as_accurate(out: Tensor, reference: Tensor, ideal: Tensor, factor: float = 2.0) -> None:
    """``reference`` is plain PyTorch in the dtype under test, ``ideal`` the same in float64."""
    allowed = factor * (reference.double() - ideal).abs().max() + 1e-7
    assert (out.double() - ideal).abs().max() <= allowed


def valid(x: Tensor, mask: Tensor) -> Tensor:  # (B, H, N, D), (B, N) -> (all valid tokens, H, D)
    return x.transpose(1, 2)[mask]


# --- tokens --------------------------------------------------------------------------------------


def test_mask_from_lengths_marks_that_many_tokens():
    mask = functional.mask_from_lengths(torch.tensor([0, 2, 5]), tokens=5)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[n < length for n in range(5)] for length in (0, 2, 5)]


def test_zero_padding_removes_nan_and_its_gradient():
    x = randn(2, 3, 7, 4)
    x.transpose(1, 2)[~MASK] = float("nan")
    x.requires_grad_()
    y = functional.zero_padding(x, MASK)
    y.square().sum().backward()
    assert x.grad is not None
    assert not valid(y, ~MASK).any()
    assert not valid(x.grad, ~MASK).any()
    assert_equal(valid(y, MASK), valid(x, MASK))


def test_token_count_is_at_least_one_and_no_half():
    x = torch.zeros(3, 1, 300, 1, dtype=torch.bfloat16)  # bfloat16 would count 257 as 256
    mask = functional.mask_from_lengths(torch.tensor([0, 1, 257]), 300)
    assert functional.token_count(x, mask).tolist() == [1.0, 1.0, 257.0]
    assert functional.token_count(x, None).tolist() == [300.0]


@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "masked"])
def test_cumulative_mean_is_the_mean_over_the_valid_past(mask):
    x = randn(2, 3, 7, 4)
    mean = functional.cumulative_mean(x, mask)
    real = torch.ones_like(MASK) if mask is None else mask
    for b in range(2):
        for n in range(7):
            past = x[b, :, : n + 1][:, real[b, : n + 1]]
            assert_equal(
                mean[b, :, n], past.mean(1) if past.numel() else torch.zeros_like(x[b, :, n])
            )


@pytest.mark.parametrize("dtype", HALF)
def test_cumulative_mean_of_half_precision_sums_in_float32(dtype):
    ones = torch.ones(1, 1, 5000, 1, dtype=dtype)  # a bfloat16 sum of ones stops at 256
    assert torch.equal(functional.cumulative_mean(ones), ones)


def test_evenly_spaced_rounds_as_linspace():
    lengths = torch.arange(1, 301)
    for anchors in range(1, 61):
        expected = [
            torch.linspace(0, length - 1, anchors, dtype=torch.int64) for length in lengths.tolist()
        ]
        assert torch.equal(functional.evenly_spaced(lengths, anchors), torch.stack(expected))


@pytest.mark.parametrize(
    ("length", "anchors"),
    [(43, 39), (29, 51), (784, 300), (4096, 320), (100_003, 977), (2**20, 960), (2**24 + 3, 64)],
)
def test_evenly_spaced_rounds_as_linspace_on_long_sequences(length, anchors):
    expected = torch.linspace(0, length - 1, anchors, dtype=torch.int64)
    assert torch.equal(functional.evenly_spaced(torch.tensor([length]), anchors)[0], expected)


@given(length=st.integers(1, 2**20), anchors=st.integers(1, 300))
def test_evenly_spaced_rises_from_the_first_token_to_the_last(length, anchors):
    (index,) = functional.evenly_spaced(torch.tensor([length]), anchors)
    assert index[0] == 0
    assert index[-1] == (length - 1 if anchors > 1 else 0)
    assert (index.diff() >= 0).all()


# --- the theorem: the primal, the dual and the SVD of K are one ----------------------------------


class Machine(NamedTuple):
    """A random kernel machine and its exact KSVD, K_ij = <f φ_q(x_i), f φ_k(x_j)> = H_e Σ H_rᵀ."""

    query: Tensor  # (N, P), φ_q
    key: Tensor  # (N, P), φ_k
    transform: Tensor  # (m, P), f(X)
    kernel: Tensor  # (N, N), K
    left_vectors: Tensor  # (N, S), H_e
    values: Tensor  # (S,), the diagonal of Σ
    right_vectors: Tensor  # (N, S), H_r
    left_weight: Tensor  # (m, S), W_e = Σ_j f φ_k(x_j) h_{r,j}ᵀ, by stationarity
    right_weight: Tensor  # (m, S), W_r = Σ_i f φ_q(x_i) h_{e,i}ᵀ

    def attend(self, left_weight: Tensor, right_weight: Tensor, backend="torch") -> KSVDTerms:
        """Run the layer with these weights; Λ = N Σ⁻¹, because the layer's energies are means.

        The paper's J sums over the tokens, with Λ = Σ⁻¹. A mean over N tokens is the same J for
        N times that Λ.
        """
        left, right = self.transform.mT @ left_weight, self.transform.mT @ right_weight
        query, key = self.query[None, None], self.key[None, None]
        combine = randn(2, left.shape[-1])
        out = primal_attention(
            query, key, left[None], right[None], combine, combine, backend=backend
        )
        return KSVDTerms(
            out.left_energy,
            out.right_energy,
            (len(self.query) / self.values).sqrt()[None],
            functional.coupling(left_weight, right_weight)[None],
            functional.coupling(left, right)[None],
        )

    def scores(self) -> tuple[Tensor, Tensor]:  # (N, S), (N, S)
        left, right = self.transform.mT @ self.left_weight, self.transform.mT @ self.right_weight
        e, r = functional.primal_scores(
            self.query[None, None], self.key[None, None], left[None], right[None]
        )
        return e[0, 0], r[0, 0]


def exact_ksvd(query: Tensor, key: Tensor, transform: Tensor, rank: int) -> Machine:
    kernel = (query @ transform.mT) @ (key @ transform.mT).mT
    left, values, right = torch.linalg.svd(kernel)
    left, values, right = left[:, :rank], values[:rank], right.mT[:, :rank]
    left_weight, right_weight = transform @ key.mT @ right, transform @ query.mT @ left
    return Machine(query, key, transform, kernel, left, values, right, left_weight, right_weight)


@pytest.fixture(params=["f = identity", "f of the data", "f orthogonal"])
def machine(request):
    transform = {
        "f = identity": torch.eye(8, dtype=torch.float64),
        "f of the data": randn(11, 8),
        "f orthogonal": torch.linalg.qr(randn(8, 8))[0],
    }[request.param]
    return exact_ksvd(randn(32, 8), randn(32, 8), transform, rank=4)


def test_primal_scores_are_singular_vectors_times_singular_values(machine):
    left, right = machine.scores()
    assert_equal(left, machine.left_vectors * machine.values, atol=1e-10)
    assert_equal(right, machine.right_vectors * machine.values, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_objective_vanishes_at_the_exact_ksvd(machine, backend):
    terms = machine.attend(machine.left_weight, machine.right_weight, backend)
    unit = machine.values.sum()  # tr(W_eᵀ W_r), what J subtracts
    assert_equal(terms.coupling[0], unit, atol=1e-10)
    assert_equal(functional.ksvd_residual(terms) / unit, torch.zeros(1).double())
    assert_equal(functional.ksvd_objective(terms) / unit**2, torch.zeros(()).double())


def test_mean_energies_need_a_scale_larger_by_the_number_of_tokens(machine):
    terms = machine.attend(machine.left_weight, machine.right_weight)
    summed = terms._replace(scale=machine.values.rsqrt()[None])  # Λ = Σ⁻¹, for the paper's sums
    expected = (1 / 32 - 1) * machine.values.sum()
    assert_equal(functional.ksvd_residual(summed)[0], expected, atol=1e-10)


def test_the_weights_of_the_exact_ksvd_are_stationary(machine):
    weights = machine.left_weight.requires_grad_(), machine.right_weight.requires_grad_()
    terms = machine.attend(*weights)
    size = machine.left_weight.detach().abs().max()
    for function in (functional.ksvd_residual, functional.ksvd_objective):  # J itself, so J² too
        gradients = torch.autograd.grad(function(terms).sum(), weights, retain_graph=True)
        for gradient in gradients:
            assert_equal(gradient / size, torch.zeros_like(gradient), atol=1e-10)


def test_objective_has_zero_gradient_in_the_scale_too(machine):
    terms = machine.attend(machine.left_weight, machine.right_weight)
    scale = terms.scale.requires_grad_()
    (residual,) = torch.autograd.grad(functional.ksvd_residual(terms).sum(), scale)
    (objective,) = torch.autograd.grad(functional.ksvd_objective(terms), scale)
    assert residual.abs().min() > 0.1  # J alone still wants other scales
    assert_equal(objective / residual, torch.zeros_like(objective), atol=1e-9)


@pytest.mark.parametrize("which", [0, 1], ids=["left", "right"])
def test_objective_is_positive_away_from_the_ksvd(machine, which):
    weights = [machine.left_weight, machine.right_weight]
    weights[which] = weights[which] * (1 + 0.3 * randn(*weights[which].shape))
    residual = functional.ksvd_residual(machine.attend(*weights)) / machine.values.sum()
    assert residual.abs() > 1e-4


def test_the_data_trace_vanishes_too_where_f_keeps_angles(machine):
    terms = machine.attend(machine.left_weight, machine.right_weight)
    residual = functional.ksvd_residual(terms, trace="data") / machine.values.sum()
    transform = machine.transform
    if torch.allclose(transform @ transform.mT, torch.eye(len(transform), dtype=torch.float64)):
        assert_equal(residual, torch.zeros(1).double())
    else:
        assert residual.abs() > 0.1


def test_the_residual_alone_is_unbounded_below():
    directions = randn(1, 5, 3)
    for size in (1.0, 10.0, 100.0):
        traced = functional.coupling(size * directions, size * directions)
        energy = torch.zeros(1, 1, 3).double()
        terms = KSVDTerms(energy, energy, torch.zeros(1, 3), traced, traced)
        assert_equal(functional.ksvd_residual(terms), -(size**2) * directions.square().sum((1, 2)))


def test_implied_kernel_is_the_truncated_svd_of_the_kernel(machine):
    left, right = machine.scores()
    implied = functional.implied_kernel(left, right, machine.values.rsqrt()[None])
    truncated = machine.left_vectors * machine.values @ machine.right_vectors.mT
    assert_equal(implied[0], truncated, atol=1e-10)
    assert (truncated - machine.kernel).abs().max() > 0.1  # four of the eight directions
    # The scale at which J of mean energies vanishes gives √(NM) times as much: N = M here.
    tokens = left.shape[-2]
    implied = functional.implied_kernel(left, right, (tokens / machine.values).sqrt()[None])
    assert_equal(implied[0] / tokens, truncated, atol=1e-10)


def test_an_output_needs_a_side():
    left, right = randn(1, 4, 3), randn(1, 4, 3)
    with pytest.raises(ValueError, match="left_combine, right_combine or both, got neither"):
        functional.primal_attention(randn(1, 1, 2, 4), randn(1, 1, 2, 4), left, right, None, None)


def test_the_dual_form_equals_the_primal_out_of_sample(machine):
    transform = machine.transform
    new_query, new_key = randn(5, 8), randn(9, 8)
    left, right = functional.primal_scores(
        new_query[None, None],
        new_key[None, None],
        (transform.mT @ machine.left_weight)[None],
        (transform.mT @ machine.right_weight)[None],
    )
    rows = new_query @ transform.mT @ (machine.key @ transform.mT).mT  # κ(x, x_j)
    columns = machine.query @ transform.mT @ (new_key @ transform.mT).mT  # κ(x_i, x)
    assert_equal(left[0, 0], rows @ machine.right_vectors, atol=1e-10)
    assert_equal(right[0, 0], columns.mT @ machine.left_vectors, atol=1e-10)


def test_a_symmetric_kernel_makes_the_two_scores_one():
    features = randn(32, 8)
    left, right = exact_ksvd(features, features, torch.eye(8).double(), rank=4).scores()
    signs = (left * right).sum(0).sign()
    assert_equal(left, right * signs, atol=1e-9)
    left, right = exact_ksvd(features, randn(32, 8), torch.eye(8).double(), rank=4).scores()
    assert F.cosine_similarity(left, right, dim=0).abs().max() < 0.9


# --- features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
def test_cosine_of_zero_is_zero_with_zero_gradient(dtype):
    x = torch.zeros(2, 3, 4, dtype=dtype, requires_grad=True)
    y = functional.cosine(x)
    (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert y.dtype == dtype
    assert not y.any()
    assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
@pytest.mark.parametrize("size", ["root", "smallest normal", "smallest"])
def test_cosine_of_tiny_vectors_is_finite(dtype, size):
    tiny, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    entry = {"root": tiny**0.5, "smallest normal": tiny, "smallest": tiny * eps}[size]
    x = torch.full((2, 4), entry, dtype=dtype, requires_grad=True)
    y = functional.cosine(x)
    (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert x.all()
    assert y.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("length", [1e-7, 1e-6, 4e-6, 1.4e-5, 3.2e-5, 1e-4])
def test_the_gradient_of_a_short_vector_stays_in_the_range_of_its_dtype(dtype, length):
    x = torch.tensor([[length, 0.0]]).to(dtype).requires_grad_()
    functional.cosine(x)[..., 1].sum().backward()  # across x, where the gradient is 1/‖x‖
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
def test_cosine_takes_the_norm_in_float32(dtype):
    x = torch.full((1, 64), 6e4, dtype=dtype)  # its square is past the end of float16
    torch.testing.assert_close(functional.cosine(x), torch.full_like(x, 0.125))


@given(size=st.floats(1e-4, 1e4), seed=st.integers(0, 2**31))
def test_cosine_forgets_the_length_and_keeps_the_direction(size, seed):
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert_equal(functional.cosine(size * x), functional.cosine(x), atol=1e-10)
    assert_equal(functional.cosine(-x), -functional.cosine(x))
    assert_equal(functional.cosine(x).norm(dim=-1), torch.ones(6).double())
    assert_equal(functional.cosine(x) * x.norm(dim=-1, keepdim=True), x)


def test_row_normalise_makes_the_kernel_average_to_one_over_valid_tokens():
    others = functional.zero_padding(randn(2, 3, 7, 4).exp(), MASK)
    features = randn(2, 3, 5, 4).exp()
    normalised = functional.row_normalise(features, others, MASK)
    kernel = normalised @ others.mT
    for b in range(2):
        assert_equal(kernel[b, :, :, MASK[b]].mean(-1), torch.ones(3, 5).double())
    assert_equal(functional.cosine(normalised), functional.cosine(features))  # a rescaling


@pytest.mark.parametrize("dtype", HALF)
def test_row_normalise_keeps_half_precision_and_sums_in_float32(dtype):
    features, others = torch.ones(1, 1, 2, 4, dtype=dtype), torch.ones(1, 1, 5000, 4, dtype=dtype)
    normalised = functional.row_normalise(features, others)
    assert normalised.dtype == dtype
    assert torch.equal(normalised, torch.full_like(features, 0.25))


def test_row_normalise_is_finite_where_every_other_token_is_padding():
    features, others = randn(2, 1, 3, 4).exp() * 100, torch.zeros(2, 1, 7, 4).double()
    normalised = functional.row_normalise(features, others, torch.zeros(2, 7, dtype=torch.bool))
    assert normalised.isfinite().all()


# --- attention equals its definition -------------------------------------------------------------


def attention_inputs(shared=False, queries=7, keys=7):  # B=2 H=3 P=5 S=4 D=6
    shape = (3, 5, 4) if shared else (2, 3, 5, 4)
    tokens = randn(2, 3, queries, 5), randn(2, 3, keys, 5)
    return *tokens, randn(*shape), randn(*shape), randn(6, 4), randn(6, 4)


def choose(inputs, side):
    """Drop the combination of the side that the output does not read."""
    *others, left_combine, right_combine = inputs
    return (
        *others,
        None if side == "right" else left_combine,
        None if side == "left" else right_combine,
    )


def attend(*inputs, **settings) -> PrimalOutput:
    return primal_attention(*inputs, **settings)


def plain_attention(*inputs, unit_norm=False):
    """Scores, joined, through one linear layer; and their mean squares over the valid tokens."""
    query, key, left, right, left_combine, right_combine, *masks = inputs
    query_mask, key_mask = masks or (None, None)
    if unit_norm:
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    left_scores, right_scores = query @ left, key @ right
    pairs = ((left_scores, left_combine), (right_scores, right_combine))
    read = [(scores, combine) for scores, combine in pairs if combine is not None]
    scores, weight = (torch.cat(parts, dim=-1) for parts in zip(*read, strict=True))
    energies = (
        mean_square(left_scores, query_mask),
        mean_square(right_scores, key_mask),
    )
    return F.linear(scores, weight), *energies


def mean_square(scores, mask):  # (B, H, N, S), (B, N) -> (B, H, S)
    if mask is None:
        return scores.square().mean(-2)
    pairs = zip(scores, mask, strict=True)
    return torch.stack([sample[:, real].square().mean(-2) for sample, real in pairs])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit_norm", [False, True], ids=["features", "unit_norm"])
@pytest.mark.parametrize("shared", [False, True], ids=["per sample", "shared"])
@pytest.mark.parametrize("side", ["both", "left", "right"])
def test_attention_is_scores_then_a_linear_map(side, shared, unit_norm, backend):
    inputs = choose(attention_inputs(shared), side)
    out = attend(*inputs, unit_norm=unit_norm, backend=backend)
    assert_equal(tuple(out), plain_attention(*inputs, unit_norm=unit_norm))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit_norm", [False, True], ids=["features", "unit_norm"])
@pytest.mark.parametrize("side", ["both", "left", "right"])
def test_attention_never_sees_padding_even_nan(side, unit_norm, backend):
    query, key, *weights = choose(attention_inputs(), side)
    expected, *energies = plain_attention(query, key, *weights, MASK, MASK, unit_norm=unit_norm)
    for tokens in (query, key):
        tokens.transpose(1, 2)[~MASK] = float("nan")
    out = attend(query, key, *weights, MASK, MASK, unit_norm=unit_norm, backend=backend)
    assert_equal(valid(out.values, MASK), valid(expected, MASK))
    assert_equal([out.left_energy, out.right_energy], energies)
    assert not valid(out.values, ~MASK).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_attention_takes_another_number_of_keys(backend):
    query, key, *weights = choose(attention_inputs(queries=4, keys=7), "left")
    query_mask = functional.mask_from_lengths(torch.tensor([4, 2]), 4)
    out = attend(query, key, *weights, query_mask, MASK, backend=backend)
    expected, *energies = plain_attention(query, key, *weights, query_mask, MASK)
    assert_equal(valid(out.values, query_mask), valid(expected, query_mask))
    assert_equal([out.left_energy, out.right_energy], energies)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_of_nothing_but_padding_gives_zeros(backend):
    inputs = attention_inputs()
    nothing = torch.zeros(2, 7, dtype=torch.bool)
    for output in attend(*inputs, nothing, nothing, unit_norm=True, backend=backend):
        assert not output.any()


def test_attention_never_forms_a_tensor_of_tokens_by_rank():
    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            shapes.update(t.shape[-2:] for t in torch.utils._pytree.tree_leaves(out))
            return out

    query, key = randn(1, 2, 31, 5, requires_grad=True), randn(1, 2, 31, 5, requires_grad=True)
    left, right, combine = randn(2, 5, 4), randn(2, 5, 4), randn(6, 4)
    for backend in BACKENDS:
        shapes: set[torch.Size] = set()
        with Shapes():
            out = attend(query, key, left, right, combine, combine, backend=backend)
            torch.autograd.grad([t.sum() for t in out], [query, key])
        assert torch.Size((31, 6)) in shapes, "the values, so the recording works"
        assert not [shape for shape in shapes if 31 in shape and 4 in shape]


@given(tokens=st.integers(1, 9), seed=st.integers(0, 2**31))
@settings(max_examples=25)
def test_attention_is_equivariant_to_token_order(tokens, seed):
    torch.manual_seed(seed)
    query, key, *weights = attention_inputs(queries=tokens, keys=tokens)
    order = torch.randperm(tokens)
    before = attend(query, key, *weights, unit_norm=True)
    after = attend(query[:, :, order], key[:, :, order], *weights, unit_norm=True)
    assert_equal(tuple(before._replace(values=before.values[:, :, order])), tuple(after))


@given(seed=st.integers(0, 2**31), size=st.floats(1e-3, 1e3), backend=st.sampled_from(BACKENDS))
@settings(max_examples=25)
def test_energies_are_never_negative(seed, size, backend):
    torch.manual_seed(seed)
    query, key, *weights = (size * t.float() for t in attention_inputs())
    out = attend(query, key, *weights, backend=backend)
    # A quadratic form of a positive matrix: below zero by rounding alone.
    assert (out.left_energy > -1e-5 * out.left_energy.max()).all()
    assert (out.right_energy > -1e-5 * out.right_energy.max()).all()


# --- attention: dtypes, backends, transforms -----------------------------------------------------


@pytest.mark.parametrize("unit_norm", [False, True], ids=["features", "unit_norm"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_errs_no_more_than_plain_pytorch(dtype, unit_norm):
    inputs = [t.to(dtype) for t in attention_inputs(queries=200, keys=200)]
    reference = plain_attention(*inputs, unit_norm=unit_norm)
    ideal = plain_attention(*(t.double() for t in inputs), unit_norm=unit_norm)
    out = attend(*inputs, unit_norm=unit_norm)
    assert out.values.dtype == dtype
    assert out.left_energy.dtype == out.right_energy.dtype == torch.float32
    for ours, plain, exact in zip(out, reference, ideal, strict=True):
        assert_as_accurate(ours, plain, exact)


@pytest.mark.parametrize("dtype", HALF)
def test_energies_of_half_precision_features_are_exact_to_float32(dtype):
    query, key, *weights = attention_inputs(queries=200, keys=200)
    query, key = query.to(dtype), key.to(dtype)
    weights = [w.float() for w in weights]  # parameters stay in float32
    out = attend(query, key, *weights)
    _, *energies = plain_attention(query.double(), key.double(), *(w.double() for w in weights))
    torch.testing.assert_close(
        [out.left_energy, out.right_energy], [e.float() for e in energies], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("unit_norm", [False, True], ids=["features", "unit_norm"])
def test_the_blocked_backend_in_float32_errs_no_more_than_the_definition(unit_norm):
    inputs = [t.float() for t in attention_inputs(queries=200, keys=200)]
    reference = attend(*inputs, unit_norm=unit_norm, backend="torch")
    ideal = plain_attention(*(t.double() for t in inputs), unit_norm=unit_norm)
    out = attend(*inputs, unit_norm=unit_norm, backend="blocked")
    for ours, plain, exact in zip(out, reference, ideal, strict=True):
        assert_as_accurate(ours, plain, exact)


@pytest.mark.parametrize("unit_norm", [False, True], ids=["features", "unit_norm"])
def test_under_autocast_the_energies_stay_in_float32(unit_norm):
    inputs = [t.float() for t in attention_inputs(queries=200, keys=200)]
    exact = attend(*inputs, unit_norm=unit_norm)
    with torch.autocast("cpu", torch.bfloat16):
        reference, *_ = plain_attention(*inputs, unit_norm=unit_norm)
        out = attend(*inputs, unit_norm=unit_norm)
    assert out.values.dtype == torch.bfloat16
    assert_as_accurate(out.values, reference, exact.values.double())
    torch.testing.assert_close(out[1:], exact[1:], rtol=1e-5, atol=0)


@pytest.fixture
def blocked_calls(monkeypatch):
    """Record the calls of the blocked implementation, which still runs."""
    calls = []

    def record(*arguments):
        calls.append(arguments)
        return original(*arguments)

    original = blocked.map_tokens
    monkeypatch.setattr(blocked, "map_tokens", record)
    return calls


def test_auto_takes_the_blocked_backend_where_it_fits(blocked_calls):
    inputs = attention_inputs()
    attend(*inputs, backend="torch")
    assert not blocked_calls
    for dtype in (torch.float32, torch.float64):
        attend(*(t.to(dtype) for t in inputs))
    assert len(blocked_calls) == 2
    attend(*inputs, backend="blocked")
    assert len(blocked_calls) == 3


def test_auto_takes_the_definition_for_half_precision_and_autocast(blocked_calls):
    inputs = [t.float() for t in attention_inputs()]
    attend(*(t.bfloat16() for t in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        attend(*inputs)
    assert not blocked_calls


@pytest.mark.parametrize("dtype", HALF)
def test_an_explicit_blocked_backend_never_falls_back(dtype):
    inputs = attention_inputs()
    with pytest.raises(ValueError, match=r"needs .* float32 or float64, got .*16 on cpu; use"):
        attend(*(t.to(dtype) for t in inputs), backend="blocked")
    with pytest.raises(
        ValueError, match=r"one dtype.*got torch.float32 on cpu, torch.float64 on cpu"
    ):
        attend(inputs[0].float(), *inputs[1:], backend="blocked")
    with pytest.raises(ValueError, match=r"on the CPU.*got torch.float64 on meta"):
        attend(*(t.to("meta") for t in inputs), backend="blocked")


def test_auto_runs_on_every_device():
    out = attend(*(t.to("meta") for t in attention_inputs()), unit_norm=True)
    assert [t.shape for t in out] == [(2, 3, 7, 6), (2, 3, 4), (2, 3, 4)]


def test_an_unknown_backend_is_named_with_a_guess():
    with pytest.raises(ValueError, match=r"backend must be one of \['auto'.*'bloked'.*'blocked'\?"):
        attend(*attention_inputs(), backend="bloked")


def test_vmap_over_samples_equals_the_batch(blocked_calls):
    query, key, left, right, *combine = attention_inputs()

    def one_sample(*parts):
        return tuple(attend(*(p[None] for p in parts), *combine, unit_norm=True))

    mapped = torch.func.vmap(one_sample)(query, key, left, right)
    assert not blocked_calls
    expected = primal_attention(query, key, left, right, *combine, unit_norm=True)
    assert_equal([m[:, 0] for m in mapped], list(expected))


def energy_and_values(*inputs, backend="auto"):
    out = attend(*inputs, unit_norm=True, backend=backend)
    return out.values.square().sum() + out.left_energy.sum() + out.right_energy.sin().sum()


def test_functional_gradients_equal_the_tape():
    inputs = [t.requires_grad_() for t in attention_inputs()]
    expected = torch.autograd.grad(energy_and_values(*inputs), inputs)
    every = tuple(range(len(inputs)))
    assert_equal(torch.func.grad(energy_and_values, argnums=every)(*inputs), expected)


# torch scripts some of its own forward-mode formulas, which it deprecates itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_forward_mode_equals_reverse_mode():
    inputs = [t.requires_grad_() for t in attention_inputs()]
    tangents = [torch.randn_like(t) for t in inputs]
    gradients = torch.autograd.grad(energy_and_values(*inputs), inputs)
    with forward_ad.dual_level():
        pairs = zip(inputs, tangents, strict=True)
        dual = energy_and_values(*(forward_ad.make_dual(t.detach(), d) for t, d in pairs))
        forward = forward_ad.unpack_dual(dual).tangent
    assert_equal(
        forward, sum((g * d).sum() for g, d in zip(gradients, tangents, strict=True)), 1e-9
    )


def test_a_vectorised_jacobian_equals_the_loop():
    query, key, *weights = attention_inputs()

    def values(query):
        return attend(query, key, *weights, unit_norm=True).values[0, 0]

    jacobian = torch.autograd.functional.jacobian
    assert_equal(jacobian(values, query, vectorize=True), jacobian(values, query))


def test_the_compiler_sees_the_definition(blocked_calls):
    inputs = attention_inputs()
    compiled = torch.compile(primal_attention, backend="eager", fullgraph=True)
    assert_equal(tuple(compiled(*inputs, unit_norm=True)), plain_attention(*inputs, unit_norm=True))
    assert not blocked_calls


# --- causal scores -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("tokens", [1, 7, 12])
def test_causal_scores_are_the_masked_kernel_times_the_coefficients(tokens, chunk):
    query, key, weight = randn(2, 3, tokens, 4), randn(2, 3, tokens, 4), randn(2, 3, tokens, 5)
    expected = torch.zeros(2, 3, tokens, 5).double()
    for n in range(tokens):
        for j in range(n + 1):
            kernel = (query[:, :, n] * key[:, :, j]).sum(-1, keepdim=True)
            expected[:, :, n] += kernel * weight[:, :, j]
    assert_equal(functional.causal_scores(query, key, weight, chunk), expected)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("read", [0, 1, 2], ids=["query", "key", "coefficients"])
def test_causal_scores_have_no_gradient_from_the_future(read, chunk):
    query, key, weight = parts = [randn(1, 2, 7, 4, requires_grad=True) for _ in range(3)]
    scores = functional.causal_scores(query, key, weight, chunk)
    (gradient,) = torch.autograd.grad(scores[:, :, 3].sum(), parts[read])
    assert not gradient[:, :, 4:].any()
    past = gradient[:, :, :4].abs().sum((0, 1, 3))
    assert (past > 0).tolist() == ([False, False, False, True] if read == 0 else [True] * 4)


def test_cumulative_means_have_no_gradient_from_the_future():
    x = randn(1, 2, 7, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(functional.cumulative_mean(x)[:, :, 3].sum(), x)
    assert_equal(gradient, torch.tensor([0.25] * 4 + [0.0] * 3)[:, None].double().expand_as(x))


@pytest.mark.parametrize("dtype", HALF)
def test_causal_scores_of_half_precision_sum_in_float32(dtype):
    query, key, weight = (torch.randn(1, 2, 300, 8).to(dtype) for _ in range(3))
    scores = functional.causal_scores(query, key, weight)
    single = functional.causal_scores(query.float(), key.float(), weight.float())
    assert torch.equal(scores, single.to(dtype))
    plain = (query @ key.mT).tril() @ weight
    exact = (query.double() @ key.double().mT).tril() @ weight.double()
    assert_as_accurate(scores, plain, exact)


# --- the objective -------------------------------------------------------------------------------


def random_terms(scale_shape=(3, 4), coupling_shape=(2, 3)):
    energies = randn(2, 3, 4).square(), randn(2, 3, 4).square()
    return KSVDTerms(*energies, randn(*scale_shape), randn(*coupling_shape), randn(*coupling_shape))


@pytest.mark.parametrize("trace", ["weights", "data"])
@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per sample"])
def test_residual_is_the_written_sum(per_sample, trace):
    terms = random_terms(coupling_shape=(2, 3) if per_sample else (3,))
    coupled = (terms.coupling if trace == "weights" else terms.data_coupling).expand(2, 3)
    expected = torch.zeros(2).double()
    for b in range(2):
        for h in range(3):
            energy = (terms.left_energy[b, h] + terms.right_energy[b, h]) @ terms.scale[h] ** 2
            expected[b] += (energy / 2 - coupled[b, h]) / 3
    assert_equal(functional.ksvd_residual(terms, trace=trace), expected)
    batch = functional.ksvd_residual(terms, trace=trace, reduction="batch")
    assert_equal(batch, expected.mean())
    assert_equal(functional.ksvd_objective(terms, trace=trace), expected.square().mean())
    objective = functional.ksvd_objective(terms, trace=trace, reduction="batch")
    assert_equal(objective, expected.mean() ** 2)


@given(seed=st.integers(0, 2**31))
def test_squaring_per_sample_costs_at_least_as_much_as_squaring_the_batch(seed):
    torch.manual_seed(seed)
    terms = random_terms()
    batch = functional.ksvd_objective(terms, reduction="batch")
    assert functional.ksvd_objective(terms, reduction="sample") >= batch - 1e-12  # Jensen
    assert batch >= 0


@given(seed=st.integers(0, 2**31))
def test_the_sign_of_the_scale_does_not_matter(seed):
    torch.manual_seed(seed)
    terms = random_terms()
    flipped = terms._replace(scale=-terms.scale)
    assert_equal(functional.ksvd_residual(flipped), functional.ksvd_residual(terms))
    left, right = randn(2, 3, 5, 4), randn(2, 3, 6, 4)
    kernel = functional.implied_kernel(left, right, terms.scale)
    assert_equal(functional.implied_kernel(left, right, -terms.scale), kernel)


def test_coupling_is_the_trace_of_the_product():
    left, right = randn(2, 3, 5, 4), randn(2, 3, 5, 4)
    expected = (left.mT @ right).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert_equal(functional.coupling(left, right), expected)


@pytest.mark.parametrize("dtype", HALF)
def test_coupling_of_half_precision_is_in_float32(dtype):
    ones = torch.ones(300, 10, dtype=dtype)
    assert functional.coupling(ones, ones).dtype == torch.float32
    assert functional.coupling(ones, ones) == 3000


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"reduction": "sampel"}, r"reduction must be .*'sample'\], got 'sampel'.* 'sample'\?"),
        ({"trace": "weight"}, r"trace must be one of \['data', 'weights'\], got 'weight'"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_choices(settings_, message):
    for function in (functional.ksvd_residual, functional.ksvd_objective):
        with pytest.raises(ValueError, match=message):
            function(random_terms(), **settings_)


# --- principal-component pursuit -----------------------------------------------------------------


def pursuit_inputs(symmetric, tokens=7):  # B=2 H=3 D=4
    key, value, query = randn(2, 3, tokens, 4), randn(2, 3, tokens, 4), randn(2, 3, tokens, 4)
    return key, value, None if symmetric else query


def pursue(*inputs, **settings) -> Tensor:
    return functional.principal_component_pursuit(*inputs, **settings)


def plain_softmax_attention(query, key, value):
    return (query @ key.mT / math.sqrt(key.shape[-1])).softmax(-1) @ value


def penalty(key, width):  # μ, (B, H, 1, 1)
    return key.shape[-2] * width / (4 * key.abs().sum((-2, -1), keepdim=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_one_iteration_is_attention_with_clipped_keys(symmetric, variant):
    key, value, query = pursuit_inputs(symmetric)
    mu = penalty(key, width=12)
    threshold = 0.5 * mu if variant == "released" else 0.5 / mu
    clipped = key.clamp(-threshold, threshold)
    assert (clipped != key).any()
    out = pursue(key, value, query, iterations=1, sparsity=0.5, variant=variant)
    reader = clipped if query is None else query
    assert_equal(out, plain_softmax_attention(reader, clipped, value))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_without_sparsity_one_iteration_is_softmax_attention(symmetric, variant):
    key, value, query = pursuit_inputs(symmetric)
    out = pursue(key, value, query, iterations=1, sparsity=INFINITY, variant=variant)
    assert_equal(out, plain_softmax_attention(key if query is None else query, key, value))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_without_sparsity_the_second_iteration_reads_the_first_output(symmetric):
    key, value, query = pursuit_inputs(symmetric)
    first = plain_softmax_attention(key if query is None else query, key, value)
    # K₂ = K ∓ Y/μ with Y/μ = K − L₁
    for variant, clean in (("released", first), ("admm", 2 * key - first)):
        out = pursue(key, value, query, iterations=2, sparsity=INFINITY, variant=variant)
        assert_equal(out, plain_softmax_attention(clean if query is None else query, clean, value))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_pursuit_is_the_written_iteration(symmetric, variant):
    key, value, query = pursuit_inputs(symmetric)
    mu, sparsity, sign = penalty(key, width=20), 0.7, {"released": -1, "admm": 1}[variant]
    threshold = sparsity * mu if variant == "released" else sparsity / mu
    low_rank = dual = torch.zeros_like(key)
    for _ in range(3):
        shifted = key - low_rank + dual / mu
        sparse = shifted.sign() * (shifted.abs() - threshold).clamp(min=0)
        clean = key - sparse + sign * dual / mu
        low_rank = plain_softmax_attention(clean if query is None else query, clean, value)
        dual = dual + mu * (key - low_rank - sparse)
    out = pursue(
        key, value, query, iterations=3, sparsity=sparsity, variant=variant, model_width=20
    )
    assert_equal(out, low_rank, atol=1e-10)


def test_a_spike_in_one_key_moves_admm_least_and_softmax_most():
    key, value = randn(1, 3, 17, 16), randn(1, 3, 17, 16)
    spiked = key.clone()
    spiked[0, :, 5, 3] += 10  # ten standard deviations

    def moved(**settings):
        before = pursue(key, value, **settings)
        after = pursue(spiked, value, **settings)
        return (after - before).abs().mean()

    softmax = moved(iterations=1, sparsity=INFINITY)
    released, admm = (moved(iterations=4, sparsity=4.0, variant=v) for v in VARIANTS)
    assert admm < released / 5
    assert released < softmax


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_masked_padding_equals_removing_it(symmetric, variant):
    key, value, query = pursuit_inputs(symmetric)
    kept = [t if t is None else t[:1, :, MASK[0]] for t in (key, value, query)]
    for tokens in (key, value, query):
        if tokens is not None:
            tokens.transpose(1, 2)[~MASK] = float("nan")
    out = pursue(key, value, query, MASK, sparsity=0.7, variant=variant)
    expected = pursue(*kept, sparsity=0.7, variant=variant)
    assert_equal(out[:1, :, MASK[0]], expected, atol=1e-10)


@given(tokens=st.integers(1, 9), seed=st.integers(0, 2**31), variant=st.sampled_from(VARIANTS))
@settings(max_examples=25)
def test_the_pursuit_is_equivariant_to_token_order(tokens, seed, variant):
    torch.manual_seed(seed)
    inputs = pursuit_inputs(symmetric=False, tokens=tokens)
    order = torch.randperm(tokens)
    shuffled = (t[:, :, order] for t in inputs if t is not None)
    assert_equal(
        pursue(*shuffled, sparsity=0.7, variant=variant),
        pursue(*inputs, sparsity=0.7, variant=variant)[:, :, order],
        atol=1e-9,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_pursuit_of_zero_keys_is_finite(dtype, variant):
    key = torch.zeros(1, 2, 5, 4, dtype=dtype, requires_grad=True)
    value = torch.randn(1, 2, 5, 4).to(dtype)
    out = pursue(key, value, variant=variant)
    (gradient,) = torch.autograd.grad(out.sum(), key)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_dropout_keeps_the_mean_of_the_pursuit():
    key, value, _ = (
        t if t is None else t[:1].expand(3000, -1, -1, -1) for t in pursuit_inputs(True)
    )
    out = pursue(key, value, dropout=0.5)
    kept = pursue(key[:1], value[:1])[0]
    assert out.std(0).max() > 0.1
    assert ((out.mean(0) - kept).abs() < 5 * out.std(0) / math.sqrt(3000) + 1e-12).all()


def test_an_unknown_variant_is_answered_with_the_choices():
    with pytest.raises(
        ValueError, match=r"variant must be one of \['admm', 'released'\], got 'svt'"
    ):
        pursue(*pursuit_inputs(True), variant="svt")


@given(x=st.floats(-10, 10), threshold=st.floats(0, 10))
def test_soft_threshold_takes_away_what_clipping_keeps(x, threshold):
    point, limit = torch.tensor(x).double(), torch.tensor(threshold).double()
    assert_equal(functional.soft_threshold(point, limit), point - point.clamp(-limit, limit))


def test_soft_threshold_is_the_proximal_map_of_the_absolute_value():
    candidates = torch.linspace(-4, 4, 8001).double()
    for point in (-3.0, -0.2, 0.0, 0.5, 2.0):
        best = candidates[((candidates - point) ** 2 / 2 + 0.7 * candidates.abs()).argmin()]
        shrunk = functional.soft_threshold(torch.tensor(point).double(), torch.tensor(0.7).double())
        assert_equal(shrunk, best, atol=1e-3)


def test_attention_weights_are_the_softmax_kernel():
    query, key, value = randn(2, 3, 5, 4), randn(2, 3, 7, 4), randn(2, 3, 7, 4)
    query_mask = functional.mask_from_lengths(torch.tensor([5, 3]), 5)
    allowed = MASK[:, None, None]
    weights = functional.attention_weights(query, key, allowed, query_mask)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    assert_equal(valid(weights @ value, query_mask), valid(expected, query_mask))
    assert not weights.masked_select(~allowed).any()
    assert not valid(weights, ~query_mask).any()
    assert_equal(valid(weights, query_mask).sum(-1), torch.ones(8, 3).double())


# --- gradients -----------------------------------------------------------------------------------


def residual(reduction, trace):
    return lambda *terms: functional.ksvd_residual(
        KSVDTerms(*terms), reduction=reduction, trace=trace
    )


def pursuit(variant, mask=None, iterations=3):
    def function(key, value, query=None):
        return pursue(key, value, query, mask, iterations=iterations, sparsity=0.7, variant=variant)

    return function


TOKENS, OTHERS = (2, 2, 7, 3), (2, 2, 7, 3)
DIRECTIONS, COMBINE = [(2, 3, 2), (2, 3, 2)], [(3, 2), (3, 2)]
ENERGIES = [(2, 2, 3), (2, 2, 3), (2, 3)]
GRADIENTS: dict[str, tuple[Callable[..., Tensor | Sequence[Tensor]], list[tuple[int, ...]]]] = {
    "zero_padding": (lambda x: functional.zero_padding(x, MASK), [TOKENS]),
    "cumulative_mean": (functional.cumulative_mean, [TOKENS]),
    "cumulative_mean, masked": (lambda x: functional.cumulative_mean(x, MASK), [TOKENS]),
    "cosine": (functional.cosine, [TOKENS]),
    "row_normalise": (
        lambda x, y: functional.row_normalise(x.exp(), y.exp(), MASK),
        [(2, 2, 3, 3), OTHERS],
    ),
    "primal_scores": (functional.primal_scores, [TOKENS, OTHERS, *DIRECTIONS]),
    "implied_kernel": (functional.implied_kernel, [TOKENS, OTHERS, (2, 3)]),
    "primal_attention": (
        lambda *inputs: attend(*inputs, unit_norm=True, backend="torch"),
        [TOKENS, OTHERS, *DIRECTIONS, *COMBINE],
    ),
    "primal_attention, masked": (
        lambda *inputs: tuple(attend(*inputs, MASK, MASK, backend="blocked")),
        [TOKENS, OTHERS, *DIRECTIONS, *COMBINE],
    ),
    "causal_scores": (
        lambda q, k, w: functional.causal_scores(q, k, w, chunk=3),
        [TOKENS, OTHERS, TOKENS],
    ),
    "coupling": (functional.coupling, [(2, 3, 2), (2, 3, 2)]),
    "ksvd_residual": (residual("sample", "weights"), [*ENERGIES, (2,), (2, 2)]),
    "ksvd_residual, batch": (residual("batch", "data"), [*ENERGIES, (2,), (2, 2)]),
    "soft_threshold": (
        lambda x, t: functional.soft_threshold(3 * x.sign() + x, t.square()),  # away from the kinks
        [TOKENS, ()],
    ),
    "released pursuit": (pursuit("released"), [(1, 2, 5, 3), (1, 2, 5, 3)]),
    "released pursuit, asymmetric": (pursuit("released"), [(1, 2, 5, 3)] * 3),
    "admm pursuit": (pursuit("admm", MASK, 2), [TOKENS, TOKENS]),
    "admm pursuit, asymmetric": (pursuit("admm"), [(1, 2, 5, 3)] * 3),
    "attention_weights": (
        lambda q, k: functional.attention_weights(q, k, MASK[:, None, None], MASK),
        [TOKENS, OTHERS],
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(name):
    function, shapes = GRADIENTS[name]
    assert gradcheck(function, [randn(*shape, requires_grad=True) for shape in shapes])

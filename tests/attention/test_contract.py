"""What every attention layer promises (attention/base.py), tried on every kind and its settings."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from primal.attention.base import Attention, AttentionOutput
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.functional import KSVDTerms, Variant, ksvd_residual, mask_from_lengths
from primal.projections import PROJECTIONS, Contextual, Shared

WIDTH, HEADS, RANK, SLOTS = 12, 2, 3, 16  # D = 6; SLOTS: most tokens of a matrix ScaledAttention
MAPS = ("cosine", "elu", "identity", "random_fourier", "positive_random")


def primal_settings() -> Iterator[dict[str, Any]]:
    """Yield each projection with each sort of map, and each other setting with each projection."""
    others: list[dict[str, Any]] = [
        *({"feature_map": name} for name in MAPS),
        {"scores": "left", "backend": "torch"},
        {"scores": "right", "feature_map": "elu"},
        {"short_convolution": 4},
        {"short_convolution": 1, "feature_map": "elu"},
        {"head_width": 4, "bias": False},
    ]
    for projection, causal, other in product(PROJECTIONS, (False, True), others):
        shows_the_future = causal and "anchors" in projection
        needs_width = projection == "anchors"  # a slice of the tokens is as wide as the features
        if not shows_the_future and not (
            needs_width and ("head_width" in other or "random" in str(other.values()))
        ):
            yield {"projection": projection, "causal": causal} | other


def name_of(chosen: dict[str, Any]) -> str:
    return "-".join(
        value if isinstance(value, str) else key if value is True else f"{key}={value}"
        for key, value in chosen.items()
        if value is not False
    )


VARIANTS: tuple[Variant, ...] = ("released", "admm")

KINDS: dict[str, Callable[[], Attention]] = {
    **{
        f"primal-{name_of(chosen)}": partial(PrimalAttention, WIDTH, HEADS, RANK, **chosen)
        for chosen in primal_settings()
    },
    "softmax": partial(SoftmaxAttention, WIDTH, HEADS),
    "softmax-causal": partial(SoftmaxAttention, WIDTH, HEADS, causal=True),
    "softmax-rectangular": partial(SoftmaxAttention, WIDTH, HEADS, head_width=4, bias=False),
    **{
        f"robust-{variant}-{'symmetric' if symmetric else 'asymmetric'}": partial(
            RobustAttention, WIDTH, HEADS, variant=variant, symmetric=symmetric, sparsity=0.2
        )
        for variant, symmetric in product(VARIANTS, (True, False))
    },
    "scaled-scalar": partial(ScaledAttention, WIDTH, HEADS),
    "scaled-matrix": partial(ScaledAttention, WIDTH, HEADS, tokens=SLOTS),
}


def build(kind: str, dtype: torch.dtype = torch.float64) -> Attention:
    """Build the layer with no parameter at a special value (the identity, zero, one)."""
    layer = KINDS[kind]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


def window(layer: Attention) -> int:
    """Return how many neighbours a short convolution reads by position."""
    convolution = layer.convolution if isinstance(layer, PrimalAttention) else None
    return 0 if convolution is None else convolution.kernel_size[0] - 1


def reads_positions(layer: Attention) -> bool:
    return window(layer) > 0 or (isinstance(layer, ScaledAttention) and layer.tokens is not None)


def is_equivariant(layer: Attention) -> bool:
    if isinstance(layer, PrimalAttention):
        mixes_alike = isinstance(layer.projection, Contextual | Shared) and not window(layer)
        return mixes_alike and not layer.causal
    return not layer.causal and not reads_positions(layer)


def takes_context(layer: Attention) -> bool:
    if isinstance(layer, PrimalAttention) and layer.scores != "left":
        return False
    return isinstance(layer, PrimalAttention | SoftmaxAttention) and not layer.causal


EXAMPLES = {kind: make() for kind, make in KINDS.items()}


def kinds(which: Callable[[Attention], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [kind for kind in KINDS if which(EXAMPLES[kind])])


every_kind = kinds(lambda _: True)
one_of_each_class = pytest.mark.parametrize(
    "kind", ["primal-anchors-cosine", "softmax", "robust-admm-symmetric", "scaled-scalar"]
)


class Measured(NamedTuple):
    """What padding must not change."""

    values: Tensor  # (valid tokens, width)
    residuals: Tensor  # (B,), J; zeros where a layer has no objective
    token_gradients: Tensor  # (valid tokens, width)
    gradients: tuple[Tensor, ...]  # one per parameter


def residuals(output: AttentionOutput) -> Tensor:  # (B,)
    if output.terms is None:
        return output.values.new_zeros(output.values.shape[0])
    return ksvd_residual(output.terms)


def loss_of(values: Tensor, residual: Tensor) -> Tensor:
    """Weigh every element of the values differently, and add the KSVD objective."""
    weights = torch.arange(values.numel(), dtype=values.dtype).cos().view_as(values)
    return (values * weights).sum() + residual.square().sum()


def measure(layer: Attention, tokens: Tensor, values: Tensor, residual: Tensor) -> Measured:
    # No gradient may be missing: a parameter that is never used stops DDP.
    found = torch.autograd.grad(loss_of(values, residual), [tokens, *layer.parameters()])
    return Measured(values.detach(), residual.detach(), found[0], found[1:])


def run(layer: Attention, tokens: Tensor, mask: Tensor, fill: float) -> Measured:
    """Lay the valid tokens, one sequence after the other, out as the mask says; run the layer."""
    tokens = tokens.detach().requires_grad_()
    x = tokens.new_full((*mask.shape, WIDTH), fill).index_put((mask,), tokens)
    output = layer(x, mask=mask)
    assert torch.equal(output.values[~mask], torch.zeros_like(x[~mask]))
    return measure(layer, tokens, output.values[mask], residuals(output))


def run_alone(layer: Attention, tokens: Tensor, mask: Tensor) -> Measured:
    """Run the layer on each sequence by itself, without padding and without a mask."""
    tokens = tokens.detach().requires_grad_()
    outputs = [layer(sequence[None]) for sequence in tokens.split(mask.sum(1).tolist())]
    values = torch.cat([output.values[0] for output in outputs])
    return measure(layer, tokens, values, torch.cat([residuals(output) for output in outputs]))


def assert_padding_changes_nothing(layer: Attention, mask: Tensor, fill: float) -> None:
    tokens = torch.randn(int(mask.sum()), WIDTH, dtype=torch.float64)
    padded, alone = run(layer, tokens, mask, fill), run_alone(layer, tokens, mask)
    torch.testing.assert_close(padded, alone, rtol=1e-9, atol=1e-11)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- shapes --------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("tokens", [1, 2, 3, SLOTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_dtypes(kind, tokens, dtype):
    layer, x = build(kind, dtype), torch.randn(2, tokens, WIDTH, dtype=dtype)
    values, terms = layer(x)
    assert values.shape == x.shape
    assert values.dtype == dtype
    assert values.isfinite().all()
    assert (terms is not None) == isinstance(layer, PrimalAttention)
    if terms is not None:
        assert isinstance(terms, KSVDTerms)
        assert terms.left_energy.shape == terms.right_energy.shape == (2, HEADS, RANK)
        assert terms.scale.shape == (HEADS, RANK)
        assert terms.coupling.shape[-1:] == terms.data_coupling.shape[-1:] == (HEADS,)
        precise = torch.promote_types(dtype, torch.float32)
        assert {t.dtype for t in (*terms[:2], *terms[3:])} == {precise}
        assert ksvd_residual(terms).shape == (2,)


@every_kind
def test_reset_parameters_renews_every_parameter(kind):
    layer = build(kind)
    renewed = []
    for _ in range(2):
        for parameter in layer.parameters():
            nn.init.constant_(parameter, float("nan"))
        torch.manual_seed(5)
        layer.reset_parameters()
        renewed.append(copy.deepcopy(list(layer.parameters())))
    torch.testing.assert_close(*renewed, rtol=0, atol=0)  # and none is NaN


# --- padding -------------------------------------------------------------------------------------

LENGTHS = torch.tensor([5, 1, 9])
LAYOUTS = {
    "right": mask_from_lengths(LENGTHS, 11),
    "left": mask_from_lengths(LENGTHS, 11).flip(1),
    "ends": mask_from_lengths(LENGTHS, 11).roll(1, dims=1),
    "holes": torch.tensor([[0, 1, 1, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0, 1]])
    > 0,
}


@every_kind
@pytest.mark.parametrize("fill", [float("nan"), 30.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_changes_nothing(kind, layout, fill):
    layer = build(kind)
    if isinstance(layer, ScaledAttention) and layer.tokens is not None and layout != "right":
        pytest.skip("a matrix over the positions")
    if window(layer) and layout == "holes":
        pytest.skip("a convolution reads its neighbours by position")
    assert_padding_changes_nothing(layer, LAYOUTS[layout], fill)


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    row = st.lists(st.booleans(), min_size=tokens, max_size=tokens).filter(any)
    return torch.tensor([draw(row) for _ in range(batch)])


@every_kind
@given(mask=masks())
@settings(max_examples=8)
def test_any_mask_leaves_the_valid_tokens_alone(kind, mask):
    layer = build(kind)
    if reads_positions(layer):
        mask = mask_from_lengths(mask.sum(1), mask.shape[1])
    assert_padding_changes_nothing(layer, mask, fill=float("nan"))


@every_kind
def test_padding_receives_no_gradient(kind):
    layer, mask, x = build(kind), LAYOUTS["right"], randn(3, 11, WIDTH).requires_grad_()
    output = layer(x, mask=mask)
    (gradient,) = torch.autograd.grad(loss_of(output.values, residuals(output)), x)
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
    assert gradient[mask].abs().sum(-1).min() > 0


@every_kind
def test_lengths_say_what_a_mask_says(kind):
    layer, x = build(kind), randn(3, 11, WIDTH)
    expected = layer(x, mask=LAYOUTS["right"])
    for lengths in (LENGTHS, LENGTHS.int()):
        torch.testing.assert_close(layer(x, mask=lengths), expected, rtol=0, atol=0)


@kinds(takes_context)
def test_padding_of_a_context_changes_nothing(kind):
    layer, mask = build(kind), LAYOUTS["holes"]
    x, context = randn(3, 4, WIDTH), randn(3, 7, WIDTH)
    query_mask = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1]]) > 0
    padded = layer(
        x.masked_fill(~query_mask[..., None], float("nan")),
        context.masked_fill(~mask[..., None], float("nan")),
        mask=query_mask,
        context_mask=mask,
    )
    for b in range(3):
        alone = layer(x[b, query_mask[b]][None], context[b, mask[b]][None])
        torch.testing.assert_close(padded.values[b, query_mask[b]], alone.values[0])
        torch.testing.assert_close(residuals(padded)[b], residuals(alone)[0])
    assert torch.equal(padded.values[~query_mask], torch.zeros_like(x[~query_mask]))


# --- zero tokens ---------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("zeros", [slice(2, 3), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("biases", ["biases", "no-biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_tokens_give_finite_outputs_and_gradients(kind, zeros, biases, dtype):
    layer, x = KINDS[kind]().to(dtype), torch.randn(2, 5, WIDTH, dtype=dtype)
    if biases == "no-biases":  # then q and k of a zero token are exactly zero
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
    x[:, zeros] = 0
    assert_finite(layer, x)


def assert_finite(layer: Attention, x: Tensor) -> None:
    """Say that outputs and gradients are finite; of J, since J² can leave the range of float16."""
    x.requires_grad_()
    output = layer(x)
    residual = residuals(output)
    (output.values.float().sum() + residual.sum()).backward()
    assert output.values.isfinite().all()
    assert residual.isfinite().all()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@every_kind
@pytest.mark.parametrize("scale", [1e-4, 1e2])
def test_small_and_large_tokens_give_finite_outputs_and_gradients(kind, scale):
    assert_finite(build(kind, torch.float32), scale * torch.randn(2, 9, WIDTH))


# --- order ---------------------------------------------------------------------------------------


@kinds(is_equivariant)
def test_outputs_follow_the_order_of_the_tokens(kind):
    layer, x, order = build(kind), randn(2, 9, WIDTH), torch.randperm(9)
    before, after = layer(x), layer(x[:, order])
    torch.testing.assert_close(after.values, before.values[:, order], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(residuals(after), residuals(before))


LONG = 70  # longer than a chunk of the recurrence (64)


@kinds(lambda layer: layer.causal)
@pytest.mark.parametrize("masked", [False, True])
def test_the_future_has_exactly_no_influence(kind, masked):
    layer, x = build(kind), randn(2, LONG, WIDTH).requires_grad_()
    mask = torch.rand(2, LONG) < 0.8 if masked else None
    values = layer(x, mask=mask).values
    for now in (0, 1, 30, 63, 64, LONG - 2):
        (gradient,) = torch.autograd.grad(values[:, now].sum(), x, retain_graph=True)
        assert torch.equal(gradient[:, now + 1 :], torch.zeros_like(gradient[:, now + 1 :]))
        if mask is None:
            assert gradient[:, : now + 1].abs().sum(-1).min() > 0  # and all the past has some


def decode(layer: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    state, values = layer.init_state(x.shape[0]), []
    for n in range(x.shape[1]):
        value, state = layer.step(x[:, n], state, mask=None if mask is None else mask[:, n])
        values.append(value)
    return torch.stack(values, dim=1)


@kinds(lambda layer: layer.causal)
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_decoding_equals_the_parallel_form(kind, padding):
    layer, x = build(kind), randn(3, LONG, WIDTH)
    mask = {
        "none": None,
        "right": mask_from_lengths(torch.tensor([3, 50, LONG]), LONG),
        "left": mask_from_lengths(torch.tensor([3, 50, LONG]), LONG).flip(1),
        "holes": torch.rand(3, LONG) < 0.7,
    }[padding]
    if window(layer) and padding == "holes":
        pytest.skip("a convolution reads its neighbours by position")
    x = x if mask is None else x.masked_fill(~mask[..., None], float("nan"))
    expected = layer(x, mask=mask).values
    torch.testing.assert_close(decode(layer, x, mask), expected, rtol=1e-12, atol=1e-12)


@kinds(lambda layer: layer.causal)
def test_a_step_leaves_the_old_state_as_it_was(kind):
    layer, x = build(kind), randn(2, 3, WIDTH)
    state = layer.init_state(2)
    for n in range(3):
        before = [t if t is None else t.clone() for t in state]
        _, after = layer.step(x[:, n], state)
        torch.testing.assert_close(list(state), before, rtol=0, atol=0)
        state = after


@kinds(lambda layer: layer.causal and isinstance(layer, PrimalAttention))
def test_the_state_does_not_grow(kind):
    layer = build(kind)
    state = layer.init_state(2)
    sizes = [t if t is None else t.shape for t in state]
    for x in randn(20, 2, WIDTH):
        _, state = layer.step(x, state)
        assert [t if t is None else t.shape for t in state] == sizes


@kinds(lambda layer: layer.causal)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_keeps_the_dtype(kind, dtype):
    layer = build(kind, dtype)
    state = layer.init_state(2)
    shapes = [t.dtype for t in state if t is not None]
    value, state = layer.step(torch.randn(2, WIDTH, dtype=dtype), state)
    assert value.dtype == dtype
    assert [t.dtype for t in state if t is not None] == shapes


# --- gradients and copies ------------------------------------------------------------------------


@every_kind
def test_gradients(kind):
    layer, mask = build(kind), torch.tensor([[True, True, True], [True, True, False]])
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def outputs(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, parameters, strict=True))
        output = functional_call(layer, given, (x,), {"mask": mask})
        return output.values, residuals(output)

    x = randn(2, 3, WIDTH).requires_grad_()
    assert gradcheck(outputs, (x, *parameters), fast_mode=True, atol=1e-6)


def by_state_dict(layer: Attention, kind: str) -> Attention:
    other = build(kind)
    other.load_state_dict(layer.state_dict(), strict=True)
    return other


COPIES: dict[str, Callable[[Attention, str], Attention]] = {
    "deepcopy": lambda layer, _: copy.deepcopy(layer),
    "pickle": lambda layer, _: pickle.loads(pickle.dumps(layer)),
    "state_dict": by_state_dict,
}


@every_kind
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_the_same_layer(kind, how):
    layer, x = build(kind), randn(2, 5, WIDTH)
    output = layer(x)
    loss_of(output.values, residuals(output)).backward()  # what a layer keeps of it must not hinder
    twin = COPIES[how](layer, kind)
    torch.testing.assert_close(twin(x), output, rtol=0, atol=0)
    assert not {p.data_ptr() for p in twin.parameters()} & {
        p.data_ptr() for p in layer.parameters()
    }


@every_kind
def test_activation_checkpointing_changes_nothing(kind):
    layer, x = build(kind), randn(2, 7, WIDTH).requires_grad_()
    mask = torch.tensor([7, 4])
    runs = [
        layer(x, mask=mask),
        checkpoint(layer, x, mask=mask, use_reentrant=False),
    ]
    plain, kept = (measure(layer, x, output.values, residuals(output)) for output in runs)
    torch.testing.assert_close(kept, plain, rtol=0, atol=0)


@every_kind
def test_two_forwards_may_precede_a_backward(kind):
    layer, (first, second) = build(kind), randn(2, 2, 7, WIDTH)
    losses = [loss_of(output.values, residuals(output)) for output in map(layer, (first, second))]
    together = torch.autograd.grad(losses[0] + losses[1], list(layer.parameters()))
    apart = [
        torch.autograd.grad(loss_of(output.values, residuals(output)), list(layer.parameters()))
        for output in map(layer, (first, second))
    ]
    torch.testing.assert_close(together, tuple(a + b for a, b in zip(*apart, strict=True)))


@every_kind
def test_a_frozen_layer_gives_the_same(kind):
    layer, x = build(kind).eval(), randn(2, 7, WIDTH)
    expected = layer(x)
    layer.requires_grad_(False)
    for context in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            output = layer(x)
        torch.testing.assert_close(output, expected)
        assert not output.values.requires_grad
    x.requires_grad_()
    output = layer(x)
    loss_of(output.values, residuals(output)).backward()
    assert x.grad is not None


# --- half precision ------------------------------------------------------------------------------


def rounding_error(
    layer: Attention, x: Tensor, ideal: AttentionOutput, dtype: torch.dtype
) -> list[Tensor]:
    """Return how far the outputs move if nothing but the input and the weights is rounded."""
    rounded = copy.deepcopy(layer).to(dtype).double()
    return errors(rounded(x.to(dtype).double()), ideal)


def errors(output: AttentionOutput, ideal: AttentionOutput) -> list[Tensor]:
    pairs = [(output.values, ideal.values)]
    if output.terms is not None and ideal.terms is not None:
        pairs += zip(output.terms, ideal.terms, strict=True)
    return [(got.double() - right).norm() for got, right in pairs]


def assert_little_more_than_rounding(
    output: AttentionOutput, layer: Attention, x: Tensor, dtype: torch.dtype
) -> None:
    assert output.values.dtype == dtype
    ideal = layer(x)
    rounding = rounding_error(layer, x, ideal, dtype)
    for error, unavoidable in zip(errors(output, ideal), rounding, strict=True):
        assert error <= 3 * unavoidable + 1e-7


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_little_more_than_its_rounding_of_the_input(kind, dtype):
    layer, x = build(kind), randn(8, SLOTS, WIDTH)
    output = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert_little_more_than_rounding(output, layer, x, dtype)


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Let PyTorch repeat what it warns of once in a process, so that each test hears it."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@every_kind
@pytest.mark.usefixtures("every_warning")
def test_autocast_errs_little_more_than_its_rounding_of_the_input(kind):
    layer, x = build(kind), randn(8, SLOTS, WIDTH)
    trained = copy.deepcopy(layer).float()
    with torch.autocast("cpu", torch.bfloat16):
        output = trained(x.float())
        loss = loss_of(output.values.float(), residuals(output))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.parameters())
    assert output.terms is None or {t.dtype for t in output.terms} == {torch.float32}
    assert_little_more_than_rounding(output, layer, x, torch.bfloat16)


# --- the kernel matrix ---------------------------------------------------------------------------


@every_kind
def test_the_kernel_matrix(kind):
    layer, mask, x = build(kind), LAYOUTS["right"], randn(3, 11, WIDTH)
    kernel = layer.kernel(x.masked_fill(~mask[..., None], float("nan")), mask=mask)
    assert kernel.shape == (3, HEADS, 11, 11)
    valid = (mask[:, :, None] & mask[:, None, :])[:, None].expand_as(kernel)
    if layer.causal:
        valid = valid & torch.ones(11, 11, dtype=torch.bool).tril()
    assert torch.equal(kernel[~valid], torch.zeros_like(kernel[~valid]))
    assert kernel[valid].abs().min() > 0
    for b, length in enumerate(LENGTHS):  # padding changes nothing here either
        alone = layer.kernel(x[b, :length][None])
        torch.testing.assert_close(kernel[b, :, :length, :length], alone[0])
    if isinstance(layer, PrimalAttention):
        left, right = layer.primal_scores(x, mask=mask)
        expected = torch.einsum("bhns, hs, bhms -> bhnm", left, layer.scale.square(), right)
        expected = expected / mask.sum(1)[:, None, None, None]  # Λ is that of mean energies
        torch.testing.assert_close(kernel[valid], expected[valid])
    else:
        torch.testing.assert_close(
            kernel.sum(-1), mask[:, None].expand(-1, HEADS, -1).double(), rtol=0, atol=1e-12
        )


# --- wrong input ---------------------------------------------------------------------------------


def says(*parts: str) -> str:
    """Return the pattern of a message with these parts: what is required, given, and would do."""
    return "(?s)" + ".*".join(map(re.escape, parts))


def some(*false: int) -> Tensor:  # (2, 5), bool, False in these rows
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[list(false)] = False
    return mask


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "no-batch": ({"x": randn(5, 12)}, says("(batch, tokens, 12)", "got (5, 12)", "unsqueeze")),
    "width": ({"x": randn(2, 5, 7)}, says("(batch, tokens, 12)", "got (2, 5, 7)", "project")),
    "empty": (
        {"x": randn(2, 0, 12)},
        says("at least one token", "got (2, 0, 12)", "give at least"),
    ),
    "integers": (
        {"x": torch.ones(2, 5, 12, dtype=torch.int64)},
        says("floating point", "got torch.int64", "x.float()"),
    ),
    "mask-dtype": (
        {"mask": torch.ones(2, 5)},
        says("mask must be bool", "(2, 5)", "got torch.float32 (2, 5)", "mask.bool()"),
    ),
    "mask-shape": (
        {"mask": some()[:, :4]},
        says("mask must be bool", "(2, 5)", "got torch.bool (2, 4)", "convert"),
    ),
    "mask-empty": ({"mask": some(1)}, says("at least one token", "got none in row(s) [1]", "drop")),
    "lengths-batch": ({"mask": torch.ones(3).long()}, says("(2,)", "got torch.int64 (3,)")),
    "lengths-long": (
        {"mask": torch.tensor([5, 6])},
        says("at most the 5 tokens", "got 6", "pad x further, or cut"),
    ),
    "lengths-zero": ({"mask": torch.tensor([5, 0])}, says("at least one token", "row(s) [1]")),
    "mask-of-nothing": (
        {"context_mask": some()},
        says("context_mask needs a context", "got none", "mask="),
    ),
}


@one_of_each_class
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", ["forward", "kernel"])
def test_wrong_input(kind, wrong, method):
    arguments, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        getattr(build(kind), method)(**{"x": randn(2, 5, WIDTH)} | arguments)


@kinds(lambda layer: not layer.causal)
def test_only_causal_layers_decode(kind):
    layer = build(kind)
    name = type(layer).__name__
    for call in (lambda: layer.init_state(2), lambda: layer.step(randn(2, WIDTH), None)):
        with pytest.raises(ValueError, match=says(name, "step by step", "causal=True")):
            call()


@kinds(lambda layer: layer.causal)
def test_wrong_steps(kind):
    layer = build(kind)
    state = layer.init_state(2)
    for x in (randn(2, 1, WIDTH), randn(3, WIDTH), randn(2, WIDTH + 1)):
        with pytest.raises(ValueError, match=says("(2, 12)", f"got {tuple(x.shape)}", "call it")):
            layer.step(x, state)


@pytest.mark.parametrize("kind", ["primal-shared-causal-scores", "softmax-causal"])
def test_causal_layers_take_no_context(kind):
    layer = (
        PrimalAttention(WIDTH, HEADS, RANK, causal=True, scores="left").double()
        if kind.startswith("primal")
        else build(kind)
    )
    with pytest.raises(ValueError, match=says("causal layer takes no context", "causal=False")):
        layer(randn(2, 5, WIDTH), randn(2, 5, WIDTH))


@pytest.mark.parametrize("make", [SoftmaxAttention, RobustAttention, ScaledAttention])
def test_wrong_sizes(make):
    with pytest.raises(
        ValueError, match=says("multiple of heads", "width=10 and heads=4", "8 and 12")
    ):
        make(10, 4)
    with pytest.raises(ValueError, match=says("heads must be a positive integer", "got 0", "1")):
        make(10, 0)

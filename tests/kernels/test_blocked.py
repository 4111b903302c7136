"""The blocked token map equals its definition: outputs, gradients, gradients of gradients."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import deterministic

from primal import functional
from primal.kernels import blocked

UNIT_NORM = pytest.mark.parametrize("unit_norm", [False, True], ids=["features", "unit_norm"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 1)  # the least a block holds: 16 tokens


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory():
    """Fill what torch.empty returns with NaN, so that reading it before writing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_uninitialised_memory_is_nan_here():
    like = torch.zeros(2)
    assert deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    for empty in (torch.empty(9), like.new_empty(9), torch.empty_like(like)):
        assert empty.isnan().all()


class Inputs(NamedTuple):
    query: Tensor  # (B, H, N, P)
    key: Tensor  # (B, H, M, P)
    query_map: Tensor | None  # (B, H, P, D)
    key_map: Tensor | None  # (B, H, P, D)


def make_inputs(batch=2, heads=3, tokens=33, keys=None, features=5, width=4):
    shape, keys = (batch, heads), tokens if keys is None else keys
    return Inputs(
        torch.randn(*shape, tokens, features, dtype=torch.float64),
        torch.randn(*shape, keys, features, dtype=torch.float64),
        torch.randn(*shape, features, width, dtype=torch.float64),
        torch.randn(*shape, features, width, dtype=torch.float64),
    )


def ours(*inputs, unit_norm=False):
    query, key, query_map, key_map = inputs
    return blocked.map_tokens(query, key, query_map, key_map, unit_norm, functional.map_tokens)


def definition(*inputs, unit_norm=False):
    query, key, query_map, key_map = inputs
    return functional.map_tokens(query, key, query_map, key_map, unit_norm)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_outputs_and_gradients(inputs, unit_norm, used=(0, 1, 2)):
    """``used`` are the outputs that get a gradient."""
    inputs = Inputs(*(None if t is None else t.requires_grad_() for t in inputs))
    leaves = [t for t in inputs if t is not None]
    out, expected = ours(*inputs, unit_norm=unit_norm), definition(*inputs, unit_norm=unit_norm)
    cotangents = [torch.randn_like(expected[i]) for i in used]
    found, wanted = (
        torch.autograd.grad([outputs[i] for i in used], leaves, cotangents, allow_unused=True)
        for outputs in (out, expected)
    )
    assert_close(out, expected)
    for gradient, true in zip(found, wanted, strict=True):
        if gradient is None or true is None:  # "no gradient" is a gradient of zero
            assert not any(g.any() for g in (gradient, true) if g is not None)
        else:
            assert_close(gradient, true)


@UNIT_NORM
@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 5, 5, 3, 4),
        (1, 1, 1, 1, 1, 1),
        (2, 3, 1, 1, 5, 4),
        (1, 2, 7, 7, 3, 9),
        (3, 1, 16, 16, 2, 2),
        (2, 2, 17, 17, 4, 3),
        (2, 3, 33, 33, 5, 4),
        (1, 1, 130, 130, 8, 1),
    ],
    ids=str,
)
def test_equals_the_definition(shape, unit_norm):
    assert_same_outputs_and_gradients(make_inputs(*shape), unit_norm)


@UNIT_NORM
@pytest.mark.parametrize(("tokens", "keys"), [(33, 33), (7, 33), (33, 7), (1, 20)])
@pytest.mark.parametrize("missing", ["query_map", "key_map"])
def test_a_missing_map_leaves_the_gram_matrix_of_its_side(missing, tokens, keys, unit_norm):
    inputs = make_inputs(tokens=tokens, keys=keys)
    assert_same_outputs_and_gradients(inputs._replace(**{missing: None}), unit_norm)


@UNIT_NORM
@pytest.mark.parametrize("missing", [None, "query_map", "key_map"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_outputs_that_nothing_reads_cost_no_gradient(used, missing, unit_norm):
    inputs = make_inputs()
    if missing is not None:
        inputs = inputs._replace(**{missing: None})
    assert_same_outputs_and_gradients(inputs, unit_norm, used)


@UNIT_NORM
def test_a_gram_matrix_that_nothing_reads_gets_no_gradient(unit_norm):
    inputs = [t.requires_grad_() for t in make_inputs()]
    _, query_gram, _ = ours(*inputs, unit_norm=unit_norm)
    gradients = torch.autograd.grad(query_gram.sum(), inputs, allow_unused=True)
    assert [g is None for g in gradients] == [False, True, True, True]


@UNIT_NORM
@pytest.mark.parametrize("wanted", range(4))
def test_inputs_that_need_no_gradient_are_left_alone(wanted, unit_norm):
    inputs = make_inputs()
    inputs[wanted].requires_grad_()
    found, true = (
        torch.autograd.grad([o.sin().mean() for o in outputs if o.requires_grad], inputs[wanted])
        for outputs in (
            ours(*inputs, unit_norm=unit_norm),
            definition(*inputs, unit_norm=unit_norm),
        )
    )
    assert_close(found, true)


def by_token(x):
    """Lay the heads of a token side by side, as a linear layer's output does."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x):
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def column_major(x):
    return x.mT.contiguous().mT


def heads_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def expanded(x):  # stride 0 over samples
    return x[:1].expand(*x.shape)


def over_heads(x):  # stride 0 over samples and heads
    return x[:1, :1].expand(*x.shape)


LAYOUTS = [by_token, every_other, column_major, heads_first, expanded, over_heads]


@UNIT_NORM
@pytest.mark.parametrize("part", range(4), ids=Inputs._fields)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_is_read_rightly(layout, part, unit_norm):
    inputs = list(make_inputs())
    inputs[part] = layout(inputs[part].detach())
    assert not inputs[part].is_contiguous()
    assert_same_outputs_and_gradients(Inputs(*inputs), unit_norm)


@UNIT_NORM
def test_gradients_of_every_memory_layout_are_read_rightly(unit_norm):
    inputs = [t.requires_grad_() for t in make_inputs()]
    out, expected = ours(*inputs, unit_norm=unit_norm), definition(*inputs, unit_norm=unit_norm)
    for layout in LAYOUTS:
        cotangents = [layout(torch.randn_like(o)) for o in expected]
        found, true = (
            torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True)
            for outputs in (out, expected)
        )
        assert_close(found, true)


def test_joining_the_heads_of_the_values_copies_nothing():
    inputs = [t.requires_grad_() for t in make_inputs()]
    values, *_ = ours(*inputs)
    assert values.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(values.sum(), inputs[0])
    assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-9])
def test_vectors_without_a_direction_give_zero_and_take_zero_gradient(size):
    inputs = make_inputs()
    for tokens in (inputs.query, inputs.key):
        tokens[0, 1, [0, 5, 16, 32]] = size
    assert_same_outputs_and_gradients(inputs, unit_norm=True)
    values, *_ = ours(*inputs, unit_norm=True)
    gradients = torch.autograd.grad(values.sum(), [inputs.query, inputs.key])
    for result in (values, *gradients):
        assert not result[0, 1, [0, 5, 16, 32]].any()
        assert result[0, 1, 1].any()


def test_the_result_does_not_depend_on_the_size_of_a_block(monkeypatch):
    inputs = make_inputs(tokens=100)
    expected = ours(*inputs, unit_norm=True)
    for elements in (2 * 3 * 5 * 40, 2**18):  # blocks of 40, and all at once
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", elements)
        assert_close(ours(*inputs, unit_norm=True), expected)


# --- gradients -----------------------------------------------------------------------------------


@UNIT_NORM
@pytest.mark.parametrize("missing", [None, 2, 3], ids=["both maps", "no query_map", "no key_map"])
def test_gradient_and_its_gradient(missing, unit_norm):
    inputs = list(make_inputs(batch=1, heads=2, tokens=17, features=2, width=2))
    present = [t.requires_grad_() for i, t in enumerate(inputs) if i != missing]

    def function(*tensors):
        given = iter(tensors)
        parts = (None if i == missing else next(given) for i in range(4))
        return ours(*parts, unit_norm=unit_norm)

    assert gradcheck(function, present, check_batched_grad=True, fast_mode=True)
    assert gradgradcheck(function, present, fast_mode=True)


@UNIT_NORM
def test_every_entry_of_the_gradient(unit_norm):
    inputs = [t.requires_grad_() for t in make_inputs(1, 2, tokens=3, features=2, width=2)]
    assert gradcheck(partial(ours, unit_norm=unit_norm), inputs)
    assert gradgradcheck(partial(ours, unit_norm=unit_norm), inputs)


def one_tensor(x):
    return x, x, x.mT @ x / 20, x.mT @ x / 20


def key_from_query(x):
    key = x * x.sigmoid()
    return x, key, x.mT @ key / 20, key.mT @ key / 20


def maps_from_features(x):  # contextual directions read the features that they are applied to
    query, key = x.sin(), x.cos()
    return query, key, key.mT @ x / 20, query.mT @ x / 20


@UNIT_NORM
@pytest.mark.parametrize("compose", [one_tensor, key_from_query, maps_from_features])
def test_inputs_made_of_one_another_are_not_counted_twice(compose, unit_norm):
    x = torch.randn(1, 2, 20, 3, dtype=torch.float64, requires_grad=True)

    def gradients(function, create_graph):
        total = sum(o.square().mean() for o in function(*compose(x)))
        (first,) = torch.autograd.grad(total, x, create_graph=create_graph)
        return (first, *torch.autograd.grad(first.sin().sum(), x)) if create_graph else (first,)

    first, second = gradients(partial(definition, unit_norm=unit_norm), create_graph=True)
    for create_graph, expected in ((False, (first,)), (True, (first, second))):
        found = gradients(partial(ours, unit_norm=unit_norm), create_graph)
        assert_close(found, expected, tolerance=1e-11)


def test_float32_errs_no_more_than_the_definition():
    inputs = [t.float() for t in make_inputs(tokens=200)]

    def run(function, tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        outputs = function(*tensors)
        gradients = torch.autograd.grad([o.square().sum() for o in outputs], tensors)
        return [*outputs, *gradients]

    plain = run(partial(definition, unit_norm=True), inputs)
    exact = run(partial(definition, unit_norm=True), [t.double() for t in inputs])
    for mine, theirs, ideal in zip(
        run(partial(ours, unit_norm=True), inputs), plain, exact, strict=True
    ):
        allowed = 2 * (theirs - ideal).abs().max() + 1e-7 * ideal.abs().max()
        assert (mine - ideal).abs().max() <= allowed

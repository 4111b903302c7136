"""A feed-forward network's parts on a CPU are what PyTorch computes, faster."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from primal import functional
from primal.kernels import dense
from primal.layers import Dropout, Linear

SHAPES = [(4, 70, 32), (300, 32), (2, 3, 50, 32)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    drawn = (torch.randn(s, dtype=dtype) for s in (shape, (48, shape[-1]), (48,)))
    return [t.requires_grad_() for t in drawn]


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_and_its_gradients(shape):
    given = inputs(shape)
    upstream = torch.randn(*shape[:-1], 48)
    assert dense.linear_fits(given[0])
    mine, exact = functional.linear(*given), F.linear(*(t.double() for t in given))
    torch.testing.assert_close(mine, exact.float(), rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(mine, given, upstream)
    expected = torch.autograd.grad(exact, given, upstream.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_linear_is_the_fast_one_where_it_fits_and_torchs_elsewhere(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("taken")

    monkeypatch.setattr(dense, "linear", fail)
    with pytest.raises(AssertionError, match="taken"):
        functional.linear(*inputs((300, 32)))
    functional.linear(*inputs((300, 32), torch.float64))
    functional.linear(*inputs((2, 32)))  # its set-up would cost more than it saves
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(*inputs((300, 32))).dtype == torch.bfloat16


def test_linear_of_parts_that_are_no_own_memory():
    x = torch.randn(32, 70, 6)[..., ::2].permute(2, 1, 0)  # (3, 70, 32), any strides
    _, weight, bias = inputs((300, 32))
    torch.testing.assert_close(
        dense.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4
    )


def test_linear_differentiates_twice_and_under_vmap():
    given = inputs((300, 32))
    for loss in (functional.linear(*given), F.linear(*given)):
        (once,) = torch.autograd.grad(loss.sin().sum(), given[0], create_graph=True)
        given.append(torch.autograd.grad(once.square().sum(), given[1])[0])
    torch.testing.assert_close(given[-2], given[-1], rtol=1e-3, atol=1e-2)
    out = functional.linear(*given[:3])
    several = torch.randn(2, *out.shape)
    (batched,) = torch.autograd.grad(out, given[0], several, is_grads_batched=True)
    torch.testing.assert_close(batched, several @ given[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_of_linear_gets_no_gradient(frozen):
    given = inputs((300, 32))
    given[frozen].requires_grad_(False)
    functional.linear(*given).sum().backward()
    assert [t.grad is None for t in given] == [i == frozen for i in range(3)]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_drops_as_often_and_keeps_the_mean(probability):
    x = torch.ones(1001, 999)
    dropped = functional.dropout(x, probability)
    rate = (dropped == 0).double().mean().item()
    spread = (probability * (1 - probability) / x.numel()) ** 0.5
    assert rate == pytest.approx(probability, abs=5 * spread + 1e-5)
    assert dropped.double().mean().item() == pytest.approx(1.0, abs=5 * spread / (1 - probability))
    # Neighbours share 64 random bits; what falls on one says nothing about the next.
    fate = (dropped.flatten()[:999_996].view(-1, 4) == 0).double()
    together = fate.T.corrcoef() - torch.eye(4)
    assert together.abs().max() < 5 / 500


def test_dropout_differentiates_as_it_multiplies():
    x = torch.randn(50, 20, requires_grad=True)
    dropped = functional.dropout(x, 0.4)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(gradient * x, dropped)


def test_dropout_of_nothing_and_of_all():
    x = torch.randn(9, 7)
    assert torch.equal(functional.dropout(x, 0.0), x)
    assert functional.dropout(x, 1.0).abs().max() == 0
    assert functional.dropout(x, 0.999999).isfinite().all()
    assert torch.equal(Dropout(0.5).eval()(x), x)


def test_layers_are_torchs_by_name():
    layer = Linear(32, 48)
    assert layer.state_dict().keys() == torch.nn.Linear(32, 48).state_dict().keys()
    x = torch.randn(300, 32)
    torch.testing.assert_close(layer(x), torch.nn.Linear.forward(layer, x), rtol=1e-4, atol=1e-4)


def test_each_token_sees_real_tokens_alone_and_leaves_zeros():
    x, layer = torch.randn(3, 50, 32, requires_grad=True), Linear(32, 32)
    mask = torch.rand(3, 50) < 0.6
    found = functional.each_token(layer, x.masked_fill(~mask[..., None], torch.nan), mask)
    expected = layer(x).masked_fill(~mask[..., None], 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(x)
    gradients = (torch.autograd.grad(out, x, upstream)[0] for out in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert functional.each_token(layer, x, None).shape == x.shape

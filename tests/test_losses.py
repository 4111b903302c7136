"""The training loss: the task's, plus the weighted mean of J² over the layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from primal.functional import KSVDTerms, coupling, ksvd_objective, primal_attention
from primal.losses import with_ksvd


def randn(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


def random_terms():  # B=2 H=3 S=4
    energies = randn(2, 3, 4).square(), randn(2, 3, 4).square()
    return KSVDTerms(*energies, randn(3, 4), randn(3), randn(2, 3))


def test_without_primal_layers_the_loss_is_the_task():
    task = randn(requires_grad=True)
    loss = with_ksvd(task, [], weight=0.5)
    assert loss.total is loss.task is task
    assert loss.ksvd == 0
    assert (loss.ksvd.dtype, loss.ksvd.device) == (task.dtype, task.device)


@pytest.mark.parametrize("trace", ["weights", "data"])
@pytest.mark.parametrize("reduction", ["sample", "batch"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_loss_is_the_task_plus_the_weighted_mean_over_layers(layers, reduction, trace):
    task, terms = randn(), [random_terms() for _ in range(layers)]
    loss = with_ksvd(task, terms, 0.3, reduction=reduction, trace=trace)
    mean = sum(ksvd_objective(t, reduction=reduction, trace=trace) for t in terms) / layers
    torch.testing.assert_close(loss.ksvd, mean)
    torch.testing.assert_close(loss.task, task)
    torch.testing.assert_close(loss.total, task + 0.3 * mean)


def test_a_weight_of_zero_leaves_the_task_and_its_gradient():
    parameter, scale = randn(requires_grad=True), randn(3, 4, requires_grad=True)
    loss = with_ksvd(parameter.square(), [random_terms()._replace(scale=scale)], weight=0.0)
    loss.total.backward()
    assert loss.total == loss.task
    assert loss.ksvd > 0  # still there to be logged
    assert parameter.grad == 2 * parameter
    assert scale.grad is not None
    assert not scale.grad.any()


def test_the_objective_trains_the_scale_the_directions_and_the_features():
    parts = [randn(2, 3, 7, 5), randn(2, 3, 7, 5), randn(3, 5, 4), randn(3, 5, 4), randn(3, 4)]
    query, key, left, right, scale = (part.requires_grad_() for part in parts)
    combine = randn(6, 4, requires_grad=True)
    out = primal_attention(query, key, left, right, combine, None, unit_norm=True)
    coupled = coupling(left, right)
    terms = KSVDTerms(out.left_energy, out.right_energy, scale, coupled, coupled)
    loss = with_ksvd(torch.zeros(()).double(), [terms], weight=0.1)
    gradients = torch.autograd.grad(
        loss.total, [query, key, left, right, scale, combine], allow_unused=True
    )
    *trained, combined = gradients
    assert all(gradient is not None and gradient.abs().min() > 0 for gradient in trained)
    assert combined is None or not combined.any()  # what reads the scores is the task's affair


def test_descent_in_the_scale_alone_brings_the_residual_to_zero():
    scale = randn(3, 4, requires_grad=True)
    coupled = torch.full((3,), 5.0, dtype=torch.float64)
    energy = randn(1, 3, 4).square() + 1
    terms = KSVDTerms(energy, energy, scale, coupled, coupled)
    optimiser = torch.optim.SGD([scale], lr=0.01)
    for _ in range(300):
        optimiser.zero_grad()
        with_ksvd(torch.zeros(()).double(), [terms], weight=1.0).total.backward()
        optimiser.step()
    assert ksvd_objective(terms) < 1e-10


@given(seed=st.integers(0, 2**31), weight=st.floats(0, 0.5), layers=st.integers(0, 4))
def test_the_loss_is_never_below_the_task(seed, weight, layers):
    torch.manual_seed(seed)
    terms = [random_terms() for _ in range(layers)]
    loss = with_ksvd(randn(), terms, weight)
    batch = with_ksvd(loss.task, terms, weight, reduction="batch")
    assert loss.total >= batch.total - 1e-9  # Jensen, layer by layer
    assert batch.total >= loss.task

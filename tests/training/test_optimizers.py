"""The optimizers are torch.optim's, step by step; the average is one of the weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primal.training.optimizers import Average, Name, Optimizer, rectification

KINDS: dict[Name, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "radam": torch.optim.RAdam,
}
RATES = [1e-2, 3e-3, 1e-3, 1e-2, 5e-3, 1e-2, 2e-2, 1e-3, 4e-3, 1e-2]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, dtype=torch.float64))
        for shape in ((3, 4), (4,), (), (2, 2))
    ]


def descend(weights: list[nn.Parameter], step: int) -> None:
    """Give each weight the gradient of a step; the last one never has any."""
    generator = torch.Generator().manual_seed(step)
    for p in weights[:-1]:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_torchs(name, decay):
    mine, theirs = parameters(), parameters()
    optimizer = Optimizer(mine, name, decay)
    groups = [{"params": theirs[:1], "weight_decay": decay}, {"params": theirs[1:]}]
    reference = KINDS[name](groups, lr=0.0, weight_decay=0.0)
    for step, rate in enumerate(RATES, start=1):
        descend(mine, step)
        descend(theirs, step)
        optimizer.prepare(rate, step)
        optimizer.step()
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("after", [2, 7])  # before and after RAdam divides by second moments
def test_a_restored_optimizer_goes_on_bit_by_bit(name, after):
    mine, others = parameters(), parameters()
    first, second = Optimizer(mine, name, 0.1), Optimizer(others, name, 0.1)
    for step, rate in enumerate(RATES, start=1):
        descend(mine, step)
        first.prepare(rate, step)
        first.step()
        if step == after:
            state = {key: value.clone() for key, value in first.state().items()}
            second.load_state(state)
            with torch.no_grad():
                for a, b in zip(others, mine, strict=True):
                    a.copy_(b)
        elif step > after:
            descend(others, step)
            second.prepare(rate, step)
            second.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def test_vectors_are_not_drawn_to_zero():
    mine = parameters()
    before = [p.detach().clone() for p in mine]
    optimizer = Optimizer(mine, "adamw", 0.5)
    for p in mine:
        p.grad = torch.zeros_like(p)
    optimizer.prepare(0.1, 1)
    optimizer.step()
    torch.testing.assert_close(mine[0], before[0] * (1 - 0.1 * 0.5))
    assert torch.equal(mine[1], before[1])
    assert torch.equal(mine[2], before[2])


def test_rectification_is_zero_until_a_variance_can_be_told():
    values = [rectification(step) for step in range(1, 200)]
    assert values[:5] == [0.0] * 5
    assert values[5:] == sorted(values[5:])
    assert values[5] > 0
    assert values[-1] < 1


def test_the_average_forgets_its_start_then_decays():
    weights = parameters()
    average = Average(weights, decay=0.5)
    expected: list[Tensor] = [p.detach().clone() for p in weights]
    for step in range(8):
        with torch.no_grad():
            for p in weights:
                p.add_(1.0)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = [decay * e + (1 - decay) * p for e, p in zip(expected, weights, strict=True)]
        average.update(torch.tensor(step))
        for mean, e in zip(average.weights, expected, strict=True):
            torch.testing.assert_close(mean, e.detach(), rtol=1e-6, atol=1e-6)
    assert all(not torch.equal(a, p) for a, p in zip(average.weights, weights, strict=True))

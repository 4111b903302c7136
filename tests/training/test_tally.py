"""The tally: means over an epoch, and the first step whose loss was no number."""

import math

import pytest
import torch

from primal.training.tally import SampleLosses, Tally


def losses(*task: float) -> SampleLosses:
    values = torch.tensor(task)
    return SampleLosses(values, torch.stack([values, 2 * values], dim=1), values > 1)


def add(tally: Tally, index: list[int], found: SampleLosses, norm: float | None = None) -> None:
    given = None if norm is None else torch.tensor(norm)
    tally.add(torch.tensor(index), found.task, found.sums(), given)


def test_means_weigh_every_sample_alike():
    tally = Tally(5, torch.device("cpu"))
    add(tally, [0, 1], losses(1.0, 2.0))
    add(tally, [4], losses(6.0))
    means = tally.means()
    assert means.loss == pytest.approx(3.0)
    assert means.score == pytest.approx(2 / 3)
    assert means.ksvd == pytest.approx([3.0, 6.0])
    assert means.objective == pytest.approx(4.5)
    tally.begin_epoch()
    add(tally, [2], losses(8.0))
    assert tally.means().loss == pytest.approx(8.0)
    assert int(tally.steps) == 3


def test_without_primal_layers_the_objective_is_zero():
    tally, task = Tally(2, torch.device("cpu")), torch.ones(2)
    add(tally, [0, 1], SampleLosses(task, task.new_zeros(2, 0), task))
    assert tally.means().objective == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_bad_step_and_its_examples_are_kept(bad):
    tally = Tally(6, torch.device("cpu"))
    add(tally, [0, 1], losses(1.0, 1.0), norm=1.0)
    assert int(tally.bad_step) == -1
    add(tally, [2, 3], losses(1.0, bad), norm=bad)
    add(tally, [4, 5], losses(bad, bad), norm=bad)
    assert int(tally.bad_step) == 1
    assert tally.bad_examples.nonzero().flatten().tolist() == [3]


def test_a_gradient_alone_can_be_bad():
    tally = Tally(2, torch.device("cpu"))
    add(tally, [0, 1], losses(1.0, 1.0), norm=math.inf)
    assert int(tally.bad_step) == 0
    assert not tally.bad_examples.any()

"""Ridge regression: its leave-one-out residuals against fits that leave one out."""

import pytest
import torch
import torch.nn.functional as F

from primal.models.ridge import blend, fit_ridge

ONE = torch.tensor([0.1], dtype=torch.float64)


def refitted(features, targets, case, copies, strength):
    """Return what a fit without ``case`` and its copies predicts for it."""
    kept = torch.arange(len(targets)) != case
    x, y = features[kept.repeat(copies)], targets[kept].repeat(copies, 1)
    center, offset = x.mean(0), y.mean(0)
    z = x - center
    weight = torch.linalg.solve(z.mT @ z + strength * torch.eye(z.shape[1]), z.mT @ (y - offset))
    return (features[case] - center) @ weight + offset


@pytest.mark.parametrize("width", [3, 60])
@pytest.mark.parametrize("copies", [1, 3])
def test_leaving_out_equals_fitting_without(width, copies):
    torch.manual_seed(0)
    features = torch.randn(12 * copies, width, dtype=torch.float64) + 1
    targets = torch.randn(12, 2, dtype=torch.float64)
    ridge = fit_ridge(features, targets, copies, ONE)
    energy = (features - features.mean(0)).square().sum(1).mean()
    for case in range(12):
        expected = refitted(features, targets, case, copies, 0.1 * energy)
        torch.testing.assert_close(ridge.held_out[case], expected, rtol=1e-6, atol=1e-6)


def test_few_and_many_features_agree():
    """The same fit, seen from the features and, with zeros beside them, from the cases."""
    torch.manual_seed(0)
    features, targets = torch.randn(20, 6), torch.randn(20, 1)
    few, many = fit_ridge(features, targets), fit_ridge(F.pad(features, (0, 40)), targets)
    torch.testing.assert_close(many.weight[:6], few.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(many.bias, few.bias)
    torch.testing.assert_close(many.held_out, few.held_out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [9, 70])
def test_a_large_fit_is_the_same(monkeypatch, width):
    """Factorised block by block, with fewer features than cases or more."""
    torch.manual_seed(0)
    features, targets = torch.randn(40, width) + 1, torch.randn(40, 2)
    expected = fit_ridge(features, targets, strengths=ONE)
    monkeypatch.setattr("primal.models.ridge.LARGE", 8)
    monkeypatch.setattr("primal.models.ridge.BLOCK", 100)
    large = fit_ridge(features, targets, strengths=ONE)
    for mine, its in zip(large[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_a_matrix_on_which_lapack_gives_up(monkeypatch):
    torch.manual_seed(0)
    features, targets = torch.randn(12, 5), torch.randn(12, 2)
    expected = fit_ridge(features, targets)

    def failing(_):
        raise RuntimeError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    for mine, its in zip(fit_ridge(features, targets), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_noise_is_shrunk_and_signal_is_not():
    torch.manual_seed(0)
    features = torch.randn(50, 10)
    signal = fit_ridge(features, features[:, :1])
    noise = fit_ridge(features, torch.randn(50, 1))
    assert signal.strength < 1e-3
    assert noise.strength > 1
    torch.testing.assert_close(
        features @ signal.weight + signal.bias, features[:, :1].double(), atol=0.01, rtol=0
    )


def test_features_that_say_nothing_give_the_mean():
    ridge = fit_ridge(torch.zeros(6, 4), torch.arange(6.0)[:, None])
    assert not ridge.weight.any()
    torch.testing.assert_close(ridge.bias, torch.tensor([2.5], dtype=torch.float64))


def test_the_better_head_is_trusted_and_the_useless_is_not():
    torch.manual_seed(0)
    classes = torch.arange(900) % 3
    truth = 2 * F.one_hot(classes).double() - 1
    good, noise = truth + torch.randn(900, 3), torch.randn(900, 3).double()
    weights = blend([good, -truth, noise], classes)
    assert (weights >= 0).all()
    assert weights[0] > 0.5
    assert weights[1] == 0
    assert weights[2] < 0.2


def test_a_blend_is_the_best_of_its_neighbours():
    torch.manual_seed(0)
    classes = torch.arange(60) % 2
    heads = [F.one_hot(classes).double() + torch.randn(60, 2) for _ in range(2)]
    weights = blend(heads, classes)

    def loss(weights):
        together = sum(w * head for w, head in zip(weights, heads, strict=True))
        return F.cross_entropy(together, classes) + 0.05 / 60 * weights.square().sum()

    for change in 0.1 * torch.cat((torch.eye(2), -torch.eye(2))):
        assert loss(weights) < loss((weights + change).clamp(min=0))


def test_numbers_are_blended_by_their_squares():
    torch.manual_seed(0)
    targets = torch.randn(200)
    heads = [targets[:, None].double() + torch.randn(200, 1) for _ in range(2)]
    weights = blend(heads, targets)
    # Two equal witnesses with the noise of what they tell: a third each.
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3), atol=0.08, rtol=0)

"""Summaries of series: primal attention in closed form, and what each family is blind to."""

import torch

from primal.ksvd import KSVD
from primal.models.dilated import Steps
from primal.models.summaries import AttentionScores, Outline, ksvd_directions


def test_directions_are_those_of_the_estimator():
    query, key = torch.randn(2, 100, 12, dtype=torch.float64)
    ours = ksvd_directions(query, key, 5)
    estimator = KSVD(5, feature_map=torch.nn.Identity()).fit(query.numpy(), Z=key.numpy())
    for mine, theirs in zip(ours, (estimator.left_weights_, estimator.right_weights_), strict=True):
        other = torch.from_numpy(theirs)
        signs = (mine * other).sum(0).sign()
        torch.testing.assert_close(mine * signs, other)


def test_directions_of_few_tokens():
    query, key = torch.randn(2, 3, 12, dtype=torch.float64)
    left, right = ksvd_directions(query, key, 3)
    kernel = query @ key.mT
    torch.testing.assert_close(torch.linalg.svdvals(query @ left), torch.linalg.svdvals(kernel))
    torch.testing.assert_close(torch.linalg.svdvals(key @ right), torch.linalg.svdvals(kernel))


def drawn(family, steps):
    family.draw(steps, torch.Generator().manual_seed(0))
    return family


def test_attention_tells_shapes_apart_at_any_size():
    """The cosine map: what is three times as large has the same scores."""
    steps = Steps(torch.randn(30, 8, 2), torch.full((8,), 30))
    family = drawn(AttentionScores(2, 1, width=16, rank=4, thresholds=2), steps)
    features = family(steps)
    assert features.shape == (8, family.features)
    larger = family(Steps(3 * steps.values, steps.lengths))
    torch.testing.assert_close(larger, features, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(
        family(Steps(steps.values.flip(0), steps.lengths)), features, atol=0.1
    )


def test_an_outline_is_the_same_at_any_speed():
    line = torch.linspace(-1, 1, 50)[:, None, None]
    steps = Steps(torch.cat((line, -line), 1), torch.full((2,), 50))
    outline = Outline(1, points=8, features=64)
    slow, fast = steps, Steps(steps.values[::7], torch.full((2,), 8))
    assert torch.allclose(
        outline._outlines(slow)[:, :-1], outline._outlines(fast)[:, :-1], atol=1e-6
    )
    drawn(outline, steps)
    kernel = outline(steps) @ outline(steps).mT
    torch.testing.assert_close(kernel.diagonal(), torch.ones(2))
    assert kernel[0, 1] < 0.6


def test_an_outline_of_many_channels_draws_some():
    outline = drawn(
        Outline(300, points=4, features=64), Steps(torch.randn(9, 5, 300), torch.full((5,), 9))
    )
    assert outline.phi.width == 4 * 64 + 1
    assert len(outline.chosen.unique()) == 64
    assert outline.chosen.max() > 64

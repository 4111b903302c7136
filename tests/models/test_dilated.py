"""Dilated windows and their poolings, against what a slower formulation gives."""

import pytest
import torch
import torch.nn.functional as F

from primal.models import dilated
from primal.models.dilated import Steps
from primal.models.warping import warped

LENGTHS = torch.tensor([20, 7, 1])


def ragged(channels=4):
    x = torch.randn(20, 3, channels)
    return Steps(x * dilated.inside(Steps(x, LENGTHS))[..., None], LENGTHS)


def test_changes_are_differences_and_end_with_the_series():
    values, lengths = ragged()
    changes = Steps(values, lengths).changes()
    assert changes.lengths.tolist() == [19, 6, 1]
    for case, n in enumerate(LENGTHS.tolist()):
        expected = F.pad(values[:n, case].diff(dim=0), (0, 0, 0, 20 - max(n - 1, 0)))
        assert torch.equal(changes.values[:, case], expected[:20])


@pytest.mark.parametrize("dilation", [1, 3, 20])
def test_responses_are_a_convolution(dilation):
    steps, generator = ragged(), torch.Generator().manual_seed(0)
    mix = dilated.channel_mix(torch.Size((4, 24)), generator)
    filters = dilated.normal_filters(24, generator)
    got = dilated.responses(steps, mix, filters, dilation)
    mixed = (steps.values @ mix).permute(1, 2, 0)
    expected = F.conv1d(
        mixed, filters.mT[:, None], padding=4 * dilation, dilation=dilation, groups=24
    )
    torch.testing.assert_close(got, expected.permute(2, 0, 1), rtol=1e-4, atol=1e-5)


def test_filters_say_nothing_about_the_level():
    for filters in (dilated.ternary_filters(), dilated.normal_filters(9, torch.Generator())):
        torch.testing.assert_close(filters.sum(0), torch.zeros(filters.shape[1]))
    assert len({tuple(column) for column in dilated.ternary_filters().mT.tolist()}) == 84


def test_every_filter_reads_some_channels_and_at_most_nine():
    mix = dilated.channel_mix(torch.Size((30, 500)), torch.Generator().manual_seed(0))
    assert mix.sum(0).min() == 1
    assert mix.sum(0).max() == 9
    assert mix.any(dim=1).all()


def test_excesses_one_by_one():
    response, thresholds = torch.randn(20, 3, 5), torch.randn(2, 5) / 2
    valid = dilated.inside(Steps(response, LENGTHS))[..., None]
    got = dilated.pool_excesses(response, valid, thresholds)
    for case, n in enumerate(LENGTHS.tolist()):
        for b in range(2):
            for k in range(5):
                excess = (response[:n, case, k] - thresholds[b, k]).tolist()
                above = [i for i, value in enumerate(excess) if value > 0]
                runs = "".join("#" if value > 0 else " " for value in excess).split()
                expected = [
                    len(above) / n,
                    sum(excess[i] for i in above) / max(len(above), 1),
                    sum(above) / len(above) / n if above else -1 / n,
                    max(map(len, runs), default=0) / n,
                ]
                torch.testing.assert_close(got[case, :, b, k], torch.tensor(expected))


def test_contests_one_by_one():
    response = torch.randn(20, 3, 6)
    valid = dilated.inside(Steps(response, LENGTHS))
    got = dilated.pool_contests(response, valid, group=3).view(3, 2, 3, 2)
    for case, n in enumerate(LENGTHS.tolist()):
        wins, losses = torch.zeros(3, 2), torch.zeros(3, 2)
        for step in response[:n, case].view(n, 3, 2):
            for group in range(2):
                wins[step[:, group].argmax(), group] += step[:, group].max()
                losses[step[:, group].argmin(), group] += 1
        torch.testing.assert_close(got[case], torch.stack((wins, losses)) / n)


def test_moments_one_by_one():
    response = torch.randn(20, 3, 5)
    got = dilated.pool_moments(response, dilated.inside(Steps(response, LENGTHS))[..., None])
    for case, n in enumerate(LENGTHS.tolist()):
        part = response[:n, case]
        expected = (part.mean(0), part.std(0, correction=0), part.amax(0), part.amin(0))
        torch.testing.assert_close(got[case], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_thresholds_are_quantiles_of_one_case():
    response = torch.arange(20.0)[:, None, None].expand(20, 3, 84)
    valid = dilated.inside(Steps(response, LENGTHS))[..., None].expand_as(response)
    drawn = dilated.draw_thresholds(response, valid, 50, torch.Generator().manual_seed(0))
    assert drawn.min() >= 0
    assert drawn.max() <= 19 + 1e-3
    assert ((drawn < 1e-3).double().mean() - 1 / 3).abs() < 0.05  # the series of one step


def test_only_positions_whose_window_fits_are_inside_unless_none_does():
    inside = dilated.inside(Steps(torch.zeros(20, 3, 1), LENGTHS), margin=3)
    assert inside.sum(0).tolist() == [14, 1, 1]
    assert dilated.inside(Steps(torch.zeros(20, 3, 1), LENGTHS), margin=4).sum(0).tolist() == [
        12,
        7,
        1,
    ]


def test_a_warp_keeps_ends_lengths_and_order():
    x = torch.arange(20.0).view(1, 20, 1).repeat(3, 1, 2)
    x = x.masked_fill(torch.arange(20)[:, None] >= LENGTHS.view(3, 1, 1), 0.0)
    copy = warped(x, LENGTHS, torch.Generator().manual_seed(0))
    for case, n in enumerate(LENGTHS.tolist()):
        size = copy[case, n - 1] / max(n - 1, 1)
        assert (n == 1) or ((size - 1).abs() < 0.5).all()
        assert not copy[case, n:].any()
        assert (copy[case, :n].diff(dim=0) > 0).all()
        assert n == 1 or not torch.allclose(copy[case, :n] / size, x[case, :n], atol=0.1)

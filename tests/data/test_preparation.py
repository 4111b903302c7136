"""From series to tensors: statistics of training, over real and observed values only."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from primal.data.preparation import FAR, Preparation
from primal.data.series import SeriesSet
from primal.errors import DataError

NAN = np.nan


def series(*values, targets=None, times=None, **more) -> SeriesSet:
    """Return series of one channel, or of several if given so."""
    arrays = [np.asarray(one, np.float64) for one in values]
    targets = np.arange(len(values)) % 2 if targets is None else np.asarray(targets)
    return SeriesSet(
        tuple(one[:, None] if one.ndim == 1 else one for one in arrays),
        targets,
        tuple(str(case) for case in range(len(values))),
        None if times is None else tuple(np.asarray(one, np.float64) for one in times),
        **more,
    )


def random_set(seed: int = 0, cases: int = 6, channels: int = 3) -> SeriesSet:
    generator = np.random.default_rng(seed)
    return series(
        *(
            10 + 5 * generator.normal(size=(length, channels))
            for length in generator.integers(1, 9, size=cases)
        )
    )


# --- values ---------------------------------------------------------------------------------------


def test_channels_are_standardised_over_real_steps():
    train = random_set()
    x, lengths = Preparation.fit(train).inputs(train)
    assert x.shape == (6, train.max_length, 3)
    assert x.dtype == torch.float32
    assert lengths.tolist() == train.lengths.tolist()
    real = torch.cat([one[:length] for one, length in zip(x, lengths, strict=True)])
    assert real.mean(0) == pytest.approx(np.zeros(3), abs=1e-6)
    assert real.std(0, correction=0) == pytest.approx(np.ones(3), abs=1e-6)
    assert all((one[length:] == 0).all() for one, length in zip(x, lengths, strict=True))


def test_what_training_was_standardises_what_follows():
    prepared = Preparation.fit(series([0, 2], [4, 2]))  # mean 2, deviation √2
    x, _ = prepared.inputs(series([2, 2 + 2**0.5]))
    assert x[0, :, 0].tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e9 + 0.1, -1e-20])
def test_a_constant_channel_is_zero(constant):
    train = series(np.full(100, constant), np.full(31, constant))
    x, _ = Preparation.fit(train).inputs(train)
    assert x.abs().max() < 1e-6


def test_a_small_spread_around_a_large_mean_is_kept():
    train = series(1e9 + np.array([0, 1, 2, 3]), 1e9 + np.array([3, 0]))
    x, _ = Preparation.fit(train).inputs(train)
    assert np.diff(x[0, :, 0]) == pytest.approx([1 / np.std([0, 1, 2, 3, 3, 0])] * 3, rel=1e-5)


def test_values_stay_finite_however_far_from_training():
    prepared = Preparation.fit(series([0, 1e-3], [1e-3, 0]))
    x, _ = prepared.inputs(series([3e38, -3e38, 0]))
    assert x[0, :2, 0].tolist() == [FAR, -FAR]
    assert x.isfinite().all()


def test_a_series_longer_than_training_and_one_step():
    prepared = Preparation.fit(random_set())
    long = series(np.ones((1000, 3)), np.ones((1, 3)))
    x, lengths = prepared.inputs(long)
    assert x.shape == (2, 1000, 3)
    assert lengths.tolist() == [1000, 1]
    one = Preparation.fit(series([1.0], [3.0]))
    assert one.inputs(series([1.0], [3.0])).x.flatten().tolist() == [-1, 1]


# --- missing values -------------------------------------------------------------------------------


def test_missing_values_are_filled_and_marked():
    train = series([[0, NAN], [NAN, 1], [NAN, NAN], [6, 3], [NAN, NAN]], [[6, 5], [0, 3]])
    prepared = Preparation.fit(train)
    assert list(prepared.mean) == [3, 3]
    assert prepared.observed
    assert prepared.width == 4
    x, _ = prepared.inputs(train)
    first = x[0, :, 0] * prepared.scale[0] + prepared.mean[0]
    second = x[0, :, 1] * prepared.scale[1] + prepared.mean[1]
    assert first.tolist() == pytest.approx([0, 2, 4, 6, 6])  # a line between, the nearest outside
    assert second.tolist() == pytest.approx([1, 1, 2, 3, 3])
    assert x[0, :, 2].tolist() == [1, 0, 0, 1, 0]
    assert x[0, :, 3].tolist() == [0, 1, 0, 1, 0]
    assert x[1, :2, 2:].tolist() == [[1, 1], [1, 1]]
    assert (x[1, 2:] == 0).all()


def test_gaps_are_filled_by_time_not_by_step():
    train = series([0, NAN, 10], [5, 5, 5], times=[[0, 1, 10], [0, 1, 2]])
    prepared = Preparation.fit(train)
    x, _ = prepared.inputs(train)
    assert x[0, 1, 0] * prepared.scale[0] + prepared.mean[0] == pytest.approx(1)


def test_nothing_crosses_from_one_case_to_the_next():
    train = series([1, NAN], [NAN, 9], [5, 5])
    prepared = Preparation.fit(train)
    filled = prepared.inputs(train).x[:, :, 0] * prepared.scale[0] + prepared.mean[0]
    assert filled[:2].tolist() == [pytest.approx([1, 1]), pytest.approx([9, 9])]


def test_a_channel_of_which_a_case_has_nothing_is_its_mean():
    train = series([[NAN, 1], [NAN, 2]], [[4, 3], [8, 4]])
    x, _ = Preparation.fit(train).inputs(train)
    assert x[0, :, 0].tolist() == [0, 0]
    assert x[0, :, 2].tolist() == [0, 0]


def test_a_channel_of_which_training_has_nothing():
    train = series([[NAN, 1], [NAN, 2]], [[NAN, 3], [NAN, 4]])
    prepared = Preparation.fit(train)
    assert (prepared.inputs(train).x[:, :, 0] == 0).all()
    assert prepared.inputs(series([[7, 1], [8, 2]])).x.isfinite().all()


def test_values_missing_later_are_filled_without_marks():
    prepared = Preparation.fit(series([0, 2], [4, 2]))
    x, _ = prepared.inputs(series([2, NAN, 2]))
    assert x.shape == (1, 3, 1)
    assert (x == 0).all()


# --- times ----------------------------------------------------------------------------------------


def test_times_are_two_channels_of_their_own():
    train = series([1, 2, 3, 4], [1, 2], times=[[5, 6, 8, 12], [0, 2]])
    prepared = Preparation.fit(train)
    assert prepared.gap == 2  # of 1, 2, 4, 2
    assert prepared.width == 3
    x, _ = prepared.inputs(train)
    assert x[0, :, 1].tolist() == pytest.approx(np.log1p([0, 0.5, 1.5, 3.5]))  # since the start
    assert x[0, :, 2].tolist() == pytest.approx(np.log1p([0, 0.5, 1, 2]))  # since the last step
    assert x[1, :2, 2].tolist() == pytest.approx(np.log1p([0, 1]))
    assert (x[1, 2:] == 0).all()


def test_times_and_missing_values_together():
    train = series([[1, NAN], [2, 5]], [[3, 4]], times=[[0, 1], [7]])
    prepared = Preparation.fit(train)
    assert prepared.width == 2 + 2 + 2
    assert prepared.inputs(train).x.shape == (2, 2, 6)


def test_seconds_since_1970_are_not_rounded_away():
    steps = np.array([0, 0.25, 0.5, 0.75, 1.25])
    near = series(np.arange(5), np.arange(5), times=[steps, steps])
    far = replace(near, times=tuple(1.75e9 + times for times in near.times))
    assert np.float32(1.75e9) == np.float32(1.75e9 + 1.25)  # what single precision would see
    prepared = Preparation.fit(near)
    assert Preparation.fit(far) == prepared
    assert torch.equal(prepared.inputs(far).x, prepared.inputs(near).x)


def test_times_of_single_steps():
    train = series([1.0], [2.0], times=[[3.0], [4.0]])
    x, _ = Preparation.fit(train).inputs(train)
    assert (x[:, :, 1:] == 0).all()


def test_times_in_training_and_later_or_never():
    timed, plain = series([1, 2], [3, 4], times=[[0, 1], [0, 1]]), series([1, 2], [3, 4])
    with pytest.raises(DataError, match="times are required, as in training, got none; add"):
        Preparation.fit(timed).inputs(plain)
    with pytest.raises(DataError, match="no times are expected, as in training, got some; drop"):
        Preparation.fit(plain).inputs(timed)


# --- channels -------------------------------------------------------------------------------------


def test_named_channels_may_change_places():
    train = series([[1, 10], [2, 30]], [[3, 20], [4, 50]], channel_names=("a", "b"))
    turned = replace(
        train, values=tuple(one[:, ::-1] for one in train.values), channel_names=("b", "a")
    )
    prepared = Preparation.fit(train)
    assert torch.equal(prepared.inputs(train).x, prepared.inputs(turned).x)


@pytest.mark.parametrize(
    ("channels", "names", "told"),
    [
        (3, None, r"f.csv: 2 channels are required, as in training, got 3; give those"),
        (3, ("a", "b", "c"), r"f.csv: the 2 channels of training are required, got 3, with c; ren"),
        (
            2,
            ("a", "c"),
            r"the 2 channels of training are required, got 2, without b, with c; rename",
        ),
        (1, ("b",), r"the 2 channels of training are required, got 1, without a; rename"),
    ],
)
def test_other_channels_are_told(channels, names, told):
    prepared = Preparation.fit(series([[1, 2]], [[3, 4]], channel_names=("a", "b")))
    with pytest.raises(DataError, match=told):
        prepared.inputs(series(np.ones((4, channels)), channel_names=names, source="f.csv"))


# --- targets --------------------------------------------------------------------------------------


def test_classes_are_numbered_in_their_order():
    train = series([1], [2], [3], targets=["b", "a", "c"])
    prepared = Preparation.fit(train)
    assert prepared.classes == ("a", "b", "c")
    assert prepared.targets(train).tolist() == [1, 0, 2]


def test_a_class_written_as_a_number_is_the_same_class():
    prepared = Preparation.fit(series([1], [2], targets=[1.0, 2.0]))
    assert prepared.targets(series([1], [2], targets=["2", "1"])).tolist() == [1, 0]
    assert prepared.targets(series([1], [2], targets=[1, 1])).tolist() == [0, 0]


@pytest.mark.parametrize("unknown", ["A", "", "d", "aa"])
def test_an_unknown_class_is_told_with_its_row(unknown):
    prepared = Preparation.fit(series([1], [2], targets=["a", "b"]))
    other = series([1], [2], targets=["b", unknown], source="f.csv", rows=(2, 7))
    told = rf"f.csv, row 7, case 1: a class of training is required, a, b, got '{unknown}'; correct"
    with pytest.raises(DataError, match=told):
        prepared.check(other)


def test_one_class_alone_is_told():
    with pytest.raises(DataError, match=r"f.csv: at least two classes are .*, got only 'a'; give"):
        Preparation.fit(series([1], [2], targets=["a", "a"], source="f.csv"))


def test_training_without_labels_is_told():
    bare = replace(series([1], [2], source="f.csv"), targets=None)
    with pytest.raises(DataError, match=r"f.csv: labels are required to train, got none; add"):
        Preparation.fit(bare)
    prepared = Preparation.fit(series([1], [2]))
    assert prepared.inputs(bare).x.shape == (2, 1, 1)
    with pytest.raises(DataError, match=r"f.csv: labels are required to measure, got none; add"):
        prepared.targets(bare)


def test_numbers_are_standardised():
    train = series([1], [2], [3], targets=[10.0, 20.0, 60.0])
    prepared = Preparation.fit(train, "value")
    assert prepared.classes is None
    found = prepared.targets(train).double() * prepared.target_scale + prepared.target_mean
    assert found.tolist() == pytest.approx([10, 20, 60], rel=1e-6)
    assert Preparation.fit(series([1], [2], targets=[5.0, 5.0]), "value").target_scale == 1
    with pytest.raises(DataError, match=r"numbers are required as labels of a regression"):
        Preparation.fit(series([1], [2], targets=["a", "b"]), "value")


# --- kept with the model --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "irregular", "numbers"])
def test_json_keeps_every_bit(kind):
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(5, 2)) / 3 for _ in range(4)]
    train = series(*values, channel_names=("ä", "b"))
    if kind == "irregular":
        values[2][3, 1] = NAN
        times = tuple(np.cumsum(generator.random(5)) for _ in range(4))
        train = series(*values, times=times)
    if kind == "numbers":
        train = series(*values, targets=generator.normal(size=4) / 7)
    prepared = Preparation.fit(train, "value" if kind == "numbers" else "class")
    back = Preparation.from_json(json.loads(json.dumps(prepared.to_json(), allow_nan=False)))
    assert back == prepared
    assert torch.equal(back.inputs(train).x, prepared.inputs(train).x)
    assert torch.equal(back.targets(train), prepared.targets(train))


def test_chunks_are_prepared_as_the_whole_is():
    train = random_set()
    train.values[1][0, 2] = NAN
    data = replace(train, times=tuple(np.cumsum(one[:, 0] ** 2 + 1) for one in train.values))
    data.values[1][0, 0] = NAN
    prepared = Preparation.fit(data)
    whole, lengths = prepared.inputs(data)
    for case in range(len(data)):
        x, _ = prepared.inputs(data.subset([case]))
        assert torch.equal(x[0], whole[case, : lengths[case]])

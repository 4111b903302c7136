"""Sets of series: what belongs to a case stays with it when sets are cut, joined and divided."""

from dataclasses import replace

import numpy as np
import pytest

from primal.data.series import SeriesSet, as_names, join, split
from primal.errors import DataError


def a_set(cases: int = 10, classes: int = 2) -> SeriesSet:
    return SeriesSet(
        tuple(np.full((case + 1, 2), float(case)) for case in range(cases)),
        np.array([f"c{case % classes}" for case in range(cases)]),
        tuple(f"n{case}" for case in range(cases)),
        tuple(np.arange(case + 1.0) + case for case in range(cases)),
        channel_names=("x", "y"),
        source="some.csv",
        rows=tuple(range(2, cases + 2)),
    )


def numbers(data: SeriesSet) -> list[int]:
    """Return which cases these are, once all that is known of them says so."""
    found = [int(values[0, 0]) for values in data.values]
    assert data.names == tuple(f"n{case}" for case in found)
    assert data.lengths.tolist() == [case + 1 for case in found]
    assert [int(times[0]) for times in data.times] == found
    assert data.rows == tuple(case + 2 for case in found)
    return found


def test_what_is_known_of_a_set():
    data = a_set()
    assert (len(data), data.channels, data.max_length) == (10, 2, 10)
    assert data.where(3) == "some.csv, row 5, case n3"
    assert replace(data, source="", rows=None).where(3) == "case n3"


def test_every_case_needs_all_its_parts():
    with pytest.raises(ValueError, match=r"one of each for every case.*'names': 9"):
        replace(a_set(), names=a_set().names[:9])


def test_subsets_keep_order_and_everything_else():
    data = a_set().subset([7, 2, 2])
    assert numbers(data) == [7, 2, 2]
    assert data.targets.tolist() == ["c1", "c0", "c0"]
    assert data.channel_names == ("x", "y")
    bare = SeriesSet(a_set().values, None, a_set().names).subset([1])
    assert (bare.targets, bare.times, bare.rows) == (None, None, None)


def test_joining_undoes_cutting():
    data = a_set()
    joined = join([data.subset(range(4)), data.subset([4]), data.subset(range(5, 10))])
    assert numbers(joined) == list(range(10))
    assert joined.targets.tolist() == data.targets.tolist()
    assert joined.source == "some.csv"


def test_joining_two_files_forgets_rows():
    joined = join([a_set(), replace(a_set(), source="other.csv")])
    assert (len(joined), joined.source, joined.rows) == (20, "", None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"times": None}, "got times in some and not in others"),
        ({"targets": None}, "got targets in some and not in others"),
        ({"channel_names": ("y", "x")}, "the same channels in the same order"),
    ],
)
def test_only_alike_sets_are_joined(change, told):
    with pytest.raises(ValueError, match=told):
        join([a_set(), replace(a_set(), **change)])


@pytest.mark.parametrize("by_class", [True, False])
def test_a_split_divides(by_class):
    data = a_set(40, classes=4)
    kept, held = split(data, 0.25, seed=0, by_class=by_class)
    assert sorted(numbers(kept) + numbers(held)) == list(range(40))
    assert len(held) == 10
    if by_class:
        _, counts = np.unique(held.targets, return_counts=True)
        assert set(counts.tolist()) <= {2, 3}  # a quarter of ten
    again = split(data, 0.25, seed=0, by_class=by_class)[1]
    assert numbers(again) == numbers(held)
    assert numbers(split(data, 0.25, seed=1, by_class=by_class)[1]) != numbers(held)


@pytest.mark.parametrize(("cases", "classes"), [(30, 15), (25, 5), (7, 5), (100, 3)])
def test_every_class_is_kept_to_train_on(cases, classes):
    data = a_set(cases, classes)
    kept, held = split(data, 0.2, seed=0, by_class=True)
    assert set(kept.targets) == set(data.targets)
    assert abs(len(held) - 0.2 * cases) <= 1


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_a_part_lies_between_nothing_and_all(fraction):
    with pytest.raises(ValueError, match="between 0 and 1"):
        split(a_set(), fraction, seed=0, by_class=True)


def test_too_few_cases_to_divide_are_told():
    with pytest.raises(DataError, match="4 cases are too few to hold out"):
        split(a_set(4, classes=4), 0.2, seed=0, by_class=True)


def test_labels_are_written_as_text():
    assert as_names(np.array([1.0, 2.5, -3.0])).tolist() == ["1", "2.5", "-3"]
    assert as_names(np.array([1, 2])).tolist() == ["1", "2"]
    assert as_names(np.array(["b", "a"], dtype=object)).tolist() == ["b", "a"]
    assert as_names(np.array([True, False])).tolist() == ["True", "False"]

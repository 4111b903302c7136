"""Events: files in, sequences out; windows that show no future; rules counted by hand."""

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from primal.data import events
from primal.data.events import EventSet
from primal.errors import DataError


def made(*kinds: list[int], count: int = 3) -> EventSet:
    """Return sequences with these kinds, an event a day."""
    return EventSet(
        tuple(np.array(k, dtype=np.int64) for k in kinds),
        tuple(np.arange(len(k), dtype=np.float64) for k in kinds),
        tuple(f"s{i}" for i in range(len(kinds))),
        count,
    )


def write(folder: Path, part: str, kinds: str, times: str) -> None:
    (folder / f"event-{part}.txt").write_text(kinds)
    (folder / f"time-{part}.txt").write_text(times)


# --- rules ---------------------------------------------------------------------------------------


def test_unigram_by_hand():
    # Targets are 1 0 1 and 1: kind 0 once, 1 three times, 2 never; each is seen once more.
    found = events.unigram(made([0, 1, 0, 1], [2, 1]))
    assert found == pytest.approx(np.array([2, 4, 1]) / 7)


def test_markov_by_hand():
    # After 0 comes 1 twice, after 1 comes 0 once, after 2 comes 1 once. One more, as the unigram.
    found = events.markov(made([0, 1, 0, 1], [2, 1]))
    once_more = np.array([2, 4, 1]) / 7
    by_hand = [(np.array([0, 2, 0]) + once_more) / 3, (np.array([1, 0, 0]) + once_more) / 2]
    by_hand.append((np.array([0, 1, 0]) + once_more) / 2)
    assert found == pytest.approx(np.array(by_hand))


def test_what_nothing_followed_is_left_with_the_unigram():
    data = made([0, 1, 0, 1])
    assert events.markov(data)[2] == pytest.approx(events.unigram(data))


def test_no_transition_leads_from_one_sequence_to_the_next():
    assert events.markov(made([0, 1], [2, 1]))[1].argmax() == 1  # the unigram's, not 1 -> 2


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 100])
def test_every_event_but_the_first_is_counted_once(longest):
    data = made([0, 1, 2, 0, 1, 2, 0], [1, 1], [2])
    found = events.windows(data, longest)
    places = found.start[:, None] + torch.arange(found.kinds.shape[1]) + 1
    sequence = found.sequence[:, None].expand_as(places)
    counted = torch.stack((sequence, places), -1)[found.counted].tolist()
    wanted = [[i, n] for i, kinds in enumerate(data.kinds) for n in range(1, len(kinds))]
    assert sorted(counted) == wanted


def test_a_window_shows_what_came_before_and_asks_for_what_comes_next():
    found = events.windows(made([0, 1, 2, 1, 0]), 3)
    assert found.kinds.tolist() == [[0, 1, 2], [1, 2, 1]]
    assert found.targets.tolist() == [[1, 2, 1], [2, 1, 0]]
    assert found.times.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert found.asked.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert found.counted.tolist() == [[True] * 3, [False, False, True]]


def test_sequences_of_one_event_ask_for_nothing():
    with pytest.raises(DataError, match="two events or more"):
        events.windows(made([0], [1]), 5)


# --- parts ---------------------------------------------------------------------------------------


def test_a_split_shares_no_sequence():
    data = made(*[[0, 1]] * 20)
    train, held = events.split(data, 0.25, seed=3)
    assert len(held) == 5
    assert set(train.names) | set(held.names) == set(data.names)
    assert not set(train.names) & set(held.names)
    assert events.split(data, 0.25, seed=3)[1].names == held.names
    assert events.split(data, 0.25, seed=4)[1].names != held.names


def test_training_keeps_each_user_once_and_none_that_is_tested(tmp_path):
    write(tmp_path, "train", "1 2\n3 4\n1 2\n5 6\n", "0 86400\n5 6\n0 86400\n7 8\n")
    write(tmp_path, "test", "3 4\n", "5 6\n")
    train, test = events.stackoverflow(tmp_path)
    assert train.names == ("train-1", "train-4")
    assert test.names == ("test-1",)
    assert train.kinds[0].tolist() == [0, 1]
    assert train.times[0].tolist() == [0, 1]  # days


def test_the_real_files(shared):
    train, test = events.stackoverflow(shared / "data")
    assert (len(train), len(test), train.count) == (3142, 1326, 22)
    assert sum(map(len, test.kinds)) == 97233


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "times", "message"),
    [
        ("1 2\n", "1 2\n3 4\n", "1 lines and .* 2; a sequence is one line"),
        ("1 2\n", "1\n", "line 1 has 2 events .* and 1 times"),
        ("1 23\n", "1 2\n", "line 1: kinds must be 1 to 22, got 23"),
        ("1 1.5\n", "1 2\n", "kinds must be 1 to 22, got 1.5"),
        ("1 2\n", "2 1\n", "time 2 is before the one in front of it"),
        ("1 x\n", "2 1\n", "line 1: numbers are required"),
        ("1 2\n", "2 nan\n", "no finite number"),
        ("1 2\n\n3\n", "2 3\n\n4\n", "line 2: it holds no event"),
    ],
)
def test_a_bad_file_is_named_with_the_line(tmp_path, kinds, times, message):
    write(tmp_path, "test", kinds, times)
    with pytest.raises(DataError, match=message):
        events.read_events(tmp_path, "test", 22)


def test_absent_and_damaged_files_say_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.delenv("PRIMAL_DATA", raising=False)
    with pytest.raises(DataError, match=r"PRIMAL_DATA.*github"):
        events.stackoverflow()
    with pytest.raises(DataError, match="get a fold"):
        events.stackoverflow(tmp_path)
    write(tmp_path, "test", "1\n", "1\n")
    (tmp_path / "event-train.txt.xz").write_bytes(lzma.compress(b"1 2\n")[:-4])
    (tmp_path / "time-train.txt").write_text("1 2\n")
    with pytest.raises(DataError, match="cannot be read"):
        events.stackoverflow(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "times", "message"),
    [
        ([0, 3], [0.0, 1.0], "kinds from 0 to 3"),
        ([0, 1], [1.0, 0.0], "times that fall"),
        ([0, 1], [0.0, np.inf], "times that fall or are no numbers"),
        ([0, 1], [0.0], "as many float64 times"),
        ([0.0, 1.0], [0.0, 1.0], "int64 kinds"),
    ],
)
def test_a_bad_sequence_is_named(kinds, times, message):
    with pytest.raises(DataError, match=f"sequence mine .*{message}"):
        EventSet((np.array(kinds),), (np.array(times),), ("mine",), 3)


# --- the phase task ------------------------------------------------------------------------------


def test_the_kind_is_the_phase_of_a_hidden_clock():
    data = events.phase(300, 12, seed=1, period=7.0)
    votes = events.kernel_vote(data, 7.0)
    last = np.array([kinds[-1] for kinds in data.kinds])
    assert (votes == last).mean() > 0.85
    assert (events.kernel_vote(data, 5.0) == last).mean() < 0.7  # another clock's
    assert all(times[0] == 0 for times in data.times)
    again = events.phase(300, 12, seed=1, period=7.0)
    assert all(np.array_equal(a, b) for a, b in zip(data.times, again.times, strict=True))

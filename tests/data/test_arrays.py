"""numpy files: what comes back is what was saved, and one line about each bad file."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primal.data import arrays
from primal.data.files import read, read_chunks
from primal.data.series import SeriesSet
from primal.errors import DataError

X = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
Y = np.array(["a", "b", "a"])


def saved(tmp_path: Path, **content: Any) -> Path:
    path = tmp_path / "some.npz"
    np.savez(path, **content)
    return path


def assert_equal_sets(one: SeriesSet, other: SeriesSet) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one.values, other.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    np.testing.assert_array_equal(one.targets, other.targets)
    assert one.names == other.names


def a_set(dtype: type = np.float64) -> SeriesSet:
    nan = np.nan
    values: tuple[np.ndarray, ...] = (
        np.array([[1, 2], [nan, 0.1], [5, nan]], dtype),
        np.array([[1 / 3, -1e30]], dtype),
        np.array([[7, 8], [nan, nan]], dtype),  # missing at the end, which is no padding
    )
    return SeriesSet(values, np.array(["x", "Ö", "1"]), ("first", "2", "a b"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_saved_is_read(tmp_path, dtype):
    data = a_set(dtype)
    arrays.save(data, tmp_path / "some.npz")
    assert_equal_sets(read(tmp_path / "some.npz"), data)


def test_numbers_and_no_labels_are_read_back(tmp_path):
    data = a_set()
    numbers = SeriesSet(data.values, np.array([0.1, -3.0, 1e-9]), data.names)
    arrays.save(numbers, tmp_path / "some.npz")
    back = read(tmp_path / "some.npz", numeric=True)
    assert back.targets.tolist() == [0.1, -3.0, 1e-9]
    arrays.save(SeriesSet(data.values, None, data.names), tmp_path / "none.npz")
    assert read(tmp_path / "none.npz").targets is None


def test_times_are_refused(tmp_path):
    data = SeriesSet((np.zeros((2, 1)),), None, ("0",), (np.arange(2.0),))
    with pytest.raises(ValueError, match="write CSV or Parquet"):
        arrays.save(data, tmp_path / "some.npz")


def test_what_a_stranger_saves(tmp_path):
    data = read(saved(tmp_path, X=X, y=np.array([1, 0, 1]), other=Y))
    np.testing.assert_array_equal(np.stack(data.values), X.transpose(0, 2, 1))
    assert data.targets.tolist() == ["1", "0", "1"]
    assert data.names == ("0", "1", "2")
    assert read(saved(tmp_path, X=X)).targets is None
    np.save(tmp_path / "some.npy", X)
    np.testing.assert_array_equal(read(tmp_path / "some.npy").values[2], X[2].T)


@pytest.mark.parametrize("dtype", ["int16", ">f8", "float16", "<f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_types_and_orders_of_memory(tmp_path, dtype, order):
    path = saved(tmp_path, X=X.astype(dtype, order=order), y=Y)
    chunks = list(read_chunks(path, cases=2))
    assert [len(chunk) for chunk in chunks] == [2, 1]
    assert [name for chunk in chunks for name in chunk.names] == ["0", "1", "2"]
    values = [values for chunk in chunks for values in chunk.values]
    np.testing.assert_array_equal(np.stack(values), X.transpose(0, 2, 1))


def test_series_end_where_nothing_follows(tmp_path):
    x = X.copy()
    x[0, :, 2:] = np.nan  # two steps long
    x[1, 0, 2:] = np.nan  # one channel goes on
    x[2, :, 1] = np.nan  # a hole
    data = read(saved(tmp_path, X=x, y=Y))
    assert data.lengths.tolist() == [2, 4, 4]
    data = read(saved(tmp_path, X=x, y=Y, lengths=np.array([3, 4, 2])))
    assert data.lengths.tolist() == [3, 4, 2]


def test_long_cases_are_read_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "NUMBERS", 16)
    assert [len(chunk) for chunk in read_chunks(saved(tmp_path, X=X, y=Y))] == [2, 1]
    monkeypatch.setattr(arrays, "NUMBERS", 1)
    assert [len(chunk) for chunk in read_chunks(saved(tmp_path, X=X, y=Y))] == [1, 1, 1]


def test_reads_in_bounded_memory(tmp_path):
    count = 60_000
    x = np.tile(np.arange(256, dtype=np.float32).reshape(1, 2, 128), (count, 1, 1))
    path = saved(tmp_path, X=x, y=np.arange(count) % 2)  # 60 MB
    del x
    tracemalloc.start()
    cases = sum(len(chunk) for chunk in read_chunks(path, cases=512))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cases == count
    assert path.stat().st_size > 60e6
    assert peak < 12e6


WITH_NAN = np.array([1.0, np.nan, 0.0])
EMPTY = np.full_like(X, np.nan)
INFINITE = np.where(np.arange(24).reshape(X.shape) == 12, np.inf, X)  # case 1, step 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"data": X}, r"needs an array X \(cases, channels, time\), got data"),
        ({"X": X[0]}, r"X must be numbers \(cases, channels, time\), got float32 \(2, 4\)"),
        ({"X": X.astype(str)}, "X must be numbers"),
        ({"X": X.astype(complex)}, "X must be numbers"),
        ({"X": X.astype(object)}, "X holds Python objects, which are never unpickled"),
        ({"X": X, "y": Y.astype(object)}, r"y holds Python objects.*labels as y.astype\(str\)"),
        ({"X": X, "y": Y[:2]}, "y needs one entry for each of 3 cases, got 2"),
        ({"X": X, "y": Y[:, None]}, r"y must have the shape \(cases,\), got \(3, 1\)"),
        ({"X": X, "y": WITH_NAN}, "case 1 has no label; fill it in"),
        ({"X": X, "y": np.array(["a", "", "b"])}, "case 1 has no label; fill it in"),
        ({"X": X, "lengths": np.array([4, 5, 1])}, "case 1: a length of 1 to 4 is required, got 5"),
        ({"X": X, "lengths": np.array([4, 1, 0])}, "case 2: a length of 1 to 4 is required, got 0"),
        ({"X": X, "lengths": WITH_NAN}, "lengths must be integers, got float64"),
        ({"X": X, "names": Y[:1]}, "names needs one entry for each of 3 cases, got 1"),
        ({"X": X[:0], "y": Y[:0]}, "has no case; give a file with at least one"),
        ({"X": X[:, :, :0], "y": Y}, "has empty cases; give each a channel and a time step"),
        ({"X": X[:, :0], "y": Y}, "has empty cases; give each a channel and a time step"),
        ({"X": EMPTY, "y": Y}, "case 0: at least one value is required, got none"),
        ({"X": INFINITE, "y": Y}, "case 1, step 1: finite numbers are required"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path, content, told):
    path = saved(tmp_path, **content)
    with pytest.raises(DataError, match=told) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ";" in message


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kept", [0, 10, 150, 0.5, 0.9])
def test_a_file_cut_short_is_told(tmp_path, kept, compressed):
    path = tmp_path / "cut.npz"
    (np.savez_compressed if compressed else np.savez)(path, X=X, y=Y)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(DataError, match=r"cut.npz cannot be read: .*; save or copy it again"):
        read(path)


def test_an_array_cut_short_is_told(tmp_path):
    path = tmp_path / "cut.npy"
    np.save(path, X)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"cut.npy ends before its array does"):
        read(path)
    path.write_bytes(whole[:40])
    with pytest.raises(DataError, match=r"cut.npy: X is no numpy array"):
        read(path)


@pytest.mark.parametrize(
    "damage",
    [
        (b"(3, ", b"(-3,"),
        (b"'descr'", b"b'desc'"),
        (b"}", b")"),
        (b"}", b" "),
        (b"'<f4'", b"'<x4'"),
    ],
)
def test_a_damaged_header_is_told(tmp_path, damage):
    path = tmp_path / "some.npy"
    np.save(path, X)
    path.write_bytes(path.read_bytes().replace(*damage, 1))
    with pytest.raises(DataError, match=r"some.npy: X is no numpy array \(.*\); save it with"):
        read(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_wrong_checksum_is_noticed(tmp_path, compressed):
    path = tmp_path / "some.npz"
    (np.savez_compressed if compressed else np.savez)(path, X=X, y=Y)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 16] ^= 1  # of X, in the list at the end
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"some.npz cannot be read: Bad CRC-32.*; save or copy"):
        read(path)

"""UEA .ts files: the same numbers as aeon's reader, and one line about each bad file."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from primal.data.files import read, read_chunks
from primal.data.ts import CHARACTERS
from primal.errors import DataError

HEADER = "# a comment\n@problemName vowels\n@univariate false\n@classLabel true a B\n@data\n"
PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "xz": lzma.compress}


@pytest.fixture
def write(tmp_path):
    def written(content: str, name: str = "some_TRAIN.ts") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode())
        return path

    return written


def assert_is_what_aeon_reads(path: Path, plain: Path) -> None:
    """Compare with aeon's reading of ``plain``, the same file unpacked."""
    datasets = pytest.importorskip("aeon.datasets")
    values, labels = datasets.load_from_ts_file(str(plain))
    ours = read(path)
    assert len(ours) == len(values)
    for mine, theirs in zip(ours.values, values, strict=True):
        np.testing.assert_array_equal(mine, theirs.T)
    if len(labels):
        # aeon writes names in small letters, and numbers as numbers.
        numeric = labels.dtype.kind == "f"
        mine = ours.targets.astype(float) if numeric else np.char.lower(ours.targets)
        np.testing.assert_array_equal(mine, labels)
    else:
        assert ours.targets is None


def shipped() -> list[Path]:
    aeon = pytest.importorskip("aeon")
    files = Path(aeon.__file__).parent.glob("datasets/data/*/*.ts")
    return sorted(path for path in files if "TimeStamps" not in path.name)


def test_reads_what_aeon_reads_of_the_sets_it_ships():
    files = shipped()
    assert len(files) > 10
    for path in files:
        assert_is_what_aeon_reads(path, path)


def test_reads_what_aeon_reads_of_the_archive(shared, tmp_path):
    files = sorted(shared.glob("data/uea/*/*.ts*"))
    assert len(files) == 16
    for path in files:
        plain = path
        if path.suffix == ".xz":
            plain = tmp_path / path.stem
            plain.write_bytes(lzma.decompress(path.read_bytes()))
        assert_is_what_aeon_reads(path, plain)


def test_reads_unequal_lengths_missing_values_and_names(write):
    data = read(write(HEADER + "1,2,?:4,5,6:a\n\n-1e3:NaN:B \n"))
    np.testing.assert_array_equal(data.values[0], [[1, 4], [2, 5], [np.nan, 6]])
    np.testing.assert_array_equal(data.values[1], [[-1000, np.nan]])
    assert data.targets.tolist() == ["a", "B"]
    assert data.names == ("0", "1")
    assert data.rows == (6, 8)
    assert data.times is None


def test_labels_may_be_absent_or_numbers(write):
    unlabelled = HEADER.replace("@classLabel true a B", "@classLabel false")
    assert read(write(unlabelled + "1,2:3,4\n")).targets is None
    regression = HEADER.replace("@classLabel true a B", "@targetLabel true")
    numbers = read(write(regression + "1,2:3,4:0.5\n1,2:3,4:-7\n"), numeric=True)
    assert numbers.targets.tolist() == [0.5, -7]


@pytest.mark.parametrize("change", [lambda s: "\ufeff" + s, lambda s: s.replace("\n", "\r\n")])
def test_editors_leave_marks_and_line_ends(write, change):
    data = read(write(change(HEADER + "1,2:3,4:a\n5:6:B\n")))
    assert data.targets.tolist() == ["a", "B"]
    np.testing.assert_array_equal(data.values[0], [[1, 3], [2, 4]])


@pytest.mark.parametrize("packed", ["gz", "xz"])
def test_packed_files(write, packed):
    plain = write(HEADER + "1,2:3,4:a\n5:6:B\n")
    path = plain.with_name(f"some.ts.{packed}")
    path.write_bytes(PACK[packed](plain.read_bytes()))
    np.testing.assert_array_equal(read(path).values[1], read(plain).values[1])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"some.ts.* after row .*; copy or download it again"):
        read(path)


def test_chunks_are_small_for_many_cases_and_for_long_ones(write):
    path = write(HEADER + "1,2:3,4:a\n" * 10)
    assert [len(chunk) for chunk in read_chunks(path, cases=4)] == [4, 4, 2]
    names = [name for chunk in read_chunks(path, cases=4) for name in chunk.names]
    assert names == [str(i) for i in range(10)]
    long = ",".join(["1.5"] * (CHARACTERS // 12))
    path = write(HEADER + f"{long}:{long}:a\n" * 3)
    assert [len(chunk) for chunk in read_chunks(path)] == [2, 1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "needs a line @data"),
        (HEADER, "has no case"),
        (HEADER + "1,2:3,4:a\n1,2:a\n", r"row 7: 2 channels are required.*, got 1"),
        (HEADER + "1,2:3,4:a\n1,2:3,4:5,6:B\n", r"row 7: 2 channels are required.*, got 3"),
        (HEADER + "1,2:3,x:a\n", r"row 6, channel 2, step 2: a number is required, got 'x'"),
        (HEADER + "1,2:3,4\x1c:a\n", r"channel 2, step 2: a number is required, got '4\\x1c'"),
        (HEADER + "1,2:3,:a\n", r"row 6, channel 2, step 2: a number is required, got ''"),
        (HEADER + "1,2:3,4,5:a\n", r"row 6: channel 2 needs 2 values.*, got 3"),
        (HEADER + "1,2::a\n", r"row 6: channel 2 is empty"),
        (HEADER + "1,2:3,4\n", r"row 6: the line must end in a colon and the label"),
        (HEADER + "1,2:3,4:?\n", r"row 6: the case has no label; fill it in"),
        (HEADER + "1,2:3,4: \n", r"row 6: the case has no label"),
        (HEADER + "?,?:?,?:a\n", r"row 6, case 0: at least one value is required"),
        (HEADER + "1,2:3,inf:a\n", r"row 6, case 0, step 2: finite numbers are required"),
        (HEADER + "1,1e39:3,4:a\n", r"row 6, case 0, step 2: finite numbers are required"),
        (HEADER.replace("@data", "@timeStamps true\n@data"), r"@timeStamps true.*give a CSV"),
    ],
)
def test_a_bad_file_is_told_in_one_line(write, content, told):
    path = write(content)
    with pytest.raises(DataError, match=told) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ";" in message  # the remedy follows


def test_a_letter_that_is_no_utf8_is_told_with_its_row(tmp_path):
    path = tmp_path / "latin.ts"
    path.write_bytes(HEADER.encode() + b"1,2:3,4:\xe4\n")
    with pytest.raises(DataError, match=r"latin.ts, row 6: UTF-8 text is required"):
        read(path)

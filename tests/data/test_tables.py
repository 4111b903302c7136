"""Long-format tables: what is read of CSV and Parquet, and one line about each bad file."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primal.data import tables
from primal.data.files import read, read_chunks
from primal.data.tables import Columns
from primal.errors import DataError

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "xz": lzma.compress}

CONTENT = """\
case,time,x,y,label
a,0,1,10,walk
a,0.5,2,,walk
a,2,?,30,walk
7,10,4,40,run
7,11,5,50,run
"""


@pytest.fixture
def write(tmp_path):
    def written(content: str | bytes, name: str = "some.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def assert_is_content(data):
    nan = np.nan
    np.testing.assert_array_equal(data.values[0], [[1, 10], [2, nan], [nan, 30]])
    np.testing.assert_array_equal(data.values[1], [[4, 40], [5, 50]])
    assert [times.tolist() for times in data.times] == [[0, 0.5, 2], [10, 11]]
    assert data.targets.tolist() == ["walk", "run"]
    assert data.names == ("a", "7")
    assert data.channel_names == ("x", "y")


# --- what is accepted -----------------------------------------------------------------------------


def test_a_table_is_read(write):
    data = read(write(CONTENT))
    assert_is_content(data)
    assert data.rows == (2, 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: "\ufeff" + s,
        lambda s: s.replace("\n", "\r\n"),
        lambda s: s.rstrip("\n"),
        lambda s: s.replace("\n", "\n\n") + ",,,,\n\n",
        lambda s: s.replace(",", " , "),
        lambda s: s.replace("walk", '"walk"').replace("case", '"case"').replace("10", '"10"'),
        lambda s: s.replace("?", "NaN"),
        lambda s: s.replace("?", " NA "),
    ],
)
def test_how_programs_write_csv(write, change):
    assert_is_content(read(write(change(CONTENT))))


def test_quoted_cells_may_hold_commas(write):
    data = read(write(CONTENT.replace("walk", '"walk, slowly"').replace("a,", '"a ""1"", b",')))
    assert data.targets.tolist() == ["walk, slowly", "run"]
    assert data.names == ('a "1", b', "7")


@pytest.mark.parametrize("packed", ["gz", "xz"])
def test_packed_files(write, packed):
    path = write(PACK[packed](CONTENT.encode()), f"some.csv.{packed}")
    assert_is_content(read(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"some.csv.* after row .*; copy or download it again"):
        read(path)


def test_columns_have_the_names_and_the_order_one_likes(write):
    renamed = "y,id,class,x,when\n10,a,walk,1,0\n,a,walk,2,0.5\n30,a,walk,,2\n"
    data = read(write(renamed), Columns(case="id", time="when", label="class"))
    assert data.channel_names == ("y", "x")
    assert data.names == ("a",)
    assert data.targets.tolist() == ["walk"]
    np.testing.assert_array_equal(data.times[0], [0, 0.5, 2])


def test_times_and_labels_may_be_absent(write):
    data = read(write("case,x\n1,5\n1,6\n2,7\n"))
    assert data.times is None
    assert data.targets is None
    assert data.names == ("1", "2")


def test_dates_are_seconds_since_the_case_began(write):
    content = (
        "case,time,x\na,2026-01-31,1\na,2026-01-31 00:00:01.000000001,2\n"
        "b,2026-03-01T12:00:00+02:00,3\nb,2026-03-01T12:00:00Z,4\n"
    )
    data = read(write(content))
    assert data.times[0].tolist() == [0, 1.000000001]  # lost, were it since 1970
    assert data.times[1].tolist() == [0, 7200]


def test_large_integer_times_keep_their_differences(write):
    data = read(write("case,time,x\na,1700000000123,1\na,1700000000124,2\n"))
    assert np.diff(data.times[0]).tolist() == [1]


def test_numbers_as_labels(write):
    data = read(write("case,x,label\na,1,0.5\na,2,0.5\nb,3,-2\n"), numeric=True)
    assert data.targets.tolist() == [0.5, -2]


def test_a_log_sorted_by_time_is_gathered(write):
    rows = CONTENT.splitlines()
    path = write("\n".join([rows[i] for i in (0, 1, 4, 2, 5, 3)]))
    data = read(path)
    assert_is_content(data)
    assert data.rows == (2, 3)
    with pytest.raises(DataError, match=r"row 4: the rows of a case must follow.*sort by 'case'"):
        list(read_chunks(path))
    with pytest.raises(DataError, match=r"row 4: the rows of a case must follow.*its own name"):
        read(write("case,x\na,1\nb,2\na,3\n"))  # by what would it be sorted?
    with pytest.raises(DataError, match=r"row 4: the times of a case must increase, got 0 after 1"):
        read(write("case,time,x\na,1,1\nb,2,2\na,0,3\n"))


@pytest.mark.parametrize("lines", [1, 2, 3, 100])
@pytest.mark.parametrize("cases", [1, 2, 100])
def test_cases_are_whole_wherever_the_file_is_cut(write, monkeypatch, lines, cases):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 6, size=20)
    rows = [
        f"{case},{step},{generator.normal()},{case % 3}"
        for case, length in enumerate(lengths)
        for step in range(length)
    ]
    path = write("\n".join(["case,time,x,label", *rows]))
    whole = read(path)
    assert whole.lengths.tolist() == lengths.tolist()
    parquet = path.with_suffix(".parquet")
    pd.read_csv(path).to_parquet(parquet)
    monkeypatch.setattr(tables, "CELLS", 4 * lines)
    for file in (path, parquet):
        chunks = list(read_chunks(file, cases=cases))
        assert max(len(chunk) for chunk in chunks) <= cases
        assert [name for chunk in chunks for name in chunk.names] == list(whole.names)
        values = [values for chunk in chunks for values in chunk.values]
        for mine, theirs in zip(values, whole.values, strict=True):
            np.testing.assert_array_equal(mine, theirs)


# --- Parquet --------------------------------------------------------------------------------------


def frame() -> Any:
    return pd.DataFrame(
        {
            "case": ["a", "a", "a", "7", "7"],
            "time": [0, 0.5, 2, 10, 11],
            "x": [1.0, 2, None, 4, 5],
            "y": pd.array([10, None, 30, 40, 50], dtype="Int32"),
            "label": pd.Categorical(["walk"] * 3 + ["run"] * 2),
        }
    )


def test_parquet_is_read(tmp_path):
    frame().to_parquet(tmp_path / "some.parquet")
    data = read(tmp_path / "some.parquet")
    assert_is_content(data)
    assert data.rows == (1, 4)


def test_parquet_holds_integers_dates_and_an_index(tmp_path):
    changed = frame()
    changed["case"] = [1, 1, 1, 2, 2]
    changed["time"] = pd.to_datetime(changed["time"], unit="s")
    changed["label"] = [0.0, 0, 0, 1, 1]
    changed.index = pd.Index([5, 6, 7, 9, 8])
    changed.to_parquet(tmp_path / "some.parquet")
    data = read(tmp_path / "some.parquet")
    assert data.names == ("1", "2")
    assert data.targets.tolist() == ["0", "1"]
    assert [times.tolist() for times in data.times] == [[0, 0.5, 2], [0, 1]]
    assert data.channel_names == ("x", "y")


@pytest.mark.parametrize(
    ("column", "cells", "told"),
    [
        ("x", ["1", "2", "3", "oh", "5"], r"row 4, column 'x': a finite number.*got 'oh'"),
        ("x", [1, 2, float("inf"), 4, 5], r"row 3, column 'x': a finite number.*got 'inf'"),
        ("x", [True, False] * 2 + [True], r"row 1, column 'x': a finite number.*got 'True'"),
        ("x", [[1]] * 5, r"row 1, column 'x': a finite number.*got"),
        ("time", [0, 1, None, 0, 1], r"row 3, column 'time': a finite number.*got 'nan'"),
        ("time", [0, 2, 1, 0, 1], r"row 3: the times of a case must increase, got 1 after 2"),
        ("label", ["a", "a", "b", "a", "a"], r"row 3: a case has one label, got 'a' and 'b'"),
        ("label", ["a", "a", "a", None, None], r"row 4: case 7 has no label; fill in"),
        ("case", ["a", "a", "a", None, None], r"row 4: a case is required, got an empty cell"),
    ],
)
def test_a_bad_parquet_is_told(tmp_path, column, cells, told):
    changed = frame()
    changed["time"] = [0.0, 1, 2, 0, 1]
    changed[column] = cells
    changed.to_parquet(tmp_path / "some.parquet")
    with pytest.raises(DataError, match=told) as raised:
        read(tmp_path / "some.parquet")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kept", [0, 3, 0.5, 0.99])
def test_a_parquet_cut_short_is_told(tmp_path, kept):
    path = tmp_path / "cut.parquet"
    frame().to_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(DataError, match=r"cut.parquet is no readable Parquet .*; save it again"):
        read(path)


def test_a_parquet_without_rows_is_told(tmp_path):
    frame()[:0].to_parquet(tmp_path / "some.parquet")
    with pytest.raises(DataError, match="has no case"):
        read(tmp_path / "some.parquet")


# --- bad CSV --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", r"row 1: a column 'case'.* is required, got nothing"),
        ("case,time,x,label\n", "has no case"),
        ("a,0,1,10,walk\na,1,2,20,walk\n", r"row 1: a column 'case'.* is required, got 'a', '0'"),
        (CONTENT.replace(",", ";"), r"row 1: commas are required between columns, got ';'; export"),
        (CONTENT.replace(",", "\t"), r"row 1: commas are required between columns, got '\\t'"),
        (CONTENT.replace("case", "id"), r"got 'id', 'time'.*name yours with --data.columns.case"),
        (CONTENT.replace("x,y", "x,x"), r"row 1: each column needs its own name, got 'x' twice"),
        (CONTENT.replace("x,y", "x,"), r"row 1: column 4 needs a name"),
        ("case,time,label\na,0,b\n", r"row 1: at least one column of values is required"),
        (CONTENT.replace("2,,", "2,"), r"row 3: 5 cells are required, as in row 1, got 4"),
        (CONTENT.replace("2,,", "2,,,"), r"row 3: 5 cells are required, as in row 1, got 6"),
        (CONTENT.replace("2,,", '2,"",,'), r"row 3: 5 cells are required, as in row 1, got 6"),
        (CONTENT.replace("30", '"30'), r"row 4: a quotation mark is not closed"),
        (CONTENT.replace("\n", "\r"), r"row 1 is no CSV .*; export the table again"),
        (CONTENT.replace("40", "4\r0"), r"row 5 is no CSV .*; export the table again"),
        (CONTENT.replace("40", "4O"), r"row 5, column 'y': a finite number is required, got '4O'"),
        (CONTENT.replace("40", "-inf"), r"row 5, column 'y': a finite number.*got '-inf'"),
        (CONTENT.replace("40", "1e39"), r"row 5, case 7, step 1: finite numbers are required"),
        (CONTENT.replace("40", '"4,0"'), r"row 5, column 'y': a finite number.*got '4,0'"),
        (CONTENT.replace("0.5", "-1"), r"row 3: the times of a case must increase, got -1 after 0"),
        (CONTENT.replace("0.5", "0"), r"row 3: the times of a case must increase, got 0 twice"),
        (CONTENT.replace("0.5", ""), r"row 3, column 'time': a finite number is required, got"),
        (CONTENT.replace("0.5", "soon"), r"row 3, column 'time': a finite number.*got 'soon'"),
        (CONTENT.replace("a,0,", "a,2026-01-31,"), r"row 3, column 'time': a date.*got '0.5'"),
        (CONTENT.replace("a,2", ",2"), r"row 4: a case is required, got an empty cell; fill in"),
        (CONTENT.replace("?,30,walk", "?,30,run"), r"row 4: a case has one label.* got 'walk' and"),
        (CONTENT.replace("run", ""), r"row 5: case 7 has no label; fill in 'label', or drop"),
        (CONTENT.replace("4,40", ",").replace("5,50", ","), r"row 5, case 7: at least one value"),
        ("case,x,class\na,1,walk\n", r"column 'class'.*name it with --data.columns.label"),
    ],
)
def test_a_bad_csv_is_told_in_one_line(write, content, told):
    path = write(content)
    with pytest.raises(DataError, match=told) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ";" in message


def test_a_wrong_cell_far_down_has_its_row(write, monkeypatch):
    monkeypatch.setattr(tables, "CELLS", 300)
    rows = [f"{i // 10},{i % 10},{i},x" for i in range(1000)]
    rows[777] = rows[777].replace("777", "seven")
    with pytest.raises(DataError, match=r"row 779, column 'v': .* got 'seven'"):
        read(write("\n".join(["case,time,v,label", *rows])))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_letters_are_told(write, encoding):
    row = {"latin-1": 5, "utf-16": 1}[encoding]
    with pytest.raises(DataError, match=rf"some.csv, row {row}: UTF-8 text is required"):
        read(write(CONTENT.replace("run", "läuft").encode(encoding)))

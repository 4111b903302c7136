"""Any file: what is refused before it is read, and what streams without growing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from primal.data.files import SUFFIXES, read
from primal.errors import DataError


def test_what_is_no_file_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "absent.csv", str(tmp_path / "absent.ts")):
        with pytest.raises(DataError, match=r"is no file; check the path\.$"):
            read(path)


@pytest.mark.parametrize("name", ["some.xlsx", "some.txt", "some", "some.zip", "csv"])
def test_an_unknown_ending_is_told_with_those_known(tmp_path, name):
    path = tmp_path / name
    path.write_text("case,x\n1,2\n")
    with pytest.raises(DataError, match=r"must end in one of .*; convert or rename it") as raised:
        read(path)
    assert all(suffix in str(raised.value) for suffix in SUFFIXES)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n\0\0", b"{}" * 99]
)
def test_a_file_of_something_else_is_told_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"some{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ";" in message


@pytest.mark.parametrize("suffix", [".CSV", ".Csv"])
def test_endings_in_capitals(tmp_path, suffix):
    path = tmp_path / f"some{suffix}"
    path.write_text("case,x\n1,2\n")
    assert read(path).values[0].tolist() == [[2]]


def test_a_label_that_is_no_number_is_told_where_numbers_are_wanted(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text("case,x,label\n1,2,0.5\n2,3,high\n")
    assert read(path).targets.tolist() == ["0.5", "high"]
    with pytest.raises(
        DataError, match=r"row 3, case 2: a number is required as label, got 'high'"
    ):
        read(path, numeric=True)


# --- larger than memory ---------------------------------------------------------------------------

STREAM = """
import sys
from pathlib import Path
from primal.data.files import read_chunks

def peak():  # MB; what resource says is inherited from whoever started the process
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

small, large = sys.argv[1:]
for _ in read_chunks(small, cases=512): pass
before = peak()
print(sum(len(chunk) for chunk in read_chunks(large, cases=512)), peak() - before)
"""


def write_text(path: Path, cases: int) -> None:
    """Write cases of 100 steps and 4 channels; every fourth case differs."""
    numbers = np.random.default_rng(0).normal(size=(4, 100, 4)).round(6)
    with path.open("w") as file:
        if path.suffix == ".ts":
            file.write("@classLabel true a b\n@data\n")
            lines = [":".join(",".join(map(str, channel)) for channel in one.T) for one in numbers]
            for case in range(cases):
                file.write(f"{lines[case % 4]}:{'ab'[case % 2]}\n")
            return
        file.write("case,time,p,q,r,s,label\n")
        rows = [
            [f",{t},{','.join(map(str, row))}," for t, row in enumerate(one)] for one in numbers
        ]
        for case in range(cases):
            file.writelines(f"{case}{row}{'ab'[case % 2]}\n" for row in rows[case % 4])


@pytest.mark.parametrize("suffix", [".ts", ".csv", ".parquet"])
def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path, suffix):
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux, which tells how much memory a process has used")
    if suffix != ".ts":
        pd = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
    small, large, cases = tmp_path / f"small{suffix}", tmp_path / f"large{suffix}", 14_000
    if suffix == ".parquet":
        table = pd.DataFrame(
            np.random.default_rng(0).normal(size=(100 * cases, 4)), columns=[*"pqrs"]
        )
        table.insert(0, "case", np.arange(len(table)) // 100)
        table["label"] = table["case"] % 2
        table.to_parquet(large)
        table[: len(table) // 7].to_parquet(small)
    else:
        write_text(small, cases // 7)
        write_text(large, cases)
    size = large.stat().st_size / 2**20
    command = [sys.executable, "-c", STREAM, str(small), str(large)]
    found, grown = subprocess.check_output(command, text=True).split()
    assert int(found) == cases
    assert size > 40
    assert float(grown) < 25  # MB; the values of six sevenths of the cases take 38

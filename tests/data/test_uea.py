"""Sets by their names: where they are looked for, in which order, and what is said without them."""

import subprocess
import sys

import numpy as np
import pytest

from primal.data import arrays, uea
from primal.data.files import read
from primal.errors import DataError

CONTENT = "@classLabel true a b\n@data\n1,2:3,4:a\n5:6:b\n"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("PRIMAL_DATA", raising=False)


@pytest.mark.parametrize("inner", ["Some", ".", "uea/Some"])
@pytest.mark.parametrize("suffix", [".ts", ".npz"])
def test_a_set_is_found_in_a_folder(tmp_path, inner, suffix):
    folder = tmp_path / inner
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("TRAIN", "TEST"):
        path = folder / f"Some_{part}.ts"
        path.write_text(CONTENT)
        if suffix == ".npz":
            arrays.save(read(path), path.with_suffix(".npz"))
            path.unlink()
    splits = uea.load("Some", tmp_path)
    assert splits.train.source == str(folder / f"Some_TRAIN{suffix}")
    assert splits.test.targets.tolist() == ["a", "b"]
    assert splits.test.lengths.tolist() == [2, 1]


def test_the_variable_names_a_folder(tmp_path, monkeypatch):
    (tmp_path / "Some_TEST.ts").write_text(CONTENT)
    assert uea.find("Some", "TEST") is None
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    assert uea.find("Some", "TEST") == tmp_path / "Some_TEST.ts"


def test_a_missing_set_is_told_with_where_to_get_it(tmp_path):
    (tmp_path / "Some_TRAIN.ts").write_text(CONTENT)  # half of it is not enough
    with pytest.raises(DataError, match="Some is not on this machine") as raised:
        uea.load("Some", tmp_path)
    message = str(raised.value)
    assert str(tmp_path) in message
    assert uea.WHERE in message
    assert "--data.root" in message
    assert "\n" not in message


def test_a_download_is_asked_for_and_told_when_it_fails(tmp_path, monkeypatch):
    datasets = pytest.importorskip("aeon.datasets")

    def fetch(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
        if name != "Other":
            raise ConnectionError("no\nroute")
        return np.arange(12.0).reshape(2, 2, 3), np.array(["a", split])

    monkeypatch.setattr(datasets, "load_classification", fetch)
    with pytest.raises(DataError, match="not on this machine"):
        uea.load("Other", tmp_path)
    splits = uea.load("Other", tmp_path, download=True)
    assert splits.test.targets.tolist() == ["a", "test"]
    assert splits.train.values[1].tolist() == [[6, 9], [7, 10], [8, 11]]
    with pytest.raises(DataError, match=r"Some could not be downloaded .*; get it from") as raised:
        uea.load("Some", tmp_path, download=True)
    assert "\n" not in str(raised.value)


def test_aeon_ships_japanese_vowels():
    pytest.importorskip("aeon")
    splits = uea.load("JapaneseVowels")
    assert (len(splits.train), len(splits.test)) == (270, 370)
    assert splits.train.channels == 12
    assert (splits.train.lengths.min(), splits.train.max_length) == (7, 26)
    assert np.unique(splits.train.targets).tolist() == [str(i) for i in range(1, 10)]


def test_every_set_is_the_same_as_npz(shared, tmp_path):
    for name in ("BasicMotions", "JapaneseVowels", "PenDigits"):
        for part in ("TRAIN", "TEST"):
            path = uea.find(name, part, shared / "data")
            data = read(path)
            arrays.save(data, tmp_path / f"{name}_{part}.npz")
            back = read(tmp_path / f"{name}_{part}.npz")
            assert back.names == data.names
            assert back.targets.tolist() == data.targets.tolist()
            assert back.lengths.tolist() == data.lengths.tolist()
            for mine, theirs in zip(back.values, data.values, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_numpy_is_enough_to_read_sets(tmp_path):
    path = tmp_path / "Some_TRAIN.ts"
    path.write_text(CONTENT)
    arrays.save(read(path), tmp_path / "Some_TEST.npz")
    script = (
        "import sys\n"
        "for name in ('aeon', 'pandas', 'pyarrow'): sys.modules[name] = None\n"
        "from primal.data import uea\n"
        f"print(len(uea.load('Some', {str(tmp_path)!r}).test))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "2"

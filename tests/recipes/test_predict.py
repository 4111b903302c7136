"""Prediction for files of any size: in chunks as in one go, and nothing left of a bad file."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from primal.data import arrays
from primal.data.files import read, read_chunks
from primal.data.preparation import Preparation
from primal.errors import DataError
from primal.models.build import EncoderConfig
from primal.recipes.timeseries import TimeSeries, predict
from primal.training.run_folder import RunFolder
from primal.training.series import SeriesModelConfig, SeriesPredictor

CASES = 1200  # some three chunks


def write_csv(path: Path, *, labelled: bool = True) -> Path:
    """Write cases of unequal length at irregular times, with missing values."""
    generator = np.random.default_rng(0)
    lines = ["case,time,x,y" + ",label" * labelled]
    for case in range(CASES):
        for time in np.cumsum(generator.random(generator.integers(1, 7)) + 0.01):
            x, y = generator.normal(size=2)
            hidden = "" if generator.random() < 0.2 else f"{y:.4f}"
            lines.append(f"k{case},{time:.4f},{x:.4f},{hidden}" + f",c{case % 3}" * labelled)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder, whose model was never trained."""
    pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("run")
    data = read(write_csv(folder / "train.csv"))
    torch.manual_seed(0)
    config = SeriesModelConfig(encoder=EncoderConfig(width=16, heads=2, depth=1, rank=4))
    preparation = Preparation.fit(data)
    predictor = SeriesPredictor(config, preparation, data.max_length, torch.device("cpu"))
    predictor.save(folder / RunFolder.MODEL)
    return folder


def test_chunks_are_predicted_as_the_whole_is(run, tmp_path):
    out = tmp_path / "out.csv"
    assert predict(TimeSeries(), run, run / "train.csv", out, "cpu") == CASES
    with out.open() as file:
        header, *rows = csv.reader(file)
    assert header == ["case", "label", "predicted", "c0", "c1", "c2"]
    data = read(run / "train.csv")
    assert len(list(read_chunks(run / "train.csv", cases=512))) > 2
    whole = SeriesPredictor.load(run / RunFolder.MODEL, "cpu").outputs(data).double().softmax(-1)
    assert [row[0] for row in rows] == list(data.names)
    assert [row[1] for row in rows] == data.targets.tolist()
    found = np.array([row[3:] for row in rows], float)
    np.testing.assert_allclose(found, whole.numpy(), atol=2e-6)
    assert [row[2] for row in rows] == [f"c{row.argmax()}" for row in found]
    assert len({row[2] for row in rows}) > 1


def test_labels_may_be_absent(run, tmp_path):
    file, out = write_csv(tmp_path / "new.csv", labelled=False), tmp_path / "out.csv"
    assert predict(TimeSeries(), run, file, out, "cpu") == CASES
    assert out.read_text().splitlines()[0] == "case,predicted,c0,c1,c2"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("c2", "c9", r"row \d+, case k2: a class of training is required, c0, c1, c2, got 'c9'"),
        ("time,x,y", "time,x,z", r"the 2 channels of training .* without y, with z; rename"),
        ("case,time", "case,when", r"the 2 channels of training .* with when"),
    ],
)
def test_a_bad_file_is_named_once_and_leaves_nothing(run, tmp_path, old, new, told):
    file = tmp_path / "new.csv"
    file.write_text((run / "train.csv").read_text().replace(old, new))
    with pytest.raises(DataError, match=told) as raised:
        predict(TimeSeries(), run, file, tmp_path / "out.csv", "cpu")
    assert str(raised.value).count(str(file)) == 1
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_steps_of_another_kind_are_told(run, tmp_path):
    np.savez(tmp_path / "new.npz", X=np.ones((2, 2, 5)))
    told = r"new.npz: times are required, as in training, got none; add their column"
    with pytest.raises(DataError, match=told):
        predict(TimeSeries(), run, tmp_path / "new.npz", tmp_path / "out.csv", "cpu")


def test_formats_are_predicted_alike(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 2, 6)).round(4)
    path = tmp_path / "some.ts"
    cases = [":".join(",".join(map(str, row)) for row in one) for one in x]
    lines = [f"{case}:{'ab'[i % 2]}" for i, case in enumerate(cases)]
    path.write_text("\n".join(["@classLabel true a b", "@data", *lines]))
    data = read(path)
    arrays.save(data, tmp_path / "some.npz")
    preparation = Preparation.fit(data)
    config = SeriesModelConfig(encoder=EncoderConfig(width=16, heads=2, depth=1, rank=4))
    made = SeriesPredictor(config, preparation, data.max_length, torch.device("cpu"))
    made.save(tmp_path / RunFolder.MODEL)
    for suffix in (".ts", ".npz"):
        predict(TimeSeries(), tmp_path, path.with_suffix(suffix), tmp_path / f"{suffix}.csv", "cpu")
    assert (tmp_path / ".ts.csv").read_text() == (tmp_path / ".npz.csv").read_text()

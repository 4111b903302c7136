"""The UEA archive of multivariate series: from a folder, from aeon's package, or downloaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from primal.data.files import read
from primal.data.series import SeriesSet, Splits
from primal.errors import DataError

PAPER = (  # the ten sets of the paper's Table 1
    "EthanolConcentration",
    "FaceDetection",
    "Handwriting",
    "Heartbeat",
    "JapaneseVowels",
    "PEMS-SF",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "SpokenArabicDigits",
    "UWaveGestureLibrary",
)
WHERE = "https://timeseriesclassification.com"


def load(name: str, root: str | Path | None = None, *, download: bool = False) -> Splits:
    """Load a set by its name: from ``root``, from the sets that aeon ships, else if asked the net.

    Without a root, the folder in the environment variable PRIMAL_DATA is searched.
    """
    parts = [find(name, part, root) for part in ("TRAIN", "TEST")]
    if all(parts):
        train, test = (read(part) for part in parts if part is not None)
        return Splits(train, test)
    if not download:
        raise DataError(
            f"{name} is not on this machine (looked in {', '.join(map(str, _folders(root)))}); "
            f"get {name}_TRAIN.ts and {name}_TEST.ts from {WHERE} and give their folder as "
            "--data.root or PRIMAL_DATA, or pass --data.download."
        )
    return _download(name)


def find(name: str, part: str, root: str | Path | None = None) -> Path | None:
    """Return where a set's TRAIN or TEST file is, if it is on this machine."""
    for folder in _folders(root):
        for inner in (folder / name, folder, folder / "uea" / name):
            for suffix in (".ts", ".ts.gz", ".ts.xz", ".npz"):
                path = inner / f"{name}_{part}{suffix}"
                if path.is_file():
                    return path
    return None


def _folders(root: str | Path | None) -> list[Path]:
    given = root or os.environ.get("PRIMAL_DATA")
    shipped = find_spec("aeon")
    folders = [Path(given).expanduser()] if given else []
    if shipped is not None and shipped.origin is not None:
        folders.append(Path(shipped.origin).parent / "datasets" / "data")
    return folders


def _download(name: str) -> Splits:
    try:
        from aeon.datasets import load_classification
    except ImportError:
        raise DataError(
            f"{name} is fetched by aeon, which is not installed: "
            "pip install 'primal-attention[timeseries]'."
        ) from None
    import numpy as np

    sets = []
    for part in ("train", "test"):
        try:
            series, labels = load_classification(name, split=part)
        except Exception as error:  # of whatever kind the net and its archives have
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"{name} could not be downloaded ({what}); get it from "
                f"{WHERE} and give its folder as --data.root."
            ) from None
        sets.append(
            SeriesSet(
                tuple(np.asarray(one, np.float32).T for one in series),
                np.asarray(labels).astype(str),
                tuple(map(str, range(len(series)))),
            )
        )
    return Splits(*sets)

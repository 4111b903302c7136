"""What a run's folder holds, read for showing: any file may be missing, none may be broken."""

import csv
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from primal.errors import DataError
from primal.training.run_folder import RunFolder

MISTAKES, SPECTRUM = "mistakes.json", "spectrum.json"


@dataclass(frozen=True)
class Predictions:
    """The rows of predictions.csv whose label is known."""

    labels: list[str]
    predicted: list[str]
    classes: list[str]  # empty for a regression

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def right(self) -> int:
        return sum(a == b for a, b in zip(self.labels, self.predicted, strict=True))

    def numbers(self) -> list[tuple[float, float]]:
        """Return labels and predictions of a regression."""
        return [(float(a), float(b)) for a, b in zip(self.labels, self.predicted, strict=True)]


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    name: str
    result: dict[str, Any]
    recipe: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    predictions: Predictions | None
    mistakes: list[dict[str, Any]]
    spectra: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metric(self) -> str:
        """What the result is, without the set it was measured on: accuracy or error."""
        given = str(self.result.get("metric", "")).rpartition("/")[2]
        return given or ("accuracy" if self.classifies else "error")

    @property
    def classifies(self) -> bool:
        if self.predictions is not None:
            return bool(self.predictions.classes)
        if "metric" in self.result:
            return str(self.result["metric"]).endswith("accuracy")
        return bool(self.recipe.get("data", {}).get("target") != "value")

    def show(self, value: object) -> str:
        """Write a value of the metric: accuracies in per cent."""
        number = as_number(value)
        if math.isnan(number):
            return "–"
        return f"{100 * number:.1f} %" if self.metric == "accuracy" else f"{number:.4g}"


def read_run(folder: Path) -> Run:
    """Read the folder of a run."""
    if not any((folder / name).is_file() for name in (RunFolder.RECIPE, RunFolder.RESULT)):
        raise DataError(
            f"the folder of a run is required, got {folder} with neither {RunFolder.RESULT} nor "
            f"{RunFolder.RECIPE}; give the folder that primal run printed."
        )
    recipe, result = _object(folder / RunFolder.RECIPE), _object(folder / RunFolder.RESULT)
    return Run(
        str(recipe.get("name") or result.get("recipe") or folder.resolve().name),
        result,
        recipe.get("recipe", {}),
        _object(folder / RunFolder.ENVIRONMENT),
        RunFolder(folder).metrics(),
        _predictions(folder / RunFolder.PREDICTIONS),
        _object(folder / MISTAKES).get("cases", []),
        _object(folder / SPECTRUM).get("models", []),
    )


def as_number(value: object) -> float:
    """Return a float; NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} must be JSON, and is not ({error}); run again.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object, and does not; run again.")
    return content


def _predictions(path: Path) -> Predictions | None:
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if header[1:3] != ["label", "predicted"]:  # predictions for unknown labels: nothing to show
            return None
        # A row that a killed run did not finish says nothing.
        whole = [(row[1], row[2]) for row in rows if len(row) == len(header)]
    if not whole:
        return None
    return Predictions([a for a, _ in whole], [b for _, b in whole], header[3:])

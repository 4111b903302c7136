"""Time series: train on a set of the UEA archive or on anyone's own files, measure, predict."""

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from primal.data import uea
from primal.data.files import read, read_chunks
from primal.data.preparation import Target
from primal.data.series import SeriesSet, Splits, split
from primal.data.tables import Columns
from primal.diagnostics.spectrum import spectrum
from primal.errors import DataError
from primal.models.build import EncoderConfig
from primal.models.closed_form import ClosedFormConfig
from primal.recipes.base import Comparison, Entry, Recipe, Result, Screen
from primal.recipes.published import COLUMNS, NOTE, PEERS, PEERS_NOTE, TABLE_1
from primal.training import distributed
from primal.training.loop import TrainingConfig
from primal.training.run_folder import RunFolder, csv_table
from primal.training.series import (
    DEFAULT_TRAINING,
    Device,
    SeriesModelConfig,
    SeriesPredictor,
    fit_closed_form,
    fit_series,
    measure,
)

PAGE = 64  # cases whose kernels the spectrum averages
MISTAKES = 12  # drawn in the report


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Which series to learn from."""

    name: str | None = None
    """A set of the UEA archive."""
    root: Path | None = None
    """Folder of UEA files; else PRIMAL_DATA and what aeon ships are searched."""
    download: bool = False
    """Fetch the set when it is not on this machine."""
    path: Path | None = None
    """A file of your own to train on: .ts, .npz, .csv, .parquet."""
    test_path: Path | None = None
    """A file of your own to measure with, once, at the end; else part of ``path`` is held out."""
    test: float = 0.2
    """Part of ``path`` to hold out, where there is no test file."""
    columns: Columns = field(default_factory=Columns)
    target: Target = "class"
    """"value" for labels that are numbers to predict."""

    def load(self, seed: int) -> Splits:
        numeric = self.target == "value"
        if (self.name is None) == (self.path is None):
            raise DataError(
                "a file or a set's name is required, and one of them alone: --data.path FILE, or "
                "--data.name NAME."
            )
        if self.name is not None:
            return uea.load(self.name, self.root, download=self.download)
        assert self.path is not None
        whole = read(self.path, self.columns, numeric=numeric)
        if self.test_path is not None:
            return Splits(whole, read(self.test_path, self.columns, numeric=numeric))
        if not self.test:
            return Splits(whole, None)
        return Splits(*split(whole, self.test, seed, by_class=not numeric))


@dataclass(frozen=True, kw_only=True)
class SeriesRecipe(Recipe):
    """What the two ways to learn from series share: the data, and what is made of a predictor."""

    data: SeriesConfig = field(default_factory=SeriesConfig)

    def comparisons(self) -> tuple[Comparison, ...]:
        name = self.data.name or ""
        papers = dict(zip(COLUMNS, TABLE_1.get(name, ()), strict=False))
        shown = ("Transformer", "Flowformer", "PrimalFormer", "Primal.+")
        found = [(who, papers[who], NOTE) for who in shown if who in papers]
        found += [(who, value, PEERS_NOTE) for who, value in PEERS.get(name, {}).items()]
        return tuple(
            Comparison(who=who, value=value / 100, note=note) for who, value, note in found
        )

    def finish(
        self,
        folder: RunFolder,
        predictor: SeriesPredictor,
        test: SeriesSet | None,
        seconds: float,
    ) -> Result:
        """Save the predictor, measure it once, and write down what it got right and wrong."""
        classify = predictor.preparation.classes is not None
        metric = f"test/{'accuracy' if classify else 'error'}"
        metrics: dict[str, float] = {}
        if distributed.is_first():
            predictor.save(folder / RunFolder.MODEL)
        if test is not None:
            outputs = predictor.outputs(test)
            targets = predictor.preparation.targets(test)
            metrics = measure(outputs, targets, predictor.preparation, "test")
            if distributed.is_first():
                with csv_table(folder / RunFolder.PREDICTIONS) as table:
                    write_predictions(table, test, outputs, predictor, header=True)
                folder.write_json("mistakes.json", {"cases": mistakes(test, outputs, predictor)})
        return Result(
            metric=metric,
            value=metrics.get(metric, math.nan),
            metrics=metrics,
            seconds=seconds,
        )


@dataclass(frozen=True, kw_only=True)
class TimeSeries(SeriesRecipe):
    """Train an encoder of time series by gradient descent."""

    model: SeriesModelConfig = field(default_factory=SeriesModelConfig)
    training: TrainingConfig = DEFAULT_TRAINING
    validation: float = 0.0
    """Part of the training cases to hold out, measured after each epoch."""
    protocol: Literal["honest", "paper"] = "honest"
    """"honest" never looks at the test set before the end; "paper" reports its best epoch on it."""
    twin: bool = False
    """Train a Transformer of the same size too, to show its spectrum beside this one's."""

    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,
        watch: Screen | None = None,
    ) -> Result:
        splits = self.data.load(self.training.seed)
        if watch is not None:
            watch.stage(f"training on {len(splits.train)} cases", self.training.epochs)
        predictor, rows = self.fit(splits, device=device, folder=folder, resume=resume, watch=watch)
        result = self.finish(folder, predictor, splits.test, rows[-1]["seconds"])
        self._write_spectra(folder, splits, predictor, device, watch)
        return result

    def seeded(self, seed: int) -> Self:
        return replace(self, training=replace(self.training, seed=seed))

    def fit(
        self,
        splits: Splits,
        *,
        device: Device = "auto",
        folder: RunFolder | None = None,
        resume: bool = False,
        watch: Screen | None = None,
    ) -> tuple[SeriesPredictor, list[dict[str, Any]]]:
        data, training, watched = splits.train, self.training, {}
        if self.validation:
            by_class = self.data.target == "class"
            data, held = split(data, self.validation, training.seed, by_class=by_class)
            if not len(held):
                raise DataError(
                    f"validation={self.validation} of {len(data)} cases leaves none to validate "
                    "on; raise --validation, or set it to 0."
                )
            watched["validation"] = held
        if self.protocol == "paper":
            if splits.test is None:
                raise DataError("the paper's protocol needs a test set; give --data.test-path.")
            watched["test"] = splits.test
            training = replace(training, select="test/accuracy")
        return fit_series(
            self.model,
            data,
            training,
            target=self.data.target,
            watched=watched,
            longest=max(s.max_length for s in (splits.train, splits.test) if s is not None),
            device=device,
            folder=folder,
            resume=resume,
            watch=watch,
        )

    def _write_spectra(
        self,
        folder: RunFolder,
        splits: Splits,
        predictor: SeriesPredictor,
        device: Device,
        watch: Screen | None,
    ) -> None:
        """Write the singular values of every layer's kernel, beside those of a softmax twin."""
        shown = splits.test or splits.train
        shown = shown.subset(range(min(PAGE, len(shown))))
        encoder = self.model.encoder
        models = [(_name(encoder), predictor)]
        if self.twin and encoder.primal_layers:
            if watch is not None:
                twin_is = "a Transformer of the same size, for its spectrum"
                watch.stage(twin_is, self.training.epochs)
            plain = replace(self.model, encoder=replace(encoder, primal_layers=()))
            twin, _ = replace(self, model=plain).fit(splits, device=device, watch=watch)
            models.append((_name(plain.encoder), twin))
        written = []
        for name, each in models:
            x, lengths = each.preparation.inputs(shown)
            layers = spectrum(each.model, x.to(each.device), lengths.to(each.device))
            written.append({"name": name, "layers": [layer.to_json() for layer in layers]})
        if distributed.is_first():
            folder.write_json("spectrum.json", {"models": written})


@dataclass(frozen=True, kw_only=True)
class ClosedForm(SeriesRecipe):
    """Fit a model of time series in seconds, without gradient descent."""

    model: ClosedFormConfig = field(default_factory=ClosedFormConfig)
    seed: int = 0

    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,  # it is over before a resumption would pay
        watch: Screen | None = None,
    ) -> Result:
        splits = self.data.load(self.seed)
        if watch is not None:
            watch.stage(f"fitting {len(splits.train)} cases in closed form")
        started = time.monotonic()
        predictor = fit_closed_form(
            self.model, splits.train, target=self.data.target, seed=self.seed, device=device
        )
        return self.finish(folder, predictor, splits.test, time.monotonic() - started)

    def seeded(self, seed: int) -> Self:
        return replace(self, seed=seed)


def _name(encoder: EncoderConfig) -> str:
    if not encoder.primal_layers:
        return "Transformer"
    return "PrimalFormer" if encoder.primal_layers == "all" else "Primal.+"


# --- what is written down ------------------------------------------------------------------------


def write_predictions(
    table: Any, data: SeriesSet, outputs: Tensor, predictor: SeriesPredictor, *, header: bool
) -> None:
    """Write a row for each case: its name, its label if known, the prediction, probabilities."""
    classes = predictor.preparation.classes
    labels = [] if data.targets is None else ["label"]
    if header:
        table.writerow(["case", *labels, "predicted", *(classes or ())])
    if classes is None:
        found = [[f"{number:.6g}"] for number in predictor.numbers(outputs).tolist()]
    else:
        found = [
            [classes[int(np.argmax(row))], *(f"{p:.6f}" for p in row)]
            for row in outputs.double().softmax(-1).tolist()
        ]
    for i, columns in enumerate(found):
        truth = [] if data.targets is None else [data.targets[i]]
        table.writerow([data.names[i], *truth, *columns])


def mistakes(data: SeriesSet, outputs: Tensor, predictor: SeriesPredictor) -> list[dict[str, Any]]:
    """Return the cases the predictor was most wrong about, most confident first."""
    assert data.targets is not None
    classes = predictor.preparation.classes
    if classes is None:
        predicted = predictor.numbers(outputs).numpy()
        wrongness = np.abs(predicted - data.targets.astype(np.float64))
        told = [f"{number:.4g}" for number in predicted]
        sure = np.full(len(data), np.nan)
    else:
        probabilities = outputs.double().softmax(-1).numpy()
        told = [classes[i] for i in probabilities.argmax(axis=1)]
        sure = probabilities.max(axis=1)
        wrongness = np.where(np.asarray(told) != data.targets, sure, 0.0)
    worst = [int(i) for i in np.argsort(-wrongness)[:MISTAKES] if wrongness[i] > 0]
    return [
        {
            "case": data.names[i],
            "label": str(data.targets[i]),
            "predicted": told[i],
            "probability": None if np.isnan(sure[i]) else float(sure[i]),
            "values": [
                [None if np.isnan(v) else float(f"{v:.4g}") for v in channel]
                for channel in data.values[i].T
            ],
            "times": None if data.times is None else data.times[i].tolist(),
        }
        for i in worst
    ]


# --- prediction ----------------------------------------------------------------------------------


def predict(
    recipe: SeriesRecipe, folder: Path, file: Path, out: Path, device: Device = "auto"
) -> int:
    """Predict for a file of any size, some cases at a time; return how many there were."""
    predictor, cases = SeriesPredictor.load(folder / RunFolder.MODEL, device), 0
    numeric = predictor.preparation.classes is None
    with csv_table(out) as table:
        for chunk in read_chunks(file, recipe.data.columns, numeric=numeric, cases=512):
            outputs = predictor.outputs(chunk)  # names an unknown class, too
            write_predictions(table, chunk, outputs, predictor, header=cases == 0)
            cases += len(chunk)
    return cases


# --- the recipes ---------------------------------------------------------------------------------


RECIPES: dict[str, Entry] = {
    "timeseries": Entry(summary="your own file, an encoder: --data.path FILE", build=TimeSeries),
    "timeseries-closed-form": Entry(
        summary="your own file, in seconds, no gradient descent: --data.path FILE",
        build=ClosedForm,
    ),
}

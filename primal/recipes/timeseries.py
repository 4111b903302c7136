"""Time series: the UEA sets of the paper's Table 1, and anyone's own files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal.data import uea
from primal.data.files import read, read_chunks
from primal.data.preparation import Inputs, Preparation, Target
from primal.data.series import SeriesSet, Splits, split
from primal.data.tables import Columns
from primal.errors import DataError
from primal.functional import ksvd_residual, mask_from_lengths
from primal.models.build import EncoderConfig
from primal.models.classifier import Pooling, Positions, SequenceClassifier
from primal.recipes.base import Device, Entry, Recipe, Result
from primal.training import checkpoint, distributed
from primal.training.loop import Problem, SampleLosses, TrainingConfig, Watcher, train
from primal.training.run_folder import RunFolder


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
    validation: float = 0.0
    """Part of the training cases to hold out, measured after each epoch."""


@dataclass(frozen=True, kw_only=True)
class SeriesModelConfig:
    """The model of a time series."""

    encoder: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(width=128, heads=8, depth=2, rank=16, dropout=0.2)
    )
    positions: Positions = "sinusoidal"
    pooling: Pooling = "mean"
    stem: int = 5
    """How many neighbouring steps the embedding reads."""
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TimeSeries(Recipe):
    """Train a classifier or a regression of time series."""

    data: SeriesConfig = field(default_factory=SeriesConfig)
    model: SeriesModelConfig = field(default_factory=SeriesModelConfig)
    protocol: Literal["honest", "paper"] = "honest"
    """"honest" never looks at the test set before the end; "paper" reports its best epoch on it."""

    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,
        watch: Watcher | None = None,
    ) -> Result:
        splits = self.load()
        training, validation = splits.train, None
        if self.data.validation:
            training, validation = split(
                training,
                self.data.validation,
                self.training.seed,
                by_class=self.data.target == "class",
            )
        preparation = Preparation.fit(training, self.data.target)
        on = choose_device(device)
        torch.manual_seed(self.training.seed)
        model = self.build(preparation, longest=max_length(splits)).to(on)
        examples = _Examples(preparation, training, on)
        measured = {"validation": validation} if validation is not None else {}
        if self.protocol == "paper":
            measured["test"] = splits.test
        held = {n: _Examples(preparation, s, on) for n, s in measured.items() if s is not None}
        problem = Problem(
            model,
            len(training),
            examples.batch,
            self._losses,
            partial(self._evaluate_all, held),
            lambda i: training.names[i],
        )
        rows = train(problem, self._training(), folder, resume=resume, watch=watch)
        model.eval()
        metrics: dict[str, float] = {}
        if splits.test is not None:
            test = _Examples(preparation, splits.test, on)
            outputs = self._outputs(model, test)
            metrics = measure(outputs, test.targets, preparation, "test")
        if distributed.is_first():
            save_model(folder, model, preparation)
            if splits.test is not None:
                self._write_predictions(folder, splits.test, outputs, preparation)
        main = f"test/{'accuracy' if preparation.classes else 'error'}"
        return Result(
            metric=main,
            value=metrics.get(main, math.nan),
            metrics=metrics,
            seconds=rows[-1]["seconds"] if rows else 0.0,
        )

    def load(self) -> Splits:
        data, numeric = self.data, self.data.target == "value"
        if (data.name is None) == (data.path is None):
            raise DataError(
                "either a set's name or a file is required: --data.path FILE, or --data.name NAME."
            )
        if data.name is not None:
            return uea.load(data.name, data.root, download=data.download)
        assert data.path is not None
        whole = read(data.path, data.columns, numeric=numeric)
        if data.test_path is not None:
            return Splits(whole, read(data.test_path, data.columns, numeric=numeric))
        if not data.test:
            return Splits(whole, None)
        return Splits(*split(whole, data.test, self.training.seed, by_class=not numeric))

    def build(self, preparation: Preparation, longest: int) -> SequenceClassifier:
        outputs = 1 if preparation.classes is None else len(preparation.classes)
        return SequenceClassifier(
            preparation.width,
            outputs,
            longest,
            self.model.encoder,
            positions=self.model.positions,
            pooling=self.model.pooling,
            stem=self.model.stem,
        )

    def _training(self) -> TrainingConfig:
        if self.protocol == "paper":
            return replace(self.training, select="test/accuracy")
        return self.training

    def _losses(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> SampleLosses:
        x, mask, target = batch
        output, terms = model(x, mask=mask)
        if target.is_floating_point():
            output = output[:, 0].float()
            task = (output - target).square()
            score = (output.detach() - target).abs()
        else:
            smoothing = self.model.label_smoothing
            task = F.cross_entropy(
                output.float(), target, reduction="none", label_smoothing=smoothing
            )
            score = (output.argmax(-1) == target).float()
        ksvd = torch.zeros_like(task)
        for layer in terms:
            ksvd = ksvd + ksvd_residual(layer).square().expand_as(task) / len(terms)
        return SampleLosses(task, ksvd, score)

    def _evaluate_all(self, held: dict[str, _Examples], model: nn.Module) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, examples in held.items():
            outputs = self._outputs(model, examples)
            found |= measure(outputs, examples.targets, examples.preparation, name)
        return found

    def _outputs(self, model: nn.Module, examples: _Examples) -> Tensor:
        return outputs_of(model, examples.inputs, examples.device)

    def _write_predictions(
        self, folder: RunFolder, test: SeriesSet, outputs: Tensor, preparation: Preparation
    ) -> None:
        with (folder / RunFolder.PREDICTIONS).open("w", newline="") as file:
            write_predictions(csv.writer(file), test, outputs, preparation, header=True)


class _Examples:
    """Prepared cases on a device, cut into batches by indices that live there too."""

    def __init__(self, preparation: Preparation, data: SeriesSet, device: torch.device) -> None:
        self.preparation, self.device = preparation, device
        x, lengths = preparation.inputs(data)
        self.inputs = Inputs(x.to(device), lengths.to(device))
        self.ragged = bool((lengths < x.shape[1]).any())
        self.targets = preparation.targets(data).to(device)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        x, lengths = self.inputs
        chosen, ends = x[index], lengths[index]
        if self.device.type == "cpu":  # a GPU keeps one shape, and never asks for a length
            longest = int(ends.max())
            chosen = chosen[:, :longest]
            if bool((ends == longest).all()):
                return chosen, None, self.targets[index]
        mask = mask_from_lengths(ends, chosen.shape[1]) if self.ragged else None
        return chosen, mask, self.targets[index]


def outputs_of(
    model: nn.Module, inputs: Inputs, device: torch.device, batch_size: int = 256
) -> Tensor:
    """Return the model's outputs (cases, classes), batch by batch, sorted by length in between."""
    order = inputs.lengths.argsort(stable=True)
    parts = []
    with torch.no_grad():
        for chosen in order.split(batch_size):
            lengths = inputs.lengths[chosen]
            longest = int(lengths.max())
            mask = mask_from_lengths(lengths, longest).to(device)
            parts.append(model(inputs.x[chosen, :longest].to(device), mask=mask).logits.float())
    outputs = torch.cat(parts)
    return outputs[order.argsort()]


def measure(
    outputs: Tensor, targets: Tensor, preparation: Preparation, name: str
) -> dict[str, float]:
    """Return loss and accuracy; for numbers the root mean square error, in their own unit, and R²."""
    if preparation.classes is None:
        squared = (outputs[:, 0] - targets).square().double().mean().item()
        spread = targets.double().var(unbiased=False).item()
        return {
            f"{name}/loss": squared,
            f"{name}/error": math.sqrt(squared) * preparation.target_scale,
            f"{name}/r2": 1 - squared / spread if spread else math.nan,
        }
    loss = F.cross_entropy(outputs, targets).item()
    right = (outputs.argmax(-1) == targets).double().mean().item()
    return {f"{name}/loss": loss, f"{name}/accuracy": right}


def write_predictions(
    table: Any, data: SeriesSet, outputs: Tensor, preparation: Preparation, *, header: bool
) -> None:
    """Write a row for each case: its name, its label if known, the prediction, probabilities."""
    known = data.targets is not None
    labels = ["label"] if known else []
    if preparation.classes is None:
        numbers = outputs[:, 0].double() * preparation.target_scale + preparation.target_mean
        if header:
            table.writerow(["case", *labels, "predicted"])
        for i, number in enumerate(numbers.tolist()):
            truth = [data.targets[i]] if data.targets is not None else []
            table.writerow([data.names[i], *truth, f"{number:.6g}"])
        return
    probabilities = outputs.softmax(-1).cpu()
    if header:
        table.writerow(["case", *labels, "predicted", *preparation.classes])
    for i, row in enumerate(probabilities.tolist()):
        truth = [data.targets[i]] if data.targets is not None else []
        best = preparation.classes[int(np.argmax(row))]
        table.writerow([data.names[i], *truth, best, *(f"{p:.6f}" for p in row)])


def save_model(folder: RunFolder, model: SequenceClassifier, preparation: Preparation) -> None:
    state = {"preparation": preparation.to_json(), "max_tokens": model.max_tokens}
    checkpoint.save(folder / RunFolder.MODEL, model.state_dict(), state)


def load_model(recipe: TimeSeries, path: Path) -> tuple[SequenceClassifier, Preparation]:
    """Rebuild the model of a run from its folder."""
    tensors, state = checkpoint.load(path / RunFolder.MODEL)
    preparation = Preparation.from_json(state["preparation"])
    model = recipe.build(preparation, state["max_tokens"])
    model.load_state_dict(tensors)
    return model.eval(), preparation


def predict(recipe: TimeSeries, folder: Path, file: Path, out: Path, device: Device) -> int:
    """Classify a file of any size, some cases at a time; return how many there were."""
    model, preparation = load_model(recipe, folder)
    on = choose_device(device)
    model.to(on)
    temporary, cases = out.with_name(out.name + ".part"), 0
    try:
        with temporary.open("w", newline="") as opened:
            table = csv.writer(opened)
            for chunk in _chunks(recipe, file, preparation):
                if preparation.classes is not None and chunk.targets is not None:
                    preparation.targets(chunk)  # names an unknown class
                outputs = outputs_of(model, preparation.inputs(chunk), on)
                write_predictions(table, chunk, outputs, preparation, header=cases == 0)
                cases += len(chunk)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return cases


def _chunks(recipe: TimeSeries, file: Path, preparation: Preparation) -> Iterator[SeriesSet]:
    for chunk in read_chunks(file, recipe.data.columns, cases=512):
        try:
            yield chunk
        except DataError as error:
            raise DataError(f"{file}: {error}") from None


def choose_device(device: Device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs an NVIDIA GPU and PyTorch's CUDA build; use cpu.")
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


def max_length(splits: Splits) -> int:
    """Return the longest series of all: how far positions and heads that count them must reach."""
    return max(s.max_length for s in (splits.train, splits.test) if s is not None)


# --- the recipes ---------------------------------------------------------------------------------


def _uea(name: str) -> TimeSeries:
    return TimeSeries(
        data=SeriesConfig(name=name),
        training=TrainingConfig(
            epochs=60, batch_size=32, learning_rate=2e-3, weight_decay=0.02, average=0.99
        ),
    )


def _own() -> TimeSeries:
    return replace(_uea(""), data=SeriesConfig(validation=0.1))


BUNDLED = ("BasicMotions",)
FURTHER = ("Libras", "PenDigits", "RacketSports")
RECIPES: dict[str, Entry] = {
    "timeseries": Entry(summary="your own file: --data.path FILE", build=_own),
    **{
        f"uea/{name}": Entry(summary=f"UEA set {name}", build=partial(_uea, name))
        for name in (*uea.PAPER, *BUNDLED, *FURTHER)
    },
}

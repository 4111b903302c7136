"""Events in time: the phase task, and the next badge on Stack Overflow."""

import csv
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal import settings
from primal.data import events
from primal.data.events import EventSet, Windows
from primal.errors import DataError, require_choice
from primal.functional import ksvd_residual, mask_from_lengths
from primal.models.build import EncoderConfig, build_encoder
from primal.models.events import EventPredictor, Recurrence
from primal.recipes.base import Entry, Recipe, Result, Screen
from primal.recipes.cells import run_all, stored
from primal.recipes.layout import Table, percent
from primal.time_encodings import time_encoding
from primal.training import checkpoint, distributed
from primal.training.loop import Problem, SampleLosses, TrainingConfig, train
from primal.training.run_folder import FolderError, RunFolder
from primal.training.series import Device, choose_device


@dataclass(frozen=True, kw_only=True)
class EventModelConfig:
    """The model of events in time."""

    encoder: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(
            width=64, heads=4, depth=2, feedforward=128, primal_layers=(), causal=True
        )
    )
    recurrent: bool = False
    """An LSTM of the encoder's width and depth in its place."""
    embedding: int = 32
    """Width of an event's embedding."""
    time: str | None = "bochner"
    """A name from TIME_ENCODINGS; None leaves times out."""
    features: int = 33
    """Of the time encoding; an odd number is rounded down where pairs are needed."""
    shortest: float = 0.01
    """Period the frequencies reach up to, in the unit of the times."""
    longest: float = 1000.0
    """And from."""
    positions: bool = False
    """Add learnt positions."""

    def build(self, kinds: int, longest: int) -> EventPredictor:
        encoder = self.encoder
        encoding = None
        if self.time is not None:
            paired = self.time == "sinusoidal" or self.time.startswith("bochner")
            encoding = time_encoding(
                self.time,
                self.features - self.features % 2 if paired else self.features,
                shortest=self.shortest,
                longest=self.longest,
            )
        return EventPredictor(
            kinds,
            self.embedding,
            Recurrence(encoder.width, encoder.depth, dropout=encoder.dropout)
            if self.recurrent
            else build_encoder(encoder),
            encoding=encoding,
            positions=longest if self.positions else None,
            dropout=encoder.dropout,
        )


class EventData(NamedTuple):
    """What a recipe trains on, chooses by, and is measured with once."""

    train: EventSet
    validation: EventSet
    test: EventSet


@dataclass(frozen=True, kw_only=True)
class EventRecipe(Recipe):
    """Train a model to predict each next event, measure it once on the test sequences."""

    model: EventModelConfig = field(default_factory=EventModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    window: int = 100
    """Most events that a prediction reads; longer sequences are cut into overlapping windows."""

    @abstractmethod
    def load(self) -> EventData: ...

    @abstractmethod
    def baselines(self, data: EventData) -> dict[str, float]:
        """Return the accuracy of simple rules on the same test events."""

    def measured(self, data: EventSet) -> Windows:
        """Return the windows to measure on; all events count, each once."""
        return events.windows(data, self.window)

    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,
        watch: Screen | None = None,
    ) -> Result:
        data, on = self.load(), choose_device(device)
        if watch is not None:
            watch.stage(f"training on {len(data.train)} sequences", self.training.epochs)
        with torch.random.fork_rng([on] if on.type == "cuda" else []):
            torch.manual_seed(self.training.seed)
            model = self.model.build(data.train.count, self.window).to(on)
            examples = _Examples(events.windows(data.train, self.window), on)
            held = _Examples(self.measured(data.validation), on)
            problem = Problem(
                model,
                len(examples),
                examples.batch,
                partial(_losses, targets=examples.targets),
                lambda trained: _measure(*_outputs(trained, held), "validation"),
                lambda i: data.train.names[int(examples.windows.sequence[i])],
            )
            rows = train(problem, self.training, folder, resume=resume, watch=watch)
        test = _Examples(self.measured(data.test), on)
        logits, targets = _outputs(model.eval(), test)
        metrics = _measure(logits, targets, "test")
        if distributed.is_first():
            save_model(folder / RunFolder.MODEL, self, model)
            _write_predictions(folder / RunFolder.PREDICTIONS, data.test, test.windows, logits)
        return Result(
            metric="test/accuracy",
            value=metrics["test/accuracy"],
            metrics={**metrics, **self.baselines(data)},
            seconds=rows[-1]["seconds"],
        )

    def seeded(self, seed: int) -> Self:
        return replace(self, training=replace(self.training, seed=seed))


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """The phase task: see ``primal.data.events.phase``."""

    train: int = 4000
    """Sequences of each part."""
    validation: int = 1000
    test: int = 4000
    period: float = 7.0
    gap: float = 2.0
    """Mean time between events."""
    seed: int = 0
    """Of the data, which all seeds of training share."""


@dataclass(frozen=True, kw_only=True)
class Phase(EventRecipe):
    """Predict the phase of a hidden clock at the last event of a sequence."""

    data: PhaseConfig = field(default_factory=PhaseConfig)
    window: int = 10

    def load(self) -> EventData:
        data = self.data
        sizes = (data.train, data.validation, data.test)
        return EventData(
            *(
                events.phase(
                    size, self.window + 1, 3 * data.seed + i, period=data.period, gap=data.gap
                )
                for i, size in enumerate(sizes)
            )
        )

    def baselines(self, data: EventData) -> dict[str, float]:
        last = np.array([kinds[-1] for kinds in data.test.kinds])
        vote = events.kernel_vote(data.test, self.data.period)
        return {
            "majority/accuracy": float((last == events.majority(data.train)).mean()),
            "vote/accuracy": float((last == vote).mean()),
        }

    def measured(self, data: EventSet) -> Windows:
        """Return the windows to measure on: the last event counts, with all others before it."""
        windows = events.windows(data, self.window)
        last = torch.arange(windows.kinds.shape[1]) == windows.lengths[:, None] - 1
        return windows._replace(counted=last)


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """Where the data are."""

    root: Path | None = None
    """Folder that holds events/stackoverflow; else that of PRIMAL_DATA."""
    validation: float = 0.1
    """Part of the training users to choose the epoch by."""


@dataclass(frozen=True, kw_only=True)
class StackOverflow(EventRecipe):
    """Predict which badge a user of Stack Overflow earns next, given when."""

    data: EventsConfig = field(default_factory=EventsConfig)

    def load(self) -> EventData:
        train, test = events.stackoverflow(self.data.root)
        kept, held = events.split(train, self.data.validation, self.training.seed)
        if not len(held):
            raise DataError(
                f"validation={self.data.validation} of {len(train)} users leaves none to choose "
                "the epoch by; raise --data.validation."
            )
        return EventData(kept, held, test)

    def baselines(self, data: EventData) -> dict[str, float]:
        targets = np.concatenate([kinds[1:] for kinds in data.test.kinds])
        before = np.concatenate([kinds[:-1] for kinds in data.test.kinds])
        whole = EventSet(  # neither rule chooses anything: all training users are theirs
            data.train.kinds + data.validation.kinds,
            data.train.times + data.validation.times,
            data.train.names + data.validation.names,
            data.train.count,
        )
        return {
            "majority/accuracy": float((targets == events.majority(whole)).mean()),
            "markov/accuracy": float((targets == events.markov(whole)[before]).mean()),
        }


# --- training and measuring ----------------------------------------------------------------------


class _Batch(NamedTuple):
    kinds: Tensor
    times: Tensor
    asked: Tensor
    mask: Tensor | None
    targets: Tensor
    counted: Tensor


class _Examples:
    """Windows on a device, cut into batches by indices that live there too."""

    def __init__(self, windows: Windows, device: torch.device) -> None:
        self.windows = Windows(*(tensor.to(device) for tensor in windows))
        self.ragged = bool((windows.lengths < windows.kinds.shape[1]).any())
        self.targets = float(windows.counted.sum()) / len(windows.kinds)  # of a window, on average
        self.device = device

    def __len__(self) -> int:
        return len(self.windows.kinds)

    def batch(self, index: Tensor) -> _Batch:
        windows = self.windows
        lengths, end = windows.lengths[index], windows.kinds.shape[1]
        if self.device.type == "cpu":  # a GPU keeps one shape, and never asks for a length
            end = int(lengths.max())
        mask = mask_from_lengths(lengths, end) if self.ragged else None
        kinds, times, asked, targets, counted = (
            tensor[index, :end]
            for tensor in (
                windows.kinds,
                windows.times,
                windows.asked,
                windows.targets,
                windows.counted,
            )
        )
        return _Batch(kinds, times, asked, mask, targets, counted)


def _losses(model: nn.Module, batch: _Batch, *, targets: float) -> SampleLosses:
    """Weigh every event alike: a window's loss is its sum, over what a window holds on average."""
    output, terms = model(batch.kinds, batch.times, batch.asked, mask=batch.mask)
    each = F.cross_entropy(output.float().mT, batch.targets, reduction="none")
    right = (output.argmax(-1) == batch.targets).float()
    squares = [ksvd_residual(layer).square().expand(len(each)) for layer in terms]
    ksvd = torch.stack(squares, dim=1) if squares else each.new_zeros(len(each), 0)
    return SampleLosses(
        (each * batch.counted).sum(1) / targets, ksvd, (right * batch.counted).sum(1) / targets
    )


@torch.no_grad()
def _outputs(model: nn.Module, examples: _Examples, size: int = 128) -> tuple[Tensor, Tensor]:
    """Return logits (events, kinds) and targets of all that counts, window after window."""
    order = examples.windows.lengths.argsort(stable=True)
    parts: list[Tensor] = []
    for index in order.split(size):
        batch = examples.batch(index)
        output, _ = model(batch.kinds, batch.times, batch.asked, mask=batch.mask)
        parts += output.float().cpu().unbind(0)
    counted = examples.windows.counted.cpu()
    place = order.argsort().tolist()
    logits = [
        parts[place[i]][counted[i, : len(parts[place[i]])]] for i in range(len(examples.windows[0]))
    ]
    return torch.cat(logits), examples.windows.targets.cpu()[counted]


def _measure(logits: Tensor, targets: Tensor, name: str) -> dict[str, float]:
    right = (logits.argmax(-1) == targets).double().mean().item()
    return {
        f"{name}/loss": F.cross_entropy(logits, targets).item(),
        f"{name}/accuracy": right,
    }


def save_model(path: Path, recipe: EventRecipe, model: EventPredictor) -> None:
    state = {
        "config": settings.to_json(recipe.model),
        "kinds": model.kinds,
        "longest": recipe.window,
    }
    checkpoint.save(path, model.state_dict(), state)


def load_model(path: Path) -> EventPredictor:
    """Rebuild the model of a run from its file."""
    tensors, state = checkpoint.load(path)
    config = settings.from_json(EventModelConfig, state["config"])
    model = config.build(state["kinds"], state["longest"])
    model.load_state_dict(tensors)
    return model.eval()


def _write_predictions(path: Path, data: EventSet, windows: Windows, logits: Tensor) -> None:
    """Write a row for each event that counts; its case is the sequence and the event's number."""
    counted = windows.counted.cpu().nonzero().tolist()
    sequence, start = windows.sequence.tolist(), windows.start.tolist()
    probabilities = logits.double().softmax(-1)
    with _table(path) as table:
        table.writerow(["case", "label", "predicted", *range(data.count)])
        for (row, n), predicted, some in zip(
            counted, logits.argmax(-1).tolist(), probabilities.tolist(), strict=True
        ):
            i, event = sequence[row], start[row] + n + 1
            case, label = f"{data.names[i]}:{event + 1}", data.kinds[i][event]
            table.writerow([case, label, predicted, *(f"{p:.4f}" for p in some)])


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("w", newline="") as opened:
            yield csv.writer(opened)
        temporary.replace(path)
    except OSError as error:
        raise FolderError(f"{path} could not be written ({error}); give another place.") from None
    finally:
        temporary.unlink(missing_ok=True)

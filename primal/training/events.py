"""Events in, a forecaster out: what joins sequences, model and loop, on anyone's own events too."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal.data import events
from primal.data.events import EventSet, Windows
from primal.functional import ksvd_residual, mask_from_lengths
from primal.models.build import EncoderConfig, build_encoder
from primal.models.events import EventPredictor, PlainTime, Recurrence
from primal.settings import from_json, to_json
from primal.time_encodings import time_encoding
from primal.training import checkpoint
from primal.training.loop import Problem, SampleLosses, TrainingConfig, Watcher, train
from primal.training.run_folder import RunFolder
from primal.training.series import Device, choose_device


@dataclass(frozen=True, kw_only=True)
class EventModelConfig:
    """The model of events in time."""

    encoder: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(
            width=64, heads=4, depth=1, feedforward=128, primal_layers=(), causal=True
        )
    )
    recurrent: bool = False
    """An LSTM of the encoder's width and depth in its place."""
    embedding: int = 32
    """Width of an event's embedding."""
    time: str | None = "bochner"
    """A name from TIME_ENCODINGS; "plain" gives the number itself, None leaves times out."""
    features: int = 32
    """Of the time encoding."""
    shortest: float = 1.0
    """Period the frequencies reach up to, in the unit of the times."""
    longest: float = 1000.0
    """And from."""
    positions: bool = False
    """Add learnt positions."""

    def build(self, kinds: int, window: int) -> EventPredictor:
        encoder = self.encoder
        periods = {"shortest": self.shortest, "longest": self.longest}
        encoding = None
        if self.time is not None:
            plain = self.time == "plain"
            encoding = (
                PlainTime(**periods)
                if plain
                else time_encoding(self.time, self.features, **periods)
            )
        return EventPredictor(
            kinds,
            self.embedding,
            Recurrence(encoder.width, encoder.depth, dropout=encoder.dropout)
            if self.recurrent
            else build_encoder(encoder),
            encoding=encoding,
            positions=window if self.positions else None,
            dropout=encoder.dropout,
        )


@final
class Forecaster:
    """A model of events, how many kinds it knows, and how many events back it reads."""

    def __init__(
        self, config: EventModelConfig, kinds: int, window: int, device: torch.device
    ) -> None:
        self.config, self.kinds, self.window, self.device = config, kinds, window, device
        self.model = config.build(kinds, window).to(device)

    def logits(self, windows: Windows) -> Tensor:  # (counted, kinds), on the CPU
        """Return the logits of all targets that count, window after window."""
        return self._logits(_Examples(windows, self.device))

    @torch.no_grad()
    def _logits(self, examples: "_Examples", batch_size: int = 128) -> Tensor:
        self.model.eval()
        counted = examples.windows.counted
        logits = torch.zeros(*counted.shape, self.kinds)
        for index in examples.windows.lengths.argsort(stable=True).split(batch_size):
            batch = examples.batch(index)
            output = self.model(batch.kinds, batch.times, batch.asked, mask=batch.mask).logits
            logits[index.cpu(), : output.shape[1]] = output.float().cpu()
        return logits[counted.cpu()]

    def forecast(self, kinds: np.ndarray, times: np.ndarray, asked: float) -> np.ndarray:
        """Return the probability of each kind at time ``asked``, after the events given."""
        last = slice(-self.window, None)
        sequence = EventSet(
            (np.append(kinds[last], 0),),  # the last kind is what is asked for, and never read
            (np.append(times[last], asked),),
            ("given",),
            self.kinds,
        )
        return self.logits(events.windows(sequence, self.window))[-1].double().softmax(0).numpy()

    def save(self, path: str | Path) -> None:
        """Write one file that is all it takes to predict."""
        state = {"config": to_json(self.config), "kinds": self.kinds, "window": self.window}
        checkpoint.save(Path(path), self.model.state_dict(), state)

    @classmethod
    def load(cls, path: str | Path, device: Device = "auto") -> Self:
        tensors, state = checkpoint.load(Path(path))
        config = from_json(EventModelConfig, state["config"])
        made = cls(config, state["kinds"], state["window"], choose_device(device))
        made.model.load_state_dict(tensors)
        return made


def fit_events(
    config: EventModelConfig,
    data: EventSet,
    training: TrainingConfig,
    *,
    window: int = 100,
    validation: EventSet | None = None,
    measured: Callable[[EventSet], Windows] | None = None,
    device: Device = "auto",
    folder: RunFolder | None = None,
    resume: bool = False,
    watch: Watcher | None = None,
) -> tuple[Forecaster, list[dict[str, Any]]]:
    """Train a model of events; return it and a row of metrics for each epoch.

    Args:
        window: most events that a prediction reads; longer sequences are cut, with overlap.
        validation: sequences to measure after each epoch.
        measured: makes the windows to measure with; by default every event counts.
    """
    on = choose_device(device)
    measured = partial(events.windows, longest=window) if measured is None else measured
    with torch.random.fork_rng([on] if on.type == "cuda" else []):
        torch.manual_seed(training.seed)
        forecaster = Forecaster(config, data.count, window, on)
        examples = _Examples(events.windows(data, window), on)
        held = None if validation is None else _Examples(measured(validation), on)

        def evaluate(_: nn.Module) -> dict[str, float]:
            if held is None:
                return {}
            return measure(forecaster._logits(held), held.targets(), "validation")

        problem = Problem(
            forecaster.model,
            len(examples.windows.kinds),
            examples.batch,
            partial(_losses, targets=float(examples.windows.counted.sum(1).double().mean())),
            evaluate,
            lambda i: data.names[int(examples.windows.sequence[i])],
        )
        rows = train(problem, training, folder, resume=resume, watch=watch)
    return forecaster, rows


def measure(logits: Tensor, targets: Tensor, name: str) -> dict[str, float]:
    """Return the accuracy, and the loss: minus the mean log-likelihood of an event."""
    right = (logits.argmax(-1) == targets).double().mean().item()
    return {f"{name}/loss": F.cross_entropy(logits, targets).item(), f"{name}/accuracy": right}


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
        self.device = device

    def targets(self) -> Tensor:  # (counted,), on the CPU
        return self.windows.targets[self.windows.counted].cpu()

    def batch(self, index: Tensor) -> _Batch:
        windows = self.windows
        lengths, end = windows.lengths[index], windows.kinds.shape[1]
        if self.device.type == "cpu":  # a GPU keeps one shape, and never asks for a length
            end = int(lengths.max())
        return _Batch(
            windows.kinds[index, :end],
            windows.times[index, :end],
            windows.asked[index, :end],
            mask_from_lengths(lengths, end) if self.ragged else None,
            windows.targets[index, :end],
            windows.counted[index, :end],
        )


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

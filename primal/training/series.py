"""Series in, a predictor out: what joins data, model and loop, for recipes and estimators alike."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal.data.preparation import Inputs, Preparation, Target
from primal.data.series import SeriesSet
from primal.errors import DataError
from primal.functional import ksvd_residual, mask_from_lengths
from primal.models.build import EncoderConfig
from primal.models.classifier import Pooling, Positions, SequenceClassifier
from primal.models.closed_form import ClosedFormConfig, ClosedFormModel
from primal.settings import from_json, to_json
from primal.training import checkpoint
from primal.training.loop import Problem, SampleLosses, TrainingConfig, Watcher, train
from primal.training.run_folder import RunFolder

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class SeriesModelConfig:
    """The encoder of a time series, trained by gradient descent."""

    encoder: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(width=128, heads=8, depth=2, rank=16, dropout=0.2)
    )
    positions: Positions = "sinusoidal"
    pooling: Pooling = "mean"
    stem: int = 5
    """How many neighbouring steps the embedding reads."""
    label_smoothing: float = 0.0

    def build(self, channels: int, outputs: int, longest: int) -> nn.Module:
        return SequenceClassifier(
            channels,
            outputs,
            longest,
            self.encoder,
            positions=self.positions,
            pooling=self.pooling,
            stem=self.stem,
        )


DEFAULT_TRAINING = TrainingConfig(
    epochs=60, batch_size=32, learning_rate=2e-3, weight_decay=0.02, average=0.99
)

# How a saved predictor says which settings it was built from.
KINDS: dict[str, type[SeriesModelConfig] | type[ClosedFormConfig]] = {
    "encoder": SeriesModelConfig,
    "closed_form": ClosedFormConfig,
}


@final
class SeriesPredictor:
    """A model of series, and what was fitted on its training cases beside it."""

    def __init__(
        self,
        config: SeriesModelConfig | ClosedFormConfig,
        preparation: Preparation,
        longest: int,
        device: torch.device,
    ) -> None:
        self.config, self.preparation, self.longest = config, preparation, longest
        self.device = device
        outputs = 1 if preparation.classes is None else len(preparation.classes)
        if isinstance(config, ClosedFormConfig):
            model: nn.Module = ClosedFormModel(preparation.width, outputs, longest, config)
        else:
            model = config.build(preparation.width, outputs, longest)
        self.model = model.to(device)

    def outputs(self, data: SeriesSet) -> Tensor:  # (cases, outputs), on the CPU
        """Return logits, or numbers in the unit of the standardised targets."""
        return self.outputs_of(self.preparation.inputs(data))

    def outputs_of(self, inputs: Inputs, batch_size: int = 256) -> Tensor:
        """Predict batch by batch, cases of like length together."""
        self.model.eval()
        order = inputs.lengths.argsort(stable=True)
        parts = []
        with torch.no_grad():
            for chosen in order.split(batch_size):
                lengths = inputs.lengths[chosen]
                longest = int(lengths.max())
                x = inputs.x[chosen, :longest].to(self.device)
                mask = None
                if bool((lengths < longest).any()):
                    mask = mask_from_lengths(lengths, longest).to(self.device)
                parts.append(self.model(x, mask=mask).logits.float())
        outputs = torch.cat(parts).cpu()
        return outputs[order.to(outputs.device).argsort()]

    def numbers(self, outputs: Tensor) -> Tensor:  # (cases, 1) -> (cases,)
        """Return the outputs of a regression in the unit of its targets."""
        prepared = self.preparation
        return outputs[:, 0].double() * prepared.target_scale + prepared.target_mean

    def save(self, path: Path) -> None:
        """Write one file that is all it takes to predict."""
        kind = next(name for name, kind in KINDS.items() if isinstance(self.config, kind))
        state = {
            "model": kind,
            "config": to_json(self.config),
            "preparation": self.preparation.to_json(),
            "longest": self.longest,
        }
        checkpoint.save(path, self.model.state_dict(), state)

    @classmethod
    def load(cls, path: Path, device: Device = "auto") -> Self:
        tensors, state = checkpoint.load(path)
        config = from_json(KINDS[state["model"]], state["config"])
        preparation = Preparation.from_json(state["preparation"])
        made = cls(config, preparation, state["longest"], choose_device(device))
        made.model.load_state_dict(tensors)
        made.model.eval()
        return made


def fit_series(
    config: SeriesModelConfig,
    data: SeriesSet,
    training: TrainingConfig,
    *,
    target: Target = "class",
    watched: Mapping[str, SeriesSet] | None = None,
    longest: int | None = None,
    device: Device = "auto",
    folder: RunFolder | None = None,
    resume: bool = False,
    watch: Watcher | None = None,
) -> tuple[SeriesPredictor, list[dict[str, Any]]]:
    """Train a model on series; return it and a row of metrics for each epoch.

    Args:
        watched: further cases by name, measured after each epoch: {"validation": ...}.
        longest: the longest series to come, which heads that read every position must know.
    """
    preparation = Preparation.fit(data, target)
    on = choose_device(device)
    devices = [on] if on.type == "cuda" else []
    with torch.random.fork_rng(devices):  # what the caller draws next is none of our business
        torch.manual_seed(training.seed)
        predictor = SeriesPredictor(config, preparation, longest or data.max_length, on)
        examples = _Examples(preparation, data, on)
        held = {name: _Examples(preparation, some, on) for name, some in (watched or {}).items()}

        def evaluate(_: nn.Module) -> dict[str, float]:
            found: dict[str, float] = {}
            for name, some in held.items():
                outputs = predictor.outputs_of(some.inputs)
                found |= measure(outputs, some.targets.cpu(), preparation, name)
            return found

        problem = Problem(
            predictor.model,
            len(data),
            examples.batch,
            lambda model, batch: _losses(model, batch, config.label_smoothing),
            evaluate,
            lambda i: data.names[i],
        )
        rows = train(problem, training, folder, resume=resume, watch=watch)
    predictor.model.eval()
    return predictor, rows


def fit_closed_form(
    config: ClosedFormConfig,
    data: SeriesSet,
    *,
    target: Target = "class",
    longest: int | None = None,
    seed: int = 0,
    device: Device = "auto",
) -> SeriesPredictor:
    """Fit a model of series without gradient descent."""
    preparation = Preparation.fit(data, target)
    on = choose_device(device)
    predictor = SeriesPredictor(config, preparation, longest or data.max_length, on)
    model, (x, lengths) = predictor.model, preparation.inputs(data)
    assert isinstance(model, ClosedFormModel)
    model.fit(x.to(on), lengths.to(on), preparation.targets(data).to(on), seed=seed)
    model.eval()
    return predictor


def measure(
    outputs: Tensor, targets: Tensor, preparation: Preparation, name: str
) -> dict[str, float]:
    """Return loss and accuracy; of numbers the root mean square error, in their unit, and R²."""
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


def choose_device(device: Device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise DataError("device cuda needs an NVIDIA GPU and PyTorch's CUDA build; use cpu.")
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


class _Examples:
    """Prepared cases on a device, cut into batches by indices that live there too."""

    def __init__(self, preparation: Preparation, data: SeriesSet, device: torch.device) -> None:
        x, lengths = preparation.inputs(data)
        self.device = device
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


def _losses(
    model: nn.Module, batch: tuple[Tensor, Tensor | None, Tensor], smoothing: float
) -> SampleLosses:
    x, mask, target = batch
    output, terms = model(x, mask=mask)
    if target.is_floating_point():
        numbers = output[:, 0].float()
        task = (numbers - target).square()
        score = (numbers.detach() - target).abs()
    else:
        task = F.cross_entropy(output.float(), target, reduction="none", label_smoothing=smoothing)
        score = (output.argmax(-1) == target).float()
    squares = [ksvd_residual(layer).square().expand_as(task) for layer in terms]
    ksvd = torch.stack(squares, dim=1) if squares else task.new_zeros(len(task), 0)
    return SampleLosses(task, ksvd, score)

"""Series in, a predictor out: what it predicts depends on the case alone."""

import numpy as np
import pytest
import torch

from primal.data.series import SeriesSet
from primal.errors import DataError
from primal.models.build import EncoderConfig
from primal.models.closed_form import ClosedFormConfig
from primal.training.loop import TrainingConfig
from primal.training.series import (
    SeriesModelConfig,
    SeriesPredictor,
    choose_device,
    fit_closed_form,
    fit_series,
)

ENCODER = SeriesModelConfig(
    encoder=EncoderConfig(width=32, heads=2, depth=1, rank=4, primal_layers="all")
)
TRAINING = TrainingConfig(epochs=8, batch_size=8, learning_rate=1e-2)


def series(cases: int = 40, seed: int = 0) -> SeriesSet:
    """Two classes that differ in their slope; 5 to 20 steps of two channels."""
    generator = np.random.default_rng(seed)
    values, targets = [], []
    for case in range(cases):
        steps = int(generator.integers(5, 21))
        slope = 1 if case % 2 else -1
        ramp = slope * np.linspace(-1, 1, steps)[:, None]
        values.append(ramp + generator.normal(size=(steps, 2)) / 5)
        targets.append("up" if case % 2 else "down")
    return SeriesSet(tuple(values), np.array(targets), tuple(map(str, range(cases))))


def fitted(kind: str, data: SeriesSet, target="class") -> SeriesPredictor:
    if kind == "closed form":
        return fit_closed_form(ClosedFormConfig(), data, target=target)
    predictor, _ = fit_series(ENCODER, data, TRAINING, target=target)
    return predictor


@pytest.mark.parametrize("kind", ["encoder", "closed form"])
def test_it_learns_and_each_case_stands_alone(kind):
    predictor, test = fitted(kind, series()), series(seed=1)
    outputs = predictor.outputs(test)
    right = outputs.argmax(-1) == predictor.preparation.targets(test)
    assert right.double().mean() > 0.9
    for chosen in ([0], [3, 1], list(range(39, -1, -1))):
        torch.testing.assert_close(
            predictor.outputs(test.subset(chosen)), outputs[chosen], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["encoder", "closed form"])
def test_what_is_saved_predicts_the_same(kind, tmp_path):
    predictor, test = fitted(kind, series()), series(seed=1)
    predictor.save(tmp_path / "model.safetensors")
    loaded = SeriesPredictor.load(tmp_path / "model.safetensors")
    assert torch.equal(loaded.outputs(test), predictor.outputs(test))
    assert loaded.config == predictor.config
    assert loaded.preparation == predictor.preparation


@pytest.mark.parametrize("kind", ["encoder", "closed form"])
def test_numbers_come_in_their_own_unit(kind):
    data, test = series(), series(seed=1)

    def numbered(some: SeriesSet) -> SeriesSet:
        numbers = np.where(some.targets == "up", 1020.0, 980.0)
        return SeriesSet(some.values, numbers, some.names)

    predictor = fitted(kind, numbered(data), "value")
    predicted = predictor.numbers(predictor.outputs(numbered(test)))
    truth = torch.from_numpy(numbered(test).targets)
    assert (predicted - truth).square().mean().sqrt() < 12  # of a spread of 20


def test_metrics_of_every_watched_set():
    data, watched = series(), series(seed=1)
    predictor, rows = fit_series(ENCODER, data, TRAINING, watched={"validation": watched})
    assert len(rows) == TRAINING.epochs
    assert {"validation/loss", "validation/accuracy", "train/loss"} <= rows[-1].keys()
    right = predictor.outputs(watched).argmax(-1) == predictor.preparation.targets(watched)
    assert rows[-1]["validation/accuracy"] == pytest.approx(right.double().mean().item())


def test_the_best_epoch_is_kept():
    watched = series(20, seed=1)
    training = TrainingConfig(
        epochs=6, batch_size=8, learning_rate=5e-2, schedule="constant", select="validation/loss"
    )
    predictor, rows = fit_series(ENCODER, series(), training, watched={"validation": watched})
    best = min(row["validation/loss"] for row in rows)
    outputs = predictor.outputs(watched)
    loss = torch.nn.functional.cross_entropy(outputs, predictor.preparation.targets(watched))
    assert loss.item() == pytest.approx(best, rel=1e-5)


def test_a_gpu_must_be_there():
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match="use cpu"):
            choose_device("cuda")
        assert choose_device("auto").type == "cpu"

"""Fitting a model of events, and asking it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from primal.data import events
from primal.data.events import EventSet
from primal.errors import DataError
from primal.models.build import EncoderConfig
from primal.training.events import EventModelConfig, Forecaster, fit_events, measure
from primal.training.loop import TrainingConfig

SMALL = EventModelConfig(
    encoder=EncoderConfig(
        width=16, heads=2, depth=1, feedforward=16, primal_layers=(), causal=True, dropout=0.0
    ),
    embedding=8,
    features=8,
)
BRIEF = TrainingConfig(epochs=1, batch_size=16, learning_rate=1e-2)


def taking_turns(sequences: int = 32, kinds: int = 3) -> EventSet:
    """Return sequences in which each kind follows the one before it."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, 20, sequences)
    return EventSet(
        tuple((np.arange(n) + random.integers(kinds)) % kinds for n in lengths),
        tuple(random.exponential(2, n).cumsum() for n in lengths),
        tuple(map(str, range(sequences))),
        kinds,
    )


def test_it_learns_what_can_be_learnt():
    data = taking_turns()
    forecaster, rows = fit_events(
        SMALL, data, replace(BRIEF, epochs=12), window=8, validation=data, device="cpu"
    )
    assert rows[-1]["validation/accuracy"] == 1
    found = forecaster.forecast(data.kinds[0], data.times[0], data.times[0][-1] + 1)
    assert found.argmax() == (data.kinds[0][-1] + 1) % 3
    assert found.sum() == pytest.approx(1)


def test_a_forecast_is_what_the_windows_give():
    data = taking_turns()
    forecaster, _ = fit_events(SMALL, data, BRIEF, window=100, device="cpu")
    one = data.subset([1])
    expected = forecaster.logits(events.windows(one, 100)).double().softmax(-1)
    for n in (1, 3):
        found = forecaster.forecast(one.kinds[0][:n], one.times[0][:n], one.times[0][n])
        np.testing.assert_allclose(found, expected[n - 1].numpy(), atol=1e-6)
    with pytest.raises(DataError, match="fall"):
        forecaster.forecast(one.kinds[0], one.times[0], -1.0)


def test_logits_stand_in_the_order_of_the_windows():
    data = taking_turns()
    forecaster, _ = fit_events(SMALL, data, BRIEF, window=6, device="cpu")
    together = forecaster.logits(events.windows(data, 6))
    alone = [forecaster.logits(events.windows(data.subset([i]), 6)) for i in range(len(data))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [{"time": "plain"}, {"recurrent": True}, {"positions": True}])
def test_a_saved_forecaster_predicts_the_same(change, tmp_path):
    data = taking_turns()
    config = replace(SMALL, **change)
    forecaster, _ = fit_events(config, data, BRIEF, window=9, device="cpu")
    forecaster.save(tmp_path / "model.safetensors")
    again = Forecaster.load(tmp_path / "model.safetensors", "cpu")
    windows = events.windows(data, 9)
    assert torch.equal(again.logits(windows), forecaster.logits(windows))


def test_measure_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    found = measure(logits, torch.tensor([0, 1]), "test")
    assert found["test/accuracy"] == 0.5
    assert found["test/loss"] == pytest.approx(-(np.log(0.5) + np.log(0.2)) / 2)

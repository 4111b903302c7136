"""A model of events: it sees no future, and times only as differences."""

import math

import pytest
import torch

from primal.models.build import EncoderConfig, build_encoder
from primal.models.events import EventPredictor, PlainTime, Recurrence
from primal.time_encodings import TIME_ENCODINGS, time_encoding

KINDS, EVENTS = 5, 9
ENCODERS = ["softmax", "primal", "lstm"]
TIMES = [*TIME_ENCODINGS, "plain", None]


def model(encoder: str = "softmax", time: str | None = "bochner", **settings) -> EventPredictor:
    encoding = None
    if time is not None:
        encoding = PlainTime() if time == "plain" else time_encoding(time, 22)
    config = EncoderConfig(
        width=16,
        heads=2,
        depth=2,
        rank=4,
        causal=True,
        primal_layers="all" if encoder == "primal" else (),
        projection="contextual",
    )
    layers = Recurrence(16, 2) if encoder == "lstm" else build_encoder(config)
    return EventPredictor(KINDS, 8, layers, encoding=encoding, **settings).eval()


def some(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kinds = torch.randint(KINDS, (batch, EVENTS))
    times = (torch.rand(batch, EVENTS + 1, dtype=torch.float64) * 9).cumsum(1)
    return kinds, times[:, :-1], times[:, 1:]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("time", TIMES)
def test_later_events_change_no_earlier_prediction(encoder, time):
    predictor = model(encoder, time, positions=EVENTS)
    kinds, times, asked = some()
    before = predictor(kinds, times, asked).logits
    at = 5  # the prediction at 4 knows when event 5 happens, and neither its kind nor what follows
    kinds[:, at:] = (kinds[:, at:] + 1) % KINDS
    times[:, at + 1 :] += 3.3
    asked[:, at:] += 3.3
    after = predictor(kinds, times, asked).logits
    torch.testing.assert_close(after[:, :at], before[:, :at], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, at:], before[:, at:], atol=1e-3)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_padding_changes_nothing(encoder):
    predictor = model(encoder)
    kinds, times, asked = some()
    alone = predictor(kinds[:, :4], times[:, :4], asked[:, :4]).logits
    padded = predictor(kinds, times, asked, mask=torch.full((3,), 4)).logits
    torch.testing.assert_close(padded[:, :4], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("time", TIMES)
def test_times_count_from_the_first_event(time):
    predictor = model(time=time)
    kinds, times, asked = some()
    found = predictor(kinds, times, asked).logits
    later = predictor(kinds, times + 1.5e9, asked + 1.5e9).logits
    torch.testing.assert_close(later, found, rtol=1e-4, atol=1e-5)


def test_the_time_asked_about_is_read():
    kinds, times, asked = some()
    for time, read in (("bochner", True), (None, False)):
        predictor = model(time=time)
        found = predictor(kinds, times, asked).logits
        other = predictor(kinds, times, asked + 0.7).logits
        assert torch.equal(found, other) != read


def test_plain_time_is_the_number_and_its_logarithm():
    encoding = PlainTime(shortest=2.0, longest=100.0)
    found = encoding(torch.tensor([0.0, 100.0, -2.0], dtype=torch.float64))
    by_hand = [[0, 0], [1, 1], [-0.02, -math.log(2) / math.log(51)]]
    torch.testing.assert_close(found, torch.tensor(by_hand))
    assert encoding.double()(torch.zeros(1)).dtype == torch.float64


def test_mistakes_say_what_to_do():
    kinds, times, asked = some()
    encoder = build_encoder(EncoderConfig(width=16, heads=2, depth=1, primal_layers=()))
    with pytest.raises(ValueError, match="causal=True"):
        EventPredictor(KINDS, 8, encoder)
    with pytest.raises(ValueError, match="number the kinds"):
        model()(kinds.float(), times, asked)
    with pytest.raises(ValueError, match="must have the shape of kinds"):
        model()(kinds, times[:, 1:], asked)
    with pytest.raises(ValueError, match="at most 4 events"):
        model(positions=4)(kinds, times, asked)

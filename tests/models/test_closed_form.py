"""The model fitted in closed form: padding, lengths, seeds, what is saved, what it costs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from primal.data import uea
from primal.functional import mask_from_lengths
from primal.models.closed_form import ClosedFormConfig, ClosedFormModel
from primal.training.series import SeriesPredictor, fit_closed_form

SMALL = ClosedFormConfig(dilations=3, thresholds=3, groups=2, width=8, rank=2, points=4, copies=1)


def waves(cases=24, steps=40, channels=3, seed=0):
    """Return sines of two speeds under noise, of any length down to a third of ``steps``."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(cases) % 2
    lengths = torch.randint(steps // 3, steps + 1, (cases,), generator=generator)
    lengths[0] = steps
    phase = 6 * torch.rand(cases, 1, channels, generator=generator)
    speed = torch.where(classes == 0, 0.3, 0.8)[:, None, None]
    x = (torch.arange(steps)[:, None] * speed + phase).sin()
    x += 0.3 * torch.randn(x.shape, generator=generator)
    return x * mask_from_lengths(lengths, steps)[..., None], lengths, classes


def fitted(config=SMALL, seed=0, **of):
    x, lengths, classes = waves(**of)
    return ClosedFormModel(x.shape[2], 2, x.shape[1], config).fit(x, lengths, classes, seed=seed)


# --- what a prediction depends on ----------------------------------------------------------------


def test_a_case_alone_is_predicted_as_in_a_batch():
    model = fitted(ClosedFormConfig())
    x, lengths, _ = waves(seed=1)
    together = model(x, mask=lengths).logits
    alone = [model(x[i : i + 1, :n]).logits for i, n in enumerate(lengths.tolist())]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fill", [torch.nan, 1e6])
def test_padding_never_leaks(fill):
    x, lengths, classes = waves()
    model = fitted()
    spoiled = torch.where(mask_from_lengths(lengths, 40)[..., None], x, fill)
    spoiled = F.pad(spoiled, (0, 0, 0, 5), value=fill)
    torch.testing.assert_close(model(spoiled, mask=lengths).logits, model(x, mask=lengths).logits)
    again = ClosedFormModel(3, 2, 40, SMALL).fit(spoiled, lengths, classes)
    torch.testing.assert_close(again.weight, model.weight)


@pytest.mark.parametrize("steps", [1, 2, 5, 39, 41, 300])
def test_any_length_is_predicted(steps):
    logits = fitted()(torch.randn(3, steps, 3)).logits
    assert logits.shape == (3, 2)
    assert logits.isfinite().all()


def test_longer_series_than_the_limit_are_averaged():
    config = replace(SMALL, most_steps=16)
    model = fitted(config)
    assert model.stride == 3
    x, lengths, classes = waves(seed=1)
    right = model(x, mask=lengths).logits.argmax(1) == classes
    assert right.double().mean() > 0.8
    steady = torch.full((1, 7, 3), 0.5)
    torch.testing.assert_close(
        model._steps(steady, torch.tensor([7])).values, torch.full((3, 1, 3), 0.5)
    )


# --- what a fit depends on -----------------------------------------------------------------------


def test_the_seed_decides_and_nothing_else():
    torch.manual_seed(0)
    first = fitted(seed=3).state_dict()
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    second = fitted(seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["weight"], fitted(seed=4).weight)
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    fitted()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("missing", ["rank", "points", "groups", "thresholds", "copies"])
def test_does_without_each_part(missing):
    config = replace(SMALL, **{missing: 0})
    x, lengths, classes = waves(seed=1)
    right = fitted(config)(x, mask=lengths).logits.argmax(1) == classes
    assert right.double().mean() > 0.7


def test_more_features_than_fit_are_left_out_by_lot(monkeypatch):
    monkeypatch.setattr("primal.models.closed_form.FEATURES", 200 * 24)
    model = fitted()
    assert 0 < (model.scale != 0).sum() <= 200 < len(model.scale)
    x, lengths, classes = waves(seed=1)
    assert (model(x, mask=lengths).logits.argmax(1) == classes).double().mean() > 0.8


# --- what it learns ------------------------------------------------------------------------------


def test_learns_classes_with_sensible_probabilities():
    model = fitted(ClosedFormConfig(), cases=40)
    x, lengths, classes = waves(cases=100, seed=1)
    logits = model(x, mask=lengths).logits
    assert (logits.argmax(1) == classes).double().mean() > 0.95
    assert F.cross_entropy(logits, classes) < 0.2
    # Labels that mean nothing leave it unsure.
    x, lengths, classes = waves(cases=40)
    lot = torch.randint(2, (40,), generator=torch.Generator().manual_seed(0))
    unsure = ClosedFormModel(3, 2, 40).fit(x, lengths, lot)
    x, lengths, _ = waves(cases=100, seed=1)
    assert unsure(x, mask=lengths).logits.softmax(1).amax(1).mean() < 0.8


def test_learns_numbers():
    x, lengths, _ = waves(cases=80)
    targets = torch.linspace(-1, 1, 80)
    x = x * (1.5 + targets[:, None, None])
    odd = torch.arange(80) % 2 == 1
    model = ClosedFormModel(3, 1, 40).fit(x[odd], lengths[odd], targets[odd])
    predicted = model(x[~odd], mask=lengths[~odd]).logits
    assert predicted.shape == (40, 1)
    assert (predicted[:, 0] - targets[~odd]).square().mean() < 0.1 * targets.var()


def test_a_case_unlike_all_others_is_not_extrapolated_to():
    x, lengths, _ = waves()
    targets = torch.linspace(-1, 1, 24)
    x = x * (1.5 + targets[:, None, None])
    model = ClosedFormModel(3, 1, 40).fit(x, lengths, targets)
    assert model(1e4 * x, mask=lengths).logits.abs().max() < 5


@pytest.mark.parametrize("channels", [1, 2, 40])
def test_any_number_of_channels(channels):
    model = fitted(channels=channels)
    x, lengths, classes = waves(channels=channels, seed=1)
    assert (model(x, mask=lengths).logits.argmax(1) == classes).double().mean() > 0.8


def test_constant_series_are_told_apart_by_their_level():
    level = torch.tensor([-1.0, 1.0]).repeat(10)
    x = level[:, None, None].expand(20, 30, 1)
    model = ClosedFormModel(1, 2, 30).fit(x, torch.full((20,), 30), (level > 0).long())
    assert torch.equal(model(x).logits.argmax(1), (level > 0).long())
    equal = ClosedFormModel(1, 2, 30).fit(
        torch.ones(4, 30, 1), torch.full((4,), 30), torch.arange(4) % 2
    )
    torch.testing.assert_close(equal(torch.ones(2, 9, 1)).logits, torch.zeros(2, 2))


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_two_cases_of_each_class_are_enough(steps):
    x = torch.randn(4, steps, 2) + torch.tensor([-3.0, -3.0, 3.0, 3.0])[:, None, None]
    model = ClosedFormModel(2, 2, steps).fit(x, torch.full((4,), steps), torch.tensor([0, 0, 1, 1]))
    assert model(x).logits.argmax(1).tolist() == [0, 0, 1, 1]


# --- what is kept and what it costs --------------------------------------------------------------


def test_a_saved_model_predicts_the_same():
    model, empty = fitted(), ClosedFormModel(3, 2, 40, SMALL)
    x, lengths, _ = waves(seed=1)
    with pytest.raises(RuntimeError, match="call fit first"):
        empty(x)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(x, mask=lengths).logits, model(x, mask=lengths).logits)


def test_a_predictor_is_saved_and_loaded(tmp_path):
    train = uea.load("JapaneseVowels").train
    train = train.subset(range(0, len(train), 9))
    predictor = fit_closed_form(SMALL, train, device="cpu")
    predictor.save(tmp_path / "model.safetensors")
    loaded = SeriesPredictor.load(tmp_path / "model.safetensors", "cpu")
    assert torch.equal(loaded.outputs(train), predictor.outputs(train))


@pytest.mark.parametrize("steps", [10, 700, 40_000])
def test_memory_is_bounded(steps):
    """Few long series at a time; one alone may be as long as the model does not average."""
    x, lengths = torch.zeros(70, steps, 1), torch.full((70,), steps)
    model, seen = ClosedFormModel(1, 2, steps, SMALL), []
    for cases, short in model._batches(x, lengths):
        seen += cases.tolist()
        assert len(short.values) <= 4096
        assert len(cases) == 1 or len(short.values) * len(cases) * 256 <= 2**24
    assert sorted(seen) == list(range(70))


def test_many_cases_are_not_copied(monkeypatch):
    """Warped copies cost as much as cases do, and are for those who have few."""
    drawn = []
    module = "primal.models.closed_form"

    def counted(x, *_):
        drawn.append(len(x))
        return x

    monkeypatch.setattr(f"{module}.warped", counted)
    fitted(replace(SMALL, copies=4))
    assert drawn == [24] * 4
    monkeypatch.setattr(f"{module}.FEW_CASES", 60)
    fitted(replace(SMALL, copies=4))
    assert drawn == [24] * 5
    monkeypatch.setattr(f"{module}.FEW_STEPS", 24 * 40 * 2 - 1)
    fitted(replace(SMALL, copies=4))
    assert drawn == [24] * 5


def test_accuracy_in_cross_validation(shared: Path):
    train = uea.load("RacketSports", shared / "data" / "uea").train
    inside, outside = (train.subset(range(i, len(train), 2)) for i in (0, 1))
    predictor = fit_closed_form(ClosedFormConfig(), inside, device="cpu")
    right = predictor.outputs(outside).argmax(1) == predictor.preparation.targets(outside)
    assert right.double().mean() > 0.85


def test_probabilities_are_as_sure_as_they_are_right():
    """Classes that overlap: three quarters can be told apart, and no more is promised."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 2, (700,), generator=generator)
    x = torch.randn(700, 24, 1, generator=generator)
    level = 0.67 * (2 * classes - 1) + torch.randn(700, generator=generator)
    x += 2 * level[:, None, None]
    lengths = torch.full((700,), 24)
    model = ClosedFormModel(1, 2, 24).fit(x[:200], lengths[:200], classes[:200])
    found = model(x[200:]).logits.softmax(-1)
    right = (found.argmax(1) == classes[200:]).float().mean()
    assert 0.68 < right < 0.82
    assert abs(found.amax(1).mean() - right) < 0.08

"""The estimators, held to aeon's own checks, and to what people do with them."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from aeon.datasets import (
    load_basic_motions,
    load_cardano_sentiment,
    load_covid_3month,
    load_japanese_vowels,
)
from aeon.testing.estimator_checking import parametrize_with_checks
from aeon.transformations.collection import Normalizer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from primal.integrations.aeon import PrimalTimeSeriesClassifier, PrimalTimeSeriesRegressor
from primal.models.build import EncoderConfig
from primal.models.closed_form import ClosedFormConfig
from primal.training.loop import TrainingConfig
from primal.training.series import SeriesModelConfig

ENCODER: dict[str, Any] = {
    "model": SeriesModelConfig(encoder=EncoderConfig(width=8, heads=2, depth=1, rank=2)),
    "training": TrainingConfig(epochs=2, learning_rate=1e-2),
}
MODELS = pytest.mark.parametrize("settings", [{}, ENCODER], ids=["closed form", "encoder"])


@parametrize_with_checks([PrimalTimeSeriesClassifier, PrimalTimeSeriesRegressor])
def test_aeons_checks(check):
    check()


@pytest.fixture(scope="module")
def vowels():
    """Twelve channels, 7 to 29 steps: a few cases of each speaker, in numbers as labels."""
    X, y = load_japanese_vowels(split="train")
    chosen = range(0, len(X), 9)
    return [X[i] for i in chosen], np.array([float(y[i]) for i in chosen])


@MODELS
def test_three_lines(vowels, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = vowels
    classifier = PrimalTimeSeriesClassifier(random_state=0, **settings).fit(X, y)
    predicted = classifier.predict(X)
    probabilities = classifier.predict_proba(X)
    assert set(predicted) <= set(y)
    assert probabilities.sum(axis=1) == pytest.approx(1)
    assert (classifier.classes_[probabilities.argmax(axis=1)] == predicted).all()
    if not settings:
        assert (predicted == y).mean() > 0.95
    assert not list(tmp_path.iterdir())  # nothing is left in the working directory


@pytest.mark.parametrize("labels", [[2, 10, 1], ["b", "a", "é"], [1.0, 10.0, 2.0], [True, False]])
def test_labels_of_any_kind_keep_their_columns(labels):
    generator = np.random.default_rng(0)
    place = np.arange(36) % len(labels)
    X = generator.normal(size=(36, 1, 20)) + 5 * place[:, None, None] * np.linspace(0, 1, 20)
    y = np.array(labels)[place]
    classifier = PrimalTimeSeriesClassifier(random_state=0).fit(X, y)
    assert (classifier.predict(X) == y).all()
    assert classifier.predict(X).dtype == y.dtype


@MODELS
def test_a_seed_decides_all_and_disturbs_nobody(vowels, settings):
    X, y = vowels
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (
        PrimalTimeSeriesClassifier(random_state=seed, **settings).fit(X, y).predict_proba(X)
        for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()
    assert torch.rand(1) == expected


@MODELS
def test_save_and_load(vowels, settings, tmp_path):
    X, y = vowels
    classifier = PrimalTimeSeriesClassifier(random_state=0, **settings).fit(X, y)
    classifier.save(tmp_path / "here")
    assert sorted(path.suffix for path in (tmp_path / "here").iterdir()) == [
        ".json",
        ".safetensors",
    ]
    loaded = PrimalTimeSeriesClassifier.load(tmp_path / "here")
    assert (loaded.predict_proba(X) == classifier.predict_proba(X)).all()
    assert (loaded.predict(X) == classifier.predict(X)).all()
    assert loaded.get_params() == classifier.get_params()
    assert loaded.score(X, y) == classifier.score(X, y)


def test_a_regressor_saves_and_loads(tmp_path):
    X, y = load_covid_3month(split="train")
    regressor = PrimalTimeSeriesRegressor(random_state=0).fit(X, y)
    regressor.save(tmp_path)
    loaded = PrimalTimeSeriesRegressor.load(tmp_path)
    assert (loaded.predict(X) == regressor.predict(X)).all()
    with pytest.raises(ValueError, match=r"must be one of .*PrimalTimeSeriesClassifier"):
        PrimalTimeSeriesClassifier.load(tmp_path)


@pytest.mark.parametrize("load", [load_covid_3month, load_cardano_sentiment])
def test_a_regressor_beats_the_mean(load):
    X, y = load(split="train")
    Z, truth = load(split="test")
    predicted = PrimalTimeSeriesRegressor(random_state=0).fit(X, y).predict(Z)
    assert np.square(predicted - truth).mean() < np.square(y.mean() - truth).mean()


def test_a_loaded_folder_is_checked(vowels, tmp_path):
    X, y = vowels
    with pytest.raises(ValueError, match=r"has no estimator\.json"):
        PrimalTimeSeriesClassifier.load(tmp_path)
    PrimalTimeSeriesClassifier(**ENCODER).fit(X, y).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        PrimalTimeSeriesClassifier.load(tmp_path)
    (tmp_path / "estimator.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        PrimalTimeSeriesClassifier.load(tmp_path)


@MODELS
def test_pickle(vowels, settings):
    X, y = vowels
    classifier = PrimalTimeSeriesClassifier(random_state=0, **settings).fit(X, y)
    again = pickle.loads(pickle.dumps(classifier))
    assert (again.predict_proba(X) == classifier.predict_proba(X)).all()


def test_in_a_pipeline_and_a_search():
    X, y = load_basic_motions(split="train")
    pipeline = make_pipeline(Normalizer(), PrimalTimeSeriesClassifier(random_state=0))
    assert pipeline.fit(X, y).score(X, y) == 1
    wider = EncoderConfig(width=16, heads=2, depth=1, rank=2)
    grid = {"model": [ENCODER["model"], SeriesModelConfig(encoder=wider), ClosedFormConfig()]}
    search = GridSearchCV(PrimalTimeSeriesClassifier(random_state=0), grid, cv=2)
    search.fit(X[::2], y[::2])
    assert search.best_params_["model"] == ClosedFormConfig()


def test_missing_values_short_and_long_series(vowels):
    X, y = vowels
    generator = np.random.default_rng(0)
    holes = [np.where(generator.random(one.shape) < 0.2, np.nan, one) for one in X]
    classifier = PrimalTimeSeriesClassifier(random_state=0).fit(holes, y)
    assert classifier.score(holes, y) > 0.9
    longer = [np.concatenate([one] * 4, axis=1) for one in X[:3]]
    assert np.isfinite(classifier.predict_proba(longer)).all()
    assert np.isfinite(classifier.predict_proba([one[:, :1] for one in X[:3]])).all()
    # Trained without holes, they may still come.
    whole = PrimalTimeSeriesClassifier(random_state=0).fit(X, y)
    assert (whole.predict(holes) == y).mean() > 0.5


def test_training_settings_need_a_trained_model(vowels):
    X, y = vowels
    with pytest.raises(ValueError, match=r"give model=SeriesModelConfig\(\) too"):
        PrimalTimeSeriesClassifier(training=TrainingConfig()).fit(X, y)


def test_a_random_state_object_is_not_written(vowels, tmp_path):
    X, y = vowels
    state = np.random.RandomState(0)
    PrimalTimeSeriesClassifier(random_state=state, **ENCODER).fit(X, y).save(tmp_path)
    assert json.loads((tmp_path / "estimator.json").read_text())["random_state"] is None
    assert PrimalTimeSeriesClassifier.load(tmp_path).random_state is None

"""Estimators for aeon and scikit-learn: series in, classes or numbers out, in three lines.

>>> from aeon.datasets import load_japanese_vowels
>>> X, y = load_japanese_vowels(split="train")
>>> classifier = PrimalTimeSeriesClassifier(random_state=0).fit(X, y)  # doctest: +SKIP
>>> classifier.predict(load_japanese_vowels(split="test")[0])  # doctest: +SKIP
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.utils import check_random_state

from primal.data.preparation import Target
from primal.data.series import SeriesSet, as_names
from primal.errors import DataError, require_choice
from primal.models.closed_form import ClosedFormConfig
from primal.settings import from_json, to_json
from primal.training.loop import TrainingConfig
from primal.training.series import (
    DEFAULT_TRAINING,
    KINDS,
    Device,
    SeriesModelConfig,
    SeriesPredictor,
    fit_closed_form,
    fit_series,
)

try:
    from aeon.classification.base import BaseClassifier
    from aeon.regression.base import BaseRegressor
except ImportError as error:
    raise ImportError(
        "the estimators of series need aeon: pip install 'primal-attention[timeseries]'."
    ) from error

Model = ClosedFormConfig | SeriesModelConfig
Series = np.ndarray | list[np.ndarray]  # (cases, channels, time), or (channels, time) each

SETTINGS, WEIGHTS = "estimator.json", "model.safetensors"


class _Estimator:
    """What the two estimators share: fitting, predicting, a folder to live in."""

    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": ["np-list", "numpy3D"],
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "capability:missing_values": True,
        "algorithm_type": "convolution",
        "python_dependencies": "torch",
    }
    target: Target
    metadata_: dict[str, Any]
    predictor_: SeriesPredictor

    def __init__(
        self,
        model: Model | None = None,
        training: TrainingConfig | None = None,
        device: Device = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.model = model
        self.training = training
        self.device = device
        self.random_state = random_state
        super().__init__()

    def _fit(self, X: Series, y: np.ndarray) -> Self:
        data, seed = _series(X, y), check_random_state(self.random_state).randint(2**31 - 1)
        model = self.model or ClosedFormConfig()
        if isinstance(model, ClosedFormConfig):
            if self.training is not None:
                raise ValueError(
                    "training is for models trained by gradient descent, and this one is fitted in "
                    "closed form; give model=SeriesModelConfig() too, or leave training out."
                )
            self.predictor_ = fit_closed_form(
                model, data, target=self.target, seed=seed, device=self.device
            )
            return self
        training = self.training or DEFAULT_TRAINING
        self.predictor_, self.history_ = fit_series(
            model, data, replace(training, seed=seed), target=self.target, device=self.device
        )
        return self

    def _outputs(self, X: Series) -> torch.Tensor:
        return self.predictor_.outputs(_series(X))

    def _learned(self) -> dict[str, Any]:
        return {}

    def _restore(self, learned: dict[str, Any]) -> None:
        pass

    def save(self, folder: str | Path) -> Path:
        """Write all that predicting takes into ``folder``, as safetensors and JSON."""
        self._check_is_fitted()  # type: ignore[attr-defined]
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.predictor_.save(folder / WEIGHTS)
        content = {
            "estimator": type(self).__name__,
            "model": _named(self.model),
            "training": None if self.training is None else to_json(self.training),
            "device": self.device,
            "random_state": self.random_state if isinstance(self.random_state, int) else None,
            "metadata": {name: _plain(value) for name, value in self.metadata_.items()},
            **self._learned(),
        }
        (folder / SETTINGS).write_text(json.dumps(content, indent=1) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what ``save`` wrote. Nothing is unpickled: a folder of a stranger does no harm."""
        folder = Path(folder)
        try:
            content = json.loads((folder / SETTINGS).read_text())
        except FileNotFoundError:
            raise DataError(f"{folder} has no {SETTINGS}; give a folder that save wrote.") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{folder / SETTINGS} is damaged ({error}); save again.") from None
        require_choice(f"{folder / SETTINGS}: the estimator", content["estimator"], [cls.__name__])
        training = content["training"]
        made = cls(
            model=_from_named(content["model"]),
            training=None if training is None else from_json(TrainingConfig, training),
            device=content["device"],
            random_state=content["random_state"],
        )
        made.predictor_ = SeriesPredictor.load(folder / WEIGHTS, content["device"])
        made.metadata_ = content["metadata"]
        made._restore(content)
        made.is_fitted = True  # type: ignore[attr-defined]
        return made

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:  # noqa: ARG003
        """Return what aeon's checks build: every kind of model, as small as it goes."""
        from primal.models.build import EncoderConfig

        small = SeriesModelConfig(encoder=EncoderConfig(width=8, heads=2, depth=1, rank=2))
        return [
            {"random_state": 0},
            {"model": small, "training": TrainingConfig(epochs=2), "random_state": 0},
        ]


class PrimalTimeSeriesClassifier(_Estimator, BaseClassifier):
    """Classify series: of any length, of one channel or many, with values missing.

    Args:
        model: settings of the model. The default is fitted in closed form, in seconds;
            ``SeriesModelConfig()`` trains an encoder with Primal-Attention by gradient descent.
        training: how such an encoder is trained.
        device: "auto" is a GPU where there is one.
        random_state: a seed; the same one gives the same model, bit by bit, on one machine.
    """

    target: Target = "class"

    def _predict(self, X: Series) -> np.ndarray:
        found: np.ndarray = self.classes_[self._predict_proba(X).argmax(axis=1)]
        return found

    def _predict_proba(self, X: Series) -> np.ndarray:
        # The predictor sorts the classes by their names, scikit-learn by their values.
        place = {name: i for i, name in enumerate(self.predictor_.preparation.classes or ())}
        columns = [place[name] for name in as_names(self.classes_)]
        found: np.ndarray = self._outputs(X).double().softmax(-1).numpy()[:, columns]
        return found

    def _learned(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore(self, learned: dict[str, Any]) -> None:
        self.classes_ = np.array(learned["classes"], learned["dtype"])
        self.n_classes_ = len(self.classes_)
        self._class_dictionary = {name: i for i, name in enumerate(self.classes_)}


class PrimalTimeSeriesRegressor(_Estimator, BaseRegressor):
    """Predict a number for each series: of any length, of one channel or many, values missing.

    Args:
        model: settings of the model. The default is fitted in closed form, in seconds;
            ``SeriesModelConfig()`` trains an encoder with Primal-Attention by gradient descent.
        training: how such an encoder is trained.
        device: "auto" is a GPU where there is one.
        random_state: a seed; the same one gives the same model, bit by bit, on one machine.
    """

    target: Target = "value"

    def _predict(self, X: Series) -> np.ndarray:
        return self.predictor_.numbers(self._outputs(X)).numpy()


def _series(X: Series, y: np.ndarray | None = None) -> SeriesSet:
    values = tuple(np.asarray(one).T for one in X)
    return SeriesSet(values, y, tuple(map(str, range(len(values)))))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _named(model: Model | None) -> dict[str, Any] | None:
    if model is None:
        return None
    kind = next(name for name, kind in KINDS.items() if isinstance(model, kind))
    return {"kind": kind, **to_json(model)}


def _from_named(content: dict[str, Any] | None) -> Model | None:
    if content is None:
        return None
    fields = {name: value for name, value in content.items() if name != "kind"}
    return from_json(KINDS[content["kind"]], fields)

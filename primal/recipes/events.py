"""Events in time: the phase task, and the next badge on Stack Overflow."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from primal.data import events
from primal.data.events import EventSet, Windows
from primal.errors import DataError, require_choice
from primal.models.build import EncoderConfig
from primal.recipes.base import Comparison, Entry, Recipe, Result, Screen
from primal.recipes.cells import places, run_all, stored
from primal.recipes.layout import Table, percent
from primal.training import distributed
from primal.training.events import EventModelConfig, fit_events, measure
from primal.training.loop import TrainingConfig
from primal.training.run_folder import RunFolder, csv_table
from primal.training.series import Device


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

    def measured(self, data: EventSet) -> Windows:
        """Return the windows to measure on; all events count, each once."""
        return events.windows(data, self.window)

    def rules(self) -> dict[str, dict[str, float]]:
        """Measure simple rules on the same test events: name -> loss and accuracy.

        They choose nothing, so that the validation sequences are theirs to learn from too.
        """
        data = self.load()
        whole, test = data.train + data.validation, self.measured(data.test)
        before, targets = test.kinds[test.counted], test.targets[test.counted]
        always = torch.from_numpy(events.unigram(whole)).log().expand(len(targets), -1)
        follows = torch.from_numpy(events.markov(whole)).log()
        return {
            "Most frequent kind": measure(always, targets, "test"),
            "Markov-1": measure(follows[before], targets, "test"),
        }

    def comparisons(self) -> tuple[Comparison, ...]:
        note = "same test events, no training by gradient"
        return tuple(
            Comparison(who=name, value=found["test/accuracy"], note=note)
            for name, found in self.rules().items()
        )

    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,
        watch: Screen | None = None,
    ) -> Result:
        data = self.load()
        if watch is not None:
            watch.stage(f"training on {len(data.train)} sequences", self.training.epochs)
        forecaster, rows = fit_events(
            self.model,
            data.train,
            self.training,
            window=self.window,
            validation=data.validation,
            measured=self.measured,
            device=device,
            folder=folder,
            resume=resume,
            watch=watch,
        )
        test = self.measured(data.test)
        logits = forecaster.logits(test)
        metrics = measure(logits, test.targets[test.counted], "test")
        if distributed.is_first():
            forecaster.save(folder / RunFolder.MODEL)
            _write_predictions(folder / RunFolder.PREDICTIONS, data.test, test, logits)
        parameters = sum(p.numel() for p in forecaster.model.parameters())
        return Result(
            metric="test/accuracy",
            value=metrics["test/accuracy"],
            metrics={**metrics, "parameters": float(parameters)},
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
        data, length = self.data, self.window + 1
        sizes = (data.train, data.validation, data.test)
        return EventData(
            *(
                events.phase(size, length, 3 * data.seed + i, period=data.period, gap=data.gap)
                for i, size in enumerate(sizes)
            )
        )

    def rules(self) -> dict[str, dict[str, float]]:
        test = self.load().test
        last = np.array([kinds[-1] for kinds in test.kinds])
        right = float((last == events.kernel_vote(test, self.data.period)).mean())
        return {**super().rules(), "Vote, period known": {"test/accuracy": right}}

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
        if not len(held) or not len(kept):
            raise DataError(
                f"validation={self.data.validation} of {len(train)} users leaves none to choose "
                "the epoch by, or none to train on; change --data.validation."
            )
        return EventData(kept, held, test)


def _write_predictions(path: Path, data: EventSet, windows: Windows, logits: Tensor) -> None:
    """Write a row for each event that counts; its case is the sequence and the event's number."""
    counted = windows.counted.nonzero().tolist()
    sequence, start = windows.sequence.tolist(), windows.start.tolist()
    probabilities = logits.double().softmax(-1)
    with csv_table(path) as rows:
        rows.writerow(["case", "label", "predicted", *range(data.count)])
        for (row, n), predicted, some in zip(
            counted, logits.argmax(-1).tolist(), probabilities.tolist(), strict=True
        ):
            i, event = sequence[row], start[row] + n + 1
            case, label = f"{data.names[i]}:{event + 1}", data.kinds[i][event]
            rows.writerow([case, label, predicted, *(f"{p:.4f}" for p in some)])


# --- the variants --------------------------------------------------------------------------------

# What stands under our headings, the key of the files that hold its cells, and the model's change.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sinusoidal": ("Sinusoidal", {"time": "sinusoidal"}),
    "bochner": ("Bochner, non-parametric", {"time": "bochner"}),
    "bochner-normal": ("Bochner, normal", {"time": "bochner_normal"}),
    "bochner-inverse-cdf": ("Bochner, inverse CDF", {"time": "bochner_inverse_cdf"}),
    "mercer": ("Mercer", {"time": "mercer", "features": 33}),
    "plain": ("Raw time: t and log t", {"time": "plain"}),
    "position": ("Positions only", {"time": None, "positions": True}),
    "lstm": ("LSTM, Bochner", {"recurrent": True}),
    "primal": ("Primal attention, Bochner", {}),
}
# No dropout: training is short, and the best epoch is kept.
ENCODER = EncoderConfig(
    width=64, heads=4, depth=1, feedforward=128, primal_layers=(), causal=True, dropout=0.0
)


def _model(variant: str, model: EventModelConfig) -> EventModelConfig:
    if variant == "primal":
        encoder = replace(model.encoder, primal_layers="all", projection="contextual", rank=8)
        model = replace(model, encoder=encoder)
    return replace(model, **VARIANTS[variant][1])


def phase(variant: str) -> Phase:
    """Build a model for the phase task; a unit of time is a seventh of the clock's period."""
    model = EventModelConfig(encoder=ENCODER, shortest=1.0, longest=100.0)
    return Phase(
        model=_model(variant, model),
        training=TrainingConfig(
            epochs=20, batch_size=64, learning_rate=2e-3, select="validation/loss"
        ),
    )


def stackoverflow(variant: str) -> StackOverflow:
    """Build a model for the badges; a unit of time is a day.

    The LSTM learns more slowly, in epochs that cost less: it is given more of them.
    """
    model = EventModelConfig(encoder=ENCODER, shortest=0.5, longest=1000.0)
    return StackOverflow(
        model=_model(variant, model),
        training=TrainingConfig(
            epochs=24 if variant == "lstm" else 10,
            batch_size=32,
            learning_rate=8e-3,
            weight_decay=0.01,
            average=0.99,
            select="validation/loss",
        ),
    )


# --- the table -----------------------------------------------------------------------------------

Build = Callable[[str], EventRecipe]
TASKS: dict[str, tuple[str, Build]] = {
    "phase": ("The phase of a hidden clock", phase),
    "stackoverflow": ("The next badge on Stack Overflow", stackoverflow),
}
HEADER = ("", "accuracy, %", "log-likelihood", "parameters")
NOTES = (
    "Mean ± standard deviation (seeds); log-likelihood per event, in nats. The best epoch by "
    "validation loss is kept; the test sequences are used once.",
    "The rules learn from training and validation sequences together; the first two know no times.",
)


def table(
    root: Path | None,
    store: Path,
    *,
    seeds: int = 3,
    device: Device = "auto",
    workers: int = 1,
    only: Sequence[str] = (),
    show: bool = False,
    say: Callable[[str], None] = print,
) -> list[Table]:
    """Run what is missing of the two experiments and lay them out, the simple rules first.

    Args:
        root: folder that holds events/stackoverflow; else that of PRIMAL_DATA.
        only: names of tasks and variants; what is not named is not run.
        show: run nothing.
    """
    for wish in only:
        require_choice("--only", wish, (*TASKS, *VARIANTS))
    tasks = [name for name in TASKS if name in only] or list(TASKS)
    wanted = [key for key in VARIANTS if key in only] or list(VARIANTS)
    tables = []
    for name, (title, build) in TASKS.items():
        recipes = {key: _rooted(build(key), root) for key in VARIANTS}
        try:
            rules = next(iter(recipes.values())).rules()
        except DataError as error:
            tables.append(
                Table(title, HEADER, [("missing", *("" for _ in HEADER[1:]))], (str(error),))
            )
            continue
        place = store / "events" / name
        runs = {
            key: {place / f"{key}-seed{n}.json": recipe.seeded(n) for n in range(seeds)}
            for key, recipe in recipes.items()
        }
        if name in tasks and not show:
            todo = {path: r for key in wanted for path, r in runs[key].items()}
            for path, result in run_all(todo, device, workers):
                say(f"{name} {path.stem}: {100 * result.value:.2f} %")
        rows = [_rule(*rule) for rule in rules.items()]
        for key, found in runs.items():
            measured = [r for path, recipe in found.items() if (r := stored(path, recipe))]
            rows.append(_row(VARIANTS[key][0], measured))
        where = places(p for found in runs.values() for p, r in found.items() if stored(p, r))
        notes = (*NOTES, f"Measured on {where}.") if where else NOTES
        tables.append(Table(title, HEADER, rows, notes))
    return tables


def _rooted(recipe: EventRecipe, root: Path | None) -> EventRecipe:
    if isinstance(recipe, StackOverflow):
        return replace(recipe, data=replace(recipe.data, root=root))
    return recipe


def _rule(name: str, found: dict[str, float]) -> tuple[str, ...]:
    likelihood = f"{-found['test/loss']:.3f}" if "test/loss" in found else ""
    return (name, f"{100 * found['test/accuracy']:.1f}", likelihood, "")


def _row(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    if not results:
        return (name, "", "", "")
    losses = [result.metrics["test/loss"] for result in results]
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return (
        name,
        percent([result.value for result in results]),
        f"{-mean(losses):.3f}{spread}",
        f"{results[0].metrics['parameters']:.0f}",
    )


# --- the recipes ---------------------------------------------------------------------------------

RECIPES: dict[str, Entry] = {
    f"events/{name}/{key}": Entry(summary=f"{title}: {heading}", build=partial(build, key))
    for name, (title, build) in TASKS.items()
    for key, (heading, _) in VARIANTS.items()
}

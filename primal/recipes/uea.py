"""The UEA archive: the paper's Table 1, and our own models on the same sets."""

from functools import partial
from typing import Literal

from primal.data import uea
from primal.models.build import EncoderConfig
from primal.recipes.base import Entry
from primal.recipes.published import COLUMNS, SETTINGS, TABLE_1
from primal.recipes.timeseries import DEFAULT_TRAINING, ClosedForm, SeriesConfig, TimeSeries
from primal.training.loop import TrainingConfig
from primal.training.series import SeriesModelConfig

Model = Literal["transformer", "primalformer", "primal-plus"]
Protocol = Literal["honest", "paper"]
NAMES: dict[Model, str] = {
    "transformer": "Transformer",
    "primalformer": "PrimalFormer",
    "primal-plus": "Primal.+",
}
VALIDATION = 0.2  # of the training cases, under the honest protocol


def default(name: str) -> TimeSeries:
    """Our own encoder: it trains in a minute on a laptop."""
    return TimeSeries(
        data=SeriesConfig(name=name),
        training=DEFAULT_TRAINING,
        twin=True,
    )


def closed_form(name: str) -> ClosedForm:
    return ClosedForm(data=SeriesConfig(name=name))


def paper(name: str, model: Model, protocol: Protocol = "paper") -> TimeSeries:
    """Build what the paper trained: specs of its code where the paper is silent."""
    epochs, optimizer, *ours = SETTINGS[name]
    rank, weight, multiplier = ours[model == "primal-plus"]
    encoder = EncoderConfig(
        width=512,
        heads=8,
        depth=2,
        feedforward=2048,
        primal_layers={"transformer": (), "primalformer": "all", "primal-plus": (-1,)}[model],
        rank=rank,
        anchors=rank * multiplier,
        norm="post",
        dropout=0.1,
    )
    return TimeSeries(
        data=SeriesConfig(name=name),
        model=SeriesModelConfig(encoder=encoder, positions="learned", pooling="flatten", stem=1),
        training=TrainingConfig(
            epochs=epochs,
            batch_size=16,
            optimizer=optimizer,
            learning_rate=1e-3,
            schedule="constant",
            warmup=0.0,
            objective_weight=weight,
            clip=4.0,
            select="validation/accuracy" if protocol == "honest" else None,
        ),
        validation=VALIDATION if protocol == "honest" else 0.0,
        protocol=protocol,
    )


FURTHER = ("BasicMotions", "Libras", "PenDigits", "RacketSports")
RECIPES: dict[str, Entry] = {
    **{
        f"uea/{name}": Entry(summary=f"{name}, our encoder", build=partial(default, name))
        for name in (*uea.PAPER, *FURTHER)
    },
    **{
        f"uea/{name}/closed-form": Entry(
            summary=f"{name}, in closed form", build=partial(closed_form, name)
        )
        for name in (*uea.PAPER, *FURTHER)
    },
    **{
        f"uea/{name}/{model}": Entry(
            summary=f"{name}, the paper's {NAMES[model]} under its protocol",
            build=partial(paper, name, model),
            published=f"{dict(zip(COLUMNS, TABLE_1[name], strict=True))[NAMES[model]]:.1f}",
        )
        for name in uea.PAPER
        for model in NAMES
    },
}

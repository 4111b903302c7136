"""The UEA archive: the paper's Table 1, and our own models on the same sets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import mean
from typing import Literal, get_args

from primal.data import uea
from primal.errors import require_choice
from primal.models.build import EncoderConfig
from primal.recipes.base import Entry
from primal.recipes.cells import places, run_all, stored
from primal.recipes.layout import Table, percent
from primal.recipes.published import COLUMNS, SETTINGS, TABLE_1
from primal.recipes.timeseries import ClosedForm, SeriesConfig, TimeSeries
from primal.training.loop import TrainingConfig
from primal.training.series import Device, SeriesModelConfig

Model = Literal["transformer", "primalformer", "primal-plus"]
Protocol = Literal["honest", "paper"]
NAMES: dict[Model, str] = {
    "transformer": "Transformer",
    "primalformer": "PrimalFormer",
    "primal-plus": "Primal.+",
}
PRIMAL: dict[Model, Literal["all"] | tuple[int, ...]] = {
    "transformer": (),
    "primalformer": "all",
    "primal-plus": (-1,),
}
VALIDATION = 0.2  # of the training cases, under the honest protocol


def default(name: str, *, twin: bool = True) -> TimeSeries:
    """Our own encoder: it trains in a minute on a laptop."""
    return TimeSeries(data=SeriesConfig(name=name), twin=twin)


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
        primal_layers=PRIMAL[model],
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

# --- the table -----------------------------------------------------------------------------------

Cell = TimeSeries | ClosedForm
Build = Callable[[str], Cell]

# What stands under our headings, and the key of the files that hold its cells.
OURS: dict[tuple[str, str], Build] = {
    (f"{NAMES[model]}, {protocol}", f"{model}-{protocol}"): partial(
        paper, model=model, protocol=protocol
    )
    for protocol in get_args(Protocol)
    for model in NAMES
} | {
    ("our encoder, honest", "encoder"): partial(default, twin=False),
    ("closed form, honest", "closed-form"): closed_form,
}


def cells(
    name: str, key: str, build: Build, root: Path | None, store: Path, seeds: int
) -> dict[Path, Cell]:
    """Return the runs behind one cell of the table, by the file of each result."""
    recipe = build(name)
    recipe = replace(recipe, data=replace(recipe.data, root=root))
    place = store / "uea" / name
    return {place / f"{key}-seed{seed}.json": recipe.seeded(seed) for seed in range(seeds)}


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
    """Run what is missing of Table 1 and lay it out: the paper's columns, then ours.

    Args:
        root: folder of the sets; PRIMAL_DATA and what aeon ships are searched too.
        only: names of sets and keys of our columns; what is not named is not run.
        show: run nothing.
    """
    present = [name for name in uea.PAPER if uea.find(name, "TRAIN", root)]
    for wish in only:
        require_choice("--only", wish, (*uea.PAPER, *(key for _, key in OURS)))
    names = [name for name in present if name in only] or present
    wanted = [key for _, key in OURS if key in only] or [key for _, key in OURS]
    runs = {
        (name, key): cells(name, key, build, root, store, seeds)
        for name in present
        for (_, key), build in OURS.items()
    }
    if not show:
        todo = {
            path: recipe
            for (name, key), found in runs.items()
            if name in names and key in wanted
            for path, recipe in found.items()
        }
        for path, result in run_all(todo, device, workers):
            say(f"{path.parent.name} {path.stem}: {100 * result.value:.2f} %")
    measured = {
        cell: [r.value for path, recipe in found.items() if (r := stored(path, recipe))]
        for cell, found in runs.items()
    }
    where = places(
        path for found in runs.values() for path, recipe in found.items() if stored(path, recipe)
    )
    run = [key for _, key in OURS if any(measured[name, key] for name in present)]
    whole = [name for name in present if run and all(measured[name, key] for key in run)]
    return [_published(whole or present), _ours(present, whole, measured, where)]


def _published(over: Sequence[str]) -> Table:
    rows = [(name, *(f"{value:.1f}" for value in values)) for name, values in TABLE_1.items()]
    averages = {"average, all ten": list(TABLE_1)} | ({_average_of(over): over} if over else {})
    for title, names in averages.items():
        columns = zip(*(TABLE_1[name] for name in names), strict=True)
        rows.append((title, *(f"{mean(values):.1f}" for values in columns)))
    notes = ("Accuracy in percent as published: the best epoch by test accuracy.",)
    return Table("Table 1 of the paper", ("", *COLUMNS), rows, notes)


def _ours(
    present: Sequence[str],
    whole: Sequence[str],
    measured: dict[tuple[str, str], list[float]],
    where: str,
) -> Table:
    rows = [
        (name, *(percent(measured[name, key]) for _, key in OURS))
        if name in present
        else (name, *("missing" for _ in OURS))
        for name in uea.PAPER
    ]
    if whole:
        columns = ([mean(measured[name, key] or [nan]) for name in whole] for _, key in OURS)
        averages = (f"{100 * mean(of_sets):.1f}" for of_sets in columns)
        rows.append((_average_of(whole), *("" if x == "nan" else x for x in averages)))
    absent = [name for name in uea.PAPER if name not in present]
    notes = [
        "Accuracy in percent, mean ± standard deviation (seeds); averages over the sets that every "
        "column has, the paper's over the same in its own table.",
        "paper: trained on all training cases, best epoch by TEST accuracy, as the paper reports; "
        "the test set is its validation set.",
        f"honest: {VALIDATION:.0%} of the training cases choose the epoch, the test set is used "
        "once. Our encoder and the closed form choose nothing: all training cases, last epoch.",
    ]
    if where:
        notes.append(f"Measured on {where}.")
    if absent:
        notes.append(
            f"missing, not on this machine: {', '.join(absent)}; get NAME_TRAIN.ts and "
            f"NAME_TEST.ts from {uea.WHERE} and give their folder as --root."
        )
    return Table("Ours", ("", *(title for title, _ in OURS)), rows, tuple(notes))


def _average_of(names: Sequence[str]) -> str:
    return f"average of {', '.join(names)}"


# --- the recipes ---------------------------------------------------------------------------------

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

"""The paper's Figure 2 for this run: how fast the singular values of each layer's kernel decay."""

from typing import Any

import torch
from torch import Tensor

from primal.diagnostics.spectrum import SpectrumRow, cumulative_share, spectrum_rows
from primal.report.html import Html, join, tag
from primal.report.run import Run
from primal.report.svg import Axis, Line, figure, fit_axis, heatmap, line_chart, strip

COLOURS = ("a", "b", "c")
HEADS, COLUMNS = 16, 64  # lines of a chart, cells of a row
LOG_FROM = 48  # singular values from which a logarithmic axis tells more


def spectra(run: Run) -> Html | None:
    models = [model for model in run.spectra if model.get("layers")]
    if not models:
        return None
    rows = spectrum_rows({"models": models})
    layers = max(len(model["layers"]) for model in models)
    longest = max(len(layer["singular_values"][0]) for m in models for layer in m["layers"])
    charts = [_layer(models, i, longest) for i in range(layers)]
    return join(
        tag(
            "p",
            "Attention of every kind stands for a kernel, tokens by tokens. Drawn is what part of "
            "the sum of its singular values the largest ones make up: the sooner a line is at the "
            "top, the fewer directions the layer uses. Thin lines are heads, thick ones their "
            "mean.",
        ),
        _legend(models),
        tag("div", *charts, class_="charts"),
        _map(models, longest),
        _ranks(rows),
    )


def _legend(models: list[dict[str, Any]]) -> Html:
    keys = [
        tag("span", tag("i", class_=colour), model["name"])
        for model, colour in zip(models, COLOURS, strict=False)
    ]
    return tag("p", *keys, class_="legend")


def _layer(models: list[dict[str, Any]], index: int, longest: int) -> Html:
    lines = []
    for model, letter in zip(models, COLOURS, strict=False):
        if index >= len(model["layers"]):
            continue
        shares, colour = _shares(model["layers"][index]), f"var(--{letter})"
        name = f"{model['name']}, {model['layers'][index]['kind']}"
        for head in shares[:HEADS] if len(shares) > 1 else ():
            lines.append(Line(name, _points(head), colour, thin=True))
        lines.append(Line(f"{name}, mean of the heads", _points(shares.mean(0)), colour))
    x = Axis(1, max(longest, 2), log=longest > LOG_FROM)
    title = f"Layer {index + 1}"
    picture = line_chart(
        f"{title}: normalised cumulative singular values",
        [line for line in lines if line.thin] + [line for line in lines if not line.thin],
        x,
        Axis(0, 1, percent=True),
        x_title="number of singular values" + (", log scale" if x.log else ""),
    )
    kinds = [m["layers"][index]["kind"] for m in models if index < len(m["layers"])]
    return figure(title, picture, " and ".join(dict.fromkeys(kinds)))


def _shares(layer: dict[str, Any]) -> Tensor:  # (H, k)
    return cumulative_share(torch.tensor(layer["singular_values"], dtype=torch.float64))


def _points(shares: Tensor) -> list[tuple[float, float]]:
    """Return a curve without the flat end that adds nothing to it but weight."""
    values = shares.tolist()
    end = next((k for k, share in enumerate(values) if share > 0.9999), len(values) - 1)
    return [(k + 1.0, share) for k, share in enumerate(values[: end + 1])]


def _map(models: list[dict[str, Any]], longest: int) -> Html:
    columns = _columns(longest)
    rows = []
    for model, colour in zip(models, COLOURS, strict=False):
        for layer in model["layers"]:
            shares = _shares(layer).mean(0).tolist()
            cells = [shares[min(k, len(shares)) - 1] for k in columns]
            rows.append((f"{model['name']}, {layer['name']}", colour, cells))
    picture = heatmap("Layers", rows, columns, x_title="number of singular values")
    return figure(
        "Layer by layer",
        tag("div", picture, class_="scroll"),
        "mean of the heads; full colour: all of the sum",
        wide=True,
    )


def _columns(longest: int) -> list[int]:
    """Return the counts of singular values to show: all, or ever fewer of the larger ones."""
    if longest <= COLUMNS:
        return list(range(1, longest + 1))
    steps = [longest ** (i / (COLUMNS - 1)) for i in range(COLUMNS)]
    return sorted({round(step) for step in steps})


def _ranks(rows: list[SpectrumRow]) -> Html:
    highest = max(max(row.effective_rank) for row in rows)
    axis = fit_axis([0.0, highest], zero=True)
    names = list(dict.fromkeys(row.model for row in rows))
    heads = ("layer", "kernel", "effective rank", "of the heads", "90 %", "rank")
    lines = [
        tag(
            "tr",
            tag("th", row.layer, tag("small", row.model), scope="row"),
            tag("td", row.kind),
            tag("td", f"{sum(row.effective_rank) / len(row.effective_rank):.1f}"),
            tag("td", _strip(row, axis, COLOURS[names.index(row.model) % len(COLOURS)])),
            tag("td", _range(row.ninety)),
            tag("td", row.rank),
        )
        for row in rows
    ]
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *lines),
        class_="numbers plain",
    )
    return figure(
        "Effective ranks",
        tag("div", table, class_="scroll"),
        "exp of the entropy of the normalised singular values: r for r equal ones. Dots are heads, "
        f"from 0 to {axis.high:.3g}. 90 %: how many make up nine tenths of the sum",
        wide=True,
    )


def _strip(row: SpectrumRow, axis: Axis, colour: str) -> Html:
    told = ", ".join(f"{rank:.1f}" for rank in row.effective_rank)
    return strip(f"effective rank of each head: {told}", row.effective_rank, axis, colour)


def _range(counts: tuple[int, ...]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}–{high}"

"""The paper's Figure 2 for this run: how fast the singular values of each layer's kernel decay."""

from typing import Any

import torch
from torch import Tensor

from primal.diagnostics.spectrum import SpectrumRow, cumulative_share, spectrum_rows
from primal.report.html import Html, join, tag
from primal.report.run import Run
from primal.report.svg import Axis, Line, Point, figure, fit_axis, heatmap, line_chart

COLOURS = ("a", "b", "c")
LAYERS, HEADS, POINTS, COLUMNS = 6, 16, 48, 64  # at most: drawn, of a layer, of a line, of a row
LOG_FROM = 48  # singular values from which a logarithmic axis tells more
ROUNDING = 1e-7  # of the largest singular value: what is smaller is float32's rounding

HOW_TO_READ = """Attention of every kind stands for a kernel, tokens by tokens. The sooner its
singular values fall, and the sooner a few of them make up all of their sum, the fewer directions
the layer uses. Thin lines are heads, thick ones their mean."""
RANKS = """The effective rank is exp of the entropy of the normalised singular values: r where r of
them are equal and the rest zero. “90 %” is how many singular values make up nine tenths of their
sum, “rank” how many stand above rounding."""


def spectra(run: Run) -> Html | None:
    models = [model for model in run.spectra if model.get("layers")][: len(COLOURS)]
    if not models:
        return None
    longest = max(len(layer["singular_values"][0]) for m in models for layer in m["layers"])
    depth = max(len(model["layers"]) for model in models)
    shown = sorted({round(i * (depth - 1) / max(1, LAYERS - 1)) for i in range(LAYERS)})
    shown = shown if depth > LAYERS else list(range(depth))
    some = f" {len(shown)} of {depth} layers are drawn." if len(shown) < depth else ""
    return join(
        tag("p", HOW_TO_READ + some),
        _legend(models),
        *(_layer(models, i, longest) for i in shown),
        tag("h3", "All layers"),
        _map(models, longest),
        _ranks(spectrum_rows({"models": models})),
    )


def _legend(models: list[dict[str, Any]]) -> Html:
    keys = [
        tag("span", tag("i", class_=colour), model["name"])
        for model, colour in zip(models, COLOURS, strict=False)
    ]
    return tag("p", *keys, class_="legend")


# --- a layer -------------------------------------------------------------------------------------


def _layer(models: list[dict[str, Any]], index: int, longest: int) -> Html:
    found = [
        (model["name"], colour, model["layers"][index])
        for model, colour in zip(models, COLOURS, strict=False)
        if index < len(model["layers"])
    ]
    kinds = " and ".join(dict.fromkeys(layer["kind"] for _, _, layer in found))
    across = Axis(1, max(longest, 2), log=longest > LOG_FROM, whole=True)
    charts = (
        _decay(index, [(n, c, _relative(layer)) for n, c, layer in found], across),
        _cumulative(index, [(n, c, _shares(layer)) for n, c, layer in found], across),
        _heads(index, [(n, c, layer["effective_rank"]) for n, c, layer in found]),
    )
    return join(
        tag("h3", f"Layer {index + 1} ", tag("small", kinds)), tag("div", *charts, class_="charts")
    )


def _decay(index: int, found: list[tuple[str, str, Tensor]], across: Axis) -> Html:
    smallest = min(float(v.where(v >= ROUNDING, 1.0).min()) for _, _, v in found)
    picture = line_chart(
        f"Layer {index + 1}: singular values as shares of the largest",
        _lines(found, lambda values: values >= ROUNDING),
        across,
        fit_axis([smallest, 1.0], log=True),
        x_title=_index_title(across),
    )
    return figure("Decay", picture, "singular value as a share of the largest, log scale")


def _cumulative(index: int, found: list[tuple[str, str, Tensor]], across: Axis) -> Html:
    lowest = min(float(shares[:, 0].min()) for _, _, shares in found)
    picture = line_chart(
        f"Layer {index + 1}: normalised cumulative singular values",
        _lines(found, lambda values: torch.ones_like(values, dtype=torch.bool)),
        across,
        fit_axis([lowest, 1.0], percent=True),
        x_title=_index_title(across),
    )
    return figure("Cumulative", picture, "share of the sum that the largest ones make up")


def _index_title(across: Axis) -> str:
    return "singular values, largest first" + (", log scale" if across.log else "")


def _lines(found: list[tuple[str, str, Tensor]], kept: Any) -> list[Line]:
    """Return a thin line for each head and above them a thick one for their mean."""
    thin, thick = [], []
    for name, letter, values in found:
        colour = f"var(--{letter})"
        if len(values) > 1:
            thin += [Line(name, _points(head, kept), colour, thin=True) for head in values[:HEADS]]
        thick.append(Line(f"{name}, mean of the heads", _points(values.mean(0), kept), colour))
    return thin + thick


def _points(values: Tensor, kept: Any) -> list[Point]:
    """Return the values at some places, close together where the line is steep."""
    places = [k for k in _columns(len(values), POINTS) if bool(kept(values)[k - 1])]
    return [(float(k), float(values[k - 1])) for k in places]


def _heads(index: int, found: list[tuple[str, str, list[float]]]) -> Html:
    count = max(len(ranks) for _, _, ranks in found)
    lines = [
        # Beside each other, so that equal ranks do not hide each other.
        Line(
            f"{name}, effective rank of each head",
            [(h + 1 + 0.14 * (i - (len(found) - 1) / 2), rank) for h, rank in enumerate(ranks)],
            f"var(--{letter})",
            dots=True,
        )
        for i, (name, letter, ranks) in enumerate(found)
    ]
    picture = line_chart(
        f"Layer {index + 1}: effective rank of each head",
        lines,
        Axis(0.5, count + 0.5, whole=True),
        fit_axis([rank for _, _, ranks in found for rank in ranks], zero=True),
        x_title="head",
    )
    return figure("Effective rank", picture, "of each head's kernel")


def _relative(layer: dict[str, Any]) -> Tensor:  # (H, k)
    values = torch.tensor(layer["singular_values"], dtype=torch.float64)
    largest = values[:, :1]
    return values / torch.where(largest > 0, largest, 1.0)


def _shares(layer: dict[str, Any]) -> Tensor:  # (H, k)
    return cumulative_share(torch.tensor(layer["singular_values"], dtype=torch.float64))


# --- all layers ----------------------------------------------------------------------------------


def _map(models: list[dict[str, Any]], longest: int) -> Html:
    columns = _columns(longest, COLUMNS)
    rows = []
    for model, colour in zip(models, COLOURS, strict=False):
        for layer in model["layers"]:
            shares = _shares(layer).mean(0).tolist()
            cells = [shares[min(k, len(shares)) - 1] for k in columns]
            rows.append((f"{model['name']}, {layer['name']}", colour, cells))
    picture = heatmap(
        "Normalised cumulative singular values of every layer",
        rows,
        columns,
        x_title="number of singular values",
    )
    return figure(
        "Normalised cumulative singular values",
        tag("div", picture, class_="scroll natural"),
        "mean of the heads; the fuller the colour, the more of the sum, full colour is all of it",
    )


def _columns(longest: int, limit: int) -> list[int]:
    """Return counts of singular values: all, or ever fewer of the larger ones.

    >>> _columns(5, 10), _columns(1000, 6)
    ([1, 2, 3, 4, 5], [1, 4, 16, 63, 251, 1000])
    """
    if longest <= limit:
        return list(range(1, longest + 1))
    return sorted({round(longest ** (i / (limit - 1))) for i in range(limit)})


def _ranks(rows: list[SpectrumRow]) -> Html:
    heads = ("model", "layer", "kernel", "effective rank", "of the heads", "90 %", "rank")
    lines = [
        tag(
            "tr",
            tag("th", row.model, scope="row"),
            tag("td", row.layer),
            tag("td", row.kind),
            tag("td", f"{sum(row.effective_rank) / len(row.effective_rank):.1f}"),
            tag("td", _range([f"{rank:.1f}" for rank in sorted(row.effective_rank)])),
            tag("td", _range([str(count) for count in sorted(row.ninety)])),
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
    return figure("Ranks", tag("div", table, class_="scroll"), RANKS)


def _range(ascending: list[str]) -> str:
    low, high = ascending[0], ascending[-1]
    return low if low == high else f"{low} – {high}"

"""A training step: against the plain formulation on a CPU, with CUDA graphs or without on a GPU.

Series of the lengths of three UEA sets, drawn at random: no file is needed. What is timed is
``fit_series`` itself, epoch by epoch: batches, step, learning rate, sums, average.

    python benchmarks/train_step.py --device cpu       our default encoder, against the same network
                                                       computed and trained as the papers' code does
    python benchmarks/train_step.py --device cuda      the paper's configuration, and softmax
    python benchmarks/train_step.py ... --out PATH     keeps PATH.md and PATH.json
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal.attention.base import Attention, AttentionOutput
from primal.attention.primal import PrimalAttention
from primal.data.preparation import Preparation
from primal.data.series import SeriesSet
from primal.functional import ksvd_residual
from primal.layers import Dropout, Linear
from primal.projections import FromAnchors
from primal.recipes import uea
from primal.recipes.base import processor
from primal.recipes.timeseries import TimeSeries
from primal.training.loop import Shown
from primal.training.series import Device, fit_series

CPU_TARGET, GPU_TARGET = 1.5, 2.0  # times the plain throughput; ms per step
clock: Callable[[], float] = time.perf_counter


class Shape(NamedTuple):
    """What a set is like."""

    name: str
    shortest: int
    longest: int
    channels: int
    classes: int


SHAPES = (
    Shape("JapaneseVowels", 7, 29, 12, 9),
    Shape("UWaveGestureLibrary", 315, 315, 3, 8),
    Shape("SpokenArabicDigits", 4, 93, 13, 10),
)


def draw(shape: Shape, cases: int) -> SeriesSet:
    """Draw series; their lengths are spread evenly, and the longest is among them."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(shape.shortest, shape.longest + 1, cases)
    lengths[0] = shape.longest
    values = tuple(generator.standard_normal((n, shape.channels)) for n in lengths)
    targets = np.array([str(i % shape.classes) for i in range(cases)])
    return SeriesSet(values, targets, tuple(map(str, range(cases))))


def ours(recipe: TimeSeries, data: SeriesSet, epochs: int, device: Device) -> list[float]:
    """Train; return the milliseconds of a step, a number for each epoch but the first."""
    training, ends = replace(recipe.training, epochs=epochs), Ends()
    fit_series(recipe.model, data, training, device=device, watch=ends)
    steps = math.ceil(len(data) / training.batch_size)
    return [1e3 * (b - a) / steps for a, b in pairwise(ends.seconds)]


class Ends:
    """Look at the clock when an epoch ends, which waits for the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step(self, epoch: int, step: int, steps: int, shown: Shown) -> None:
        pass

    def epoch(self, row: dict[str, Any]) -> None:
        self.seconds.append(clock())


# --- the plain formulation -----------------------------------------------------------------------


class Released(Attention):
    """A primal layer computed as the released code does: e, r and a repeated Λ in memory.

    It overlooks padding, and returns J of each sample (B,) in place of its terms.
    """

    def __init__(self, layer: PrimalAttention) -> None:
        super().__init__(layer.width, layer.heads)
        self.layer = layer

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        layer, (batch, tokens, width), heads = self.layer, x.shape, self.heads
        projection = layer.projection
        assert isinstance(projection, FromAnchors)
        query = layer.to_query(x).view(batch, tokens, heads, -1).transpose(1, 2)
        key = layer.to_key(x).view(batch, tokens, heads, -1).transpose(1, 2)
        index = torch.linspace(0, tokens - 1, projection.anchors, dtype=torch.int64)
        anchors = x.transpose(-2, -1).reshape(batch, heads, width // heads, tokens)
        anchors = anchors[:, :, :, index].transpose(1, 2)
        weights = (projection.left, projection.right)
        left, right = (
            torch.einsum("bahd,hde->bahe", anchors, weight).transpose(1, 2) for weight in weights
        )
        query, key = F.normalize(query, p=2, dim=-1), F.normalize(key, p=2, dim=-1)
        e = torch.einsum("...nd,...de->...ne", query, left)
        r = torch.einsum("...nd,...de->...ne", key, right)
        mixed = layer.combine(torch.cat((e, r), dim=-1)).transpose(1, 2).contiguous()
        scale = torch.diag_embed(layer.scale).unsqueeze(0).repeat(batch, 1, 1, 1)
        energies = [
            (torch.einsum("...nd,...ds->...ns", s, scale).norm(dim=-1, p=2) ** 2).mean((1, 2)) / 2
            for s in (e, r)
        ]
        trace = torch.einsum("...ps,...pd->...sd", *weights).mean(dim=0).trace()
        return AttentionOutput(layer.to_output(mixed.flatten(2)), sum(energies) - trace)

    def kernel(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.layer.kernel(x)

    def reset_parameters(self) -> None:
        self.layer.reset_parameters()


def build(recipe: TimeSeries, preparation: Preparation, *, plain: bool) -> nn.Module:
    torch.manual_seed(0)
    assert preparation.classes is not None
    model: Any = recipe.model.build(
        preparation.width, len(preparation.classes), preparation.max_length
    )
    for block in model.encoder.blocks if plain else ():
        block.attention = Released(block.attention)
    for module in list(model.modules()) if plain else ():
        for name, part in module.named_children():
            if isinstance(part, Dropout):
                setattr(module, name, nn.Dropout(part.p))
            elif isinstance(part, Linear):
                setattr(module, name, _of_torch(part))
    return model


def _of_torch(layer: Linear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features)
    plain.load_state_dict(layer.state_dict())
    return plain


def check(recipe: TimeSeries, shape: Shape) -> None:
    """Raise unless both formulations are one function of whole series: outputs and gradients."""
    data = draw(shape._replace(shortest=shape.longest), 6)
    preparation = Preparation.fit(data)
    x = preparation.inputs(data).x
    found = []
    for plain in (False, True):
        model = build(recipe, preparation, plain=plain).eval()
        logits, terms = model(x)
        residuals = list(terms) if plain else [ksvd_residual(t) for t in terms]
        loss = logits.sin().mean() + torch.stack(residuals).square().mean()
        found.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.detach().abs().max()))


def plain(recipe: TimeSeries, data: SeriesSet, epochs: int) -> list[float]:
    """Train as the papers' code does: every series at full length, parameters one by one."""
    preparation, training = Preparation.fit(data), recipe.training
    x, targets = preparation.inputs(data).x, preparation.targets(data)
    model = build(recipe, preparation, plain=True)
    parameters = list(model.parameters())
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "radam": torch.optim.RAdam}
    optimizer = kinds[training.optimizer](
        parameters,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        foreach=False,
    )
    average = [p.detach().clone() for p in parameters]
    spent, total = [], 0.0
    for _ in range(epochs):
        start, batches = clock(), torch.randperm(len(data)).split(training.batch_size)
        for index in batches:
            logits, residuals = model(x[index])  # padding counts as tokens
            loss = F.cross_entropy(
                logits, targets[index], label_smoothing=recipe.model.label_smoothing
            )
            loss = loss + training.objective_weight * torch.stack(residuals).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if training.clip is not None:
                nn.utils.clip_grad_norm_(parameters, training.clip, foreach=False)
            optimizer.step()
            if training.average:
                with torch.no_grad():
                    for mean, p in zip(average, parameters, strict=True):
                        mean.mul_(training.average).add_(p, alpha=1 - training.average)
            total += loss.item()
        spent.append(1e3 * (clock() - start) / len(batches))
    return spent[1:]


# --- what is measured ----------------------------------------------------------------------------

Row = dict[str, str | int | float]
Precision = Literal["float32", "tf32", "bfloat16"]
STEPS = 60  # in an epoch, on a GPU


def on_cpu(repeats: int) -> list[Row]:
    """Train ours and the plain formulation in turn: what else the machine does meets both."""
    rows: list[Row] = []
    for shape in SHAPES:
        recipe = uea.default(shape.name)
        check(recipe, shape)
        batch = recipe.training.batch_size
        data = draw(shape, 4 * batch if shape.longest > 100 else 10 * batch)
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(repeats):
            times["ours"] += ours(recipe, data, 3, "cpu")
            times["plain"] += plain(recipe, data, 3)
        mine, theirs = (statistics.median(times[name]) for name in ("ours", "plain"))
        rows.append(
            {
                "shape": label(shape),
                "ours, ms": mine,
                "plain, ms": theirs,
                "ours, series/s": 1e3 * batch / mine,
                "plain, series/s": 1e3 * batch / theirs,
                "ours / plain": theirs / mine,
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def on_cuda(repeats: int, seconds: float) -> list[Row]:
    """Time the paper's configuration and the softmax Transformer; stop when time is up."""
    rows: list[Row] = []
    end = time.monotonic() + seconds
    models: tuple[uea.Model, ...] = ("primalformer", "transformer")
    precisions: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")
    for precision, model, shape in product(precisions, models, SHAPES):
        recipe, cells = uea.paper(shape.name, model), {}
        data = draw(shape, STEPS * recipe.training.batch_size)
        for graphs in (True, False):
            if time.monotonic() > end:
                print(f"stopped after {seconds:g} s: raise --seconds for the rest", flush=True)
                return rows
            training = replace(recipe.training, precision=precision, graphs=graphs)
            spent = ours(replace(recipe, training=training), data, repeats + 1, "cuda")
            cells["graphs, ms" if graphs else "eager, ms"] = statistics.median(spent)
        rows.append(
            {"shape": label(shape), "model": uea.NAMES[model], "precision": precision, **cells}
        )
        print(line(rows[-1]), flush=True)
    return rows


def label(shape: Shape) -> str:
    return f"{shape.name}, {shape.longest}×{shape.channels}"


def line(row: Row) -> str:
    cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
    return f"| {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    names = list(rows[0])
    head = [line(dict(zip(names, names, strict=True))), len(names) * "|---" + "|"]
    return "\n".join([*head, *map(line, rows)])


def machine(device: str) -> dict[str, str | int]:
    name = processor()
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {name}"
    return {
        "machine": name,
        "threads": torch.get_num_threads(),
        "date": str(date.today()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def explained(device: str, repeats: int) -> str:
    if device == "cuda":
        return (
            "Width 512, 8 heads, 2 layers, feed-forward 2048, batch 16, the paper's settings of "
            "each set; milliseconds of a training step (batch, forward, backward, clipping, "
            f"optimizer, sums), median of {repeats} epochs of {STEPS} steps. Target: "
            f"{GPU_TARGET:g} ms with graphs."
        )
    what = "processor time" if clock is time.process_time else "wall-clock time"
    return (
        "Our default encoder, and the same network computed and trained as the papers' code does: "
        "e, r and a repeated Λ in memory, einsum, every series at full length, parameters updated "
        "one by one. Both were checked to be one function first, with one gradient. Milliseconds "
        f"of a training step in {what}, medians over {repeats} interleaved repeats of two epochs; "
        f"target: {CPU_TARGET:g} times the plain throughput."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90, help="at most, on a GPU")
    parser.add_argument("--processor-time", action="store_true", help="for a busy machine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.processor_time:
        global clock  # noqa: PLW0603
        clock = time.process_time
    told = machine(options.device)
    print(", ".join(f"{name} {value}" for name, value in told.items()), flush=True)
    if options.device == "cpu":
        rows = on_cpu(options.repeats)
    else:
        rows = on_cuda(options.repeats, options.seconds)
    print(table(rows))
    if options.out is not None:
        text = "\n\n".join(
            [
                f"# A training step, {told['date']}",
                ", ".join(f"{name} {value}" for name, value in told.items()) + ".",
                explained(options.device, options.repeats) + " Made by `benchmarks/train_step.py`.",
                table(rows),
            ]
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text(text + "\n")
        content = json.dumps({**told, "rows": rows}, indent=1)
        options.out.with_suffix(".json").write_text(content + "\n")


if __name__ == "__main__":
    main()

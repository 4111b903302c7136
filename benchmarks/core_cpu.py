"""PrimalAttention on a CPU against the released formulation and softmax: checked, then timed.

Two levels. "attention" is what differs, from projected queries and keys to mixed heads and
objective (softmax: to attended heads). "layer" adds the projections around it, which no formulation
can avoid; their own time, the floor of every layer here, stands in the last column.

    python benchmarks/core_cpu.py              prints a table
    python benchmarks/core_cpu.py --save       and keeps it under benchmarks/results/
    python benchmarks/core_cpu.py --blocks     compares block sizes of the fused pass
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from primal import PrimalAttention, SoftmaxAttention, functional, ksvd_objective
from primal.attention.base import join_heads, split_heads
from primal.kernels import blocked
from primal.projections import FromAnchors, Tokens

WIDTH, HEADS, RANK = 256, 8, 32
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OBJECTIVE_WEIGHT = 0.1
RESULTS = Path(__file__).parent / "results"

Result = tuple[Tensor, Tensor]  # values, objective
Variant = Callable[[], Result]


def released_scores(
    query: Tensor, key: Tensor, left: Tensor, right: Tensor, layer: PrimalAttention
) -> Result:
    """Compute the mixed heads and J² as the released code does: e, r and repeated Λ in memory."""
    query, key = F.normalize(query, p=2, dim=-1), F.normalize(key, p=2, dim=-1)
    e = torch.einsum("...nd,...de->...ne", query, left)
    r = torch.einsum("...nd,...de->...ne", key, right)
    mixed = layer.combine(torch.cat((e, r), dim=-1)).transpose(1, 2).contiguous()
    scale = torch.diag_embed(layer.scale).unsqueeze(0).repeat(len(query), 1, 1, 1)
    left_energy, right_energy = (
        (torch.einsum("...nd,...ds->...ns", s, scale).norm(dim=-1, p=2) ** 2).mean((1, 2)) / 2
        for s in (e, r)
    )
    assert isinstance(layer.projection, FromAnchors)
    weights = (layer.projection.left, layer.projection.right)
    trace = torch.einsum("...ps,...pd->...sd", *weights).mean(dim=0).trace()
    return mixed.flatten(2), ((left_energy + right_energy - trace) ** 2).mean()


def released_layer(x: Tensor, layer: PrimalAttention) -> Result:
    """Compute the whole layer as the released code does."""
    batch, tokens, width = x.shape
    projection = layer.projection
    assert isinstance(projection, FromAnchors)
    query = layer.to_query(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
    key = layer.to_key(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
    index = torch.linspace(0, tokens - 1, projection.anchors, dtype=torch.int64)
    anchors = x.transpose(-2, -1).reshape(batch, HEADS, width // HEADS, tokens)
    anchors = anchors[:, :, :, index].transpose(1, 2)
    left, right = (
        torch.einsum("bahd,hde->bahe", anchors, weight).transpose(1, 2)
        for weight in (projection.left, projection.right)
    )
    mixed, objective = released_scores(query, key, left, right, layer)
    return layer.to_output(mixed), objective


def our_layer(x: Tensor, layer: PrimalAttention) -> Result:
    values, terms = layer(x)
    assert terms is not None
    return values, ksvd_objective(terms)


def our_attention(
    query: Tensor, key: Tensor, left: Tensor, right: Tensor, layer: PrimalAttention
) -> Result:
    """Compute what released_scores computes, with the library's function."""
    weight = layer.combine.weight
    out = functional.primal_attention(
        query, key, left, right, weight[:, :RANK], weight[:, RANK:], unit_norm=True
    )
    assert isinstance(layer.projection, FromAnchors)
    coupling = functional.coupling(layer.projection.left, layer.projection.right)
    terms = functional.KSVDTerms(*out[1:], layer.scale, coupling, coupling)
    return join_heads(out.values + layer.combine.bias), ksvd_objective(terms)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Result:
    return join_heads(F.scaled_dot_product_attention(query, key, value)), torch.zeros(())


def variants(tokens: int, batch: int) -> dict[str, dict[str, tuple[Variant, list[Tensor]]]]:
    """Return level -> name -> (what to call, the tensors it is differentiated by)."""
    torch.manual_seed(0)
    layer, softmax = PrimalAttention(WIDTH, HEADS, RANK), SoftmaxAttention(WIDTH, HEADS)
    x = torch.randn(batch, tokens, WIDTH, requires_grad=True)
    with torch.no_grad():
        query, key = (split_heads(project(x), HEADS) for project in (layer.to_query, layer.to_key))
        value = split_heads(softmax.to_value(x), HEADS)
        directions = layer.projection(Tokens(x, None, None), Tokens(x, None, None))
    query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
    left, right = (t.detach().requires_grad_() for t in (directions.left, directions.right))
    projections = (layer.to_query, layer.to_key, layer.to_output)
    inputs = (query, key, left, right, layer)
    combine = [layer.combine.weight, layer.combine.bias, layer.scale]
    parts = [query, key, left, right, *combine]
    return {
        "attention": {
            "ours": (lambda: our_attention(*inputs), parts),
            "released": (lambda: released_scores(*inputs), parts),
            "softmax": (lambda: softmax_attention(query, key, value), [query, key, value]),
        },
        "layer": {
            "ours": (lambda: our_layer(x, layer), [x, *layer.parameters()]),
            "released": (lambda: released_layer(x, layer), [x, *layer.parameters()]),
            "softmax": (
                lambda: (softmax(x).values, torch.zeros(())),
                [x, *softmax.parameters()],
            ),
            "projections": (
                lambda: (layer.to_output(layer.to_query(x) + layer.to_key(x)), torch.zeros(())),
                [x, *(p for part in projections for p in part.parameters())],
            ),
        },
    }


def gradients(variant: Variant, wanted: list[Tensor], upstream: Tensor) -> list[Tensor]:
    values, objective = variant()
    roots, weights = [values], [upstream]
    if objective.requires_grad:
        roots, weights = [values, objective], [upstream, torch.tensor(OBJECTIVE_WEIGHT)]
    return list(torch.autograd.grad(roots, wanted, weights))


def check(tokens: int) -> None:
    """Raise unless ours and the released formulation agree: values, objective, every gradient."""
    for level, named in variants(tokens, batch=2).items():
        (ours, wanted), (released, _) = named["ours"], named["released"]
        for a, b in zip(ours(), released(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"{level}: outputs differ")
        upstream = torch.randn_like(ours()[0])
        for a, b in zip(*(gradients(v, wanted, upstream) for v in (ours, released)), strict=True):
            scale = float(b.abs().max())
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * scale)


def milliseconds(
    named: dict[str, tuple[Variant, list[Tensor]]], backward: bool, repeats: int
) -> dict[str, float]:
    """Time the variants in turn, so that what else the machine does meets all of them alike."""
    upstream = torch.randn_like(next(iter(named.values()))[0]()[0])
    times: dict[str, list[float]] = {name: [] for name in named}
    for repeat in range(repeats + 1):
        for name, (variant, wanted) in named.items():
            start = time.perf_counter()
            if backward:
                gradients(variant, wanted, upstream)
            else:
                with torch.no_grad():
                    variant()
            if repeat:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(spent) for name, spent in times.items()}


def measure(batch: int, repeats: int) -> list[dict[str, object]]:
    rows = []
    for tokens in LENGTHS:
        for level, named in variants(tokens, batch).items():
            for backward in (False, True):
                # Softmax takes seconds a call at the longest lengths: fewer repeats must do.
                often = repeats if tokens <= 4096 else max(3, repeats // 4)
                spent = milliseconds(named, backward, often)
                what = "forward+backward" if backward else "forward"
                rows.append({"tokens": tokens, "level": level, "pass": what, **spent})
                print(line(rows[-1], rows), flush=True)
    return rows


def line(row: dict[str, object], rows: list[dict[str, object]]) -> str:
    ours, released, softmax = (float(str(row[name])) for name in ("ours", "released", "softmax"))
    half = [
        float(str(r["ours"]))
        for r in rows
        if (r["level"], r["pass"]) == (row["level"], row["pass"])
        and 2 * int(str(r["tokens"])) == row["tokens"]
    ]
    doubling = f"{ours / half[0]:.2f}" if half else ""
    floor = f"{row['projections']:.2f}" if "projections" in row else ""
    return (
        f"| {row['tokens']} | {row['level']} | {row['pass']} | {ours:.2f} | {released:.2f} | "
        f"{softmax:.2f} | {released / ours:.2f} | {softmax / ours:.2f} | {doubling} | {floor} |"
    )


HEADER = (
    "| tokens | level | pass | ours, ms | released, ms | softmax, ms | released / ours | "
    "softmax / ours | ours, per doubling | projections, ms |\n" + 10 * "|---" + "|"
)


def machine() -> str:
    name = platform.processor() or platform.machine()
    for text in Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else ():
        if text.startswith("model name"):
            name = text.split(":")[1].strip()
            break
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def compare_blocks(batch: int, repeats: int) -> None:
    for tokens in LENGTHS:
        named = {"ours": variants(tokens, batch)["attention"]["ours"]}
        cells = []
        for power in range(14, 22):
            blocked.BLOCK_ELEMENTS = 2**power
            cells.append(f"2^{power}: {milliseconds(named, True, repeats)['ours']:.2f}")
        print(f"{tokens} tokens, forward+backward in ms by block elements: " + ", ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.blocks:
        compare_blocks(options.batch, options.repeats)
        return
    check(tokens=700)
    print(f"{machine()}; width {WIDTH}, heads {HEADS}, rank {RANK}, batch {options.batch}, float32")
    print(HEADER)
    rows = measure(options.batch, options.repeats)
    if options.save:
        name = f"core_cpu_{options.threads}threads_b{options.batch}_{date.today()}"
        title = f"# PrimalAttention on a CPU, {date.today()}\n\n{machine()}.\n"
        settings = (
            f"Width {WIDTH}, heads {HEADS}, rank {RANK}, batch {options.batch}, float32; medians "
            f"of {options.repeats} interleaved repeats, a quarter as many above 4096 tokens. "
            "Outputs and gradients were checked against the released formulation first. Made by "
            "`benchmarks/core_cpu.py --save`.\n"
        )
        table = "\n".join([HEADER, *(line(row, rows) for row in rows)])
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(f"{title}\n{settings}\n{table}\n")
        (RESULTS / f"{name}.json").write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()

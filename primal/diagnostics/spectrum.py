"""The singular values of the kernel each attention layer stands for, and how many of them matter.

The kernel is what ``layer.kernel`` returns: softmax attention's matrix of weights, primal
attention's E Λ Rᵀ / √(NM) (docs/theory.md, section 10). A primal layer's has rank S at most; its
singular values come from the N×S scores, and no N×N matrix is formed.

*Effective rank*, here and in every table: ``exp(−Σ p_k log p_k)`` with ``p_k = σ_k / Σ σ`` (Roy and
Vetterli, EUSIPCO 2007). It is r for r equal singular values, 1 for a kernel of rank one, and does
not change with the kernel's scale. Beside it stands the count of singular values that make up 90 %
of their sum.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from primal.attention.base import Attention, as_mask
from primal.attention.primal import PrimalAttention
from primal.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

FILE = "spectrum.json"


class LayerSpectrum(NamedTuple):
    """One attention layer on given data; means over the sequences, each without its padding."""

    name: str
    kind: str  # "primal", "softmax", "robust", ...
    singular_values: Tensor  # (H, k), descending; zero where a sequence has fewer
    effective_rank: Tensor  # (H,)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "singular_values": [_rounded(head) for head in self.singular_values],
            "effective_rank": _rounded(self.effective_rank),
        }


# --- numbers -------------------------------------------------------------------------------------


def effective_rank(singular_values: Tensor) -> Tensor:  # (..., k) -> (...)
    """Return the exponential of the entropy of the shares; 0 for a kernel that is zero.

    >>> effective_rank(torch.tensor([[2.0, 2.0, 2.0, 0.0], [5.0, 0.0, 0.0, 0.0]]))
    tensor([3., 1.])
    """
    total = singular_values.sum(-1, keepdim=True)
    shares = singular_values / torch.where(total > 0, total, 1.0)
    entropy = torch.special.entr(shares).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0.0)


def cumulative_share(singular_values: Tensor) -> Tensor:  # (..., k) -> (..., k)
    """Return what part of their sum the first 1, 2, ... singular values make up.

    >>> cumulative_share(torch.tensor([3.0, 1.0, 0.0]))
    tensor([0.7500, 1.0000, 1.0000])
    """
    running = singular_values.cumsum(-1)
    total = running[..., -1:]
    return running / torch.where(total > 0, total, 1.0)


def values_for_share(singular_values: Tensor, share: float = 0.9) -> Tensor:  # (..., k) -> (...)
    """Return how many singular values, largest first, make up ``share`` of their sum.

    >>> values_for_share(torch.tensor([3.0, 1.0, 0.0]))
    tensor(2)
    """
    # Tolerant of rounding: nine of ten equal values are 90 %.
    reached = cumulative_share(singular_values.double()) >= share - 1e-9
    first = (~reached).sum(-1) + 1
    return torch.where(singular_values.sum(-1) > 0, first, 0)


# --- a matrix, a layer, a model ------------------------------------------------------------------


def attention_spectrum(
    kernel: Tensor,  # (B, H, N, M)
    mask: Tensor | None = None,  # (B, N) bool, or (B,) lengths
    context_mask: Tensor | None = None,  # (B, M); by default ``mask`` where N = M
    *,
    name: str = "attention",
    kind: str = "softmax",
) -> LayerSpectrum:
    """Return the spectrum of any layer's attention matrices.

    >>> averaging = torch.full((2, 4, 10, 10), 0.1)  # every token reads all alike: rank one
    >>> attention_spectrum(averaging).effective_rank.round(decimals=4)
    tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    if kernel.ndim != 4 or min(kernel.shape) < 1:
        raise ValueError(
            "attention matrices must be (batch, heads, tokens, tokens attended to), got "
            f"{tuple(kernel.shape)}; unsqueeze what is missing."
        )
    mask = as_mask("mask", mask, kernel[:, 0])
    if context_mask is None and kernel.shape[2] == kernel.shape[3]:
        context_mask = mask
    context_mask = as_mask("context_mask", context_mask, kernel[:, 0].mT)
    found = []
    for b, sequence in enumerate(kernel.detach()):
        rows = sequence if mask is None else sequence[:, mask[b]]
        found.append(_singular_values(rows if context_mask is None else rows[..., context_mask[b]]))
    return _mean(name, kind, found)


@contextmanager
def watch(model: nn.Module) -> Iterator[list[LayerSpectrum]]:
    """Collect the spectrum of every attention layer that the model calls within the block.

    >>> model = primal.SequenceClassifier(channels=3, classes=2, max_tokens=20)
    >>> with watch(model) as layers:
    ...     _ = model(torch.randn(4, 20, 3))
    >>> [layer.kind for layer in layers]
    ['primal', 'primal']
    """
    found: list[LayerSpectrum] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, Attention)
        found.append(_of_layer(layer, f"layer {len(found) + 1}", *args, **kwargs))

    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def spectrum(model: nn.Module, x: Tensor, mask: Tensor | None = None) -> list[LayerSpectrum]:
    """Return the spectrum of each attention layer on x, in the order the layers are called.

    One forward pass, ``model(x, mask=mask)``, as in evaluation. A layer that is not primal costs an
    SVD of its N×N matrix per head and sequence: some sequences tell enough.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), watch(model) as found:
            _ = model(x) if mask is None else model(x, mask=mask)
    finally:
        for module, mode in modes:
            module.training = mode
    if not found:
        raise ValueError(
            f"a model with attention layers of primal is required, got {type(model).__name__} with "
            "none; give other models' attention matrices to attention_spectrum."
        )
    return found


@torch.no_grad()
def _of_layer(
    layer: Attention,
    name: str,
    x: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> LayerSpectrum:
    mask = as_mask("mask", mask, x)
    if context is not None:
        context_mask = as_mask("context_mask", context_mask, context)
    found = []
    for b in range(len(x)):  # one by one: without padding, and in the memory of one kernel
        tokens = _real(x, mask, b)
        attended = None if context is None else _real(context, context_mask, b)
        if isinstance(layer, PrimalAttention) and not layer.causal:
            found.append(_thin_singular_values(layer, tokens, attended))
        else:
            found.append(_singular_values(layer.kernel(tokens, attended)[0]))
    return _mean(name, type(layer).__name__.removesuffix("Attention").lower(), found)


def _real(x: Tensor, mask: Tensor | None, sequence: int) -> Tensor:  # (1, valid tokens, width)
    return x[sequence][None] if mask is None else x[sequence, mask[sequence]][None]


def _singular_values(kernel: Tensor) -> Tensor:  # (H, N, M) -> (H, min(N, M))
    values: Tensor = torch.linalg.svdvals(kernel.double())
    return values


def _thin_singular_values(
    layer: PrimalAttention, x: Tensor, context: Tensor | None
) -> Tensor:  # (H, min(N, M, S))
    """Return those of ``layer.kernel``: with E = Q_e T_e, R = Q_r T_r they are T_e Λ T_rᵀ's."""
    left, right = (scores[0].double() for scores in layer.primal_scores(x, context))
    root = (left.shape[-2] * right.shape[-2]) ** 0.5
    scaled = left * layer.scale.double().square()[:, None] / root
    left_factor, right_factor = (torch.linalg.qr(side, mode="r").R for side in (scaled, right))
    return _singular_values(left_factor @ right_factor.mT)


def _mean(name: str, kind: str, found: list[Tensor]) -> LayerSpectrum:
    values = found[0].new_zeros(found[0].shape[0], max(v.shape[1] for v in found))
    for each in found:
        values[:, : each.shape[1]] += each / len(found)
    ranks = torch.stack([effective_rank(each) for each in found]).mean(0)
    return LayerSpectrum(name, kind, values.cpu(), ranks.cpu())


def _rounded(numbers: Tensor) -> list[float]:
    return [float(f"{number:.6g}") for number in numbers.tolist()]


# --- what a run wrote ----------------------------------------------------------------------------


class SpectrumRow(NamedTuple):
    """One layer of a run's spectrum.json."""

    model: str
    layer: str
    kind: str
    rank: int  # of the heads' kernels, the largest: above float32's rounding
    effective_rank: tuple[float, ...]  # one per head
    ninety: tuple[int, ...]  # one per head: singular values that make up 90 % of the sum


def spectrum_rows(content: Mapping[str, Any]) -> list[SpectrumRow]:
    """Read what a run wrote as spectrum.json: the ``to_json`` of the layers of each model."""
    try:
        return [
            _row(model["name"], layer) for model in content["models"] for layer in model["layers"]
        ]
    except (KeyError, TypeError, ValueError, IndexError):
        raise DataError(
            f"{FILE} must hold the layers of each model, and does not; run again to write it anew."
        ) from None


def _row(model: str, layer: dict[str, Any]) -> SpectrumRow:
    values = torch.tensor(layer["singular_values"], dtype=torch.float64)
    noise = values[:, :1] * values.shape[1] * torch.finfo(torch.float32).eps
    return SpectrumRow(
        model,
        layer["name"],
        layer["kind"],
        int((values > noise).sum(-1).max()),
        tuple(layer["effective_rank"]),
        tuple(values_for_share(values).tolist()),
    )


def diagnostics_table(content: Mapping[str, Any]) -> "Table":
    """Return what ``primal diagnose`` prints."""
    from rich.table import Table
    from rich.text import Text  # names as they are: a bracket in one is no markup

    table = Table(
        title="Singular values of each attention layer's kernel",
        title_justify="left",
        title_style="bold",
        caption="\neffective rank: exp of the entropy of the normalised singular values\n"
        "90 %: how many, largest first, make up nine tenths of the sum (over the heads)\n"
        "rank: how many stand above rounding",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for heading in ("model", "layer", "kernel"):
        table.add_column(heading, overflow="fold", header_style="dim")
    for heading in ("90 %", "rank", "mean"):
        table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
    table.add_column("effective rank of each head", header_style="dim")
    before = None
    for row in spectrum_rows(content):
        ranks = " ".join(f"{rank:.1f}" for rank in row.effective_rank)
        mean = sum(row.effective_rank) / len(row.effective_rank)
        low, high = min(row.ninety), max(row.ninety)
        table.add_row(
            Text(row.model if row.model != before else ""),
            Text(row.layer.removeprefix("layer ")),
            Text(row.kind),
            str(low) if low == high else f"{low}–{high}",
            str(row.rank),
            f"{mean:.1f}",
            ranks,
        )
        before = row.model
    return table

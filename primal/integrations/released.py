"""Checkpoints of the papers' released code: their parameter names, read into our layers.

The names tell which of the code bases trained a layer; the shapes tell its sizes. What the weights
cannot tell (the heads of RPC-Attention, its iterations) is asked for.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from primal.attention.base import Attention, AttentionOutput, as_mask
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.errors import require_choice
from primal.functional import Variant

Weights = Mapping[str, Tensor]


class Layout(NamedTuple):
    """How one code base names the parameters of a layer."""

    title: str
    names: dict[str, str]  # ours -> released; a trailing * stands for weight and, if any, bias
    build: Callable[..., Attention]
    settings: tuple[str, ...] = ()  # what its weights do not tell


@final
class ReleasedPadding(Attention):
    """The released Long Range Arena masking: padding counts as tokens, its heads are zeroed.

    Anchors, scores and objective see the padding; only what enters the output projection is masked,
    so a padded output is that projection's bias. ``.attention`` is the same layer with padding
    excluded.
    """

    def __init__(self, attention: PrimalAttention) -> None:
        super().__init__(attention.width, attention.heads)
        self.attention = attention

    def reset_parameters(self) -> None:
        self.attention.reset_parameters()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> AttentionOutput:
        values, terms = self.attention(x, context, context_mask=context_mask)
        if mask is not None and mask.is_floating_point():
            mask = mask > 0  # the released code's masks are 0.0 and 1.0
        mask = as_mask("mask", mask, x)
        if mask is not None:
            values = torch.where(mask[..., None], values, self.attention.to_output.bias)
        return AttentionOutput(values, terms)

    def kernel(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        return self.attention.kernel(x, context, context_mask=context_mask)


def from_released(
    state_dict: Weights, *, heads: int | None = None, prefix: str | None = None, **settings: Any
) -> Attention:
    """Return our layer with the weights of one attention layer of the released code.

    Args:
        state_dict: of the layer, or of a model that holds it.
        heads: of an RPC or Scaled Attention layer; a primal layer's weights tell theirs.
        prefix: of the layer in the model's state_dict, if it holds several.
        settings: what the weights do not tell, ``iterations``, ``sparsity`` and ``variant`` of
            RPC-Attention (4, 4.0 and "released" unless given).

    The outputs are the released code's; ``primal.ksvd_objective(terms, reduction=...)`` is its
    loss, with reduction="sample" for time series, decision transformers and language, "batch" for
    the others.

    A decision transformer's layer is recognised by its names:

    >>> shapes = {"We": (2, 8, 4), "Wr": (2, 8, 4), "Lambda": (2, 4)}
    >>> shapes |= {"concate_weight.weight": (8, 8), "concate_weight.bias": (8,)}
    >>> shapes |= {f"{name}_projection.weight": (16, 16) for name in ("query", "key", "out")}
    >>> shapes |= {f"{name}_projection.bias": (16,) for name in ("query", "key", "out")}
    >>> from_released({name: torch.randn(shape) for name, shape in shapes.items()})
    PrimalAttention(
      width=16, heads=2, rank=4, causal=True
      ...
    """
    weights = _one_layer(state_dict, prefix)
    layout = next((c for c in LAYOUTS if set(_resolve(c, weights).values()) == set(weights)), None)
    if layout is None:
        known = "; ".join(f"{c.title}: {', '.join(c.names.values())}" for c in LAYOUTS)
        raise ValueError(
            f"state_dict must hold the parameters of one released layer, got {sorted(weights)}. "
            f"Known layouts (* is weight and bias): {known}."
        )
    for name in settings:
        require_choice(f"a setting of a {layout.title} layer", name, layout.settings)
    layer = layout.build(weights, heads, **settings)
    ours = {
        our: weights[their].detach().clone() for our, their in _resolve(layout, weights).items()
    }
    inner = layer.attention if isinstance(layer, ReleasedPadding) else layer
    if "to_query_key.weight" in ours:  # the vision code fuses what we keep apart
        for parameter in ("weight", "bias"):
            fused = ours.pop(f"to_query_key.{parameter}", None)
            if fused is not None:
                ours[f"to_query.{parameter}"], ours[f"to_key.{parameter}"] = fused.chunk(2)
    inner.load_state_dict(ours)
    return layer.to(next(iter(weights.values())).dtype)


def _anchored(weights: Weights, heads: int | None) -> PrimalAttention:
    return _primal(weights, heads, anchors=_either(weights, "We", "we").shape[1])


def _long_range(weights: Weights, heads: int | None) -> ReleasedPadding:
    return ReleasedPadding(_anchored(weights, heads))


def _causal(weights: Weights, heads: int | None) -> PrimalAttention:
    return _primal(weights, heads, causal=True)


def _primal(weights: Weights, heads: int | None, **settings: Any) -> PrimalAttention:
    left = _either(weights, "We", "we")
    if heads is not None and heads != left.shape[0]:
        raise ValueError(
            f"heads is told by the weights, {left.shape[0]}, got {heads}; drop heads=."
        )
    width = _either(
        weights, *(f"{name}.bias" for name in ("out_projection", "out_proj", "ff", "proj"))
    )
    bias = not any(n.endswith("qk.weight") for n in weights) or "qk.bias" in weights
    head_width = next(w for n, w in weights.items() if n.endswith("concate_weight.bias")).shape[0]
    return PrimalAttention(
        width.shape[0],
        left.shape[0],
        left.shape[2],
        head_width=head_width,
        bias=bias,
        overcomplete=True,
        **settings,
    )


def _robust(
    weights: Weights,
    heads: int | None,
    *,
    iterations: int = 4,
    sparsity: float = 4.0,
    variant: Variant = "released",
) -> RobustAttention:
    return RobustAttention(
        weights["proj.weight"].shape[0],
        _given(heads),
        iterations=iterations,
        sparsity=sparsity,
        variant=variant,
        bias="qkv.bias" in weights,
    )


def _scaled(weights: Weights, heads: int | None) -> ScaledAttention:
    centring = weights["s"]
    return ScaledAttention(
        weights["proj.weight"].shape[0],
        _given(heads if heads is not None or centring.ndim == 1 else centring.shape[0]),
        tokens=None if centring.ndim == 1 else centring.shape[-1],
        bias="qkv.bias" in weights,
    )


def _given(heads: int | None) -> int:
    if heads is None:
        raise ValueError("heads is required: fused projections do not tell it; pass heads=.")
    return heads


PRIMAL_NAMES = {"projection.left": "We", "projection.right": "Wr"}
LAYOUTS = (
    Layout(
        "time series",
        PRIMAL_NAMES
        | {
            "to_query.*": "query_projection.*",
            "to_key.*": "key_projection.*",
            "to_output.*": "out_projection.*",
            "scale": "inner_attention.Lambda",
            "combine.*": "inner_attention.concate_weight.*",
        },
        _anchored,
    ),
    Layout(
        "Long Range Arena",
        PRIMAL_NAMES
        | {
            "to_query.*": "W_q.*",
            "to_key.*": "W_k.*",
            "to_output.*": "ff.*",
            "scale": "attn.Lambda",
            "combine.*": "attn.concate_weight.*",
        },
        _long_range,
    ),
    Layout(
        "decision transformer",
        PRIMAL_NAMES
        | {
            "to_query.*": "query_projection.*",
            "to_key.*": "key_projection.*",
            "to_output.*": "out_projection.*",
            "scale": "Lambda",
            "combine.*": "concate_weight.*",
        },
        _causal,
    ),
    Layout(
        "language",
        PRIMAL_NAMES
        | {
            "to_query.*": "q_proj.*",
            "to_key.*": "k_proj.*",
            "to_output.*": "out_proj.*",
            "scale": "Lambda",
            "combine.*": "concate_weight.*",
        },
        _causal,
    ),
    Layout(
        "vision",
        {
            "projection.left": "we",
            "projection.right": "wr",
            "to_query_key.*": "qk.*",
            "to_output.*": "proj.*",
            "scale": "Lambda",
            "combine.*": "concate_weight.*",
        },
        _anchored,
    ),
    Layout(
        "Scaled Attention",
        {"to_parts.*": "qkv.*", "to_output.*": "proj.*", "centring": "s"},
        _scaled,
    ),
    Layout(
        "RPC-Attention",
        {"to_parts.*": "qkv.*", "to_output.*": "proj.*"},
        _robust,
        settings=("iterations", "sparsity", "variant"),
    ),
)


def _one_layer(state_dict: Weights, prefix: str | None) -> dict[str, Tensor]:
    """Cut the layer out of a model's state_dict by its prefix, found if there is only one."""
    if prefix is None:
        marks = (".We", ".we", ".qkv.weight")
        found = sorted(
            {
                name.removesuffix(mark)
                for name in state_dict
                for mark in marks
                if name.endswith(mark)
            }
        )
        if len(found) > 1:
            raise ValueError(
                f"state_dict must hold one attention layer, got {len(found)}; "
                f"choose prefix= from {found}."
            )
        prefix = found[0] if found else ""
    start = f"{prefix}." if prefix else ""
    weights = {n.removeprefix(start): w for n, w in state_dict.items() if n.startswith(start)}
    if not weights:
        raise ValueError(
            f"no parameter starts with prefix={prefix!r}, got {sorted(state_dict)[:5]}..."
        )
    return weights


def _resolve(layout: Layout, weights: Weights) -> dict[str, str]:
    """Return ours -> released with every * written out, and biases only where there are any."""
    resolved = {}
    for ours, theirs in layout.names.items():
        if not ours.endswith("*"):
            resolved[ours] = theirs
            continue
        for parameter in ("weight", "bias"):
            name = theirs.replace("*", parameter)
            if parameter == "weight" or name in weights:
                resolved[ours.replace("*", parameter)] = name
    return resolved


def _either(weights: Weights, *names: str) -> Tensor:
    return next(weights[name] for name in names if name in weights)

"""PrimalFormer and Primal.+ as two settings of one encoder: which layers are primal."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from primal.attention.base import Attention
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.errors import require_choice, require_divides, require_positive
from primal.models.encoder import Encoder, Norm


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """All an encoder is built from; ``dataclasses.replace`` makes the variants."""

    width: int = 128
    heads: int = 4
    depth: int = 2
    feedforward: int | None = None
    """Width of the hidden layer of the feed-forward networks; 4 × width if not given."""
    primal_layers: Literal["all"] | tuple[int, ...] = "all"
    """"all" is PrimalFormer, (-1,) Primal.+, () a plain Transformer. -1 is the last layer."""
    other_layers: Literal["softmax", "robust", "scaled"] = "softmax"
    """What the layers that are not primal are."""
    rank: int = 20
    """Singular directions kept per head; the paper's s."""
    feature_map: str = "cosine"
    projection: str | None = None
    """Where W_e and W_r come from; the published choice if not given. See PrimalAttention."""
    anchors: int | None = None
    scores: Literal["both", "left", "right"] = "both"
    short_convolution: int = 0
    causal: bool = False
    norm: Norm = "pre"
    dropout: float = 0.1
    overcomplete: bool = False
    """Allow a rank above the features of a head, as published for rank 96 on heads of width 64."""

    def __post_init__(self) -> None:
        require_divides("width", self.width, "heads", self.heads)
        require_positive("depth", self.depth)
        require_choice("other_layers", self.other_layers, OTHER_LAYERS)
        if isinstance(self.primal_layers, str):
            require_choice("primal_layers", self.primal_layers, ("all",))
            return
        outside = [i for i in self.primal_layers if not -self.depth <= i < self.depth]
        if outside:
            raise ValueError(
                f"primal_layers must lie between {-self.depth} and {self.depth - 1} for "
                f"depth={self.depth}, got {outside}; -1 is the last layer."
            )

    def is_primal(self, layer: int) -> bool:
        """Say whether the layer counted from 0 is primal."""
        if isinstance(self.primal_layers, str):
            return True
        return layer in self.primal_layers or layer - self.depth in self.primal_layers


def _softmax(config: EncoderConfig) -> Attention:
    return SoftmaxAttention(
        config.width, config.heads, causal=config.causal, dropout=config.dropout
    )


def _bidirectional(kind: Callable[..., Attention]) -> Callable[[EncoderConfig], Attention]:
    def build(config: EncoderConfig) -> Attention:
        if config.causal:
            raise ValueError(
                f"{kind.__name__} has no causal form: each output uses the whole sequence; "
                "use other_layers='softmax' with causal=True."
            )
        return kind(config.width, config.heads)

    return build


OTHER_LAYERS: dict[str, Callable[[EncoderConfig], Attention]] = {
    "softmax": _softmax,
    "robust": _bidirectional(RobustAttention),
    "scaled": _bidirectional(ScaledAttention),
}


def build_encoder(config: EncoderConfig) -> Encoder:
    """Build the encoder a config describes."""
    layers = [
        _primal(config) if config.is_primal(layer) else OTHER_LAYERS[config.other_layers](config)
        for layer in range(config.depth)
    ]
    feedforward = 4 * config.width if config.feedforward is None else config.feedforward
    return Encoder(layers, feedforward, norm=config.norm, dropout=config.dropout)


def primalformer(**settings: Any) -> Encoder:
    """Build an encoder whose every layer is primal: the paper's PrimalFormer.

    >>> [type(layer).__name__ for layer in primalformer(depth=2, rank=8).attention]
    ['PrimalAttention', 'PrimalAttention']
    """
    return build_encoder(replace(EncoderConfig(**settings), primal_layers="all"))


def primal_plus(*, layers: tuple[int, ...] = (-1,), **settings: Any) -> Encoder:
    """Build a Transformer with primal ``layers``, the last by default: the paper's Primal.+.

    >>> [type(layer).__name__ for layer in primal_plus(depth=2, rank=8).attention]
    ['SoftmaxAttention', 'PrimalAttention']
    """
    return build_encoder(replace(EncoderConfig(**settings), primal_layers=layers))


def _primal(config: EncoderConfig) -> PrimalAttention:
    return PrimalAttention(
        config.width,
        config.heads,
        config.rank,
        feature_map=config.feature_map,
        projection=config.projection,
        anchors=config.anchors,
        scores=config.scores,
        causal=config.causal,
        short_convolution=config.short_convolution,
        overcomplete=config.overcomplete,
    )

"""Primal: self-attention as a kernel machine.

>>> import torch, primal
>>> layer = primal.PrimalAttention(64, heads=4, rank=8)
>>> values, terms = layer(torch.randn(2, 100, 64))
>>> loss = values.square().mean() + 0.1 * primal.ksvd_objective(terms)
"""

from typing import TYPE_CHECKING, Any

from primal.attention.base import Attention, AttentionOutput
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.feature_maps import FeatureMap, feature_map
from primal.functional import KSVDTerms, ksvd_objective, mask_from_lengths
from primal.integrations.released import from_released
from primal.losses import with_ksvd
from primal.models.build import EncoderConfig, build_encoder, primal_plus, primalformer
from primal.models.classifier import SequenceClassifier
from primal.models.encoder import Encoder
from primal.projections import Contextual, FromAnchors, Shared

if TYPE_CHECKING:
    from primal.ksvd import KSVD

__version__ = "0.1.0"

__all__ = [
    "KSVD",
    "Attention",
    "AttentionOutput",
    "Contextual",
    "Encoder",
    "EncoderConfig",
    "FeatureMap",
    "FromAnchors",
    "KSVDTerms",
    "PrimalAttention",
    "RobustAttention",
    "ScaledAttention",
    "SequenceClassifier",
    "Shared",
    "SoftmaxAttention",
    "build_encoder",
    "feature_map",
    "from_released",
    "ksvd_objective",
    "mask_from_lengths",
    "primal_plus",
    "primalformer",
    "with_ksvd",
]


def __getattr__(name: str) -> Any:
    if name == "KSVD":  # scikit-learn takes seconds to import, so only who asks for it pays
        from primal.ksvd import KSVD

        return KSVD
    raise AttributeError(f"module 'primal' has no attribute {name!r}")

"""Primal: self-attention as a kernel machine.

>>> import torch, primal
>>> layer = primal.PrimalAttention(64, heads=4, rank=8)
>>> values, terms = layer(torch.randn(2, 100, 64))
>>> loss = values.square().mean() + 0.1 * primal.ksvd_objective(terms)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primal.attention.base import Attention, AttentionOutput
    from primal.attention.primal import PrimalAttention
    from primal.attention.robust import RobustAttention, ScaledAttention
    from primal.attention.softmax import SoftmaxAttention
    from primal.feature_maps import FeatureMap, feature_map
    from primal.functional import KSVDTerms, ksvd_objective, mask_from_lengths
    from primal.integrations.aeon import PrimalTimeSeriesClassifier, PrimalTimeSeriesRegressor
    from primal.integrations.released import from_released
    from primal.ksvd import KSVD
    from primal.losses import with_ksvd
    from primal.models.build import EncoderConfig, build_encoder, primal_plus, primalformer
    from primal.models.classifier import SequenceClassifier
    from primal.models.encoder import Encoder
    from primal.projections import Contextual, FromAnchors, Shared

__version__ = "0.1.0"

# Where each public name is defined. It is imported when it is first asked for: the command answers
# `primal --help` without waiting for PyTorch, and scikit-learn or aeon cost only who uses them.
_HOMES = {
    "primal.attention.base": ("Attention", "AttentionOutput"),
    "primal.attention.primal": ("PrimalAttention",),
    "primal.attention.robust": ("RobustAttention", "ScaledAttention"),
    "primal.attention.softmax": ("SoftmaxAttention",),
    "primal.feature_maps": ("FeatureMap", "feature_map"),
    "primal.functional": ("KSVDTerms", "ksvd_objective", "mask_from_lengths"),
    "primal.integrations.aeon": ("PrimalTimeSeriesClassifier", "PrimalTimeSeriesRegressor"),
    "primal.integrations.released": ("from_released",),
    "primal.ksvd": ("KSVD",),
    "primal.losses": ("with_ksvd",),
    "primal.models.build": ("EncoderConfig", "build_encoder", "primal_plus", "primalformer"),
    "primal.models.classifier": ("SequenceClassifier",),
    "primal.models.encoder": ("Encoder",),
    "primal.projections": ("Contextual", "FromAnchors", "Shared"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

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
    "PrimalTimeSeriesClassifier",
    "PrimalTimeSeriesRegressor",
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
    if name not in _HOME:
        raise AttributeError(f"module 'primal' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

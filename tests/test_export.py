"""What leaves Python, or is compiled, computes the same: torch.compile, torch.export, ONNX."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from primal.attention.base import Attention
from primal.attention.primal import PrimalAttention
from primal.attention.softmax import SoftmaxAttention
from primal.functional import ksvd_objective
from primal.models.build import EncoderConfig, primal_plus
from primal.models.classifier import SequenceClassifier

WIDTH = 16

LAYERS: dict[str, Any] = {
    "anchors": {},
    "contextual": {"projection": "contextual"},
    "shared-causal": {"causal": True},
    "contextual-causal": {"projection": "contextual", "causal": True, "feature_map": "elu"},
    "anchors-convolution": {"short_convolution": 3, "feature_map": "identity"},
}


def build(name: str) -> PrimalAttention:
    return PrimalAttention(WIDTH, 2, 4, **LAYERS[name])


def sizes(tokens: int, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Return tokens and a mask with padding, after the first sequence."""
    x, lengths = torch.randn(batch, tokens, WIDTH), torch.randint(1, tokens + 1, (batch,))
    lengths[0] = tokens
    return x, torch.arange(tokens) < lengths[:, None]


# --- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_compiled_equals_eager(layer: Attention, backend: str, dynamic: bool | None) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (70, 33):
        x, mask = sizes(tokens)
        x.requires_grad_()
        measured = []
        for call in (layer, compiled):
            values, terms = call(x, mask=mask)
            loss = values.sin().sum() + ksvd_objective(terms)
            gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
            measured.append((values, terms, gradients))
        torch.testing.assert_close(*measured, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_equals_eager(name):
    assert_compiled_equals_eager(build(name), backend="aot_eager", dynamic=None)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name", [n if n == "anchors" else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS]
)
def test_generated_code_equals_eager(name):
    assert_compiled_equals_eager(build(name), backend="inductor", dynamic=True)

"""Singular values are those of the dense kernel, see no padding, and are counted as defined."""

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from primal.attention.base import Attention
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention
from primal.attention.softmax import SoftmaxAttention
from primal.diagnostics.spectrum import (
    attention_spectrum,
    cumulative_share,
    diagnostics_table,
    effective_rank,
    spectrum,
    spectrum_rows,
    values_for_share,
    watch,
)
from primal.models.build import EncoderConfig
from primal.models.classifier import SequenceClassifier

LAYERS: dict[str, Attention] = {
    "primal": PrimalAttention(16, heads=2, rank=5),
    "contextual": PrimalAttention(
        16, heads=2, rank=4, projection="contextual", feature_map="elu", short_convolution=3
    ),
    "causal": PrimalAttention(16, heads=2, rank=4, causal=True),
    "recurrent": PrimalAttention(16, heads=2, rank=4, causal=True, projection="contextual"),
    "softmax": SoftmaxAttention(16, heads=2),
    "causal softmax": SoftmaxAttention(16, heads=2, causal=True),
    "robust": RobustAttention(16, heads=2),
}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


class Alone(nn.Module):
    """A model that is one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask=None):
        return self.layer(x, mask=mask)


@every_layer
@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_the_values_are_those_of_the_dense_kernel(layer, tokens):
    layer, x = layer.double(), torch.randn(3, tokens, 16, dtype=torch.float64)
    (found,) = spectrum(Alone(layer), x)
    dense = np.linalg.svd(layer.kernel(x).detach().numpy(), compute_uv=False)
    count = found.singular_values.shape[1]
    np.testing.assert_allclose(found.singular_values, dense.mean(0)[:, :count], atol=1e-12)
    np.testing.assert_allclose(dense[..., count:], 0, atol=1e-12)
    shares = dense / dense.sum(-1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(-1)
    np.testing.assert_allclose(found.effective_rank, np.exp(entropy).mean(0), rtol=1e-9)


def test_a_primal_layer_never_forms_its_kernel(monkeypatch):
    layer = PrimalAttention(16, heads=2, rank=5)
    monkeypatch.setattr(PrimalAttention, "kernel", None)
    (found,) = spectrum(Alone(layer), torch.randn(1, 40, 16))
    assert found.singular_values.shape == (2, 5)


def test_cross_attention_reads_the_context():
    layer = PrimalAttention(16, heads=2, rank=5, scores="left").double()
    x, context = torch.randn(2, 6, 16).double(), torch.randn(2, 9, 16).double()
    lengths = torch.tensor([9, 4])
    with watch(layer) as seen:
        layer(x, context, context_mask=lengths)
    kernel = layer.kernel(x, context, context_mask=lengths).detach()
    expected = torch.linalg.svdvals(kernel).mean(0)[:, :5]
    torch.testing.assert_close(seen[0].singular_values, expected)


@every_layer
def test_padding_changes_nothing(layer):
    layer = layer.double()
    x, lengths = torch.randn(3, 9, 16, dtype=torch.float64), torch.tensor([7, 1, 4])
    x[torch.arange(9) >= lengths[:, None]] = float("nan")
    (padded,) = spectrum(Alone(layer), x, lengths)
    alone = [spectrum(Alone(layer), x[b, :n][None])[0] for b, n in enumerate(lengths)]
    ranks = torch.stack([one.effective_rank for one in alone]).mean(0)
    torch.testing.assert_close(padded.effective_rank, ranks)
    largest = torch.stack([one.singular_values[:, 0] for one in alone]).mean(0)
    torch.testing.assert_close(padded.singular_values[:, 0], largest)
    assert padded.singular_values.shape == alone[0].singular_values.shape
    matrix = attention_spectrum(layer.kernel(x, mask=lengths).detach(), lengths)
    torch.testing.assert_close(matrix.effective_rank, ranks)


def test_a_matrix_of_known_rank():
    left, right = torch.randn(2, 3, 20, 4).double(), torch.randn(2, 3, 30, 4).double()
    found = attention_spectrum(left @ right.mT, name="mine", kind="other")
    assert (found.name, found.kind) == ("mine", "other")
    assert found.singular_values.shape == (3, 20)
    assert found.singular_values[:, 3].min() > 1e-3
    assert found.singular_values[:, 4:].max() < 1e-12


def test_masks_cut_a_matrix_on_both_sides():
    kernel = torch.randn(1, 2, 6, 8).double()
    found = attention_spectrum(kernel, torch.tensor([4]), torch.tensor([5]))
    expected = torch.linalg.svdvals(kernel[0, :, :4, :5])
    torch.testing.assert_close(found.singular_values, expected)


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 2, 0, 4)])
def test_what_is_no_attention_matrix_is_refused(shape):
    with pytest.raises(ValueError, match=r"\(batch, heads, tokens.*unsqueeze"):
        attention_spectrum(torch.zeros(shape))


def test_effective_rank_counts_equal_values_and_ignores_scale():
    values = torch.tensor([[1.0, 1.0, 1.0, 0.0], [7.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(effective_rank(values), torch.tensor([3.0, 1.0, 0.0]))
    decaying = 0.5 ** torch.arange(6.0)
    assert 1 < effective_rank(decaying) < 6
    torch.testing.assert_close(effective_rank(1e-9 * decaying), effective_rank(decaying))


def test_shares():
    values = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.4, 0.7, 0.9, 1.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(cumulative_share(values), expected)
    assert values_for_share(values).tolist() == [3, 0]
    assert values_for_share(torch.ones(10)).item() == 9


def test_a_model_is_left_as_it_was():
    config = EncoderConfig(width=16, heads=2, rank=4, primal_layers=(-1,), dropout=0.5)
    model = SequenceClassifier(3, 2, 9, config).train()
    model.head.eval()
    x = torch.randn(4, 9, 3)
    first, second = spectrum(model, x), spectrum(model, x)
    assert [(layer.name, layer.kind) for layer in first] == [
        ("layer 1", "softmax"),
        ("layer 2", "primal"),
    ]
    torch.testing.assert_close(first[1].singular_values, second[1].singular_values)
    assert model.training
    assert not model.head.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not first[0].singular_values.requires_grad


def test_hooks_go_when_the_model_fails():
    model = SequenceClassifier(3, 2, 9, EncoderConfig(width=16, heads=2, rank=4))
    with pytest.raises(ValueError, match="at most max_tokens"):
        spectrum(model, torch.randn(1, 10, 3))
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"required, got Linear.*attention_spectrum"):
        spectrum(nn.Linear(3, 3), torch.randn(1, 3))


@pytest.fixture
def content():
    config = EncoderConfig(width=16, heads=2, rank=4)
    model = SequenceClassifier(3, 2, 9, config)
    layers = [layer.to_json() for layer in spectrum(model, torch.randn(4, 9, 3))]
    equal = {
        "name": "layer 1",
        "kind": "softmax",
        "singular_values": [[1.0] * 10 + [1e-9]] * 2,
        "effective_rank": [10.0, 10.0],
    }
    models = [{"name": "PrimalFormer", "layers": layers}, {"name": "twin", "layers": [equal]}]
    return json.loads(json.dumps({"models": models}))


def test_rows_of_a_run(content):
    first, _, twin = spectrum_rows(content)
    assert (first.model, first.layer, first.kind, first.rank) == (
        "PrimalFormer",
        "layer 1",
        "primal",
        4,
    )
    assert len(first.effective_rank) == 2
    assert all(1 <= rank <= 4 for rank in first.effective_rank)
    assert twin.rank == 10
    assert twin.ninety == (9, 9)
    assert math.isclose(twin.effective_rank[0], 10)


def test_the_table_shows_every_layer_in_80_columns(content):
    content["models"][1]["name"] = "[/b] twin"
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(diagnostics_table(content))
    shown = [line.split() for line in console.export_text().splitlines()]
    assert ["[/b]", "twin", "1", "softmax", "9", "10", "10.0", "10.0", "10.0"] in shown
    assert [line[:2] for line in shown[2:4]] == [["PrimalFormer", "1"], ["2", "primal"]]


def test_eight_heads_of_the_longest_names_fit_in_80_columns(content):
    for layer in (layer for model in content["models"] for layer in model["layers"]):
        layer["effective_rank"] = [1.5] * 8
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(diagnostics_table(content))
    assert console.export_text().count("1.5 1.5 1.5 1.5 1.5 1.5 1.5 1.5") == 3


@pytest.mark.parametrize("wrong", [{}, {"models": [{"name": "x"}]}, {"models": [None]}])
def test_what_is_no_spectrum_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must hold the layers .* run again"):
        spectrum_rows(wrong)

"""RPC-Attention and Scaled Attention do what they say, and are softmax attention at rest."""

import re

import pytest
import torch
from torch import Tensor, nn

from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.functional import soft_threshold

WIDTH, HEADS = 12, 3


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts_of(layer: RobustAttention | ScaledAttention, x: Tensor) -> list[Tensor]:
    """Return what the layer reads, (B, H, N, D) each: the queries if it has some, keys, values."""
    parts = layer.to_parts(x).chunk(layer.parts, dim=-1)
    return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]


def softmax_twin(layer: RobustAttention | ScaledAttention) -> SoftmaxAttention:
    """Return softmax attention with the weights of a layer; of a symmetric one, keys as queries."""
    twin = SoftmaxAttention(WIDTH, HEADS)
    chosen = [twin.to_query, twin.to_key, twin.to_value][-layer.parts :]
    if layer.parts == 2:
        twin.to_query = twin.to_key
    weights, biases = (
        layer.to_parts.weight.chunk(layer.parts),
        layer.to_parts.bias.chunk(layer.parts),
    )
    for part, weight, bias in zip(chosen, weights, biases, strict=True):
        part.weight, part.bias = nn.Parameter(weight), nn.Parameter(bias)
    twin.to_output = layer.to_output
    return twin


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("variant", ["released", "admm"])
@pytest.mark.parametrize("mask", [None, torch.tensor([7, 1, 4])], ids=["whole", "masked"])
def test_one_step_that_calls_nothing_sparse_is_softmax_attention(symmetric, variant, mask):
    layer = RobustAttention(
        WIDTH, HEADS, iterations=1, sparsity=float("inf"), variant=variant, symmetric=symmetric
    ).double()
    twin, x = softmax_twin(layer), randn(3, 7, WIDTH)
    torch.testing.assert_close(layer(x, mask=mask), twin(x, mask=mask))
    torch.testing.assert_close(layer.kernel(x, mask=mask), twin.kernel(x, mask=mask))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("variant", ["released", "admm"])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_the_pursuit_equals_its_written_out_loop(symmetric, variant, iterations):
    layer = RobustAttention(
        WIDTH, HEADS, iterations=iterations, sparsity=0.2, variant=variant, symmetric=symmetric
    ).double()
    x = randn(2, 7, WIDTH)
    *query, key, value = parts_of(layer, x)
    penalty = 7 * WIDTH / (4 * key.abs().sum((-2, -1), keepdim=True))
    low_rank = dual = torch.zeros_like(key)
    for _ in range(iterations):
        if variant == "released":
            sparse = soft_threshold(key - low_rank + dual / penalty, 0.2 * penalty)
            clean = key - sparse - dual / penalty
        else:
            sparse = soft_threshold(key - low_rank + dual / penalty, 0.2 / penalty)
            clean = key - sparse + dual / penalty
        reader = clean if symmetric else query[0]
        weights = (reader @ clean.mT / (WIDTH / HEADS) ** 0.5).softmax(-1)
        low_rank = weights @ value
        dual = dual + penalty * (key - low_rank - sparse)
    expected = layer.to_output(low_rank.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x).values, expected)
    torch.testing.assert_close(layer.kernel(x), weights)


@pytest.mark.parametrize("tokens", [None, 7, 9])
@pytest.mark.parametrize("mask", [None, torch.tensor([7, 1, 4])], ids=["whole", "masked"])
def test_scaled_attention_starts_as_softmax_attention(tokens, mask):
    layer = ScaledAttention(WIDTH, HEADS, tokens=tokens).double()
    twin, x = softmax_twin(layer), randn(3, 7, WIDTH)
    torch.testing.assert_close(layer(x, mask=mask), twin(x, mask=mask), rtol=0, atol=0)
    torch.testing.assert_close(layer.kernel(x, mask=mask), twin.kernel(x, mask=mask))


@pytest.mark.parametrize("tokens", [None, 9])
def test_scaled_attention_centres_the_values(tokens):
    layer, x = ScaledAttention(WIDTH, HEADS, tokens=tokens).double(), randn(2, 7, WIDTH)
    nn.init.normal_(layer.centring)
    _, key, value = parts_of(layer, x)
    if tokens is None:
        centring = layer.centring * (key @ key.mT / (WIDTH / HEADS) ** 0.5).softmax(-1)
    else:
        centring = layer.centring[:, :7, :7]
    centred = (torch.eye(7, dtype=torch.float64) - centring) @ value
    expected = layer.to_output((layer.kernel(x) @ centred).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x).values, expected)


def test_dropout_acts_in_training_alone():
    layer = RobustAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(2, 8, WIDTH)
    assert not torch.equal(layer(x).values, layer(x).values)
    layer.eval()
    assert torch.equal(layer(x).values, layer(x).values)


def says(*parts: str) -> str:
    """Return the pattern of a message with these parts: what is required, given, and would do."""
    return "(?s)" + ".*".join(map(re.escape, parts))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"variant": "adm"}, says("one of ['admm', 'released']", "got 'adm'", "mean 'admm'")),
        ({"iterations": 0}, says("iterations must be a positive integer", "got 0", "1")),
        ({"sparsity": 0.0}, says("sparsity must be above 0", "got 0.0", "float('inf')")),
        ({"sparsity": float("nan")}, says("sparsity must be above 0", "got nan", "float('inf')")),
    ],
    ids=["variant", "iterations", "sparsity", "sparsity-nan"],
)
def test_wrong_settings(chosen, message):
    with pytest.raises(ValueError, match=message):
        RobustAttention(WIDTH, HEADS, **chosen)


@pytest.mark.parametrize("make", [RobustAttention, ScaledAttention])
def test_a_context_is_refused(make):
    x, name = torch.randn(2, 5, WIDTH), make.__name__
    with pytest.raises(ValueError, match=says(name, "no context", "SoftmaxAttention")):
        make(WIDTH, HEADS)(x, x)


def test_a_matrix_over_the_positions_has_a_largest_length():
    layer = ScaledAttention(WIDTH, HEADS, tokens=7)
    with pytest.raises(
        ValueError, match=says("at most tokens=7 tokens", "got 8", "tokens=8", "tokens=None")
    ):
        layer(torch.randn(2, 8, WIDTH))
    with pytest.raises(ValueError, match=says("tokens must be a positive integer", "got 0")):
        ScaledAttention(WIDTH, HEADS, tokens=0)


def test_printing_a_layer_tells_its_settings():
    text = repr(RobustAttention(12, 3, iterations=2, variant="released", symmetric=False))
    assert (
        "width=12, heads=3, iterations=2, sparsity=4.0, variant='released', symmetric=False" in text
    )
    assert "width=12, heads=3, tokens=7" in repr(ScaledAttention(12, 3, tokens=7))

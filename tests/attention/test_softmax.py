"""Softmax attention is torch.nn.MultiheadAttention, with this package's masks."""

import pytest
import torch
from torch import Tensor, nn

from primal.attention.softmax import SoftmaxAttention

WIDTH, HEADS = 12, 3


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def twins(context_width: int = WIDTH, **chosen: bool) -> tuple[SoftmaxAttention, nn.Module]:
    """Return our layer and PyTorch's with the same weights."""
    layer = SoftmaxAttention(WIDTH, HEADS, context_width=context_width, **chosen)
    theirs = nn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True, kdim=context_width, vdim=context_width
    )
    parts = (layer.to_query, layer.to_key, layer.to_value)
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
        weights = (
            (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
            if theirs.in_proj_weight is None
            else theirs.in_proj_weight.chunk(3)
        )
        for part, weight, bias in zip(parts, weights, theirs.in_proj_bias.chunk(3), strict=True):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    layer.to_output.load_state_dict(theirs.out_proj.state_dict())
    return layer.double(), theirs.double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (8, 3, 1)])
def test_equals_multihead_attention(causal, lengths):
    layer, theirs = twins(causal=causal)
    x = randn(3, 8, WIDTH)
    mask = torch.ones(3, 8, dtype=torch.bool)
    if lengths is not None:
        mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    values, terms = layer(x, mask=None if lengths is None else mask)
    future = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else None
    expected, weights = theirs(
        x, x, x, key_padding_mask=~mask, attn_mask=future, average_attn_weights=False
    )
    assert terms is None
    torch.testing.assert_close(values[mask], expected[mask])
    rows = mask[:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(layer.kernel(x, mask=mask)[rows], weights[rows])


@pytest.mark.parametrize("context_width", [WIDTH, 7])
def test_cross_attention_equals_multihead_attention(context_width):
    layer, theirs = twins(context_width)
    x, context = randn(3, 5, WIDTH), randn(3, 9, context_width)
    mask = torch.arange(9) < torch.tensor([9, 2, 4])[:, None]
    values = layer(x, context, context_mask=mask).values
    expected, weights = theirs(
        x, context, context, key_padding_mask=~mask, average_attn_weights=False
    )
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(layer.kernel(x, context, context_mask=mask), weights)


def test_self_attention_is_cross_attention_with_itself():
    layer, _ = twins()
    x, mask = randn(3, 8, WIDTH), torch.tensor([8, 3, 1])
    torch.testing.assert_close(layer(x, x, mask=mask, context_mask=mask), layer(x, mask=mask))


def test_dropout_acts_in_training_alone():
    layer = SoftmaxAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(2, 8, WIDTH)
    assert not torch.equal(layer(x).values, layer(x).values)
    layer.eval()
    assert torch.equal(layer(x).values, layer(x).values)


def test_the_cache_holds_one_key_and_value_per_token():
    layer = SoftmaxAttention(WIDTH, HEADS, head_width=5, causal=True)
    state = layer.init_state(2)
    for past, x in enumerate(torch.randn(4, 2, WIDTH)):
        assert state.key.shape == state.value.shape == (2, HEADS, past, 5)
        assert state.mask.shape == (2, past)
        state = layer.step(x, state).state


def test_a_layer_with_a_context_width_needs_a_context():
    layer = SoftmaxAttention(WIDTH, HEADS, context_width=7)
    with pytest.raises(
        ValueError, match=r"(?s)context must be \(batch, tokens, 7\).*got \(2, 5, 12"
    ):
        layer(torch.randn(2, 5, WIDTH))


def test_printing_a_layer_tells_its_settings():
    assert "width=12, heads=3, causal=True" in repr(SoftmaxAttention(12, 3, causal=True))
    assert "causal" not in repr(SoftmaxAttention(12, 3))

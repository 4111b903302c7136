"""The encoder is a loop over blocks, PyTorch's own for softmax layers, and decodes step by step."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from primal.attention.base import Attention
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.functional import KSVDTerms, ksvd_objective
from primal.models.encoder import Encoder, Norm

WIDTH, HEADS, HIDDEN = 12, 3, 20

LAYERS: dict[str, Callable[[], Attention]] = {
    "primal": lambda: PrimalAttention(WIDTH, HEADS, 2),
    "contextual": lambda: PrimalAttention(WIDTH, HEADS, 2, projection="contextual"),
    "softmax": lambda: SoftmaxAttention(WIDTH, HEADS),
    "robust": lambda: RobustAttention(WIDTH, HEADS, sparsity=0.2),
    "scaled": lambda: ScaledAttention(WIDTH, HEADS),
    "causal-softmax": lambda: SoftmaxAttention(WIDTH, HEADS, causal=True),
    "causal-primal": lambda: PrimalAttention(WIDTH, HEADS, 3, causal=True, short_convolution=2),
    "causal-contextual": lambda: PrimalAttention(
        WIDTH, HEADS, 4, projection="contextual", causal=True, feature_map="elu"
    ),
}
STACKS = [
    ("softmax", "primal"),
    ("primal", "robust", "contextual", "scaled"),
    ("causal-softmax", "causal-primal", "causal-contextual"),
]
CAUSAL = [*((name, name) for name in LAYERS if "causal" in name), STACKS[-1]]

every_norm = pytest.mark.parametrize("norm", ["pre", "post"])
every_stack = pytest.mark.parametrize("names", STACKS, ids="+".join)


def build(*names: str, norm: Norm = "pre") -> Any:
    """Build an encoder, to look into, with no parameter at a special value."""
    encoder = Encoder([LAYERS[name]() for name in names], HIDDEN, norm=norm).double()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.4)
    return encoder


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- what it computes ----------------------------------------------------------------------------


@every_norm
@every_stack
@pytest.mark.parametrize("lengths", [None, (7, 1, 4)])
def test_equals_a_written_out_loop(names, norm, lengths):
    encoder, x = build(*names, norm=norm), randn(3, 7, WIDTH)
    mask = None if lengths is None else torch.arange(7) < torch.tensor(lengths)[:, None]
    expected, terms = x, []
    for block in encoder.blocks:
        before = block.attention_norm(expected) if norm == "pre" else expected
        attended = block.attention(before, mask=mask)
        expected = expected + attended.values
        expected = expected if norm == "pre" else block.attention_norm(expected)
        first, *_, last = block.feedforward
        before = block.feedforward_norm(expected) if norm == "pre" else expected
        expected = expected + last(F.gelu(first(before)))
        expected = expected if norm == "pre" else block.feedforward_norm(expected)
        terms += [] if attended.terms is None else [attended.terms]
    expected = encoder.final_norm(expected) if norm == "pre" else expected
    if mask is not None:
        expected = expected * mask[..., None]
    output = encoder(x, mask=mask)
    torch.testing.assert_close(output.values, expected)
    torch.testing.assert_close(output.terms, tuple(terms))


@every_norm
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (7, 1, 4)])
def test_softmax_layers_equal_those_of_pytorch(norm, causal, lengths):
    ours = build(*["causal-softmax" if causal else "softmax"] * 2, norm=norm)
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, 0.0, "gelu", batch_first=True, norm_first=norm == "pre"
        ),
        num_layers=2,
        norm=ours.final_norm if norm == "pre" else None,
        enable_nested_tensor=False,
    ).double()
    with torch.no_grad():
        for block, layer in zip(ours.blocks, theirs.layers, strict=True):
            attention = block.attention
            read = (attention.to_query, attention.to_key, attention.to_value)
            layer.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in read]))
            layer.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in read]))
            for source, target in (
                (attention.to_output, layer.self_attn.out_proj),
                (block.feedforward[0], layer.linear1),
                (block.feedforward[-1], layer.linear2),
                (block.attention_norm, layer.norm1),
                (block.feedforward_norm, layer.norm2),
            ):
                target.load_state_dict(source.state_dict())
    x, mask = randn(3, 7, WIDTH), torch.ones(3, 7, dtype=torch.bool)
    if lengths is not None:
        mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    future = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    values, terms = ours(x, mask=None if lengths is None else mask)
    expected = theirs(x, mask=future, src_key_padding_mask=~mask)
    torch.testing.assert_close(values[mask], expected[mask])
    assert terms == ()


def test_terms_come_first_layer_first():
    names = ("causal-contextual", "causal-softmax", "causal-primal", "causal-contextual")
    encoder = build(*names)
    terms = encoder(randn(2, 5, WIDTH)).terms
    assert all(isinstance(t, KSVDTerms) for t in terms)
    assert [t.scale.shape[1] for t in terms] == [4, 3, 4]  # the ranks of the primal layers
    assert [t.scale for t in terms] == [encoder.attention[i].scale for i in (0, 2, 3)]


def test_dropout_acts_in_training_alone():
    torch.manual_seed(1)
    encoder: Any = Encoder([LAYERS["primal"]()], HIDDEN, dropout=0.5)
    x = torch.randn(2, 5, WIDTH)
    assert not torch.equal(encoder(x).values, encoder(x).values)
    encoder.eval()
    assert torch.equal(encoder(x).values, encoder(x).values)
    (block,) = encoder.blocks
    block.attention = block.attention.train()
    for part in (block.dropout, block.feedforward[2]):  # each of the two by itself
        part.train()
        assert not torch.equal(encoder(x).values, encoder(x).values)
        part.eval()


# --- padding -------------------------------------------------------------------------------------


@every_norm
@every_stack
def test_padding_changes_nothing(names, norm):
    encoder, x = build(*names, norm=norm), randn(3, 9, WIDTH)
    lengths = torch.tensor([9, 1, 4])
    mask = torch.arange(9) < lengths[:, None]
    padded = encoder(x.masked_fill(~mask[..., None], float("nan")), mask=lengths)
    assert torch.equal(padded.values[~mask], torch.zeros_like(x[~mask]))
    padded_gradients = gradients(encoder, padded.values.sin().sum(), padded.terms)
    summed = None
    for b, length in enumerate(lengths):
        alone = encoder(x[b, :length][None])
        torch.testing.assert_close(padded.values[b, :length], alone.values[0])
        found = gradients(encoder, alone.values.sin().sum(), alone.terms, share=1 / 3)
        summed = found if summed is None else [a + b for a, b in zip(summed, found, strict=True)]
    torch.testing.assert_close(padded_gradients, summed)


def gradients(
    encoder: Encoder, task: Tensor, terms: tuple[KSVDTerms, ...], share: float = 1.0
) -> list[Tensor]:
    objective = sum(ksvd_objective(t) for t in terms)
    return list(torch.autograd.grad(task + share * objective, list(encoder.parameters())))


@every_stack
def test_activation_checkpointing_of_the_blocks_changes_nothing(names):
    encoder, x = build(*names), randn(3, 7, WIDTH)
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
    plain = encoder(x, mask=mask)
    kept, terms = x * mask[..., None], []
    for block in encoder.blocks:
        kept, of_block = checkpoint(block, kept, mask, use_reentrant=False)
        terms += [] if of_block is None else [of_block]
    kept = encoder.final_norm(kept) * mask[..., None]
    torch.testing.assert_close(kept, plain.values)
    torch.testing.assert_close(tuple(terms), plain.terms)
    expected = gradients(encoder, plain.values.sin().sum(), plain.terms)
    torch.testing.assert_close(gradients(encoder, kept.sin().sum(), tuple(terms)), expected)


# --- decoding ------------------------------------------------------------------------------------


@every_norm
@pytest.mark.parametrize("names", CAUSAL, ids="+".join)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_decoding_equals_the_parallel_form(names, norm, padding):
    encoder, x, mask = build(*names, norm=norm), randn(3, 9, WIDTH), None
    if padding != "none":
        mask = torch.arange(9) < torch.tensor([9, 1, 4])[:, None]
        mask = mask.flip(1) if padding == "left" else mask
        x = x.masked_fill(~mask[..., None], float("nan"))
    expected = encoder(x, mask=mask).values
    state = encoder.init_state(3)
    for n in range(9):
        now = None if mask is None else mask[:, n]
        values, state = encoder.step(x[:, n], state, mask=now)
        torch.testing.assert_close(values, expected[:, n], rtol=1e-11, atol=1e-12)
    assert len(state) == len(names)


# --- wrong input ---------------------------------------------------------------------------------


def says(*parts: str) -> str:
    """Return the pattern of a message with these parts: what is required, given, and would do."""
    return "(?s)" + ".*".join(map(re.escape, parts))


def test_wrong_layers():
    with pytest.raises(ValueError, match=says("at least one layer", "got widths []", "build")):
        Encoder([], HIDDEN)
    layers = [SoftmaxAttention(8, 2), SoftmaxAttention(12, 2)]
    with pytest.raises(ValueError, match=says("all of one width", "got widths [8, 12]", "build")):
        Encoder(layers, HIDDEN)
    with pytest.raises(ValueError, match=says("feedforward must be a positive", "got 0", "1")):
        Encoder(layers[:1], 0)
    with pytest.raises(ValueError, match=says("['post', 'pre']", "got 'per'", "mean 'pre'")):
        Encoder(layers[:1], HIDDEN, norm="per")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.randn(2, 5, 8), None, says("x must be (batch, tokens, 12)", "got (2, 5, 8)")),
        (torch.ones(2, 5, 12).long(), None, says("floating point", "torch.int64", "x.float()")),
        (torch.randn(2, 5, 12), torch.ones(2, 5), says("bool", "torch.float32", "mask.bool()")),
        (torch.randn(2, 5, 12), torch.tensor([5, 6]), says("at most the 5 tokens", "got 6", "pad")),
    ],
    ids=["width", "integers", "mask", "lengths"],
)
def test_wrong_input(x, mask, message):
    with pytest.raises(ValueError, match=message):
        build("softmax").float()(x, mask=mask)


def test_only_causal_stacks_decode():
    with pytest.raises(ValueError, match=says("PrimalAttention", "step by step", "causal=True")):
        build("causal-softmax", "primal").init_state(2)


def test_printing_a_block_tells_its_norm():
    assert "norm='post'" in repr(build("softmax", norm="post"))

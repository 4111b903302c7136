"""Primal-Attention in particular: what mixes tokens, its scores, its objective, its memory."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.utils._python_dispatch import TorchDispatchMode

from primal.attention.primal import PrimalAttention
from primal.feature_maps import Cosine, Polynomial
from primal.functional import coupling, ksvd_objective, ksvd_residual
from primal.projections import FromAnchors

WIDTH, HEADS, RANK = 8, 2, 3  # D = 4

SETTINGS: dict[str, dict[str, Any]] = {
    "anchors": {},
    "anchors-left": {"scores": "left"},
    "anchors-right": {"scores": "right", "anchors": 2},
    "anchors-convolution": {"short_convolution": 3, "feature_map": "identity"},
    "feature_anchors": {"projection": "feature_anchors", "feature_map": "elu", "head_width": 6},
    "contextual": {"projection": "contextual"},
    "contextual-left": {"projection": "contextual", "scores": "left", "feature_map": "elu"},
    "shared": {"projection": "shared", "feature_map": "random_fourier"},
    "shared-causal": {"projection": "shared", "causal": True},
    "contextual-causal": {"projection": "contextual", "causal": True, "feature_map": "elu"},
}
every_setting = pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)


def build(**chosen: Any) -> PrimalAttention:
    """Build a layer with no parameter at a special value."""
    layer = PrimalAttention(WIDTH, HEADS, RANK, **chosen).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- what mixes tokens ---------------------------------------------------------------------------


def influence(layer: PrimalAttention, tokens: int) -> Tensor:  # (N, N)
    """Return the largest derivative of each token's output (row) by each token (column)."""
    x = randn(1, tokens, WIDTH)
    blocks = jacobian(lambda x: layer(x).values[0], x)  # (N, width, 1, N, width)
    return blocks.abs().amax((1, 2, 4))


@pytest.mark.parametrize("name", ["anchors", "feature_anchors", "contextual", "contextual-left"])
def test_data_dependent_directions_mix_all_tokens(name):
    assert influence(build(**SETTINGS[name]), tokens=6).min() > 0


@pytest.mark.parametrize("feature_map", ["cosine", "elu"])
def test_shared_directions_mix_no_tokens(feature_map):
    reach = influence(build(projection="shared", feature_map=feature_map), tokens=6)
    assert torch.equal(reach, reach.diag().diag())
    assert reach.diag().min() > 0


@pytest.mark.parametrize(("size", "before", "after"), [(2, 0, 1), (3, 1, 1), (4, 1, 2)])
def test_a_short_convolution_mixes_its_window_only(size, before, after):
    reach = influence(build(projection="shared", short_convolution=size), tokens=7)
    window = torch.ones(7, 7).tril(after).triu(-before)
    assert torch.equal(reach > 0, window > 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_short_convolution_starts_as_the_identity(causal, size):
    chosen = {"projection": "contextual", "causal": causal}
    layer = PrimalAttention(WIDTH, HEADS, RANK, short_convolution=size, **chosen)
    plain = PrimalAttention(WIDTH, HEADS, RANK, **chosen)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k[:5] != "convo"})
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(layer(x), plain(x))


def test_cumulative_means_mix_all_of_the_past():
    reach = influence(build(causal=True), tokens=6)
    assert torch.equal(reach > 0, torch.ones(6, 6).tril() > 0)


# --- scores and objective ------------------------------------------------------------------------


@every_setting
@pytest.mark.parametrize("masked", [False, True])
def test_terms_are_those_of_the_scores(chosen, masked):
    layer, x = build(**chosen), randn(3, 7, WIDTH)
    lengths = torch.tensor([7, 1, 4]) if masked else torch.tensor([7, 7, 7])
    mask = lengths if masked else None
    terms = layer(x, mask=mask).terms
    scores = layer.primal_scores(x, mask=mask)
    for score, energy in zip(scores, terms[:2], strict=True):
        mean_square = score.square().sum(-2) / lengths[:, None, None]
        torch.testing.assert_close(energy, mean_square)
    assert terms.scale is layer.scale
    queries, keys = layer._read(x, None, mask, None)[2:]
    left, right, of_weights = layer.projection(queries, keys)
    torch.testing.assert_close(terms.data_coupling, coupling(left, right))
    torch.testing.assert_close(terms.coupling, of_weights)


@pytest.mark.parametrize("projection", ["anchors", "feature_anchors", "shared"])
def test_the_weights_couple_in_the_objective(projection):
    layer = build(projection=projection)
    left, right = layer.projection.get_parameter("left"), layer.projection.get_parameter("right")
    expected = torch.stack([(a.mT @ b).trace() for a, b in zip(left, right, strict=True)])
    torch.testing.assert_close(layer(randn(2, 5, WIDTH)).terms.coupling, expected)


@pytest.mark.parametrize("name", ["anchors", "anchors-left", "contextual", "shared-causal"])
def test_training_on_the_objective_alone_reaches_a_ksvd(name):
    layer = PrimalAttention(WIDTH, HEADS, RANK, **SETTINGS[name])
    x, mask = torch.randn(4, 12, WIDTH), torch.tensor([12, 5, 9, 1])
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(200):
        losses.append(ksvd_objective(layer(x, mask=mask).terms))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[0] > 1e-3
    assert losses[-1] < 1e-6
    residual = ksvd_residual(layer(x, mask=mask).terms)
    assert residual.abs().max() < 1e-2  # in every sample, not on average


# --- cross-attention -----------------------------------------------------------------------------

CROSS = ["anchors-left", "contextual-left"]


@pytest.mark.parametrize("name", CROSS)
def test_self_attention_is_cross_attention_with_itself(name):
    layer, x = build(**SETTINGS[name]), randn(3, 7, WIDTH)
    mask = torch.tensor([7, 2, 5])
    expected = layer(x, mask=mask)
    torch.testing.assert_close(layer(x, x, mask=mask, context_mask=mask), expected)
    kernel = layer.kernel(x, x, mask=mask, context_mask=mask)
    torch.testing.assert_close(kernel, layer.kernel(x, mask=mask))


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("tokens", [1, 5, 11])
def test_a_context_of_any_length_and_width(name, tokens):
    projection = "contextual" if name == "contextual-left" else "feature_anchors"
    layer = build(**SETTINGS[name] | {"context_width": 6, "projection": projection})
    x, context = randn(2, 4, WIDTH), randn(2, tokens, 6).requires_grad_()
    values, terms = layer(x, context)
    assert values.shape == x.shape
    assert ksvd_residual(terms).shape == (2,)
    assert layer.kernel(x, context).shape == (2, HEADS, 4, tokens)
    left, right = layer.primal_scores(x, context)
    torch.testing.assert_close(terms.left_energy, left.square().mean(-2))
    torch.testing.assert_close(terms.right_energy, right.square().mean(-2))
    (gradient,) = torch.autograd.grad(values.sum(), context)
    assert gradient.abs().sum(-1).min() > 0


def test_anchors_lie_in_the_context():
    layer = build(scores="left", anchors=4)
    x, context = randn(1, 3, WIDTH), randn(1, 7, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, context).values.sum(), context)
    reached = gradient[0].abs().sum(-1).nonzero().flatten()
    assert reached.tolist() == [0, 2, 4, 6]


# --- backends and memory -------------------------------------------------------------------------


@every_setting
def test_backends_agree(chosen):
    definition, blocked = (build(**chosen, backend=backend) for backend in ("torch", "blocked"))
    blocked.load_state_dict(definition.state_dict())
    x, mask = randn(3, 40, WIDTH).requires_grad_(), torch.tensor([40, 1, 23])
    measured = []
    for layer in (definition, blocked):
        values, terms = layer(x, mask=mask)
        loss = values.sin().sum() + ksvd_objective(terms)
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        measured.append((values, terms, gradients))
    torch.testing.assert_close(*measured, rtol=1e-9, atol=1e-11)


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor):
                self.made.add(tuple(result.shape))
        return results


@pytest.mark.parametrize("backend", ["torch", "blocked"])
@pytest.mark.parametrize("chosen", [{}, {"projection": "contextual"}, {"scores": "left"}])
def test_training_makes_neither_a_kernel_matrix_nor_scores(backend, chosen):
    tokens, rank = 1009, 7  # primes: what holds a multiple of N·S or N·N elements is one of the two
    layer = PrimalAttention(32, 2, rank, backend=backend, **chosen)
    contextual = "projection" in chosen  # its coefficients, (B, H, N, S), are what it is
    x = torch.randn(2, tokens, 32)
    with Shapes() as shapes:
        values, terms = layer(x)
        (values.square().mean() + ksvd_objective(terms)).backward()
    with Shapes() as diagnostics:
        layer.primal_scores(x)
    too_large = [tokens * tokens] if contextual else [tokens * tokens, tokens * rank]

    def found(shapes: Shapes) -> list[tuple[int, ...]]:
        sizes = {shape: torch.Size(shape).numel() for shape in shapes.made}
        return [s for s, size in sizes.items() if size and any(size % n == 0 for n in too_large)]

    assert (2, tokens, 32) in shapes.made
    assert not found(shapes)
    assert contextual or found(diagnostics)  # the scores themselves would have been noticed


@pytest.mark.parametrize("causal", [False, True])
def test_sums_may_pass_the_range_of_float16(causal):
    layer = PrimalAttention(
        WIDTH, HEADS, RANK, projection="contextual", feature_map="elu", causal=causal
    ).half()
    tokens = 10 * torch.randn(1, 1, WIDTH, dtype=torch.float16).expand(1, 4000, WIDTH)
    query, key = (side.features.double() for side in layer._read(tokens[:, :1], *[None] * 3)[2:])
    assert 4000 * (query @ key.mT).min() > torch.finfo(torch.float16).max
    values = layer(tokens).values  # averages of equal tokens
    torch.testing.assert_close(values, layer(tokens[:, :1]).values.expand_as(values))


# --- construction --------------------------------------------------------------------------------


def test_printing_a_layer_tells_its_settings():
    text = repr(PrimalAttention(64, 4, 8, causal=True, scores="left", short_convolution=3))
    assert "PrimalAttention(\n  width=64, heads=4, rank=8, scores='left', causal=True\n" in text
    assert "(feature_map): Cosine(width=16, features=16)" in text
    assert "(convolution): Conv1d(64, 64, kernel_size=(3,)" in text
    plain = repr(PrimalAttention(64, 4, 8))
    assert "PrimalAttention(\n  width=64, heads=4, rank=8\n" in plain
    assert "(projection): FromAnchors(anchors=80, source='tokens')" in plain


def test_defaults_are_as_published():
    layer: Any = PrimalAttention(64, 4, 8)
    causal: Any = PrimalAttention(64, 4, 8, causal=True)
    assert isinstance(layer.feature_map, Cosine)
    assert layer.projection.anchors == 80
    assert type(causal.projection).__name__ == "Shared"
    assert layer.scale.min() >= 0
    assert layer.scale.max() <= 1
    for weight in (layer.projection.left, causal.projection.right):  # the heads are orthonormal
        torch.testing.assert_close(weight.flatten(1) @ weight.flatten(1).mT, torch.eye(4))


def test_parts_may_be_given_instead_of_named():
    layer = PrimalAttention(
        WIDTH,
        HEADS,
        RANK,
        feature_map=Polynomial(4, degree=3),
        projection=lambda shape: FromAnchors(shape, anchors=5, source="features"),
    )
    assert layer.feature_map.features == 35
    assert layer.projection.left.shape == (HEADS, 5, RANK)
    assert layer(torch.randn(2, 6, WIDTH)).values.shape == (2, 6, WIDTH)


def test_overcomplete_ranks_are_allowed_if_wished():
    layer = PrimalAttention(WIDTH, HEADS, 9, overcomplete=True)
    values, terms = layer(torch.randn(2, 6, WIDTH))
    assert terms.left_energy.shape == (2, HEADS, 9)
    assert values.isfinite().all()


def says(*parts: str) -> str:
    """Return the pattern of a message with these parts: what is required, given, and would do."""
    return "(?s)" + ".*".join(map(re.escape, parts))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank-high": ({"rank": 5}, says("at most the 4 features", "rank=5", "overcomplete=True")),
    "rank-zero": ({"rank": 0}, says("rank must be a positive integer", "got 0", "1")),
    "heads": ({"heads": 3}, says("multiple of heads", "width=8 and heads=3", "6 and 9")),
    "head-width": ({"head_width": 0}, says("positive integer", "got 0", "1")),
    "feature-map": ({"feature_map": "cosin"}, says("one of [", "'cosin'", "Did you mean 'cosine'")),
    "feature-map-width": (
        {"feature_map": Cosine(5)},
        says("head width 4", "got Cosine(width=5", "width=4", "head_width=5"),
    ),
    "projection": (
        {"projection": "contextal"},
        says("projection must be one of [", "got 'contextal'", "Did you mean 'contextual'"),
    ),
    "scores": ({"scores": "lefft"}, says("one of [", "got 'lefft'", "Did you mean 'left'")),
    "backend": ({"backend": "torhc"}, says("one of [", "got 'torhc'", "Did you mean 'torch'")),
    "anchors-zero": ({"anchors": 0}, says("anchors must be a positive integer", "got 0", "1")),
    "anchors-without": (
        {"projection": "contextual", "anchors": 4},
        says("anchors needs projection='anchors'", "projection='contextual'", "drop anchors="),
    ),
    "anchors-causal": (
        {"projection": "anchors", "causal": True},
        says("causal layer needs projection='contextual' or 'shared'", "got anchors"),
    ),
    "anchors-features": (
        {"head_width": 6},
        says("source='tokens' needs", "features=6 and width // heads = 4", "'feature_anchors'"),
    ),
    "convolution-negative": (
        {"short_convolution": -1},
        says("short_convolution must be a positive integer", "got -1"),
    ),
    "convolution-context": (
        {"short_convolution": 3, "context_width": 6, "projection": "contextual"},
        says("context_width == width", "6 and 8", "short_convolution=0"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_settings(wrong):
    chosen, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        PrimalAttention(**{"width": WIDTH, "heads": HEADS, "rank": RANK} | chosen)


@pytest.mark.parametrize("scores", ["both", "right"])
def test_scores_on_the_right_cannot_read_a_context(scores):
    message = says("cross-attention needs scores='left'", f"got scores={scores!r}", "build")
    with pytest.raises(ValueError, match=message):
        build(scores=scores)(randn(2, 5, WIDTH), randn(2, 5, WIDTH))


def test_wrong_contexts():
    layer = build(scores="left", context_width=6, projection="contextual")
    x = randn(2, 5, WIDTH)
    with pytest.raises(ValueError, match=says("context of width 6", "got none", "context=")):
        layer(x)
    with pytest.raises(ValueError, match=says("context must be (batch, tokens, 6)", "(2, 3, 8)")):
        layer(x, randn(2, 3, WIDTH))
    with pytest.raises(ValueError, match=says("batch size of x", "got 3 and 2", "repeat")):
        layer(x, randn(3, 3, 6))
    with pytest.raises(
        ValueError, match=says("context_mask must be bool of shape (2, 3)", "(2, 4)")
    ):
        layer(x, randn(2, 3, 6), context_mask=torch.ones(2, 4, dtype=torch.bool))


def test_the_blocked_backend_takes_no_half_precision():
    layer = PrimalAttention(WIDTH, HEADS, RANK, backend="blocked").bfloat16()
    message = says("float32 or float64", "got torch.bfloat16 on cpu", "backend='torch'")
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(2, 5, WIDTH, dtype=torch.bfloat16))

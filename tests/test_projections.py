"""Where directions come from: one contract, three written formulas, and what padding may not do."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from primal import functional
from primal.projections import (
    PROJECTIONS,
    Contextual,
    FromAnchors,
    Projection,
    Shape,
    Shared,
    Tokens,
)

SHAPE = Shape(heads=2, features=3, rank=4, width=6, query_width=6)  # P = width // heads
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1, 0]], dtype=torch.bool)
ANCHORS = [1, 2, 3, 7, 20]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def assert_equal(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=atol)


def random_tokens(mask=None, *, batch=2, tokens=7, width=6, positive=False) -> Tokens:
    """Return random tokens; at padding zero, as Tokens promises."""
    inputs, features = randn(batch, tokens, width), randn(batch, 2, tokens, 3)
    if positive:
        features = features.exp()
    if mask is not None:
        inputs = inputs * mask[..., None]
        features = features * mask[:, None, :, None]
    return Tokens(inputs, features, mask)


def valid_only(tokens: Tokens, sample: int) -> Tokens:
    """Return one sample without its padding."""
    assert tokens.mask is not None
    assert tokens.features is not None
    real = tokens.mask[sample]
    inputs, features = tokens.inputs[sample, real], tokens.features[sample, :, real]
    return Tokens(inputs[None], features[None], None)


# --- the contract --------------------------------------------------------------------------------


@pytest.fixture(params=sorted(PROJECTIONS))
def projection(request) -> Projection:
    return PROJECTIONS[request.param](SHAPE).double()


def test_directions_have_one_column_per_rank(projection):
    left, right, coupling = projection(random_tokens(), random_tokens())
    assert left.shape == right.shape == ((2, 2, 3, 4) if projection.data_dependent else (2, 3, 4))
    assert coupling.shape in ((2,), (2, 2))


def test_data_dependent_says_whether_the_tokens_matter(projection):
    queries = random_tokens()
    first, second = projection(queries, random_tokens()), projection(queries, random_tokens())
    assert torch.equal(first.left, second.left) != projection.data_dependent


def test_reads_features_says_whether_the_features_matter(projection):
    tokens = random_tokens()
    expected = projection(tokens, tokens)
    others = [random_tokens().features, *([] if projection.reads_features else [None])]
    for features in others:
        other = tokens._replace(features=features)
        directions = projection(other, other)
        for side in ("left", "right"):
            same = torch.equal(getattr(directions, side), getattr(expected, side))
            assert same != projection.reads_features


@pytest.mark.parametrize("part", ["left", "right", "coupling"])
def test_every_parameter_trains(projection, part):
    directions = projection(random_tokens(), random_tokens())
    getattr(directions, part).square().sum().backward()
    gradients = {name: p.grad for name, p in projection.named_parameters() if p.grad is not None}
    trained = {name for name, gradient in gradients.items() if gradient.any()}
    wanted = {name for name, _ in projection.named_parameters()}
    if part != "coupling":
        wanted = {name for name in wanted if name.startswith(part)}
    assert wanted
    assert trained == wanted
    assert all(gradients[name].abs().min() > 0 for name in trained)


def test_a_saved_state_restores_the_directions(projection):
    tokens = random_tokens()
    expected = [tensor.clone() for tensor in projection(tokens, tokens)]
    state = {name: tensor.clone() for name, tensor in projection.state_dict().items()}
    projection.reset_parameters()
    assert not torch.equal(projection(tokens, tokens).right, expected[1])
    projection.load_state_dict(state)
    assert_equal(list(projection(tokens, tokens)), expected)


def test_a_seed_decides_the_parameters(projection):
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        projection.reset_parameters()
        draws.append([p.detach().clone() for p in projection.parameters()])
    assert_equal(*draws)


@pytest.mark.parametrize("mask", [MASK, MASK.flip(1)], ids=["mask", "flipped"])
def test_padding_anywhere_equals_no_padding(projection, mask):
    queries, keys = random_tokens(mask), random_tokens(mask)
    masked = projection(queries, keys)
    for sample in range(2):
        alone = projection(valid_only(queries, sample), valid_only(keys, sample))
        for with_padding, without in zip(masked, alone, strict=True):
            shared = with_padding.shape == without.shape
            assert_equal(with_padding if shared else with_padding[sample : sample + 1], without)


def test_a_sequence_of_nothing_but_padding_gives_finite_directions(projection):
    nothing = random_tokens(torch.zeros(2, 7, dtype=torch.bool))
    for tensor in projection(nothing, nothing):
        assert tensor.isfinite().all()


def test_one_token_is_enough(projection):
    for tensor in projection(random_tokens(tokens=1), random_tokens(tokens=1)):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_no_direction_to_half(projection, dtype):
    projection = projection.float()
    tokens = Tokens(*(t if t is None else t.float() for t in random_tokens()))
    exact = projection(tokens, tokens)
    with torch.autocast("cpu", dtype):
        directions = projection(tokens, tokens)
    for rounded, true in zip(directions, exact, strict=True):
        assert rounded.dtype == torch.float32
        if not isinstance(projection, Contextual):  # whose linear layer autocast may round
            assert_equal(rounded, true)
        torch.testing.assert_close(rounded, true, rtol=0.05, atol=0.05)


# --- anchors -------------------------------------------------------------------------------------


def written_anchors(weight: Tensor, source: Tensor) -> Tensor:
    """Return ``Σ_a f(x_{i(a)}) w_aᵀ`` for one sample: source (H, N, P), weight (H, A, S)."""
    total = torch.zeros(2, 3, 4, dtype=torch.float64)
    index = torch.linspace(0, source.shape[1] - 1, weight.shape[1], dtype=torch.int64)
    for anchor, position in enumerate(index.tolist()):
        total += source[:, position, :, None] * weight[:, anchor, None, :]
    return total


@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 50])
def test_token_anchors_are_the_written_sum_over_slices_of_the_keys_input(tokens, anchors):
    projection = FromAnchors(SHAPE, anchors=anchors).double()
    queries, keys = random_tokens(tokens=tokens), random_tokens(tokens=tokens)
    left, right, coupling = projection(queries, keys)
    for sample in range(2):
        by_head = torch.stack(keys.inputs[sample].chunk(2, dim=-1))  # (H, N, width / H)
        assert_equal(left[sample], written_anchors(projection.left, by_head))
        assert_equal(right[sample], written_anchors(projection.right, by_head))
    assert_equal(coupling, (projection.left * projection.right).sum((1, 2)))


@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 50])
def test_feature_anchors_are_the_written_sum_over_the_other_sides_features(tokens, anchors):
    projection = FromAnchors(SHAPE, anchors=anchors, source="features").double()
    queries, keys = random_tokens(tokens=tokens), random_tokens(tokens=tokens + 3)
    left, right, coupling = projection(queries, keys)
    for sample in range(2):
        assert_equal(left[sample], written_anchors(projection.left, keys.features[sample]))
        assert_equal(right[sample], written_anchors(projection.right, queries.features[sample]))
    assert_equal(coupling, (projection.left * projection.right).sum((1, 2)))


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=12).filter(any),
    anchors=st.integers(1, 15),
    source=st.sampled_from(["tokens", "features"]),
)
@settings(max_examples=50)
def test_anchors_are_valid_tokens_whatever_lies_in_the_padding(mask, anchors, source):
    real = torch.tensor([mask, mask[::-1]])
    tokens = random_tokens(real, tokens=len(mask))
    for at_padding in (tokens.inputs[~real], tokens.features.transpose(1, 2)[~real]):
        at_padding.fill_(float("nan"))
    projection = FromAnchors(SHAPE, anchors=anchors, source=source).double()
    left, right, _ = projection(tokens, tokens)
    for sample in range(2):
        alone = projection(valid_only(tokens, sample), valid_only(tokens, sample))
        assert_equal(left[sample], alone.left[0])
        assert_equal(right[sample], alone.right[0])


def test_anchors_take_their_number_from_the_rank_and_start_orthogonal():
    projection = FromAnchors(SHAPE)
    assert projection.anchors == 40
    assert repr(projection) == "FromAnchors(anchors=40, source='tokens')"
    for weight in (projection.left, projection.right):
        rows = weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.mT, torch.eye(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"source": "token"}, r"source must be one of \['features', 'tokens'\], got 'token'"),
        ({"anchors": 0}, "anchors must be a positive integer, got 0; 1 is the smallest"),
        ({"anchors": 2.5}, "anchors must be a positive integer, got 2.5"),
    ],
)
def test_wrong_settings_are_answered_with_right_ones(settings_, message):
    with pytest.raises(ValueError, match=message):
        FromAnchors(SHAPE, **settings_)


@pytest.mark.parametrize(
    ("width", "features", "message"),
    [
        (7, 3, r"width must be a multiple of heads, got width=7 and heads=2; .*: 6 and 8"),
        (1, 3, r"width must be a multiple of heads, got width=1 and heads=2; .*: 2\."),
        (0, 3, "width must be a positive integer, got 0"),
        (8, 3, r"got features=3 and width // heads = 4; use .*'feature_anchors'"),
    ],
)
def test_token_anchors_need_as_many_features_as_a_slice_is_wide(width, features, message):
    shape = SHAPE._replace(width=width, features=features)
    with pytest.raises(ValueError, match=message):
        FromAnchors(shape)
    FromAnchors(shape, source="features")  # fits every width


# --- contextual ----------------------------------------------------------------------------------


def contextual(positive=False, **sizes) -> Contextual:
    return Contextual(SHAPE._replace(positive=positive, **sizes)).double()


def test_contextual_directions_are_the_written_means():
    projection = contextual(query_width=5)
    queries, keys = random_tokens(width=5), random_tokens(tokens=9)
    left, right, coupling = projection(queries, keys)
    for b in range(2):
        for h in range(2):
            rows = slice(4 * h, 4 * h + 4)
            terms = [
                torch.outer(
                    keys.features[b, h, j], projection.left.weight[rows] @ keys.inputs[b, j]
                )
                for j in range(9)
            ]
            assert_equal(left[b, h], sum(terms) / 9)
            terms = [
                torch.outer(
                    queries.features[b, h, i], projection.right.weight[rows] @ queries.inputs[b, i]
                )
                for i in range(7)
            ]
            assert_equal(right[b, h], sum(terms) / 7)
            assert_equal(coupling[b, h], torch.trace(left[b, h].mT @ right[b, h]))


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 9))
@settings(max_examples=25)
def test_contextual_directions_do_not_know_the_order_of_the_tokens(seed, tokens):
    torch.manual_seed(seed)
    projection, order = contextual(), torch.randperm(tokens)
    before = random_tokens(tokens=tokens)
    after = Tokens(before.inputs[:, order], before.features[:, :, order], None)
    assert_equal(tuple(projection(after, after)), tuple(projection(before, before)))


def bidirectional_scores(projection: Contextual, queries: Tokens, keys: Tokens):
    """Return e and r as the bidirectional layer computes them, over all the tokens given."""
    left, right, _ = projection(queries, keys)
    query, key = queries.features, keys.features
    if projection.positive:
        query, key = (
            functional.row_normalise(query, key, keys.mask),
            functional.row_normalise(key, query, queries.mask),
        )
    return functional.primal_scores(query, key, left, right)


def first(tokens: Tokens, count: int) -> Tokens:
    mask = None if tokens.mask is None else tokens.mask[:, :count]
    return Tokens(tokens.inputs[:, :count], tokens.features[:, :, :count], mask)


@pytest.mark.parametrize("positive", [False, True], ids=["signed", "positive"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "masked"])
def test_causal_scores_are_bidirectional_scores_over_the_past(mask, positive):
    projection = contextual(positive)
    queries, keys = (random_tokens(mask, positive=positive) for _ in range(2))
    causal = projection.causal_scores(queries, keys)
    real = torch.ones_like(MASK) if mask is None else mask
    for n in range(7):
        past = bidirectional_scores(projection, first(queries, n + 1), first(keys, n + 1))
        for ours, expected in zip(causal, past, strict=True):
            assert_equal(ours[real[:, n], :, n], expected[real[:, n], :, n])


def test_positive_causal_scores_are_softmax_attention_over_the_past():
    projection = contextual(positive=True)
    queries, keys = random_tokens(positive=True), random_tokens(positive=True)
    scores, _ = projection.causal_scores(queries, keys)
    kernel = (queries.features @ keys.features.mT).tril()
    values, _ = projection.coefficients(queries, keys)
    assert_equal(scores, kernel / kernel.sum(-1, keepdim=True) @ values)


@pytest.mark.parametrize("positive", [False, True], ids=["signed", "positive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_causal_sums_of_half_precision_are_taken_in_float32(dtype, positive):
    projection = Contextual(SHAPE._replace(positive=positive)).to(dtype)
    tokens = random_tokens(batch=1, tokens=3000, positive=positive)
    features = 6 * tokens.features.abs() if positive else tokens.features + 6  # sums beyond 65504
    tokens = Tokens(tokens.inputs.to(dtype), features.to(dtype), None)
    exact = Tokens(tokens.inputs.double(), tokens.features.double(), None)
    scores = projection.causal_scores(tokens, tokens)
    expected = projection.double().causal_scores(exact, exact)
    for ours, true in zip(scores, expected, strict=True):
        assert ours.dtype == dtype
        scale = true.abs().max()
        assert (ours.double() - true).abs().max() < 4 * torch.finfo(dtype).eps * scale


# --- shared --------------------------------------------------------------------------------------


def test_shared_directions_are_the_parameters_themselves():
    projection = Shared(SHAPE)
    left, right, coupling = projection(random_tokens(), random_tokens())
    assert left is projection.left
    assert right is projection.right
    assert torch.equal(coupling, functional.coupling(left, right))


def test_data_independent_directions_mix_no_tokens_and_data_dependent_ones_do():
    for make, mixes in (
        (Shared, False),
        (partial(FromAnchors, anchors=3), True),
        (partial(FromAnchors, anchors=3, source="features"), True),
        (Contextual, True),
    ):
        projection = make(SHAPE).double()
        tokens, changed = random_tokens(), random_tokens()
        # All tokens but the middle one are other tokens; only mixing tells the middle one.
        changed.inputs[:, 3], changed.features[:, :, 3] = (
            tokens.inputs[:, 3],
            tokens.features[:, :, 3],
        )
        before, after = (
            functional.primal_scores(t.features, t.features, *projection(t, t)[:2])[0][:, :, 3]
            for t in (tokens, changed)
        )
        assert bool((before - after).abs().max() > 1e-3) == mixes

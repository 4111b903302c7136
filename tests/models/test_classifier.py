"""The classifier learns, and sees nothing of padding."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from primal.attention.softmax import SoftmaxAttention
from primal.losses import with_ksvd
from primal.models.build import EncoderConfig
from primal.models.classifier import SequenceClassifier

SMALL = EncoderConfig(width=16, heads=2, rank=4, depth=2, dropout=0.0)
CONFIGS = {
    "primalformer": SMALL,
    "primal_plus": replace(SMALL, primal_layers=(-1,), norm="post"),
    "contextual": replace(SMALL, projection="contextual", feature_map="elu"),
    "causal": replace(SMALL, causal=True),
    "softmax": replace(SMALL, primal_layers=()),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def toy_task(cases: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return noise of many lengths, and which of its three channels has a spike somewhere."""
    x, lengths = 0.3 * torch.randn(cases, 12, 3), torch.randint(6, 13, (cases,))
    labels, where = torch.randint(3, (cases,)), (torch.rand(cases) * lengths).long()
    x[torch.arange(cases), where, labels] += 3.0
    x[torch.arange(12) >= lengths[:, None]] = float("nan")
    return x, lengths, labels


@every_config
def test_learns_a_toy_task(config):
    model = SequenceClassifier(channels=3, classes=3, max_tokens=12, config=config)
    x, lengths, labels = toy_task(64)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(50):
        logits, terms = model(x, mask=lengths)
        loss = with_ksvd(F.cross_entropy(logits, labels), terms, weight=0.1)
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
        losses.append(loss.task.item())
    assert losses[0] > 0.8
    assert losses[-1] < 0.5


@every_config
def test_padding_changes_nothing(config):
    model = SequenceClassifier(channels=3, classes=4, max_tokens=9, config=config).double()
    x, lengths = torch.randn(3, 9, 3, dtype=torch.float64), torch.tensor([9, 1, 4])
    mask = torch.arange(9) < lengths[:, None]
    padded = model(x.masked_fill(~mask[..., None], float("nan")), mask=mask)
    assert padded.logits.shape == (3, 4)
    torch.testing.assert_close(model(x, mask=lengths), padded, rtol=1e-12, atol=1e-12)
    for b, length in enumerate(lengths):
        logits, terms = model(x[b, :length][None])
        torch.testing.assert_close(padded.logits[b], logits[0])
        for alone, together in zip(terms, padded.terms, strict=True):
            torch.testing.assert_close(together.left_energy[b], alone.left_energy[0])
    found = torch.autograd.grad(padded.logits.sum(), list(model.parameters()), allow_unused=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in found)


def test_the_logits_are_a_head_on_the_mean_of_the_tokens():
    model = SequenceClassifier(channels=3, classes=4, max_tokens=9, config=SMALL)
    x = torch.randn(2, 5, 3)
    tokens = model.encoder(model.embed(x) + model.positions[:5])
    torch.testing.assert_close(model(x).logits, model.head(tokens.values.mean(1)))
    torch.testing.assert_close(model(x).terms, tokens.terms)


def test_dropout_follows_the_config():
    model = SequenceClassifier(3, 2, 9, replace(SMALL, primal_layers=(), dropout=0.5))
    assert model.dropout.p == 0.5
    x = torch.randn(2, 9, 3)
    assert not torch.equal(model(x).logits, model(x).logits)
    model.eval()
    assert torch.equal(model(x).logits, model(x).logits)


def test_kinds_of_layers_follow_the_config():
    model = SequenceClassifier(3, 2, 9, CONFIGS["primal_plus"])
    assert isinstance(model.encoder.attention[0], SoftmaxAttention)
    assert len(model(torch.randn(2, 9, 3)).terms) == 1
    default = SequenceClassifier(3, 2, 9)
    assert default.encoder.width == EncoderConfig().width


def says(*parts: str) -> str:
    """Return the pattern of a message with these parts: what is required, given, and would do."""
    return "(?s)" + ".*".join(map(re.escape, parts))


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.randn(2, 10, 3), None, says("at most max_tokens=9", "got 10", "crop", "larger")),
        (torch.randn(2, 5, 4), None, says("(batch, tokens, 3)", "got (2, 5, 4)", "project")),
        (torch.ones(2, 5, 3).long(), None, says("floating point", "torch.int64", "x.float()")),
        (torch.randn(2, 5, 3), torch.ones(2, 5), says("bool", "torch.float32", "mask.bool()")),
        (torch.randn(2, 5, 3), torch.tensor([5, 0]), says("at least one", "row(s) [1]", "drop")),
    ],
    ids=["tokens", "channels", "integers", "mask", "lengths"],
)
def test_wrong_input(x, mask, message):
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(3, 2, 9, SMALL)(x, mask=mask)


@pytest.mark.parametrize("name", ["channels", "classes", "max_tokens"])
def test_wrong_sizes(name):
    sizes = {"channels": 3, "classes": 2, "max_tokens": 9} | {name: 0}
    with pytest.raises(ValueError, match=says(f"{name} must be a positive integer", "got 0", "1")):
        SequenceClassifier(**sizes, config=SMALL)

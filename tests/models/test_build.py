"""A config describes an encoder: which layers are primal, and that every setting arrives."""

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.models.build import EncoderConfig, build_encoder, primal_plus, primalformer
from primal.models.encoder import Encoder

SMALL: dict[str, Any] = {"width": 12, "heads": 3, "rank": 2}


def kinds(encoder: Encoder) -> str:
    """Return the first letters of the kinds of the layers."""
    return "".join(type(layer).__name__[0] for layer in encoder.attention)


# --- which layers are primal ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("primal_layers", "expected"),
    [("all", "PPPP"), ((-1,), "SSSP"), ((), "SSSS"), ((0, -2), "PSPS"), ((1, -3, 3), "SPSP")],
)
def test_primal_layers(primal_layers, expected):
    config = EncoderConfig(**SMALL, depth=4, primal_layers=primal_layers)
    assert kinds(build_encoder(config)) == expected
    assert [config.is_primal(i) for i in range(4)] == [letter == "P" for letter in expected]


def test_primalformer_and_primal_plus():
    assert kinds(primalformer(**SMALL, depth=3)) == "PPP"
    assert kinds(primal_plus(**SMALL, depth=3)) == "SSP"
    assert kinds(primal_plus(**SMALL, depth=3, layers=(0, 1))) == "PPS"
    assert primal_plus(**SMALL, causal=True).attention[0].causal


@pytest.mark.parametrize(
    ("name", "kind"),
    [("softmax", SoftmaxAttention), ("robust", RobustAttention), ("scaled", ScaledAttention)],
)
def test_other_layers(name, kind):
    encoder = primal_plus(**SMALL, other_layers=name)
    assert [type(layer) for layer in encoder.attention] == [kind, PrimalAttention]
    values, terms = encoder(torch.randn(2, 5, 12))
    assert values.shape == (2, 5, 12)
    assert len(terms) == 1


# --- every setting arrives -----------------------------------------------------------------------

ARRIVES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "width": (24, lambda encoder: {layer.width for layer in encoder.attention}),
    "heads": (2, lambda encoder: {layer.heads for layer in encoder.attention}),
    "depth": (5, lambda encoder: {len(encoder.blocks)}),
    "feedforward": (
        7,
        lambda encoder: {block.feedforward[0].out_features for block in encoder.blocks},
    ),
    "rank": (3, lambda encoder: {encoder.attention[-1].rank}),
    "feature_map": (
        "elu",
        lambda encoder: {type(encoder.attention[-1].feature_map).__name__[:3].lower()},
    ),
    "projection": (
        "contextual",
        lambda encoder: {type(encoder.attention[-1].projection).__name__.lower()},
    ),
    "anchors": (5, lambda encoder: {encoder.attention[-1].projection.anchors}),
    "scores": ("left", lambda encoder: {encoder.attention[-1].scores}),
    "short_convolution": (
        3,
        lambda encoder: {encoder.attention[-1].convolution.kernel_size[0]},
    ),
    "causal": (True, lambda encoder: {layer.causal for layer in encoder.attention}),
    "norm": ("post", lambda encoder: {block.norm for block in encoder.blocks}),
    "dropout": (
        0.25,
        lambda encoder: {
            encoder.attention[0].dropout,
            *(part.p for part in encoder.modules() if isinstance(part, nn.Dropout)),
        },
    ),
}


@pytest.mark.parametrize("setting", ARRIVES)
def test_every_setting_arrives(setting):
    value, found = ARRIVES[setting]
    config = replace(EncoderConfig(**SMALL, primal_layers=(-1,)), **{setting: value})
    assert found(build_encoder(config)) == {value}


def test_every_setting_is_tested():
    elsewhere = {"primal_layers", "other_layers", "overcomplete"}
    assert ARRIVES.keys() | elsewhere == {field.name for field in fields(EncoderConfig)}


def test_overcomplete_ranks_are_allowed_if_wished():
    config = EncoderConfig(width=12, heads=3, rank=5)  # heads of width 4
    with pytest.raises(ValueError, match="overcomplete=True"):
        build_encoder(config)
    assert build_encoder(replace(config, overcomplete=True)).attention[0].rank == 5


def test_feedforward_networks_are_four_times_as_wide_unless_said():
    encoder: Any = build_encoder(EncoderConfig(**SMALL))
    assert encoder.blocks[0].feedforward[0].out_features == 48


# --- wrong settings ------------------------------------------------------------------------------


def says(*parts: str) -> str:
    """Return the pattern of a message with these parts: what is required, given, and would do."""
    return "(?s)" + ".*".join(map(re.escape, parts))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 5}, says("multiple of heads", "width=12 and heads=5", "10 and 15")),
        ({"depth": 0}, says("depth must be a positive integer", "got 0", "1")),
        ({"other_layers": "sofmax"}, says("one of [", "got 'sofmax'", "mean 'softmax'")),
        ({"primal_layers": "al"}, says("one of ['all']", "got 'al'", "mean 'all'")),
        (
            {"depth": 3, "primal_layers": (0, 3, -4)},
            says("between -3 and 2 for depth=3", "got [3, -4]", "-1 is the last"),
        ),
    ],
    ids=["heads", "depth", "other_layers", "primal_layers", "primal_layers-range"],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**SMALL | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"norm": "prenorm"}, says("norm must be one of ['post', 'pre']", "got 'prenorm'")),
        ({"rank": 5}, says("at most the 4 features", "rank=5", "overcomplete=True")),
        ({"feature_map": "elo"}, says("feature map must be one of [", "'elo'", "mean 'elu'")),
        ({"projection": "share"}, says("projection must be one of [", "mean 'shared'")),
        ({"feedforward": 0}, says("feedforward must be a positive integer", "got 0")),
    ],
    ids=["norm", "rank", "feature_map", "projection", "feedforward"],
)
def test_wrong_parts(wrong, message):
    with pytest.raises(ValueError, match=message):
        build_encoder(EncoderConfig(**SMALL | wrong))


@pytest.mark.parametrize(
    ("other_layers", "name"), [("robust", "RobustAttention"), ("scaled", "ScaledAttention")]
)
def test_layers_without_a_causal_form(other_layers, name):
    with pytest.raises(ValueError, match=says(name, "no causal form", "other_layers='softmax'")):
        primal_plus(**SMALL, other_layers=other_layers, causal=True)


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        EncoderConfig().width = 3  # type: ignore[misc]

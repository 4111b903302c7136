"""Settings survive a file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from primal import EncoderConfig
from primal.settings import from_json, to_json


@dataclass(frozen=True)
class Inner:
    layers: Literal["all"] | tuple[int, ...] = "all"


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    path: Path | None = None
    inners: tuple[Inner, ...] = ()
    names: tuple[str, ...] | None = None
    weight: float = 0.5


@pytest.mark.parametrize(
    "settings",
    [
        Outer(),
        Outer(inner=Inner(layers=(-1, 0)), path=Path("a/b"), names=("x",), weight=1e-3),
        Outer(inners=(Inner(), Inner(layers=()))),
    ],
)
def test_settings_survive_a_file(settings):
    content = json.loads(json.dumps(to_json(settings)))
    assert from_json(Outer, content) == settings


def test_the_types_come_back_too():
    content = json.loads(json.dumps(to_json(EncoderConfig(primal_layers=(-1,)))))
    assert from_json(EncoderConfig, content).primal_layers == (-1,)


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match=r"Inner has no layer; it was written by another version"):
        from_json(Outer, {"inner": {"layer": "all"}})

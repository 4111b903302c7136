"""A recipe: everything one number depends on, as a value that can be changed and written down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from primal.errors import DataError, require_choice
from primal.training.loop import TrainingConfig, Watcher
from primal.training.run_folder import RunFolder

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found."""

    metric: str  # what ``value`` is, for instance test/accuracy
    value: float
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """What to run. Each kind of task adds its own fields."""

    training: TrainingConfig

    @abstractmethod
    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,
        watch: Watcher | None = None,
    ) -> Result:
        """Train, evaluate, and write what the folder of a run holds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe's place in the list."""

    summary: str
    build: Callable[[], Recipe]
    paper: str = ""  # the published value, if there is one


# Where the recipes are; a module lists its own in RECIPES: name -> Entry.
MODULES = ("primal.recipes.timeseries",)


def recipes() -> dict[str, Entry]:
    """Return every recipe by its name."""
    return {name: e for module in MODULES for name, e in import_module(module).RECIPES.items()}


def find(name: str) -> Recipe:
    known = recipes()
    require_choice("the recipe", name, known)
    return known[name].build()


def to_json(recipe: Recipe) -> dict[str, Any]:
    return {"kind": f"{type(recipe).__module__}:{type(recipe).__qualname__}", **asdict(recipe)}


def from_json(content: dict[str, Any]) -> Recipe:
    """Rebuild a recipe from a run's folder."""
    module, _, name = content["kind"].partition(":")
    if not module.startswith("primal.recipes."):
        raise DataError(f"a recipe of primal is required, got {content['kind']!r}.")
    built = _build(getattr(import_module(module), name), content)
    assert isinstance(built, Recipe)
    return built


def _build(kind: Any, content: Any) -> Any:
    """Make dataclasses, tuples and paths out of what JSON makes of them."""
    if get_origin(kind) in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        if content is None:
            return None
        chosen = next((o for o in options if get_origin(o) is tuple), options[0])
        return _build(chosen if isinstance(content, list) else options[0], content)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {f.name for f in fields(kind)}
        return kind(**{k: _build(hints[k], v) for k, v in content.items() if k in known})
    if isinstance(content, list):
        return tuple(content)
    return Path(content) if kind is Path else content

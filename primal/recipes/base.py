"""A recipe: everything one number depends on, as a value that can be changed and written down."""

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from primal import settings
from primal.errors import DataError, require_choice
from primal.report import write_report
from primal.training import distributed
from primal.training.loop import Watcher
from primal.training.run_folder import RunFolder
from primal.training.series import Device, choose_device


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found."""

    metric: str  # what ``value`` is, for instance test/accuracy
    value: float
    metrics: dict[str, float]
    seconds: float  # of training


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A number of somebody else's to read ours beside."""

    who: str
    value: float
    note: str


class Screen(Watcher, Protocol):
    """Who looks on, and is told what happens besides training."""

    def stage(self, what: str, epochs: int = 0) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """What to run. Each kind of task adds its own fields."""

    @abstractmethod
    def run(
        self,
        folder: RunFolder,
        *,
        device: Device = "auto",
        resume: bool = False,
        watch: Screen | None = None,
    ) -> Result:
        """Train, evaluate, and write what the folder of a run holds."""

    @abstractmethod
    def seeded(self, seed: int) -> Self:
        """Return the same with another seed."""

    def comparisons(self) -> tuple[Comparison, ...]:
        """Return what others report for the same task."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe's place in the list."""

    summary: str
    build: Callable[[], Recipe]
    published: str = ""  # the value to compare with, if there is one


# A module lists its own in RECIPES: name -> Entry.
MODULES = ("primal.recipes.timeseries", "primal.recipes.uea", "primal.recipes.events")


def recipes() -> dict[str, Entry]:
    """Return every recipe by its name."""
    return {name: e for module in MODULES for name, e in import_module(module).RECIPES.items()}


def execute(
    name: str,
    recipe: Recipe,
    folder: RunFolder,
    *,
    device: Device = "auto",
    resume: bool = False,
    watch: Screen | None = None,
) -> Result:
    """Run a recipe, and write what it was, where it ran, what it found, and the report."""
    first = distributed.is_first()
    if first:
        folder.write_json(RunFolder.RECIPE, {"name": name, "recipe": to_json(recipe)})
        folder.write_json(RunFolder.ENVIRONMENT, environment(device))
    try:
        result = recipe.run(folder, device=device, resume=resume, watch=watch)
    except ValueError:
        if first and not (folder / RunFolder.CHECKPOINT).exists():
            # There is nothing to go on with: the folder may be used again.
            for left in (RunFolder.RECIPE, RunFolder.ENVIRONMENT, RunFolder.METRICS):
                (folder / left).unlink(missing_ok=True)
        raise
    if first:
        others = [settings.to_json(other) for other in recipe.comparisons()]
        found = {"recipe": name, "protocol": getattr(recipe, "protocol", "honest")}
        folder.write_json(
            RunFolder.RESULT, {**found, **settings.to_json(result), "comparisons": others}
        )
        write_report(folder.path)
    return result


def environment(device: Device) -> dict[str, Any]:
    """Return what a number may depend on beside the recipe."""
    on = choose_device(device)
    packages = ("primal-attention", "torch", "numpy", "scikit-learn", "aeon")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(on) if on.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "processes": distributed.size(),
        "packages": {name: found for name in packages if (found := _version(name))},
    }


def processor() -> str:
    """Return the name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find(name: str) -> Recipe:
    known = recipes()
    require_choice("the recipe", name, known)
    return known[name].build()


def to_json(recipe: Recipe) -> dict[str, Any]:
    kind = f"{type(recipe).__module__}:{type(recipe).__qualname__}"
    return {"kind": kind, **settings.to_json(recipe)}


def from_json(content: Mapping[str, Any]) -> Recipe:
    """Rebuild a recipe from a run's folder."""
    module, _, name = str(content.get("kind")).partition(":")
    if module not in MODULES:
        raise DataError(
            f"a recipe of {', '.join(MODULES)} is required, got {content.get('kind')!r}; "
            "give the folder of a run."
        )
    rest = {key: value for key, value in content.items() if key != "kind"}
    recipe: Recipe = settings.from_json(getattr(import_module(module), name), rest)
    return recipe

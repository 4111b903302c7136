"""The cells of a table: each recipe is run once, its result kept in a file, found again."""

import json
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from primal import settings
from primal.recipes.base import Recipe, Result, environment, to_json
from primal.training.run_folder import RunFolder
from primal.training.series import Device


def stored(path: Path, recipe: Recipe) -> Result | None:
    """Return the result in ``path``, if it is of this very recipe."""
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    if _apart_from_its_place(content["recipe"]) != _apart_from_its_place(to_json(recipe)):
        return None
    return settings.from_json(Result, content["result"])


def _apart_from_its_place(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what a result depends on: not the folder the data lies in."""
    content: dict[str, Any] = json.loads(json.dumps(recipe))
    content.get("data", {}).pop("root", None)
    return content


def places(paths: Iterable[Path]) -> str:
    """Say on which machines, and when, the results in ``paths`` were found."""
    found = [json.loads(path.read_text())["environment"] for path in paths if path.exists()]
    days: dict[str, list[str]] = {}
    for one in found:
        days.setdefault(one["device"], []).append(one["date"][:10])
    return "; ".join(
        f"{device}, {' to '.join(sorted({min(dates), max(dates)}))}"
        for device, dates in days.items()
    )


def run(path: Path, recipe: Recipe, device: Device = "auto") -> Result:
    """Run a recipe and keep its result in ``path``."""
    found = stored(path, recipe)
    if found is not None:
        return found
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place)) as folder:
        result = recipe.run(folder, device=device)
    content = {
        "recipe": to_json(recipe),
        "result": settings.to_json(result),
        "environment": environment(device),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
    return result


def run_all(
    cells: Mapping[Path, Recipe], device: Device = "auto", workers: int = 1
) -> Iterator[tuple[Path, Result]]:
    """Run what is not there yet, several at a time; a model of this size uses a sliver of a GPU."""
    missing = {path: recipe for path, recipe in cells.items() if stored(path, recipe) is None}
    if workers <= 1:
        for path, recipe in missing.items():
            yield path, run(path, recipe, device)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(run, path, recipe, device): path for path, recipe in missing.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()

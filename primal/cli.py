"""The command ``primal``: verbs here, settings from the recipes' own fields.

Imports are lazy: ``primal --help`` must not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primal.recipes.base import Recipe, Result
    from primal.recipes.timeseries import SeriesRecipe
    from primal.screen import Screen
    from primal.training.run_folder import RunFolder

RUNS = Path("runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; return what the shell is told."""
    parser = _parser()
    known, rest = parser.parse_known_args(argv)
    if rest and known.verb is not _run:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = known.verb(known, rest)
    except BrokenPipeError:  # `primal list | head`
        sys.stderr.close()
        return 1
    except (ValueError, RuntimeError) as error:
        if not _is_for_the_user(error):
            raise
        print(f"primal: {error}", file=sys.stderr)
        return 2
    return status


def _is_for_the_user(error: Exception) -> bool:
    """Say whether the message tells what to do; anything else is a fault of ours, to be traced."""
    return isinstance(error, ValueError) and type(error).__module__.split(".")[0] in (
        "primal",
        "builtins",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="primal", description="Self-attention as a kernel machine.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def add(name: str, verb: Callable[..., int], summary: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(verb=verb)
        return added

    listing = add("list", _list, "list the recipes")
    listing.add_argument("part", nargs="?", default="", help="show names that contain this")

    # A recipe has its own --help, with all its fields.
    run = verbs.add_parser(
        "run",
        help="train and evaluate a recipe",
        description="Train and evaluate a recipe; `primal run RECIPE --help` lists its fields.",
        allow_abbrev=False,
        add_help=False,
    )
    run.set_defaults(verb=_run)
    run.add_argument("recipe", nargs="?", help="a name from `primal list`")
    run.add_argument("--folder", type=Path, help="where to write; by default below runs/")
    run.add_argument(
        "--resume", metavar="auto|FOLDER", help="go on with the latest unfinished run, or this one"
    )
    _add_device(run)

    predict = add("predict", _predict, "predict for a file, with what a run has trained")
    predict.add_argument("run", type=Path, help="folder of the run")
    predict.add_argument("file", type=Path, help="a file as in training; labels may be absent")
    predict.add_argument("--out", type=Path, required=True, help="CSV to write")
    _add_device(predict)

    report = add("report", _report, "write a run's report.html anew")
    report.add_argument("run", type=Path, help="folder of the run")

    diagnose = add("diagnose", _diagnose, "print the spectra of a run's attention kernels")
    diagnose.add_argument("run", type=Path, help="folder of the run")

    table = add("table", _table, "run what a table needs, once, and print it")
    table.add_argument("name", choices=("uea", "events"))
    table.add_argument("--root", type=Path, help="folder of the data; or PRIMAL_DATA")
    table.add_argument("--store", type=Path, default=RUNS / "tables", help="where results are kept")
    table.add_argument("--seeds", type=int, default=3)
    table.add_argument("--workers", type=int, default=1, help="runs at a time")
    table.add_argument("--only", help="sets or variants to run, separated by commas")
    table.add_argument("--show", action="store_true", help="run nothing, print what is there")
    table.add_argument("--out", type=Path, help="write the table as Markdown too")
    _add_device(table)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


# --- verbs ---------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace, _: list[str]) -> int:
    from primal.recipes.base import recipes

    found = {name: entry for name, entry in recipes().items() if arguments.part in name}
    if not found:
        raise ValueError(f"no recipe's name contains {arguments.part!r}; `primal list` lists all.")
    width = max(map(len, found))
    for name, entry in found.items():
        published = f"  (paper {entry.published})" if entry.published else ""
        print(f"{name:{width}}  {entry.summary}{published}")
    return 0


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.recipe is None or arguments.recipe in ("-h", "--help"):
        print("usage: primal run RECIPE [--folder F] [--resume auto|FOLDER] [--device D] [FIELDS]")
        print(
            "`primal list` names the recipes, `primal run RECIPE --help` lists a recipe's fields."
        )
        return 0 if {"-h", "--help"} & set(rest) else 2
    import tyro

    from primal.recipes import base
    from primal.training import distributed
    from primal.training.loop import Interrupted
    from primal.training.series import choose_device

    default = base.find(arguments.recipe)
    recipe = tyro.cli(
        type(default),
        default=default,
        args=rest,
        prog=f"primal run {arguments.recipe}",
        description="Also: --folder FOLDER, --resume auto|FOLDER, --device auto|cpu|cuda.",
    )
    with distributed.world(choose_device(arguments.device)):
        folder, resume = _folder(arguments, recipe)
        command = ["primal", "run", arguments.recipe, *rest]
        screen = _screen()
        try:
            with folder if distributed.is_first() else nullcontext(), screen:
                result = base.execute(
                    arguments.recipe,
                    recipe,
                    folder,
                    device=arguments.device,
                    resume=resume,
                    watch=screen,
                )
        except Interrupted as stopped:
            if distributed.is_first():
                again = shlex.join([*command, "--resume", str(folder.path)])
                print(f"\nstopped and saved; go on with\n  {again}", file=sys.stderr)
            return 128 + stopped.number
        if distributed.is_first():
            _print_result(result, recipe, folder)
    return 0


def _folder(arguments: argparse.Namespace, recipe: Recipe) -> tuple[RunFolder, bool]:
    """Return the folder to write to, and whether to go on with what is in it."""
    from primal.recipes import base
    from primal.training.run_folder import RunFolder

    def choose() -> tuple[str, bool]:
        name, wish = arguments.recipe, arguments.resume
        if wish not in (None, "auto"):
            return wish, True
        below = RUNS / name
        if wish == "auto":
            candidates = [arguments.folder] if arguments.folder else sorted(below.glob("*"))[::-1]
            content = json.loads(json.dumps({"name": name, "recipe": base.to_json(recipe)}))
            for path in candidates:
                kept = path / RunFolder.RECIPE
                unfinished = not (path / RunFolder.RESULT).exists()
                if kept.exists() and unfinished and json.loads(kept.read_text()) == content:
                    return str(path), True
        chosen = arguments.folder or below / time.strftime("%Y-%m-%d_%H-%M-%S")
        if (chosen / RunFolder.RECIPE).exists():
            raise ValueError(
                f"{chosen} holds a run already; go on with it by --resume {chosen}, or give "
                "another --folder."
            )
        return str(chosen), False

    path, resume = _agreed(choose)
    folder = RunFolder(Path(path))
    if resume:
        kept = folder / RunFolder.RECIPE
        if not kept.exists():
            raise ValueError(f"{path} holds no run to go on with; drop --resume.")
        if json.loads(kept.read_text())["recipe"] != json.loads(json.dumps(base.to_json(recipe))):
            raise ValueError(
                f"{path} holds a run with other settings; give the same as then (they are in "
                f"{kept}), or start anew without --resume."
            )
    return folder, resume


def _agreed(choose: Callable[[], tuple[str, bool]]) -> tuple[str, bool]:
    """Let the first process choose for all; all raise what it raises."""
    import torch.distributed as dist

    from primal.training import distributed

    found: list[Any] = [None]
    if distributed.is_first():
        try:
            found = [choose()]
        except ValueError as error:
            found = [str(error)]
    if distributed.size() > 1:
        dist.broadcast_object_list(found)
    if isinstance(found[0], str):
        raise ValueError(found[0])
    path, resume = found[0]
    return path, resume


def _screen() -> Screen:
    from primal.screen import Screen
    from primal.training import distributed

    return Screen(shown=distributed.is_first())


def _print_result(result: Result, recipe: Recipe, folder: RunFolder) -> None:
    from rich.console import Console
    from rich.table import Table

    from primal.recipes.timeseries import SeriesRecipe

    console = Console(highlight=False)
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    fraction = result.metric.endswith("accuracy")
    shown = f"{100 * result.value:.2f} %" if fraction else f"{result.value:.4g}"
    rows.add_row(result.metric, f"[bold]{shown}[/bold]", f"{result.seconds:.1f} s of training")
    for other in recipe.comparisons():
        value = f"{100 * other.value:.1f} %" if fraction else f"{other.value:.4g}"
        rows.add_row(other.who, value, other.note, style="dim")
    console.print(rows)
    # Not wrapped: these are to be copied.
    console.print(f"report   {folder.path / folder.REPORT}", soft_wrap=True)
    if isinstance(recipe, SeriesRecipe):
        console.print(
            f"predict  primal predict {folder.path} FILE --out predictions.csv", soft_wrap=True
        )


def _predict(arguments: argparse.Namespace, _: list[str]) -> int:
    from primal.recipes.timeseries import predict

    recipe = _series_recipe(arguments.run)
    cases = predict(recipe, arguments.run, arguments.file, arguments.out, arguments.device)
    print(f"{cases} cases predicted: {arguments.out}")
    return 0


def _series_recipe(folder: Path) -> SeriesRecipe:
    from primal.recipes.base import from_json
    from primal.recipes.timeseries import SeriesRecipe

    recipe = from_json(_read(folder, "recipe.json")["recipe"])
    if not isinstance(recipe, SeriesRecipe):
        raise ValueError(f"a run on time series is required, {folder} holds another kind.")
    return recipe


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {name}; give the folder of a run that has come so far."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / name} is damaged ({error}); run again.") from None
    return content


def _report(arguments: argparse.Namespace, _: list[str]) -> int:
    from primal.report import write_report

    print(write_report(arguments.run))
    return 0


def _diagnose(arguments: argparse.Namespace, _: list[str]) -> int:
    from rich.console import Console

    from primal.diagnostics.spectrum import FILE, diagnostics_table

    Console(highlight=False).print(diagnostics_table(_read(arguments.run, FILE)))
    return 0


def _table(arguments: argparse.Namespace, _: list[str]) -> int:
    from primal.recipes import events, uea

    options = {
        "seeds": arguments.seeds,
        "device": arguments.device,
        "only": arguments.only.split(",") if arguments.only else (),
        "show": arguments.show,
    }
    make = {"uea": uea.table, "events": events.table}[arguments.name]
    tables = make(arguments.root, arguments.store, workers=arguments.workers, **options)
    text = "\n\n".join(table.markdown() for table in tables)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if not sys.stdout.isatty():
        print(text)
        return 0
    from rich.console import Console

    for table in tables:
        Console(highlight=False).print(table.screen())
    return 0

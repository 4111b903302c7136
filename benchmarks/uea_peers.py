"""The closed-form model against aeon's MiniRocket and MultiRocketHydra, side by side, on UEA sets.

Each learns from the TRAIN file and is measured once on the TEST file. Series of unequal length are
filled with zeros at their end for the peers, which know no other. --ablation looks at the TRAIN
file alone: cross-validation tells what each part of ours buys.

    python benchmarks/uea_peers.py --root FOLDER --sets BasicMotions Libras --out FILE.md
    python benchmarks/uea_peers.py --root FOLDER --sets Libras --ablation
"""

import argparse
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import LabelEncoder

from primal.data import uea
from primal.data.series import SeriesSet
from primal.models.closed_form import ClosedFormConfig
from primal.training.series import fit_closed_form

SETS = (
    "BasicMotions",
    "Handwriting",
    "JapaneseVowels",
    "Libras",
    "PenDigits",
    "RacketSports",
    "SpokenArabicDigits",
    "UWaveGestureLibrary",
)
MOST_CASES = 500  # of a set that cross-validation looks at
Run = tuple[float, float, float]  # accuracy, seconds to fit, seconds to predict
Method = Callable[[SeriesSet, SeriesSet, int], Run]


def ours(
    train: SeriesSet, test: SeriesSet, seed: int, config: ClosedFormConfig | None = None
) -> Run:
    begin = time.perf_counter()
    predictor = fit_closed_form(config or ClosedFormConfig(), train, seed=seed, device="cpu")
    middle = time.perf_counter()
    predicted = predictor.outputs(test).argmax(1)
    end = time.perf_counter()
    right = predicted == predictor.preparation.targets(test)
    return right.double().mean().item(), middle - begin, end - middle


def peer(name: str) -> Method:
    def run(train: SeriesSet, test: SeriesSet, seed: int) -> Run:
        from aeon.classification import convolution_based

        # Nine steps are the least that MultiRocket reads, of a series and of its differences.
        steps = max(train.max_length, test.max_length, 10)
        (x, y), (x_test, y_test) = (_padded(each, steps) for each in (train, test))
        threads = torch.get_num_threads()
        model = getattr(convolution_based, name)(random_state=seed, n_jobs=threads)
        begin = time.perf_counter()
        model.fit(x, y)
        middle = time.perf_counter()
        predicted = model.predict(x_test)
        end = time.perf_counter()
        return float(np.mean(predicted == y_test)), middle - begin, end - middle

    return run


def _padded(data: SeriesSet, steps: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.zeros((len(data), data.channels, steps), np.float32)
    for row, values in zip(x, data.values, strict=True):
        row[:, : len(values)] = values.T
    assert data.targets is not None
    return x, data.targets.astype(str)


METHODS: dict[str, Method] = {
    "Primal, closed form": ours,
    "MiniRocket": peer("MiniRocketClassifier"),
    "MultiRocketHydra": peer("MultiRocketHydraClassifier"),
}


def compare(sets: list[str], root: Path, seeds: int, out: Path | None) -> None:
    found: dict[str, dict[str, list[Run]]] = {}
    _warm_up(root, sets[0])
    for name in sets:
        splits = uea.load(name, root)
        assert splits.test is not None
        found[name] = {method: [] for method in METHODS}
        for seed in range(seeds):
            for method, run in METHODS.items():
                found[name][method].append(run(splits.train, splits.test, seed))
                accuracy, fit, predict = found[name][method][-1]
                print(
                    f"{name:24}{method:20}{accuracy:8.4f}{fit:8.1f} s{predict:8.1f} s", flush=True
                )
        if out is not None:
            out.write_text(_page(found, seeds))
    print(_page(found, seeds))


def _warm_up(root: Path, name: str) -> None:
    """Let numba compile, and all that is imported at first use be imported."""
    train = uea.load(name, root).train
    for run in METHODS.values():
        run(train, train.subset(range(2)), 0)


def _page(found: dict[str, dict[str, list[Run]]], seeds: int) -> str:
    means = {
        name: {m: np.mean(runs, axis=0) for m, runs in row.items()} for name, row in found.items()
    }
    lines = [
        f"# Test accuracy on UEA sets beside MiniRocket and MultiRocketHydra, {date.today()}",
        "",
        f"{_processor()}, {torch.get_num_threads()} threads, other programs on the same cores "
        f"(load {os.getloadavg()[1]:.1f} over the last five minutes); Python "
        f"{platform.python_version()}, torch {torch.__version__}, aeon {version('aeon')}; "
        f"mean over {seeds} seed{'s' * (seeds > 1)}; "
        "`python benchmarks/uea_peers.py`.",
        "",
        "| set | " + " | ".join(f"{m}, % | fit s | predict s" for m in METHODS) + " |",
        "|---" * (1 + 3 * len(METHODS)) + "|",
    ]
    for name, row in means.items():
        cells = [f"{100 * a:.1f} | {f:.1f} | {p:.1f}" for a, f, p in row.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = []
    for method in METHODS:
        accuracy = statistics.mean(row[method][0] for row in means.values())
        ranks = [_rank(row, method) for row in means.values()]
        cells.append(f"**{100 * accuracy:.2f}**, mean rank {statistics.mean(ranks):.2f} | |")
    lines.append("| mean | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rank(row: dict[str, np.ndarray], method: str) -> float:
    better = sum(other[0] > row[method][0] for other in row.values())
    equal = sum(other[0] == row[method][0] for other in row.values())
    return better + (equal + 1) / 2


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


# --- what each part buys --------------------------------------------------------------------------


def ablate(sets: list[str], root: Path, seeds: int, out: Path | None) -> None:
    whole = ClosedFormConfig()
    variants = {
        "all": whole,
        "without attention": replace(whole, rank=0),
        "without warped copies": replace(whole, copies=0),
        "without outline": replace(whole, points=0),
        "without contests": replace(whole, groups=0),
        "without thresholds": replace(whole, thresholds=0),
        "attention alone": replace(whole, points=0, groups=0, thresholds=0),
    }
    lines = [
        f"## What each part buys, {date.today()}",
        "",
        f"Accuracy in five-fold cross-validation of the TRAIN files, at most {MOST_CASES} cases of "
        f"each, {seeds} seed{'s' * (seeds > 1)}, %. The TEST files are not read.",
        "",
        "| | " + " | ".join(sets) + " | mean |",
        "|---" * (2 + len(sets)) + "|",
    ]
    methods: dict[str, Method] = {
        variant: partial(ours, config=config) for variant, config in variants.items()
    }
    methods["MultiRocketHydra"] = METHODS["MultiRocketHydra"]
    for method, run in methods.items():
        row = [100 * _cross_validated(uea.load(name, root).train, seeds, run) for name in sets]
        cells = " | ".join(f"{value:.1f}" for value in (*row, statistics.mean(row)))
        lines.append(f"| {method} | {cells} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")


def _cross_validated(train: SeriesSet, seeds: int, run: Method) -> float:
    assert train.targets is not None
    chosen = np.random.default_rng(0).permutation(len(train))[:MOST_CASES]
    train = train.subset(chosen.tolist())
    assert train.targets is not None
    classes = LabelEncoder().fit_transform(train.targets.astype(str))
    scores = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # classes rarer than folds
        folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(classes, classes))
    for seed in range(seeds):
        for inside, outside in folds:
            known = set(classes[inside])
            asked = [i for i in outside if classes[i] in known]
            scores.append(run(train.subset(inside.tolist()), train.subset(asked), seed)[0])
    return statistics.mean(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, help="folder of UEA sets; else PRIMAL_DATA")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--ablation", action="store_true", help="what each part buys, on TRAIN")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    action = ablate if given.ablation else compare
    action(given.sets, given.root, given.seeds, given.out)


if __name__ == "__main__":
    main()

"""What the report's tests share: a browser, and folders of made-up runs."""

import base64
import csv
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace
from typing import Any

import pytest

from primal.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Chromium reads requests from descriptor 3 and answers on 4.
LAUNCH = "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); "
LAUNCH += "os.execvp(c[0], c)"


class Browser:
    """Headless Chromium, spoken to in its DevTools protocol: JSON messages that end in a NUL."""

    def __init__(self, program: str, profile: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (*_pipe(), *_pipe())]
        read, self._write, self._read, write = ends
        options = ("--headless=new", "--no-sandbox", "--remote-debugging-pipe")
        quiet = (
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--hide-scrollbars",
        )
        command = [program, *options, *quiet, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(read), str(write), *command],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._buffer, self._sent = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        pages = self.ask("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int) -> None:
        """Load a page as a screen of that width shows it; ``events`` are what happened since."""
        self.events = []
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def find(self, expression: str) -> Any:
        """Evaluate JavaScript on the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(20)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 16)
            assert read, f"{NAMES[0]} ended unasked"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


def _pipe() -> tuple[int, int]:
    return os.pipe()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless browser; without one the test is skipped."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser to look at the page: none of {', '.join(NAMES)} is installed")
    opened = Browser(program, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


# --- made-up runs --------------------------------------------------------------------------------


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Write a run's folder: JSON under its name, metrics as lines, predictions as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in content.items():
        if name == "metrics":
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / "metrics.jsonl").write_text(text)
        elif name == "predictions":
            with (folder / "predictions.csv").open("w", newline="") as file:
                csv.writer(file).writerows(part)
        else:
            (folder / f"{name}.json").write_text(json.dumps(part))
    return folder


def result(metric: str = "test/accuracy", value: float = 0.9, **more: Any) -> dict[str, Any]:
    found = {"recipe": "made/up", "protocol": "honest", "metric": metric, "value": value}
    return {**found, "metrics": {metric: value, "test/loss": 0.25}, "seconds": 75.2, **more}


def curves(epochs: int, layers: int = 2) -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch,
            "train/loss": 2 / epoch,
            "train/ksvd": 0.1 / epoch,
            **{f"train/ksvd/{layer + 1}": 0.1 / (epoch + layer) for layer in range(layers)},
            "train/score": 1 - 0.8 / epoch,
            "validation/loss": 2 / epoch + 0.1,
            "validation/accuracy": 1 - 0.9 / epoch,
            "seconds": 1.5 * epoch,
        }
        for epoch in range(1, epochs + 1)
    ]


def guesses(classes: list[str], each: int = 11, wrong: int = 3) -> list[list[Any]]:
    """Return a table in which ``wrong`` of the cases of a class are taken for the next one."""
    rows: list[list[Any]] = [["case", "label", "predicted", *classes]]
    for i, label in enumerate(classes):
        for case in range(each):
            predicted = classes[(i + (case < wrong)) % len(classes)]
            rows.append([f"{label}-{case}", label, predicted, *(0.1 for _ in classes)])
    return rows


def mistake(
    steps: int = 30, channels: int = 3, *, irregular: bool = False, label: str = "still"
) -> dict[str, Any]:
    values = [
        [None if 8 <= t < 12 and irregular else round(math.sin(t / 3 + c), 4) for t in range(steps)]
        for c in range(channels)
    ]
    times = [round(t + 0.4 * math.sin(7 * t), 3) for t in range(steps)] if irregular else None
    case = {"case": "17", "label": label, "predicted": "moving", "probability": 0.93}
    return {**case, "values": values, "times": times}


def spectrum(depth: int = 2, heads: int = 4, tokens: int = 29) -> dict[str, Any]:
    def layers(kind: str, count: int, decay: float) -> list[dict[str, Any]]:
        values = [[math.exp(-k * decay * (1 + h / 9)) for k in range(count)] for h in range(heads)]
        ranks = [1.5 + h / 10 + 1 / decay for h in range(heads)]
        return [
            {
                "name": f"layer {i + 1}",
                "kind": kind,
                "singular_values": values,
                "effective_rank": ranks,
            }
            for i in range(depth)
        ]

    primal, softmax = layers("primal", min(16, tokens), 1.0), layers("softmax", tokens, 0.4)
    return {
        "models": [
            {"name": "PrimalFormer", "layers": primal},
            {"name": "Transformer", "layers": softmax},
        ]
    }


SETTINGS = {"kind": "a:B", "data": {"name": "Made", "path": None}, "training": {"epochs": 9}}
RECIPE = {"name": "made/up", "recipe": SETTINGS}
ENVIRONMENT = {"date": "2026-01-01", "device": "a CPU", "packages": {"torch": "2"}}
OTHERS = [
    {"who": "Transformer", "value": 0.987, "note": "the paper's; best epoch by test accuracy"},
    {"who": "Primal.+", "value": 0.889, "note": "the paper's; best epoch by test accuracy"},
]
HOSTILE = "</script><script>throw 1</script><img src='http://example.com/x.png' onerror=\"x()\">&"
HOSTILE_LINK = '"><a href="http://example.com">'
COMMON = {"recipe": RECIPE, "environment": ENVIRONMENT}


def everything() -> dict[str, Any]:
    return {
        **COMMON,
        "result": result(comparisons=OTHERS),
        "metrics": curves(9),
        "predictions": guesses(["still", "moving", "falling"]),
        "mistakes": {"cases": [mistake(irregular=True), *(mistake() for _ in range(11))]},
        "spectrum": spectrum(),
    }


def _regression() -> dict[str, Any]:
    rows = [[str(i), i / 3, f"{i / 3 + math.sin(i):.6g}"] for i in range(3000)]
    wrong = {**mistake(), "label": "3.5", "predicted": "7.25", "probability": None}
    told = {"test/error": 0.7, "test/r2": 0.9, "test/loss": 0.1}
    metrics = [
        {"epoch": e, "train/loss": 1 / e, "train/ksvd": 0.0, "train/score": 0.5 / e, "seconds": e}
        for e in (1, 2, 3)
    ]
    return {
        **COMMON,
        "result": result("test/error", 0.7, metrics=told),
        "metrics": metrics,
        "predictions": [["case", "label", "predicted"], *rows],
        "mistakes": {"cases": [wrong]},
    }


def _nans() -> dict[str, Any]:
    missing = [{**row, "train/loss": math.nan, "validation/loss": None} for row in curves(3)]
    nothing = {**mistake(), "values": [[None] * 5, [math.nan] * 5]}
    comparisons = [{"who": "A", "value": math.nan, "note": ""}]
    return {
        **everything(),
        "result": result(value=0.5, seconds=math.nan, comparisons=comparisons),
        "metrics": missing,
        "mistakes": {"cases": [nothing, {**mistake(), "probability": None}]},
    }


def _hostile() -> dict[str, Any]:
    case = {**mistake(label=HOSTILE), "case": HOSTILE, "predicted": HOSTILE_LINK}
    models = [{**model, "name": HOSTILE} for model in spectrum()["models"]]
    for model in models:
        model["layers"] = [{**layer, "kind": HOSTILE, "name": HOSTILE} for layer in model["layers"]]
    comparisons = [{"who": HOSTILE, "value": 0.5, "note": HOSTILE_LINK}]
    return {
        "recipe": {"name": HOSTILE, "recipe": {HOSTILE: HOSTILE_LINK, "data": {"name": HOSTILE}}},
        "environment": {HOSTILE: HOSTILE},
        "result": result(protocol=HOSTILE, comparisons=comparisons),
        "metrics": curves(2),
        "predictions": guesses([HOSTILE, HOSTILE_LINK, "x" * 300]),
        "mistakes": {"cases": [case]},
        "spectrum": {"models": models},
    }


def _events() -> dict[str, Any]:
    rules = [{"who": "Markov-1", "value": 0.41, "note": "same test events"}]
    return {**COMMON, "result": result(value=0.45, comparisons=rules), "metrics": curves(4)}


LONG = [[math.sin(t / 900) + (50.0 if t == 31_234 else 0) for t in range(50_000)]] * 2


def with_classes(*names: str, each: int = 11, wrong: int = 3) -> dict[str, Any]:
    return {**everything(), "predictions": guesses(list(names), each, wrong)}


KINDS = {
    "everything": everything,
    "two classes": lambda: with_classes("no", "yes", each=400, wrong=300),
    "26 classes": lambda: with_classes(*ascii_lowercase),
    "60 classes": lambda: with_classes(*(f"sort {i}" for i in range(60))),
    "regression": _regression,
    "closed form": lambda: {
        **COMMON,
        "result": result(comparisons=OTHERS),
        "predictions": guesses(["a", "b"]),
    },
    "events": _events,
    "no test set": lambda: {
        **COMMON,
        "result": result(value=math.nan, metrics={}),
        "metrics": curves(3),
    },
    "one mistake": lambda: {**everything(), "mistakes": {"cases": [mistake(1, 1)]}},
    "no mistakes": lambda: {**with_classes("a", "b", wrong=0), "mistakes": {"cases": []}},
    "one epoch": lambda: {**everything(), "metrics": curves(1)},
    "nans": _nans,
    "hostile": _hostile,
    "long": lambda: {
        **everything(),
        "mistakes": {"cases": [{**mistake(), "values": LONG}, mistake(2000, 14)] * 2},
        "metrics": curves(2000),
    },
    "deep": lambda: {**everything(), "metrics": curves(9, 24), "spectrum": spectrum(24, 16, 1000)},
    "interrupted": lambda: {**COMMON, "metrics": curves(3)},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What returns the folder of a kind of run, with its report; each is made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def made(kind: str) -> Path:
        write_report(write(folder / kind, KINDS[kind]()))
        return folder / kind

    return made


@pytest.fixture(params=list(KINDS))
def run(request: pytest.FixtureRequest, runs: Callable[[str], Path]) -> Path:
    """The folder of each kind of run."""
    return runs(request.param)


@pytest.fixture
def written() -> Callable[[Path, dict[str, Any]], Path]:
    """What writes a run's folder."""
    return write


@pytest.fixture
def parts() -> SimpleNamespace:
    """What makes up the parts of a run."""
    given = (everything, result, curves, guesses, mistake, spectrum)
    return SimpleNamespace(OTHERS=OTHERS, **{each.__name__: each for each in given})

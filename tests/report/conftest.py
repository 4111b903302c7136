"""What the report's tests share: a browser, and folders of made-up runs."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Chromium reads requests from descriptor 3 and answers on 4.
LAUNCH = "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); "
LAUNCH += "os.execvp(c[0], c)"


class Browser:
    """Headless Chromium, spoken to in its DevTools protocol: JSON messages that end in a NUL."""

    def __init__(self, program: str, profile: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (*_pipe(), *_pipe())]
        read, self._write, self._read, write = ends
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        quiet = ("--no-first-run", "--disable-extensions", "--hide-scrollbars")
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

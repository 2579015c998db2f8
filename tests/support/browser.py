"""A headless Chromium, told what to do over its DevTools protocol, through a pair of pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--remote-debugging-pipe", "--window-size=1280,1500"),
)


def find_browser() -> str | None:
    """The path of a Chromium; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One tab. problems: what the browser complains of: exceptions, and what the content policy forbids"""

    def __init__(self, browser: Browser, session: str) -> None:
        self.problems: list[str] = []
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, self.problems, **parameters)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Raises RuntimeError for what it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "it threw"))
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Of the first such element, as it is shown; empty: there is none."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def write(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: str, scheme: str = "light") -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(answer["data"]))


class Browser:
    """A process of Chromium. It reads commands from its file 3, and writes answers and events to file 4."""

    def __init__(self, path: str, profile: str) -> None:
        ours, theirs = os.pipe(), os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in (ours[0], theirs[1])]  # beyond 3 and 4
        os.close(ours[0])
        os.close(theirs[1])
        quiet = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, source, file) for source, file in ((high[0], 3), (high[1], 4), (quiet, 2))]
        arguments = [path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setpgroup=0)
        for file in (*high, quiet):
            os.close(file)
        self._write = os.fdopen(ours[1], "wb", buffering=0)
        self._read = os.fdopen(theirs[0], "rb", buffering=0)
        self._left = b""
        self._last = 0

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        return Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def call(
        self, method: str, session: str | None = None, problems: list[str] | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """Its answer. Problems that are told meanwhile are added to the list."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            if problems is not None and (problem := _problem(answer)):
                problems.append(problem)

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._write.close()
        self._read.close()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._read.fileno(), 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def _problem(event: dict[str, Any]) -> str:
    if event.get("method") == "Runtime.exceptionThrown":
        return str(event["params"]["exceptionDetails"])
    if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
        return str(event["params"]["entry"]["text"])
    return ""


@contextmanager
def browsing(path: str) -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(path, profile)
        try:
            yield browser
        finally:
            browser.close()

"""How slow operations (downloads, conversions) report their progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress(Protocol):
    """What slow operations report to: stages, one after the other, and how far each is."""

    def stage(self, text: str) -> None:
        """A new stage begins, called ``text``; the one before it is over."""

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` units of the current stage are done. The stage chooses the unit, mostly bytes."""


class SilentProgress:
    """Reports nothing: the default."""

    def stage(self, text: str) -> None:
        pass

    def update(self, done: int, total: int) -> None:
        pass


class LogProgress:
    """Logs a line every ``every_s`` seconds of a stage, none for shorter ones: for processes without a terminal.

    clock: in seconds
    """

    def __init__(self, log: logging.Logger, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self.stage("")

    def stage(self, text: str) -> None:
        self._text, self._said_at = text, self._clock()

    def update(self, done: int, total: int) -> None:
        if self._clock() - self._said_at >= self._every_s:
            self._said_at = self._clock()
            self._log.info("%s: %d %%", self._text, 100 * done // max(total, 1))


class RichProgress:
    """Bars on standard error: ``with RichProgress() as progress: resolve_model(name, cache_dir, progress)``."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def stage(self, text: str) -> None:
        self._finish()
        self._task = self._bars.add_task(text, total=None)

    def update(self, done: int, total: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def _finish(self) -> None:
        if self._task is None:
            return
        total = self._bars.tasks[self._task].total or 1
        self._bars.update(self._task, completed=total, total=total)
        self._task = None

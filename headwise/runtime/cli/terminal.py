"""The CLI's progress and log lines. They go to stderr, so that stdout has only the command's result."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwise.runtime.loader.progress import Progress, RichProgress


class LineProgress:
    """One line a stage with the seconds since the start: for logs, files and pipes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()

    def stage(self, text: str) -> None:
        print(f"[{self._clock() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def update(self, done: int, total: int) -> None:
        pass


@contextmanager
def progress() -> Iterator[Progress]:
    """Bars where stderr is a terminal, lines elsewhere."""
    if sys.stderr.isatty():
        with RichProgress() as bars:
            yield bars
    else:
        yield LineProgress()


@contextmanager
def until_signal() -> Iterator[list[int]]:
    """Ends the block quietly at SIGINT or SIGTERM, which is then in the list; the inside is unwound as by Ctrl-C."""
    caught = list[int]()

    def interrupt(number: int, _: object) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""Runs a section of `gpu_checks.py` in a process of its own, and once more from the next case on where one ends it.

The process says on its output what it finds, and which cases it begins and is through with, a line each (`report.py`).
One that crashes, hangs or breaks the GPU's context ends in a case, which becomes a failed row; the next process passes
over that one and those that are over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpu.report import FAILED, Recorder, Row, described, from_line

LEAST_S = 5.0
"""Nothing is begun with less time than this."""

BROKEN = 86
"""Exit status of a process whose GPU's context was broken by the case that it was in."""

_LOOK_S = 0.05


class ChildError(Exception):
    """A section's process did not end well."""


@dataclass
class Deadlines:
    """When a process is to be stopped, by `time.monotonic`. cases: those it is in, the innermost last, and theirs"""

    whole: float
    cases: list[tuple[str, float]] = field(default_factory=list)

    @property
    def next(self) -> float:
        return min([self.whole, *(deadline for _, deadline in self.cases)])


def lines_of(command: Sequence[str], deadlines: Deadlines) -> Iterator[str]:
    """What a process prints, line by line. It and its children are killed at the first of ``deadlines``, which may
    change meanwhile.

    Raises:
        ChildError: it was killed, or ended otherwise than it should; after the lines it printed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    late, over = threading.Event(), threading.Event()

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def watch() -> None:
        while not over.wait(min(_LOOK_S, max(0.0, deadlines.next - time.monotonic()))):
            if time.monotonic() >= deadlines.next:
                late.set()
                kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.monotonic()
    try:
        assert process.stdout is not None
        yield from process.stdout
        process.wait()
    finally:
        over.set()
        watcher.join()
        if process.poll() is None:
            kill()
            process.wait()
    if late.is_set():
        raise ChildError(f"stopped: not done after {time.monotonic() - began:.0f} s")
    if process.returncode:
        raise ChildError(_why(process.returncode))


def _why(status: int) -> str:
    if status == BROKEN:
        return "the GPU's context was broken: its process ended"
    if status < 0:
        with suppress(ValueError):
            return f"its process was ended by {signal.Signals(-status).name} (status {status}): see its output above"
    return f"its process ended with status {status}: see its output above"


def run_apart(
    name: str,
    command_of: Callable[[Sequence[str]], Sequence[str]],
    limit_s: float,
    case_s: float,
    emit: Callable[[Row], None],
) -> None:
    """Run a section to its end, in as many processes as it takes, and hand each row to ``emit``, once.

    command_of: the command that passes over such cases
    limit_s:    for all processes together
    case_s:     for each case
    """
    until, passed, told = time.monotonic() + limit_s, list[str](), set[str]()
    rows = Recorder(name, emit)
    while True:
        progress = Progress(Deadlines(until), case_s)
        try:
            for line in lines_of(command_of(passed), progress.deadlines):
                row = progress.take(line)
                if row is not None and row.name not in told:  # a case within which another one ended runs again
                    emit(row)
            return
        except (ChildError, ValueError, TypeError) as error:
            why = described(error)
        if progress.case is None:
            rows.fail("whole", why)
            return
        if progress.case not in progress.failed:
            rows.fail(progress.case, why)
        passed += [*progress.through, progress.case]
        told |= progress.told
        if until - time.monotonic() < LEAST_S:
            rows.fail("rest", f"not begun: the section's {limit_s:.0f} s are over")
            return


@dataclass
class Progress:
    """How far a section's process is.

    through: cases that are over, but for those within others
    told, failed: names of its rows, and of those that are failures
    """

    deadlines: Deadlines
    case_s: float
    through: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    @property
    def case(self) -> str | None:
        """The innermost one that it is in."""
        return self.deadlines.cases[-1][0] if self.deadlines.cases else None

    def take(self, line: str) -> Row | None:
        """What the process printed: a row, or None where it goes on to something else."""
        said = from_line(line)
        if isinstance(said, Row):
            self.told.add(said.name)
            if said.status == FAILED:
                self.failed.add(said.name)
            return said
        cases = self.deadlines.cases
        if not said.is_over:
            cases.append((said.case, time.monotonic() + self.case_s))
        elif self.case != said.case:
            raise ValueError(f"it says that it is through with {said.case}, and is in {self.case}")
        else:
            cases.pop()
            if not cases:
                self.through.append(said.case)
        return None

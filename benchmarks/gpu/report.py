"""Rows of `gpu_checks.py`: what was measured, what was aimed at, and the table and JSON made of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

MET, MISSED, STATED, SKIPPED, FAILED, VOID = "yes", "no", "", "skipped", "FAILED", "void"
"""What becomes of a row. Stated: there is no aim. Void: it would be met, but not all is right that was measured."""

PROOF = "correctness"
"""The section whose failures make all aims void that are met after it."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    measured: None where nothing was
    aim:      what ``measured`` should be at least, or at most where ``at_most``
    note:     sizes, or why there is no number
    """

    section: str
    name: str
    status: str
    measured: float | None = None
    unit: str = ""
    aim: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def aim_text(self) -> str:
        return "" if self.aim is None else f"{'<=' if self.at_most else '>='} {self.aim:g}"

    @property
    def measured_text(self) -> str:
        return "" if self.measured is None else f"{self.measured:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class CaseLine:
    """A process says that it begins with a case, or is through with it."""

    case: str
    is_over: bool


class BrokenError(BaseException):
    """The GPU's context is broken: nothing of what this process does from now on would say anything."""


class _PassedError(Exception):
    """This case is passed over."""


class Recorder:
    """Makes the rows of one section and hands each to ``emit`` at once, so that what is known survives a crash.

    tell:      is told of cases that begin and are over
    passed:    cases that are passed over: an earlier process was through with them, or ended there
    is_broken: whether the GPU can be used no more, whatever raised something
    """

    def __init__(
        self,
        section: str,
        emit: Callable[[Row], None],
        tell: Callable[[CaseLine], None] = lambda line: None,
        passed: Collection[str] = (),
    ) -> None:
        self._section, self._emit = section, emit
        self._tell, self._passed = tell, frozenset(passed)
        self.is_broken: Callable[[], bool] = lambda: False

    def add(
        self, name: str, measured: float, unit: str = "", *, least: float | None = None, most: float | None = None,
        note: str = "",
    ) -> None:  # fmt: skip
        """A number; NaN meets no aim."""
        aim, status = least if most is None else most, STATED
        if aim is not None:
            status = MET if (measured <= aim if most is not None else measured >= aim) else MISSED
        self._emit(Row(self._section, name, status, measured, unit, aim, most is not None, note))

    def state(self, name: str, note: str) -> None:
        """Words."""
        self.conclude(name, STATED, note)

    def check(self, name: str, holds: bool, note: str = "") -> None:
        """Something that is right, or a failure."""
        self.conclude(name, MET if holds else FAILED, note)

    def check_error(self, name: str, error: float, most: float, note: str = "") -> None:
        """A distance from what is right: above ``most``, or NaN, it is a failure."""
        self._emit(Row(self._section, name, MET if error <= most else FAILED, error, "", most, True, note))

    def conclude(self, name: str, status: str, note: str) -> None:
        """A row whose status is known."""
        self._emit(Row(self._section, name, status, note=note))

    def skip(self, name: str, why: str) -> None:
        self.conclude(name, SKIPPED, why)

    def fail(self, name: str, why: str) -> None:
        self.conclude(name, FAILED, why)

    @contextmanager
    def case(self, name: str, optional: bool = False) -> Iterator[Callable[[], None]]:
        """What is raised within becomes a failed row, or a skipped one: the section goes on with its next case.

        Its first statement calls what it is handed: a case that is to be passed over comes no further.

        Raises:
            BrokenError: behind the row, where the GPU can be used no more.
        """
        begun: list[str] = []

        def begin() -> None:
            if name in self._passed:
                raise _PassedError
            begun.append(name)
            self._tell(CaseLine(name, is_over=False))

        try:
            yield begin
        except _PassedError:
            return
        except Exception as error:
            is_broken = self.is_broken()
            (self.skip if optional and not is_broken else self.fail)(name, described(error))
            if is_broken:
                raise BrokenError(name) from error
        assert begun, f"case {name} does not begin by calling what it is handed"
        self._tell(CaseLine(name, is_over=True))


@dataclass
class Report:
    """All that a run has found so far, in files that are whole at any moment: who is killed leaves what he had.

    about:   card, versions and so on
    seconds: what each section took
    """

    about: dict[str, Any]
    markdown: Path | None = None
    result: Path | None = None
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> Row:
        """Take a row, and give it back as it counts: where the proof has failed, or was not finished, no aim is met."""
        if row.status == MET and row.aim is not None and row.section != PROOF and self._is_refuted:
            row = replace(row, status=VOID)
        self.rows.append(row)
        self.save()
        return row

    @property
    def _is_refuted(self) -> bool:
        return any(row.section == PROOF and row.status == FAILED for row in self.rows)

    @property
    def has_failures(self) -> bool:
        return any(row.status == FAILED for row in self.rows)

    def line(self) -> str:
        """The result, a line of JSON."""
        return json.dumps(result_of(self.about, self.rows, self.seconds))

    def save(self) -> None:
        for path, text in ((self.markdown, to_markdown(self.about, self.rows)), (self.result, self.line() + "\n")):
            if path is not None:
                new = path.with_name(f".{path.name}.new")
                new.write_text(text)
                os.replace(new, path)

    def show(self) -> None:
        """Print the table."""
        show_table(self.rows, "\n".join(f"{name} {value}" for name, value in self.about.items()))


def described(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def to_line(said: Row | CaseLine) -> str:
    return json.dumps(asdict(said))


def from_line(line: str) -> Row | CaseLine:
    """Raises ValueError or TypeError if it is neither."""
    values = json.loads(line)
    return CaseLine(**values) if "case" in values else Row(**values)


def result_of(about: Mapping[str, Any], rows: Sequence[Row], seconds: Mapping[str, float]) -> dict[str, Any]:
    """The result as it goes into JSON. ``seconds`` are those of each section."""
    results: dict[str, dict[str, float | None]] = {section: {} for section in seconds}
    for row in rows:
        if row.measured is not None:
            results.setdefault(row.section, {})[row.name] = _finite(row)

    def noted(status: str) -> dict[str, str]:
        return {row.full_name: row.note for row in rows if row.status == status}

    return {
        "benchmark": "gpu",
        **about,
        "results": results,
        "met": sum(row.status == MET for row in rows),
        "missed": {row.full_name: [_finite(row), row.aim_text] for row in rows if row.status == MISSED},
        "void": [row.full_name for row in rows if row.status == VOID],
        "failed": noted(FAILED),
        "skipped": noted(SKIPPED),
        "seconds": {section: round(spent, 1) for section, spent in seconds.items()},
    }


def _finite(row: Row) -> float | None:
    """What was measured; None where JSON has no such number."""
    return row.measured if row.measured is not None and math.isfinite(row.measured) else None


def show_table(rows: Sequence[Row], title: str) -> None:
    """Print all rows as one table; in Markdown, where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title, to_markdown({}, rows), sep="\n")
        return

    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in ("", "measured", "aim", "met", ""):
        table.add_column(column, justify="right" if column in ("measured", "aim") else "left", overflow="fold")
    previous = ""
    for row in rows:
        if row.section != previous:
            table.add_section()
        previous = row.section
        table.add_row(row.full_name, row.measured_text, row.aim_text, row.status, row.note)
    console = Console()
    Console(width=max(console.width, 160), markup=False, highlight=False).print(table)


def to_markdown(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The same as a table for the documentation."""
    lines = [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| | measured | aim | met | |", "| --- | ---: | ---: | --- | --- |"]
    for row in rows:
        cells = (row.full_name, row.measured_text, row.aim_text, row.status, row.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

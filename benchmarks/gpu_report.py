"""Rows of `gpu.py`: what was measured, what was aimed at, and the table and JSON made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

MET, MISSED, STATED, SKIPPED, FAILED = "yes", "no", "", "skipped", "FAILED"
"""What becomes of a row. Stated: there is no aim."""


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
    def aim_text(self) -> str:
        return "" if self.aim is None else f"{'<=' if self.at_most else '>='} {self.aim:g}"

    @property
    def measured_text(self) -> str:
        return "" if self.measured is None else f"{self.measured:.4g} {self.unit}".rstrip()


class Recorder:
    """Makes the rows of one section and hands each to ``emit`` at once, so that what is known survives a crash."""

    def __init__(self, section: str, emit: Callable[[Row], None]) -> None:
        self._section, self._emit = section, emit

    def add(
        self, name: str, measured: float, unit: str = "", *, least: float | None = None, most: float | None = None,
        note: str = "",
    ) -> None:  # fmt: skip
        """A number; NaN meets no aim."""
        aim, status = least if most is None else most, STATED
        if aim is not None:
            status = MET if (measured <= aim if most is not None else measured >= aim) else MISSED
        self._emit(Row(self._section, name, status, measured, unit, aim, most is not None, note))

    def check(self, name: str, holds: bool, note: str = "") -> None:
        """Something that is right, or a failure."""
        self._emit(Row(self._section, name, MET if holds else FAILED, note=note))

    def skip(self, name: str, why: str) -> None:
        self._emit(Row(self._section, name, SKIPPED, note=why))

    def fail(self, name: str, why: str) -> None:
        self._emit(Row(self._section, name, FAILED, note=why))

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What is raised within becomes a failed row: the section goes on with its next case."""
        try:
            yield
        except Exception as error:
            self.fail(name, described(error))


def described(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def to_line(row: Row) -> str:
    return json.dumps(asdict(row))


def from_line(line: str) -> Row:
    return Row(**json.loads(line))


def result_of(about: Mapping[str, str], rows: Sequence[Row], seconds: Mapping[str, float]) -> dict[str, Any]:
    """The result as it goes into JSON. ``seconds`` are those of each section."""
    results: dict[str, dict[str, float | None]] = {section: {} for section in seconds}
    for row in rows:
        if row.measured is not None:
            results[row.section][row.name] = _finite(row)

    def noted(status: str) -> dict[str, str]:
        return {f"{row.section}.{row.name}": row.note for row in rows if row.status == status}

    return {
        "benchmark": "gpu",
        **about,
        "results": results,
        "met": sum(row.status == MET for row in rows),
        "missed": {f"{row.section}.{row.name}": [_finite(row), row.aim_text] for row in rows if row.status == MISSED},
        "failed": noted(FAILED),
        "skipped": noted(SKIPPED),
        "seconds": {section: round(spent, 1) for section, spent in seconds.items()},
    }


def _finite(row: Row) -> float | None:
    """What was measured; None where JSON has no such number."""
    return row.measured if row.measured is not None and math.isfinite(row.measured) else None


def show_table(rows: Sequence[Row], title: str) -> None:
    """Print all rows as one table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left")
    for column, justify in (("", "left"), ("measured", "right"), ("aim", "right"), ("met", "left"), ("", "left")):
        table.add_column(column, justify=justify, overflow="fold")
    previous = ""
    for row in rows:
        if row.section != previous:
            table.add_section()
        previous = row.section
        table.add_row(f"{row.section}.{row.name}", row.measured_text, row.aim_text, row.status, row.note)
    console = Console()
    Console(width=max(console.width, 160), markup=False, highlight=False).print(table)


def to_markdown(about: Mapping[str, str], rows: Sequence[Row]) -> str:
    """The same as a table for the documentation."""
    lines = [", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| | measured | aim | met | |", "| --- | ---: | ---: | --- | --- |"]
    for row in rows:
        cells = (f"{row.section}.{row.name}", row.measured_text, row.aim_text, row.status, row.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

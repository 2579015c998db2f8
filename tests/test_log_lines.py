"""Log lines: to stderr, and for other processes that ask."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

import pytest

from headwise.log_lines import MOST_LINES, LatestLines, show_log_lines

log = logging.getLogger("headwise.of_this_test")


@pytest.fixture(autouse=True)
def shown() -> Iterator[None]:
    logger = logging.getLogger("headwise")
    before = logger.handlers, logger.level, logger.propagate
    show_log_lines()
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_they_go_to_whatever_stderr_is_when_they_come() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        log.info("loaded %d weights", 3)
    assert error.getvalue().endswith(" loaded 3 weights\n")


def test_another_process_gets_each_line_once() -> None:
    lines = LatestLines.kept()
    log.info("one")
    log.warning("two")
    count, told = lines.since(0)
    assert told == [(logging.INFO, "one"), (logging.WARNING, "two")]
    assert lines.since(count) == (count, [])
    log.info("three")
    assert lines.since(count) == (3, [(logging.INFO, "three")])


def test_of_more_lines_than_are_kept_the_last_are_given() -> None:
    lines = LatestLines.kept()
    for number in range(MOST_LINES + 5):
        log.info("%d", number)
    count, told = lines.since(2)
    assert count == MOST_LINES + 5
    assert [text for _, text in told] == [str(number) for number in range(5, MOST_LINES + 5)]


def test_a_line_that_cannot_be_written_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    lines = LatestLines.kept()
    log.info("%d", "no number")
    assert lines.since(0) == (0, [])

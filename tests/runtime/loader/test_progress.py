"""Progress in a log."""

from __future__ import annotations

import logging

import pytest

from headwise.runtime.loader.progress import LogProgress


def test_a_long_stage_has_a_log_line_every_few_seconds_and_a_short_one_has_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = iter(range(100))
    progress = LogProgress(logging.getLogger("headwise"), every_s=5.0, clock=lambda: next(seconds))
    with caplog.at_level(logging.INFO):
        for stage, steps in (("a short one", 3), ("a long one", 20)):
            progress.stage(stage)
            for done in range(steps):
                progress.update(done, steps)
    assert [record.message for record in caplog.records] == [f"a long one: {percent} %" for percent in (20, 45, 70, 95)]

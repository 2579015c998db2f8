"""Time by which silence is measured: what was slept through does not count."""

from __future__ import annotations

import pytest

from headwise.liveness_clock import LONGEST_S, LivenessClock


@pytest.mark.parametrize("uptime_s", [0.0, 1e9])
def test_time_passes_as_on_the_clock_while_it_is_looked_at_often(uptime_s: float) -> None:
    now = [uptime_s]
    clock = LivenessClock(lambda: now[0])
    started = clock()
    for _ in range(1000):
        now[0] += LONGEST_S / 4
        clock()
    assert clock() - started == 250 * LONGEST_S


@pytest.mark.parametrize("slept_s", [60.0, 1e6])
def test_of_a_long_time_between_two_looks_a_moment_counts(slept_s: float) -> None:
    now = [1e9]
    clock = LivenessClock(lambda: now[0])
    started = clock()
    now[0] += slept_s
    assert clock() - started == LONGEST_S
    assert clock() - started == LONGEST_S

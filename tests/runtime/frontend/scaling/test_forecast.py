"""The load to count on: trends are read ahead, chance is not followed, and what really changes counts at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling.forecast import MAX_GROWTH, Expected, LoadHistory


def expected(seconds: int, per_second: Callable[[int], list[float]], ahead_s: float = 0.0) -> Expected:
    """After so many seconds, in each of which requests of these engine-seconds arrived."""
    history, arrivals = LoadHistory(), Arrivals()
    for second in range(seconds + 1):
        history.add(1e6 + second, arrivals)
        sizes = per_second(second)
        arrivals = Arrivals(
            arrivals.requests + len(sizes),
            arrivals.seconds + sum(sizes),
            arrivals.squares + sum(size**2 for size in sizes),
        )
    found = history.expected(ahead_s)
    assert found is not None
    return found


def test_a_steady_load_is_expected_to_go_on() -> None:
    for seconds in (10, 100, 1000):
        found = expected(seconds, lambda second: [0.5, 1.5] * 3, ahead_s=60.0)
        assert (found.rate, found.mean_s) == pytest.approx((6.0, 1.0))
        assert found.variation == pytest.approx(0.25)


def test_a_trend_is_read_off_where_an_engine_will_serve() -> None:
    found = expected(600, lambda second: [1.0] * (10 + second // 30), ahead_s=60.0)
    assert found.rate == pytest.approx(10 + 600 / 30 + 60 / 30, rel=0.06)
    found = expected(600, lambda second: [1.0] * (40 - second // 30), ahead_s=60.0)
    assert found.rate == pytest.approx(40 - 600 / 30 - 60 / 30, rel=0.06)


def test_a_load_that_changes_at_once_counts_within_a_minute() -> None:
    for before, then in ((2, 20), (20, 2)):
        found = expected(660, lambda second, before=before, then=then: [1.0] * (before if second < 600 else then))
        assert found.rate == pytest.approx(then, rel=0.01)


def test_prompts_that_become_longer_count_within_a_minute() -> None:
    found = expected(660, lambda second: [1.0 if second < 600 else 5.0, 1.5])
    assert found.mean_s == pytest.approx(3.25, rel=0.02)


def test_no_line_promises_more_than_it_may() -> None:
    found = expected(300, lambda second: [1.0] * (second // 3), ahead_s=150.0)
    assert found.rate <= MAX_GROWTH * 50


def test_chance_moves_it_less_than_the_last_minute_would() -> None:
    draw = random.Random(3)
    found, minute = list[float](), list[float]()
    history, arrivals, seen = LoadHistory(), Arrivals(), [(0, 0.0)]
    for second in range(6000):
        history.add(float(second), arrivals)
        sizes = [draw.lognormvariate(0.0, 1.3) for _ in range(draw.randint(0, 6))]
        arrivals = Arrivals(
            arrivals.requests + len(sizes), arrivals.seconds + sum(sizes), arrivals.squares + sum(x * x for x in sizes)
        )
        seen.append((arrivals.requests, arrivals.seconds))
        if second > 600 and second % 60 == 0:
            now = history.expected(40.0)
            assert now is not None
            found.append(now.rate * now.mean_s)
            minute.append((seen[-1][1] - seen[-61][1]) / 60)
    assert _deviation(found) < 0.8 * _deviation(minute)


def test_who_counts_anew_is_watched_anew() -> None:
    history = LoadHistory()
    for second in range(100):
        history.add(float(second), Arrivals(10 * second, 10.0 * second, 10.0 * second))
    history.add(100.0, Arrivals(0, 0.0, 0.0))
    assert history.expected(0.0) is None
    history.add(110.0, Arrivals(20, 20.0, 20.0))
    assert history.expected(0.0) == Expected(2.0, 1.0, 0.0)


def _deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5

"""What `/metrics` tells reaches Ray's gauges as it is."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from support.waiting import eventually

from headwise.actors import ray_metrics
from headwise.actors.ray_metrics import RayMetrics
from headwise.errors import DeploymentError


class Gauge:
    """As Ray's: a name with other labels is an error."""

    now: ClassVar[dict[tuple[str, frozenset[tuple[str, str]]], float]] = {}

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tags = name, set(tag_keys)

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self.tags
        self.now[self.name, frozenset(tags.items())] = value


@pytest.fixture(autouse=True)
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    monkeypatch.setattr(ray_metrics, "PUBLISH_S", 0.001)
    Gauge.now.clear()
    return Gauge.now


def test_counters_and_histograms_are_set_to_what_they_count(gauges: dict[Any, float]) -> None:
    registry = CollectorRegistry()
    tokens = Counter("headwise_tokens", "Tokens.", ("server",), registry=registry).labels("s")
    Histogram("headwise_wait_seconds", "Waits.", registry=registry, buckets=(1.0,)).observe(0.5)
    metrics = RayMetrics("d", registry.collect)
    name = "headwise_tokens_total", frozenset({("deployment", "d"), ("server", "s")})
    for expected in (3.0, 5.0):
        tokens.inc(expected - gauges.get(name, 0.0))
        eventually(lambda expected=expected: gauges.get(name) == expected)
    metrics.close()
    metrics.close()
    assert gauges["headwise_wait_seconds_bucket", frozenset({("deployment", "d"), ("le", "1.0")})] == 1.0
    assert gauges["headwise_wait_seconds_sum", frozenset({("deployment", "d")})] == 0.5
    assert not [each for each in gauges if each[0].endswith("_created")]


@pytest.mark.parametrize("error", [DeploymentError("away"), RuntimeError("Ray is being started again")])
def test_a_source_that_does_not_answer_is_asked_again(gauges: dict[Any, float], error: Exception) -> None:
    registry = CollectorRegistry()
    Counter("headwise_tokens", "Tokens.", registry=registry).inc()
    answers = iter([error, *[None] * 10_000])

    def collect() -> Any:
        if failure := next(answers):
            raise failure
        return registry.collect()

    metrics = RayMetrics("d", collect)
    eventually(lambda: bool(gauges))
    metrics.close()

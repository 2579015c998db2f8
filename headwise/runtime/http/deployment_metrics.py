"""What a deployment tells of itself (`Client.stats`), for Prometheus."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headwise.errors import DeploymentError
from headwise.runtime.client.client import Client
from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S

Stats = Mapping[str, Any]

ANSWER_S = 2.0
"""Longest wait for the scheduler: who probes does not wait for long."""
_FRESH_S = 0.5
"""Engines report as often: asking more often tells nothing new."""


class DeploymentView:
    """The deployment's statistics, asked for at most every `_FRESH_S`, however many ask.

    restarts: of engines since this server looks, by name: each new epoch of an engine is one
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._stats: dict[str, Any] = {}
        self._fresh_until = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._epochs: dict[str, int] = {}
        self.restarts: dict[str, int] = {}

    async def stats(self) -> dict[str, Any]:
        """Raises `DeploymentError` if the scheduler does not answer soon: it may be about to come back."""
        if self._asking is None and self._clock() >= self._fresh_until:
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._asking), ANSWER_S)
            except asyncio.TimeoutError:
                raise DeploymentError(f"the scheduler has not answered for {ANSWER_S:g} s; try again later") from None
        return self._stats

    async def _ask(self) -> None:
        try:
            self._stats = await self._client.astats()
            self._fresh_until = self._clock() + _FRESH_S
            self._count_restarts()
        finally:
            self._asking = None

    async def ready_engines(self) -> int:
        """Engines that take requests."""
        return sum(
            engine["work"]["accepts"] and not engine["is_leaving"] and engine["silent_s"] <= STATUS_TIMEOUT_S
            for engine in (await self.stats())["engines"].values()
        )

    def _count_restarts(self) -> None:
        for name, engine in self._stats["engines"].items():
            known = self._epochs.setdefault(name, engine["epoch"])
            self.restarts[name] = self.restarts.get(name, 0) + (known != engine["epoch"])
            self._epochs[name] = engine["epoch"]


class DeploymentMetrics(Collector):
    """One moment's statistics as metrics. An engine that is starting has none of its own yet."""

    def __init__(self, stats: Stats, restarts: Mapping[str, int]) -> None:
        self._scheduler: Stats = stats["scheduler"]
        self._fleet: Stats = stats["fleet"]
        self._engines: dict[str, Stats] = dict(stats["engines"])
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        yield from self._of_scheduler()
        yield from self._of_queues()
        yield from self._of_work()
        yield from self._of_caches()

    def _of_scheduler(self) -> Iterator[Metric]:
        outcomes = {key: self._scheduler[key] for key in ("routed", "rerouted", "delayed", "refused", "withdrawn")}
        yield _counter("scheduler_requests", "Requests by what the scheduler did with them.", "outcome", outcomes)
        yield _counter("routing_decisions", "Engines chosen, by why.", "reason", self._scheduler["decisions"])
        waiting = {key: self._scheduler[key] for key in ("pending", "queued")}
        yield _gauge(
            "scheduler_waiting", "Requests being prepared or waiting for an engine; the latter.", "state", waiting
        )
        numbers = {"wanted": self._fleet["number"], "reporting": len(self._engines)}
        yield _gauge("engines", "Engines that there are to be, and that report.", "state", numbers)

    def _of_queues(self) -> Iterator[Metric]:
        engines = self._engines
        yield _gauge("num_requests_running", "In the engine's steps.", "engine", _each(engines, "work", "running"))
        yield _gauge("num_requests_waiting", "In the engine's queue.", "engine", _each(engines, "work", "waiting"))
        yield _gauge(
            "engine_backlog_seconds", "Of computing before a new request starts.", "engine", _each(engines, "backlog_s")
        )
        yield _gauge("engine_silent_seconds", "Since the engine's last report.", "engine", _each(engines, "silent_s"))
        yield _counter("engine_restarts", "Engines or workers started anew.", "engine", self._restarts)

    def _of_work(self) -> Iterator[Metric]:
        engines = self._engines
        done = CounterMetricFamily("headwise_engine_requests", "Requests by their end.", labels=("engine", "outcome"))
        for outcome in ("finished", "aborted", "failed"):
            for name, count in _each(engines, "requests", outcome).items():
                done.add_metric((name, outcome), count)
        yield done
        preemptions = _each(engines, "requests", "preemptions")
        yield _counter("num_preemptions", "Requests taken out of a batch for want of blocks.", "engine", preemptions)
        yield _counter("engine_generation_tokens", "Tokens produced.", "engine", _each(engines, "output_tokens"))

    def _of_caches(self) -> Iterator[Metric]:
        engines = self._engines
        blocks = GaugeMetricFamily("headwise_kv_cache_blocks", "Blocks.", labels=("engine", "tier", "state"))
        for tier, where in (("device", "cache"), ("host", "host")):
            for state in ("free", "cached", "held"):
                for name, count in _each(engines, where, f"{state}_blocks").items():
                    blocks.add_metric((name, tier, state), count)
        yield blocks
        held, total = _each(engines, "cache", "held_blocks"), _each(engines, "cache", "total_blocks")
        usage = {name: held[name] / total[name] for name in held if total[name]}
        yield _gauge("kv_cache_usage_ratio", "Share of the device's blocks that requests hold.", "engine", usage)
        yield _counter("prefix_cache_queried_tokens", "Looked up.", "engine", _each(engines, "cache", "queried_tokens"))
        yield self._hits()
        for what in ("evicted", "recycled"):
            gone = _each(engines, "cache", f"{what}_blocks")
            yield _counter(f"kv_cache_{what}_blocks", f"Blocks of the device that were {what}.", "engine", gone)

    def _hits(self) -> Metric:
        hits = CounterMetricFamily(
            "headwise_prefix_cache_hit_tokens",
            "Tokens served by the cache, by the tier they were on.",
            labels=("engine", "tier"),
        )
        of_storage = _each(self._engines, "storage", "hit_tokens")
        of_host = _each(self._engines, "cache", "host_hit_tokens")
        for name, all_hits in _each(self._engines, "cache", "hit_tokens").items():
            below, storage = of_host[name], of_storage.get(name, 0)
            tiers = {"device": all_hits - below, "host": max(0, below - storage), "storage": storage}
            for tier, tokens in tiers.items():
                hits.add_metric((name, tier), tokens)
        return hits


def _each(engines: Mapping[str, Stats], *path: str) -> dict[str, float]:
    """A number by engine, of those that have it."""
    found: dict[str, float] = {}
    for name, engine in sorted(engines.items()):
        value: Any = engine
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = float(value)
    return found


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(f"headwise_{name}", text, labels=(label,)), values)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"headwise_{name}", text, labels=(label,)), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, count in values.items():
        family.add_metric((value,), count)
    return family

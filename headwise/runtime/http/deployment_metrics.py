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
_POOLS = {"device": "cache", "host": "host"}
"""Where an engine's statistics tell of a tier's pool."""
_DIRECTIONS = ("load", "store", "fetch", "put", "peer")


class DeploymentView:
    """The deployment's statistics, asked for at most every `_FRESH_S`, however many ask."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._stats: dict[str, Any] = {}
        self._fresh_until = -math.inf
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def stats(self) -> dict[str, Any]:
        """Raises `DeploymentError` if the scheduler does not answer soon: it may be about to come back."""
        if self._asking is None and self._clock() >= self._fresh_until:
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking is None:
            return self._stats
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), ANSWER_S)
        except TimeoutError:
            raise DeploymentError(f"the scheduler has not answered for {ANSWER_S:g} s; try again later") from None

    def expire(self) -> None:
        """Something has been changed: what was told before does not count any more."""
        self._fresh_until, self._asking = -math.inf, None

    async def _ask(self) -> dict[str, Any]:
        this = asyncio.current_task()
        try:
            stats: dict[str, Any] = await self._client.astats()
            if self._asking is this:
                self._stats, self._fresh_until = stats, self._clock() + _FRESH_S
            return stats
        finally:
            if self._asking is this:
                self._asking = None

    async def is_on_demand(self) -> bool:
        """Whether the deployment has no engines while there are no requests, and the first one gets one."""
        return bool((await self.stats())["fleet"]["is_on_demand"])

    async def ready_engines(self) -> int:
        """Engines that take requests."""
        return sum(
            engine["work"]["accepts"] and not engine["is_leaving"] and engine["silent_s"] <= STATUS_TIMEOUT_S
            for engine in (await self.stats())["engines"].values()
        )


class DeploymentMetrics(Collector):
    """One moment's statistics as metrics. An engine that is starting has none of its own yet.

    tenant: the only one that is told of; empty: all are
    """

    def __init__(self, stats: Stats, tenant: str = "") -> None:
        self._scheduler: Stats = stats["scheduler"]
        self._tenants: dict[str, Stats] = {
            name: counts for name, counts in self._scheduler["tenants"].items() if tenant in ("", name)
        }
        self._fleet: Stats = stats["fleet"]
        self._engines: dict[str, Stats] = dict(stats["engines"])
        self._encoders: dict[str, Stats] = dict(stats["encoders"])

    def collect(self) -> Iterator[Metric]:
        yield from self._of_scheduler()
        yield from self._of_tenants()
        yield from self._of_queues()
        yield from self._of_work()
        yield from self._of_caches()
        yield from self._of_transfers()
        yield from self._of_peers()
        yield from self._of_encoders()

    def _of_scheduler(self) -> Iterator[Metric]:
        outcomes = {key: self._scheduler[key] for key in ("routed", "rerouted", "delayed", "refused", "withdrawn")}
        yield _counter("scheduler_requests", "Requests by what the scheduler did with them.", "outcome", outcomes)
        yield _counter("routing_decisions", "Engines chosen, by why.", "reason", self._scheduler["decisions"])
        expected = self._scheduler["expected_tokens"]
        yield _counter(
            "routing_expected_tokens", "Of prompts, by where the router expects them to come from.", "source", expected
        )
        waiting = {key: self._scheduler[key] for key in ("pending", "queued")}
        yield _gauge(
            "scheduler_waiting", "Requests being prepared or waiting for an engine; the latter.", "state", waiting
        )
        numbers = {"wanted": self._fleet["number"], "reporting": len(self._engines)}
        yield _gauge("engines", "Engines that there are to be, and that report.", "state", numbers)

    def _of_tenants(self) -> Iterator[Metric]:
        """By who has their keys; nothing where there are no tenants."""
        tenants = self._tenants
        done = {end: _each(tenants, end) for end in ("routed", "refused")}
        text = "Requests by what the scheduler did with them."
        yield _counters("tenant_requests", text, "outcome", done, "tenant")
        tokens = _each(tenants, "prompt_tokens")
        yield _counter("tenant_prompt_tokens", "Of requests that were sent to engines.", "tenant", tokens)
        yield _gauge("tenant_requests_waiting", "In the scheduler.", "tenant", _each(tenants, "waiting"))

    def _of_queues(self) -> Iterator[Metric]:
        engines = self._engines
        yield _gauge("num_requests_running", "In the engine's steps.", "engine", _each(engines, "work", "running"))
        yield _gauge("num_requests_waiting", "In the engine's queue.", "engine", _each(engines, "work", "waiting"))
        yield _gauge(
            "engine_backlog_seconds", "Of computing before a new request starts.", "engine", _each(engines, "backlog_s")
        )
        yield _gauge("engine_silent_seconds", "Since the engine's last report.", "engine", _each(engines, "silent_s"))
        restarts = _each(engines, "restarts")
        yield _counter("engine_restarts", "Starts anew of an engine or of its workers.", "engine", restarts)

    def _of_work(self) -> Iterator[Metric]:
        engines = self._engines
        done = {end: _each(engines, "requests", end) for end in ("finished", "aborted", "failed")}
        yield _counters("engine_requests", "Requests by their end.", "outcome", done)
        preemptions = _each(engines, "requests", "preemptions")
        yield _counter("num_preemptions", "Requests taken out of a batch for want of blocks.", "engine", preemptions)
        yield _counter("engine_generation_tokens", "Tokens produced.", "engine", _each(engines, "output_tokens"))
        reads = {state: _each(engines, "decode_reads", state) for state in ("tokens", "spared")}
        help_text = "Tokens that decodes had before them; those read for several at once that share a prefix."
        yield _counters("decode_context_tokens", help_text, "state", reads)
        guesses = {state: _each(engines, "speculation", state) for state in ("drafted", "accepted")}
        yield _counters("speculation_tokens", "Guessed in steps, and of these right.", "state", guesses)
        computing = _each(engines, "compute_s")
        yield _counter("engine_compute_seconds", "Seconds. Of forward passes.", "engine", computing)

    def _of_caches(self) -> Iterator[Metric]:
        engines = self._engines
        blocks = GaugeMetricFamily("headwise_kv_cache_blocks", "Blocks.", labels=("engine", "tier", "state"))
        for tier, where in _POOLS.items():
            for state in ("free", "cached", "held"):
                for name, count in _each(engines, where, f"{state}_blocks").items():
                    blocks.add_metric((name, tier, state), count)
        yield blocks
        held, total = _each(engines, "cache", "held_blocks"), _each(engines, "cache", "total_blocks")
        usage = {name: held[name] / total[name] for name in held if total[name]}
        yield _gauge("kv_cache_usage_ratio", "Share of the device's blocks that requests hold.", "engine", usage)
        yield _counter("prefix_cache_queried_tokens", "Looked up.", "engine", _each(engines, "cache", "queried_tokens"))
        yield self._hits()
        lost = _each(engines, "cache", "lost_window_tokens")
        yield _counter("prefix_cache_lost_window_tokens", "Not served because windows were gone.", "engine", lost)
        lost = _each(engines, "cache", "lost_checkpoint_tokens")
        yield _counter("prefix_cache_lost_checkpoint_tokens", "Not served for want of a checkpoint.", "engine", lost)
        evicted = {tier: _each(engines, where, "evicted_blocks") for tier, where in _POOLS.items()}
        yield _counters("kv_cache_evicted_blocks", "Blocks whose content was forgotten for the space.", "tier", evicted)
        retained = {tier: _each(engines, where, "retained_blocks") for tier, where in _POOLS.items()}
        text = "Blocks that requests have asked to keep for a time, and that are there."
        kept = GaugeMetricFamily("headwise_kv_cache_retained_blocks", text, labels=("engine", "tier"))
        yield _filled_by(kept, retained)
        recycled = _each(engines, "cache", "recycled_blocks")
        yield _counter("kv_cache_recycled_blocks", "Blocks that windows left while requests ran.", "engine", recycled)

    def _of_transfers(self) -> Iterator[Metric]:
        """Copies between the tiers, of each engine's rank 0."""
        engines = self._engines

        def by_direction(what: str) -> dict[str, dict[str, float]]:
            return {direction: _each(engines, "transfers", direction, what) for direction in _DIRECTIONS}

        for name, text, what in (
            ("blocks", "Blocks copied.", "blocks"),
            ("failed_blocks", "Blocks whose copy failed or came too late.", "failed_blocks"),
            ("bytes", "Bytes copied.", "bytes"),
            ("busy_seconds", "Seconds of copying.", "busy_s"),
            ("waited_seconds", "Seconds of these that forward passes stood still for.", "waited_s"),
        ):
            yield _counters(f"kv_transfer_{name}", text, "direction", by_direction(what))
        queued = GaugeMetricFamily(
            "headwise_kv_transfer_queued_blocks", "Blocks on their way.", labels=("engine", "direction")
        )
        yield _filled_by(queued, by_direction("queued_blocks"))

    def _of_peers(self) -> Iterator[Metric]:
        """What engines have fetched from each other; nothing where they do not."""
        engines = self._engines
        leases = {state: _each(engines, "peers", state) for state in ("asked", "answered", "given_up", "unknown_hints")}
        leases |= {state: _each(engines, "peers", "lent", state) for state in ("given", "refused", "expired")}
        yield _counters("peer_leases", "Of other engines' blocks, and of one's own.", "state", leases)
        blocks = {state: _each(engines, "peers", f"{state}_blocks") for state in ("leased", "fetched", "missed")}
        yield _counters("peer_blocks", "Of other engines: held for this one, come, and not.", "state", blocks)
        tokens = _each(engines, "peers", "hit_tokens")
        yield _counter("peer_hit_tokens", "Served because of what came from other engines.", "engine", tokens)

    def _of_encoders(self) -> Iterator[Metric]:
        """Images; nothing where there are no encoders."""
        encoders = self._encoders
        done = {end: _each(encoders, end) for end in ("encoded", "refused", "overloaded", "malformed")}
        yield _counters("encoder_images", "Images by what an encoder did with them.", "outcome", done, "encoder")
        yield _gauge("encoder_images_waiting", "In the encoder's queue.", "encoder", _each(encoders, "waiting"))
        found = {name: _each(encoders, "cache", name) for name in ("hits", "misses")}
        yield _counters("encoder_cache_queries", "Images, made before or not.", "outcome", found, "encoder")
        yield _gauge("encoder_cache_images", "Kept, as made.", "encoder", _each(encoders, "cache", "images"))
        yield _gauge("encoder_cache_bytes", "Bytes. Of the same.", "encoder", _each(encoders, "cache", "bytes"))

    def _hits(self) -> Metric:
        hits: dict[str, dict[str, float]] = {}
        for name, engine in sorted(self._engines.items()):
            for tier, tokens in hits_by_tier(engine).items() if "cache" in engine else ():
                hits.setdefault(tier, {})[name] = tokens
        return _counters("prefix_cache_hit_tokens", "Served by the cache, by the tier they were on.", "tier", hits)


def hits_by_tier(engine: Stats) -> dict[str, int]:
    """Tokens of prompts that each tier served, of an engine's statistics. What came from storage came by the host."""
    cache, storage = engine["cache"], engine["storage"]
    of_storage = storage["hit_tokens"] if storage else 0
    of_host = max(0, cache["host_hit_tokens"] - of_storage)
    return {"device": cache["hit_tokens"] - cache["host_hit_tokens"], "host": of_host, "storage": of_storage}


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


def _counters(
    name: str, text: str, label: str, values: Mapping[str, Mapping[str, float]], whose: str = "engine"
) -> Metric:
    """By engine, or by another process, and another label: ``values[label][engine]``."""
    return _filled_by(CounterMetricFamily(f"headwise_{name}", text, labels=(whose, label)), values)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"headwise_{name}", text, labels=(label,)), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _filled_by(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, Mapping[str, float]]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, engines in values.items():
        for engine, count in engines.items():
            family.add_metric((engine, label), count)
    return family

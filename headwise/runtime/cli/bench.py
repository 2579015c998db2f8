"""``headwise bench serve``: load a deployment and measure what its clients see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError, HeadwiseError
from headwise.runtime.cli.bench_workload import BenchRequest, Workload, arrival_times, make_requests
from headwise.runtime.loader.progress import Progress
from headwise.runtime.protocol.request import OutputDelta, SamplingParams, Usage

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.runtime.client.client import Client

OpenStream = Callable[[BenchRequest], AsyncIterator[OutputDelta]]
"""Sends a request and yields its deltas as they come."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """How requests are sent: ``concurrency`` at a time (closed loop), or ``rate`` a second (open loop).

    Exactly one of them is set. In the open loop, a request's clock starts when it was due.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("give either a concurrency (closed loop) or a rate (open loop)")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")

    def __str__(self) -> str:
        if self.rate is None:
            return f"closed loop, {self.concurrency} at a time"
        return f"open loop, {self.rate:g} requests/s (Poisson)"


@dataclass(frozen=True)
class Measured:
    """One request as its client saw it; seconds on one clock."""

    due: float
    first: float = 0.0
    last: float = 0.0
    output_tokens: int = 0
    usage: Usage = field(default_factory=Usage)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first - self.due

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


async def run_load(
    stream: OpenStream,
    requests: Sequence[BenchRequest],
    load: Load,
    seed: int = 0,
    on_done: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Send all requests as ``load`` says; in the order of ``requests``. A failed request does not end the others."""
    started = time.perf_counter()
    due = None if load.rate is None else started + arrival_times(len(requests), load.rate, seed)
    slots = asyncio.Semaphore(load.concurrency or len(requests))

    async def one(index: int) -> Measured:
        async with slots:
            if due is not None:
                await asyncio.sleep(float(due[index]) - time.perf_counter())
            measured = await _measure(
                stream, requests[index], time.perf_counter() if due is None else float(due[index])
            )
            on_done()
            return measured

    return await asyncio.gather(*(one(index) for index in range(len(requests))))


async def _measure(stream: OpenStream, request: BenchRequest, due: float) -> Measured:
    first = last = due
    tokens, usage = 0, Usage()
    try:
        async for delta in stream(request):
            if delta.token_ids:
                last = time.perf_counter()
                first = first if tokens else last
                tokens += len(delta.token_ids)
            usage = delta.usage or usage
    except HeadwiseError as error:
        return Measured(due, error=str(error))
    return Measured(due, first, last, tokens, usage)


def summarize(measured: Sequence[Measured]) -> dict[str, Any]:
    """Throughput, latencies and cache hits of a run; latencies and throughput are of the requests that succeeded.

    Raises `ConfigError` if none did.
    """
    good = [m for m in measured if m.error is None and m.output_tokens]
    if not good:
        reason = next((m.error for m in measured if m.error), "no tokens came back")
        raise ConfigError(f"all {len(measured)} requests failed; the first one: {reason}")
    duration = max(m.last for m in good) - min(m.due for m in measured)
    prompt = sum(m.usage.prompt_tokens for m in good)
    output = sum(m.output_tokens for m in good)
    return {
        "requests": len(measured),
        "failed": len(measured) - len(good),
        "duration_s": duration,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": output / duration,
        "prompt_tokens_per_s": prompt / duration,
        "ttft_s": percentiles([m.ttft_s for m in good]),
        "tpot_s": percentiles([m.tpot_s for m in good if m.tpot_s is not None]),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cache_hit_rate": sum(m.usage.cached_tokens for m in good) / prompt if prompt else 0.0,
    }


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float] | None:
    """`PERCENTILES` by name (``p50``), linearly interpolated; None without values."""
    if not len(values):
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def table(summary: dict[str, Any], title: str) -> Table:
    """A summary to look at."""
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    for column in ("", *(f"p{p}" for p in PERCENTILES)):
        out.add_column(column, justify="right" if column else "left")
    for key, label in (("ttft_s", "TTFT, ms"), ("tpot_s", "TPOT, ms")):
        values = summary[key]
        out.add_row(label, *("-" if values is None else f"{1000 * value:.1f}" for value in values.values()))
    out.add_section()
    for key, label, form in (
        ("requests_per_s", "requests/s", "{:.2f}"),
        ("output_tokens_per_s", "output tokens/s", "{:.1f}"),
        ("prompt_tokens_per_s", "prompt tokens/s", "{:.1f}"),
        ("cache_hit_rate", "cache hit rate", "{:.1%}"),
        ("failed", "failed requests", "{}"),
    ):
        out.add_row(label, form.format(summary[key]))
    return out


def bench_deployment(
    connect: Callable[[], Client], workload: Workload, load: Load, progress: Progress
) -> dict[str, Any]:
    """Run a workload against the deployment that ``connect`` connects to: the summary, and what was asked for.

    Raises `DeploymentError` if nothing answers there, `ConfigError` if every request failed.
    """
    requests = make_requests(workload)
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        progress.update(done, len(requests))

    with connect() as client:

        def stream(request: BenchRequest) -> AsyncIterator[OutputDelta]:
            sampling = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
            return client.astream(request.prompt.tolist(), sampling)

        progress.stage(f"sending {len(requests)} requests: {load}")
        measured = asyncio.run(run_load(stream, requests, load, workload.seed, on_done))
    return {**summarize(measured), "load": asdict(load), "workload": asdict(workload)}

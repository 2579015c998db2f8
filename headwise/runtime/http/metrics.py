"""What a server counts of the requests that it answers, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from headwise.runtime.protocol.request import FinishReason, OutputDelta

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RequestMetrics:
    """Histograms and counters of one server; they are its own, so each has a label that names the server."""

    def __init__(self, server: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._server = server
        self._ttft = self._histogram("time_to_first_token", "From a request's arrival to an answer's first token.")
        self._gap = self._histogram("inter_token_latency", "From one token of an answer to the next.", _GAPS)
        self._total = self._histogram("e2e_request_latency", "From a request's arrival to the end of an answer.")
        self._queue = self._histogram(
            "request_queue_time", "That an answer waited in its engine before its first step."
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("prompt_cached_tokens", "Those of prompts' tokens that a cache served.")
        self._output = self._counter("generation_tokens", "Tokens of answers.")
        self._ends = self._counters("answers", "Answers by how they ended; abort: also errors.", "finished_reason")
        self._spans = self._counters("trace_spans", "Spans for the collector of traces.", "outcome")
        self._responses = self._counters("http_responses", "Responses by path and status.", "path", "status")

    def response(self, path: str, status: int) -> None:
        self._responses.labels(self._server, path, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float, tokens: int) -> None:
        """A step added so many tokens, each after so long."""
        for _ in range(tokens):
            self._gap.observe(seconds)

    def finished(self, delta: OutputDelta, seconds: float) -> None:
        """The last delta of an answer, which tells its tokens."""
        self._total.observe(seconds)
        if delta.timings is not None:
            self._queue.observe(delta.timings.queue_s)
        if delta.usage is not None:
            self._prompt.inc(delta.usage.prompt_tokens)
            self._cached.inc(delta.usage.cached_tokens)
            self._output.inc(delta.usage.completion_tokens)

    def spans(self, outcome: str, number: int) -> None:
        """Spans of requests were ``sent`` to a collector of traces, or ``dropped``."""
        self._spans.labels(self._server, outcome).inc(number)

    def ended(self, reason: FinishReason | None) -> None:
        """An answer has ended; None: before its end."""
        self._ends.labels(self._server, (reason or FinishReason.ABORT).value).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        family = Histogram(
            f"headwise_{name}_seconds", f"Seconds. {text}", ("server",), registry=self.registry, buckets=buckets
        )
        return family.labels(self._server)  # once: to find it costs as much as to count

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text).labels(self._server)

    def _counters(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headwise_{name}", text, ("server", *labels), registry=self.registry)


class AnswerClock:
    """Times one answer, whose request arrived at ``began``."""

    def __init__(self, metrics: RequestMetrics, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._began = began
        self._clock = clock
        self._last: float | None = None

    def take(self, delta: OutputDelta) -> None:
        now, tokens = self._clock(), len(delta.token_ids)
        if tokens and self._last is None:
            self._metrics.first_token(now - self._began)
        elif tokens and self._last is not None:
            self._metrics.token_gap((now - self._last) / tokens, tokens)
        if tokens:
            self._last = now
        if delta.finish_reason is not None:
            self._metrics.finished(delta, now - self._began)

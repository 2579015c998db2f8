"""OpenTelemetry spans of HTTP requests. Imported only where they are asked for: it needs the extra ``otel``."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from headwise import __version__
from headwise.runtime.http.errors import ApiError
from headwise.runtime.http.metrics import RequestMetrics
from headwise.runtime.protocol.request import GenerationResult

log = logging.getLogger(__name__)

MAX_QUEUED = 2048
"""Spans that wait to be sent; those beyond are dropped and counted."""
MAX_BATCH = 256
SEND_S = 5.0
"""Longest wait for the collector to take a batch, attempts after the first one included."""
_GATHER_S = 0.5
_LAST_S = 1.0
"""For the last spans, when the server stops."""
_TRACE_PATH = "/v1/traces"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""The paths whose requests get spans, and what OpenTelemetry calls these requests."""


class Answering(Protocol):
    """An ASGI application that answers one request. results: what there is by now of its answers"""

    @property
    def results(self) -> Sequence[GenerationResult]: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class SpanQueue(SpanProcessor):
    """Hands spans that have ended to an exporter, on a thread of its own: whoever ends one never waits."""

    def __init__(self, exporter: SpanExporter, counts: RequestMetrics) -> None:
        self._exporter = exporter
        self._counts = counts
        self._queue: queue.Queue[ReadableSpan] = queue.Queue(MAX_QUEUED)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._counts.spans("dropped", 1)

    def shutdown(self) -> None:
        """Send what waits, if the collector takes it soon, and end. Idempotent."""
        self._stopping.set()
        self._thread.join(_LAST_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping.wait(_GATHER_S):
            self._send()
        self._send()

    def _send(self) -> None:
        while self._send_batch():
            pass

    def _send_batch(self) -> bool:
        """Whether more may wait."""
        batch: list[ReadableSpan] = []
        while len(batch) < MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        if batch:
            is_sent = self._export(batch)
            self._counts.spans("sent" if is_sent else "dropped", len(batch))
        return len(batch) == MAX_BATCH

    def _export(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # whatever a collector answers, the next batch is tried
            log.exception("spans could not be sent")
            return False


class Tracing:
    """Makes a span of each request that is traced: of all, but for those whose ``traceparent`` says that they are not.

    endpoint: of the collector: ``http://HOST:PORT``, or with the path at which it takes traces
    server:   this server's name
    counts:   counts spans that were sent and dropped
    """

    def __init__(self, endpoint: str, model: str, server: str, counts: RequestMetrics) -> None:
        self._model = model
        self._queue = SpanQueue(_exporter(endpoint), counts)
        resource = Resource({"service.name": "headwise", "service.version": __version__, "service.instance.id": server})
        provider = TracerProvider(ParentBased(ALWAYS_ON), resource, shutdown_on_exit=False)
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("headwise", __version__)

    def close(self) -> None:
        self._queue.shutdown()

    def traced(self, path: str, endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """The endpoint of a path; one that makes answers, within spans."""
        if path not in _OPERATIONS:
            return endpoint

        async def within_span(request: Request) -> Traced:
            span = self.begin(request.scope, _OPERATIONS[path])
            try:
                return Traced(self, await endpoint(request), span)
            except Exception as error:  # its body was refused
                self.end(span, ApiError.of(error).status, ())
                raise

        return within_span

    def begin(self, scope: Scope, operation: str) -> Span:
        """A span that begins now, as a child of the one in the request's ``traceparent``."""
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self._model,
        }
        return self._tracer.start_span(
            f"{operation} {self._model}", _parent(scope), SpanKind.SERVER, attributes=attributes
        )

    def end(self, span: Span, status: int, results: Sequence[GenerationResult]) -> None:
        """Seconds are those of the answer that took longest, tokens those of all."""
        if span.is_recording():
            span.set_attribute("http.response.status_code", status)
            for name, value in _numbers(results).items():
                span.set_attribute(name, value)
            ends = [result.finish_reason.value for result in results if result.finish_reason is not None]
            span.set_attribute("gen_ai.response.finish_reasons", ends)
            if len(ends) < max(1, len(results)):
                span.set_status(Status(StatusCode.ERROR, "it was refused, failed or cancelled"))
        span.end()


class Traced:
    """Answers as another application does, within a span that it ends."""

    def __init__(self, tracing: Tracing, answering: Answering, span: Span) -> None:
        self._tracing = tracing
        self._answering = answering
        self._span = span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._answering(scope, receive, watched)
        finally:
            self._tracing.end(self._span, status, self._answering.results)


def _numbers(results: Sequence[GenerationResult]) -> dict[str, float]:
    if not results:
        return {}
    longest = max((result.timings for result in results), key=lambda timings: timings.total_s)
    usages = [result.usage for result in results]
    return {
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
        "gen_ai.usage.cached_tokens": sum(usage.cached_tokens for usage in usages),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
        "gen_ai.latency.time_in_queue": longest.queue_s,
        "gen_ai.latency.time_in_model_prefill": max(0.0, longest.ttft_s - longest.queue_s),
        "gen_ai.latency.time_in_model_decode": max(0.0, longest.total_s - longest.ttft_s),
        "gen_ai.latency.time_to_first_token": longest.ttft_s,
    }


def _parent(scope: Scope) -> Context:
    """By W3C's Trace Context; what is none is nobody's child."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return TraceContextTextMapPropagator().extract(headers, Context())


def _exporter(endpoint: str) -> OTLPSpanExporter:
    url = endpoint.rstrip("/")
    if url.count("/") == 2:  # no path
        url += _TRACE_PATH
    return OTLPSpanExporter(url, timeout=SEND_S, compression=Compression.NoCompression)

"""Spans of requests, taken by a real collector's socket: what they tell, whose children they are, whom they hold up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.collector import Collector, attributes
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.scripted_http import MODEL, serving
from support.waiting import eventually
from support.whole_deployment import PROMPT, whole_deployment

from headwise import EngineConfig
from headwise.actors.http_server import check_http_start
from headwise.errors import ConfigError
from headwise.runtime.http import spans
from headwise.runtime.http.metrics import RequestMetrics
from headwise.runtime.http.spans import Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(spans, "_GATHER_S", 0.01)
    collector = Collector()
    yield collector
    collector.close()


@contextmanager
def tracing_to(url: str) -> Iterator[tuple[Tracing, RequestMetrics]]:
    counts = RequestMetrics("http-3")
    tracing = Tracing(url, MODEL, "http-3", counts)
    yield tracing, counts
    tracing.close()


def count(counts: RequestMetrics, outcome: str) -> float:
    name = "headwise_trace_spans_total"
    return counts.registry.get_sample_value(name, {"server": "http-3", "outcome": outcome}) or 0.0


def test_a_span_tells_of_times_and_cached_tokens(collector: Collector) -> None:
    with whole_deployment() as deployment, tracing_to(collector.url) as (tracing, counts):
        with serving(deployment, counts=counts, tracing=tracing) as served:
            body = {"prompt": PROMPT, "max_tokens": 4}
            served.http.post("/v1/completions", json=body).raise_for_status()
            eventually(lambda: len(collector.spans) == 1)
        (span,) = collector.spans
        told = attributes(span)
        assert span.name == f"text_completion {MODEL}"
        assert (told["http.request.method"], told["url.path"]) == ("POST", "/v1/completions")
        assert told["http.response.status_code"] == 200
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (len(PROMPT), 4)
        assert told["gen_ai.usage.cached_tokens"] > 0
        for what in ("queue", "model_prefill", "model_decode"):
            assert told[f"gen_ai.latency.time_in_{what}"] >= 0
        assert told["gen_ai.latency.time_to_first_token"] > 0
        assert span.end_time_unix_nano > span.start_time_unix_nano
        assert span.parent_span_id == b""
        assert count(counts, "sent") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_is_the_child_of_the_caller_s(
    collector: Collector, deployment: Deployment, core: ScriptedCore, stream: bool
) -> None:
    with tracing_to(collector.url) as (tracing, counts), serving(deployment, counts=counts, tracing=tracing) as served:
        messages = [{"role": "user", "content": "Hi"}]
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": messages, "max_tokens": 3, "n": 2, "stream": stream}
        served.http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
        eventually(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (f"chat {MODEL}", TRACE, PARENT)
    assert attributes(span)["gen_ai.usage.output_tokens"] == 6, "of both answers"


def test_a_response_of_openai_s_newer_form_is_a_chat(
    collector: Collector, deployment: Deployment, core: ScriptedCore
) -> None:
    with tracing_to(collector.url) as (tracing, counts), serving(deployment, counts=counts, tracing=tracing) as served:
        served.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 3}).raise_for_status()
        eventually(lambda: len(collector.spans) == 1)
    assert collector.spans[0].name == f"chat {MODEL}"
    assert attributes(collector.spans[0])["gen_ai.usage.output_tokens"] == 3


def test_a_caller_may_say_that_it_is_not_traced_and_nonsense_is_nobody_s_child(
    collector: Collector, deployment: Deployment, core: ScriptedCore
) -> None:
    with tracing_to(collector.url) as (tracing, counts), serving(deployment, counts=counts, tracing=tracing) as served:
        for traceparent in (f"00-{TRACE}-{PARENT}-00", "00-zz-1-01", "x" * 4000):
            headers = {"traceparent": traceparent}
            served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).raise_for_status()
        eventually(lambda: len(collector.spans) == 2)
    assert {span.parent_span_id for span in collector.spans} == {b""}
    assert TRACE not in {span.trace_id.hex() for span in collector.spans}


@pytest.mark.parametrize("body", [b'{"prompt": ""}', b'{"prompt": "a", "n": "two"}', b"{", b""])
def test_a_request_that_is_refused_is_an_error(
    collector: Collector, deployment: Deployment, core: ScriptedCore, body: bytes
) -> None:
    with tracing_to(collector.url) as (tracing, counts), serving(deployment, counts=counts, tracing=tracing) as served:
        headers = {"content-type": "application/json"}
        assert served.http.post("/v1/completions", content=body, headers=headers).status_code == 400
        eventually(lambda: len(collector.spans) == 1)
    assert collector.spans[0].status.code == 2
    assert attributes(collector.spans[0])["http.response.status_code"] == 400


def test_a_collector_that_does_not_answer_holds_nobody_up(
    collector: Collector, deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "SEND_S", 0.5)
    monkeypatch.setattr(spans, "_LAST_S", 30.0)
    monkeypatch.setattr(spans, "MAX_QUEUED", 4)
    collector.gate.clear()
    with tracing_to(collector.url) as (tracing, counts):
        with serving(deployment, counts=counts, tracing=tracing) as served:
            for _ in range(12):
                served.http.post("/v1/completions", json={"prompt": "a"}).raise_for_status()
        assert count(counts, "dropped") >= 12 - 2 * 4 - 1, "what the queue cannot hold is counted"
    assert count(counts, "dropped") + count(counts, "sent") == 12, "nothing is lost uncounted"
    assert count(counts, "sent") == 0


def test_a_collector_that_is_not_there_is_counted(
    deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "SEND_S", 0.2)
    monkeypatch.setattr(spans, "_GATHER_S", 0.01)
    with tracing_to("http://127.0.0.1:9") as (tracing, counts):
        with serving(deployment, counts=counts, tracing=tracing) as served:
            served.http.post("/v1/completions", json={"prompt": "a"}).raise_for_status()
        eventually(lambda: count(counts, "dropped") == 1)


# ---- the flag ----


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://a", "http://", "http://a:b", "http://[::1"])
def test_what_is_no_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint must be a URL"):
        EngineConfig(http=8000, otlp_endpoint=endpoint)


def test_spans_need_http() -> None:
    with pytest.raises(ConfigError, match="give http"):
        EngineConfig(otlp_endpoint="http://localhost:4318")


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_extra_the_flag_is_refused_before_anything_starts(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> None:
        if missing == "opentelemetry":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr("headwise.runtime.config.http.find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"pip install 'headwise\[otel\]'"):
        check_http_start(EngineConfig(http=8000, otlp_endpoint="http://localhost:4318"))


def test_only_the_flag_imports_opentelemetry() -> None:
    """The application, its actors and the command work without it."""
    without = "import sys; sys.modules['opentelemetry.exporter'] = None"
    parts = "import headwise.runtime.http.app, headwise.runtime.cli.app, headwise.actors.http_server"
    subprocess.run([sys.executable, "-c", f"{without}; {parts}"], check=True)

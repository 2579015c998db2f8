"""A server's own parts: TLS, its port, its metrics, its end; the model's texts; what /ready says."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.scripted_http import MODEL, ScriptedTexts, Served, serving
from support.waiting import PATIENCE_S, eventually

from headwise.errors import ConfigError, DeploymentError, EngineDiedError, HeadwiseError, NotReadyError
from headwise.runtime.batch.server import Server as BatchServer
from headwise.runtime.client.client import Client
from headwise.runtime.frontend import pending_calls
from headwise.runtime.frontend.scaling import FleetState
from headwise.runtime.http import connections, generation
from headwise.runtime.http.app import AppOptions, make_app
from headwise.runtime.http.errors import ApiError
from headwise.runtime.http.metrics import AnswerClock, RequestMetrics
from headwise.runtime.http.server import HttpServer, check_certificate, listen
from headwise.runtime.protocol.request import FinishReason, OutputDelta, Timings, Usage


@pytest.fixture
def served(deployment: Deployment) -> Iterator[Served]:
    with serving(deployment, counts=RequestMetrics("http-7")) as served:
        yield served


def metrics(served: Served) -> dict[str, float]:
    """By name and labels, as Prometheus' own parser reads them."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in families
        for sample in family.samples
    }


# ---- what is told of the deployment ----


def test_without_an_engine_nothing_is_ready(served: Served) -> None:
    """First of all tests: this deployment has none yet."""
    response = served.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_engine"
    assert int(response.headers["retry-after"]) > 0
    assert served.http.get("/health").status_code == 200


def test_who_asks_while_no_engine_comes_is_told_to_come_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a deployment that has none yet, as above."""
    monkeypatch.setattr(pending_calls, "ENGINES_REPORT_S", 0.0)
    response = served.http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_engine"
    assert int(response.headers["retry-after"]) > 0


def test_a_deployment_that_starts_its_first_engine_for_a_request_is_ready_for_it_and_tells_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "WAIT_S", 0.05)
    with closing(Deployment()) as deployment, serving(deployment) as served:
        deployment.exchange.swap(FleetState(0, "there are no requests", is_on_demand=True))
        assert served.http.get("/ready").json() == {"status": "ready", "engines": 0}
        body = {"prompt": "a", "stream": True, "max_tokens": 2}
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": waiting for an engine"
            deployment.add_engine(ScriptedCore())
            told = [line for line in lines if line and not line.startswith(":")]
        assert told[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in told[:-1]) == "0 1 "


def test_metrics_count_what_was_answered(core: ScriptedCore, served: Served) -> None:
    eventually(lambda: served.http.get("/ready").status_code == 200)
    before = metrics(served)
    assert served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4}).status_code == 200
    assert served.http.post("/v1/completions", json={"prompt": ""}).status_code == 400
    assert served.http.get("/no/such/path").status_code == 404
    after = metrics(served)
    expected = {
        "headwise_prompt_tokens_total['http-7']": 3,
        "headwise_generation_tokens_total['http-7']": 4,
        "headwise_time_to_first_token_seconds_count['http-7']": 1,
        "headwise_inter_token_latency_seconds_count['http-7']": 3,
        "headwise_e2e_request_latency_seconds_count['http-7']": 1,
        "headwise_answers_total['http-7', 'length']": 1,
        "headwise_answers_total['abort', 'http-7']": 1,
        "headwise_http_responses_total['/v1/completions', '200', 'http-7']": 1,
        "headwise_http_responses_total['/v1/completions', '400', 'http-7']": 1,
        "headwise_http_responses_total['404', 'http-7', 'other']": 1,
    }
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected
    eventually(lambda: metrics(served)["headwise_scheduler_requests_total['routed']"] >= 1)
    eventually(lambda: metrics(served)["headwise_engines['reporting']"] >= 1)


def test_a_connection_for_metrics_ends_so_that_the_next_may_reach_another_server(served: Served) -> None:
    assert served.http.get("/metrics").headers["connection"] == "close"


def test_an_answer_is_timed_by_its_tokens() -> None:
    counts, now = RequestMetrics("s"), [10.0]
    clock = AnswerClock(counts, began=9.0, clock=lambda: now[0])
    clock.take(OutputDelta("r", (1,)))
    now[0] = 14.0
    clock.take(OutputDelta("r", (2, 3)))
    now[0] = 15.0
    end = OutputDelta("r", finish_reason=FinishReason.STOP, usage=Usage(7, 5, 3), timings=Timings(queue_s=0.5))
    clock.take(end)

    def sample(name: str) -> float | None:
        return counts.registry.get_sample_value(f"headwise_{name}", {"server": "s"})

    assert sample("time_to_first_token_seconds_sum") == 1.0
    assert (sample("inter_token_latency_seconds_count"), sample("inter_token_latency_seconds_sum")) == (2.0, 4.0)
    assert sample("e2e_request_latency_seconds_sum") == 6.0
    assert sample("request_queue_time_seconds_sum") == 0.5
    assert (sample("prompt_tokens_total"), sample("prompt_cached_tokens_total")) == (7.0, 5.0)
    assert sample("generation_tokens_total") == 3.0


def test_without_a_scheduler_requests_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.runtime.client.connections.REFUSED_S", 0.1)
    deployment = Deployment()
    with serving(deployment) as served:
        deployment.close()
        response = served.http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_scheduler"
        assert served.http.get("/ready").status_code == served.http.get("/deployment").status_code == 503
        assert "the scheduler does not answer" in served.http.get("/metrics").text
        assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotReadyError("no engine is ready"), 503),
        (EngineDiedError("lost"), 503),
        (HeadwiseError("odd"), 500),
        (ValueError("secret"), 500),
    ],
)
def test_errors_have_their_statuses_and_strangers_learn_nothing_of_others(error: Exception, status: int) -> None:
    told = ApiError.of(error)
    assert told.status == status
    assert "secret" not in told.body["error"]["message"]


# ---- the port ----


def test_several_servers_share_a_port_and_go_on_without_each_other(deployment: Deployment, core: ScriptedCore) -> None:
    with Client(deployment.address) as client:
        app = make_app(client, ScriptedTexts(), AppOptions(MODEL))
        first = HttpServer(app, listen("127.0.0.1", 0))
        second = HttpServer(app, listen("127.0.0.1", first.port))
        first.start()
        second.start()
        first.stop()
        url = f"http://127.0.0.1:{first.port}/health"
        assert all(httpx.get(url).status_code == 200 for _ in range(20))
        second.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


@contextmanager
def streaming(served: Served, core: ScriptedCore) -> Iterator[Iterator[str]]:
    """The texts of a stream over a connection of its own, which goes on after its first when the gate is opened."""
    core.shuts_after = core.steps + 1
    body = {"prompt": "abc", "max_tokens": 40, "stream": True}
    with (
        httpx.Client(base_url=served.base_url, timeout=120.0) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        told = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert json.loads(next(told))["choices"][0]["text"] == "0 "
        yield told


def test_a_server_that_leaves_takes_no_connections_and_ends_what_it_has_begun(
    gate: threading.Event, served: Served, core: ScriptedCore
) -> None:
    served.http.get("/health")  # its connection stays open
    with ThreadPoolExecutor() as pool, streaming(served, core) as told:
        whole = pool.submit(httpx.post, f"{served.base_url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
        eventually(lambda: len(core.live) == 2)
        has_left = pool.submit(served.server.leave, PATIENCE_S)
        eventually(lambda: served.server.num_connections == 2)
        with pytest.raises(httpx.ConnectError):
            served.http.get("/ready")
        gate.set()
        texts = [json.loads(each)["choices"][0]["text"] for each in told if each != "[DONE]"]
        assert "".join(texts) == "".join(f"{number} " for number in range(1, 40))
        assert whole.result().json()["choices"][0]["text"] == "0 1 2 "
        assert has_left.result()


def status_of_answer(connection: socket.socket) -> int:
    with closing(HTTPResponse(connection)) as answer:
        answer.begin()
        answer.read()
        return answer.status


def test_a_server_that_leaves_answers_what_is_being_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a connection that was made just before, and over one that has sent the half of a second request."""
    monkeypatch.setattr(connections, "LAST_REQUEST_S", PATIENCE_S)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    address = "127.0.0.1", served.port
    with socket.create_connection(address) as new, socket.create_connection(address) as used:
        used.sendall(request)
        assert status_of_answer(used) == 200
        used.sendall(request[:9])
        served.http.get("/health")  # when it is answered, what was sent before it has been read
        assert not served.server.leave(0.2)
        for connection, rest in ((new, request), (used, request[9:])):
            connection.sendall(rest)
            assert status_of_answer(connection) == 200


def test_who_sends_nothing_is_not_waited_for_when_a_server_leaves(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LAST_REQUEST_S", 0.01)
    with socket.create_connection(("127.0.0.1", served.port)) as silent:
        eventually(lambda: served.server.num_connections == 1)
        assert served.server.leave(PATIENCE_S)
        assert silent.recv(1) == b""


def test_who_still_streams_when_a_server_has_left_for_long_enough_is_told(
    gate: threading.Event, served: Served, core: ScriptedCore
) -> None:
    with streaming(served, core) as told:
        assert not served.server.leave(0.1)
        served.client.close("the node goes")
        *_, error, last = told
        assert json.loads(error)["error"] == {
            "message": "the node goes",
            "type": "service_unavailable",
            "param": None,
            "code": "aborted",
        }
        assert last == "[DONE]"
        eventually(lambda: not served.server.num_connections)


def test_who_does_not_read_is_not_waited_for_when_a_server_that_leaves_is_stopped(
    gate: threading.Event, served: Served, core: ScriptedCore
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    with socket.create_connection(("127.0.0.1", served.port)) as silent:
        silent.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: core.live)
        assert not served.server.leave(0.1)
        served.client.close("the node goes")
        served.server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port))


@pytest.fixture
def gate(core: ScriptedCore) -> Iterator[threading.Event]:
    """The engine's, which has nothing left of other tests; open again at the end."""
    eventually(lambda: not core.live)
    yield core.gate
    core.gate.set()


def test_a_port_that_another_program_has_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeploymentError, match=rf"127\.0\.0\.1:{port}: .*--http"):
            listen("127.0.0.1", port)


def test_small_messages_are_not_held_back() -> None:
    """With Nagle's algorithm every answer would wait 40 ms for its reader's acknowledgement."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_loop_count_grows(deployment: Deployment, core: ScriptedCore) -> None:
    with Client(deployment.address) as client:
        server = HttpServer(make_app(client, ScriptedTexts(), AppOptions(MODEL)), listen("127.0.0.1", 0))
        server.start()
        before = server.loop_count
        eventually(lambda: server.loop_count > before)
        server.stop()
        server.stop()


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = str(directory / "cert.pem"), str(directory / "key.pem")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_https_serves_who_trusts_the_certificate(
    deployment: Deployment, core: ScriptedCore, certificate: tuple[str, str]
) -> None:
    check_certificate(*certificate)
    with Client(deployment.address) as client:
        app = make_app(client, ScriptedTexts(), AppOptions(MODEL))
        server = HttpServer(app, listen("127.0.0.1", 0), certificate)
        server.start()
        trusting = ssl.create_default_context(cafile=certificate[0])
        url = f"https://127.0.0.1:{server.port}/v1/completions"
        answer = httpx.post(url, json={"prompt": "abc", "max_tokens": 2}, verify=trusting, timeout=120.0)
        assert answer.json()["choices"][0]["text"] == "0 1 "
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"))
        server.stop()


def test_a_file_of_requests_is_sent_to_whose_certificate_is_given(
    deployment: Deployment, core: ScriptedCore, certificate: tuple[str, str], tmp_path: Path
) -> None:
    async def checked(ca_file: str = "") -> None:
        async with BatchServer(url, ca_file=ca_file) as server:
            await server.check()

    with Client(deployment.address) as client:
        app = make_app(client, ScriptedTexts(), AppOptions(MODEL))
        server = HttpServer(app, listen("127.0.0.1", 0), certificate)
        server.start()
        url = f"https://127.0.0.1:{server.port}"
        asyncio.run(checked(certificate[0]))
        with pytest.raises(DeploymentError, match=r"no server answers at https:.*certificate"):
            asyncio.run(checked())
        server.stop()
    absent = tmp_path / "absent.pem"
    for wrong in (certificate[1], str(absent)):
        with pytest.raises(ConfigError, match=r"\.pem has no certificates in PEM"):
            BatchServer(url, ca_file=wrong)


def test_certificates_that_cannot_be_used_are_told(certificate: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.pem"):
        check_certificate(certificate[0], str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match="cannot be used"):
        check_certificate(certificate[1], certificate[0])

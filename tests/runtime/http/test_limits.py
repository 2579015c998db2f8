"""What one client can do to others, and to the server: keys, sizes, times; over real sockets, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.scripted_http import Served, serving
from support.waiting import eventually

from headwise.errors import ConfigError
from headwise.runtime.http import body_reader, connections, generation
from headwise.runtime.http.bodies import ChatBody, DetokenizeBody, TokenizeBody
from headwise.runtime.http.guard import MAX_HEAD_BYTES, ApiKeys
from headwise.runtime.protocol.users import Tenant, Users
from headwise.sockets import connection_limit

KEY, OTHER = "sk-of-one-user", "sk-of-another"
MANY = 100_000_000


@pytest.fixture(scope="module")
def served(deployment: Deployment, core: ScriptedCore) -> Iterator[Served]:
    with serving(deployment, max_body=1 << 20) as served:
        yield served


@pytest.fixture(autouse=True)
def at_rest(core: ScriptedCore) -> Iterator[None]:
    yield
    core.gate.set()
    core.pace_s = 0.0
    eventually(lambda: not core.live)


def works(served: Served) -> bool:
    """Whether the server answers somebody else, on a connection of their own."""
    answer = httpx.post(f"{served.base_url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=120.0)
    return bool(answer.json()["choices"][0]["text"] == "0 ")


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=120.0)


def head(body: bytes, length: int | None = None) -> bytes:
    """Of a request whose body begins with this."""
    size = len(body) if length is None else length
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    return b"POST /v1/completions HTTP/1.1\r\n" + fields.encode() + body


def endless(**more: Any) -> bytes:
    return head(json.dumps({"prompt": "a", "max_tokens": MANY, "stream": True, **more}).encode())


def is_ended_under(sock: socket.socket, drop: bytes, pause_s: float = 0.0, most: int = 20_000) -> bool:
    """Whether the server ends the connection while one such drop after the other is sent, so many at most."""
    for _ in range(most):
        try:
            sock.sendall(drop)
        except OSError:
            return True
        time.sleep(pause_s)
    return False


def is_ended_by_the_server(sock: socket.socket) -> bool:
    """Whether the server closes the connection within the socket's timeout, whatever it says before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


# ---- keys ----


@pytest.fixture(scope="module")
def locked(deployment: Deployment, core: ScriptedCore) -> Iterator[Served]:
    with serving(deployment, keys=ApiKeys(Users({KEY: None, OTHER: None}))) as served:
        yield served


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_each_key_opens_every_path(locked: Served, key: str) -> None:
    bearer = {"authorization": f"Bearer {key}"}
    for path in ("/v1/models", "/version", "/metrics"):
        assert locked.http.get(path, headers=bearer).status_code == 200
    assert locked.http.post("/v1/completions", json={"prompt": "a"}, headers=bearer).status_code == 200


@pytest.mark.parametrize(
    "header", ["", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer", KEY, f"Basic {KEY}", "Bearer k\xe9y"], ids=repr
)
def test_without_a_key_nothing_is_told_but_that_it_is_wanted(
    locked: Served, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"authorization": header.encode("latin-1")} if header else {}
    with caplog.at_level(logging.DEBUG, "headwise"):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/no")):
            response = locked.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert KEY not in response.text
    assert KEY not in caplog.text


def test_a_request_is_that_tenant_s_whose_key_it_bears(deployment: Deployment, core: ScriptedCore) -> None:
    keys = ApiKeys(Users({KEY: None, OTHER: Tenant("team-b", 3)}))
    with serving(deployment, keys=keys) as served:
        for key, said, expected in (
            (OTHER, {}, ("team-b", 3)),
            (OTHER, {"priority": -5}, ("team-b", 3)),
            (OTHER, {"priority": 9, "cache_salt": "x"}, ("team-b", 9)),
            (KEY, {"priority": -5}, ("", -5)),
        ):
            core.gate.clear()
            bearer = {"authorization": f"Bearer {key}"}
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(served.http.post, "/v1/completions", json={"prompt": "a", **said}, headers=bearer)
                eventually(lambda: core.live)
                ((request, _),) = core.live.values()
                core.gate.set()
                assert answer.result().status_code == 200
            assert (request.tenant, request.priority) == expected


def test_tenants_are_told_of_themselves_alone(deployment: Deployment) -> None:
    bearers = {name: {"authorization": f"Bearer sk-of-{name}"} for name in ("team-d", "team-e", "operator")}
    keys = Users({"sk-of-team-d": Tenant("team-d"), "sk-of-team-e": Tenant("team-e"), "sk-of-operator": None})
    with serving(deployment, keys=ApiKeys(keys)) as served:
        for name in ("team-d", "team-e"):
            served.http.post("/v1/completions", json={"prompt": "a"}, headers=bearers[name]).raise_for_status()
        time.sleep(0.6)  # what is told is not older than half a second
        told = {name: served.http.get("/metrics", headers=bearer).text for name, bearer in bearers.items()}
    found = {name: [each for each in ("team-d", "team-e") if f'tenant="{each}"' in text] for name, text in told.items()}
    assert found == {"team-d": ["team-d"], "team-e": ["team-e"], "operator": ["team-d", "team-e"]}


def test_keys_come_and_go_while_a_server_serves(deployment: Deployment) -> None:
    news: list[Users | ConfigError] = []

    def source() -> Users | None:
        told = news.pop() if news else None
        if isinstance(told, ConfigError):
            raise told
        return told

    with serving(deployment, keys=ApiKeys(Users({KEY: None}), source)) as served:

        def status(key: str) -> int:
            return served.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status(KEY), status(OTHER)) == (200, 401)
        news.append(Users({OTHER: None}))
        assert (status(KEY), status(OTHER)) == (401, 200)
        news.append(ConfigError("the file is gone"))
        assert (status(KEY), status(OTHER)) == (401, 200)


def test_nobody_may_say_whose_a_request_is(locked: Served) -> None:
    bearer = {"authorization": f"Bearer {KEY}"}
    response = locked.http.post("/v1/completions", json={"prompt": "a", "tenant": "another"}, headers=bearer)
    assert response.status_code == 400
    assert "tenant" in response.json()["error"]["message"]


def test_probes_need_no_key(locked: Served) -> None:
    assert locked.http.get("/health").status_code == 200
    assert locked.http.get("/ready").json() == {"status": "ready", "engines": 1}


# ---- names ----


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("app.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.0.2.7", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_without_keys_no_web_page_reaches_the_server_by_a_name_of_its_own(
    deployment: Deployment, core: ScriptedCore, host: str, status: int
) -> None:
    with serving(deployment, is_local=True) as served:
        for path in ("/", "/v1/models"):
            answer = served.http.get(path, headers={"host": host})
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "host_not_allowed"


# ---- sizes ----


def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(served: Served) -> None:
    with connect(served) as sock:
        sock.sendall(head(b"", 100 << 20))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert works(served)


def test_a_body_of_20_megabytes_is_refused_whatever_it_says_of_its_length(served: Served) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 20)

    response = served.http.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    response = served.http.post(
        "/v1/completions", content=b" " * (20 << 20), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert works(served)


def test_bodies_that_arrive_at_once_have_a_bound_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "MAX_BODIES_BYTES", 3 << 19)
    with connect(served) as first, connect(served) as second:
        for sock in (first, second):
            sock.sendall(head(b" " * (1 << 20))[:-1])
        answers = {first: b"", second: b""}

        def is_refused() -> bool:
            for sock in answers:
                sock.settimeout(0.01)
                try:
                    answers[sock] += sock.recv(65536)
                except TimeoutError:
                    continue
            return any(answer.startswith(b"HTTP/1.1 429 ") for answer in answers.values())

        eventually(is_refused)
        assert sum(bool(answer) for answer in answers.values()) == 1, answers
    eventually(lambda: works(served))


def test_who_fills_the_room_for_bodies_loses_the_oldest_to_whoever_comes(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_reader, "MAX_BODIES_BYTES", 3 << 20)
    keys = ApiKeys(Users({KEY: Tenant("hog"), OTHER: Tenant("guest")}))
    with serving(deployment, keys=keys) as served, connect(served) as first, connect(served) as second:
        bearer = f"Authorization: Bearer {KEY}\r\n".encode()
        for sock in (first, second):
            whole = head(b" " * (3 << 19)).replace(b"\r\n", b"\r\n" + bearer, 1)
            sock.sendall(whole[:-1])  # and never ends
            time.sleep(0.2)
        prompt = " " * (1 << 19) + json.dumps({"prompt": "a"})
        headers = {"authorization": f"Bearer {OTHER}", "content-type": "application/json"}
        answer = served.http.post("/v1/completions", content=prompt, headers=headers)
        assert answer.status_code == 200
        assert first.recv(65536).startswith(b"HTTP/1.1 429 ")
        second.settimeout(0.2)
        with pytest.raises(TimeoutError):
            second.recv(65536)


def test_a_head_beyond_the_limit_is_refused(served: Served) -> None:
    assert MAX_HEAD_BYTES < 10_000
    for response in (
        httpx.get(f"{served.base_url}/health", headers={"x": "y" * 10_000}, timeout=120.0),
        httpx.get(f"{served.base_url}/{'y' * 10_000}", timeout=120.0),
    ):
        assert response.status_code in (400, 431)  # by how much of it came at once
        assert "error" in response.json()
    assert works(served)


def test_a_head_that_never_ends_is_not_kept(served: Served) -> None:
    with connect(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert is_ended_under(sock, b"x: " + b"y" * 1000 + b"\r\n")
    assert works(served)


@pytest.mark.parametrize("line", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff\x00\x00"])
def test_what_is_no_http_is_told_and_ended(served: Served, line: bytes) -> None:
    with connect(served) as sock:
        sock.sendall(line + b"\r\n\r\n")
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
        assert is_ended_by_the_server(sock)


def test_of_a_million_wrong_items_in_a_body_one_is_told() -> None:
    with pytest.raises(ValidationError) as told:
        DetokenizeBody.model_validate_json(json.dumps({"tokens": ["wrong"] * 1000}))
    assert told.value.error_count() == 1
    for body in (ChatBody, TokenizeBody):  # theirs are looked at one after the other, later
        body.model_validate_json(json.dumps({"messages": ["wrong"] * 1000}))


# ---- times ----


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", head(b"", 5)[:-10]], ids=["nothing", "a line", "a head"])
def test_a_connection_without_a_request_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with connect(served) as sock:
        sock.sendall(sent)
        assert is_ended_by_the_server(sock)


def test_drops_of_a_head_buy_no_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with connect(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert is_ended_under(sock, b"x: y\r\n", pause_s=0.05, most=1000), "and not by their size"


def test_a_body_that_does_not_come_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "BODY_S", 0.2)
    with connect(served) as sock:
        sock.sendall(head(b'{"prompt', 100))
        assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_nobody_wants_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with connect(served) as sock:
        sock.sendall(head(b"", 100 << 20))
        assert is_ended_under(sock, b" ", pause_s=0.05, most=1000)


# ---- many ----


def test_a_thousand_idle_connections_keep_nobody_out(served: Served) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(served))
        assert works(served)


def test_connections_beyond_the_limit_are_closed_and_others_go_on(
    deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 3)
    with serving(deployment) as served, ExitStack() as stack:
        core.pace_s = 0.001
        first = stack.enter_context(connect(served))
        first.sendall(endless())
        assert first.recv(20).startswith(b"HTTP/1.1 200 ")
        others = [stack.enter_context(connect(served)) for _ in range(2)]
        assert is_ended_by_the_server(stack.enter_context(connect(served)))
        assert first.recv(1)
        others.pop().close()
        eventually(lambda: _answers(served))


def _answers(served: Served) -> bool:
    try:
        return httpx.get(f"{served.base_url}/health").status_code == 200
    except httpx.HTTPError:
        return False


# ---- readers ----


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the server's connections: those of the kernel take megabytes before a server notices that nobody reads."""
    made = connections.Connection.connection_made

    def connection_made(self: connections.Connection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        made(self, transport)

    monkeypatch.setattr(connections.Connection, "connection_made", connection_made)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_vanishes_has_its_requests_aborted(
    served: Served, core: ScriptedCore, stream: bool, n: int
) -> None:
    core.pace_s = 0.001
    before = len(core.aborted)
    with connect(served) as sock:
        sock.sendall(endless(stream=stream, n=n))
        eventually(lambda: len(core.live) == n)
        if stream:
            assert sock.recv(20).startswith(b"HTTP/1.1 200 ")
    eventually(lambda: len(core.aborted) == before + n)
    assert works(served)


def test_a_client_that_vanishes_before_an_engine_took_its_request_leaves_nothing(
    served: Served, core: ScriptedCore
) -> None:
    core.gate.clear()
    with connect(served) as sock:
        sock.sendall(endless(stream=False))
        eventually(lambda: bool(core.live))
    core.gate.set()
    eventually(lambda: not core.live)


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_does_not_read_is_cut_off_and_others_go_on(
    served: Served, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALL_S", 0.5)
    core.pace_s = 0.001
    before = len(core.aborted)
    with connect(served) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(endless(n=8))
        eventually(lambda: bool(core.live))
        assert works(served)
        eventually(lambda: len(core.aborted) == before + 8)
        assert works(served)


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_reads_too_slowly_is_told(
    served: Served, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_UNREAD", 50)
    monkeypatch.setattr(generation, "LEAST_UNREAD", 50)
    core.pace_s = 0.001  # more comes than is read
    with connect(served) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(endless())
        said = slow.recv(1024)
        while core.live:
            time.sleep(0.02)
            slow.recv(1024)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        while b"[DONE]" not in said:
            said = (said + slow.recv(1 << 16))[-8192:]
    assert b"read faster" in said


def test_the_server_stops_within_streams_and_under_a_client_that_does_not_read(
    deployment: Deployment, core: ScriptedCore
) -> None:
    core.pace_s = 0.001
    with ThreadPoolExecutor(1) as other, ExitStack() as stack, serving(deployment) as served:
        stalled = stack.enter_context(connect(served))
        stalled.sendall(endless())
        stream = other.submit(lambda: b"".join(_read(served)))
        eventually(lambda: len(core.live) == 2)
    assert stream.result().startswith(b"data: ")


def _read(served: Served) -> Iterator[bytes]:
    """A stream until the server ends it, in whichever way."""
    body = {"prompt": "a", "max_tokens": MANY, "stream": True}
    try:
        with httpx.stream("POST", f"{served.base_url}/v1/completions", json=body, timeout=120.0) as response:
            yield from response.iter_raw()
    except httpx.TransportError:
        return

"""What a client does when it loses an engine, or the scheduler: over real sockets, with scripted ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from support.engine.scripted import ScriptedCore
from support.waiting import PATIENCE_S, eventually

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import DeploymentError, EngineDiedError, InvalidRequestError, RequestAbortedError
from headwise.runtime.client import connections
from headwise.runtime.client.client import Client
from headwise.runtime.client.served_calls import MAX_REROUTES
from headwise.runtime.engine.server import EngineServer
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import (
    FORGOTTEN,
    Abort,
    FindPrefix,
    GetStats,
    Outputs,
    Ping,
    Pong,
    PrefixFound,
    Reroute,
    Route,
    Stats,
    Submit,
    Ticket,
    Withdraw,
)
from headwise.runtime.protocol.prompt_items import PromptItem, digest
from headwise.runtime.protocol.request import GenerateRequest, OutputDelta, SamplingParams, TokenLogprobs


class Peer:
    """A thread behind a ROUTER socket; `heard` is all that came. Closing it is like the death of its process."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.heard: list[Any] = []
        self._is_mute, self._has_obeyed = threading.Event(), threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(0.01 if self._is_mute.is_set() else 0):
            if self._is_mute.is_set():
                self._has_obeyed.set()
            elif self._socket.poll(10):
                identity, data = self._socket.recv_multipart()
                message = wire.decode(data)
                self.heard.append(message)
                for answer in self.answer(message):
                    self._socket.send_multipart((identity, wire.encode(answer)))
        self._context.destroy(linger=0)

    def answer(self, message: Any) -> list[Any]:
        raise NotImplementedError

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def be_mute(self) -> None:
        """Like a process that is stopped: take nothing, and say nothing more."""
        self._is_mute.set()
        assert self._has_obeyed.wait(PATIENCE_S)

    def die(self) -> None:
        self._stopping.set()
        self._thread.join()


class Scheduler(Peer):
    """Sends each request to the next of `tickets`; keeps it waiting while there are none."""

    def __init__(
        self, endpoint: str = "tcp://127.0.0.1:*", instance: str = "first", tickets: Sequence[str] = ()
    ) -> None:
        self.tickets = list(tickets)
        self.instance = instance
        super().__init__(endpoint)

    def answer(self, message: Any) -> list[Any]:
        if isinstance(message, Route | Reroute) and self.tickets:
            request = message.request if isinstance(message, Reroute) else self.request(message)
            return [Ticket(message.key, self.tickets.pop(0), request)]
        if isinstance(message, GetStats):
            return [Stats(message.key, {})]
        if isinstance(message, FindPrefix):
            return [PrefixFound(message.key, 9, {"engine-0": {"device": 4}})]
        return [Pong(self.instance)] if isinstance(message, Ping) else []

    def request(self, route: Route) -> GenerateRequest:
        params = SamplingParams.from_wire(route.sampling)
        return GenerateRequest(f"r{route.key}", np.array([1, 2, 3], np.int32), params, extra_keys=route.extra_keys)


class Engine(Peer):
    """Says two tokens of each request, and no more."""

    def answer(self, message: Any) -> list[Any]:
        if isinstance(message, Ping):
            return [Pong()]
        if not isinstance(message, Submit):
            return []
        first = len(message.request.output_token_ids)
        said = [OutputDelta(message.request.request_id, (n,), f"{n} ") for n in (first, first + 1)]
        return [Outputs(tuple(said))]


class Place:
    """All that a test has started."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self._to_end: list[Callable[[], Any]] = []

    def engine(self, core: ScriptedCore | None, name: str = "") -> EngineServer:
        server = EngineServer("tcp://127.0.0.1:*")
        if core is not None:
            server.attach(core)
        server.start()
        self._to_end.append(server.stop)
        return server

    def mortal_engine(self) -> Engine:
        engine = Engine()
        self._to_end.append(engine.die)
        return engine

    def restart_scheduler(self, *tickets: str) -> None:
        """Another one in its place, which has the tickets before it is asked."""
        self.scheduler.die()
        self.scheduler = Scheduler(self.scheduler.endpoint, "second", tickets)

    def close(self) -> None:
        for end in (*self._to_end, self.scheduler.die):
            end()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


@pytest.fixture
def client(place: Place) -> Iterator[Client]:
    with Client(place.scheduler.endpoint) as client:
        yield client


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is noticed is not noticed by silence."""
    monkeypatch.setattr(connections, "PEER_TIMEOUT_S", 1000.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed soon."""
    monkeypatch.setattr(connections, "PEER_TIMEOUT_S", 0.6)
    monkeypatch.setattr(connections, "PING_INTERVAL_S", 0.1)


def numbers(count: int) -> str:
    return "".join(f"{n} " for n in range(count))


# ---- engines ----


def test_a_stream_whose_engine_loses_its_workers_goes_on_elsewhere_without_gap_or_repeat(
    place: Place, client: Client, patient: None
) -> None:
    first, second = ScriptedCore(), ScriptedCore()
    first.pace_s = 0.01
    place.scheduler.tickets = [place.engine(first).endpoint, place.engine(second).endpoint]
    stream = client.stream("abc", max_tokens=100)
    deltas = [next(stream) for _ in range(3)]
    first.dies = EngineDiedError("TP rank 0 died")
    deltas += list(stream)
    assert "".join(delta.text for delta in deltas) == numbers(100)
    assert {delta.request_id for delta in deltas} == {stream.result.request_id} == {"r2"}
    (reroute,) = place.scheduler.of(Reroute)
    assert len(reroute.request.output_token_ids) >= 3
    assert stream.result.usage.completion_tokens == 100


class TellingCore(ScriptedCore):
    """Tells the log-probabilities of a prompt, a token a step, from where it was told that others had come to."""

    def _next(self, request_id: str) -> OutputDelta:
        request, count = self.live[request_id]
        at = request.prompt_told
        if at == len(request.prompt_token_ids):
            return super()._next(request_id)
        self.live[request_id] = replace(request, prompt_told=at + 1), count
        logprobs = None if at == 0 else TokenLogprobs(-float(at), ())
        return OutputDelta(
            request_id, prompt_token_ids=(int(request.prompt_token_ids[at]),), prompt_logprobs=(logprobs,)
        )


def test_a_prompts_logprobs_go_on_elsewhere_without_gap_or_repeat(place: Place, client: Client, patient: None) -> None:
    first, second = TellingCore(), TellingCore()
    first.pace_s = 0.05
    place.scheduler.tickets = [place.engine(first).endpoint, place.engine(second).endpoint]
    stream = client.stream("abc", max_tokens=100, prompt_logprobs=0)
    next(stream)
    first.dies = EngineDiedError("TP rank 0 died")
    result = stream.read()
    (reroute,) = place.scheduler.of(Reroute)
    assert reroute.request.prompt_told >= 1
    assert result.prompt_token_ids == list(reroute.request.prompt_token_ids)
    assert result.prompt_logprobs == [None, TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())]
    assert result.text == numbers(100)


def test_embeddings_go_to_every_engine_that_serves_the_request_and_never_to_the_scheduler(
    place: Place, client: Client, patient: None
) -> None:
    first, second = ScriptedCore(), ScriptedCore()
    first.pace_s = 0.01
    place.scheduler.tickets = [place.engine(first).endpoint, place.engine(second).endpoint]
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    stream = client.stream([97, 98, 99], items=[PromptItem(1, 2, embeds=rows)], max_tokens=100)
    next(stream)
    served = [each for each, _ in first.live.values()]
    first.dies = EngineDiedError("TP rank 0 died")
    next(stream)
    while not second.live:
        next(stream)
    served += [each for each, _ in second.live.values()]
    (route,), (reroute,) = place.scheduler.of(Route), place.scheduler.of(Reroute)
    assert route.extra_keys == reroute.request.extra_keys == (ExtraKey(1, 3, digest(rows)),)
    assert not reroute.request.embeds
    for request in served:
        np.testing.assert_array_equal(request.embeds[0].values, rows)
        assert request.extra_keys == route.extra_keys
    assert stream.read().usage.completion_tokens == 100


def test_a_dead_engine_is_noticed_by_its_connection(place: Place, client: Client, patient: None) -> None:
    first, second = place.mortal_engine(), ScriptedCore()
    place.scheduler.tickets = [first.endpoint, place.engine(second).endpoint]
    stream = client.stream("abc", max_tokens=9)
    assert [next(stream).text, next(stream).text] == ["0 ", "1 "]
    first.die()
    assert stream.read().text == numbers(9)
    (reroute,) = place.scheduler.of(Reroute)
    assert (reroute.lost, reroute.request.output_token_ids) == (first.endpoint, (0, 1))


def test_an_engine_that_is_gone_before_the_request_gets_there_is_noticed_too(
    place: Place, client: Client, patient: None
) -> None:
    gone = place.mortal_engine()
    gone.die()
    place.scheduler.tickets = [gone.endpoint, place.engine(ScriptedCore()).endpoint]
    assert client.generate("abc", max_tokens=3).text == numbers(3)


def test_what_a_silent_engine_says_later_is_not_listened_to_and_its_request_is_aborted(
    place: Place, client: Client, quick: None
) -> None:
    first, second = ScriptedCore(), ScriptedCore()
    first.pace_s = 0.01
    silent = place.engine(first)
    place.scheduler.tickets = [silent.endpoint, place.engine(second).endpoint]
    stream = client.stream("abc", max_tokens=10**6)
    said = next(stream).text
    release = threading.Event()
    silent.call(lambda: release.wait(PATIENCE_S) and None)
    eventually(lambda: bool(second.live))
    second.pace_s = 0.01
    release.set()
    eventually(lambda: bool(first.aborted))
    said += "".join(next(stream).text for _ in range(50))
    assert said == numbers(51)


def test_a_request_that_its_engine_has_forgotten_goes_elsewhere(place: Place, client: Client, quick: None) -> None:
    first = ScriptedCore()
    first.gate.clear()
    forgetful = place.engine(first)
    place.scheduler.tickets = [forgetful.endpoint, place.engine(ScriptedCore()).endpoint]
    stream = client.stream("abc", max_tokens=3)
    eventually(lambda: bool(first.live))
    forgetful.call(lambda: [forgetful._requests._clients.end(request_id) for request_id in list(first.live)] and None)
    assert stream.read().text == numbers(3)


def test_a_step_that_failed_is_an_error_of_its_request_and_no_engine_is_lost(place: Place, client: Client) -> None:
    core = ScriptedCore()
    core.gate.clear()
    server = place.engine(core)
    place.scheduler.tickets = [server.endpoint]
    stream = client.stream("abc")
    eventually(lambda: bool(core.live))
    server.call(lambda: server._requests.deliver(core.fail_all("the logits are not finite")))
    with pytest.raises(EngineDiedError, match="not finite"):
        stream.read()
    assert not place.scheduler.of(Reroute)


def test_a_request_that_loses_four_engines_is_given_up(place: Place, client: Client, patient: None) -> None:
    cores = [ScriptedCore() for _ in range(5)]
    place.scheduler.tickets = [place.engine(core).endpoint for core in cores]
    for index, core in enumerate(cores):
        core.dies = EngineDiedError(f"engine {index} died")
        core.has_work = lambda core=core: bool(core.live)
    with pytest.raises(EngineDiedError, match="engine 3 died"):
        client.generate("abc")
    assert len(place.scheduler.of(Reroute)) == MAX_REROUTES == 3
    assert [reroute.request.request_id for reroute in place.scheduler.of(Reroute)] == ["r2~1", "r2~2", "r2~3"]


def test_a_client_that_reaches_no_engine_is_told_which_address_it_cannot_reach(
    place: Place, client: Client, patient: None
) -> None:
    place.scheduler.tickets = ["tcp://127.0.0.1:9"] * 4
    with pytest.raises(EngineDiedError, match=r"tcp://127\.0\.0\.1:9 cannot be reached .* connect to the engines"):
        client.generate("abc", max_tokens=3)
    assert [reroute.lost for reroute in place.scheduler.of(Reroute)] == ["tcp://127.0.0.1:9"] * 3


def test_engines_without_workers_send_requests_away_and_are_not_lost_by_them(
    place: Place, client: Client, patient: None
) -> None:
    empty = place.engine(None)
    place.scheduler.tickets = [empty.endpoint] * 6 + [place.engine(ScriptedCore()).endpoint]
    assert client.generate("abc", max_tokens=3).text == numbers(3)


def test_a_request_comes_back_to_an_engine_that_has_new_workers(place: Place, client: Client, patient: None) -> None:
    core = ScriptedCore()
    core.pace_s = 0.01
    server = place.engine(core)
    place.scheduler.tickets = [server.endpoint]
    stream = client.stream("abc", max_tokens=50)
    said = next(stream).text
    core.dies = EngineDiedError("TP rank 0 died")
    eventually(lambda: bool(place.scheduler.of(Reroute)))
    server.attach(ScriptedCore())
    place.restart_scheduler(server.endpoint)  # so that it is asked again
    assert said + "".join(delta.text for delta in stream) == numbers(50)


def test_operations_are_not_sent_elsewhere(place: Place, client: Client, patient: None) -> None:
    engine = place.mortal_engine()
    answers: list[Any] = []
    client._io._command(lambda: client._io._ask_engines("sleep", "all", answers.append, {"e": engine.endpoint}))
    eventually(lambda: bool(engine.heard))
    engine.die()
    eventually(lambda: bool(answers))
    assert isinstance(answers[0], EngineDiedError)


# ---- the scheduler ----


def test_calls_that_await_a_ticket_are_sent_again_to_a_restarted_scheduler_and_streams_go_on(
    place: Place, client: Client, patient: None
) -> None:
    core = ScriptedCore()
    core.pace_s = 0.01
    engine = place.engine(core)
    place.scheduler.tickets = [engine.endpoint]
    running = client.stream("abc", max_tokens=100)
    said = next(running).text
    waiting = client.stream("def", max_tokens=3)
    eventually(lambda: len(place.scheduler.of(Route)) == 2)
    place.scheduler.die()
    said += "".join(next(running).text for _ in range(20))
    place.scheduler = Scheduler(place.scheduler.endpoint, "second", [engine.endpoint])
    assert waiting.read().text == numbers(3)
    assert said + "".join(delta.text for delta in running) == numbers(100)
    assert [route.text for route in place.scheduler.of(Route)] == ["def"]


def test_a_scheduler_that_was_replaced_behind_the_same_connection_is_asked_again(
    place: Place, client: Client, quick: None
) -> None:
    stream = client.stream("abc", max_tokens=3)
    eventually(lambda: bool(place.scheduler.of(Ping)))
    place.scheduler.tickets = [place.engine(ScriptedCore()).endpoint]
    place.scheduler.instance = "second"
    assert stream.read().text == numbers(3)
    assert len(place.scheduler.of(Route)) == 2


def test_a_client_that_the_scheduler_has_forgotten_asks_again(place: Place, client: Client, quick: None) -> None:
    place.scheduler.instance = FORGOTTEN
    stream = client.stream("abc", max_tokens=3)
    eventually(lambda: bool(place.scheduler.of(Route)))
    place.scheduler.tickets = [place.engine(ScriptedCore()).endpoint]
    assert stream.read().text == numbers(3)
    assert len(place.scheduler.of(Route)) >= 2


def test_a_scheduler_that_was_there_may_be_away_longer_than_one_that_never_answered(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_ANSWER_S", 0.2)
    client, engine = Client(place.scheduler.endpoint), place.engine(ScriptedCore())
    waiting = client.stream("abc", max_tokens=3)
    eventually(lambda: bool(place.scheduler.of(Ping)))
    place.scheduler.be_mute()
    with pytest.raises(DeploymentError, match=r"no deployment answers .*headwise serve"):
        Client(place.scheduler.endpoint)
    place.restart_scheduler(*[engine.endpoint] * 3)
    assert waiting.read().text == numbers(3)
    monkeypatch.setattr(connections, "RECONNECT_S", 0.5)
    place.scheduler.be_mute()
    with pytest.raises(DeploymentError, match=r"stopped answering \(waited 0.5 s\)"):
        client.generate("abc")
    client.close()


def test_a_scheduler_at_whose_address_nothing_listens_any_more_is_told_before_one_that_is_silent(
    place: Place, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "RECONNECT_S", 10.0**6)
    monkeypatch.setattr(connections, "REFUSED_S", 0.5)
    client = Client(place.scheduler.endpoint)
    waiting = client.stream("abc", max_tokens=3)
    eventually(lambda: bool(place.scheduler.of(Route)))
    place.scheduler.die()
    for call in (waiting.read, lambda: client.generate("abc")):
        with pytest.raises(DeploymentError, match=r"nothing has listened there for 0.5 s.*headwise serve"):
            call()
    engine = place.engine(ScriptedCore())
    place.scheduler = Scheduler(place.scheduler.endpoint, "second", [engine.endpoint] * 3)
    eventually(lambda: _answers(client))
    client.close()


def _answers(client: Client) -> bool:
    try:
        return client.generate("abc", max_tokens=3).text == numbers(3)
    except DeploymentError:
        return False


def test_a_call_that_is_cancelled_while_it_waits_is_withdrawn(place: Place, client: Client) -> None:
    stream = client.stream("abc")
    eventually(lambda: bool(place.scheduler.of(Route)))
    stream.cancel()
    eventually(lambda: bool(place.scheduler.of(Withdraw)))
    assert place.scheduler.of(Withdraw)[0].key == place.scheduler.of(Route)[0].key


def test_a_call_that_is_cancelled_while_it_waits_for_another_engine_is_withdrawn(place: Place, client: Client) -> None:
    engine = place.mortal_engine()
    place.scheduler.tickets = [engine.endpoint]
    stream = client.stream("abc", max_tokens=9)
    next(stream)
    engine.die()
    eventually(lambda: bool(place.scheduler.of(Reroute)))
    stream.cancel()
    eventually(lambda: bool(place.scheduler.of(Withdraw)))
    assert place.scheduler.of(Withdraw)[0].key == place.scheduler.of(Reroute)[0].key


def test_closing_a_client_withdraws_what_waits_and_aborts_what_runs(place: Place) -> None:
    engine = place.mortal_engine()
    place.scheduler.tickets = [engine.endpoint]
    client = Client(place.scheduler.endpoint)
    running = client.stream("abc", max_tokens=9)
    next(running)
    waiting = client.stream("abc")
    eventually(lambda: len(place.scheduler.of(Route)) == 2)
    client.close()
    for stream in (running, waiting):
        with pytest.raises(RequestAbortedError, match="closed"):
            stream.read()
    eventually(lambda: bool(engine.of(Abort)) and bool(place.scheduler.of(Withdraw)))


# ---- what is asked of it ----


def test_a_session_reaches_the_scheduler(place: Place, client: Client) -> None:
    place.scheduler.tickets = [place.engine(ScriptedCore()).endpoint]
    client.generate("abc", max_tokens=1, session="mine")
    assert place.scheduler.of(Route)[0].session == "mine"
    with pytest.raises(InvalidRequestError, match="session must be a string, got 7"):
        client.generate("abc", session=7)


def test_prefixes_of_texts_tokens_and_chats_can_be_found(place: Place, client: Client) -> None:
    found = {"tokens": 9, "engines": {"engine-0": {"device": 4}}}
    messages = [{"role": "user", "content": "hi"}]
    assert client.find_prefix("abc", cache_salt="mine") == found
    assert client.find_prefix([1, 2]) == found
    assert client.find_chat_prefix(messages) == found
    text, tokens, chat = place.scheduler.of(FindPrefix)
    assert (text.text, text.token_ids, text.chat, text.cache_salt) == ("abc", None, None, "mine")
    assert (tokens.text, tokens.token_ids.tolist(), tokens.chat) == (None, [1, 2], None)
    assert (chat.text, chat.token_ids, chat.chat) == (None, None, {"messages": messages})

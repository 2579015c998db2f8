"""The scheduler's server over real sockets on loopback; the preprocessor, the engines and the store are scripted."""

from __future__ import annotations

import http.client
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq
from support.waiting import PATIENCE_S, eventually

from headwise.cache_controller.block_hash import extend_hashes, hash_seed
from headwise.errors import InvalidRequestError
from headwise.liveness_clock import LONGEST_S
from headwise.runtime.config.model_card import Naming
from headwise.runtime.frontend import dispatcher, pending_calls, scheduler_server
from headwise.runtime.frontend import preprocessing_pool as preparing
from headwise.runtime.frontend.preprocessing_pool import SHORT_BYTES
from headwise.runtime.frontend.prompts import TextLimits
from headwise.runtime.frontend.routing import RouterOptions, engines
from headwise.runtime.frontend.scaling import Exchange, FleetState, Split
from headwise.runtime.frontend.scaling.requests import ANSWER_S, MAX_WAITING
from headwise.runtime.frontend.scheduler_server import SchedulerServer
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import (
    CLIENT_TIMEOUT_S,
    FORGOTTEN,
    Directory,
    EngineLoad,
    EngineStatus,
    Failed,
    FindPrefix,
    GetEngines,
    GetStats,
    Ping,
    Pong,
    PrefixFound,
    Reroute,
    Roll,
    Route,
    Scale,
    Scaled,
    Stats,
    Ticket,
    WaitingPrompts,
    Waits,
    Withdraw,
)
from headwise.runtime.protocol.request import GenerateRequest, PeerHint, SamplingParams, as_token_ids, owner_digest
from headwise.runtime.protocol.users import Tenant, Users
from headwise.sockets.pieces import split
from headwise.storage.index.messages import IndexStats, Matches

SECRET = "of-this-deployment"
BLOCK = 4


class ScriptedPreprocessor:
    """Its tokens are characters, and a request's id is its text."""

    naming = Naming("scripted")

    def prepare(
        self,
        *,
        prompt: Any,
        messages: Any,
        sampling: dict[str, Any],
        priority: int,
        cache_salt: str,
        items: Any,
        adapter: str,
        images: Any,
    ) -> GenerateRequest:
        if not prompt:
            raise InvalidRequestError("the prompt is empty")
        if prompt == "defect":
            raise ZeroDivisionError("a defect")
        tokens = as_token_ids([ord(character) for character in prompt])
        return GenerateRequest(prompt, tokens, SamplingParams.from_wire(sampling), priority, cache_salt, adapter)

    def hashes(self, request: GenerateRequest) -> list[bytes]:
        tokens = np.concatenate((request.prompt_token_ids, np.array(request.output_token_ids, np.int32)))
        hashes: list[bytes] = []
        extend_hashes(hashes, hash_seed("scripted", request.cache_salt), tokens, BLOCK)
        return hashes


class BusyPreprocessor(ScriptedPreprocessor):
    """Is busy with whatever is asked for, until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.prepared: list[str] = []

    def prepare(self, *, prompt: Any, **options: Any) -> GenerateRequest:
        self.prepared.append(prompt[:8])
        if prompt.startswith("long"):
            assert self.may_go_on.wait(PATIENCE_S)
        return super().prepare(prompt=prompt[:8], **options)


class StoreStandIn:
    """Answers at once what `depths` says of the last query, unless it is told not to."""

    def __init__(self) -> None:
        self.socket, self._end = socket.socketpair()
        self.answers: list[Matches | IndexStats] = []
        self.depths: dict[str, tuple[int, int, int]] = {}
        self.queries: list[tuple[int, Sequence[bytes]]] = []
        self.gone_nodes: list[tuple[str, int]] = []
        self.is_there = True
        self.is_late = False
        self.tells_stats = True

    def query(self, key: int, block_hashes: Sequence[bytes]) -> bool:
        self.queries.append((key, block_hashes))
        if not self.is_late:
            self.answer(Matches(key, dict(self.depths)))
        return self.is_there

    def ask_stats(self, key: int) -> bool:
        if self.tells_stats:
            self.answer(IndexStats(key, {"distinct_blocks": 3}))
        return self.is_there

    def answer(self, message: Matches | IndexStats) -> None:
        if self.is_there:
            self.answers.append(message)
            self._end.send(b"!")

    def gone(self, node: str, epoch: int) -> None:
        self.gone_nodes.append((node, epoch))

    def poll(self) -> list[Matches | IndexStats]:
        answers, self.answers = self.answers, []
        if answers:
            self.socket.recv(1 << 16)
        return answers


class Peer:
    """A client or an engine: a socket that speaks the protocol."""

    _keys = itertools.count(1)

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: Any) -> None:
        for piece in split(wire.encode(message)):
            self.socket.send(piece)

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        assert self.socket.poll(int(timeout_s * 1000)), f"nothing came within {timeout_s} s"
        return wire.decode(self.socket.recv())

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.receive()

    def stats(self) -> dict[str, Any]:
        answer = self.ask(GetStats(next(self._keys)))
        assert isinstance(answer, Stats)
        return answer.stats

    def hears_nothing(self) -> bool:
        """Whether all that was sent so far has been taken, and nothing was said to it but the answer to this."""
        self.send(Ping())
        return isinstance(self.receive(), Pong)


class Deployment:
    """A server, and as many peers as a test wants."""

    def __init__(
        self, store: StoreStandIn | None = None, preprocessor: ScriptedPreprocessor | None = None, **options: Any
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.store = store
        self.exchange = Exchange()
        self._silent: list[str] = []
        routing = RouterOptions(
            **{"block_size": BLOCK, "engine_queue": 2, "max_num_seqs": 4, **options.pop("routing", {})}
        )
        self.server = SchedulerServer(
            preprocessor or ScriptedPreprocessor(),
            "127.0.0.1",
            options.pop("port", 0),
            secret=SECRET,
            model="scripted",
            routing=routing,
            store=store,
            exchange=self.exchange,
            **options,
        )
        self.server.start()
        self.engines = self.peer()

    def peer(self) -> Peer:
        return Peer(self.context, self.server.port)

    def report(
        self,
        *names: str,
        epoch: int = 0,
        received: tuple[str, ...] = (),
        is_leaving: bool = False,
        **work: Any,
    ) -> None:
        """Statuses of these engines, which the server has taken in when this returns."""
        load = EngineLoad(**{"prefill_token_s": 1.0, "host_token_s": 0.1, "storage_token_s": 0.1, **work})
        for name in names:
            status = EngineStatus(SECRET, name, f"tcp://{name}", 0, {}, epoch, load, received, is_leaving=is_leaving)
            self.engines.send(status)
        assert self.engines.hears_nothing()

    @property
    def silent(self) -> list[str]:
        """Engines that the owner was told of, each as often as it was."""
        self._silent += self.exchange.swap(FleetState(1, "")).silent
        return self._silent

    def close(self) -> None:
        self.server.stop()
        self.context.destroy(linger=0)


def pass_time(now: list[float], deployment: Deployment, peer: Peer, seconds: float) -> None:
    """Let the server's clock go on while it is awake, and looks."""
    for _ in range(round(seconds / LONGEST_S)):
        now[0] += LONGEST_S
        turns = deployment.server.loop_count
        while deployment.server.loop_count < turns + 2:  # the second begins after the time has passed
            assert peer.hears_nothing()


@pytest.fixture
def make() -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def build(**options: Any) -> Deployment:
        made.append(Deployment(**options))
        return made[-1]

    yield build
    for deployment in made:
        deployment.close()


def route(key: int, text: str, **options: Any) -> Route:
    fields = {"chat": None, "sampling": {}, "priority": 0, "cache_salt": "", **options}
    return Route(key, text, None, **fields)


def index_answers(client: Peer) -> None:
    eventually(lambda: not client.stats()["index"]["silent"])


Make = Callable[..., Deployment]


# ---- the index ----


def test_a_request_goes_where_the_index_says_its_prefix_is(make: Make) -> None:
    deployment = make(store=StoreStandIn())
    deployment.report("a", "b", "c")
    client = deployment.peer()
    index_answers(client)
    for key, name in enumerate("abc", start=1):
        deployment.store.depths = {name: (2, 2, 2)}
        assert client.ask(route(key, f"{name}: eight and more")).endpoint == f"tcp://{name}"
    assert client.stats()["scheduler"]["decisions"] == {"hit": 3}


def test_the_index_is_asked_for_the_hashes_of_the_prompt_s_full_blocks(make: Make) -> None:
    deployment = make(store=StoreStandIn())
    deployment.report("a", "b")
    client = deployment.peer()
    index_answers(client)
    ticket = client.ask(route(1, "eleven char", cache_salt="tenant"))
    ((_, hashes),) = deployment.store.queries
    assert list(hashes) == ScriptedPreprocessor().hashes(ticket.request)
    assert len(hashes) == 2


def test_a_store_that_is_late_is_waited_for_once_and_then_done_without_until_it_speaks(make: Make) -> None:
    deployment = make(store=StoreStandIn())
    deployment.report("a", "b")
    client = deployment.peer()
    index_answers(client)
    deployment.store.is_late, deployment.store.is_there = True, True
    deployment.store.tells_stats = False
    assert isinstance(client.ask(route(1, "late answer")), Ticket)
    asked = len(deployment.store.queries)
    for key in range(2, 4):
        assert isinstance(client.ask(route(key, f"not asked {key}")), Ticket)
    stats = client.stats()
    assert len(deployment.store.queries) == asked == 1
    assert stats["index"]["silent"]
    assert stats["scheduler"]["index"]["late"] == 1
    assert any("has not answered" in text for _, text in stats["faults"])
    deployment.store.answer(Matches(deployment.store.queries[0][0], {"b": (9, 9, 9)}))  # late, but a sign of life
    index_answers(client)
    assert isinstance(client.ask(route(9, "asked again")), Ticket)
    assert len(deployment.store.queries) == 2


def test_a_store_that_is_not_there_costs_no_wait(make: Make) -> None:
    store = StoreStandIn()
    store.is_there = False
    deployment = make(store=store)
    deployment.report("a", "b")
    client = deployment.peer()
    for key in range(1, 5):
        assert isinstance(client.ask(route(key, f"prompt {key}")), Ticket)
    assert not store.queries
    assert client.stats()["index"] == {"silent": True}


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_other_policies_do_not_ask_the_store(make: Make, policy: str) -> None:
    deployment = make(store=StoreStandIn(), routing={"policy": policy})
    deployment.report("a", "b")
    client = deployment.peer()
    index_answers(client)
    went = [client.ask(route(key, f"prompt {key}")).endpoint for key in range(1, 3)]
    assert sorted(went) == ["tcp://a", "tcp://b"]
    assert not deployment.store.queries


def test_finding_a_prefix_tells_tokens_by_engine_and_tier(make: Make) -> None:
    deployment = make(store=StoreStandIn())
    deployment.report("a", "b")
    client = deployment.peer()
    index_answers(client)
    deployment.store.depths = {"a": (1, 2, 2)}
    found = client.ask(FindPrefix(7, "eleven char", None, None, ""))
    none = {"device": 0, "host": 0, "storage": 0}
    assert found == PrefixFound(7, 11, {"a": {"device": 4, "host": 8, "storage": 8}, "b": none})


def test_a_request_waits_for_the_index_as_long_as_it_is_told_to(make: Make) -> None:
    now = [1e9]
    deployment = make(store=StoreStandIn(), clock=lambda: now[0], index_timeout_s=5.0)
    deployment.report("a", "b")
    client, store = deployment.peer(), deployment.store
    index_answers(client)
    store.is_late, store.tells_stats = True, False
    client.send(route(1, "eleven char"))
    eventually(lambda: len(store.queries) == 1)
    pass_time(now, deployment, client, 2.0)
    deployment.report("a", "b")
    store.answer(Matches(store.queries[0][0], {"b": (2, 2, 2)}))
    assert client.receive().endpoint == "tcp://b"


def test_finding_a_prefix_waits_for_an_index_that_is_late_or_is_started_anew(make: Make) -> None:
    deployment = make(store=StoreStandIn())
    deployment.report("a", "b")
    client = deployment.peer()
    index_answers(client)
    store = deployment.store
    store.tells_stats = False
    store.is_late = True
    client.send(FindPrefix(1, "eleven char", None, None, ""))
    eventually(lambda: len(store.queries) == 1)
    assert isinstance(client.ask(route(2, "finds it late")), Ticket)
    store.answer(Matches(store.queries[0][0], {"a": (1, 1, 1)}))
    assert client.receive().engines["a"]["device"] == 4

    client.send(FindPrefix(3, "eleven char", None, None, ""))
    eventually(lambda: len(store.queries) == 3)
    assert isinstance(client.ask(route(4, "finds it late")), Ticket)  # from here on the index counts as silent
    client.send(FindPrefix(5, "eleven char", None, None, ""))
    assert client.hears_nothing()
    store.is_late, store.depths = False, {"a": (2, 2, 2)}
    store.answer(IndexStats(0, {}))
    assert {(found.key, found.engines["a"]["device"]) for found in (client.receive(), client.receive())} == {
        (3, 8),
        (5, 8),
    }


@pytest.mark.parametrize("is_there", [False, True])
def test_finding_a_prefix_is_given_up_where_the_index_stays_silent(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(dispatcher, "LOOKUP_TIMEOUT_S", 0.2)
    store = StoreStandIn()
    store.is_there, store.is_late = is_there, True
    deployment = make(store=store)
    deployment.report("a")
    client = deployment.peer()
    if is_there:
        index_answers(client)
        store.tells_stats = False
    answer = client.ask(FindPrefix(7, "eleven char", None, None, ""))
    assert (answer.key, answer.error) == (7, "DeploymentError")
    assert client.stats()["scheduler"]["pending"] == 0


def test_finding_a_prefix_without_an_index_is_an_error_with_a_remedy(make: Make) -> None:
    deployment = make()
    deployment.report("a")
    answer = deployment.peer().ask(FindPrefix(7, "eleven char", None, None, ""))
    assert isinstance(answer, Failed)
    assert (answer.key, answer.error) == (7, "DeploymentError")
    assert "the index does not answer" in answer.message


# ---- the queue ----


def test_what_no_engine_can_take_waits_and_goes_by_priority_then_arrival(make: Make) -> None:
    deployment = make(routing={"engine_queue": 1})
    deployment.report("a", waiting=1)
    client = deployment.peer()
    for key, priority in ((1, 0), (2, 0), (3, -5), (4, 0)):
        client.send(route(key, f"prompt {key}", priority=priority))
        eventually(lambda key=key: client.stats()["scheduler"]["queued"] == key)
    order = []
    for _ in range(4):
        received = tuple(f"prompt {key}" for key in order)
        deployment.report("a", waiting=0, received=received)
        order.append(client.receive().key)
        assert client.hears_nothing()
    assert order == [3, 1, 2, 4]


def in_the_order_in_which_they_go(
    deployment: Deployment, client: Peer, texts: dict[int, str], **said: Any
) -> list[int]:
    """The keys of these calls, which wait until an engine has room for one of them after the other."""
    deployment.report("a", waiting=1)
    for count, (key, text) in enumerate(texts.items(), 1):
        client.send(route(key, text, **{name: value.get(key, "") for name, value in said.items()}))
        eventually(lambda count=count: client.stats()["scheduler"]["queued"] == count)
    order: list[int] = []
    while len(order) < len(texts):
        deployment.report("a", waiting=0, received=tuple(texts[key] for key in order))
        order.append(client.receive().key)
        assert client.hears_nothing()
    return order


@pytest.mark.parametrize("is_fair", [True, False])
def test_what_waits_has_its_turn_where_prompts_have(make: Make, is_fair: bool) -> None:
    deployment = make(routing={"engine_queue": 1, "fair_prompts": is_fair})
    texts = {1: "1" * 40, 2: "2" * 30, 3: "3" * 10, 4: "4" * 35}
    order = in_the_order_in_which_they_go(deployment, deployment.peer(), texts)
    assert order == ([3, 2, 4, 1] if is_fair else [1, 2, 3, 4])


def test_who_sends_many_requests_has_others_go_between_while_they_wait(make: Make) -> None:
    deployment = make(routing={"engine_queue": 1, "fair_prompts": True})
    texts = {key: f"{key:<8}" for key in range(1, 13)}
    salts = {**dict.fromkeys(range(1, 11), "many"), 11: "few", 12: "few"}
    order = in_the_order_in_which_they_go(deployment, deployment.peer(), texts, cache_salt=salts)
    assert [key for key in order if key < 11] == list(range(1, 11))
    assert order.index(11) <= 2
    assert order.index(12) <= 4


def test_who_is_on_behalf_of_a_tenant_is_the_tenant_whatever_salts_it_has(make: Make) -> None:
    deployment = make(routing={"engine_queue": 1, "fair_prompts": True})
    texts = {key: f"{key:<8}" for key in range(1, 13)}
    salts = {key: f"salt {key}" for key in texts}
    tenants = {**dict.fromkeys(range(1, 12), "many"), 12: "one"}
    order = in_the_order_in_which_they_go(deployment, deployment.peer(), texts, cache_salt=salts, tenant=tenants)
    assert order.index(12) <= 1


def test_a_tenant_with_a_share_of_three_has_three_go_for_each_one_of_another(make: Make) -> None:
    users = Users({"of many": Tenant("many", share=3), "of few": Tenant("few")})
    deployment = make(routing={"engine_queue": 1, "fair_prompts": True}, users=users)
    texts = {key: f"{key:<8}" for key in range(1, 17)}
    tenants = {key: "many" if key <= 12 else "few" for key in texts}
    order = in_the_order_in_which_they_go(deployment, deployment.peer(), texts, tenant=tenants)
    assert 5 <= sum(key <= 12 for key in order[:8]) <= 7
    assert 8 <= sum(key <= 12 for key in order[:12]) <= 10


def test_what_an_engine_has_of_a_prompt_that_waits_does_not_count(make: Make) -> None:
    deployment = make(store=StoreStandIn(), routing={"engine_queue": 1, "fair_prompts": True})
    client = deployment.peer()
    index_answers(client)
    store = deployment.store
    deployment.report("a", waiting=1)
    client.send(route(1, "1" * 24))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 1)
    store.depths = {"b": (0, 0, 0), "a": (2, 9, 9)}
    client.send(route(2, "2" * 40))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 2)
    eventually(lambda: not store.answers)
    assert len(store.queries) == 2
    assert client.hears_nothing()
    deployment.report("a", waiting=0)
    assert client.receive().key == 2
    deployment.report("a", waiting=0, received=("2" * 40,))
    assert client.receive().key == 1


def test_a_store_that_does_not_answer_keeps_nobody_s_place(make: Make) -> None:
    deployment = make(store=StoreStandIn(), routing={"engine_queue": 1, "fair_prompts": True})
    client = deployment.peer()
    index_answers(client)
    deployment.store.is_late = True
    assert in_the_order_in_which_they_go(deployment, client, {1: "1" * 40, 2: "2" * 8}) == [2, 1]
    assert client.stats()["scheduler"]["pending"] == 0


def test_who_would_go_before_most_of_what_waits_at_a_full_engine_goes_there(make: Make) -> None:
    deployment = make(routing={"engine_queue": 4, "fair_prompts": True})
    waiting = WaitingPrompts(0, 50.0, ((owner_digest("many"), 4, 80),))
    deployment.report("a", waiting=4, prompts=waiting)
    client = deployment.peer()
    client.send(route(1, "1" * 60))
    client.send(route(2, "2" * 20, cache_salt="many"))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 2)
    client.send(route(3, "3" * 20, cache_salt="few"))
    assert client.receive().key == 3
    client.send(route(4, "4" * 8))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 3)
    deployment.report("a", waiting=4, prompts=waiting, received=("3" * 20,))
    assert client.receive().key == 4
    deployment.report("a", waiting=3, prompts=waiting, received=("4" * 8,))
    assert client.receive().key == 2


def test_a_full_queue_refuses_who_has_most_in_it(make: Make) -> None:
    deployment = make(max_queued=4)
    deployment.report("a", waiting=2)
    many, few = deployment.peer(), deployment.peer()
    for key in range(1, 5):
        many.send(route(key, f"prompt {key}"))
    eventually(lambda: few.stats()["scheduler"]["queued"] == 4)
    few.send(route(5, "mine"))
    refused = many.receive()
    assert (refused.key, refused.error) == (4, "OverloadedError")
    assert few.hears_nothing()
    refused = many.ask(route(6, "one too many"))
    assert (refused.key, refused.error) == (6, "OverloadedError")
    few.send(route(7, "mine, too"))  # then each has two
    assert many.receive().key == 3
    assert few.ask(route(8, "one too many")).key == 8
    stats = few.stats()["scheduler"]
    assert (stats["pending"], stats["refused"]) == (4, 4)


def test_a_full_queue_counts_a_tenant_s_requests_by_whatever_connection_they_come(make: Make) -> None:
    deployment = make(max_queued=3)
    deployment.report("a", waiting=2)
    server, other = deployment.peer(), deployment.peer()
    for key, tenant in enumerate(("a", "b", "a"), 1):
        server.send(route(key, f"prompt {key}", tenant=tenant))
    eventually(lambda: server.stats()["scheduler"]["queued"] == 3)
    assert other.ask(route(4, "one too many", tenant="a")).error == "OverloadedError"
    other.send(route(5, "for another one", tenant="c"))
    assert server.receive().key == 3
    assert other.hears_nothing()
    deployment.report("a")
    assert [server.receive().key for _ in range(2)] == [1, 2]
    nothing = {"routed": 0, "refused": 0, "prompt_tokens": 0, "waiting": 0}
    assert other.stats()["scheduler"]["tenants"] == {
        "a": {"routed": 1, "refused": 2, "prompt_tokens": 8, "waiting": 0},
        "b": {**nothing, "routed": 1, "prompt_tokens": 8},
    }


def test_nobody_is_refused_for_what_can_never_be_served(make: Make) -> None:
    deployment = make(max_queued=2, size=TextLimits(10, 3).size)
    deployment.report("a", waiting=2)
    many, few = deployment.peer(), deployment.peer()
    for key in (1, 2):
        many.send(route(key, f"prompt {key}"))
    eventually(lambda: few.stats()["scheduler"]["queued"] == 2)
    assert few.ask(route(3, "1" * 31)).error == "InvalidRequestError"
    assert many.hears_nothing()


def test_what_was_accepted_before_is_not_refused_for_others(make: Make) -> None:
    deployment = make(max_queued=2)
    deployment.report("a", waiting=2)
    many, few = deployment.peer(), deployment.peer()
    for key in (1, 2):
        request = GenerateRequest(f"r{key}", as_token_ids([1, 2, 3]), SamplingParams(max_tokens=9))
        many.send(Reroute(key, request, ""))
    eventually(lambda: few.stats()["scheduler"]["queued"] == 2)
    assert few.ask(route(3, "new")).error == "OverloadedError"
    assert many.hears_nothing()


def test_a_full_queue_refuses_with_numbers(make: Make) -> None:
    deployment = make(max_queued=2)
    deployment.report("a", "b", waiting=2)
    client = deployment.peer()
    for key in range(1, 3):
        client.send(route(key, f"prompt {key}"))
    answer = client.ask(route(3, "one too many"))
    assert isinstance(answer, Failed)
    assert answer.error == "OverloadedError"
    assert "2 requests wait for an engine already (max_queued 2)" in answer.message
    assert "of 2 engines 2 are full (engine_queue 2)" in answer.message


def test_each_of_many_calls_at_once_is_answered_however_short_the_queue_is(make: Make) -> None:
    deployment = make(max_queued=2)
    client = deployment.peer()
    client.socket.setsockopt(zmq.RCVHWM, 0)
    for key in range(3000):
        client.send(route(key, "a"))
    refused = list[Any]()
    while len(refused) < 2998:
        answer = client.receive()
        if not isinstance(answer, Waits):  # those in the queue, if this takes long
            refused.append(answer)
    others = [answer for answer in refused if not isinstance(answer, Failed) or "max_queued 2" not in answer.message]
    assert not others, others[:3]
    assert len({answer.key for answer in refused}) == 2998


def test_calls_of_a_connection_that_has_ended_leave_the_queue(make: Make) -> None:
    deployment = make()
    client, gone = deployment.peer(), deployment.peer()
    gone.send(route(1, "a"))
    assert gone.hears_nothing()
    gone.socket.close(linger=0)
    eventually(lambda: client.stats()["scheduler"]["pending"] == 0)


def test_a_request_that_was_withdrawn_leaves_the_queue(make: Make) -> None:
    deployment = make()
    deployment.report("a", waiting=2)
    client = deployment.peer()
    client.send(route(1, "not wanted"))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 1)
    client.send(Withdraw(1))
    client.send(route(2, "wanted"))
    deployment.report("a", waiting=0)
    assert client.receive().key == 2
    assert client.stats()["scheduler"]["pending"] == 0


def test_a_ticket_that_was_withdrawn_frees_its_place(make: Make) -> None:
    deployment = make(routing={"engine_queue": 1})
    deployment.report("a")
    client = deployment.peer()
    assert isinstance(client.ask(route(1, "not wanted")), Ticket)
    client.send(route(2, "waits"))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 1)
    client.send(Withdraw(1))
    assert client.receive().key == 2


def test_what_waits_for_a_client_that_is_gone_is_dropped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_server, "CLIENT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(scheduler_server, "_SWEEP_S", 0.1)
    deployment = make()
    deployment.report("a", waiting=2)
    gone, watcher = deployment.peer(), deployment.peer()
    gone.send(route(1, "nobody waits"))
    eventually(lambda: watcher.stats()["scheduler"]["pending"] == 1)
    eventually(lambda: watcher.stats()["scheduler"]["pending"] == 0)


def test_a_request_that_waits_for_lost_engines_for_long_is_refused_with_the_reason(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_server, "_SWEEP_S", 0.1)
    monkeypatch.setattr(engines, "STATUS_TIMEOUT_S", 0.2)
    deployment = make(hold_s=0.3)
    deployment.report("a", accepts=False)
    answer = deployment.peer().ask(route(1, "nobody takes it"))
    assert isinstance(answer, Failed)
    assert "no engine has reported for 0.3 s: of 1 engines 0 are full" in answer.message


def test_a_request_waits_for_an_engine_that_sleeps_as_long_as_it_takes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_server, "_SWEEP_S", 0.1)
    deployment = make(hold_s=0.1)
    deployment.report("a", accepts=False)
    client = deployment.peer()
    client.send(route(1, "it sleeps"))
    time.sleep(0.4)
    assert client.hears_nothing()
    deployment.report("a")
    assert isinstance(client.receive(), Ticket)


# ---- texts ----


def test_short_prompts_do_not_wait_for_long_ones_that_are_being_tokenised(make: Make) -> None:
    preprocessor = BusyPreprocessor()
    deployment = make(preprocessor=preprocessor, routing={"engine_queue": 9})
    deployment.report("a")
    hog, client = deployment.peer(), deployment.peer()
    for key in range(1, 5):
        hog.send(route(key, f"long {key}" + " and more" * SHORT_BYTES))
    assert [client.ask(route(key, f"short {key}")).key for key in range(1, 4)] == [1, 2, 3]
    assert [each for each in preprocessor.prepared if each.startswith("long")] == ["long 1 a"]
    preprocessor.may_go_on.set()
    assert sorted(hog.receive().key for _ in range(4)) == [1, 2, 3, 4]


def test_what_was_withdrawn_is_not_tokenised(make: Make) -> None:
    preprocessor = BusyPreprocessor()
    deployment = make(preprocessor=preprocessor, tokenizers=1, routing={"engine_queue": 9})
    deployment.report("a")
    client = deployment.peer()
    for key, text in enumerate(("long one", "unwanted", "wanted"), start=1):
        client.send(route(key, text))
    client.send(Withdraw(2))
    assert client.hears_nothing()
    preprocessor.may_go_on.set()
    assert sorted(client.receive().key for _ in range(2)) == [1, 3]
    assert preprocessor.prepared == ["long one", "wanted"]


def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenised(make: Make) -> None:
    preprocessor = BusyPreprocessor()
    deployment = make(preprocessor=preprocessor, size=TextLimits(10, 3).size)
    deployment.report("a")
    client = deployment.peer()
    for key, question in enumerate((route(1, "1" * 31), FindPrefix(2, "1" * 31, None, None, "")), start=1):
        answer = client.ask(question)
        assert (answer.key, answer.error) == (key, "InvalidRequestError")
        assert "a text of at least 31 bytes cannot fit: send at most 30, as 10 tokens fit" in answer.message
    assert isinstance(client.ask(route(3, "1" * 30)), Ticket)
    assert preprocessor.prepared == ["1" * 8]
    assert client.stats()["scheduler"]["pending"] == 0


def test_too_much_text_of_one_client_keeps_nobody_else_s_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_WAITING_BYTES", 20)
    preprocessor = BusyPreprocessor()
    deployment = make(preprocessor=preprocessor, tokenizers=1, routing={"engine_queue": 9})
    deployment.report("a")
    hog, client = deployment.peer(), deployment.peer()
    hog.send(route(1, "long one"))
    eventually(lambda: preprocessor.prepared == ["long one"])
    for key in (2, 3):
        hog.send(route(key, f"{key} waits 10"))
    assert hog.hears_nothing()
    client.send(route(4, "another's"))
    refused = hog.receive()
    assert (refused.key, refused.error) == (3, "OverloadedError")
    preprocessor.may_go_on.set()
    assert client.receive().key == 4
    assert sorted(hog.receive().key for _ in range(2)) == [1, 2]


def test_too_much_text_at_once_is_refused_until_some_is_tokenised(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_WAITING_BYTES", 20)
    preprocessor = BusyPreprocessor()
    deployment = make(preprocessor=preprocessor, tokenizers=1, routing={"engine_queue": 9})
    deployment.report("a")
    client = deployment.peer()
    client.send(route(1, "long one"))
    eventually(lambda: preprocessor.prepared == ["long one"])
    client.send(route(2, "it waits with 20 b."))
    answer = client.ask(route(3, "one too many"))
    assert (answer.key, answer.error) == (3, "OverloadedError")
    assert "too much text waits to be tokenised" in answer.message
    preprocessor.may_go_on.set()
    assert sorted(client.receive().key for _ in range(2)) == [1, 2]
    assert isinstance(client.ask(route(4, "fits again")), Ticket)


# ---- engines come and go ----


def test_requests_wait_for_engines_that_a_new_scheduler_has_not_heard_of_yet(make: Make) -> None:
    deployment = make()
    client = deployment.peer()
    client.send(route(1, "early"))
    assert client.hears_nothing()
    deployment.report("a")
    assert isinstance(client.receive(), Ticket)


def test_a_deployment_that_ends_refuses_requests_while_engines_finish_theirs(make: Make) -> None:
    deployment = make()
    deployment.report("a", is_leaving=True)
    client = deployment.peer()
    client.send(route(1, "early"))
    assert client.hears_nothing()
    deployment.exchange.swap(FleetState(0, "", is_closing=True))
    answer = client.receive()
    assert isinstance(answer, Failed)
    assert answer.message == "the deployment is stopping"


def test_where_there_was_never_an_engine_the_error_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "ENGINES_REPORT_S", 0.1)
    answer = make().peer().ask(route(1, "nobody is there"))
    assert isinstance(answer, Failed)
    assert (answer.error, answer.message[:18]) == ("NotReadyError", "no engine is ready")


def test_a_rerouted_request_goes_elsewhere_with_what_it_has_and_is_not_prepared_again(make: Make) -> None:
    deployment = make(store=StoreStandIn())
    deployment.report("a", "b")
    client = deployment.peer()
    index_answers(client)
    request = GenerateRequest("r", as_token_ids([1, 2, 3]), SamplingParams(max_tokens=9), output_token_ids=(4, 5, 6))
    for key, lost, other in ((1, "a", "b"), (2, "b", "a")):
        deployment.report("a", "b", received=("r",), epoch=key)
        ticket = client.ask(Reroute(key, request, f"tcp://{lost}"))
        assert ticket.endpoint == f"tcp://{other}"
        assert ticket.request.output_token_ids == (4, 5, 6)
    assert len(deployment.store.queries[-1][1]) == 1  # one full block of the six tokens
    stats = client.stats()
    assert stats["scheduler"]["rerouted"] == 2
    assert any("a was lost by a client" in text for _, text in stats["faults"])


def test_an_engine_that_was_lost_gets_nothing_before_its_next_status(make: Make) -> None:
    deployment = make()
    deployment.report("a")
    client = deployment.peer()
    request = GenerateRequest("r", as_token_ids([1]), SamplingParams(max_tokens=9))
    client.send(Reroute(1, request, "tcp://a"))
    assert client.hears_nothing()
    eventually(lambda: client.stats()["scheduler"]["queued"] == 1)
    deployment.report("a", epoch=1)
    assert client.receive().endpoint == "tcp://a"


def test_one_client_s_word_does_not_take_an_engine_that_reports_from_the_others(make: Make) -> None:
    deployment = make()
    deployment.report("a")
    client, other = deployment.peer(), deployment.peer()
    request = GenerateRequest("r", as_token_ids([1]), SamplingParams(max_tokens=9))
    for key in range(3):
        client.send(Reroute(key, request, "tcp://a"))
    assert client.hears_nothing()
    assert other.ask(route(1, "x")).endpoint == "tcp://a"
    faults = [text for _, text in client.stats()["faults"]]
    assert faults == ["a was lost by a client, but reports: can all clients reach tcp://a?"]


def test_an_engine_that_a_client_has_lost_and_that_does_not_report_in_time_is_lost_to_all(make: Make) -> None:
    now = [1e9]
    deployment = make(clock=lambda: now[0])
    deployment.report("a", "b")
    client = deployment.peer()
    request = GenerateRequest("r", as_token_ids([1]), SamplingParams(max_tokens=9))
    assert client.ask(Reroute(1, request, "tcp://a")).endpoint == "tcp://b"
    pass_time(now, deployment, client, 1.0)
    deployment.report("b", received=("r",))
    pass_time(now, deployment, client, 0.5)
    assert [client.ask(route(key, f"x{key}")).endpoint for key in (2, 3)] == ["tcp://b"] * 2
    assert [text for _, text in client.stats()["faults"]][-1] == "a was lost by a client"


def test_an_engine_whose_connection_to_the_scheduler_has_ended_is_lost_without_anybody_s_word(make: Make) -> None:
    deployment = make()
    deployment.report("a")
    deployment.engines.socket.close(linger=0)
    client = deployment.peer()
    eventually(lambda: "a has lost its connection to the scheduler" in str(client.stats()["faults"]))
    client.send(route(1, "x"))
    assert client.hears_nothing()
    deployment.engines = deployment.peer()
    deployment.report("a", epoch=1)
    assert client.receive().endpoint == "tcp://a"


def test_a_reroute_of_what_is_no_request_is_an_error_of_that_call(make: Make) -> None:
    client = make().peer()
    request = GenerateRequest("r", as_token_ids([1]), SamplingParams(), lora_id="a" * 2000)
    failed = client.ask(Reroute(5, request, "tcp://a"))
    assert (failed.key, failed.error) == (5, "InvalidRequestError")


def test_a_silent_engine_is_given_up_once_and_the_index_told(make: Make) -> None:
    now = [1e9]
    deployment = make(store=StoreStandIn(), clock=lambda: now[0], routing={"engine_timeout_s": 20.0})
    deployment.report("a", "b", epoch=7)
    client = deployment.peer()
    pass_time(now, deployment, client, 4.0)
    eventually(lambda: any("a is silent" in text for _, text in client.stats()["faults"]))
    assert not deployment.silent
    deployment.report("b", epoch=7)
    pass_time(now, deployment, client, 17.0)
    eventually(lambda: bool(deployment.silent))
    pass_time(now, deployment, client, 2.0)
    assert client.stats()["engines"]["a"]["silent_s"] == 23.0
    assert deployment.silent == ["a"]
    assert deployment.store.gone_nodes == [("a", 7)]


def test_a_scheduler_that_was_suspended_gives_nobody_up(make: Make) -> None:
    now = [1e9]
    deployment = make(clock=lambda: now[0], routing={"engine_queue": 0})
    deployment.report("a", "b")
    client = deployment.peer()
    client.send(route(1, "waits"))
    assert client.hears_nothing()
    now[0] += 3600.0
    turns = deployment.server.loop_count
    eventually(lambda: deployment.server.loop_count > turns + 2)
    stats = client.stats()
    assert stats["faults"] == []
    assert not deployment.silent
    assert stats["scheduler"]["queued"] == 1


def test_messages_that_take_long_do_not_make_a_round_of_the_loop_long(make: Make) -> None:
    """Else a scheduler that clients keep busy would seem to hang, and be replaced."""
    now, rounds, may_go_on = [1e9], list[int](), threading.Event()

    def size(prompt: Any, messages: Any) -> int:
        may_go_on.wait(PATIENCE_S)
        now[0] += 1.0
        rounds.append(deployment.server.loop_count)
        return 1

    deployment = make(clock=lambda: now[0], size=size)
    client = deployment.peer()
    for key in range(1, 9):
        client.send(route(key, "waits"))
    may_go_on.set()
    client.send(Ping())
    eventually(lambda: isinstance(client.receive(), Pong))  # before it others may be told that they wait
    assert len(set(rounds)) == 8


def test_a_client_that_was_silent_for_too_long_is_told_that_it_is_forgotten(make: Make) -> None:
    now = [1e9]
    deployment = make(clock=lambda: now[0])
    suspended, other = deployment.peer(), deployment.peer()
    deployment.report("a", waiting=2)
    suspended.send(route(1, "waits"))
    assert suspended.hears_nothing()
    pass_time(now, deployment, other, CLIENT_TIMEOUT_S + 2.0)
    assert suspended.receive() == Pong(FORGOTTEN)
    deployment.report("a")
    assert suspended.ask(route(1, "waits")).endpoint == "tcp://a"


def test_a_call_that_is_asked_again_while_it_is_under_way_is_answered_once(make: Make) -> None:
    deployment = make()
    deployment.report("a", waiting=2)
    client = deployment.peer()
    for _ in range(3):
        client.send(route(1, "waits"))
    assert client.hears_nothing()
    deployment.report("a")
    assert client.receive().endpoint == "tcp://a"
    assert client.hears_nothing()
    assert client.stats()["scheduler"]["routed"] == 1


def test_another_scheduler_at_the_same_port_serves_the_same_peers(make: Make) -> None:
    first = make()
    first.report("a")
    client = first.peer()
    assert client.ask(route(1, "before")).endpoint == "tcp://a"
    pong = client.ask(Ping())
    first.server.stop()
    farewell = client.receive()
    assert (farewell.key, farewell.error, farewell.message) == (0, "DeploymentError", "the deployment is stopping")
    second = make(port=first.server.port)
    second.report("a")
    assert client.ask(route(2, "after")).endpoint == "tcp://a"
    assert client.ask(Ping()).instance != pong.instance


# ---- what clients send ----


def test_two_clients_with_the_same_keys_get_their_own_tickets(make: Make) -> None:
    deployment = make()
    deployment.report("a", "b")
    clients = [deployment.peer(), deployment.peer()]
    for index, client in enumerate(clients):
        client.send(route(1, f"of client {index}"))
    assert [client.receive().request.request_id for client in clients] == ["of client 0", "of client 1"]


@pytest.mark.parametrize(("text", "error"), [("", "InvalidRequestError"), ("defect", "HeadwiseError")])
def test_what_cannot_be_prepared_is_the_caller_s_error(make: Make, text: str, error: str) -> None:
    deployment = make()
    deployment.report("a")
    client = deployment.peer()
    answer = client.ask(route(5, text))
    assert isinstance(answer, Failed)
    assert (answer.key, answer.error) == (5, error)
    assert isinstance(client.ask(route(6, "fine")), Ticket)


@pytest.mark.parametrize("data", [b"", b"\xc1", wire.encode(Pong())])
def test_what_is_no_message_is_answered_counted_and_dropped(make: Make, data: bytes) -> None:
    deployment = make()
    client = deployment.peer()
    client.socket.send(data)
    assert isinstance(client.receive(), Failed)
    assert client.stats()["scheduler"]["malformed"] == 1


def test_http_on_the_port_is_told_what_the_port_is_and_disturbs_nobody(make: Make) -> None:
    deployment = make()
    client = deployment.peer()
    connection = http.client.HTTPConnection("127.0.0.1", deployment.server.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/chat/completions", body="{}")
    assert "over ZeroMQ and not HTTP: connect with headwise.Client" in connection.getresponse().read().decode()
    connection.close()
    assert client.stats()["scheduler"]["malformed"] == 0


def test_a_status_with_another_secret_is_counted_and_ignored(make: Make) -> None:
    deployment = make()
    client = deployment.peer()
    client.send(EngineStatus("guess", "evil", "tcp://evil", 0, {}))
    stats = client.stats()
    assert stats["engines"] == {}
    assert stats["scheduler"]["strangers"] == 1


def test_sessions_stay_together(make: Make) -> None:
    deployment = make()
    client, went, last = deployment.peer(), set(), ""
    for key in range(1, 9):
        deployment.report(*"abcd", received=(last,))
        last = f"turn {key}"
        went.add(client.ask(route(key, last, session="chat")).endpoint)
    assert len(went) == 1


# ---- the owner of the engines ----


def test_a_number_of_engines_is_answered_once_the_owner_has_taken_the_last_one_asked_for(make: Make) -> None:
    deployment = make()
    one, two = deployment.peer(), deployment.peer()
    one.send(Scale(1, 3))
    one.send(Scale(1, 3))  # it does not know whether its first question arrived
    assert one.hears_nothing()
    two.send(Scale(1, None))
    assert two.hears_nothing()
    wish = deployment.exchange.swap(FleetState(1, "as it was")).wish
    assert wish is not None
    assert wish.replicas is None
    assert one.hears_nothing()
    deployment.exchange.swap(FleetState(2, "2: as needed", wish=wish.id))
    failed = one.receive()
    assert isinstance(failed, Failed)
    assert failed.message.startswith("another client asked for as many engines as are needed at the same time")
    instead = ", in place of 3 engines, which another client asked for at the same time"
    assert two.receive() == Scaled(1, f"2: as needed{instead}")
    assert one.hears_nothing()


def test_of_two_scale_commands_at_once_the_one_that_does_not_count_ends_with_an_error(make: Make) -> None:
    deployment = make()
    command = [sys.executable, "-m", "headwise", "scale", "--address", f"127.0.0.1:{deployment.server.port}"]
    running = []
    for number in (3, 2):
        scale = [*command, "--replicas", str(number)]
        running.append(subprocess.Popen(scale, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        eventually(lambda number=number: replicas_wished(deployment) == number)
    wish = deployment.exchange.swap(FleetState(1, "")).wish
    assert wish is not None
    deployment.exchange.swap(FleetState(2, "1 -> 2: set by hand", wish=wish.id))
    (_, error), (told, _) = (each.communicate(timeout=60.0) for each in running)
    assert [each.returncode for each in running] == [1, 0]
    assert "another client asked for 2 engines at the same time" in error
    assert told.strip().endswith("in place of 3 engines, which another client asked for at the same time")


def replicas_wished(deployment: Deployment) -> int | None:
    wish = deployment.exchange.swap(FleetState(1, "")).wish
    return None if wish is None else wish.replicas


def test_a_roll_and_a_number_that_are_asked_for_at_once_are_both_told_to_the_owner(make: Make) -> None:
    deployment = make()
    one, two = deployment.peer(), deployment.peer()
    one.send(Roll(1))
    assert one.hears_nothing()
    first = deployment.exchange.swap(FleetState(1, "")).wish
    assert first is not None
    assert (first.sets_number, first.roll) == (False, first.id)
    two.send(Scale(1, 3))
    assert two.hears_nothing()
    both = deployment.exchange.swap(FleetState(1, "")).wish
    assert both is not None
    assert (both.sets_number, both.replicas, both.roll) == (True, 3, first.id)
    deployment.exchange.swap(FleetState(3, "decided", wish=both.id))
    assert [one.receive(), two.receive()] == [Scaled(1, "decided")] * 2


def test_a_number_that_the_owner_refuses_is_the_caller_s_error(make: Make) -> None:
    deployment = make()
    client = deployment.peer()
    client.send(Scale(7, 0))
    assert client.hears_nothing()
    wish = deployment.exchange.swap(FleetState(1, "")).wish
    assert wish is not None
    deployment.exchange.swap(FleetState(1, "", wish=wish.id, refusal="at least 1, got 0"))
    failed = client.receive()
    assert (failed.key, failed.error, failed.message) == (7, "InvalidRequestError", "at least 1, got 0")
    client.send(Roll(8))
    assert client.hears_nothing()
    wish = deployment.exchange.swap(FleetState(1, "")).wish
    assert wish is not None
    assert not wish.sets_number, "what was refused is not asked for again"


def test_an_owner_that_does_not_call_is_told_to_the_caller(make: Make) -> None:
    now = [1e9]
    deployment = make(clock=lambda: now[0])
    client = deployment.peer()
    client.send(Scale(7, 2))
    pass_time(now, deployment, deployment.peer(), ANSWER_S + 1.0)
    failed = client.receive()
    assert (failed.key, failed.error) == (7, "DeploymentError")


def test_more_numbers_than_can_wait_are_refused(make: Make) -> None:
    client = make().peer()
    for key in range(MAX_WAITING + 1):
        client.send(Scale(key, 1))
    failed = client.receive()
    assert (failed.key, failed.error) == (MAX_WAITING, "OverloadedError")


def test_the_owner_is_told_of_requests_that_wait_and_of_engines(make: Make) -> None:
    deployment = make()
    client = deployment.peer()
    client.send(route(1, "waits"))
    assert client.hears_nothing()

    def observed() -> Any:
        return deployment.exchange.swap(FleetState(1, "")).observed

    eventually(lambda: observed() is not None and observed().held == 1)
    deployment.report("a")
    assert client.receive().endpoint == "tcp://a"
    eventually(lambda: [(each.name, each.requests) for each in observed().engines] == [("a", 1)])
    assert observed().held == 0


@pytest.mark.parametrize("is_awaited", [True, False])
def test_requests_wait_for_the_first_engine_where_the_owner_says_that_one_comes(make: Make, is_awaited: bool) -> None:
    now = [1e9]
    deployment = make(clock=lambda: now[0])
    deployment.exchange.swap(FleetState(0, "there are no requests", is_awaited=is_awaited))
    client = deployment.peer()
    pass_time(now, deployment, client, pending_calls.ENGINES_REPORT_S + 1.0)
    client.send(route(1, "waits"))
    if is_awaited:
        eventually(lambda: client.stats()["scheduler"]["queued"] == 1)  # behind the tokenizer's thread
        deployment.report("a")
        assert client.receive().endpoint == "tcp://a"
    else:
        assert client.receive().error == "NotReadyError"


def test_requests_that_wait_while_no_engine_serves_are_told_so_once(make: Make) -> None:
    now = [1e9]
    deployment = make(clock=lambda: now[0])
    deployment.exchange.swap(FleetState(1, "0 -> 1: a request waits"))
    client, other = deployment.peer(), deployment.peer()
    client.send(route(1, "first"))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 1)
    assert client.hears_nothing()
    pass_time(now, deployment, other, pending_calls.TELL_S + 1.0)
    assert client.receive() == Waits(1, "waiting for an engine to start (0 serve; asked for 1)")
    deployment.exchange.swap(FleetState(0, "set by hand"))
    client.send(route(2, "second"))
    eventually(lambda: client.stats()["scheduler"]["queued"] == 2)
    pass_time(now, deployment, other, pending_calls.TELL_S + 1.0)
    assert client.receive() == Waits(2, "waiting for an engine to start (0 serve; none is asked for yet)")
    assert client.hears_nothing()
    deployment.report("a")
    assert client.receive().endpoint == "tcp://a"


def test_stats_tell_of_engines_that_do_not_report(make: Make) -> None:
    deployment = make()
    states = {"engine-0": "serves", "engine-1": "waits for a node with 0.3 CPUs"}
    deployment.exchange.swap(FleetState(2, "2: set by hand", states))
    assert deployment.peer().stats()["fleet"] == {
        "number": 2,
        "reason": "2: set by hand",
        "replicas": states,
        "is_on_demand": False,
    }


def test_an_engine_that_leaves_gets_nothing_is_no_fault_and_is_forgotten_with_its_connection(make: Make) -> None:
    deployment = make()
    deployment.report("a", is_leaving=True)
    client = deployment.peer()
    client.send(Reroute(1, GenerateRequest("r", as_token_ids([1]), SamplingParams()), "tcp://a"))
    assert client.hears_nothing()
    assert client.stats()["engines"]["a"]["is_leaving"]
    deployment.engines.socket.close(linger=0)
    eventually(lambda: not client.stats()["engines"])
    assert client.stats()["faults"] == []
    deployment.engines = deployment.peer()
    deployment.report("b")
    assert client.receive().endpoint == "tcp://b"


def test_operations_wait_for_the_engines_that_stay(make: Make) -> None:
    deployment = make()
    deployment.report("a", "b")
    deployment.report("c", is_leaving=True)
    client = deployment.peer()
    deployment.exchange.swap(FleetState(3, "", expected=3))
    assert client.ask(GetEngines(1)).error == "OverloadedError"
    deployment.exchange.swap(FleetState(2, "", expected=2))
    assert client.ask(GetEngines(2)).endpoints == {"a": "tcp://a", "b": "tcp://b"}


# ---- engines that fetch blocks from each other ----


def status(name: str, epoch: int = 1, **fields: Any) -> EngineStatus:
    fields = {"work": EngineLoad(prefill_token_s=1.0), "secret": SECRET, **fields}
    return EngineStatus(fields.pop("secret"), name, f"tcp://{name}", 0, {}, epoch, **fields)


def test_an_engine_is_told_who_the_others_are_until_it_knows(make: Make) -> None:
    deployment = make(routing={"peer_loads": True})
    a, b = deployment.peer(), deployment.peer()
    first = a.ask(status("a", address="tcp://10.0.0.1:5"))
    assert first == Directory(SECRET, first.version, {"a": (1, "tcp://10.0.0.1:5", 1)})
    a.send(status("a", address="tcp://10.0.0.1:5", directory=first.version))
    assert a.hears_nothing()
    both = b.ask(status("b", epoch=3, tp_size=3))
    assert both.engines == {"a": (1, "tcp://10.0.0.1:5", 1), "b": (3, "tcp://b", 3)}
    assert a.ask(status("a", address="tcp://10.0.0.1:5", directory=first.version)) == both
    assert a.ask(status("a", address="tcp://10.0.0.1:5", directory=first.version)) == both  # it missed the first one
    renewed = b.ask(status("b", epoch=4, directory=both.version))
    assert renewed.engines["b"] == (4, "tcp://b", 1)
    assert renewed.version != both.version


def test_an_engine_that_has_left_is_in_no_directory(make: Make) -> None:
    deployment = make(routing={"peer_loads": True})
    a, b = deployment.peer(), deployment.peer()
    a.ask(status("a"))
    both = b.ask(status("b", is_leaving=True))
    assert set(both.engines) == {"a", "b"}
    b.socket.close(linger=0)

    def is_alone() -> bool:
        a.send(status("a", directory=both.version))
        a.send(Ping())
        answer = a.receive()
        return isinstance(answer, Directory) and isinstance(a.receive(), Pong) and set(answer.engines) == {"a"}

    eventually(is_alone)


def test_another_scheduler_says_the_same_of_the_same_engines(make: Make) -> None:
    told = []
    for _ in range(2):
        deployment = make(routing={"peer_loads": True})
        engine = deployment.peer()
        told.append(engine.ask(status("a")))
    assert told[0] == told[1]


def test_strangers_and_deployments_without_peer_loads_are_told_nothing(make: Make) -> None:
    stranger = make(routing={"peer_loads": True}).peer()
    stranger.send(status("a", secret="another"))
    assert stranger.hears_nothing()
    engine = make().peer()
    engine.send(status("a"))
    assert engine.hears_nothing()


def test_a_ticket_says_which_engine_has_more_of_the_prefix_and_a_reroute_says_it_anew(make: Make) -> None:
    store = StoreStandIn()
    deployment = make(store=store, routing={"peer_loads": True})
    engines = {name: deployment.peer() for name in "abc"}
    for name, engine in engines.items():
        work = EngineLoad(prefill_token_s=1.0, queued_tokens=0 if name == "c" else 500)
        engine.ask(status(name, epoch=5, work=work))
    client = deployment.peer()
    index_answers(client)
    store.depths = {"a": (3, 3, 3), "b": (2, 2, 2)}
    ticket = client.ask(route(1, "sixteen letters!"))
    assert ticket.endpoint == "tcp://c"
    assert ticket.request.peer == PeerHint("a", 5, 3 * BLOCK)
    store.depths = {}
    again = client.ask(Reroute(2, ticket.request, "tcp://c"))
    assert again.endpoint != "tcp://c"
    assert again.request.peer is None


def test_a_long_prompt_is_computed_apart_from_where_the_owner_says_it_is_decoded(make: Make) -> None:
    deployment = make(routing={"peer_loads": True, "local_tokens": 4, "engine_queue": 1000})
    deployment.exchange.swap(FleetState(2, "", roles={"a": "prefill", "b": "decode"}))
    client = deployment.peer()
    engine = deployment.peer()

    def ticket(key: int, text: str) -> Any:
        for name in "ab":
            engine.send(status(name))
        return client.ask(route(key, text))

    keys = itertools.count(1)
    # Unlike from the first block on: those that are routed before the roles are known go to one engine, which has them.
    eventually(lambda: ticket(next(keys), f"{next(keys)} begins this prompt").request.peer is not None)
    found = ticket(next(keys), "another long prompt")
    assert (found.endpoint, found.request.peer) == ("tcp://b", PeerHint("a", 1, 4 * BLOCK, prefills=True))
    short = ticket(next(keys), "tiny")
    assert (short.endpoint, short.request.peer) == ("tcp://b", None)
    assert {name: each["role"] for name, each in client.stats()["engines"].items()} == {"a": "prefill", "b": "decode"}


def test_a_split_is_told_to_the_owner_and_one_that_cannot_be_is_the_caller_s_error(make: Make) -> None:
    deployment = make(routing={"peer_loads": True})
    client = deployment.peer()
    client.send(Scale(1, 3, (1, 2)))
    assert client.hears_nothing()
    wish = deployment.exchange.swap(FleetState(1, "")).wish
    assert wish is not None
    assert (wish.replicas, wish.split) == (3, Split(1, 2))
    assert "need one for prompts" in client.ask(Scale(2, 3, (0, 2))).message
    apart = make().peer()
    assert "peer_loads" in apart.ask(Scale(1, 3, (1, 2))).message

"""Embeddings follow their request to an engine, over real sockets: whole, in turn, bounded, and for its own client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.waiting import eventually

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import EngineDiedError, InvalidRequestError, OverloadedError
from headwise.runtime.client.client import Client
from headwise.runtime.engine import client_requests
from headwise.runtime.protocol import embed_parts, wire
from headwise.runtime.protocol.embed_parts import parts_of
from headwise.runtime.protocol.messages import (
    Abort,
    EmbedsPart,
    EmbedsTaken,
    EmbedsWanted,
    Failed,
    Outputs,
    Ping,
    Pong,
    Submit,
)
from headwise.runtime.protocol.prompt_items import PromptEmbeds, PromptItem, digest, embed_places
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams
from headwise.sockets.pieces import split

WIDTH = 1024


class HandMade:
    """A client that says what it is told to."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def say(self, message: Any) -> None:
        for piece in split(wire.encode(message)):
            self._socket.send(piece)

    def hear(self, *expected: type) -> Any:
        """The next message, but what embeddings are wanted, which is all of them, unless that is expected."""
        while True:
            assert self._socket.poll(20_000), "nothing was answered"
            message = wire.decode(self._socket.recv(), *expected, EmbedsWanted)
            if EmbedsWanted in expected or not isinstance(message, EmbedsWanted):
                return message

    def submit(self, name: str, *embeds: PromptEmbeds, key: int = 1) -> None:
        self.say(Submit(key, request_of(name, *embeds), embed_places(embeds)))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def request_of(name: str, *embeds: PromptEmbeds, max_tokens: int = 1) -> GenerateRequest:
    keys = tuple(ExtraKey(each.start, each.end, digest(each.values)) for each in embeds)
    return GenerateRequest(name, np.ones(64, np.int32), SamplingParams(max_tokens=max_tokens), extra_keys=keys)


def rows(start: int, length: int) -> PromptEmbeds:
    values = np.random.default_rng(start).standard_normal((length, WIDTH)).astype(np.float32)
    return PromptEmbeds(start, values)


def test_items_of_many_parts_reach_the_engine_whole_from_several_threads(
    deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_parts, "PART_BYTES", 3 * 4 * WIDTH)
    core.gate.clear()
    given = [[rows(0, 20), rows(30, 7 + index)] for index in range(6)]

    def generate(embeds: list[PromptEmbeds]) -> Any:
        items = [PromptItem(each.start, len(each.values), embeds=each.values) for each in embeds]
        return client.generate([1] * 64, items=items, max_tokens=2)

    with Client(deployment.address) as client, ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(generate, each) for each in given]
        eventually(lambda: len(core.live) == 6)
        served = {len(each.embeds[1].values): each for each, _ in core.live.values()}
        core.gate.set()
        assert all(call.result().token_ids == [0, 1] for call in calls)
        assert all(not sender._left and not sender._under_way for sender in senders(client))
    for embeds in given:
        found = served[len(embeds[1].values)].embeds
        assert [each.start for each in found] == [0, 30]
        for mine, each in zip(embeds, found, strict=True):
            np.testing.assert_array_equal(each.values, mine.values)


def senders(client: Client) -> list[Any]:
    return [peer.embeds for peer in client._io._connections.engines.values()]


def test_a_request_begins_with_its_last_part_and_is_served_until_then(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_parts, "PART_BYTES", 2 * 4 * WIDTH)
    mine, embeds = HandMade(context, deployment.servers[0].endpoint), (rows(0, 2), rows(5, 1))
    mine.submit("r", *embeds)
    first, second = parts_of("r", embeds)
    mine.say(first)
    assert mine.hear(EmbedsTaken).request_id == "r"
    mine.say(Ping(("r",)))
    mine.hear(Pong)
    assert not core.live
    mine.say(second)
    mine.hear(EmbedsTaken)
    assert mine.hear(Outputs).deltas[0].token_ids == (0,)


def test_what_is_cached_is_not_asked_for(core: ScriptedCore, deployment: Deployment, context: zmq.Context[Any]) -> None:
    mine, embeds = HandMade(context, deployment.servers[0].endpoint), (rows(0, 2), rows(5, 1), rows(8, 4))
    for cached, wanted, lacks in ((0, 0, 0), (5, 5, 2), (6, 8, 6), (11, 8, 6)):
        core.cached = cached
        mine.submit("r", *embeds)
        assert mine.hear(EmbedsWanted) == EmbedsWanted("r", wanted)
        for part in parts_of("r", [each for each in embeds if each.start >= wanted]):
            mine.say(part)
            mine.hear(EmbedsTaken)
        assert mine.hear(Outputs).deltas[0].token_ids == (0,)
        assert core.lacks[-1] == lacks
    core.cached = 12
    mine.submit("r", *embeds)
    assert mine.hear(Outputs, EmbedsWanted).deltas[0].token_ids == (0,)  # at once
    assert core.lacks[-1] == 12
    mine.say(Submit(1, request_of("s", *embeds), embed_places(embeds), needs_all=True))
    assert mine.hear(EmbedsWanted) == EmbedsWanted("s", 0)


def test_a_client_sends_what_is_wanted_and_all_of_it_where_the_cache_lost_the_rest(
    deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_parts, "PART_BYTES", 2 * 4 * WIDTH)
    core.cached, core.shuts_after = 10, 3
    taken: list[GenerateRequest] = []
    add = core.add
    monkeypatch.setattr(core, "add", lambda request, **how: (taken.append(request), add(request, **how))[1])
    given = [rows(0, 8), rows(20, 3)]
    items = [PromptItem(each.start, len(each.values), embeds=each.values) for each in given]
    with Client(deployment.address) as client:
        stream = client.stream([1] * 64, items=items, max_tokens=6)
        eventually(lambda: core.steps == 3)
        assert [(each.start, len(each.values)) for each in taken[0].embeds] == [(20, 3)]
        core.lacking.append(taken[0].request_id)
        core.shuts_after = None
        core.gate.set()
        assert stream.read().token_ids == [0, 1, 2, 3, 4, 5]
    assert core.lacks == [8, 0]
    (again,) = taken[1:]
    assert again.output_token_ids[:3] == (0, 1, 2)
    for each, mine in zip(again.embeds, given, strict=True):
        np.testing.assert_array_equal(each.values, mine.values)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (EmbedsPart("r", 0, 1, rows(0, 1).values), "are not the next embeddings"),
        (EmbedsPart("r", 0, 0, rows(7, 2).values), "named by the digest of other embeddings"),
        (EmbedsPart("r", 0, 0, np.full((1, WIDTH), np.inf, np.float32)), "are not all finite numbers"),
    ],
)
def test_what_comes_in_place_of_a_part_ends_the_request_alone(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any], wrong: EmbedsPart, says: str
) -> None:
    mine = HandMade(context, deployment.servers[0].endpoint)
    mine.submit("r", rows(0, 2), key=5)
    mine.submit("other", rows(3, 2), key=6)
    mine.say(wrong)
    mine.hear(EmbedsTaken)
    failed = mine.hear(Failed)
    assert (failed.key, failed.request_id, failed.error) == (5, "r", InvalidRequestError.__name__)
    assert says in failed.message
    for part in (*parts_of("r", [rows(0, 2)]), *parts_of("other", [rows(3, 2)])):  # those of the first are for nobody
        mine.say(part)
        assert mine.hear(EmbedsTaken).request_id == part.request_id
    assert mine.hear(Outputs).deltas[0].request_id == "other"


def test_embeddings_within_a_request_are_refused(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any]
) -> None:
    mine = HandMade(context, deployment.servers[0].endpoint)
    mine.say(Submit(1, GenerateRequest("r", np.ones(9, np.int32), SamplingParams(), embeds=(rows(0, 2),))))
    assert "they follow it in parts" in mine.hear(Failed).message
    assert not core.live


def test_nobody_adds_to_the_request_of_another_client(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any]
) -> None:
    mine, other = (HandMade(context, deployment.servers[0].endpoint) for _ in range(2))
    mine.submit("r", rows(0, 2))
    mine.say(Ping(("r",)))
    mine.hear(Pong)
    (part,) = parts_of("r", [rows(0, 2)])
    other.say(part)
    other.hear(EmbedsTaken)
    other.submit("r", rows(0, 2))
    assert "taken" in other.hear(Failed).message
    mine.say(part)
    mine.hear(EmbedsTaken)
    assert mine.hear(Outputs).deltas[0].request_id == "r"


def test_what_is_on_its_way_takes_room_until_its_request_ends(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any]
) -> None:
    core.most_embed_bytes = 4 * WIDTH * 3
    mine = HandMade(context, deployment.servers[0].endpoint)
    mine.submit("first", rows(0, 2))
    mine.submit("second", rows(0, 2))
    assert mine.hear(Failed).error == OverloadedError.__name__
    mine.say(Abort("first"))
    mine.submit("third", rows(0, 3))
    for part in parts_of("third", [rows(0, 3)]):
        mine.say(part)
    mine.hear(EmbedsTaken)
    assert mine.hear(Outputs).deltas[0].request_id == "third"
    mine.submit("fourth", rows(0, 3))
    mine.say(Ping(("fourth",)))
    mine.hear(Pong)


def test_a_request_whose_embeddings_do_not_come_is_not_waited_for(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_requests, "STALLED_S", 0.3)
    monkeypatch.setattr(embed_parts, "PART_BYTES", 2 * 4 * WIDTH)
    mine = HandMade(context, deployment.servers[0].endpoint)
    mine.submit("r", rows(0, 2), rows(4, 2))
    first, second = parts_of("r", [rows(0, 2), rows(4, 2)])
    mine.say(first)
    mine.hear(EmbedsTaken)
    failed = mine.hear(Failed)
    assert (failed.request_id, failed.error) == ("r", "RequestAbortedError")
    assert "nothing of the request's embeddings came" in failed.message
    mine.say(second)
    mine.hear(EmbedsTaken)
    assert not core.live


def test_a_client_that_goes_leaves_nothing_behind(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any]
) -> None:
    engine = deployment.servers[0]
    gone = HandMade(context, engine.endpoint)
    gone.submit("r", rows(0, 2))
    eventually(lambda: engine._requests._embeds.num_bytes > 0)
    gone._socket.close(linger=0)
    eventually(lambda: engine._requests._embeds.num_bytes == 0)


def test_a_core_that_dies_and_an_engine_that_leaves_send_away_what_has_not_come(
    deployment: Deployment, core: ScriptedCore, context: zmq.Context[Any]
) -> None:
    engine = deployment.servers[0]
    mine = HandMade(context, engine.endpoint)
    mine.submit("r", rows(0, 2))
    eventually(lambda: engine._requests._embeds.num_bytes > 0)
    core.dies = EngineDiedError("TP rank 0 died")
    assert (mine.hear(Failed)).error == "EngineDiedError"
    assert not engine._requests._embeds.num_bytes
    engine.attach(ScriptedCore())
    mine.submit("s", rows(0, 2))
    eventually(lambda: engine._requests._embeds.num_bytes > 0)
    engine.leave(20.0, [], lambda: None)
    assert (mine.hear(Failed)).error == "EngineLeavingError"
    assert not engine._requests._embeds.num_bytes


def test_a_stream_that_is_cancelled_while_its_embeddings_go_out_ends_them(
    deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one whose embeddings the engine refuses; the connection serves on."""
    monkeypatch.setattr(embed_parts, "PART_BYTES", 4 * WIDTH)
    core.gate.clear()
    item = PromptItem(0, 60, embeds=rows(0, 60).values)
    with Client(deployment.address) as client:
        stream = client.stream([1] * 64, items=[item], max_tokens=2)
        stream.cancel()
        core.most_embed_bytes = 1
        with pytest.raises(OverloadedError):
            client.generate([1] * 64, items=[item], max_tokens=2)
        core.most_embed_bytes = 1 << 30
        core.gate.set()
        assert client.generate([1] * 64, items=[item], max_tokens=2).token_ids == [0, 1]
        eventually(lambda: all(not sender._left and not sender._under_way for sender in senders(client)))

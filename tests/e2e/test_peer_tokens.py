"""Two engines on Ray, of one rank and of three: what only one of them has of a prefix the other fetches, and what is
killed changes no token."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from support.reference import Answer, answers, assert_same
from support.waiting import eventually

from headwise import Client, EngineConfig
from headwise.actors.deployment import Deployment
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import Failed, Outputs, Ping, Pong, Submit
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, PeerHint, SamplingParams
from headwise.sockets.curve import ClientKeys, secure_client

# Engines on Ray that fetch from each other are in test_engine_benchmarks, too; what they say, in other tests of peers.
pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.soak]

CONFIG = EngineConfig(
    port=0,
    prefill_replicas=1,
    decode_replicas=1,
    max_model_len=1024,
    max_num_seqs=4,
    kv_cache="192MiB",
    block_size=16,
    cpu_threads=1,
    dtype="float32",
    max_batched_tokens=128,
    standby=False,
    secure=True,
)
TOKENS = 8
DEPLOYMENTS = [
    pytest.param(served, id="-".join(map(str, served)))
    for served in (("smollm2-135m", 1, 1), ("smollm2-135m", 1, 3), ("smollm2-135m", 3, 3), ("gemma3-270m", 1, 1))
]
"""Model, and ranks of the engine for prompts and of the one that decodes."""


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    model, prefill, decode = request.param
    transports = "auto" if (prefill, decode) == (3, 3) else "tcp"  # what is encrypted
    config = replace(CONFIG, model=model, prefill_tp_size=prefill, decode_tp_size=decode, peer_transports=transports)
    with Deployment.start(config) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        yield client


class Ask:
    """Sends requests straight to engines, with hints, as a client would that was told so by the scheduler."""

    def __init__(self, client: Client, keys: ClientKeys | None) -> None:
        self._client, self._keys = client, keys
        self._names = itertools.count()

    def engine(self, name: str) -> dict[str, Any]:
        return self._client.stats()["engines"][name]

    def peers(self, name: str) -> dict[str, Any]:
        return self.engine(name)["peers"]

    def __call__(
        self,
        engine: str,
        answer: Answer,
        hint: PeerHint | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        salt: str = "",
    ) -> GenerationResult:
        name = f"{answer.name}/{next(self._names)}"
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=1)
        request = GenerateRequest(
            name, np.array(answer.prompt_ids, dtype=np.int32), sampling, cache_salt=salt, peer=hint
        )
        result = GenerationResult(name)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            secure_client(socket, self._keys)
            socket.connect(self.engine(engine)["endpoint"])
            socket.send(wire.encode(Submit(1, request)))
            meanwhile()
            while result.finish_reason is None:
                if not socket.poll(1000):
                    socket.send(wire.encode(Ping()))  # the requests of a client that is silent are aborted
                    continue
                message = wire.decode(socket.recv(), Outputs, Pong, Failed)
                assert not isinstance(message, Failed), message
                for delta in message.deltas if isinstance(message, Outputs) else ():
                    result.add(delta)
        assert_same(answer.first(TOKENS), result.token_ids)
        return result

    def hint(self, engine: str, answer: Answer, prefills: bool = False) -> PeerHint:
        full = (len(answer.prompt_ids) - 1) // CONFIG.block_size * CONFIG.block_size
        return PeerHint(engine, self.engine(engine)["epoch"], full, prefills)


@pytest.fixture(scope="module")
def ask(deployment: Deployment, client: Client) -> Ask:
    eventually(lambda: len(client.stats()["engines"]) == 2)
    time.sleep(1.0)  # the engines hear of each other with their next report but one
    return Ask(client, deployment.client_keys)


@pytest.fixture
def answer(deployment: Deployment) -> Answer:
    """Of a prompt that is longer than Gemma's windows."""
    return next(answer for answer in answers(deployment.config.model) if answer.name == "long_700")


@pytest.fixture(params=["to decode", "to prefill"])
def pair(request: pytest.FixtureRequest, client: Client) -> tuple[str, str]:
    """The engine that is asked, and the one that asks."""
    by_role = {engine["role"]: name for name, engine in client.stats()["engines"].items()}
    prefill, decode = by_role["prefill"], by_role["decode"]
    return (prefill, decode) if request.param == "to decode" else (decode, prefill)


def test_engines_have_the_ranks_of_their_roles(deployment: Deployment, client: Client, ask: Ask) -> None:
    sizes = {engine["role"]: engine["tp_size"] for engine in client.stats()["engines"].values()}
    config = deployment.config
    assert sizes == {"prefill": config.prefill_tp_size, "decode": config.decode_tp_size}
    assert sorted(map(len, deployment.worker_pids())) == sorted(sizes.values())


def test_a_prefix_that_only_the_other_engine_has_comes_from_there(
    ask: Ask, answer: Answer, pair: tuple[str, str]
) -> None:
    owner, reader = pair
    salt = f"of {owner}"
    ask(owner, answer, salt=salt)
    hint, given = ask.hint(owner, answer), ask.peers(owner)["lent"]["given"]
    result = ask(reader, answer, hint, salt=salt)
    assert result.usage.cached_tokens == hint.tokens
    eventually(lambda: ask.peers(reader)["hit_tokens"] >= hint.tokens, otherwise=lambda: ask.peers(reader))
    assert ask.engine(reader)["transfers"]["peer"]["bytes"] > 0
    eventually(lambda: ask.peers(owner)["lent"]["given"] == given + 1, otherwise=lambda: ask.peers(owner))
    eventually(lambda: ask.peers(owner)["lent"]["leases"] == 0, otherwise=lambda: ask.peers(owner))


def test_the_other_engine_computes_a_prompt(ask: Ask, answer: Answer, pair: tuple[str, str]) -> None:
    owner, reader = pair
    hint = ask.hint(owner, answer, prefills=True)
    assert ask(reader, answer, hint, salt=f"computed by {owner}").usage.cached_tokens == hint.tokens


def test_the_scheduler_sends_an_engine_to_the_one_that_has_a_prefix(client: Client, ask: Ask, answer: Answer) -> None:
    """So little of the prompt is left to compute that the engine which decodes is to fetch the rest itself."""
    by_role = {engine["role"]: name for name, engine in client.stats()["engines"].items()}
    owner, reader, prompt, salt = by_role["prefill"], by_role["decode"], list(answer.prompt_ids), "by ticket"
    ask(owner, answer, salt=salt)
    hint = ask.hint(owner, answer)

    def is_known() -> bool:
        held = client.find_prefix(prompt, cache_salt=salt)["engines"].get(owner, {})
        return max(held.values(), default=0) >= hint.tokens

    eventually(is_known)
    before = ask.peers(reader)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    result = client.generate(prompt, sampling, cache_salt=salt)
    assert_same(answer.first(TOKENS), result.token_ids)
    assert result.usage.cached_tokens == hint.tokens
    eventually(lambda: ask.peers(reader)["hit_tokens"] > before["hit_tokens"], otherwise=lambda: ask.peers(reader))
    assert ask.peers(reader)["asked"] == before["asked"] + 1


def test_engines_have_host_caches_by_themselves_and_hear_nobody_without_a_key(
    deployment: Deployment, client: Client, ask: Ask
) -> None:
    assert deployment.config.host_cache == CONFIG.kv_cache
    for engine in client.stats()["engines"].values():
        assert engine["host"]["total_blocks"] > 0
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(engine["endpoint"])
            socket.send(wire.encode(Ping()))
            assert not socket.poll(200)


def stop_while_it_is_read(deployment: Deployment, ask: Ask, owner: str, stopped: str) -> int:
    """Stop an engine's worker a moment after it has begun, and wait until the owner reports a lease of what it
    computes, which does not end then. The worker's process."""
    time.sleep(0.3)
    pid = deployment.worker_pids()[int(stopped.removeprefix("engine-"))][-1]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: ask.peers(owner)["lent"]["leases"] > 0, otherwise=lambda: ask.peers(owner))
    return pid


def test_an_owner_that_is_killed_while_it_computes_and_is_read_changes_no_token(
    deployment: Deployment, ask: Ask, answer: Answer
) -> None:
    def kill() -> None:
        os.kill(stop_while_it_is_read(deployment, ask, "engine-0", "engine-0"), signal.SIGKILL)

    ask("engine-1", answer, ask.hint("engine-0", answer, prefills=True), kill, salt="killed")
    eventually(lambda: ask.engine("engine-0")["server"]["ready"])


def test_an_owner_lets_go_of_what_a_reader_holds_that_is_killed_while_it_reads(
    deployment: Deployment, client: Client, ask: Ask, answer: Answer
) -> None:
    by_role = {engine["role"]: name for name, engine in client.stats()["engines"].items()}
    owner, reader = by_role["prefill"], by_role["decode"]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with ThreadPoolExecutor(1) as others:
        asked = others.submit(client.generate, list(answer.prompt_ids), sampling, cache_salt="killed reader")
        pid = stop_while_it_is_read(deployment, ask, owner, reader)
        os.kill(pid, signal.SIGKILL)
        assert_same(answer.first(TOKENS), asked.result().token_ids)
    lent = ("leases", "held_blocks")
    eventually(lambda: [ask.peers(owner)["lent"][name] for name in lent] == [0, 0], otherwise=lambda: ask.peers(owner))
    eventually(lambda: ask.engine(reader)["server"]["ready"])


def test_what_only_one_engine_has_is_a_hit_at_the_one_that_stays(client: Client, ask: Ask, answer: Answer) -> None:
    for name in ("engine-0", "engine-1"):
        ask(name, answer, salt=f"of {name} alone")
    eventually(lambda: all(map(any, found(client, answer))), otherwise=lambda: found(client, answer))
    client.scale(1)
    eventually(lambda: len(client.stats()["engines"]) == 1, otherwise=client.stats)
    (left,) = client.stats()["engines"]
    for name in ("engine-0", "engine-1"):
        assert ask(left, answer, salt=f"of {name} alone").usage.cached_tokens == ask.hint(left, answer).tokens
    assert ask.peers(left)["taken_blocks"] > 0


def found(client: Client, answer: Answer) -> list[list[int]]:
    """What the index knows engines to have of the prompt, with either salt."""
    salts = [f"of engine-{number} alone" for number in range(2)]
    prefixes = [client.find_prefix(answer.prompt_ids, cache_salt=salt)["engines"].values() for salt in salts]
    return [[max(tiers.values()) for tiers in engines] for engines in prefixes]

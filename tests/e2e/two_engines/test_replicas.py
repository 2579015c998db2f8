"""Two engines on Ray: requests go where their prefix is, and streams survive whatever is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from support.passing_on import PortForward
from support.reference import Answer, sure_answers
from support.two_engines import ENGINES, PORTS
from support.waiting import PATIENCE_S, eventually

from headwise import Client, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.errors import DeploymentError, HeadwiseError
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.request import GenerationResult

pytestmark = [pytest.mark.ray, pytest.mark.model]

TOKENS = 20
STREAMS = sure_answers(TOKENS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
BEFORE_THE_FAULT = 4
"""Tokens that every stream has by then."""


@pytest.fixture(scope="module")
def tokenizer(deployment: Deployment) -> Tokenizer:
    return Tokenizer.from_directory(resolve_model(deployment.config.model, deployment.config.cache_path))


# ---- routing ----


def test_requests_go_where_their_prefix_is(deployment: Deployment, client: Client) -> None:
    documents = [[1000 + 7 * d + i for i in range(160)] for d in range(6)]
    first = [client.stream([*document, 1], max_tokens=4) for document in documents]
    assert [stream.read().usage.cached_tokens for stream in first] == [0] * 6
    eventually(lambda: index_agrees(deployment, client))

    def held() -> list[int]:
        engines = [client.find_prefix(document)["engines"] for document in documents]
        return [max((tiers["device"] for tiers in each.values()), default=0) for each in engines]

    eventually(lambda: held() == [160] * 6, otherwise=held)  # an engine that is busy may not have reported lately
    # One after the other: an engine that is busy may be worse than one that has to compute the prefix.
    second = [client.stream([*document, 2], max_tokens=4).read() for document in documents]
    assert [result.usage.cached_tokens for result in second] == [160] * 6


def index_agrees(deployment: Deployment, client: Client) -> bool:
    """Whether the index holds what the engines say they hold, and all serve."""
    try:
        nodes, stats = deployment.store_stats()["nodes"], client.stats()
    except HeadwiseError:  # who is asked is being started again
        return False
    engines = stats["engines"]
    if not all(name in engines and engines[name]["server"]["ready"] for name in ENGINES) or stats["index"] is None:
        return False
    return all(
        nodes.get(name, {}).get("agrees")
        and stats["index"]["nodes"].get(name, {}).get("agrees")
        and not nodes[name]["behind"]
        and nodes[name]["epoch"] == engines[name]["epoch"]
        and nodes[name]["blocks"].get("device", 0) == engines[name]["cache"]["cached_blocks"]  # it has one head group
        for name in ENGINES
    )


# ---- where engines are, and who may connect ----


def test_who_has_no_key_gets_nothing(deployment: Deployment) -> None:
    with pytest.raises(DeploymentError, match="refuses this client: it wants keys"):
        Client(deployment.client_address)


def test_engines_listen_at_ports_of_their_range(deployment: Deployment, client: Client) -> None:
    eventually(lambda: len(client.stats()["engines"]) == len(ENGINES))
    endpoints = {str(engine["endpoint"]) for engine in client.stats()["engines"].values()}
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}
    assert len(ports) == len(ENGINES)
    assert ports <= {*PORTS}


@pytest.fixture
def outside(deployment: Deployment) -> Iterator[Client]:
    """A client behind a forwarded port, which reaches nothing but the scheduler."""
    forward = PortForward("127.0.0.1", int(deployment.client_address.rpartition(":")[2]))
    with Client(forward.address, relay="always", keys=deployment.client_keys) as client:
        yield client
    forward.close()


# ---- faults ----


class Load:
    """All streams at once, each read by its own thread."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.moments: dict[str, list[float]] = {answer.name: [] for answer in STREAMS}
        self._pool = ThreadPoolExecutor(len(STREAMS))
        self._results = [(answer, self._pool.submit(self._read, answer)) for answer in STREAMS]

    def _read(self, answer: Answer) -> GenerationResult:
        stream = self.client.stream(answer.prompt_ids, GREEDY)
        text, tokens = "", []
        for delta in stream:
            self.moments[answer.name].append(time.monotonic())
            text, tokens = text + delta.text, [*tokens, *delta.token_ids]
        assert (text, tokens) == (stream.result.text, stream.result.token_ids)
        return stream.result

    def has_begun(self) -> bool:
        return all(len(moments) >= BEFORE_THE_FAULT for moments in self.moments.values())

    def check(self, tokenizer: Tokenizer) -> None:
        """Every stream has said exactly what it would have said undisturbed."""
        for answer, reading in self._results:
            result = reading.result(3 * PATIENCE_S)
            assert result.token_ids == answer.output_ids, answer.name
            assert result.text == tokenizer.decode(answer.output_ids), answer.name
            assert result.usage.completion_tokens == len(answer.output_ids)
        self._pool.shutdown()

    def longest_pause(self, since: float) -> float:
        """Seconds that a stream at most was without a token; 0 if all had ended before."""
        pauses = (
            after - max(before, since)
            for moments in self.moments.values()
            for before, after in pairwise(moments)
            if after > since
        )
        return max(pauses, default=0.0)


def busiest(client: Client) -> str:
    engines = client.stats()["engines"]
    ready = [name for name in engines if engines[name]["server"]["ready"]]
    return max(ready, key=lambda name: int(engines[name]["requests"]["running"]))


def kill_worker(deployment: Deployment, client: Client) -> list[int]:
    return sent(signal.SIGKILL, deployment.worker_pids()[ENGINES.index(busiest(client))][0])


def kill_engine(deployment: Deployment, client: Client) -> list[int]:
    name = busiest(client)
    workers = deployment.worker_pids()[ENGINES.index(name)]
    return sent(signal.SIGKILL, deployment.actor_pids()[name]) + workers


def stop_engine(deployment: Deployment, client: Client) -> list[int]:
    """It lives, but does nothing: its connections stay open."""
    name = busiest(client)
    workers = deployment.worker_pids()[ENGINES.index(name)]
    return sent(signal.SIGSTOP, deployment.actor_pids()[name]) + workers


def hang_engine(deployment: Deployment, client: Client) -> list[int]:
    """Its server's thread does nothing any more, the rest of the process goes on."""
    name = busiest(client)
    gone = [deployment.actor_pids()[name], *deployment.worker_pids()[ENGINES.index(name)]]
    engine = deployment._actors[name]
    ray.get(engine.__ray_call__.remote(lambda actor: actor._server.call(threading.Event().wait)))
    return gone


def hang_frontend(deployment: Deployment, client: Client) -> list[int]:
    """The scheduler's process is stopped, and the store's server waits for a lock that nobody gives back."""
    store = deployment._actors["store"]
    pids = deployment.actor_pids()
    ray.get(store.__ray_call__.remote(lambda actor: actor._server._lock.acquire()))
    return [*sent(signal.SIGSTOP, pids["scheduler"]), pids["store"]]


def kill_scheduler(deployment: Deployment, client: Client) -> list[int]:
    return sent(signal.SIGKILL, deployment.actor_pids()["scheduler"])


def kill_store(deployment: Deployment, client: Client) -> list[int]:
    return sent(signal.SIGKILL, deployment.actor_pids()["store"])


def sent(number: int, pid: int) -> list[int]:
    os.kill(pid, number)
    return [pid]


AS_OTHERS = (kill_scheduler, kill_store, kill_worker, stop_engine, hang_frontend, hang_engine)
"""Much as in `test_cluster` and `test_failover`, and below."""
FAULTS = [kill_engine, *(pytest.param(fault, marks=pytest.mark.soak) for fault in AS_OTHERS)]


@pytest.mark.parametrize("fault", FAULTS)
def test_no_stream_has_a_gap_or_a_repeat_whatever_is_killed_under_load(
    deployment: Deployment, client: Client, tokenizer: Tokenizer, fault: Callable[[Deployment, Client], list[int]]
) -> None:
    load = Load(client)
    eventually(load.has_begun)
    gone, since = fault(deployment, client), time.monotonic()
    newcomer = client.generate(STREAMS[0].prompt_ids, GREEDY, max_tokens=2)
    served_after = time.monotonic() - since
    load.check(tokenizer)
    assert newcomer.token_ids == STREAMS[0].output_ids[:2]
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))
    eventually(lambda: index_agrees(deployment, client), otherwise=lambda: (deployment.store_stats(), client.stats()))
    whole_after = time.monotonic() - since
    print(
        f"\n{fault.__name__}: no stream paused for more than {load.longest_pause(since):.2f} s, a new request was "
        f"served in {served_after:.2f} s, all was as before after {whole_after:.2f} s"
    )


def test_streams_through_the_relay_go_on_when_the_scheduler_dies(
    deployment: Deployment, client: Client, outside: Client, tokenizer: Tokenizer
) -> None:
    """With it the way to all engines is lost, although no engine is."""
    load = Load(outside)
    eventually(load.has_begun)
    assert client.stats()["scheduler"]["relay"]["relayed"]
    since = time.monotonic()
    kill_scheduler(deployment, client)
    load.check(tokenizer)
    print(f"\nno relayed stream paused for more than {load.longest_pause(since):.2f} s")
    # Whoever comes next finds a scheduler: streams did not need the new one.
    assert client.generate(STREAMS[0].prompt_ids, GREEDY, max_tokens=2).token_ids == STREAMS[0].output_ids[:2]

"""Three real engines: what routing by prefix gains, and how long a loss is felt.

    python benchmarks/replicas.py [--quick | --smoke]

1. Conversations, each about a document of its own, whose caches take twice one engine's device and fit into all three:
   turn after turn in random order, a few at a time; once routed `round_robin`, once `cache_aware`, by deployments that
   differ in nothing else. The first turn, of which nothing can be cached, does not count. `hit_rate` is the share of
   prompt tokens that came from a cache, `ttft_*_s` the seconds to the first token as the client sees them,
   `ttft_*_ratio` those of `round_robin` over those of `cache_aware`.
2. Streams run without end while the store, the scheduler, a worker and an engine are killed (SIGKILL), and others are
   stopped (SIGSTOP: "hung"), one at a time. `recovery`: the longest pause of a stream (`pause_s`), how long a request
   that came right behind the fault waited for its first token (`new_request_s`), and how long it took until three
   engines served and the index agreed with them (`whole_s`). `lost` counts streams that did not end, token by
   token, as they do undisturbed.
3. Prompts that one engine has computed are sent to another one, which is told so: it fetches the blocks from the first
   one's host. `peer_over_cold`: its seconds to the first token over those of the engine that computed them.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import zmq
from prompts import tokens
from smoke import deployed, lightly

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.errors import HeadwiseError
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import Outputs, Ping, Pong, Submit
from headwise.runtime.protocol.request import GenerateRequest, PeerHint
from headwise.sockets.pieces import split


@dataclass(frozen=True)
class Size:
    """How much is measured.

    kv_cache: of each engine: half of what the conversations take
    users:    conversations that have a request under way at a time
    faults:   of `FAULTS`, in this order
    rest_s:   of a stream's reader, before it asks anew
    calm_s:   before each fault
    peer_tokens, peer_prompts: prompts that another engine has computed: their length, and how many are measured
    alone:    whether these have a deployment of their own
    """

    policies: tuple[Literal["round_robin", "cache_aware"], ...] = ("round_robin", "cache_aware")
    replicas: int = 3
    kv_cache: str = "112MiB"  # 2,500 tokens; the conversations have 5,000
    max_model_len: int = 1024
    conversations: int = 9
    document_tokens: int = 450
    turns: int = 6
    users: int = 3
    streams: int = 9
    rest_s: float = 0.0
    calm_s: float = 3.0
    peer_tokens: int = 4000
    peer_prompts: int = 3
    alone: bool = True
    faults: tuple[str, ...] = (
        "store",
        "scheduler",
        "worker",
        "engine",
        "hung store",
        "hung scheduler",
        "hung engine",
    )


FULL = Size()
QUICK = Size(
    policies=("cache_aware",),
    replicas=2,
    kv_cache="24MiB",
    max_model_len=256,
    conversations=4,
    document_tokens=96,
    turns=2,
    users=2,
    streams=2,
    peer_tokens=400,
    peer_prompts=1,
    faults=("store", "scheduler", "hung scheduler"),
)
SMOKE = replace(
    QUICK,
    conversations=2,
    document_tokens=48,
    faults=("scheduler",),
    rest_s=1.0,
    calm_s=1.0,
    peer_tokens=192,
    alone=False,
)
QUESTION_TOKENS, ANSWER_TOKENS = 24, 8
STREAM_TOKENS = 24
CONFIG = EngineConfig(
    model="smollm2-135m",
    port=0,
    dtype="float32",  # in bfloat16 a stream that is computed again may say the other of two tokens that are close
    cpu_threads=1,
    block_size=16,
    engine_timeout_s=5.0,
    host_cache="0",  # policies differ in nothing else
)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


# ---- 1. routing ----


@dataclass
class Turns:
    """What the requests of one policy have shown."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.ttft_s, share))


def converse(client: Client, size: Size, seed: int) -> Turns:
    """The same conversations in the same order for every deployment."""
    turns, whom = size.turns, range(size.conversations)
    draw, order, seen = np.random.default_rng(seed), random.Random(seed), [Turns() for _ in range(turns)]
    histories = [tokens(draw, size.document_tokens) for _ in whom]
    questions = [[tokens(draw, QUESTION_TOKENS) for _ in range(turns)] for _ in whom]
    client.generate(tokens(draw, 64), GREEDY, max_tokens=2)  # the kernels' first calls
    for turn in range(turns):
        whose = order.sample(whom, len(whom))
        with ThreadPoolExecutor(size.users) as users:
            asked = [questions[who][turn] for who in whose]
            list(users.map(partial(ask, client, seen[turn]), [histories[who] for who in whose], asked))
    return sum_of(seen[1:])


def sum_of(turns: list[Turns]) -> Turns:
    return Turns(
        sum(each.prompt_tokens for each in turns),
        sum(each.cached_tokens for each in turns),
        [ttft_s for each in turns for ttft_s in each.ttft_s],
    )


def ask(client: Client, seen: Turns, history: list[int], question: list[int]) -> None:
    history += question
    asked = time.perf_counter()
    stream = client.stream(history, GREEDY, max_tokens=ANSWER_TOKENS)
    next(stream)
    ttft_s = time.perf_counter() - asked
    result = stream.read()
    history += result.token_ids
    seen.ttft_s.append(ttft_s)
    seen.prompt_tokens += result.usage.prompt_tokens
    seen.cached_tokens += result.usage.cached_tokens


# ---- 2. faults ----


class Load:
    """Streams that are asked for again and again, and what they should say."""

    def __init__(self, client: Client, size: Size, seed: int) -> None:
        draw, streams = np.random.default_rng(seed), size.streams
        self.client = client
        self.prompts = [tokens(draw, 24) for _ in range(streams)]
        self.expected = [self.said(prompt) for prompt in self.prompts]
        self.moments: list[list[float]] = [[] for _ in self.prompts]
        self.served = self.lost = 0
        self._rest_s = size.rest_s
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(streams)]
        for thread in self._threads:
            thread.start()

    def said(self, prompt: list[int]) -> list[int]:
        return self.client.stream(prompt, GREEDY, max_tokens=STREAM_TOKENS).read().token_ids

    def _run(self, index: int) -> None:
        while not self._ending.is_set():
            said: list[int] = []
            try:
                for delta in self.client.stream(self.prompts[index], GREEDY, max_tokens=STREAM_TOKENS):
                    self.moments[index].append(time.perf_counter())
                    said += delta.token_ids
            except HeadwiseError as error:
                print(f"a stream ended with {type(error).__name__}: {error}", flush=True)
            self.served += 1
            self.lost += said != self.expected[index]
            self._ending.wait(self._rest_s)

    def longest_pause(self, since: float) -> float:
        """Seconds that a stream at most was without a token, from a moment on."""
        return max(
            after - max(before, since)
            for moments in self.moments
            for before, after in pairwise(moments)
            if after > since
        )

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()


def is_whole(deployment: Deployment, client: Client) -> bool:
    """Whether all engines serve, and the index agrees with each."""
    try:
        nodes, stats = deployment.store_stats()["nodes"], client.stats()
    except HeadwiseError:  # who is asked is being started again
        return False
    engines = stats["engines"]
    return len(engines) == deployment.config.replicas and all(
        engine["work"]["accepts"]
        and engine["silent_s"] < 1.0
        and nodes.get(name, {}).get("agrees")
        and nodes[name]["epoch"] == engine["epoch"]
        for name, engine in engines.items()
    )


def frontend(role: str, number: int) -> Callable[[Deployment, Client], tuple[int, int]]:
    return lambda deployment, client: (deployment.actor_pids()[role], number)


def busiest(client: Client) -> int:
    work = {name: engine["work"] for name, engine in client.stats()["engines"].items()}
    return int(max(work, key=lambda name: int(work[name]["running"])).removeprefix("engine-"))


FAULTS: dict[str, Callable[[Deployment, Client], tuple[int, int]]] = {
    "store": frontend("store", signal.SIGKILL),
    "hung store": frontend("store", signal.SIGSTOP),
    "scheduler": frontend("scheduler", signal.SIGKILL),
    "hung scheduler": frontend("scheduler", signal.SIGSTOP),
    "worker": lambda deployment, client: (deployment.worker_pids()[busiest(client)][0], signal.SIGKILL),
    "engine": lambda deployment, client: (deployment.actor_pids()[f"engine-{busiest(client)}"], signal.SIGKILL),
    "hung engine": lambda deployment, client: (deployment.actor_pids()[f"engine-{busiest(client)}"], signal.SIGSTOP),
}
"""Which process gets which signal."""


def break_things(deployment: Deployment, client: Client, size: Size, seed: int) -> dict[str, Any]:
    load, recovery = Load(client, size, seed), dict[str, Any]()
    for fault in size.faults:
        time.sleep(size.calm_s)
        while not deployment.has_standby:  # one is made some seconds after the last one was needed
            time.sleep(0.1)
        pid, number = FAULTS[fault](deployment, client)
        os.kill(pid, number)
        since = time.perf_counter()
        next(client.stream(load.prompts[0], GREEDY, max_tokens=2))
        first_s = time.perf_counter() - since
        time.sleep(1.0)  # a fault may not be noticed before
        while not is_whole(deployment, client):
            time.sleep(0.1)
        whole_s = time.perf_counter() - since
        recovery[fault] = {"pause_s": load.longest_pause(since), "new_request_s": first_s, "whole_s": whole_s}
        show(fault, *recovery[fault].values())
    load.end()
    return {"recovery": recovery, "served": load.served, "lost": load.lost}


# ---- 3. blocks from other engines ----


def first_token_s(client: Client, engine: str, prompt: Sequence[int], hint: PeerHint | None = None) -> float:
    """Seconds to the first token of a request that is sent to an engine as a client would that was told of it."""
    name = f"{engine}/{hash(tuple(prompt))}"
    request = GenerateRequest(name, np.array(prompt, dtype=np.int32), replace(GREEDY, max_tokens=1), peer=hint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(client.stats()["engines"][engine]["endpoint"])
        since = time.perf_counter()
        for piece in split(wire.encode(Submit(1, request))):
            socket.send(piece)
        while True:
            if not socket.poll(1000):
                socket.send(wire.encode(Ping()))  # the requests of a client that is silent are aborted
            elif isinstance(wire.decode(socket.recv(), Outputs, Pong), Outputs):
                return time.perf_counter() - since


def with_peers(config: EngineConfig, size: Size) -> EngineConfig:
    cache, host = f"{size.peer_tokens // 16}MiB", f"{size.peer_tokens // 4}MiB"
    return replace(config, replicas=2, max_model_len=size.peer_tokens + 64, kv_cache=cache, host_cache=host)


def load_from_peers(client: Client, size: Size, seed: int) -> dict[str, Any]:
    """The first prompt of each engine is not measured: kernels are called, and speeds measured, for the first time."""
    draw, computed, loaded = np.random.default_rng(seed), list[float](), list[float]()
    show("prompt", "computed s", "from a peer s")
    while len(client.stats()["engines"]) < 2:
        time.sleep(0.1)
    time.sleep(1.5)  # until the engines have been told of each other
    epoch = client.stats()["engines"]["engine-0"]["epoch"]
    for index in range(size.peer_prompts + 1):
        prompt = tokens(draw, size.peer_tokens + 1)
        computed.append(first_token_s(client, "engine-0", prompt))
        loaded.append(first_token_s(client, "engine-1", prompt, PeerHint("engine-0", epoch, size.peer_tokens)))
        show(index, computed[-1], loaded[-1])
    time.sleep(1.0)
    peers = client.stats()["engines"]["engine-1"]["peers"]
    ratio = float(np.median(loaded[1:]) / np.median(computed[1:]))
    return {
        "peer_over_cold": ratio,
        "peer_hit_tokens": peers["hit_tokens"],
        "peer_missed_blocks": peers["missed_blocks"],
    }


def show(*cells: object) -> None:
    print("".join(f"{cell:>16.3f}" if isinstance(cell, float) else f"{cell:>16}" for cell in cells), flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None, running: Deployment | None = None) -> None:
    """running: a deployment of two engines with host caches to measure, in place of one of this script's own"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two engines, one policy, three faults: a minute")
    parser.add_argument("--smoke", action="store_true", help="the same with one fault and one deployment: seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", metavar="HOST:PORT", help="the Ray cluster to deploy to; default: one of its own")
    options = parser.parse_args(arguments)
    size = SMOKE if options.smoke else QUICK if options.quick else FULL
    config = lightly(CONFIG) if options.smoke else CONFIG
    config = replace(config, replicas=size.replicas, kv_cache=size.kv_cache, max_model_len=size.max_model_len)
    config = config if size.alone else with_peers(config, size)
    seen: dict[str, Turns] = {}
    found: dict[str, Any] = {}
    show("policy", "hit rate", "TTFT p50 s", "TTFT p90 s")
    for policy in size.policies:
        with (
            deployed(replace(config, routing=policy), options.ray, running) as deployment,
            Client(deployment.client_address) as client,
        ):
            seen[policy] = converse(client, size, options.seed)
            show(policy, seen[policy].hit_rate, seen[policy].quantile(0.5), seen[policy].quantile(0.9))
            if policy == "cache_aware":
                show("fault", "longest pause s", "new request s", "whole after s")
                found |= break_things(deployment, client, size, options.seed)
            if not size.alone:
                found |= load_from_peers(client, size, options.seed)
    report: dict[str, Any] = {"hit_rate": {policy: turns.hit_rate for policy, turns in seen.items()}}
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        report[f"ttft_{name}_s"] = {policy: turns.quantile(share) for policy, turns in seen.items()}
        if len(seen) == 2:
            report[f"ttft_{name}_ratio"] = seen["round_robin"].quantile(share) / seen["cache_aware"].quantile(share)
    if size.alone:
        with (
            Deployment.start(with_peers(CONFIG, size), options.ray) as deployment,
            Client(deployment.client_address) as client,
        ):
            found |= load_from_peers(client, size, options.seed)
    print(json.dumps(rounded({**report, **found})))


if __name__ == "__main__":
    main()

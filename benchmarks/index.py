"""The index of every prefix: stores, lookups, memory, ingest over ZeroMQ, and whole routing decisions.

    python benchmarks/index.py [--quick]

64 nodes and 4,096 sequences of 157 blocks (10,048 tokens), the first 78 blocks of each out of 64 shared prefixes: 643k
blocks stated. Six sequences in eight are on their node's device, one on its host, one in storage.

store:    a flush of 157 blocks is applied, in this process; into an index with room, and into one that forgets as much
remove:   a flush takes back the 79 blocks of a sequence's own
lookup:   how much of a sequence's path each node could serve, on each tier
ingest:   another process sends flushes over TCP, a message each; the server's thread decodes and applies them.
          They are encoded beforehand: in a cluster, other machines do that
decision: a prompt is hashed, looked up, and an engine selected and reserved, on one thread
memory:   measured by tracemalloc; "one by one": no two neighbouring blocks are held alike

One thread does all but ingest's sending. Times are medians over rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import random
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import HASH_BYTES, extend_hashes, hash_seed
from headwise.runtime.frontend.routing import RoutedRequest, Router, RouterOptions
from headwise.runtime.protocol.messages import EngineLoad, EngineStatus
from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.messages import Flush
from headwise.storage.index.prefix_index import PrefixIndex
from headwise.storage.index.store_server import StoreServer
from headwise.storage.index.wire import encode

BLOCK = 64
SHARED, OWN = 78, 79
BLOCKS = SHARED + OWN
PREFIXES = 64
SEQUENCES = 4096
TIERS = ("device",) * 6 + ("host", "storage")
SEED = hash_seed("model")
draw = np.random.default_rng(0)
choose = random.Random(0)


@dataclass(frozen=True)
class Stored:
    """A sequence's path, and who has it."""

    node: str
    tier: str
    hashes: list[bytes]


def tokens(blocks: int) -> NDArray[np.int32]:
    return draw.integers(0, 2**17, blocks * BLOCK, dtype=np.int32)


def hashes_of(sequence: NDArray[np.int32]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, SEED, sequence, BLOCK)
    return hashes


def workload(prefixes: list[NDArray[np.int32]], nodes: int, sequences: int) -> list[Stored]:
    """Sequences on random nodes, each a shared prefix and blocks of its own."""
    shared, made = [hashes_of(prefix) for prefix in prefixes], []
    for _ in range(sequences):
        hashes = list(choose.choice(shared))
        extend_hashes(hashes, SEED, tokens(OWN), BLOCK)
        made.append(Stored(f"node-{choose.randrange(nodes)}", choose.choice(TIERS), hashes))
    return made


def flushes(
    stored: list[Stored], first_block: int = 0, resident: bool = True, seqs: dict[str, int] | None = None
) -> list[Flush]:
    numbers: dict[str, int] = defaultdict(int) if seqs is None else seqs
    made = []
    for one in stored:
        run = b"".join(one.hashes[first_block:])
        made.append(Flush(one.node, 1, numbers[one.node], one.tier, first_block, run, resident))
        numbers[one.node] += 1
    return made


def timed(store: AttentionStore, statements: list[Flush]) -> list[float]:
    """Seconds of each."""
    times = []
    for statement in statements:
        started = time.perf_counter()
        store.apply(statement)
        times.append(time.perf_counter() - started)
    return times


def percentile(times: list[float], percent: int) -> float:
    return sorted(times)[len(times) * percent // 100] * 1e6


def lookups(store: AttentionStore, stored: list[Stored], count: int) -> list[float]:
    times = []
    for _ in range(count):
        path = choose.choice(stored).hashes
        started = time.perf_counter()
        found = store.match(path)
        times.append(time.perf_counter() - started)
        assert found
    return times


def in_process(stored: list[Stored], rounds: int) -> dict[str, list[list[float]]]:
    """Times by operation, a list per round."""
    times: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(rounds):
        seqs: dict[str, int] = defaultdict(int)
        stores, removes = flushes(stored, seqs=seqs), flushes(stored, SHARED, False, seqs)
        store, small = AttentionStore(), AttentionStore(max_blocks=len(stored) * OWN // 4)
        gc.collect()
        times["store"].append(timed(store, stores))
        times["store, full"].append(timed(small, stores))
        assert store.stats()["forgotten_blocks"] == 0 < small.stats()["forgotten_blocks"]
        times["lookup"].append(lookups(store, stored, len(stored)))
        times["remove"].append(timed(store, removes))
    return times


def rate(times: list[list[float]]) -> float:
    """Operations a second, of all of a round."""
    return statistics.median(len(round_) / sum(round_) for round_ in times)


def bytes_per_block(stored: list[Stored], flags: bytes) -> float:
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex()
    for one in stored:
        index.apply(one.node, one.tier, b"".join(one.hashes), True, flags)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / len(index)


def publish(endpoint: str, stored: list[Stored], start: multiprocessing.synchronize.Event) -> None:
    """Send a flush per sequence, as fast as the server takes them."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        messages = [encode(statement, "model") for statement in flushes(stored)]
        start.wait()
        for message in messages:
            socket.send(message)
        while True:  # what is answered says nothing of that: the parent ends this process when all has arrived
            socket.recv()


def ingest(stored: list[Stored]) -> float:
    """Flushes a second that a server takes in, from the first to the last."""
    server = StoreServer("tcp://127.0.0.1:*", "model")
    server.start()
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    publisher = context.Process(target=publish, args=(server.endpoint, stored, start), daemon=True)
    publisher.start()
    start.set()
    applied, before, began = 0, 0, 0.0
    while applied < len(stored):
        time.sleep(0.004)
        applied = server.applied
        if applied and not began:
            began, before = time.perf_counter(), applied
    seconds = time.perf_counter() - began
    publisher.terminate()
    publisher.join()
    server.stop()
    return (len(stored) - before) / seconds


def decisions(prefixes: list[NDArray[np.int32]], stored: list[Stored], nodes: int, count: int) -> list[float]:
    """Seconds of each: hashing a prompt of 10,048 tokens, the lookup, selecting and reserving."""
    store = AttentionStore()
    timed(store, flushes(stored))
    router = Router(RouterOptions(block_size=BLOCK), random.Random(0))
    waiting: dict[str, list[str]] = defaultdict(list)
    times, now = [], 0.0

    def report() -> None:
        for node in range(nodes):
            name = f"node-{node}"
            load = EngineLoad(node % 4, 16, 5000, 500, 4000, 1e-4, 0.02, 1e-5, 5e-5)
            status = EngineStatus("", name, f"tcp://{name}", 16, {}, 1, load, tuple(waiting.pop(name, ())))
            router.update(status, now)

    for index in range(count):
        if index % 1000 == 0:
            report()
        now += 0.5e-3
        prompt = np.concatenate([choose.choice(prefixes), tokens(OWN)])
        started = time.perf_counter()
        hashes = hashes_of(prompt)
        request = RoutedRequest(str(index), hashes, len(prompt))
        choice = router.select_and_reserve(request, store.match(hashes), now)
        times.append(time.perf_counter() - started)
        assert choice is not None
        assert choice.device + choice.host + choice.storage == SHARED * BLOCK
        waiting[choice.engine].append(request.request_id)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sequences and rounds: seconds")
    quick = parser.parse_args(arguments).quick
    rounds, full = (1, 256) if quick else (9, SEQUENCES)
    prefixes = [tokens(SHARED) for _ in range(PREFIXES * full // SEQUENCES)]
    print(f"{'nodes':>6} {'blocks':>8}  {'operation':<12} {'per second':>11} {'p50, us':>8} {'p99, us':>8}")
    results: dict[int, dict[str, list[list[float]]]] = {}
    for nodes, sequences in ((64, full),) if quick else ((64, full), (8, full), (512, full), (64, full // 4)):
        stored = workload(prefixes, nodes, sequences)
        results.setdefault(nodes, in_process(stored, rounds if (nodes, sequences) == (64, full) else 3))
        shown = results[nodes] if sequences == full else in_process(stored, 3)
        for name, times in shown.items():
            flat = list(itertools.chain.from_iterable(times))
            print(
                f"{nodes:6} {sequences * BLOCKS:8}  {name:<12} {rate(times):11,.0f} "
                f"{percentile(flat, 50):8.1f} {percentile(flat, 99):8.1f}"
            )
    stored = workload(prefixes, 64, full)
    per_block = bytes_per_block(stored, b"")
    alternating = bytes(index % 2 for index in range(BLOCKS))
    print(f"memory: {per_block:.0f} bytes a block; one by one {bytes_per_block(stored[:512], alternating):.0f}")
    sent = workload(prefixes, 64, full)
    zmq_rate = statistics.median(ingest(sent) for _ in range(rounds))
    print(
        f"ingest: {zmq_rate:,.0f} flushes of {BLOCKS} blocks a second, {zmq_rate * BLOCKS * HASH_BYTES / 1e6:.0f} MB/s"
    )
    decided = decisions(prefixes, stored, 64, 100 if quick else 10_000)
    print(
        f"decision: {len(decided) / sum(decided):,.0f} a second, p50 {percentile(decided, 50):.0f} us, "
        f"p99 {percentile(decided, 99):.0f} us"
    )
    of_64 = results[64]
    result = {
        "stores_per_s": rate(of_64["store"]),
        "lookup_p50_us": statistics.median(percentile(times, 50) for times in of_64["lookup"]),
        "zmq_stores_per_s": zmq_rate,
        "decisions_per_s": len(decided) / sum(decided),
        "decision_p50_us": percentile(decided, 50),
        "bytes_per_block": per_block,
    }
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))


if __name__ == "__main__":
    main()

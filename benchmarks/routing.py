"""Routing policies over a trace of conversations: the real router and index, simulated engines.

    python benchmarks/routing.py [--quick] [--trace FILE.jsonl.gz] [--load 1.0] [--plot docs/routing.png]

Eight engines serve the trace (`simulation/cluster.py`). The router is the scheduler's, over statuses up to half a
second old, and the index is the attention store's, told of blocks when requests end and when blocks are evicted.
Compared are the router's policies, of which by_arrival is cache_aware over engines whose prompts are not in the fair
order (`prompt_order`); a router that guesses from the prompts it has sent where, as Ray Serve's prefix-aware one does;
and an oracle: one cache that all engines share at no cost, and the engine with the least work.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from capacity import LLAMA, TRACE
from numpy.typing import NDArray
from simulation.caches import Cache, OneCache, Storage
from simulation.cluster import Dispatcher, Engine, serve
from simulation.gpu import A800, SimulatedGpu
from simulation.machine import BLOCK, Hardware, StepTime
from simulation.traced import Request

from headwise.runtime.frontend.routing import RoutedRequest, Router, RouterOptions
from headwise.runtime.frontend.routing.base import EngineRole
from headwise.runtime.frontend.routing.router import TIERS
from headwise.runtime.models.registry import model_config
from headwise.storage.index.messages import HASH_BYTES
from headwise.storage.index.prefix_index import PrefixIndex

ENGINES = 8
KV_SHARE = 0.9
HOST_BYTES = 64e9
STORAGE_BYTES = 512e9
HOST_BYTES_S = 20e9
STORAGE_BYTES_S = 2e9
PEER_BYTES_S = 12.5e9
ENGINE_QUEUE = 64

ASSUMED = """\
Assumed: {engines} engines, each Llama-3.1-8B in bfloat16 on an {gpu} (roofline: {compute:.0%} of peak flops,
{memory:.0%} of peak bandwidth), steps of {step} tokens, at most {seqs} sequences. Cache of an engine: device
{device:,} tokens ({share:.0%} of the memory that weights leave), host {host:,} ({host_gb:.0f} GB,
{host_rate:.0f} GB/s). Storage, shared: {storage:,} tokens ({storage_gb:.0f} GB, {storage_rate:.0f} GB/s to each host).
Between hosts, where engines fetch from each other: {peer_rate:g} GB/s. Statuses every 0.5 s."""


def hardware() -> Hardware:
    model = model_config(LLAMA)
    block_bytes = StepTime(A800, model).kv_bytes * BLOCK
    return Hardware(
        gpu=A800,
        model=model,
        device=int(SimulatedGpu(A800, model).free_memory * KV_SHARE // block_bytes),
        host=int(HOST_BYTES // block_bytes),
        storage=int(STORAGE_BYTES // block_bytes),
        host_token_s=block_bytes / BLOCK / HOST_BYTES_S,
        storage_token_s=block_bytes / BLOCK / STORAGE_BYTES_S,
        peer_token_s=block_bytes / BLOCK / PEER_BYTES_S,
    )


def read_requests(path: Path, count: int, load: float) -> list[Request]:
    """The trace's first ``count`` requests, arriving ``load`` times as fast. An id names a block and all before it."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    return [
        Request(
            str(number),
            record["timestamp"] / 1000 / load,
            [each.to_bytes(HASH_BYTES, "big") for each in record["hash_ids"][: record["input_length"] // BLOCK]],
            record["input_length"],
            max(1, record["output_length"]),
        )
        for number, record in enumerate(records)
    ]


# ---- policies ----


def number_of(engine: str) -> int:
    return int(engine.rpartition("-")[2])


class Routed:
    """The scheduler's router over the store's index."""

    def __init__(
        self,
        policy: str,
        hardware: Hardware,
        index: PrefixIndex,
        peer_loads: bool = False,
        roles: Mapping[str, EngineRole] | None = None,
    ) -> None:
        self.router = Router(
            RouterOptions(
                policy="cache_aware" if policy == BY_ARRIVAL else policy,
                block_size=BLOCK,
                blocks_per_token=1 / BLOCK,
                engine_queue=ENGINE_QUEUE,
                max_num_seqs=hardware.max_num_seqs,
                step_tokens=hardware.step_tokens,
                peer_loads=peer_loads,
                fair_prompts=hardware.serving.fair_prompts,
            ),
            random.Random(0),
        )
        self.router.table.set_roles(roles or {})
        self._index = index
        self.seconds: list[float] = []

    def route(self, request: Request, now: float) -> int | None:
        started = time.perf_counter()
        matches = self._index.match(b"".join(request.path)) if self.router.uses_index else None
        routed = RoutedRequest(request.name, request.path, request.num_tokens)
        choice = self.router.select_and_reserve(routed, matches, now)
        self.seconds.append(time.perf_counter() - started)
        if choice is None:
            return None
        request.peer = -1 if choice.hint is None else number_of(choice.hint.engine)
        request.is_apart = choice.hint is not None and choice.hint.prefills
        return number_of(choice.engine)

    def report(self, engine: Engine, now: float) -> None:
        self.router.update(engine.status(), now)
        self.router.watch(now)


class Guessed:
    """What prefixes were sent where, and nothing else: the rules of Ray Serve's prefix-aware router, with the
    thresholds of its source (imbalanced_threshold, match_rate_threshold, no eviction) and with exact queue lengths.

    Queues that differ by more than `IMBALANCED`: the shorter one of two at random. Else the engines that got the
    longest common prefix, if that is at least `MATCH_RATE` of the prompt; else those that got the least text so far.
    """

    IMBALANCED = 10
    MATCH_RATE = 0.1

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._sent: dict[bytes, set[int]] = {}
        self._tokens = [0] * len(engines)
        self._random = random.Random(0)

    def route(self, request: Request, now: float) -> int:
        lengths = [engine.ongoing for engine in self._engines]
        if max(lengths) - min(lengths) > self.IMBALANCED:
            candidates = self._random.sample(range(len(lengths)), 2)
        else:
            depth = self._depth(request.path)
            if depth * BLOCK >= self.MATCH_RATE * request.num_tokens and depth:
                candidates = list(self._sent[request.path[depth - 1]])
            else:
                candidates = [number for number, sent in enumerate(self._tokens) if sent == min(self._tokens)]
        number = min(candidates, key=lambda each: (lengths[each], self._random.random()))
        for block in request.path:
            holders = self._sent.setdefault(block, set())
            if number not in holders:
                holders.add(number)
                self._tokens[number] += BLOCK
        return number

    def _depth(self, path: Sequence[bytes]) -> int:
        depth = 0
        while depth < len(path) and path[depth] in self._sent:
            depth += 1
        return depth

    def report(self, engine: Engine, now: float) -> None:
        pass


class LeastWork:
    """The engine with the fewest tokens to compute, known to the moment."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def route(self, request: Request, now: float) -> int:
        return min(self._engines, key=lambda engine: (engine.work_left, len(engine.decoding))).number

    def report(self, engine: Engine, now: float) -> None:
        pass


# ---- runs ----

BY_ARRIVAL = "by_arrival"
"""cache_aware, where engines have prompts in the order in which they came."""
POLICIES = ("cache_aware", BY_ARRIVAL, "least_loaded", "round_robin", "guessed_prefixes", "oracle")


@dataclass(frozen=True)
class Outcome:
    """tiers: of the prompts' tokens, the shares that device, host, storage and other engines served
    imbalance: the most that an engine spent on prompts in a minute, over the mean; mean of all minutes
    decision_us: of the router: index lookup and choice, median
    gaps: how often so many seconds went by between two tokens of a sequence
    served_s: from the first arrival to the last end
    prompt_tokens, tokens: of prompts, and generated
    expected_hits: share of the prompts' tokens that the router expected to need no computing
    """

    policy: str
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    tiers: tuple[float, float, float, float]
    imbalance: float
    decision_us: float
    decisions: dict[str, int]
    gaps: Counter[float]
    served_s: float
    prompt_tokens: int
    tokens: int
    expected_hits: float

    @property
    def hit_rate(self) -> float:
        return sum(self.tiers)

    def gap_s(self, percent: float) -> float:
        """A percentile of the time between two tokens."""
        gaps = sorted(self.gaps)
        counts = np.cumsum([self.gaps[gap] for gap in gaps])
        return gaps[int(np.searchsorted(counts, counts[-1] * percent / 100))]


def run(
    policy: str,
    trace: Path,
    count: int,
    load: float,
    machine: Hardware | None = None,
    peer_loads: bool = False,
    roles: Mapping[str, EngineRole] | None = None,
) -> Outcome:
    """Serve the trace's first ``count`` requests; ``machine``: None: `hardware`."""
    machine = machine or hardware()
    if policy == BY_ARRIVAL:
        machine = replace(machine, serving=replace(machine.serving, prompt_order="arrival"))
    index = PrefixIndex()
    for number in range(ENGINES if machine.storage > 0 else 0):
        index.set_volume(f"engine-{number}", "shared")
    requests = read_requests(trace, count, load)
    storage = Storage(machine.storage, index)
    if policy == "oracle":
        shared = OneCache(machine, ENGINES, index)
        engines = [Engine(number, machine, shared) for number in range(ENGINES)]
    else:
        engines = [
            Engine(number, machine, Cache(f"engine-{number}", machine, storage, index)) for number in range(ENGINES)
        ]
    dispatcher: Dispatcher
    if policy == "oracle":
        dispatcher = LeastWork(engines)
    elif policy == "guessed_prefixes":
        dispatcher = Guessed(engines)
    else:
        dispatcher = Routed(policy, machine, index, peer_loads, roles)
    spent = serve(requests, engines, dispatcher)
    gaps = sum((engine.gaps for engine in engines), Counter[float]())
    return _outcome(policy, requests, np.array(spent), dispatcher, gaps)


def _outcome(
    policy: str,
    requests: Sequence[Request],
    spent: NDArray[np.float64],
    dispatcher: Dispatcher,
    gaps: Counter[float],
) -> Outcome:
    tokens = sum(request.num_tokens for request in requests)
    by_minute = np.diff(spent[::120], axis=0)
    longer = [request for request in requests if request.output > 1]
    return Outcome(
        policy,
        ttft_s=np.array([request.first_token - request.arrived for request in requests]),
        tpot_s=np.array([(request.ended - request.first_token) / (request.output - 1) for request in longer]),
        tiers=(
            sum(request.device for request in requests) / tokens,
            sum(request.loaded_host for request in requests) / tokens,
            sum(request.loaded_storage for request in requests) / tokens,
            sum(request.loaded_peer for request in requests) / tokens,
        ),
        imbalance=float((by_minute.max(axis=1) / by_minute.mean(axis=1)).mean()) if len(by_minute) else 1.0,
        decision_us=float(np.median(dispatcher.seconds)) * 1e6 if isinstance(dispatcher, Routed) else 0.0,
        decisions=dispatcher.router.stats()["decisions"] if isinstance(dispatcher, Routed) else {},
        gaps=gaps,
        served_s=max(request.ended for request in requests) - requests[0].arrived,
        prompt_tokens=tokens,
        tokens=sum(request.output for request in requests),
        expected_hits=1 - _computed(dispatcher) / tokens if isinstance(dispatcher, Routed) else 0.0,
    )


def _computed(dispatcher: Routed) -> int:
    expected = dispatcher.router.stats()["expected_tokens"]
    return int(expected["all"] - sum(expected[tier] for tier in TIERS))


def simulate(policies: Sequence[str], trace: Path, count: int, load: float, jobs: int) -> list[Outcome]:
    one = partial(run, trace=trace, count=count, load=load)
    if jobs == 1:
        return [one(policy) for policy in policies]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(one, policies))


# ---- the report ----


def print_table(outcomes: Sequence[Outcome]) -> None:
    print(
        f"{'':18}{'hits':>7}{'device':>8}{'host':>7}{'storage':>8}{'TTFT p50':>10}{'p90':>8}{'p99':>8}{'mean, s':>9}"
        f"{'TPOT p50, ms':>14}{'imbalance':>11}{'decision, us':>14}"
    )
    for one in outcomes:
        p50, p90, p99 = np.percentile(one.ttft_s, (50, 90, 99))
        device, host, storage, _ = one.tiers
        decision = f"{one.decision_us:>14.0f}" if one.decision_us else f"{'':>14}"
        print(
            f"{one.policy:18}{one.hit_rate:>7.1%}{device:>8.1%}{host:>7.1%}{storage:>8.1%}{p50:>10.2f}{p90:>8.2f}"
            f"{p99:>8.2f}{one.ttft_s.mean():>9.2f}{np.median(one.tpot_s) * 1e3:>14.1f}{one.imbalance:>11.2f}{decision}"
        )


def print_assumptions() -> None:
    machine = hardware()
    print(
        ASSUMED.format(
            engines=ENGINES,
            gpu=machine.gpu.name,
            compute=machine.gpu.compute_efficiency,
            memory=machine.gpu.memory_efficiency,
            step=machine.step_tokens,
            seqs=machine.max_num_seqs,
            device=machine.device * BLOCK,
            share=KV_SHARE,
            host=machine.host * BLOCK,
            host_gb=HOST_BYTES / 1e9,
            host_rate=HOST_BYTES_S / 1e9,
            storage=machine.storage * BLOCK,
            storage_gb=STORAGE_BYTES / 1e9,
            storage_rate=STORAGE_BYTES_S / 1e9,
            peer_rate=PEER_BYTES_S / 1e9,
        )
    )


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Draw the distribution of TTFT, and hit rates by tier."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    times, hits = figure.subplots(1, 2, width_ratios=(3, 2))
    for one in outcomes:
        ordered = np.sort(one.ttft_s)
        style = {"color": "black", "linestyle": "--"} if one.policy == "oracle" else {}
        times.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=one.policy, **style)
    times.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", ylim=(0, 1), title=title)
    times.grid(alpha=0.3)
    times.legend(loc="upper left")
    bottom = np.zeros(len(outcomes))
    for tier, name in enumerate(("device", "host", "storage")):
        share = np.array([one.tiers[tier] for one in outcomes])
        hits.bar([one.policy for one in outcomes], share, bottom=bottom, label=name)
        bottom += share
    hits.set(ylabel="share of prompt tokens", title="served from cache", ylim=(0, 1.25 * bottom.max()))
    hits.set_xticks(range(len(outcomes)), [one.policy for one in outcomes], rotation=30, ha="right")
    hits.legend(loc="upper center", ncols=3)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first 60 requests: seconds")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace")
    parser.add_argument(
        "--load", type=float, default=1.0, help="how many times as fast as in the trace requests arrive"
    )
    parser.add_argument("--plot", type=Path, help="draw TTFT and hit rates into this PNG")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    args = parser.parse_args(arguments)
    if not args.trace.exists():
        print(f"{args.trace} is not there: nothing was served; give a trace with --trace")
        print(json.dumps({"hit_rate": {}, "ttft_p50_s": {}, "ttft_p90_s": {}}))
        return
    count = 60 if args.quick else 1 << 30
    outcomes = simulate(POLICIES, args.trace, count, args.load, 1 if args.quick else args.jobs)
    print_assumptions()
    print(f"\n{len(outcomes[0].ttft_s):,} requests of {args.trace.name}, arriving {args.load:g} times as fast")
    print_table(outcomes)
    print(f"\ndecisions of cache_aware: {outcomes[0].decisions}")
    if args.plot:
        plot(outcomes, args.plot, f"{ENGINES} simulated engines, {args.load:g}x the rate of the trace")
    print(
        json.dumps(
            {
                "requests": len(outcomes[0].ttft_s),
                "hit_rate": {one.policy: round(one.hit_rate, 4) for one in outcomes},
                **{
                    f"ttft_p{percent}_s": {
                        one.policy: round(float(np.percentile(one.ttft_s, percent)), 3) for one in outcomes
                    }
                    for percent in (50, 90)
                },
            }
        )
    )


if __name__ == "__main__":
    main()

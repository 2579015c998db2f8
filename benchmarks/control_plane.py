"""Cost of the control plane, on one thread: admitting, stepping and freeing requests, without any model.

    python benchmarks/control_plane.py [--quick]

admit: a 10,000-token request, half of it in the cache, into a full pool that evicts; hashing included
step:  plan and commit a decode step of 256 requests over 8 head groups, 7 of them windows that recycle
free:  give back a 10,000-token request

The rows show how each grows with context, groups and pool size. Times are medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence as Arguments

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import extend_hashes, hash_seed
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.prompt_turns import PromptTurns
from headwise.runtime.engine.resource_manager import ResourceManager
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

BLOCK = 64
WINDOW = HeadPolicy(window=1024, sink=64)
SEED = hash_seed("model")
draw = np.random.default_rng(0)


def tokens(count: int) -> NDArray[np.int32]:
    return draw.integers(0, 2**17, count, dtype=np.int32)


def hashes_of(sequence: NDArray[np.int32]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, SEED, sequence, BLOCK)
    return hashes


def manager(groups: int, num_blocks: int, rows: int, context: int) -> CacheManager:
    return CacheManager(
        [FULL] + [WINDOW] * (groups - 1),
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_rows=rows,
        max_blocks=context // BLOCK + 2,
        step_tokens=512,
    )


def extend(cache: CacheManager, row: int, count: int) -> bool:
    return cache.extend(np.array([row], dtype=np.int32), np.array([count]))


def admit_and_free(context: int, groups: int, num_blocks: int, rounds: int) -> tuple[float, float]:
    """Median microseconds to admit a request with a half hit into a full pool, and to free it."""
    cache = manager(groups, num_blocks, 2, context)
    shared = tokens(context // 2)

    def run_through(sequence: NDArray[np.int32]) -> None:
        hashes = hashes_of(sequence)
        cache.adopt(0, cache.match(hashes, len(sequence) - 1), len(sequence))
        assert extend(cache, 0, len(sequence))
        cache.register([0], [hashes])
        cache.release(0)
        cache.drain_table_updates()

    for _ in range(num_blocks * BLOCK // (context * groups) + 2):
        run_through(tokens(context))
    admits, frees = [], []
    for _ in range(rounds):
        run_through(shared)
        prompt = np.concatenate([shared, tokens(context - len(shared))])
        started = time.perf_counter()
        hashes = hashes_of(prompt)
        match = cache.match(hashes, len(prompt) - 1)
        cache.adopt(1, match, len(prompt))
        assert extend(cache, 1, len(prompt))
        admits.append(time.perf_counter() - started)
        assert match.num_blocks == len(shared) // BLOCK
        cache.drain_table_updates()
        cache.register([1], [hashes])
        cache.recycle(np.array([1], np.int32), np.array([len(prompt)]))
        started = time.perf_counter()
        cache.release(1)
        frees.append(time.perf_counter() - started)
        cache.drain_index_updates()
    return statistics.median(admits) * 1e6, statistics.median(frees) * 1e6


def decode_step(requests: int, groups: int, context: int, rounds: int) -> float:
    """Median microseconds to plan a decode step and to commit it, as the engine does, text aside."""
    cache = manager(groups, requests * groups * (context // BLOCK + 4), requests, context + rounds + 2 * BLOCK)
    budget = requests * (context + BLOCK)
    resources = ResourceManager(
        cache, max_rows=requests, max_batched_tokens=budget, prefill_chunk=budget, turns=PromptTurns()
    )
    for index in range(requests):
        request = GenerateRequest(str(index), tokens(context + index % BLOCK), SamplingParams(seed=1))
        resources.add(Sequence(request, SEED, (0, index), context + rounds + 2 * BLOCK, 0.0), 0.0)
    step = resources.schedule(0.0)
    times, sampled = [], np.full(requests, 7, dtype=np.int32)
    for _ in range(rounds):
        assert step is not None
        assert len(step.sequences) == requests
        started = time.perf_counter()
        resources.commit(step, sampled)
        step = resources.schedule(0.0)
        times.append(time.perf_counter() - started)
        cache.drain_index_updates()
    return statistics.median(times[1:]) * 1e6


def main(arguments: Arguments[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args(arguments).quick else 60
    print(f"{'context':>8} {'groups':>7} {'pool blocks':>12} {'admit, us':>10} {'free, us':>9}")
    grown = []
    for context, groups, blocks in ((10_000, 1, 2_000), (10_000, 1, 50_000), (10_000, 8, 4_000), (40_000, 1, 4_000)):
        grown.append(admit_and_free(context, groups, blocks, rounds))
        print(f"{context:8} {groups:7} {blocks:12} {grown[-1][0]:10.0f} {grown[-1][1]:9.0f}")
    print(f"{'context':>8} {'groups':>7} {'requests':>12} {'step, us':>10}")
    steps = {}
    for context, groups, requests in ((1_024, 1, 256), (1_024, 8, 256), (4_096, 8, 256), (1_024, 8, 64)):
        steps[context, groups, requests] = decode_step(requests, groups, context, rounds)
        print(f"{context:8} {groups:7} {requests:12} {steps[context, groups, requests]:10.0f}")
    result = {"admit_us": grown[0][0], "free_us": grown[0][1], "decode_step_us": steps[1_024, 8, 256]}
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))


if __name__ == "__main__":
    main()

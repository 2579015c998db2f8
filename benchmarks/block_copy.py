"""Scattered block copies between two arenas against this machine's plain memcpy of as many bytes.

    python benchmarks/block_copy.py [--quick] [--threads N]

Prints a table, then one line of JSON. Candidates take turns; a ratio is the median, over the rounds, of plain memcpy's
seconds over the block copy's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from headwise.kernels.select import make_block_copy

KIB = 1 << 10
ARENA_BYTES = 512 << 20
COPIED_BYTES = 96 << 20
LAYERS = 30


@dataclass(frozen=True)
class Workload:
    """Copies of ``range_bytes`` of each block, at a random place of either arena; ``adjacent``: runs of 16 blocks."""

    name: str
    block_bytes: int
    range_bytes: int
    adjacent: bool = False

    def make_pairs(self, rng: np.random.Generator, arena_bytes: int, copied_bytes: int) -> np.ndarray:
        """``int32 [m, 3]`` (group, source block, target block), which copy about ``copied_bytes``."""
        run = 16 if self.adjacent else 1
        blocks = arena_bytes // self.block_bytes // run
        count = max(1, min(copied_bytes // self.range_bytes // run, blocks // 2))
        pairs = np.zeros((count, run, 3), dtype=np.int32)
        for column in (1, 2):
            pairs[:, :, column] = rng.permutation(blocks)[:count, None] * run + np.arange(run)
        return pairs.reshape(-1, 3)

    def ranges(self, turn: int) -> np.ndarray:
        """Another layer's in each round, so that no range is still in the processor's caches."""
        first = turn % (self.block_bytes // self.range_bytes) * self.range_bytes
        return np.array([[first, first + self.range_bytes]], dtype=np.int64)


WORKLOADS = [
    *(Workload(f"scattered_{kib}KiB", kib * KIB, kib * KIB) for kib in (16, 48, 128, 512)),
    Workload("adjacent_48KiB", 48 * KIB, 48 * KIB, adjacent=True),
    Workload("layer_range_6KiB", LAYERS * 6 * KIB, 6 * KIB),
    Workload("layer_range_48KiB", LAYERS * 48 * KIB, 48 * KIB),
]


class PlainMemcpy:
    """`np.copyto` of one run of bytes, cut into as many as there are threads."""

    def __init__(self, threads: int) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)

    def __call__(self, source: np.ndarray, target: np.ndarray) -> None:
        bounds = [len(source) * share // self._threads for share in range(self._threads + 1)]
        parts = [slice(*bounds[share : share + 2]) for share in range(self._threads)]
        for copied in [self._pool.submit(np.copyto, target[part], source[part]) for part in parts]:
            copied.result()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds of an eighth of the bytes: seconds")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    args = parser.parse_args(arguments)
    rounds, share = (3, 8) if args.quick else (41, 1)
    arena_bytes, copied_bytes = ARENA_BYTES // share, COPIED_BYTES // share

    copy, memcpy = make_block_copy("numba", args.threads), PlainMemcpy(args.threads)
    source, target = np.ones(arena_bytes, np.uint8), np.ones(arena_bytes, np.uint8)
    rng = np.random.default_rng(0)
    print(f"{args.threads} threads, {rounds} rounds\n")
    print(f"{'workload':20}{'copies':>8}{'MiB':>6}{'copy GB/s':>11}{'memcpy GB/s':>13}{'ratio':>7}")
    ratios: dict[str, float] = {}
    for load in WORKLOADS:
        pairs, size = load.make_pairs(rng, arena_bytes, copied_bytes), load.block_bytes
        num_bytes = len(pairs) * load.range_bytes
        times = []
        for turn in range(rounds + 1):
            ranges = load.ranges(turn)
            run = slice(at := turn * num_bytes % (arena_bytes - num_bytes), at + num_bytes)
            copied = seconds(partial(copy, source, target, pairs, ranges, size))
            times.append((copied, seconds(partial(memcpy, source[run], target[run]))))
        times = times[1:]
        ratios[load.name] = round(statistics.median(plain / copied for copied, plain in times), 3)
        rates = [num_bytes / statistics.median(column) / 1e9 for column in zip(*times, strict=True)]
        print(
            f"{load.name:20}{len(pairs):8}{num_bytes >> 20:6}{rates[0]:11.1f}{rates[1]:13.1f}{ratios[load.name]:7.2f}"
        )
    result = {
        "benchmark": "block_copy",
        "threads": args.threads,
        "block_ratio": min(ratios[f"scattered_{kib}KiB"] for kib in (48, 128, 512)),
        "layer_ratio": min(ratio for name, ratio in ratios.items() if name.startswith("layer_range")),
        **ratios,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

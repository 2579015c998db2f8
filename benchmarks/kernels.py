"""CPU attention kernels against the memory bandwidth of the machine and against gather-then-matmul.

    python benchmarks/kernels.py [--quick] [--threads N] [--kv-dtype float32|bfloat16|int8|float8_e4m3fn|int4]

Prints a table, then one line of JSON. Times are medians of warm calls; GB/s count each visible key and value once, and
each latent; each state, once read and once written. Of latent attention (MLA) and of recurrent states they are given as
a share of the most that grouped queries reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import latent_kernels
import numpy as np
import state_kernels
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.cpu.attention_pass import STORED
from headwise.kernels.gqa import QUANTISED, bit_views, gqa_layout, kv_dtype_of, kv_views, quantise, scale_views
from headwise.kernels.mla import LATENT_DTYPES
from headwise.kernels.nibbles import INT4, pack, unpack
from headwise.kernels.select import make_kernels

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Workload:
    """``batch`` sequences of ``context`` tokens, the last ``queries`` of each new in this step."""

    name: str
    batch: int
    queries: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    sink: int = 0

    def visible_bytes(self, kv_dtype: str) -> int:
        """Of the keys and values, and their scales, that the step's queries see."""
        seen = min(self.context, self.sink + self.window + self.queries - 1) if self.window else self.context
        token = sum(role.token_bytes for role in gqa_layout(1, 1, self.head_dim, kv_dtype).roles)
        return self.batch * self.kv_heads * seen * token


WORKLOADS = [
    Workload("decode 1 x 2048", 1, 1, 2048, 9, 3, 64),
    Workload("decode 16 x 2048", 16, 1, 2048, 9, 3, 64),
    Workload("decode 16 x 2048, TP rank", 16, 1, 2048, 3, 1, 64),
    Workload("decode 16 x 2048, w 256 s 4", 16, 1, 2048, 9, 3, 64, 256, 4),
    Workload("decode 16 x 8192, w 256 s 4", 16, 1, 8192, 9, 3, 64, 256, 4),
    Workload("decode 8 x 2048, Llama-like", 8, 1, 2048, 32, 8, 128),
    Workload("decode 8 x 4096, Gemma w 512", 8, 1, 4096, 4, 1, 256, 512),
    Workload("prefill 256 at 2048", 1, 256, 2048, 9, 3, 64),
    Workload("prefill 256 at 2048, w 256 s 4", 1, 256, 2048, 9, 3, 64, 256, 4),
    Workload("prefill 256 at 2048, Gemma w 512", 1, 256, 2048, 4, 1, 256, 512),
]


QUICK = ("decode 16 x 2048", "decode 16 x 2048, w 256 s 4", "prefill 256 at 2048, w 256 s 4")


class Scene:
    """A workload on an arena whose blocks lie in random order; one group per KV head."""

    def __init__(self, load: Workload, kv_dtype: str) -> None:
        rng = np.random.default_rng(0)
        self.load, self.layout = load, gqa_layout(BLOCK_SIZE, 1, load.head_dim, kv_dtype)
        columns = -(-load.context // BLOCK_SIZE)
        rows = load.batch * load.kv_heads
        self.arena = np.empty(rows * columns * self.layout.block_bytes, np.uint8)
        self._fill_arena(rng)
        tables = rng.permutation(rows * columns).astype(np.int32).reshape(rows, columns)
        cu = np.arange(load.batch + 1, dtype=np.int32) * load.queries
        self.batch = AttentionBatch(cu, np.full(load.batch, load.context, np.int32), tables, load.kv_heads)
        heads = np.arange(load.kv_heads, dtype=np.int32)
        self.heads = HeadTable(heads, heads * 0, heads * 0 + load.window, heads * 0 + load.sink)
        tokens = load.batch * load.queries
        self.query = rng.standard_normal((tokens, load.q_heads, load.head_dim), dtype=np.float32)
        self.new = rng.standard_normal((tokens, load.kv_heads, load.head_dim), dtype=np.float32)
        self.out = np.empty_like(self.query)

    def _fill_arena(self, rng: np.random.Generator) -> None:
        shape = (self.arena.size // self.layout.block_bytes, 1, BLOCK_SIZE, self.load.head_dim)
        dtype = kv_dtype_of(self.layout)
        for role in range(2):
            rows = rng.standard_normal(shape, dtype=np.float32)
            if dtype == "bfloat16":
                bit_views(self.arena, self.layout)[role][:] = to_bits(rows)
            elif dtype in (*QUANTISED, INT4):
                views = kv_views(self.arena, self.layout)[role], scale_views(self.arena, self.layout)[role]
                views[0][:], views[1][:] = pack(rows) if dtype == INT4 else quantise(rows, dtype)
            else:
                kv_views(self.arena, self.layout)[role][:] = rows

    def _gather(self, role: int, blocks: NDArray[np.int32]) -> NDArray[np.float32]:
        """A head's keys or values as float32 ``[context, head_dim]``."""
        dtype, head_dim = kv_dtype_of(self.layout), self.load.head_dim
        if dtype == "bfloat16":
            rows: NDArray[Any] = to_float32(bit_views(self.arena, self.layout)[role][blocks, 0])
        else:
            rows = kv_views(self.arena, self.layout)[role][blocks, 0]
            if dtype == INT4:
                rows = unpack(rows, scale_views(self.arena, self.layout)[role][blocks, 0])
            elif dtype in QUANTISED:
                rows = rows * scale_views(self.arena, self.layout)[role][blocks, 0][..., None]
        return rows.reshape(-1, head_dim)[: self.load.context]

    def gather_then_matmul(self) -> None:
        """The plain way: copy a head's keys and values together, mask, matmul, softmax, matmul."""
        load, share = self.load, self.load.q_heads // self.load.kv_heads
        distance = np.arange(load.context - load.queries, load.context)[:, None] - np.arange(load.context)[None, :]
        visible = distance >= 0
        if load.window:
            visible &= (distance < load.window) | (np.arange(load.context) < load.sink)[None, :]
        mask = np.repeat(np.where(visible, np.float32(0), np.float32(-np.inf)), share, axis=0)
        for sequence in range(load.batch):
            rows = slice(sequence * load.queries, (sequence + 1) * load.queries)
            for head in range(load.kv_heads):
                blocks = self.batch.block_tables[sequence * load.kv_heads + head]
                key, value = (self._gather(role, blocks) for role in (0, 1))
                query = self.query[rows, head * share : (head + 1) * share].reshape(-1, load.head_dim)
                scores = query @ key.T * np.float32(load.head_dim**-0.5) + mask
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                mixed = weights @ value / weights.sum(axis=1, keepdims=True)
                self.out[rows, head * share : (head + 1) * share] = mixed.reshape(-1, share, load.head_dim)


def median_s(call: Callable[[], object], budget_s: float) -> float:
    """Median seconds of a call, repeated for about ``budget_s`` seconds after one warm-up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memcpy_gb_s(budget_s: float) -> float:
    """GB/s of `np.copyto` on 64 MiB (bytes copied, not bytes moved; one thread)."""
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    return source.nbytes / median_s(lambda: np.copyto(target, source), budget_s) / 1e9


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three of the workloads, three calls per number: seconds")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-dtype", choices=tuple(STORED), default="float32")
    args = parser.parse_args(arguments)
    budget_s = 0.0 if args.quick else 2.0

    start = time.perf_counter()
    kernels = make_kernels("numba", args.threads, args.kv_dtype)
    load_s = time.perf_counter() - start
    copy = memcpy_gb_s(budget_s)
    print(f"{args.threads} threads; kernels loaded in {load_s:.1f} s; memcpy {copy:.1f} GB/s\n")
    print(f"{'workload':34}{'attend ms':>10}{'KV GB/s':>9}{'gather ms':>11}{'speed-up':>9}{'write us':>9}")
    results, rates = [], []
    for load in [w for w in WORKLOADS if w.name in QUICK] if args.quick else WORKLOADS:
        scene = Scene(load, args.kv_dtype)
        state = (scene.arena, scene.layout, scene.batch, scene.heads)
        attend = partial(kernels.attend, scale=load.head_dim**-0.5, softcap=0.0, out=scene.out)
        attend_s = median_s(partial(attend, scene.query, *state), budget_s)
        gather_s = median_s(scene.gather_then_matmul, budget_s)
        write_s = median_s(partial(kernels.write_kv, scene.new, scene.new, *state), budget_s / 4)
        rate = load.visible_bytes(args.kv_dtype) / attend_s / 1e9
        rates.append(rate)
        speed = f"{gather_s / attend_s:.1f}x"
        print(f"{load.name:34}{attend_s * 1e3:10.3f}{rate:9.1f}{gather_s * 1e3:11.2f}{speed:>9}{write_s * 1e6:9.1f}")
        results.append(
            {
                "workload": load.name,
                "attend_ms": round(attend_s * 1e3, 4),
                "kv_gb_s": round(rate, 2),
                "gather_ms": round(gather_s * 1e3, 3),
                "write_us": round(write_s * 1e6, 2),
            }
        )
    latents, states, timed = [], [], partial(median_s, budget_s=budget_s)
    latent_loads = latent_kernels.QUICK if args.quick else latent_kernels.WORKLOADS
    for latent_load in latent_loads if args.kv_dtype in LATENT_DTYPES else ():
        latents.append(latent_kernels.measure(latent_load, args.kv_dtype, args.threads, timed, max(rates)))
        print(latent_kernels.as_line(latents[-1]))
    for state_load in state_kernels.QUICK if args.quick else state_kernels.WORKLOADS:
        states.append(state_kernels.measure(state_load, args.threads, timed, max(rates)))
        print(state_kernels.as_line(states[-1]))
    report = {"benchmark": "kernels", "threads": args.threads, "kv_dtype": args.kv_dtype, "memcpy_gb_s": copy}
    print(json.dumps({**report, "results": results, "latents": latents, "states": states}))


if __name__ == "__main__":
    main()

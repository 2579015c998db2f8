"""Latents that ranks keep together, on one card: ranks as threads against NumPy, and what one of them takes to decode.

The section latent_ranks of `gpu_checks.py`. Threads give each other arrays in the card's memory, so nothing is said of
what ranks take to send them; a rank alone gets copies of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from gpu.bench import Bench
from gpu.correctness import MOST_RANKS, RANKS, TOLERANCE, distance
from gpu.latents import DTYPE, SCALE, LatentStep, OnDevice, make_step, without_indexer
from gpu.rig import Array, Rig
from gpu.sizes import LatentSizes
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.mla_reference import ReferenceLatentKernels

PATIENCE_S = 15.0


@dataclass(frozen=True)
class ThreadRanks:
    """`TokenRanks` of one of the threads; ``told`` is where all of them leave what they give.

    turn: held by the thread that works, and by none that waits for others: a rig's cuBLAS is for one thread at a time
    """

    share: TokenShare
    told: list[Array]
    barrier: threading.Barrier
    turn: threading.Lock

    def all_gather(self, x: Array) -> Array:
        return np.stack(self._tell(x))

    def exchange(self, x: Array) -> Array:
        return np.stack([given[self.share.part] for given in self._tell(x)])

    def _tell(self, x: Array) -> list[Array]:
        self.told[self.share.part] = x
        self._meet()
        found = list(self.told)
        self._meet()
        return found

    def _meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait(PATIENCE_S)
        finally:
            self.turn.acquire()


@dataclass(frozen=True)
class LoneRank:
    """`TokenRanks` of a rank whose others have just what it has."""

    share: TokenShare

    def all_gather(self, x: Array) -> Array:
        return np.stack([x] * self.share.parts)

    def exchange(self, x: Array) -> Array:
        return x.copy()


class RankOnDevice:
    """A rank's part of a step's latents on a rig, and its heads."""

    def __init__(self, rig: Rig, step: LatentStep, share: TokenShare) -> None:
        batch, heads = step.batch, step.query.shape[1] // share.parts
        some = slice(share.part * heads, (share.part + 1) * heads)

        def upload(rows: NDArray[np.float32]) -> Array:
            return rig.upload(np.ascontiguousarray(rows).astype(numpy_dtype(DTYPE)))

        self.kernels, self.layout = CudaLatentKernels(rig.parts), replace(step.layout, parts=share.parts).own
        self.query, self.up = (
            upload(step.query[:, some]),
            UpProjections(upload(step.up.key[some]), upload(step.up.value[some])),
        )
        self.arena, self.heads = rig.empty(step.blocks * self.layout.block_bytes), step.heads.elsewhere(rig.upload)
        lens, tables = rig.upload(batch.seq_lens), rig.upload(batch.block_tables)
        known = HostLengths(batch.cu_seqlens_q, batch.seq_lens)
        self.batch = AttentionBatch(rig.upload(batch.cu_seqlens_q), lens, tables, 1, batch.max_query_len, known)
        self.out = upload(np.full((*self.query.shape[:2], step.up.value.shape[2]), np.nan, np.float32))
        whole = rig.upload(np.concatenate([[0], np.cumsum(batch.seq_lens)]).astype(np.int32))
        where = self.arena, self.layout, AttentionBatch(whole, lens, tables, 1), self.heads
        self.kernels.write_own(upload(step.latents), *where, share)

    def attend(self, ranks: ThreadRanks | LoneRank) -> Array:
        where = self.arena, self.layout, self.batch, self.heads
        self.kernels.attend_shared(self.query, self.up, *where, ranks, scale=SCALE, out=self.out)
        return self.out


def latent_ranks(bench: Bench) -> None:
    """Decodes and prompts against NumPy, by two and more ranks over caches of 16 and 8 bits; then decodes, timed."""
    sizes, rng = bench.sizes, np.random.default_rng((bench.rig.seed, 12))
    first, second = (1500, 700) if sizes.long else (40, 21)
    for parts, kv_dtype in RANKS:
        with bench.rows.case(f"right_{parts}_{kv_dtype}") as begin:
            begin()
            for name, sequences in (
                ("decodes", ((1, first), (1, 3), (1, second))),
                ("mixed", ((1, first), (second, second))),
            ):
                step = step_of(sizes.latents, parts, sequences, sizes.block_size, rng, kv_dtype)
                bench.rows.check_error(
                    f"{name}_{parts}_{kv_dtype}_error", error_of(bench.rig, step, parts), TOLERANCE[DTYPE]
                )
    for batch in sizes.batches:
        context = sizes.contexts[0]
        with bench.rows.case(f"b{batch}_c{context}") as begin:
            begin()
            decode(bench, sizes.latents, batch, context, rng)


def step_of(
    sizes: LatentSizes,
    parts: int,
    sequences: tuple[tuple[int, int], ...],
    block_size: int,
    rng: np.random.Generator,
    kv_dtype: str = DTYPE,
) -> LatentStep:
    """A step over latents alone, of the heads of so many ranks."""
    every = replace(sizes, heads=parts * sizes.heads)
    return without_indexer(every, make_step(every, sequences, 1, block_size, rng, kv_dtype))


def error_of(rig: Rig, step: LatentStep, parts: int) -> float:
    """Of what ranks find together, from NumPy in float64 over the same numbers."""
    arena = np.empty(step.blocks * step.layout.block_bytes, np.uint8)
    whole = np.concatenate([[0], np.cumsum(step.batch.seq_lens)]).astype(np.int32)
    reference, prompts = ReferenceLatentKernels(), replace(step.batch, cu_seqlens_q=whole)
    reference.write_latent(step.latents, arena, step.layout, prompts, step.heads)
    wanted = np.empty((*step.query.shape[:2], step.up.value.shape[2]))
    where = arena, step.layout, step.batch, step.heads
    reference.attend_latent(step.query, step.up, *where, scale=SCALE, out=wanted)
    ranks = [RankOnDevice(rig, step, TokenShare(part, parts)) for part in range(parts)]
    told, barrier, turn = [None] * parts, threading.Barrier(parts), threading.Lock()

    def attend(part: int) -> NDArray[np.float32]:
        with turn, rig.current():
            try:
                return rig.download(ranks[part].attend(ThreadRanks(TokenShare(part, parts), told, barrier, turn)))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(parts) as threads:
        return distance(np.concatenate(list(threads.map(attend, range(parts))), axis=1), wanted)


def decode(bench: Bench, sizes: LatentSizes, batch: int, context: int, rng: np.random.Generator) -> None:
    """A token of each sequence, by one of eight ranks: over that of a rank that keeps all latents and has no others."""
    parts = MOST_RANKS if bench.sizes.long else 2
    step = step_of(sizes, parts, ((1, context),) * batch, bench.sizes.block_size, rng)
    own = replace(
        step,
        query=step.query[:, : sizes.heads],
        up=UpProjections(step.up.key[: sizes.heads], step.up.value[: sizes.heads]),
    )
    alone, together = OnDevice(bench.rig, own), RankOnDevice(bench.rig, step, TokenShare(0, parts))
    ranks = LoneRank(TokenShare(0, parts))
    seconds = bench.seconds({"alone": lambda: alone.attend(False), "together": lambda: together.attend(ranks)})
    note = (
        f"{seconds['together'] * 1e6:.1f} us for one of {parts} ranks, {seconds['alone'] * 1e6:.1f} us over all latents"
    )
    bench.rows.add(f"b{batch}_c{context}_over_alone", seconds["together"] / seconds["alone"], note=note)

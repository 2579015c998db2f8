"""Latent attention (MLA) at DeepSeek's sizes: correctness in each kind of cache, then decodes against the bandwidth.

The section latents of `gpu_checks.py`. Products with up-projections are part of what is timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from gpu.attention import E4M3, QUANTISED_DTYPES
from gpu.bench import Bench
from gpu.correctness import OF_STEPS, TOLERANCE, distance
from gpu.rig import Array, Rig
from gpu.sizes import LatentSizes
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import OLDEST_SM_E4M3
from headwise.kernels.cuda.dsa_kernels import CudaIndexedKernels
from headwise.kernels.cuda.indexer import CHOOSE_THREADS
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels
from headwise.kernels.dsa import INDEXER, indexed_layout
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.dsa_reference import ReferenceIndexedKernels
from headwise.kernels.mla import latent_layout
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.mla_reference import ReferenceLatentKernels
from headwise.kernels.nibbles import INT4

DTYPE = "bfloat16"
SCALE = 0.1
FIRST = {E4M3: 448.0}
"""The first number of an indexer's keys, which nothing is multiplied with, in E4M3; else `FIRST_INT8`. It is the
largest of its key and of what the dtype holds: the key's scale is 1 then, and scores are exact."""
FIRST_INT8 = 127.0


@dataclass(frozen=True)
class LatentStep:
    """A step in host memory, and all latents and keys of its sequences."""

    query: NDArray[np.float32]
    up: UpProjections
    index: IndexQueries
    latents: NDArray[np.float32]
    keys: NDArray[np.float32]
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable
    blocks: int


def latents(bench: Bench) -> None:
    """Chunks and decodes, of all tokens and of chosen ones, against NumPy, over caches of each dtype, with keys of an
    indexer beside latents and without; then decodes of one layer, timed."""
    sizes, rng = bench.sizes, np.random.default_rng((bench.rig.seed, 11))
    geometry, (first, second, third) = sizes.latents, ((1500, 700, 300) if sizes.long else (40, 21, 9))
    top = 256 if sizes.long else 12
    mixed = (1, first), (second // 2, second), (1, third)
    few = (1, second), (third // 3, third)  # the reference takes long
    quantised = [dtype for dtype in QUANTISED_DTYPES if dtype != E4M3 or bench.rig.target.sm >= OLDEST_SM_E4M3]
    for kv_dtype in (DTYPE, *quantised):
        with bench.rows.case(f"right_{kv_dtype}") as begin:
            begin()
            step = make_step(geometry, mixed if kv_dtype == DTYPE else few, top, sizes.block_size, rng, kv_dtype)
            check(bench, geometry, step)
            check(bench, geometry, without_indexer(geometry, step))
    for batch in sizes.batches:
        context = sizes.contexts[0]
        with bench.rows.case(f"b{batch}_c{context}") as begin:
            begin()
            decode(bench, geometry, batch, context, rng)


def make_step(
    sizes: LatentSizes,
    sequences: tuple[tuple[int, int], ...],
    top: int,
    block_size: int,
    rng: np.random.Generator,
    kv_dtype: str = DTYPE,
) -> LatentStep:
    """``sequences`` are (queries, context). Numbers of an indexer are small integers: scores are exact."""
    queries, contexts = (np.array(each, np.int32) for each in zip(*sequences, strict=True))
    tokens, columns = int(queries.sum()), -(-int(contexts.max()) // block_size)
    tables = np.full((len(sequences), columns), -1, np.int32)
    held = np.arange(columns) * block_size < contexts[:, None]
    tables[held] = rng.permutation(int(held.sum()))

    def draw(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(DTYPE)).astype(np.float32)

    def integers(*shape: int) -> NDArray[np.float32]:
        return rng.integers(-2, 3, shape).astype(np.float32)

    cu, one = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32), np.zeros(1, np.int32)
    index_query = integers(tokens, sizes.index_heads, sizes.index_dim)
    keys = integers(int(contexts.sum()), sizes.index_dim)
    index_query[..., 0], keys[:, 0] = 0, FIRST.get(kv_dtype, FIRST_INT8)
    return LatentStep(
        query=draw(tokens, sizes.heads, sizes.plain + sizes.rotated),
        up=UpProjections(
            draw(sizes.heads, sizes.plain, sizes.rank) / 16, draw(sizes.heads, sizes.rank, sizes.value_dim) / 16
        ),
        index=IndexQueries(index_query, integers(tokens, sizes.index_heads), top),
        latents=draw(int(contexts.sum()), sizes.rank + sizes.rotated),
        keys=keys,
        layout=indexed_layout(block_size, 1, sizes.rank + sizes.rotated, sizes.index_dim, kv_dtype, sizes.rotated),
        batch=AttentionBatch(cu, contexts, tables, 1, int(queries.max())),
        heads=HeadTable(one, one, one, one),
        blocks=int(held.sum()),
    )


def without_indexer(sizes: LatentSizes, step: LatentStep) -> LatentStep:
    """The step over a cache of latents alone."""
    dtype = step.layout.roles[0].dtype
    layout = latent_layout(step.layout.block_size, 1, sizes.rank + sizes.rotated, dtype, sizes.rotated)
    return replace(step, layout=layout)


class OnDevice:
    """A step on a rig, with its latents written, and keys where its layout has them."""

    def __init__(self, rig: Rig, step: LatentStep) -> None:
        batch, asked = step.batch, step.index

        def upload(rows: NDArray[np.float32]) -> Array:
            return rig.upload(rows.astype(numpy_dtype(DTYPE)))

        self.indexed = None
        self.kernels = CudaLatentKernels(rig.parts)
        if has_indexer(step.layout):
            self.indexed = CudaIndexedKernels(rig.parts, threads=CHOOSE_THREADS if rig.sizes.long else 64)
            self.kernels = self.indexed
        self.query, self.layout = upload(step.query), step.layout
        self.up = UpProjections(upload(step.up.key), upload(step.up.value))
        self.index = IndexQueries(upload(asked.query), upload(asked.weights), asked.top)
        self.arena = rig.empty(step.blocks * step.layout.block_bytes)
        self.heads = step.heads.elsewhere(rig.upload)
        lens, tables = rig.upload(batch.seq_lens), rig.upload(batch.block_tables)
        self.batch = AttentionBatch(rig.upload(batch.cu_seqlens_q), lens, tables, 1, batch.max_query_len)
        self.out = upload(np.full((*step.query.shape[:2], step.up.value.shape[2]), np.nan, np.float32))
        whole = rig.upload(np.concatenate([[0], np.cumsum(batch.seq_lens)]).astype(np.int32))
        where = self.arena, step.layout, AttentionBatch(whole, lens, tables, 1), self.heads
        self.kernels.write_latent(upload(step.latents), *where)
        if self.indexed is not None:
            self.indexed.write_index(upload(step.keys), *where)

    def attend(self, chosen: bool) -> Array:
        """To all that is seen, or to what the indexer, if there is one, chooses of it."""
        where = self.arena, self.layout, self.batch, self.heads
        if chosen and self.indexed is not None:
            found = self.indexed.choose(self.index, *where)
            self.indexed.attend_chosen(self.query, self.up, found, *where, scale=SCALE, out=self.out)
        else:
            self.kernels.attend_latent(self.query, self.up, *where, scale=SCALE, out=self.out)
        return self.out


def check(bench: Bench, sizes: LatentSizes, step: LatentStep) -> None:
    """Against the reference, in float64 over the same bytes."""
    rig, kv_dtype = bench.rig, step.layout.roles[0].dtype
    device, of = OnDevice(rig, step), "" if kv_dtype == DTYPE else f"_{kv_dtype}"
    where = rig.download(device.arena), step.layout, step.batch, step.heads
    most = max(TOLERANCE[DTYPE], OF_STEPS if kv_dtype == INT4 else 0)
    for name in ("dense", "chosen") if has_indexer(step.layout) else ("alone",):
        wanted = np.empty((len(step.query), sizes.heads, sizes.value_dim))
        if name == "chosen":
            reference = ReferenceIndexedKernels()
            best = reference.choose(step.index, *where)
            reference.attend_chosen(step.query, step.up, best, *where, scale=SCALE, out=wanted)
        else:
            ReferenceLatentKernels().attend_latent(step.query, step.up, *where, scale=SCALE, out=wanted)
        found = rig.download(device.attend(name == "chosen"))
        bench.rows.check_error(f"{name}_error{of}", distance(found, wanted), most)


def has_indexer(layout: BlockLayout) -> bool:
    return any(role.name == INDEXER for role in layout.roles)


def decode(bench: Bench, sizes: LatentSizes, batch: int, context: int, rng: np.random.Generator) -> None:
    """A token of each sequence. Bytes are those of latents alone, which need be read once."""
    top = context // 2
    device = OnDevice(bench.rig, make_step(sizes, ((1, context),) * batch, top, bench.sizes.block_size, rng))
    seconds = bench.seconds({"dense": lambda: device.attend(False), "chosen": lambda: device.attend(True)})
    needed = batch * context * (sizes.rank + sizes.rotated) * numpy_dtype(DTYPE).itemsize
    name, note = f"b{batch}_c{context}", f"{seconds['dense'] * 1e6:.1f} us for {needed / 2**20:.0f} MiB of latents"
    bench.rows.add(f"{name}_of_bandwidth", needed / seconds["dense"] / bench.bandwidth, note=note)
    note = f"{seconds['chosen'] * 1e6:.1f} us where an indexer chooses {top} tokens"
    bench.rows.add(f"{name}_chosen_over_dense", seconds["chosen"] / seconds["dense"], note=note)

"""Attention to a window and entries of several tokens at DeepSeek-V4's sizes: against the reference, then decodes.

The section entries of `gpu_checks.py`. Keys, rows and entries of a step lie in blocks of one size, as in an engine;
what is timed are random numbers, or codes, with no rows that they would be made of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.correctness import TOLERANCE, distance
from gpu.random_bytes import fill
from gpu.rig import Array, Rig
from gpu.sizes import EntrySizes
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.compressed import blocks_in, columns_of, ending, entries_layout, keys_layout, rows_layout
from headwise.kernels.compressed_base import Entries, EntryMaking, Kept, Making
from headwise.kernels.compressed_reference import ReferenceCompressedKernels
from headwise.kernels.compressed_rows import load_rows, store_rows
from headwise.kernels.cuda.attention import OLDEST_SM_E4M3
from headwise.kernels.cuda.compressed_kernels import CudaCompressedKernels
from headwise.kernels.cuda.indexer import CHOOSE_THREADS
from headwise.kernels.dsa import store_keys
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.mla import has_scales, latent_view

DTYPE = "bfloat16"
E4M3 = "float8_e4m3fn"
CODES = ("int8", E4M3)
GROUPS = 4
"""Tokens, rows of entries, those of an indexer's keys, and entries. A group has every fourth block."""
DRAWN_BLOCKS = 16
"""Of keys, and of entries, in codes: all others are like these."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class EntryStep:
    """A step in host memory, of sequences all of whose tokens are new but to the batch: it attends to the last ones.

    numbers:  by name; without keys and rows, what is kept is random
    lengths:  of sequences
    """

    numbers: dict[str, Floats]
    lengths: NDArray[np.int32]
    batch: AttentionBatch
    window: Kept
    entries: Entries
    top: int
    blocks: int


def entries(bench: Bench) -> None:
    """Steps over entries that an indexer chooses, and over all of them, against NumPy; then decodes, timed."""
    sizes, rng = bench.sizes, np.random.default_rng((bench.rig.seed, 13))
    geometry, sequences = sizes.entries, ((1, 900), (60, 700), (1, 260)) if sizes.long else ((1, 40), (7, 21))
    of_card = [dtype for dtype in (DTYPE, *CODES) if dtype != E4M3 or bench.rig.target.sm >= OLDEST_SM_E4M3]
    for kv_dtype in of_card:
        name = "" if kv_dtype == DTYPE else f"_{kv_dtype}"
        for rate in geometry.rates:
            with bench.rows.case(f"right_{rate}{name}") as begin:
                begin()
                top = 64 if sizes.long else 4
                step = make_step(geometry, rate, sequences, sizes.block_size, top, rng, kv_dtype)
                check(bench, step, f"{rate}{name}_error")
    for kv_dtype in of_card[::2]:
        name = "" if kv_dtype == DTYPE else f"_{kv_dtype}"
        for batch in sizes.batches:
            with bench.rows.case(f"b{batch}_c{geometry.timed}{name}") as begin:
                begin()
                decode(bench, batch, rng, kv_dtype, name)


def make_step(
    sizes: EntrySizes,
    rate: int,
    sequences: tuple[tuple[int, int], ...],
    block_size: int,
    top: int,
    rng: np.random.Generator,
    kv_dtype: str,
    is_written: bool = True,
) -> EntryStep:
    """``sequences`` are (queries, context). is_written: whether there are keys and rows of all tokens"""
    queries, lengths = (np.array(each, np.int32) for each in zip(*sequences, strict=True))
    tokens, every, columns = int(queries.sum()), int(lengths.sum()), -(-int(lengths.max()) // block_size)
    made_of = (sizes.size, sizes.index_dim) if rate == sizes.indexed else (sizes.size,)
    keys = len(made_of)  # where an indexer chooses entries they overlap
    layouts = [
        keys_layout(block_size, 1, sizes.size, kv_dtype, sizes.turning),
        *(rows_layout(block_size, 1, 2 * keys * size, DTYPE) for size in made_of),
        entries_layout(
            block_size, 1, sizes.size, rate, kv_dtype, sizes.turning, index_dim=sizes.index_dim if keys == 2 else 0
        ),
    ]
    most = max(layout.block_bytes for layout in (layouts if is_written else (layouts[0], layouts[-1])))
    layouts = [replace(layout, tail_bytes=max(0, most - layout.block_bytes)) for layout in layouts]

    def draw(*shape: int) -> Floats:
        return rng.standard_normal(shape, np.float32).astype(numpy_dtype(DTYPE)).astype(np.float32)

    window, *rows, made = (
        Kept(layout, HeadTable(*(np.array([number], np.int32) for number in (group, 0, seen, 0))))
        for layout, group, seen in zip(
            layouts, (0, *range(1, keys + 1), GROUPS - 1), (sizes.window, *[0] * keys, 0), strict=True
        )
    )
    makings = tuple(
        Making(size, draw(rate, keys * size), draw(size), 1e-6, np.abs(draw(size // 2)) / 8) for size in made_of
    )
    numbers = {
        "query": draw(tokens, sizes.heads, sizes.size), "sinks": draw(sizes.heads),
        "asked": draw(tokens, sizes.index_heads, sizes.index_dim), "weights": draw(tokens, sizes.index_heads),
    }  # fmt: skip
    if is_written:
        width = sum(2 * keys * size for size in made_of)
        numbers |= {"keys": draw(every, sizes.size), "rows": draw(every, width)}
    blocks = len(sequences) * GROUPS * columns
    of_group = [rng.permutation(blocks // GROUPS).reshape(-1, columns) * GROUPS + group for group in range(GROUPS)]
    tables = np.stack(of_group, axis=1).astype(np.int32).reshape(-1, columns)
    cu = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    batch = AttentionBatch(cu, lengths, tables, GROUPS, int(queries.max()))
    return EntryStep(
        numbers, lengths, batch, window, Entries(EntryMaking(rate, keys == 2, makings), tuple(rows), made), top, blocks
    )


class OnDevice:
    """A step on a rig, with its tokens written and entries made."""

    def __init__(self, rig: Rig, step: EntryStep) -> None:
        def upload(rows: Floats) -> Array:
            return rig.upload(rows.astype(numpy_dtype(DTYPE)))

        def kept(each: Kept) -> Kept:
            return replace(each, heads=each.heads.elsewhere(rig.upload))

        self.kernels = CudaCompressedKernels(rig.parts, threads=CHOOSE_THREADS if rig.sizes.long else 64)
        makings: Any = tuple(
            replace(one, **{name: rig.upload(getattr(one, name)) for name in ("bias", "norm", "inverse")})
            for one in step.entries.making.makings
        )
        making = replace(step.entries.making, makings=makings)
        self.window = kept(step.window)
        self.entries = Entries(making, tuple(map(kept, step.entries.rows)), kept(step.entries.made))
        self.arena = rig.empty(step.blocks * step.window.layout.block_bytes)
        numbers = {name: upload(rows) for name, rows in step.numbers.items() if name != "sinks"}
        self.query, self.sinks = numbers["query"], rig.upload(step.numbers["sinks"])
        self.scale = step.numbers["query"].shape[2] ** -0.5
        self.index = IndexQueries(numbers["asked"], numbers["weights"], step.top) if making.overlaps else None
        lens, tables = rig.upload(step.lengths), rig.upload(step.batch.block_tables)
        self.batch = AttentionBatch(rig.upload(step.batch.cu_seqlens_q), lens, tables, GROUPS, step.batch.max_query_len)
        self.out = upload(np.full(step.numbers["query"].shape, np.nan, np.float32))
        if "rows" not in numbers:
            fill_codes(rig, self.arena, step) if has_scales(step.window.layout) else fill(rig, self.arena, DTYPE)
            return
        whole = rig.upload(np.concatenate([[0], np.cumsum(step.lengths)]).astype(np.int32))
        every = AttentionBatch(whole, lens, tables, GROUPS, int(step.lengths.max()))
        angles = np.ones((len(numbers["keys"]), 1, rig.sizes.entries.turning), np.float32)
        turned = rig.upload(angles), rig.upload(0 * angles), angles.shape[2]
        self.kernels.write_turned(
            upload(np.zeros((len(angles), 1, step.numbers["keys"].shape[1]), np.float32)), numbers["keys"], *turned,
            self.arena, self.window, every,
        )  # fmt: skip
        self.kernels.write_pieces(numbers["rows"], self.arena, self.entries, every)
        self.kernels.make_entries(self.arena, self.entries, every)

    def attend(self) -> Array:
        self.kernels.attend(
            self.query, self.arena, self.window, self.entries, self.index, self.batch, scale=self.scale,
            sink_logits=self.sinks, out=self.out,
        )  # fmt: skip
        return self.out


def fill_codes(rig: Rig, arena: Array, step: EntryStep) -> None:
    """Keys and entries of normally distributed numbers, in codes."""
    window, made = step.window.layout, step.entries.made.layout.own
    rng, size = np.random.default_rng(rig.seed), step.numbers["query"].shape[2]
    drawn = np.zeros(DRAWN_BLOCKS * GROUPS * window.block_bytes, np.uint8)
    for layout, group in ((window, 0), (made, GROUPS - 1)):
        at = np.arange(DRAWN_BLOCKS)[:, None] * GROUPS + group, 0, np.arange(layout.block_size)
        store_rows(drawn, layout, at, rng.standard_normal((DRAWN_BLOCKS, layout.block_size, size), np.float32))
        if step.entries.making.overlaps and group:
            dim = step.numbers["asked"].shape[2]
            store_keys(drawn, layout, at, rng.standard_normal((DRAWN_BLOCKS, layout.block_size, dim), np.float32))
    pool = rig.upload(drawn)
    for begin in range(0, arena.nbytes, pool.nbytes):
        part = arena[begin : begin + pool.nbytes]
        rig.copy(part, pool[: part.nbytes])
    rig.synchronize()  # before the pool is freed


def check(bench: Bench, step: EntryStep, name: str) -> None:
    """Entries, and what is seen over the same bytes, against the reference in float64."""
    rig, reference, of = bench.rig, ReferenceCompressedKernels(), step.entries.making.rate
    device = OnDevice(rig, step)
    found = rig.download(device.attend())
    arena = rig.download(device.arena)
    made, whole = arena.copy(), np.concatenate([[0], np.cumsum(step.lengths)]).astype(np.int32)
    every = replace(step.batch, cu_seqlens_q=whole)
    sequences, numbers = ending(every, of)
    columns, places = columns_of(numbers, step.entries.made.layout)
    at = blocks_in(every, sequences, step.entries.made, columns), 0, places
    size = step.numbers["query"].shape[2]
    latent_view(made, step.entries.made.layout.own)[at] = 0
    reference.make_entries(made, step.entries, every)
    stored, right = (load_rows(each, step.entries.made.layout.own, at, size) for each in (arena, made))
    bench.rows.check_error(f"made_{name}", distance(stored, right), TOLERANCE[DTYPE])
    asked = IndexQueries(step.numbers["asked"], step.numbers["weights"], step.top)
    wanted = np.empty(step.numbers["query"].shape)
    reference.attend(
        step.numbers["query"], arena, step.window, step.entries, asked if step.entries.making.overlaps else None,
        step.batch, scale=device.scale, sink_logits=step.numbers["sinks"], out=wanted,
    )  # fmt: skip
    bench.rows.check_error(f"seen_{name}", distance(found, wanted), TOLERANCE[DTYPE])


def decode(bench: Bench, batch: int, rng: np.random.Generator, kv_dtype: str, name: str) -> None:
    """A token of each sequence, by each kind of layer; of bandwidth by the bytes that queries see as they are kept."""
    sizes, block_size = bench.sizes.entries, bench.sizes.block_size
    sequences, works = ((1, sizes.timed),) * batch, dict[str, Any]()
    for rate in sizes.rates:
        step = make_step(sizes, rate, sequences, block_size, sizes.index_top, rng, kv_dtype, is_written=False)
        works[str(rate)] = OnDevice(bench.rig, step).attend
        kept = step.window.layout
    seconds = bench.seconds(works)
    for rate in sizes.rates:
        count = sizes.timed // rate
        seen = min(count, sizes.index_top) if rate == sizes.indexed else count
        needed = batch * (sizes.window + seen) * sum(role.token_bytes for role in kept.roles)
        note = f"{seconds[str(rate)] * 1e6:.1f} us for {needed / 2**20:.1f} MiB that queries see"
        share = needed / seconds[str(rate)] / bench.bandwidth
        bench.rows.add(f"b{batch}_rate{rate}{name}_of_bandwidth", share, note=note)

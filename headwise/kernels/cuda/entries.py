"""The making of entries of several tokens each (DeepSeek-V4) on a GPU: the host half of `entries.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.compressed_base import Entries, Kept, Making
from headwise.kernels.compressed_rows import stored_part
from headwise.kernels.cuda.elementwise import NUMBERS, VECTOR_BYTES
from headwise.kernels.cuda.latents import rows_of
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.dsa import INDEXER, INDEXER_SCALE
from headwise.kernels.mla import LATENT, LATENT_SCALE, has_scales
from headwise.kernels.mla_quantised import FLOAT8, INT8

SOURCE, KERNEL, WRITE_KERNEL = "entries.cu", "make_entries", "write_pieces"
THREADS, WRITE_THREADS = 256, 128
"""The former is what `make_entries` is compiled for."""
CODES = {INT8: "INT8", FLOAT8: "E4M3"}
SCALE_BYTES = 4


class CudaEntries:
    """`CompressedKernels.make_entries` on device arrays: one launch, on the current stream.

    Rows are float16, bfloat16 or float32, and entries, and keys for an indexer, of their dtype, int8 or E4M3. The grid
    depends on shapes alone: it has room for ``tokens // rate + sequences`` entries, which is as many as there may be.
    Sequences without queries are padding.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[tuple[str, str], tuple[Kernel, Kernel]] = {}

    def prepare(self, dtype: str, kept: str) -> tuple[Kernel, Kernel]:
        """Compile or load what calls on rows of ``dtype`` and entries of ``kept`` need, so that they only enqueue: what
        makes entries, and what writes rows.

        Raises:
            ConfigError: there is no such variant.
        """
        if (dtype, kept) not in self._kernels:
            program = self._programs(SOURCE, variant_of(dtype, kept))
            self._kernels[dtype, kept] = program.kernel(KERNEL, THREADS), program.kernel(WRITE_KERNEL, WRITE_THREADS)
        return self._kernels[dtype, kept]

    def write(self, rows: Array, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """See `CompressedKernels.write_pieces`. Tokens may lie apart.

        Raises:
            ConfigError: the kernel cannot read the rows, or does not know their dtype.
            ValueError: they are none of these entries.
        """
        tokens, width = rows.shape
        first, last, tables = entries.rows[0], entries.rows[-1], batch.block_tables
        expected, dtype = entries.making.parts[-1].stop, first.layout.roles[0].dtype
        if width != expected or rows.dtype.name != dtype:
            raise ValueError(f"rows {rows.dtype} {list(rows.shape)}: entries are made of {expected} numbers of {dtype}")
        if not tokens:
            return
        address, stride = rows_of("rows", rows, tokens)
        _, write = self.prepare(dtype, entries.made.layout.roles[0].dtype)
        write(
            (tokens, 1, 1),
            (
                address,
                *addresses_of(
                    arena, batch.cu_seqlens_q, batch.seq_lens, tables, first.heads.group, first.heads.slot,
                    last.heads.group, last.heads.slot,
                ),
                stride, first.layout.block_bytes, *_row_places(first.layout), *_row_places(last.layout),
                batch.seq_lens.shape[0], batch.groups, tables.strides[0] // tables.itemsize, first.layout.block_size,
                first.pieces, last.pieces if len(entries.rows) > 1 else 0,
            ),
        )  # fmt: skip

    def make(self, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """Make the entries whose last token is of the batch's step.

        A token whose row's block is ``-1`` counts for nothing, an entry whose block is so is skipped.

        Raises:
            ConfigError: the sizes are none that the kernel can read in vectors (`check_size`).
            ValueError: rows and entries do not lie in blocks of one arena, or the host knows nothing of the lengths.
        """
        making, made = entries.making, entries.made
        dtype, own = entries.rows[0].layout.roles[0].dtype, made.layout.roles[0]
        (kernel, _), item = self.prepare(dtype, own.dtype), numpy_dtype(dtype).itemsize
        for one, rows in zip(making.makings, entries.rows, strict=True):
            check_size(one.size, item, rows.pieces)
        for rows in entries.rows:
            if (rows.layout.block_bytes, rows.layout.block_size) != (made.layout.block_bytes, made.layout.block_size):
                raise ValueError(
                    f"rows in {rows.layout.identity} and entries in {made.layout.identity} are not of one arena"
                )
        first, index = making.makings[0], making.makings[1] if len(making.makings) > 1 else None
        index_size, tables = 0 if index is None else index.size, batch.block_tables
        kernel(
            (queries_of(batch) // making.rate + batch.seq_lens.shape[0], len(making.makings), 1),
            (
                *addresses_of(
                    arena, batch.cu_seqlens_q, batch.seq_lens, tables, made.heads.group, made.heads.slot,
                    *_arrays(first, entries.rows[0]), *_arrays(index, entries.rows[-1]),
                ),
                made.layout.block_bytes, made.layout.slot_bytes,
                *_row_places(entries.rows[0].layout), *_row_places(entries.rows[-1].layout),
                *_entry_places(made.layout, first.size, making.begin, index_size),
                batch.seq_lens.shape[0], batch.groups, tables.strides[0] // tables.itemsize, made.layout.block_size,
                made.layout.own_tokens, making.rate, making.keys, first.size, index_size,
                first.size // entries.rows[0].pieces, index_size // entries.rows[-1].pieces, first.eps,
                0.0 if index is None else index.eps,
            ),
        )  # fmt: skip


def _row_places(layout: BlockLayout) -> tuple[int, ...]:
    return layout.slot_bytes, layout.role_offsets[LATENT], layout.roles[0].token_bytes


def _entry_places(layout: BlockLayout, size: int, begin: int, index_size: int) -> tuple[int, ...]:
    """Where entries of ``size`` numbers, keys of ``index_size`` and scales of both lie, as `entries.cu` is told."""
    at, own, part = layout.role_offsets, layout.roles[0], stored_part(layout, size, begin)
    number = own.token_bytes // own.shape[0]
    scales, scale_at = 0, 0
    if has_scales(layout):
        (scales,), scale_at = layout.roles[1].shape, at[LATENT_SCALE] + begin // size * SCALE_BYTES
    turning = (part.stop - part.start - size) // 2
    return (
        at[LATENT] + part.start * number, own.token_bytes, at.get(INDEXER, 0), index_size * number,
        scale_at, at.get(INDEXER_SCALE, 0), scales, turning,
    )  # fmt: skip


def check_size(size: int, itemsize: int, pieces: int = 1) -> None:
    """Raise ConfigError where entries of ``size`` numbers, or an indexer's keys, are not made on a GPU of rows in so
    many pieces."""
    step = 2 * VECTOR_BYTES // itemsize
    most = THREADS * VECTOR_BYTES // itemsize
    if size % (step * pieces) or not 0 < size <= most:
        raise ConfigError(
            f"entries of {size} numbers are not made on a GPU: only of multiples of {step * pieces} up to {most}; use "
            "device cpu"
        )


def queries_of(batch: AttentionBatch) -> int:
    """The most that there may be, which the host knows of graphs, too.

    Raises:
        ValueError: it does not.
    """
    if batch.on_host is not None:
        return int(batch.on_host.cu_seqlens_q[-1])
    if batch.max_query_len is None:
        raise ValueError("the host knows neither a batch's lengths nor its max_query_len: give one of them")
    return int(batch.seq_lens.shape[0]) * batch.max_query_len


def variant_of(dtype: str, kept: str) -> Defines:
    """The macros of `entries.cu` and `turned.cu` for rows of ``dtype`` and what is kept of them.

    Raises:
        ConfigError: there is no such variant.
    """
    if dtype not in NUMBERS or kept not in (dtype, *CODES):
        raise ConfigError(
            f"entries of {dtype} kept in {kept} are not made on a GPU: choose one of {', '.join(NUMBERS)}, and keep "
            f"them so or in {' or '.join(CODES)}"
        )
    return {"NUMBER": NUMBERS[dtype], "CACHE": CODES.get(kept, NUMBERS[dtype])}


def all_variants() -> Iterator[Defines]:
    """The macros of every variant of `entries.cu`, to compile them ahead."""
    for dtype in NUMBERS:
        for kept in (dtype, *CODES):
            yield variant_of(dtype, kept)


def _arrays(one: Making | None, rows: Kept) -> tuple[Any, ...]:
    if one is None:
        return (None,) * 5
    return one.bias, one.norm, one.inverse, rows.heads.group, rows.heads.slot

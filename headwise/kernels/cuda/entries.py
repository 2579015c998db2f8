"""The making of entries of several tokens each (DeepSeek-V4) on a GPU: the host half of `entries.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.compressed_base import Entries, Making
from headwise.kernels.cuda.elementwise import NUMBERS, VECTOR_BYTES
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.dsa import INDEXER
from headwise.kernels.mla import LATENT

SOURCE, KERNEL = "entries.cu", "make_entries"
THREADS = 256
"""That `entries.cu` is compiled for."""


class CudaEntries:
    """`CompressedKernels.make_entries` on device arrays: one launch, on the current stream.

    Rows and entries are of one dtype, float16, bfloat16 or float32. The grid depends on shapes alone: it has room for
    ``tokens // rate + sequences`` entries, which is as many as there may be. Sequences without queries are padding.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[str, Kernel] = {}

    def prepare(self, dtype: str) -> Kernel:
        """Compile or load what calls on rows of ``dtype`` need, so that they only enqueue.

        Raises:
            ConfigError: there is no such variant.
        """
        if dtype not in self._kernels:
            self._kernels[dtype] = self._programs(SOURCE, variant_of(dtype)).kernel(KERNEL, THREADS)
        return self._kernels[dtype]

    def make(self, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """Make the entries whose last token is of the batch's step.

        A token whose row's block is ``-1`` counts for nothing, an entry whose block is so is skipped.

        Raises:
            ConfigError: the sizes are none that the kernel can read in vectors (`check_size`).
            ValueError: rows and entries do not lie in blocks of one arena, or the host knows nothing of the lengths.
        """
        making, rows, made = entries.making, entries.rows, entries.made
        dtype = rows.layout.roles[0].dtype
        kernel, item = self.prepare(dtype), numpy_dtype(dtype).itemsize
        at, own = made.layout.role_offsets, made.layout.roles[0]
        for one in making.makings:
            check_size(one.size, item)
        if (rows.layout.block_bytes, rows.layout.block_size, dtype) != (
            made.layout.block_bytes, made.layout.block_size, own.dtype
        ):  # fmt: skip
            raise ValueError(
                f"rows in {rows.layout.identity} and entries in {made.layout.identity} are not of one arena"
            )
        first, index = making.makings[0], making.makings[1] if len(making.makings) > 1 else None
        index_bytes = 0 if index is None else index.size * item
        tables = batch.block_tables
        kernel(
            (queries_of(batch) // making.rate + batch.seq_lens.shape[0], len(making.makings), 1),
            (
                *addresses_of(
                    arena, batch.cu_seqlens_q, batch.seq_lens, tables, rows.heads.group, rows.heads.slot,
                    made.heads.group, made.heads.slot, *_arrays(first), *_arrays(index),
                ),
                rows.layout.block_bytes, rows.layout.slot_bytes, made.layout.slot_bytes,
                rows.layout.role_offsets[LATENT], rows.layout.roles[0].token_bytes,
                at[LATENT] + making.begin * item, own.token_bytes, at.get(INDEXER, 0), index_bytes,
                batch.seq_lens.shape[0], batch.groups, tables.strides[0] // tables.itemsize, rows.layout.block_size,
                made.layout.own_tokens, making.rate, making.keys, first.size, 0 if index is None else index.size,
                making.firsts[0], making.firsts[1] if index else 0, first.eps, 0.0 if index is None else index.eps,
            ),
        )  # fmt: skip


def check_size(size: int, itemsize: int) -> None:
    """Raise ConfigError where entries of ``size`` numbers, or an indexer's keys, are not made on a GPU."""
    step = 2 * VECTOR_BYTES // itemsize
    most = THREADS * VECTOR_BYTES // itemsize
    if size % step or not 0 < size <= most:
        raise ConfigError(
            f"entries of {size} numbers are not made on a GPU: only of multiples of {step} up to {most}; use device cpu"
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


def variant_of(dtype: str) -> Defines:
    """The macros of `entries.cu` for rows of ``dtype``.

    Raises:
        ConfigError: there is no such variant.
    """
    if dtype not in NUMBERS:
        raise ConfigError(f"entries of {dtype} are not made on a GPU: choose one of {', '.join(NUMBERS)}")
    return {"NUMBER": NUMBERS[dtype]}


def all_variants() -> Iterator[Defines]:
    """The macros of every variant of `entries.cu`, to compile them ahead."""
    for number in NUMBERS.values():
        yield {"NUMBER": number}


def _arrays(one: Making | None) -> tuple[Any, ...]:
    return (None, None, None) if one is None else (one.bias, one.norm, one.inverse)

"""Keys of an indexer, and the choice of tokens by their scores, on a GPU: the host half of `indexer.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.elementwise import NUMBERS, VECTOR_BYTES
from headwise.kernels.cuda.latents import check_angles, rows_of
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.dsa import INDEXER, INDEXER_SCALE, index_role
from headwise.kernels.mla_quantised import FLOAT8, INT8

SOURCE = "indexer.cu"
WRITE_THREADS, CHOOSE_THREADS = 128, 1024
WARP = 32
_QUANTISED = {INT8: "INT8", FLOAT8: "E4M3"}

Angles = tuple[Array, Array]
Norm = tuple[Array, Array, float]


@dataclass(frozen=True)
class _Kernels:
    write: Kernel
    choose: Kernel
    choose_of_all: Kernel


class CudaIndexer:
    """Writes keys and chooses tokens on device arrays, on the current stream; grids depend on shapes alone.

    threads: of a block that chooses for one query

    Raises:
        ConfigError: a dtype or layout that the kernels do not know, or an array they cannot read.
    """

    def __init__(self, programs: Programs, threads: int = CHOOSE_THREADS) -> None:
        self._programs, self._threads = programs, threads
        self._kernels: dict[tuple[str, str], _Kernels] = {}

    def prepare(self, layout: BlockLayout, dtype: np.dtype[Any]) -> _Kernels:
        """Compile or load what calls with keys of ``dtype`` for ``layout`` need, so that they only enqueue."""
        kinds = str(dtype), index_role(layout).dtype
        if kinds not in self._kernels:
            program = self._programs(SOURCE, variant_of(*kinds))
            self._kernels[kinds] = _Kernels(
                program.kernel("write_index", WRITE_THREADS),
                program.kernel("choose_tokens", self._threads),
                program.kernel("choose_of_all", self._threads),
            )
        return self._kernels[kinds]

    def write(
        self,
        query: Array | None,
        key: Array,
        norm: Norm | None,
        angles: Angles | None,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """Store ``key [tokens, index_dim]``, of the cache's dtype unless that is quantised.

        norm:   weight, bias and epsilon of a layer norm that keys go through
        angles: by which the first numbers of keys are rotated, and in place of ``query [tokens, heads, index_dim]``;
                as for `CudaLatentWrite.write`
        share:  likewise
        """
        (tokens, dim), role = key.shape, index_role(layout)
        if not tokens:
            return
        kernels = self.prepare(layout, key.dtype)
        if role.shape != (dim,) or dim * key.itemsize > WARP * VECTOR_BYTES:
            raise ConfigError(
                f"keys of {key.dtype} [{dim}] are not those of {layout.identity}, or more than {WARP * VECTOR_BYTES} "
                "bytes"
            )
        rotated = 0 if angles is None else 2 * angles[0].shape[-1]
        if angles is not None:
            check_angles(angles, tokens, rotated)
            if rotated > dim or rotated % (2 * VECTOR_BYTES // key.itemsize):
                raise ConfigError(f"halves of the {rotated} numbers that are rotated are no whole {VECTOR_BYTES} bytes")
        rows = [(0, 0), rows_of("key", key, tokens)]
        if query is not None:
            rows[0] = rows_of("query", query, tokens)
        weight, bias, eps = norm or (None, None, 0.0)
        given = (weight, bias, *(angles or (None, None)))
        at = layout.role_offsets
        offsets = (layout.block_bytes, layout.slot_bytes, at[INDEXER], at.get(INDEXER_SCALE, 0))
        sizes = (layout.block_size, 0 if query is None else query.shape[1], dim, rotated)
        kernels.write(
            (tokens, 1, 1),
            (
                *(address for address, _ in rows), *addresses_of(*given, arena, *_where(batch, heads), heads.slot),
                *(stride for _, stride in rows), *offsets, *_batch_sizes(batch), *sizes, eps,
                share.part, share.parts,
            ),
        )  # fmt: skip

    def choose(
        self,
        scores: Array,
        first: int,
        dtype: np.dtype[Any],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        places: Array,
        counts: Array,
        best: Array | None = None,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """For queries from ``first`` on, of which ``scores [rows, tokens]`` are, the ``top`` tokens each.

        places: int32 ``[rows, top]``; counts: int32 ``[rows]``; see `indexer.cu`. ``dtype`` is that of queries
        best:   int32 ``[rows, 2, top]``, where ranks keep tokens together: what `choose_of_all` is told by all of them
        share:  the tokens that there are scores of
        """
        given = addresses_of(scores, *_where(batch, heads), places, counts, best)
        sizes = scores.strides[0] // scores.itemsize, first, *_batch_sizes(batch), layout.block_size, places.shape[1]
        self.prepare(layout, dtype).choose((len(scores), 1, 1), (*given, *sizes, share.part, share.parts))

    def choose_of_all(
        self, best: Array, found: Array, dtype: np.dtype[Any], layout: BlockLayout, share: TokenShare, places: Array,
        counts: Array,
    ) -> None:  # fmt: skip
        """Of the tokens ``found [rows, top]`` by `choose` on this rank, those that are among the ``top`` best of all
        ranks', of whom ``best [parts, rows, 2, top]`` is."""
        rows, top = found.shape
        given = addresses_of(best, found, places, counts)
        self.prepare(layout, dtype).choose_of_all((rows, 1, 1), (*given, top, share.part, share.parts))


def variant_of(dtype: str, kept: str) -> Defines:
    """The macros of `indexer.cu` for keys of ``dtype`` that are kept as ``kept``.

    Raises:
        ConfigError: there is no such variant.
    """
    if dtype not in NUMBERS or kept not in (dtype, *_QUANTISED):
        raise ConfigError(
            f"an indexer's keys of {dtype} cannot be kept as {kept} on a GPU: give {', '.join(NUMBERS)}, and keep them "
            f"so or as {' or '.join(_QUANTISED)}"
        )
    return {"NUMBER": NUMBERS[dtype], "CACHE": _QUANTISED.get(kept, NUMBERS[dtype])}


def all_variants() -> Iterator[Defines]:
    """The macros of every variant of `indexer.cu`, to compile them ahead."""
    for number in NUMBERS.values():
        for cache in (number, *_QUANTISED.values()):
            yield {"NUMBER": number, "CACHE": cache}


def _where(batch: AttentionBatch, heads: HeadTable) -> tuple[Array, ...]:
    return batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, heads.group


def _batch_sizes(batch: AttentionBatch) -> tuple[int, int, int]:
    tables = batch.block_tables
    return batch.seq_lens.shape[0], batch.groups, tables.strides[0] // tables.itemsize

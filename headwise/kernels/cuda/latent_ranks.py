"""What lies around attention to latents that ranks keep together, on a GPU: the host half of `latent_ranks.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.token_share import TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cuda.elementwise import VECTOR_BYTES, variant_of
from headwise.kernels.cuda.latents import rows_of
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Programs

SOURCE = "latent_ranks.cu"
PACK_THREADS = 128
CUT_THREADS = 128
MERGE_THREADS = 64
"""A vector of 16 bytes each, of 512 numbers."""


@dataclass(frozen=True)
class _Kernels:
    pack: Kernel
    cut: Kernel
    merge: Kernel


class CudaLatentRanks:
    """All calls are one launch, on the current stream. Queries are float16, bfloat16 or float32."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[np.dtype[Any], _Kernels] = {}

    def prepare(self, dtype: np.dtype[Any]) -> _Kernels:
        """Compile or load what calls with queries of ``dtype`` need, so that they only enqueue.

        Raises:
            ConfigError: there is no such variant.
        """
        if dtype not in self._kernels:
            program = self._programs(SOURCE, variant_of(dtype))
            self._kernels[dtype] = _Kernels(
                program.kernel("pack_queries", PACK_THREADS),
                program.kernel("cut_rows", CUT_THREADS),
                program.kernel("merge_seen", MERGE_THREADS),
            )
        return self._kernels[dtype]

    def pack(
        self, query: Array, rank: int, packed: Array, lengths: tuple[Array, Array] | None, share: TokenShare
    ) -> None:
        """Put the rotated part of ``query [tokens, heads, plain + rotated]`` into ``packed [tokens, heads, rank +
        rotated]``, behind the absorbed one.

        lengths: of sequences, and where to write how many of each one's tokens are of ``share``

        Raises:
            ConfigError: the arrays are not whole vectors.
        """
        (tokens, heads, head_dim), rotated = query.shape, packed.shape[2] - rank
        address, step = rows_of("query", query, tokens)
        if any(size * query.itemsize % VECTOR_BYTES for size in (head_dim, rotated, rank)):
            raise ConfigError(
                f"heads of {head_dim}, or latents of {rank} + {rotated}, are no whole {VECTOR_BYTES} bytes"
            )
        places = addresses_of(packed, *(lengths or (None, None)))
        sizes = 0 if lengths is None else len(lengths[0]), heads, head_dim, rank, rotated, share.part, share.parts
        self.prepare(query.dtype).pack((tokens, 1, 1), (address, *places, step, *sizes))

    def cut(
        self, batch: AttentionBatch, run: slice, at: int, cut: AttentionBatch, share: TokenShare, dtype: Any
    ) -> None:
        """Make the query rows ``run`` of a batch sequences of ``cut``, from number ``at`` on, each of one query and of
        what it sees of ``share``."""
        tables = batch.block_tables
        places = addresses_of(
            batch.cu_seqlens_q, batch.seq_lens, tables, cut.cu_seqlens_q, cut.seq_lens, cut.block_tables
        )
        sizes = len(batch.seq_lens), batch.groups, tables.strides[0] // tables.itemsize, tables.shape[1]
        arguments = (*places, run.start, at, *sizes, share.part, share.parts)
        self.prepare(dtype).cut((run.stop - run.start, 1, 1), arguments)

    def merge(self, seen: Array, mixed: Array) -> None:
        """``mixed [tokens, heads, rank]`` of what was seen on each rank, ``[ranks, tokens, heads, rank + some]`` as of
        `TritonLatents.attend_of_ranks`."""
        (parts, tokens, heads, width), rank = seen.shape, mixed.shape[2]
        arguments = (*addresses_of(seen, mixed), parts, width, rank)
        self.prepare(mixed.dtype).merge((tokens * heads, 1, 1), arguments)

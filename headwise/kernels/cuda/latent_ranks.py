"""What lies around attention to what ranks keep together, on a GPU: the host half of `latent_ranks.cu`.

Queries that go to where tokens are, and come back as what was seen on each rank: of latents, or of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.token_share import TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.cuda.elementwise import VECTOR_BYTES, variant_of
from headwise.kernels.cuda.latents import rows_of
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Programs

SOURCE = "latent_ranks.cu"
PACK_THREADS = 128
CUT_THREADS = 128
MERGE_THREADS = 64
"""A vector of 16 bytes each, of 512 numbers."""

FEW_QUERIES = 8
"""Of a sequence, which are always rows beside those that decode: a prompt takes some launches for itself."""


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
        rotated]``, behind the absorbed one; without a rank, which is 0, that is a copy without gaps.

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

    def cut_all(
        self,
        batch: AttentionBatch,
        runs: Sequence[slice],
        share: TokenShare,
        dtype: Any,
        empty: Callable[[tuple[int, ...], Any], Array],
    ) -> AttentionBatch:
        """The rows of ``runs`` as sequences of one query, of this rank's tokens."""
        count, columns = sum(run.stop - run.start for run in runs), batch.block_tables.shape[1]
        begins, lengths, tables = (
            empty(shape, np.int32) for shape in ((count + 1,), (count,), (count * batch.groups, columns))
        )
        cut = AttentionBatch(begins, lengths, tables, batch.groups, max_query_len=1)
        for run, here in side_by_side(runs):
            self.cut(batch, run, here.start, cut, share, dtype)
        return cut

    def merge(self, seen: Array, mixed: Array, sink_logits: Array | None = None) -> None:
        """``mixed [tokens, heads, rank]`` of what was seen on each rank, ``[ranks, tokens, heads, rank + some]`` as of
        `TritonLatents.attend_of_ranks`; of both, tokens side by side may be some of more.

        sink_logits: of these heads, as for `AttentionKernels.attend`
        """
        (parts, tokens, heads, width), rank = seen.shape, mixed.shape[2]
        _, step = rows_of("mixed", mixed, tokens)
        sizes = seen.strides[0] // seen.itemsize, step, parts, heads, width, rank
        self.prepare(mixed.dtype).merge((tokens * heads, 1, 1), (*addresses_of(seen, mixed, sink_logits), *sizes))


def lengths_of(batch: AttentionBatch) -> HostLengths:
    """The lengths of a step whose sequences may have several queries.

    Raises:
        ValueError: the host does not know them.
    """
    if batch.on_host is None:
        raise ValueError("ranks that keep tokens together must know the lengths of a step's prompts: give on_host")
    return batch.on_host


def runs_of(lengths: HostLengths, chosen: NDArray[np.bool_]) -> list[slice]:
    """The query rows of the sequences that are chosen, as many side by side as there are."""
    taken = np.repeat(chosen, np.diff(lengths.cu_seqlens_q))
    edges = np.flatnonzero(np.diff(taken, prepend=False, append=False))
    return [slice(begin, end) for begin, end in edges.reshape(-1, 2).tolist()]


def side_by_side(runs: Sequence[slice]) -> Iterator[tuple[slice, slice]]:
    """Each of ``runs``, and where its rows are among those of all."""
    at = 0
    for run in runs:
        count = run.stop - run.start
        yield run, slice(at, at + count)
        at += count

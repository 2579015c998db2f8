"""Contexts that ranks keep together, gathered on each of their GPUs: the host half of `gathered.cu`.

What `headwise.kernels.shared_context` has for host memory. A sequence's blocks in one layer are whole for as long as
its queries attend to them, in memory of their own: what all its tokens have there twice, as ranks tell it and in their
order, and a rank's own once. Nothing but its length bounds that: whoever asks knows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.shared_context import SharedContext, whole_layout
from headwise.kernels.token_ranks import TokenRanks

SOURCE = "gathered.cu"
THREADS = 256
WORD_BYTES = 4
"""What a token has of a role is a multiple of this, and so it goes from rank to rank."""


@dataclass(frozen=True)
class _Kernels:
    take: Kernel
    join: Kernel


class GatheredContexts:
    """All calls only enqueue, on the current stream, and are the same on all ranks: by lengths that the host knows."""

    def __init__(self, parts: GpuParts) -> None:
        self._programs, self._empty = parts.programs, parts.empty
        self._kernels: _Kernels | None = None

    def prepare(self) -> _Kernels:
        """Compile or load all that calls need."""
        if self._kernels is None:
            program = self._programs(SOURCE, {})
            self._kernels = _Kernels(program.kernel("take_slots", THREADS), program.kernel("join_tokens", THREADS))
        return self._kernels

    def __call__(
        self,
        ranks: TokenRanks,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        sequence: int,
    ) -> SharedContext:
        """A sequence's blocks of a layer's one member, of which each of ``ranks`` gives its tokens; all call together.

        layout: of blocks of a rank's own tokens, whichever roles they have

        Raises:
            ConfigError: what a token has is no whole words.
        """
        assert batch.on_host is not None, "who calls this knows the lengths"
        cu, lens = batch.on_host.cu_seqlens_q, batch.on_host.seq_lens[sequence : sequence + 1]
        rows, parts = slice(int(cu[sequence]), int(cu[sequence + 1])), ranks.share.parts
        whole, columns = whole_layout(layout, parts), -(-int(lens[0]) // (parts * layout.block_size))
        own, table, ends = self._taken(arena, layout, batch, heads, sequence, columns, rows.stop - rows.start)
        return SharedContext(
            arena=self._joined(ranks.all_gather(own), layout, whole),
            layout=whole,
            batch=AttentionBatch(
                cu_seqlens_q=ends,
                seq_lens=batch.seq_lens[sequence : sequence + 1],
                block_tables=table.reshape(1, columns),
                groups=1,
                max_query_len=rows.stop - rows.start,
                on_host=HostLengths(np.array([0, rows.stop - rows.start], np.int32), lens),
            ),
            heads=replace(heads, group=ends[:1], slot=ends[:1]),  # which is a zero
            rows=rows,
        )

    def _taken(
        self,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        sequence: int,
        columns: int,
        queries: int,
    ) -> tuple[Array, Array, Array]:
        """A rank's own slots, ``int32 [columns, words]``, a table of as many, and ``cu_seqlens_q`` of one sequence."""
        own = self._empty((columns, layout.slot_bytes // WORD_BYTES), np.int32)
        table, ends = self._empty((columns,), np.int32), self._empty((2,), np.int32)
        tables = batch.block_tables[sequence * batch.groups :]
        given = addresses_of(arena, tables, heads.group, heads.slot, own, table, ends)
        sizes = layout.block_bytes, layout.slot_bytes, tables.strides[0] // tables.itemsize, queries
        self.prepare().take((columns, 1, 1), (*given, *sizes))
        return own, table, ends

    def _joined(self, every: Array, layout: BlockLayout, whole: BlockLayout) -> Array:
        """An arena of all tokens, of ``every [parts, blocks, words]`` of each rank's own."""
        parts, blocks, _ = every.shape
        arena = self._empty((blocks * whole.block_bytes,), np.uint8)
        for role in layout.roles:
            if role.token_bytes % WORD_BYTES:
                raise ConfigError(f"{role.name} of {role.token_bytes} bytes a token is not in words of {WORD_BYTES}")
            places = layout.slot_bytes, whole.block_bytes, layout.role_offsets[role.name], whole.role_offsets[role.name]
            sizes = role.token_bytes, layout.block_size, parts
            self.prepare().join((blocks, 1, 1), (*addresses_of(every, arena), *places, *sizes))
        return arena

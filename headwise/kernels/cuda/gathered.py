"""Contexts that ranks keep together, gathered on each of their GPUs: the host half of `gathered.cu`.

What `headwise.kernels.shared_context` has for host memory. Sequences' blocks in one layer are whole for as long as
their queries attend to them, in memory of their own: what all tokens have there, a rank's own once more, and of what
ranks tell each other `TOLD_BYTES`. Nothing but their lengths bounds that: whoever asks knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.shared_context import SharedContext, roles_alone, whole_layout
from headwise.kernels.token_ranks import TokenRanks

SOURCE = "gathered.cu"
THREADS = 256
TOLD_BYTES = 64 << 20
"""By all ranks at a time, unless those of a block are more."""
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
        sequences: range,
        roles: Sequence[Role] = (),
    ) -> SharedContext:
        """These sequences' blocks of a layer's one member, of which each of ``ranks`` gives its tokens; all call
        together.

        layout: of blocks of a rank's own tokens, whichever roles they have
        roles:  neighbours, of which there is something in what is gathered; none: all

        Raises:
            ConfigError: what a token has is no whole words.
        """
        assert batch.on_host is not None, "who calls this knows the lengths"
        some, taken = slice(sequences.start, sequences.stop), roles_alone(layout, tuple(roles))
        whole = whole_layout(taken, ranks.share.parts)
        begins, lens = batch.on_host.cu_seqlens_q[sequences.start : sequences.stop + 1], batch.on_host.seq_lens[some]
        known = HostLengths(begins - begins[0], lens)
        columns = -(-lens // whole.block_size)
        own, tables, cu = self._taken(arena, layout, taken, batch, heads, sequences, known, columns)
        return SharedContext(
            arena=self._told(ranks, own, taken, whole),
            layout=whole,
            batch=AttentionBatch(
                cu_seqlens_q=cu,
                seq_lens=batch.seq_lens[some],
                block_tables=tables,
                groups=1,
                max_query_len=int(np.diff(begins).max()),
                on_host=known,
            ),
            heads=replace(heads, group=cu[:1], slot=cu[:1]),  # which is a zero
            rows=slice(int(begins[0]), int(begins[-1])),
            sequence=sequences.start,
        )

    def _taken(
        self,
        arena: Array,
        layout: BlockLayout,
        taken: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        sequences: range,
        known: HostLengths,
        columns: NDArray[np.int32],
    ) -> tuple[Array, Array, Array]:
        """What blocks like ``taken`` have of a rank's own slots, ``int32 [all columns, words]``, tables of them, and
        ``cu_seqlens_q``."""
        firsts = [0, *np.cumsum(columns).tolist()]
        own = self._empty((firsts[-1], taken.slot_bytes // WORD_BYTES), np.int32)
        tables = self._empty((len(columns), int(columns.max())), np.int32)
        cu = self._empty((len(columns) + 1,), np.int32)
        for at, sequence in enumerate(sequences):
            of_sequence = batch.block_tables[sequence * batch.groups :]
            given = arena, of_sequence, heads.group, heads.slot, own[firsts[at] :], tables[at], cu[at:]
            first_byte = layout.role_offsets[taken.roles[0].name]
            places = layout.block_bytes, layout.slot_bytes, first_byte, taken.slot_bytes
            sizes = *places, of_sequence.strides[0] // of_sequence.itemsize
            ends = known.cu_seqlens_q[at : at + 2].tolist()
            self.prepare().take((int(columns[at]), 1, 1), (*addresses_of(*given), *sizes, firsts[at], *ends))
        return own, tables, cu

    def _told(self, ranks: TokenRanks, own: Array, layout: BlockLayout, whole: BlockLayout) -> Array:
        """An arena of all tokens, of the slots ``own [blocks, words]`` that each rank has."""
        for role in layout.roles:
            if role.token_bytes % WORD_BYTES:
                raise ConfigError(f"{role.name} of {role.token_bytes} bytes a token is not in words of {WORD_BYTES}")
        arena = self._empty((len(own) * whole.block_bytes,), np.uint8)
        each = max(1, TOLD_BYTES // (ranks.share.parts * layout.slot_bytes))
        for first in range(0, len(own), each):
            every = ranks.all_gather(own[first : first + each])
            self._join(every, arena[first * whole.block_bytes :], layout, whole)
        return arena

    def _join(self, every: Array, arena: Array, layout: BlockLayout, whole: BlockLayout) -> None:
        """Put ``every [parts, blocks, words]`` of each rank's own in order."""
        parts, blocks, _ = every.shape
        for role in layout.roles:
            places = layout.slot_bytes, whole.block_bytes, layout.role_offsets[role.name], whole.role_offsets[role.name]
            sizes = role.token_bytes, layout.block_size, parts
            self.prepare().join((blocks, 1, 1), (*addresses_of(every, arena), *places, *sizes))

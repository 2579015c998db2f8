"""Layers with recurrent states on CPU cores: what the thin Python halves of their rules share.

The compiled half is `state_walk_jit`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import attention_calls_jit, records, state_room_jit, state_walk_jit
from headwise.kernels.cpu.attention_jit import FIRST_ITEM
from headwise.kernels.cpu.attention_pass import batch_fields
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.state_layout import RECURRENT, StateSizes, sizes_of

THREAD_WORK = 1 << 18
"""Numbers of states that are worth waking a thread for, times tokens."""


class StateCalls:
    """Calls of `state_walk_jit` on at most ``threads`` threads of this process's pool.

    A sequence's results depend neither on the batch that it is part of nor on the number of threads.

    Raises:
        ConfigError: ``threads`` is less than 1.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"threads={threads} cannot compute: use 1 or more")
        self._threads = threads

    def take_on(
        self,
        states: NDArray[np.int64],
        width: int,
        projected: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        out: NDArray[np.float32],
        **beside: int,
    ) -> None:
        """Take the states of a layer on, ``projected [rows, width]`` to ``out [rows, members * share * value]``.

        beside: further fields of the `records.PASS`

        Raises:
            ValueError: the arrays do not fit the layout.
        """
        sizes, members, rows = sizes_of(layout), len(heads.group), len(projected)
        given, wanted = (projected.shape[1], out.shape), (width, (rows, members * sizes.share * sizes.value_dim))
        if given != wanted or int(batch.cu_seqlens_q[-1]) > rows:
            raise ValueError(f"what is projected, and results, are {given}; those of this layout's heads {wanted}")
        work = rows * members * sizes.share * sizes.key_dim * sizes.value_dim
        workers, each = max(1, min(self._threads, work // THREAD_WORK)), scratch_floats(sizes)
        scratch, counters = np.empty(workers * each, np.float32), np.zeros(FIRST_ITEM, np.int64)
        own = records.filled(
            records.PASS, **pass_fields(arena, layout, batch), rows=rows, query=address_of(projected, np.float32),
            query_row=projected.shape[1], out=address_of(out, np.float32), scratch=place_of(scratch),
            scratch_floats=each, **beside,
        )  # fmt: skip
        places = [(address_of(array, np.int32), array.size) for array in (heads.group, heads.slot)]
        layer = records.filled(records.LAYER, heads=[*places, (0, 0), (0, 0)], states=place_of(states))
        call = records.filled(
            records.CALL, function=state_walk_jit.attend().address, own=place_of(own), layer=place_of(layer),
            counters=place_of(counters),
        )  # fmt: skip
        pool_of_this_process().run(attention_calls_jit.attend().address, workers, place_of(call))


def scratch_floats(sizes: StateSizes) -> int:
    """Floats that each thread works with."""
    return state_room_jit.scratch_floats(sizes.key_dim, sizes.value_dim, sizes.share, sizes.convolution)


def pass_fields(arena: NDArray[np.uint8], layout: BlockLayout, batch: AttentionBatch) -> dict[str, Any]:
    """Fields of a `records.PASS` that say where an arena of states and a batch are."""
    cache = {
        "arena": address_of(arena, np.uint8), "arena_bytes": arena.nbytes, "block_size": layout.block_size,
        "block_stride": layout.block_bytes // 4, "slot_stride": layout.slot_bytes // 4,
        "value_offset": layout.role_offsets[RECURRENT] // 4,
    }  # fmt: skip
    return {"cache": tuple(cache.get(name, 0) for name in records.CACHE.names or ()), **batch_fields(batch)}

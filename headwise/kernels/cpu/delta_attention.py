"""Gated delta-nets on CPU cores: the thin Python half (the compiled half is `delta_jit`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import attention_calls_jit, delta_jit, records
from headwise.kernels.cpu.attention_jit import FIRST_ITEM
from headwise.kernels.cpu.attention_pass import batch_fields
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.delta import RECURRENT, DeltaSizes, sizes_of
from headwise.kernels.delta_base import DeltaWeights

THREAD_WORK = 1 << 18
"""Numbers of states that are worth waking a thread for, times tokens."""


class NumbaDeltaKernels:
    """`ProjectedDeltaKernels` for float32 arrays in host memory, on at most ``threads`` threads of this process's pool.

    A sequence's results depend neither on the batch that it is part of nor on the number of threads.

    Raises:
        ConfigError: ``threads`` is less than 1.
    """

    name = "numba"

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"threads={threads} cannot compute: use 1 or more")
        self._threads = threads

    def attend_projected(
        self,
        projected: NDArray[np.float32],
        weights: DeltaWeights,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[np.float32],
    ) -> None:
        """See `ProjectedDeltaKernels.attend_projected`."""
        sizes, key_heads, rows = sizes_of(layout), len(heads.group), len(projected)
        delta = delta_record(weights, sizes, key_heads)
        values = sizes.share * sizes.value_dim
        given = projected.shape[1], out.shape
        wanted = key_heads * (sizes.channels + values + 2 * sizes.share), (rows, key_heads * values)
        if given != wanted or int(batch.cu_seqlens_q[-1]) > rows:
            raise ValueError(f"what is projected, and results, are {given}; those of this layout's heads {wanted}")
        work = rows * key_heads * sizes.share * sizes.key_dim * sizes.value_dim
        workers, each = max(1, min(self._threads, work // THREAD_WORK)), scratch_floats(sizes)
        scratch, counters = np.empty(workers * each, np.float32), np.zeros(FIRST_ITEM, np.int64)
        own = records.filled(
            records.PASS, **pass_fields(arena, layout, batch), rows=rows, query=address_of(projected, np.float32),
            query_row=projected.shape[1], out=address_of(out, np.float32), scratch=place_of(scratch),
            scratch_floats=each,
        )  # fmt: skip
        places = [(address_of(array, np.int32), array.size) for array in (heads.group, heads.slot)]
        layer = records.filled(records.LAYER, heads=[*places, (0, 0), (0, 0)], delta=place_of(delta))
        call = records.filled(
            records.CALL, function=delta_jit.attend().address, own=place_of(own), layer=place_of(layer),
            counters=place_of(counters),
        )  # fmt: skip
        pool_of_this_process().run(attention_calls_jit.attend().address, workers, place_of(call))


def delta_record(weights: DeltaWeights, sizes: DeltaSizes, key_heads: int) -> NDArray[np.int64]:
    """A `records.DELTA`, which is good for as long as the weights are there.

    Raises:
        ValueError: the weights are of other sizes.
    """
    given = weights.convolution.shape, weights.speed.shape, weights.bias.shape, weights.norm.shape
    each = key_heads, sizes.share
    wanted = (key_heads, sizes.convolution, sizes.channels), each, each, (sizes.value_dim,)
    if given != wanted:
        raise ValueError(f"weights of a delta-net are {given}; this layout's are {wanted}")
    convolution, speed, bias, norm = (
        address_of(array, np.float32) for array in (weights.convolution, weights.speed, weights.bias, weights.norm)
    )
    return records.filled(
        records.DELTA, heads=key_heads, share=sizes.share, key_dim=sizes.key_dim, value_dim=sizes.value_dim,
        convolution=sizes.convolution, weights=convolution, speed=speed, bias=bias, norm=norm, eps=weights.eps,
    )  # fmt: skip


def sizes_of_weights(weights: DeltaWeights) -> DeltaSizes:
    """Those of the delta-net that they are of."""
    (_, convolution, channels), (_, share) = weights.convolution.shape, weights.speed.shape
    value_dim = len(weights.norm)
    return DeltaSizes((channels - share * value_dim) // 2, value_dim, share, convolution)


def scratch_floats(sizes: DeltaSizes) -> int:
    """Floats that each thread works with."""
    return delta_jit.scratch_floats(sizes.key_dim, sizes.value_dim, sizes.share, sizes.convolution)


def pass_fields(arena: NDArray[np.uint8], layout: BlockLayout, batch: AttentionBatch) -> dict[str, Any]:
    """Fields of a `records.PASS` that say where an arena of states and a batch are."""
    cache = {
        "arena": address_of(arena, np.uint8), "arena_bytes": arena.nbytes, "block_size": layout.block_size,
        "block_stride": layout.block_bytes // 4, "slot_stride": layout.slot_bytes // 4,
        "value_offset": layout.role_offsets[RECURRENT] // 4,
    }  # fmt: skip
    return {"cache": tuple(cache.get(name, 0) for name in records.CACHE.names or ()), **batch_fields(batch)}

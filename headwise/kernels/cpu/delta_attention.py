"""Gated delta-nets on CPU cores: the thin Python half (the compiled half is `delta_jit`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import delta_jit
from headwise.kernels.cpu.sharing import share_out
from headwise.kernels.delta import RECURRENT, sizes_of
from headwise.kernels.delta_base import NORM_EPS, DeltaInputs

THREAD_WORK = 1 << 18
"""Numbers of states that are worth waking a thread for, times tokens."""

PIECES = 8
"""Into which a thread's share of a step is cut: sequences differ in length."""


class NumbaDeltaKernels:
    """`DeltaKernels` for float32 arrays in host memory, on at most ``threads`` threads of this process's pool.

    A sequence's results depend neither on the batch that it is part of nor on the number of threads.

    Raises:
        ConfigError: ``threads`` is less than 1.
    """

    name = "numba"

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"threads={threads} cannot compute: use 1 or more")
        self._threads = threads

    def attend_delta(
        self,
        inputs: DeltaInputs,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[np.float32],
    ) -> None:
        """See `DeltaKernels.attend_delta`."""
        sizes = sizes_of(layout)
        tokens, key_heads, channels = inputs.mixed.shape
        each = (tokens, key_heads, sizes.share)
        given = (inputs.rate.shape, inputs.decay.shape, inputs.weights.shape, channels, out.shape)
        wanted = (each, each, (key_heads, sizes.convolution, sizes.channels), sizes.channels, (*each, sizes.value_dim))
        if given != wanted:
            raise ValueError(f"rates, decays, weights, channels and results are {given}; this layout's are {wanted}")
        compiled = delta_jit.attend_items()
        floats = arena.view(np.float32)
        in_arena = (layout.block_bytes // 4, layout.slot_bytes // 4, layout.role_offsets[RECURRENT] // 4)
        tables = (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.groups, heads.group, heads.slot)

        def attend(first: int, last: int) -> None:
            compiled(
                first, last, inputs.mixed, inputs.rate, inputs.decay, inputs.weights, floats, *in_arena, *tables,
                layout.block_size, np.float32(NORM_EPS), out,
            )  # fmt: skip

        work = tokens * key_heads * sizes.share * sizes.key_dim * sizes.value_dim
        workers = min(self._threads, work // THREAD_WORK)
        share_out(attend, len(batch.seq_lens) * key_heads, workers, PIECES * workers)

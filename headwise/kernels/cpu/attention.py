"""Attention on CPU cores, compiled by Numba: the thin Python half (the compiled half is `attention_jit`)."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.gqa import gqa_layout, head_dim_of

HEAD_DIM_STEP = 16
"""Head dimensions must be a multiple of this: rows of keys are read as whole vectors."""

_numba: Any = numba
_one_caller = threading.Lock()


class NumbaKernels:
    """`AttentionKernels` for float32 arrays in host memory, callable from any thread.

    Making the first one in a process loads the kernels, and on a machine's first ever use compiles them (about twenty
    seconds; Numba keeps the machine code on disk): no call compiles anything later. ``query``, ``key``, ``value``,
    ``out`` must be C-contiguous float32, the arrays of batch and heads C-contiguous int32.

    Raises:
        ConfigError: ``threads`` is not between 1 and the number of cores this process may use.
    """

    name = "numba"

    def __init__(self, threads: int) -> None:
        # GNU OpenMP takes calls from any thread and lives beside the threads of a tensor framework's own BLAS.
        _numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
        from headwise.kernels.cpu import attention_jit

        self._attend, self._write_kv = attention_jit.attend, attention_jit.write_kv
        self._known: tuple[BlockLayout | None, tuple[int, int, int, int]] = (None, (0, 0, 0, 0))
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.set_threads(threads)
        self.warm_up()

    def set_threads(self, threads: int) -> None:
        """Use at most ``threads`` threads from the next call on; small calls use fewer."""
        most = int(_numba.config.NUMBA_NUM_THREADS)
        if not 1 <= threads <= most:
            raise ConfigError(f"threads={threads} cannot be had: choose from 1 to {most}, the cores of this process")
        self._threads = threads

    def warm_up(self) -> None:
        """Run both kernels once on a few bytes, so that threads and pages are there before the first request."""
        layout = gqa_layout(block_size=1, slots=1, head_dim=HEAD_DIM_STEP)
        one = np.zeros(1, np.int32)
        batch = AttentionBatch(np.array([0, 1], np.int32), one + 1, np.zeros((1, 1), np.int32), groups=1)
        heads = HeadTable(one, one, one, one)
        token = np.zeros((1, 1, HEAD_DIM_STEP), np.float32)
        arena = np.zeros(layout.block_bytes, np.uint8)
        self.write_kv(token, token, arena, layout, batch, heads)
        self.attend(token, arena, layout, batch, heads, scale=1.0, softcap=0.0, out=token)
        if _numba.threading_layer() == "workqueue":  # which aborts the process when two threads enter it at once
            self._guard = _one_caller

    def write_kv(
        self,
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `AttentionKernels.write_kv`."""
        self._write_kv(
            key, value, arena, self._strides_of(layout),
            batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.groups, heads.group, heads.slot,
        )  # fmt: skip

    def attend(
        self,
        query: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: NDArray[np.float32],
    ) -> None:
        """See `AttentionKernels.attend`. A visible token whose block is ``-1`` is treated as not visible."""
        with self._guard:
            self._attend(
                query, arena, self._strides_of(layout),
                batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.groups,
                heads.group, heads.slot, heads.window, heads.sink, scale, softcap, self._threads, out,
            )  # fmt: skip

    def _strides_of(self, layout: BlockLayout) -> tuple[int, int, int, int]:
        # One layout serves every layer of every step: look at it once.
        known, strides = self._known
        if known is not layout:
            strides = _strides(layout)
            self._known = (layout, strides)
        return strides


def _strides(layout: BlockLayout) -> tuple[int, int, int, int]:
    """(block, slot, keys to values) in floats, and the block size in tokens: what `attention_jit` needs of a layout."""
    head_dim, dtype = head_dim_of(layout), layout.roles[0].dtype
    if dtype != "float32" or layout.roles[1].dtype != "float32":
        raise ConfigError(f"the numba kernels keep KV in float32, got {dtype}: use float32, or kernels 'reference'")
    if head_dim % HEAD_DIM_STEP:
        raise ConfigError(
            f"the numba kernels need a head_dim that is a multiple of {HEAD_DIM_STEP}, got {head_dim}: "
            "use kernels 'reference'"
        )
    return layout.block_bytes // 4, layout.slot_bytes // 4, layout.role_offsets["value"] // 4, layout.block_size

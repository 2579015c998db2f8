"""Attention on CPU cores, compiled by Numba: the thin Python half (`attention_jit` and `kv_write_jit` are compiled)."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import machine_code
from headwise.kernels.gqa import gqa_layout, head_dim_of, kv_dtype_of

HEAD_DIM_STEP = 16
"""Head dimensions must be a multiple of this: rows of keys are read as whole vectors."""

STORED: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
"""KV dtypes, and the NumPy dtype that compiled code sees them as: bfloat16 as its bits."""

_numba: Any = numba
_one_caller = threading.Lock()
_compiling = threading.Lock()
_no_angles = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class _Variant:
    """What a layout means to compiled code."""

    layout: BlockLayout
    stored: Any
    strides: NDArray[np.int64]
    work_at: int


class NumbaKernels:
    """`RotatingKernels` for float32 arrays in host memory, callable from any thread; KV is of any dtype of `STORED`.

    Making the first one in a process loads the kernels for ``kv_dtype``, if one is given, and on a machine's first ever
    use compiles them (about twenty seconds; the machine code is kept on disk). Those of other KV are loaded by
    `prepare`, or when first called with it. ``query``, ``key`` and ``value`` are float32 with contiguous
    rows, which may lie apart; ``out`` is C-contiguous float32, the arrays of batch and heads C-contiguous int32.

    Over float32 KV all is float32. Over KV of fewer bits queries and probabilities are rounded to bfloat16 where the
    CPU has AVX512-BF16 (else not), and one token's over int8 to 15 bits of their row's largest where it has AVX512-BW;
    sums are float32, or exact integers.

    Raises:
        ConfigError: ``threads`` is not between 1 and the number of cores this process may use, or there are no kernels
            for ``kv_dtype``.
    """

    name = "numba"

    def __init__(self, threads: int, kv_dtype: str | None = "float32") -> None:
        # GNU OpenMP takes calls from any thread and lives beside the threads of a tensor framework's own BLAS.
        _numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
        from headwise.kernels.cpu import attention_jit, kv_write_jit

        self._attend, self._write = attention_jit.attend, kv_write_jit.write
        self._known: _Variant | None = None
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.set_threads(threads)
        if kv_dtype is not None:
            self.prepare(kv_dtype)

    def set_threads(self, threads: int) -> None:
        """Use at most ``threads`` threads from the next call on; small calls use fewer."""
        most = int(_numba.config.NUMBA_NUM_THREADS)
        if not 1 <= threads <= most:
            raise ConfigError(f"threads={threads} cannot be had: choose from 1 to {most}, the cores of this process")
        self._threads = threads

    def prepare(self, kv_dtype: str) -> None:
        """Load the kernels of KV of this dtype, and run them once, so that threads and pages are there.

        Raises:
            ConfigError: there are none for this dtype.
        """
        layout = gqa_layout(block_size=1, slots=1, head_dim=HEAD_DIM_STEP, dtype=kv_dtype)
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
        nothing = np.empty((0, 0, key.shape[2]), np.float32)
        self._write_rows(nothing, key, value, _no_angles, _no_angles, arena, layout, batch, heads)

    def write_kv_rope(
        self,
        query: NDArray[np.float32],
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        cosines: NDArray[np.float32],
        sines: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `RotatingKernels.write_kv_rope`."""
        cosines, sines = (angles.reshape(len(angles), -1) for angles in (cosines, sines))
        self._write_rows(query, key, value, cosines, sines, arena, layout, batch, heads)

    def _write_rows(
        self,
        query: NDArray[np.float32],
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        cosines: NDArray[np.float32],
        sines: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        variant = self._variant_of(layout)
        with self._guard:
            self._write(
                query, key, value, cosines, sines, arena.view(variant.stored), arena.view(np.float32), variant.strides,
                batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.groups, heads.group, heads.slot,
                self._threads,
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
        """See `AttentionKernels.attend`. A visible token whose block is ``-1`` is treated as not visible.

        A sequence's results do not depend on the batch that it is part of, nor on the number of threads.
        """
        variant = self._variant_of(layout)
        with self._guard:
            self._attend(
                variant.work_at, query, arena.view(variant.stored), arena.view(np.float32), variant.strides,
                batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.groups,
                heads.group, heads.slot, heads.window, heads.sink, scale, softcap, self._threads, out,
            )  # fmt: skip

    def _variant_of(self, layout: BlockLayout) -> _Variant:
        # One layout serves every layer of every step: look at it once.
        known = self._known
        if known is None or known.layout is not layout:
            strides = strides_of(layout)
            stored = STORED[kv_dtype_of(layout)]
            known = _Variant(layout, stored, strides, self._load(stored))
            self._known = known
        return known

    def _load(self, stored: Any) -> int:
        """Load, or compile, the kernels for arenas seen as ``stored``; the address of `attention_jit.work`."""
        from headwise.kernels.cpu import attention_jit, kv_write_jit

        kv = _numba.from_dtype(np.dtype(stored))
        _compile(self._attend, attention_jit.attend_signature(kv))
        _compile(self._write, kv_write_jit.write_signature(kv))
        return work_address(stored)


@cache
def work_address(stored: Any) -> int:
    """The address of `attention_jit.work` for arenas seen as ``stored``; loads, or compiles, it."""
    from headwise.kernels.cpu import attention_jit, native_call

    signature = attention_jit.work_signature(_numba.from_dtype(np.dtype(stored)))
    _compile(attention_jit.work, signature)
    return native_call.address_of(attention_jit.work, signature)


def _compile(function: Any, signature: Any) -> None:
    with _compiling, machine_code.one_process_at_a_time():
        if signature.args not in function.overloads:
            function.disable_compile(False)
            function.compile(signature)
            function.disable_compile()


def strides_of(layout: BlockLayout) -> NDArray[np.int64]:
    """What compiled code needs of a layout: see `attention_jit.BLOCK_STRIDE` and those behind it.

    Raises:
        ConfigError: there are no kernels for its dtype or head dimension.
    """
    head_dim, dtype = head_dim_of(layout), kv_dtype_of(layout)
    if dtype not in STORED:
        raise ConfigError(
            f"the numba kernels keep KV in {', '.join(STORED)}, got {dtype}: use one of these, or kernels 'reference'"
        )
    if head_dim % HEAD_DIM_STEP:
        raise ConfigError(
            f"the numba kernels need a head_dim that is a multiple of {HEAD_DIM_STEP}, got {head_dim}: "
            "use kernels 'reference'"
        )
    at, size = layout.role_offsets, np.dtype(STORED[dtype]).itemsize
    elements = (layout.block_bytes // size, layout.slot_bytes // size, at["value"] // size, layout.block_size)
    scales = (
        layout.block_bytes // 4,
        layout.slot_bytes // 4,
        at.get("key_scale", 0) // 4,
        at.get("value_scale", 0) // 4,
    )
    return np.array([*elements, *scales], np.int64)

# mypy: ignore-errors
"""The compiled half of KV writes: rotation, rounding, quantising, and where each token's row goes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.attention_jit import (
    BATCH,
    BLOCK_SCALES,
    BLOCK_SIZE,
    BLOCK_STRIDE,
    INTS,
    KEY_SCALES,
    SLOT_SCALES,
    SLOT_STRIDE,
    STRIDES,
    VALUE_OFFSET,
    VALUE_SCALES,
    read_only,
)
from headwise.kernels.cpu.attention_micro import is_quantised
from headwise.kernels.cpu.rows import row_of
from headwise.kernels.cpu.simd import FLOAT, LANES, Emitter
from headwise.kernels.cpu.threads import use_threads

THREAD_TOKENS = 32
"""Tokens that are worth waking a thread for."""

LARGEST_INT8 = 127.0

# No relaxed arithmetic here: what is stored is, bit by bit, what the reference stores.
_inlined = numba.njit(forceinline=True, nogil=True, error_model="numpy")
_compiled = numba.njit(nogil=True, error_model="numpy")


@intrinsic
def _store_row(typing, row, kv, at, dim):
    """Store ``dim`` floats at ``kv[at:]`` as its dtype has them; returns the scale of what is quantised, else 1.

    Rounds half to even. As `headwise.kernels.gqa.quantise`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        row, target, at, dim = e.args
        target, vectors = e.at(target, at), builder.udiv(dim, dim.type(LANES))
        scale = _scale(e, row, vectors) if kv.dtype == types.int8 else FLOAT(1.0)
        with cgutils.for_range(builder, vectors) as loop:
            cell, value = e.at(target, e.times(loop.index, LANES)), e.load(e.at(row, e.times(loop.index, LANES)))
            if kv.dtype == types.int8:
                value = e.round_to_int8(builder.fdiv(value, e.fill(scale)))
            elif kv.dtype == types.uint16:
                value = e.bfloat16_bits(value)
            e.store(value, cell)
        return scale

    return types.float32(row, kv, types.intp, types.intp), emit


def _scale(e: Emitter, row: Any, vectors: Any) -> Any:
    """The scale of a row of ``vectors`` vectors: its largest magnitude becomes LARGEST_INT8."""
    absmax = e.absmax(row, vectors)
    some = e.builder.fcmp_ordered(">", absmax, FLOAT(0.0))
    return e.builder.select(some, e.builder.fdiv(absmax, FLOAT(LARGEST_INT8)), FLOAT(1.0))


@_inlined
def _rotate(source, target, cosines, sines, half):
    for i in range(half):
        first, second, cosine, sine = source[i], source[i + half], cosines[i], sines[i]
        target[i] = first * cosine - second * sine
        target[i + half] = second * cosine + first * sine


@_compiled
def write_tokens(
    query, key, value, cosines, sines, kv, scales, strides, cu, lens, tables, groups, head_group, head_slot, begin, end
):  # fmt: skip
    """Rotate and write what belongs to the rows ``[begin, end)`` of the batch; the arguments are those of `write`."""
    dim, half = key.shape[2], cosines.shape[1]
    rotated = np.empty(dim, np.float32)
    block_size = strides[BLOCK_SIZE]
    for sequence in range(len(lens)):
        last = cu[sequence + 1]
        for token in range(max(cu[sequence], begin), min(last, end)):
            position = lens[sequence] - last + token
            if half > 0:
                for head in range(query.shape[1]):
                    row = row_of(query, token, head)
                    _rotate(row, row, cosines[token], sines[token], half)
            for head in range(len(head_group)):
                block = np.int64(tables[sequence * groups + head_group[head], position // block_size])
                if block < 0:
                    continue
                row, slot, offset = row_of(key, token, head), np.int64(head_slot[head]), position % block_size
                if half > 0:
                    _rotate(row, rotated, cosines[token], sines[token], half)
                    row = rotated
                at = block * strides[BLOCK_STRIDE] + slot * strides[SLOT_STRIDE] + offset * dim
                key_scale = _store_row(row, kv, at, dim)
                value_scale = _store_row(row_of(value, token, head), kv, at + strides[VALUE_OFFSET], dim)
                if is_quantised(kv):
                    at = block * strides[BLOCK_SCALES] + slot * strides[SLOT_SCALES] + offset
                    scales[at + strides[KEY_SCALES]] = key_scale
                    scales[at + strides[VALUE_SCALES]] = value_scale


@machine_code.entry(parallel=True, nogil=True, error_model="numpy")
def write(
    query, key, value, cosines, sines, kv, scales, strides, cu, lens, tables, groups, head_group, head_slot, threads
):  # fmt: skip
    """`RotatingKernels.write_kv_rope`, or `write_kv` where ``cosines`` and ``sines`` have no columns.

    They are ``[tokens, dim / 2]``. ``kv``, ``scales`` and ``strides`` are as in `attention_jit.Step`.
    """
    tokens, dim, half = np.int64(cu[len(lens)]), key.shape[2], cosines.shape[1]
    if key.shape != value.shape or tokens > len(key) or len(head_group) != key.shape[1]:
        raise ValueError("key, value, cu_seqlens_q and the number of KV heads do not fit each other")
    if half > 0 and (2 * half != dim or query.shape[2] != dim or min(len(query), len(cosines), len(sines)) < tokens):
        raise ValueError("query, cosines and sines do not fit the keys")
    if half != sines.shape[1]:
        raise ValueError("cosines and sines do not fit each other")
    if strides[VALUE_OFFSET] < strides[BLOCK_SIZE] * dim:
        raise ValueError("the keys' head_dim is larger than that of the block layout")
    if tokens > 0 and (key.strides[2] != 4 or value.strides[2] != 4 or (half > 0 and query.strides[2] != 4)):
        raise ValueError("rows of query, key and value must be contiguous")
    workers = max(1, min(threads, tokens // THREAD_TOKENS))
    if workers == 1:
        write_tokens(
            query, key, value, cosines, sines, kv, scales, strides, cu, lens, tables, groups, head_group, head_slot,
            0, tokens,
        )  # fmt: skip
        return
    before = use_threads(workers)
    for worker in numba.prange(workers):
        write_tokens(
            query, key, value, cosines, sines, kv, scales, strides, cu, lens, tables, groups, head_group, head_slot,
            tokens * worker // workers, tokens * (worker + 1) // workers,
        )  # fmt: skip
    use_threads(before)


def write_signature(kv: Any) -> Any:
    """The types of `write` for a cache of that dtype."""
    rows, angles = read_only(types.float32, 3, "A"), read_only(types.float32, 2)
    return types.void(
        types.float32[:, :, :], rows, rows, angles, angles, kv[::1], types.float32[::1], STRIDES, *BATCH, INTS, INTS,
        types.int64,
    )  # fmt: skip

# mypy: ignore-errors
"""The compiled half of KV writes: rotation, rounding, quantising, and where each token's row goes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import (
    bytes_at,
    floats_at,
    halves_at,
    heads_at,
    int8s_at,
    int_matrix_at,
    ints_at,
    layer_at,
    pass_at,
    shorts_at,
)
from headwise.kernels.cpu.attention_micro import QUANTISED, is_quantised
from headwise.kernels.cpu.float8 import FLOAT8, LARGEST_FLOAT8, round_to_float8
from headwise.kernels.cpu.int4 import CODES, INT4, is_int4, scales_of_row, store_groups
from headwise.kernels.cpu.records import HEAD_GROUP, HEAD_SLOT
from headwise.kernels.cpu.rows import row_of
from headwise.kernels.cpu.simd import FLOAT, LANES, Emitter

_LARGEST = {types.int8: 127.0, FLOAT8: LARGEST_FLOAT8}
_HALF_STEP = 8

# No relaxed arithmetic here: what is stored is, bit by bit, what the reference stores.
_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")


@intrinsic
def _store_row(typing, row, kv, at, dim):
    """Store ``dim`` floats at ``kv[at:]`` as its dtype has them; returns the scale of what is quantised, else 1.

    Rounds half to even. As `headwise.kernels.gqa.quantise`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if kv.dtype == INT4:  # see `store_groups`
            return FLOAT(1.0)
        e = Emitter(context, builder, signature, args)
        row, target, at, dim = e.args
        target, vectors = e.at(target, at), builder.udiv(dim, dim.type(LANES))
        scale = _scale(e, row, vectors, _LARGEST[kv.dtype]) if kv.dtype in QUANTISED else FLOAT(1.0)
        with cgutils.for_range(builder, vectors) as loop:
            cell, value = e.at(target, e.times(loop.index, LANES)), e.load(e.at(row, e.times(loop.index, LANES)))
            if kv.dtype == types.int8:
                value = e.round_to_int8(builder.fdiv(value, e.fill(scale)))
            elif kv.dtype == FLOAT8:
                value = round_to_float8(e, builder.fdiv(value, e.fill(scale)))
            elif kv.dtype == types.uint16:
                value = e.bfloat16_bits(value)
            e.store(value, cell)
        return scale

    return types.float32(row, kv, types.intp, types.intp), emit


def _scale(e: Emitter, row: Any, vectors: Any, largest: float) -> Any:
    """The scale of a row of ``vectors`` vectors: its largest magnitude becomes ``largest``."""
    absmax = e.absmax(row, vectors)
    some = e.builder.fcmp_ordered(">", absmax, FLOAT(0.0))
    return e.builder.select(some, e.builder.fdiv(absmax, FLOAT(largest)), FLOAT(1.0))


@intrinsic
def _rotate(typing, source, target, cosines, sines, half):
    """``target`` is ``source [2 * half]`` rotated; it may be the same row. ``half`` is a multiple of 8.

    Spelled out, for of rows that may be the same no vector loop is made.
    """
    vector = ir.VectorType(FLOAT, _HALF_STEP)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        *rows, half = e.args
        with cgutils.for_range(builder, builder.udiv(half, half.type(_HALF_STEP))) as loop:
            at = e.times(loop.index, _HALF_STEP)

            def place(row: Any, *offsets: Any) -> Any:
                return builder.bitcast(e.at(row, at, *offsets), vector.as_pointer())

            source, target, cosines, sines = rows
            places = (place(source), place(source, half), place(cosines), place(sines))
            first, second, cosine, sine = (builder.load(each, align=4) for each in places)
            low = builder.fsub(builder.fmul(first, cosine), builder.fmul(second, sine))
            high = builder.fadd(builder.fmul(second, cosine), builder.fmul(first, sine))
            builder.store(low, place(target), align=4)
            builder.store(high, place(target, half), align=4)
        return context.get_dummy_value()

    return types.void(source, target, cosines, sines, types.intp), emit


@_pasted
def _write(kv, own, layer, begin, end, thread):
    """Rotate queries and keys of the rows ``[begin, end)`` of a batch, and write keys and values to the cache."""
    dim, value_dim, half, store, kv_heads = own.dim, own.value_dim, own.half, own.cache, own.kv_heads
    query = heads_at(own.query, own.rows, own.q_heads, dim, own.query_row, own.query_head)
    key = heads_at(own.key, own.rows, kv_heads, dim, own.key_row, own.key_head)
    value = heads_at(own.value, own.rows, kv_heads, value_dim, own.value_row, own.value_head)
    scales, rotated = (
        floats_at(store.arena, store.arena_bytes // 4),
        floats_at(own.scratch + thread * own.scratch_floats * 4, dim),
    )
    cu, lens = ints_at(own.cu_seqlens, own.sequences + 1), ints_at(own.seq_lens, own.sequences)
    tables = int_matrix_at(own.tables, own.sequences * own.groups, own.table_columns)
    head_group, head_slot = ints_at(layer.heads[HEAD_GROUP, 0], kv_heads), ints_at(layer.heads[HEAD_SLOT, 0], kv_heads)
    for sequence in range(own.sequences):
        last = cu[sequence + 1]
        for token in range(max(cu[sequence], begin), min(last, end)):
            position = lens[sequence] - last + token
            cosines = floats_at(own.cosines + token * half * 4, half)
            sines = floats_at(own.sines + token * half * 4, half)
            if half > 0:
                for head in range(own.q_heads):
                    row = row_of(query, token, head)
                    _rotate(row, row, cosines, sines, half)
            for head in range(kv_heads):
                block = np.int64(tables[sequence * own.groups + head_group[head], position // store.block_size])
                if block < 0:
                    continue
                row, slot, offset = row_of(key, token, head), np.int64(head_slot[head]), position % store.block_size
                if half > 0:
                    _rotate(row, rotated, cosines, sines, half)
                    row = rotated
                value_row = row_of(value, token, head)
                slot_at = block * store.block_stride + slot * store.slot_stride
                values_at = slot_at + store.value_offset
                scales_at = block * store.block_scales + slot * store.slot_scales
                if is_int4(kv):
                    at = scales_at + store.key_scales + offset * scales_of_row(dim)
                    store_groups(row, kv, slot_at + offset * (dim // CODES), at, dim)
                    at = scales_at + store.value_scales + offset * scales_of_row(value_dim)
                    store_groups(value_row, kv, values_at + offset * (value_dim // CODES), at, value_dim)
                    continue
                key_scale = _store_row(row, kv, slot_at + offset * dim, dim)
                value_scale = _store_row(value_row, kv, values_at + offset * value_dim, value_dim)
                if is_quantised(kv):
                    scales[scales_at + offset + store.key_scales] = key_scale
                    scales[scales_at + offset + store.value_scales] = value_scale


def _write_float32(own, layer, begin, end, thread):
    own = pass_at(own)
    kv = floats_at(own.cache.arena, own.cache.arena_bytes // 4)
    _write(kv, own, layer_at(layer), begin, end, thread)


def _write_bfloat16(own, layer, begin, end, thread):
    own = pass_at(own)
    kv = halves_at(own.cache.arena, own.cache.arena_bytes // 2)
    _write(kv, own, layer_at(layer), begin, end, thread)


def _write_int8(own, layer, begin, end, thread):
    own = pass_at(own)
    kv = int8s_at(own.cache.arena, own.cache.arena_bytes)
    _write(kv, own, layer_at(layer), begin, end, thread)


def _write_float8(own, layer, begin, end, thread):
    own = pass_at(own)
    kv = bytes_at(own.cache.arena, own.cache.arena_bytes)
    _write(kv, own, layer_at(layer), begin, end, thread)


def _write_int4(own, layer, begin, end, thread):
    own = pass_at(own)
    kv = shorts_at(own.cache.arena, own.cache.arena_bytes // 2)
    _write(kv, own, layer_at(layer), begin, end, thread)


_WRITES = {
    "float32": _write_float32,
    "bfloat16": _write_bfloat16,
    "int8": _write_int8,
    "float8_e4m3fn": _write_float8,
    "int4": _write_int4,
}


@cache
def write_of(kv_dtype: str) -> Any:
    """The compiled rotation and KV write to a cache of that dtype, as a C function.

    Its integers are addresses of a `PASS` and a `LAYER`; the first row of the batch and the one behind the last; and
    which thread it runs on.
    """
    return machine_code.unit(_WRITES[kv_dtype], 5, error_model="numpy")

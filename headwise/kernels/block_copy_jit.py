# mypy: ignore-errors
"""The compiled half of `headwise.kernels.block_copy_cpu`: one thread's share of a copy, without the GIL.

All compiled code is in this one file on purpose: Numba's disk cache looks at the file of the entry function
alone. Nothing here is parallel in Numba's sense: a copy runs beside the forward pass, and not every threading
layer of Numba may be entered by two threads at once.

Stores are non-temporal: a plain store first reads the cache line that it overwrites, a third of all the traffic of
a copy, and fills the caches that the forward pass beside it lives on.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line, and of the vectors copied; LLVM splits vectors the machine lacks."""

LINES = 4
"""Cache lines in flight in one turn of the copy loop."""

AHEAD = 16
"""Cache lines of the next block that are asked for before a block is copied: blocks lie anywhere in memory, where the
processor's own prefetching cannot follow."""

_compiled = numba.njit(nogil=True, error_model="numpy")
_BYTE, _INT = ir.IntType(8), ir.IntType(64)
_VECTOR = ir.VectorType(_BYTE, LINE)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


@intrinsic
def _address(typing, array, offset):
    """Address of ``array[offset]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_pointer(context, builder, signature.args[0], *args), _INT)

    return types.int64(array, types.int64), emit


@intrinsic
def _copy_few(typing, source, source_at, target, target_at, count):
    """Copy ``count`` bytes, through the caches."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_, to = (_pointer(context, builder, signature.args[i], *args[i : i + 2]) for i in (0, 2))
        cgutils.raw_memcpy(builder, to, from_, args[4], 1)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@intrinsic
def _copy_lines(typing, source, source_at, target, target_at, turns):
    """Copy ``turns * LINES`` cache lines past the caches; the target is aligned to a line, the source need not be."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_, to = (_pointer(context, builder, signature.args[i], *args[i : i + 2]) for i in (0, 2))
        past_caches = builder.module.add_metadata([ir.IntType(32)(1)])
        with cgutils.for_range(builder, args[4]) as loop:
            turn = builder.mul(loop.index, _INT(LINE * LINES))
            cells = [builder.add(turn, _INT(line * LINE)) for line in range(LINES)]
            lines = [
                builder.load(builder.bitcast(builder.gep(from_, [cell]), _VECTOR.as_pointer()), align=1)
                for cell in cells
            ]
            for cell, line in zip(cells, lines, strict=True):
                store = builder.store(line, builder.bitcast(builder.gep(to, [cell]), _VECTOR.as_pointer()), align=LINE)
                store.set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64), emit


@intrinsic
def _prefetch(typing, source, source_at):
    """Start to bring AHEAD cache lines into the L2 cache; harmless wherever they are."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        from_ = _pointer(context, builder, signature.args[0], *args)
        for line in range(AHEAD):
            builder.call(function, [builder.gep(from_, [_INT(line * LINE)]), flag(0), flag(2), flag(1)])
        return context.get_dummy_value()

    return types.void(source, types.int64), emit


@intrinsic
def _fence(typing):
    """Make all stores so far, non-temporal ones too, visible to other threads before any later one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@_compiled
def _copy(source, source_at, target, target_at, count):
    head = min(-_address(target, target_at) % LINE, count)
    _copy_few(source, source_at, target, target_at, head)
    turns = (count - head) // (LINE * LINES)
    _copy_lines(source, source_at + head, target, target_at + head, turns)
    done = head + turns * LINE * LINES
    _copy_few(source, source_at + done, target, target_at + done, count - done)


def _read(dtype: Any, dims: int) -> Any:
    return types.Array(dtype, dims, "C", readonly=True)


_SOURCE, _PAIRS, _RANGES = _read(types.uint8, 1), _read(types.int32, 2), _read(types.int64, 2)
_RUNS = _RANGES


FINE, BAD_RANGE = -1, -2


@numba.njit(
    types.UniTuple(types.int64, 2)(_PAIRS, _RANGES, types.int64, types.int64, types.int64),
    cache=True, nogil=True, error_model="numpy",
)  # fmt: skip
def measure(pairs, ranges, source_blocks, target_blocks, block_bytes):
    """(bytes to copy, what is wrong: FINE, BAD_RANGE, or the index of the first pair that names what is not there)."""
    total = np.int64(0)
    for group in range(len(ranges)):
        if not 0 <= ranges[group, 0] <= ranges[group, 1] <= block_bytes:
            return total, np.int64(BAD_RANGE)
    for index in range(len(pairs)):
        group, source, target = pairs[index, 0], pairs[index, 1], pairs[index, 2]
        if not (0 <= group < len(ranges) and 0 <= source < source_blocks and 0 <= target < target_blocks):
            return total, np.int64(index)
        total += ranges[group, 1] - ranges[group, 0]
    return total, np.int64(FINE)


@numba.njit(
    types.void(_SOURCE, types.uint8[::1], _PAIRS, _RANGES, types.int64, types.int64, types.int64),
    cache=True, nogil=True, error_model="numpy",
)  # fmt: skip
def copy_share(source, target, pairs, ranges, block_bytes, begin, end):
    """Copy the bytes ``[begin, end)`` of all that is to be copied, counted over the pairs in order."""
    at, index = np.int64(0), 0
    while index < len(pairs) and at < end:
        group = pairs[index, 0]
        first, size = ranges[group, 0], ranges[group, 1] - ranges[group, 0]
        from_, to = np.int64(pairs[index, 1]), np.int64(pairs[index, 2])
        run = 1
        if size == block_bytes:
            while (
                index + run < len(pairs)
                and pairs[index + run, 0] == group
                and pairs[index + run, 1] == from_ + run
                and pairs[index + run, 2] == to + run
            ):
                run += 1
        if index + run < len(pairs):
            _prefetch(source, pairs[index + run, 1] * np.int64(block_bytes) + ranges[pairs[index + run, 0], 0])
        low, high = max(begin - at, 0), min(end - at, run * size)
        if low < high:
            _copy(source, from_ * block_bytes + first + low, target, to * block_bytes + first + low, high - low)
        at += run * size
        index += run
    _fence()


@numba.njit(
    types.void(_SOURCE, types.uint8[::1], _RUNS, types.int64, types.int64),
    cache=True, nogil=True, error_model="numpy",
)  # fmt: skip
def copy_run_share(source, target, runs, begin, end):
    """Copy the bytes ``[begin, end)`` of all ``runs`` (first byte in source, in target, bytes), counted in order."""
    at = np.int64(0)
    for index in range(len(runs)):
        if at >= end:
            break
        size = runs[index, 2]
        if index + 1 < len(runs):
            _prefetch(source, runs[index + 1, 0])
        low, high = max(begin - at, 0), min(end - at, size)
        if low < high:
            _copy(source, runs[index, 0] + low, target, runs[index, 1] + low, high - low)
        at += size
    _fence()

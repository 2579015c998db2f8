# mypy: ignore-errors
"""Arrays and records in compiled code from their addresses, and calls of compiled functions by theirs.

What differs by dtype is compiled for itself and called by its address: Numba would optimise and translate it again
within each function that calls it.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from headwise.kernels.cpu.records import LAYER, PASS, PLAN

_LONG = ir.IntType(64)


def array_at(dtype: Any) -> Any:
    """Make the function of an address and a length that gives the one-dimensional array which lies there."""
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def at(typing, address, length):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _array(context, builder, kind, args[0], [args[1]], None)

        return kind(types.int64, types.int64), emit

    return at


bytes_at, int8s_at, halves_at, words_at = map(array_at, (types.uint8, types.int8, types.uint16, types.uint32))
shorts_at = array_at(types.int16)
floats_at, ints_at, longs_at = map(array_at, (types.float32, types.int32, types.int64))


def pointer_at(dtype: Any) -> Any:
    """Make the function of an address that gives a C pointer to numbers there.

    For inner loops: unlike of arrays, Numba does not count references to it, nor asks whether an index is negative.
    """
    kind = types.CPointer(dtype)

    @intrinsic
    def at(typing, address):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), emit

    return at


halves_from, int8s_from, bytes_from = map(pointer_at, (types.uint16, types.int8, types.uint8))
shorts_from = pointer_at(types.int16)
floats_from, ints_from, longs_from = map(pointer_at, (types.float32, types.int32, types.int64))


@intrinsic
def address_in(typing, pointer, offset):
    """The address of the number that lies ``offset`` numbers behind a C pointer, or an array's first one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = args[0]
        if isinstance(pointer, types.Array):
            first = context.make_array(pointer)(context, builder, first).data
        return builder.ptrtoint(builder.gep(first, [args[1]]), _LONG)

    return types.int64(pointer, types.int64), emit


def matrix_at(dtype: Any) -> Any:
    """Make the function of an address, rows and columns that gives the contiguous matrix which lies there."""
    kind = types.Array(dtype, 2, "C")

    @intrinsic
    def at(typing, address, rows, columns):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _array(context, builder, kind, args[0], list(args[1:]), None)

        return kind(types.int64, types.int64, types.int64), emit

    return at


float_matrix_at, int_matrix_at, long_matrix_at = map(matrix_at, (types.float32, types.int32, types.int64))


@intrinsic
def heads_at(typing, address, rows, heads, dim, row_stride, head_stride):
    """``float32 [rows, heads, dim]`` at an address, whose rows and heads are so many floats apart."""
    kind = types.Array(types.float32, 3, "A")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, rows, heads, dim, *strides = args
        four = _LONG(4)
        steps = [*(builder.mul(stride, four) for stride in strides), four]
        return _array(context, builder, kind, address, [rows, heads, dim], steps)

    return kind(*[types.int64] * 6), emit


def _array(context: Any, builder: Any, kind: Any, address: Any, shape: list[Any], strides: list[Any] | None) -> Any:
    array, element = context.make_array(kind)(context, builder), context.get_data_type(kind.dtype)
    size = _LONG(context.get_abi_sizeof(element))
    if strides is None:
        strides = [size]
        for length in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(address, element.as_pointer())
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


def record_at(dtype: Any) -> Any:
    """Make the function of an address that gives the record (of a NumPy dtype) which lies there."""
    kind = numba.from_dtype(dtype)

    @intrinsic
    def at(typing, address):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), emit

    return at


layer_at, pass_at, plan_at = map(record_at, (LAYER, PASS, PLAN))


@intrinsic
def call_at(typing, address, arguments):
    """Call the C function at an address with a tuple of int64."""
    count = len(arguments)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_LONG] * count)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(builder, args[1], count))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), emit

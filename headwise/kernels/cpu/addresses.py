# mypy: ignore-errors
"""Arrays in compiled code from their addresses, and calls of compiled functions by theirs.

Weights, caches and rooms are handed to compiled code as tables of numbers: so that one call can stand for all layers of
a model, and so that what differs by dtype is compiled for itself, once, and not again within all that uses it. Whoever
makes such a table keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_LONG = ir.IntType(64)


def _array_at(dtype: Any) -> Any:
    """Make the function of an address and a length that gives the one-dimensional array which lies there."""
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def array_at(typing, address, length):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _array(context, builder, kind, args[0], [args[1]], None)

        return kind(types.int64, types.int64), emit

    return array_at


bytes_at, int8s_at, halves_at, words_at = map(_array_at, (types.uint8, types.int8, types.uint16, types.uint32))
floats_at, ints_at, longs_at = map(_array_at, (types.float32, types.int32, types.int64))


def _matrix_at(dtype: Any) -> Any:
    """Make the function of an address, rows and columns that gives the contiguous matrix which lies there."""
    kind = types.Array(dtype, 2, "C")

    @intrinsic
    def matrix_at(typing, address, rows, columns):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _array(context, builder, kind, args[0], list(args[1:]), None)

        return kind(types.int64, types.int64, types.int64), emit

    return matrix_at


float_matrix_at, int_matrix_at, long_matrix_at = map(_matrix_at, (types.float32, types.int32, types.int64))


@intrinsic
def heads_at(typing, address, rows, heads, dim, stride):
    """``float32 [rows, heads, dim]`` at an address, whose rows are ``stride`` floats apart."""
    kind = types.Array(types.float32, 3, "A")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, rows, heads, dim, stride = args
        four = _LONG(4)
        steps = [builder.mul(stride, four), builder.mul(dim, four), four]
        return _array(context, builder, kind, address, [rows, heads, dim], steps)

    return kind(*[types.int64] * 5), emit


@intrinsic
def contiguous_heads_at(typing, address, rows, heads, dim):
    """``float32 [rows, heads, dim]`` at an address."""
    kind = types.Array(types.float32, 3, "C")

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _array(context, builder, kind, args[0], list(args[1:]), None)

    return kind(*[types.int64] * 4), emit


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


def _caller(count: int) -> Any:
    """Make the function that calls the C function at an address with ``count`` integers."""
    kind = ir.FunctionType(ir.VoidType(), [_LONG] * count)

    @intrinsic
    def call(typing, address, arguments):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = builder.inttoptr(args[0], kind.as_pointer())
            builder.call(function, cgutils.unpack_tuple(builder, args[1], count))
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.int64, count)), emit

    return call


call_3, call_4, call_12 = _caller(3), _caller(4), _caller(12)

# mypy: ignore-errors
"""Rows of strided arrays in compiled code, as contiguous arrays that borrow their memory."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


@intrinsic
def row_of(typing, array, i, j):
    """``array[i, j]`` of a three-dimensional array whose last dimension is contiguous, whatever its layout says.

    Compiled loops over a row of a strided array do not become vector loops; over this one they do. Valid as long as
    the array is.
    """
    row = types.Array(array.dtype, 1, "C", readonly=not array.mutable)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(array)(context, builder, args[0])
        length = cgutils.unpack_tuple(builder, source.shape)[2]
        steps = cgutils.unpack_tuple(builder, source.strides)
        byte = builder.bitcast(source.data, cgutils.voidptr_t)
        for index, step in zip(args[1:], steps[:2], strict=True):
            byte = builder.gep(byte, [builder.mul(index, step)])
        target = context.make_array(row)(context, builder)
        populate_array(
            target,
            data=builder.bitcast(byte, source.data.type),
            shape=[length],
            strides=[source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
        )
        return target._getvalue()

    return row(array, types.intp, types.intp), emit

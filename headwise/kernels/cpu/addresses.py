# mypy: ignore-errors
"""Arrays in compiled code from their addresses: so that one table of numbers can stand for all weights of a model.

Whoever makes such a table keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


def _array_at(dtype: Any) -> Any:
    """Make the function of an address and a count that gives the one-dimensional array which lies there."""
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def array_at(typing, address, count):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(kind)(context, builder)
            itemsize = context.get_abi_sizeof(context.get_data_type(dtype))
            data = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            size = cgutils.intp_t(itemsize)
            populate_array(array, data=data, shape=[args[1]], strides=[size], itemsize=size, meminfo=None)
            return array._getvalue()

        return kind(types.int64, types.int64), emit

    return array_at


bytes_at, halves_at, floats_at, ints_at = map(_array_at, (types.uint8, types.uint16, types.float32, types.int32))

# mypy: ignore-errors
"""Calls of compiled functions by their address.

Numba optimises and translates a function again within each function that calls it, and within each of the several
that a parallel loop is made of. A large function is better called by its address: it is translated once.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def address_of(function: Any, signature: Any) -> int:
    """The address of a function that is compiled for ``signature``, valid as long as the function lives."""
    compiled = function.overloads[signature.args]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


@intrinsic
def call_at(typing, address, arguments):
    """Call the function at ``address`` (`address_of`), which returns nothing and raises nothing, with a tuple.

    The arguments must be what the function was compiled for, but for arrays' layout and whether they are read-only.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args[1].types
        callee = context.call_conv.get_function_type(types.none, kinds).as_pointer()
        values = [builder.extract_value(args[1], index) for index in range(len(kinds))]
        context.call_conv.call_function(builder, builder.inttoptr(args[0], callee), types.none, kinds, values)
        return context.get_dummy_value()

    return types.void(address, arguments), emit

"""A layer's experts in arrays that have them all, as kernels take them that compute all experts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.experts import ExpertShape, StackedExperts
from headwise.runtime.ops.base import GatedWeights, Mixture

Array = Any
_Parts = tuple[Array, Array, Array | None, Array | None]
"""An expert's weights ``gate | up`` and down, ``[out, in]``, and their biases."""


def stack_experts(
    xp: Any,
    upload: Callable[[NDArray[Any]], Array],
    mixture: Mixture,
    routed: Iterable[GatedWeights],
    shared: GatedWeights | None,
) -> StackedExperts:
    """Experts, and the shared one cut into experts of the same size, in arrays of ``xp``, which is NumPy or CuPy.

    Weights are ``[in, out]``, as `ArrayOps` prepares them. Beside the stack there is never more than one expert.

    Raises:
        ValueError: the shared expert is no whole number of others.
    """
    routing, made = mixture.routing, None
    for index, parts in enumerate(_all(map(_parts, routed), shared)):
        gate_up, down, gate_up_bias, down_bias = parts
        if made is None:
            extra = 0 if shared is None else _pieces(shared, down.shape[1])
            count, has_bias = routing.experts + extra, gate_up_bias is not None
            sizes, dtype = (down.shape[0], down.shape[1]), gate_up.dtype.name
            shape = ExpertShape(
                routing, extra, *sizes, mixture.activation, dtype, has_bias, weighs_input=mixture.weighs_input
            )
            made = StackedExperts(
                shape=shape,
                gate_up=xp.empty((count, *gate_up.shape), gate_up.dtype),
                down=xp.empty((count, *down.shape), down.dtype),
                gate_up_bias=xp.zeros((count, len(gate_up)), gate_up.dtype) if has_bias else None,
                down_bias=xp.zeros((count, len(down)), down.dtype) if has_bias else None,
                correction=_uploaded(upload, mixture.correction),
                scales=_uploaded(upload, mixture.scales),
            )
        made.gate_up[index], made.down[index] = gate_up, down
        for stack, bias in ((made.gate_up_bias, gate_up_bias), (made.down_bias, down_bias)):
            if stack is not None and bias is not None:  # of a down projection, rank 0 has one
                stack[index] = bias
    assert made is not None, "a mixture has experts"
    return made


def _all(routed: Iterable[_Parts], shared: GatedWeights | None) -> Iterator[_Parts]:
    inner = 0
    for parts in routed:
        inner = parts[1].shape[1]
        yield parts
    if shared is None:
        return
    gate_up, down, gate_up_bias, down_bias = _parts(shared)
    if gate_up_bias is not None or down_bias is not None:
        raise ValueError("a shared expert with biases cannot be cut into several")
    gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
    for piece in range(_pieces(shared, inner)):
        rows = slice(piece * inner, (piece + 1) * inner)
        joined = gate_up[: 2 * inner].copy()
        joined[:inner], joined[inner:] = gate[rows], up[rows]
        yield joined, down[:, rows], None, None


def _parts(mlp: GatedWeights) -> _Parts:
    return mlp.gate_up.weight.T, mlp.down.weight.T, mlp.gate_up.bias, mlp.down.bias


def _pieces(shared: GatedWeights, inner: int) -> int:
    width = shared.down.weight.shape[0]
    if width % inner:
        raise ValueError(f"a shared expert of size {width} is no whole number of experts of size {inner}")
    return int(width // inner)


def _uploaded(upload: Callable[[NDArray[Any]], Array], values: NDArray[np.float32] | None) -> Array | None:
    return None if values is None else upload(np.ascontiguousarray(values, np.float32))

"""A layer's experts in arrays that have them all, as kernels take them that compute all experts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.experts import ExpertShape, StackedExperts
from headwise.kernels.cuda.packed import PackedForm, PackedMatrix
from headwise.kernels.cuda.packed_parts import PackedStack, columns_of, rows_of, unlike
from headwise.kernels.experts import Mixture
from headwise.runtime.ops.base import GatedWeights

Array = Any
_Matrix: TypeAlias = Array | PackedMatrix
"""A weight ``[out, in]``: numbers, or codes."""
_Parts = tuple[_Matrix, _Matrix, Array | None, Array | None]
"""An expert's weights ``gate | up`` and down, and their biases."""


def stack_experts(
    xp: Any,
    upload: Callable[[NDArray[Any]], Array],
    mixture: Mixture,
    dtype: str,
    routed: Iterable[GatedWeights],
    shared: GatedWeights | None,
) -> StackedExperts:
    """Experts, and the shared one cut into experts of the same size, in arrays of ``xp``, which is NumPy or CuPy.

    Weights are as `GpuOps` prepares them: ``[in, out]``, or codes. Beside stacks there is never more than one expert.

    dtype: of tokens

    Raises:
        ValueError: the shared expert is no whole number of others.
        ConfigError: experts are of codes of unlike forms, or the shared one cannot be cut.
    """
    stacks: _Stacks | None = None
    inner = 0
    for index, parts in enumerate(_all(xp, map(_parts, routed), shared)):
        if stacks is None:
            inner = parts[1].shape[1]
            stacks = _Stacks(xp, mixture.routing.experts + (0 if shared is None else _pieces(shared, inner)), parts)
        stacks.put(index, parts)
    assert stacks is not None, "a mixture has experts"
    gate_up, down = stacks.gate_up.made(), stacks.down.made()
    shape = ExpertShape(
        mixture.routing,
        stacks.count - mixture.routing.experts,
        gate_up.shape[-1],
        inner,
        mixture.activation,
        dtype,
        has_bias=stacks.gate_up_bias is not None,
        weighs_input=mixture.weighs_input,
        up_codes=_form(gate_up),
        down_codes=_form(down),
    )
    correction, scales, logit_bias = (
        _uploaded(upload, values) for values in (mixture.correction, mixture.scales, mixture.logit_bias)
    )
    return StackedExperts(shape, gate_up, down, stacks.gate_up_bias, stacks.down_bias, correction, scales, logit_bias)


class _Stacks:
    """The weights and biases of ``count`` experts like ``first``."""

    def __init__(self, xp: Any, count: int, first: _Parts) -> None:
        gate_up, down, gate_up_bias, _ = first
        self.count = count
        self.gate_up, self.down = (
            (PackedStack if isinstance(one, PackedMatrix) else _FloatStack)(xp, count, one) for one in (gate_up, down)
        )
        self.gate_up_bias = self.down_bias = None
        if gate_up_bias is not None:
            self.gate_up_bias, self.down_bias = (
                xp.zeros((count, one.shape[0]), gate_up_bias.dtype) for one in (gate_up, down)
            )

    def put(self, index: int, parts: _Parts) -> None:
        gate_up, down, gate_up_bias, down_bias = parts
        for stack, matrix in ((self.gate_up, gate_up), (self.down, down)):
            if isinstance(stack, PackedStack) != isinstance(matrix, PackedMatrix):
                raise unlike(index)
            stack.put(index, matrix)
        for biases, bias in ((self.gate_up_bias, gate_up_bias), (self.down_bias, down_bias)):
            if biases is not None and bias is not None:  # of a down projection, rank 0 has one
                biases[index] = bias


class _FloatStack:
    """`PackedStack`, of numbers."""

    def __init__(self, xp: Any, count: int, first: Array) -> None:
        self._every = xp.empty((count, *first.shape), first.dtype)

    def put(self, index: int, matrix: Array) -> None:
        self._every[index] = matrix

    def made(self) -> Array:
        return self._every


def _all(xp: Any, routed: Iterable[_Parts], shared: GatedWeights | None) -> Iterator[_Parts]:
    inner = 0
    for parts in routed:
        inner = parts[1].shape[1]
        yield parts
    if shared is None:
        return
    gate_up, down, gate_up_bias, down_bias = _parts(shared)
    if gate_up_bias is not None or down_bias is not None:
        raise ValueError("a shared expert with biases cannot be cut into several")
    up = gate_up.shape[0] // 2
    for piece in range(_pieces(shared, inner)):
        start, stop = piece * inner, (piece + 1) * inner
        joined = _rows(xp, gate_up, [slice(start, stop), slice(up + start, up + stop)])
        yield joined, _columns(xp, down, start, stop), None, None


def _rows(xp: Any, matrix: _Matrix, parts: list[slice]) -> _Matrix:
    if isinstance(matrix, PackedMatrix):
        return rows_of(xp, matrix, parts)
    return xp.concatenate([matrix[part] for part in parts])


def _columns(xp: Any, matrix: _Matrix, start: int, stop: int) -> _Matrix:
    return columns_of(xp, matrix, start, stop) if isinstance(matrix, PackedMatrix) else matrix[:, start:stop]


def _parts(mlp: GatedWeights) -> _Parts:
    return _matrix(mlp.gate_up.weight), _matrix(mlp.down.weight), mlp.gate_up.bias, mlp.down.bias


def _matrix(weight: Any) -> _Matrix:
    return weight if isinstance(weight, PackedMatrix) else weight.T


def _form(stack: _Matrix) -> PackedForm | None:
    return stack.form if isinstance(stack, PackedMatrix) else None


def _pieces(shared: GatedWeights, inner: int) -> int:
    width = _matrix(shared.down.weight).shape[1]
    if width % inner:
        raise ValueError(f"a shared expert of size {width} is no whole number of experts of size {inner}")
    return int(width // inner)


def _uploaded(upload: Callable[[NDArray[Any]], Array], values: NDArray[np.float32] | None) -> Array | None:
    return None if values is None else upload(np.ascontiguousarray(values, np.float32))

"""A layer's experts in arrays that have them all, as kernels take them that compute all experts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.cuda.experts import MOST_ASSIGNED, ExpertShape, StackedExperts
from headwise.kernels.cuda.packed import PackedForm, PackedMatrix
from headwise.kernels.cuda.packed_parts import PackedStack, are_alike, columns_of, rows_of, unlike
from headwise.kernels.experts import Mixture
from headwise.kernels.fused import is_gated
from headwise.runtime.ops.base import MlpWeights

Array = Any
_Matrix: TypeAlias = Array | PackedMatrix
"""A weight ``[out, in]``: numbers, or codes."""
_Parts = tuple[_Matrix, _Matrix, Array | None, Array | None]
"""An expert's weights ``gate | up``, or up, and down, and their biases."""


def stack_experts(
    xp: Any,
    upload: Callable[[NDArray[Any]], Array],
    mixture: Mixture,
    dtype: str,
    routed: Iterable[MlpWeights],
    shared: MlpWeights | None,
) -> StackedExperts:
    """Experts, and the shared one cut into experts of the same size, in arrays of ``xp``, which is NumPy or CuPy.

    `can_be_cut` says whether that is possible.

    Weights are as `GpuOps` prepares them: ``[in, out]``, or codes. Beside stacks there is never more than one expert.

    dtype: of tokens

    Raises:
        ValueError: the shared expert is no whole number of others.
        ConfigError: experts are of codes of unlike forms, or the shared one cannot be cut.
    """
    stacks: _Stacks | None = None
    inner = 0
    for index, parts in enumerate(_all(xp, map(_parts, routed), shared, is_gated(mixture.activation))):
        if stacks is None:
            inner = parts[1].shape[1]
            stacks = _Stacks(xp, mixture.routing.experts + (0 if shared is None else _pieces(shared, inner)), parts)
        stacks.put(index, parts)
    assert stacks is not None, "a mixture has experts"
    into, down = stacks.into.made(), stacks.down.made()
    shape = ExpertShape(
        mixture.routing,
        stacks.count - mixture.routing.experts,
        into.shape[-1],
        inner,
        mixture.activation,
        dtype,
        has_bias=stacks.into_bias is not None,
        weighs_input=mixture.weighs_input,
        up_codes=_form(into),
        down_codes=_form(down),
    )
    correction, scales, logit_bias = (
        _uploaded(upload, values) for values in (mixture.correction, mixture.scales, mixture.logit_bias)
    )
    return StackedExperts(shape, into, down, stacks.into_bias, stacks.down_bias, correction, scales, logit_bias)


class _Stacks:
    """The weights and biases of ``count`` experts like ``first``."""

    def __init__(self, xp: Any, count: int, first: _Parts) -> None:
        into, down, into_bias, _ = first
        self.count = count
        self.into, self.down = (
            (PackedStack if isinstance(one, PackedMatrix) else _FloatStack)(xp, count, one) for one in (into, down)
        )
        self.into_bias = self.down_bias = None
        if into_bias is not None:
            self.into_bias, self.down_bias = (xp.zeros((count, one.shape[0]), into_bias.dtype) for one in (into, down))

    def put(self, index: int, parts: _Parts) -> None:
        into, down, into_bias, down_bias = parts
        for stack, matrix in ((self.into, into), (self.down, down)):
            if isinstance(stack, PackedStack) != isinstance(matrix, PackedMatrix):
                raise unlike(index)
            stack.put(index, matrix)
        for biases, bias in ((self.into_bias, into_bias), (self.down_bias, down_bias)):
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


def can_be_cut(xp: Any, mixture: Mixture, first: MlpWeights, shared: MlpWeights) -> bool:
    """Whether ``shared`` is so many experts like ``first``, one of the routed ones, that kernels compute them at once.

    Else it is to be computed by itself.
    """
    whole, (into, down, *_) = _parts(shared), _parts(first)
    inner, width = down.shape[1], whole[1].shape[1]
    if width % inner or whole[2] is not None or whole[3] is not None:
        return False
    if mixture.routing.per_token + width // inner > MOST_ASSIGNED:
        return False
    try:
        piece = _piece(xp, whole, 0, inner, is_gated(mixture.activation))
    except ConfigError:  # groups of codes are not computed from where they are cut
        return False
    return all(map(_is_like, piece[:2], (into, down)))


def _is_like(matrix: _Matrix, other: _Matrix) -> bool:
    if isinstance(matrix, PackedMatrix) and isinstance(other, PackedMatrix):
        return are_alike(matrix, other)
    return not isinstance(matrix, PackedMatrix) and not isinstance(other, PackedMatrix)


def _all(xp: Any, routed: Iterable[_Parts], shared: MlpWeights | None, gated: bool) -> Iterator[_Parts]:
    inner = 0
    for parts in routed:
        inner = parts[1].shape[1]
        yield parts
    if shared is None:
        return
    whole = _parts(shared)
    if whole[2] is not None or whole[3] is not None:
        raise ValueError("a shared expert with biases cannot be cut into several")
    for piece in range(_pieces(shared, inner)):
        yield _piece(xp, whole, piece, inner, gated)


def _piece(xp: Any, whole: _Parts, piece: int, inner: int, gated: bool) -> _Parts:
    """The expert of size ``inner`` with that number in an MLP of several."""
    into, down, *_ = whole
    start, stop = piece * inner, (piece + 1) * inner
    up = down.shape[1] if gated else 0
    rows = [slice(up + start, up + stop)]
    return _rows(xp, into, [slice(start, stop), *rows] if gated else rows), _columns(xp, down, start, stop), None, None


def _rows(xp: Any, matrix: _Matrix, parts: list[slice]) -> _Matrix:
    if isinstance(matrix, PackedMatrix):
        return rows_of(xp, matrix, parts)
    return xp.concatenate([matrix[part] for part in parts])


def _columns(xp: Any, matrix: _Matrix, start: int, stop: int) -> _Matrix:
    return columns_of(xp, matrix, start, stop) if isinstance(matrix, PackedMatrix) else matrix[:, start:stop]


def _parts(mlp: MlpWeights) -> _Parts:
    return _matrix(mlp.into.weight), _matrix(mlp.down.weight), mlp.into.bias, mlp.down.bias


def _matrix(weight: Any) -> _Matrix:
    return weight if isinstance(weight, PackedMatrix) else weight.T


def _form(stack: _Matrix) -> PackedForm | None:
    return stack.form if isinstance(stack, PackedMatrix) else None


def _pieces(shared: MlpWeights, inner: int) -> int:
    width = _matrix(shared.down.weight).shape[1]
    if width % inner:
        raise ValueError(f"a shared expert of size {width} is no whole number of experts of size {inner}")
    return int(width // inner)


def _uploaded(upload: Callable[[NDArray[Any]], Array], values: NDArray[np.float32] | None) -> Array | None:
    return None if values is None else upload(np.ascontiguousarray(values, np.float32))

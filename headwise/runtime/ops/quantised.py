"""Group-quantised weights: small integers with a scale for each group of a row, from GGUF files or made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.e4m3 import E4M3

INT8_GROUP = 32
"""Neighbouring numbers of a row that share a scale in int8 weights."""

_LARGEST = np.float32(127)
_FLOAT = "float8_e4m3fn"
_BITS = (4, 5, 6, 8)
_BLOCK_ELEMENTS = 1 << 20
"""Numbers that are quantised at a time, so that temporary arrays stay in a core's cache, or near it."""


_Index: TypeAlias = tuple[slice | NDArray[np.int64], slice]


class CodeForm(NamedTuple):
    """What a kernel must know to read a matrix of codes: their dtype, bits and group, and whether there are minima."""

    dtype: str
    bits: int
    group: int
    has_minimum: bool


def common_form(forms: Sequence[CodeForm]) -> CodeForm:
    """The form of matrices of these forms together, which have no other one by then: a group that divides all, minima
    if one has some, and the fewest bits that hold all codes, signed if some are; or float8_e4m3fn if all are that.
    """
    if len(set(forms)) == 1:
        return forms[0]
    group, has_minimum = gcd(*(form.group for form in forms)), any(form.has_minimum for form in forms)
    if all(form.dtype == _FLOAT for form in forms):
        return CodeForm(_FLOAT, 8, group, has_minimum)
    is_unsigned = all(form.dtype == "uint8" and form.bits < 8 for form in forms)
    bits = max(form.bits + (form.dtype == "uint8" and not is_unsigned) for form in forms)
    taken = next((each for each in _BITS if each >= bits), 8)
    return CodeForm("uint8" if is_unsigned else "int8", taken, group, has_minimum)


@dataclass(frozen=True, eq=False)
class GroupQuantised:
    """A matrix ``[N, K]`` as small integers, the codes, with a scale and a minimum for each ``group`` of a row:

        w[n, k] = scale[n, k // group] * codes[n, k] + minimum[n, k // group]

    codes:   uint8 or int8 ``[N, K]``, each in a byte even if it has fewer bits; may be a view of a mapped file
    scale:   float32 ``[N, K // group]``
    minimum: float32 ``[N, K // group]``; None: 0 everywhere
    group:   number of neighbours in a row that share a scale and a minimum; divides ``K``
    bits:    4 if all codes are in 0..15 (uint8) or -8..7 (int8), 5 or 6 if they are in twice or four times that, else 8
    is_float: codes (uint8) are the bits of float8_e4m3fn, which stand for its numbers

    Raises `ValueError` if shapes, group or bits do not go together.
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scale: NDArray[np.float32]
    minimum: NDArray[np.float32] | None
    group: int
    bits: int
    is_float: bool = False

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = (rows, columns // self.group)
        minimum = groups if self.minimum is None else self.minimum.shape
        if columns % self.group or not groups == self.scale.shape == minimum or self.bits not in _BITS:
            raise ValueError(
                f"codes {self.codes.shape} of {self.bits} bits in groups of {self.group} do not go with scales "
                f"{self.scale.shape} and minima {minimum}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def form(self) -> CodeForm:
        dtype = _FLOAT if self.is_float else self.codes.dtype.name
        return CodeForm(dtype, self.bits, self.group, self.minimum is not None)

    def rows(self, start: int, stop: int) -> GroupQuantised:
        """``[start:stop]``, sharing memory."""
        return self._part((slice(start, stop), slice(None)), (slice(start, stop), slice(None)))

    def taken(self, rows: NDArray[np.int64]) -> GroupQuantised:
        """``[rows]``, copied."""
        return self._part((rows, slice(None)), (rows, slice(None)))

    def columns(self, start: int, stop: int) -> GroupQuantised:
        """``[:, start:stop]``, sharing memory; raises `ValueError` unless both are multiples of ``group``."""
        if start % self.group or stop % self.group:
            raise ValueError(f"columns {start} to {stop} are no multiples of a group of {self.group}")
        groups = slice(start // self.group, stop // self.group)
        return self._part((slice(None), slice(start, stop)), (slice(None), groups))

    def _part(self, codes: _Index, groups: _Index) -> GroupQuantised:
        minimum = None if self.minimum is None else self.minimum[groups]
        return replace(self, codes=self.codes[codes], scale=self.scale[groups], minimum=minimum)

    def dequantised(self) -> NDArray[np.float32]:
        """The matrix as float32 ``[N, K]``."""
        rows, columns = self.shape
        numbers = E4M3[self.codes] if self.is_float else self.codes.astype(np.float32)
        values = numbers.reshape(rows, columns // self.group, self.group)
        values *= self.scale[..., None]
        if self.minimum is not None:
            values += self.minimum[..., None]
        return values.reshape(rows, columns)

    @staticmethod
    def concatenate(parts: Sequence[GroupQuantised], axis: int) -> GroupQuantised:
        """Parts one below the other (axis 0) or side by side (axis 1), without loss.

        Parts of different forms get the `common_form`, with minima of 0 where there were none.

        Raises:
            ValueError: a part does not fit the common form: one of several is float8_e4m3fn, or a code is above 127.
        """
        if len(parts) == 1:
            return parts[0]
        if len({part.form for part in parts}) > 1:
            form = common_form([part.form for part in parts])
            parts = [part._widened(form) for part in parts]
        minima = [part.minimum for part in parts if part.minimum is not None]
        return GroupQuantised(
            np.concatenate([part.codes for part in parts], axis),
            np.concatenate([part.scale for part in parts], axis),
            np.concatenate(minima, axis) if minima else None,
            parts[0].group,
            parts[0].bits,
            parts[0].is_float,
        )

    def _widened(self, form: CodeForm) -> GroupQuantised:
        codes, is_float = self.codes, form.dtype == _FLOAT
        if not is_float:
            if self.is_float or (self.bits == 8 and codes.dtype == np.uint8 and codes.max(initial=0) > _LARGEST):
                raise ValueError(f"a matrix of form {self.form} cannot be one of form {form}")
            codes = codes.astype(form.dtype, copy=False)
        scale, minimum, times = self.scale, self.minimum, self.group // form.group
        if form.has_minimum and minimum is None:
            minimum = np.zeros_like(scale)
        if times > 1:
            scale = scale.repeat(times, axis=1)
            minimum = None if minimum is None else minimum.repeat(times, axis=1)
        return GroupQuantised(codes, scale, minimum, form.group, form.bits, is_float)


def quantise_int8(weight: NDArray[np.float32], group: int = INT8_GROUP) -> GroupQuantised:
    """Quantise ``weight [N, K]`` to int8, symmetrically: in each group of a row the largest magnitude becomes 127.

    Rounds half to even. Takes little memory beside the result.

    Raises:
        ConfigError: ``K`` is no multiple of ``group``.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ConfigError(
            f"weights_dtype int8 has a scale for each {group} numbers of a row, and a rank's part of a weight has rows "
            f"of {columns}: choose weights_dtype bfloat16"
        )
    codes = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, columns // group), np.float32)
    step = max(1, _BLOCK_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        at = slice(start, start + step)
        _quantise(weight[at].reshape(-1, group), codes[at].reshape(-1, group), scale[at].reshape(-1))
    return GroupQuantised(codes, scale, None, group, 8)


def _quantise(values: NDArray[np.float32], codes: NDArray[np.int8], scale: NDArray[Any]) -> None:
    """Quantise ``G`` groups: ``values [G, group]`` into ``codes [G, group]`` and ``scale [G]``."""
    np.abs(values).max(axis=1, out=scale)
    scale /= _LARGEST
    divisor = np.where(scale > 0, scale, np.float32(1))  # a group whose scale is 0 becomes zeros
    scaled = values / divisor[:, None]
    np.rint(scaled, out=scaled)
    np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
    codes[...] = scaled


Matrix: TypeAlias = NDArray[Any] | GroupQuantised
"""A weight ``[N, K]`` as it was loaded, before `TensorOps` prepares it: float32, or kept as it is stored."""


def as_floats(matrix: Matrix) -> NDArray[Any]:
    """A matrix as floats ``[N, K]``: dequantised to float32, or else itself, in the dtype that it has."""
    return matrix.dequantised() if isinstance(matrix, GroupQuantised) else matrix


def as_float32(matrix: Matrix) -> NDArray[np.float32]:
    """A matrix as float32 ``[N, K]``: dequantised, converted, or else itself."""
    floats: NDArray[np.float32] = as_floats(matrix).astype(np.float32, copy=False)
    return floats

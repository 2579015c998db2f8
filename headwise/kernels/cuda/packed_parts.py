"""Parts of weights that are codes on the device, and stacks of them: what a layer's experts are put together from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np

from headwise.errors import ConfigError
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.packed import MIDDLE, PackedForm, PackedMatrix, bits_taken, check_groups, form_of


def rows_of(xp: Any, matrix: PackedMatrix, parts: Sequence[slice]) -> PackedMatrix:
    """Rows of ``matrix``, one part below the other. xp: NumPy or CuPy"""
    codes = xp.concatenate([matrix.codes[part] for part in parts])
    scale, minimum = (
        None if each is None else xp.concatenate([each[:, part] for part in parts], axis=1)
        for each in (matrix.scale, matrix.minimum)
    )
    return PackedMatrix(matrix.form, (len(codes), matrix.shape[1]), codes, scale, minimum)


def columns_of(xp: Any, matrix: PackedMatrix, start: int, stop: int) -> PackedMatrix:
    """Columns ``start`` to ``stop`` of ``matrix``. Codes of 4 bits take 8 where `bits_taken` says so.

    Where they begin or end within a group, groups are as small as that takes.

    Raises:
        ConfigError: such groups are not computed from.
    """
    form, width, size = matrix.form, matrix.shape[0], stop - start
    group = gcd(form.group, start, stop) if form.group else size
    codes = matrix.codes
    if form.bits == 4:
        codes = xp.concatenate([codes & 15, codes >> 4], axis=1)
    codes = codes[:, start:stop]
    bits = bits_taken(form.bits, size, group)
    check_groups(size, group, bits)
    if bits == 4:
        codes = codes[:, : size // 2] | codes[:, size // 2 :] << 4
    elif form.bits == 4:
        codes = codes.astype(np.int8) - np.int8(MIDDLE)
    groups = xp.asarray(np.arange(start, stop, group) // (form.group or stop))
    scale, minimum = (None if each is None else each[groups] for each in (matrix.scale, matrix.minimum))
    taken = form_of(form.dtype, bits, group, form.has_minimum, size, form.is_float)
    return PackedMatrix(taken, (width, size), xp.ascontiguousarray(codes), scale, minimum)


class PackedStack:
    """Matrices of one form as one, with an axis of them in front. Some may have minima, and others none.

    xp: NumPy or CuPy; count: of matrices; first: one like all of them
    """

    def __init__(self, xp: Any, count: int, first: PackedMatrix) -> None:
        self._xp, self._count, self._form, self._shape = xp, count, first.form, first.shape
        self._codes = xp.empty((count, *first.codes.shape), first.codes.dtype)
        self._scale = xp.empty((count, *first.scale.shape), np.float32)
        self._minimum: Array | None = None

    def put(self, index: int, matrix: PackedMatrix) -> None:
        """Make ``matrix`` the one with that number.

        Raises:
            ConfigError: it is of another form than the first one.
        """
        if not _are_alike(matrix, self._form, self._shape):
            raise unlike(index)
        self._codes[index], self._scale[index] = matrix.codes, matrix.scale
        if matrix.minimum is None:
            return
        if self._minimum is None:
            self._minimum = self._xp.zeros(self._scale.shape, np.float32)
        self._minimum[index] = matrix.minimum

    def made(self) -> PackedMatrix:
        """All of them."""
        form = replace(self._form, has_minimum=self._minimum is not None)
        return PackedMatrix(form, self._shape, self._codes, self._scale, self._minimum)


def unlike(index: int) -> ConfigError:
    """Of an expert that cannot be in a stack with the first one."""
    return ConfigError(
        f"expert {index} of a layer is not quantised as its first one is, and a GPU computes from experts that are "
        "alike: choose weights_dtype auto"
    )


def are_alike(matrix: PackedMatrix, other: PackedMatrix) -> bool:
    """Whether both can be in one `PackedStack`."""
    return _are_alike(matrix, other.form, other.shape)


def _are_alike(matrix: PackedMatrix, form: PackedForm, shape: tuple[int, int]) -> bool:
    return replace(matrix.form, has_minimum=form.has_minimum) == form and matrix.shape == shape

"""Parts of weights that are codes on the device, and stacks of them: what a layer's experts are put together from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.errors import ConfigError
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.packed import PackedForm, PackedMatrix, bits_taken, check_groups, form_of


def rows_of(xp: Any, matrix: PackedMatrix, parts: Sequence[slice]) -> PackedMatrix:
    """Rows of ``matrix``, one part below the other. xp: NumPy or CuPy"""
    codes = xp.concatenate([matrix.codes[part] for part in parts])
    scale, minimum = (
        None if each is None else xp.concatenate([each[:, part] for part in parts], axis=1)
        for each in (matrix.scale, matrix.minimum)
    )
    return PackedMatrix(matrix.form, (len(codes), matrix.shape[1]), codes, scale, minimum)


def columns_of(xp: Any, matrix: PackedMatrix, start: int, stop: int) -> PackedMatrix:
    """Columns ``start`` to ``stop`` of ``matrix``; codes of 4 bits take 8 where `bits_taken` says so.

    Raises:
        ConfigError: a range begins or ends within a group, or is not computed from.
    """
    form, width = matrix.form, matrix.shape[0]
    group = form.group or stop - start  # a row of one group has one in each of its parts
    if form.group and (start % group or stop % group):
        raise ConfigError(
            f"a shared expert's weights in groups of {group} columns cannot be cut at columns {start} and {stop}: "
            "choose another tp_size, or weights_dtype auto"
        )
    codes = matrix.codes
    if form.bits == 4:
        codes = xp.concatenate([codes & 15, codes >> 4], axis=1)
    codes, size = codes[:, start:stop], stop - start
    bits = bits_taken(form.bits, size, group)
    check_groups(size, group, bits)
    if bits == 4:
        codes = codes[:, : size // 2] | codes[:, size // 2 :] << 4
    elif form.bits == 4:
        codes = codes.astype(np.int8) - np.int8(8)
    groups = slice(start // group, stop // group) if form.group else slice(None)
    scale, minimum = (
        None if each is None else xp.ascontiguousarray(each[groups]) for each in (matrix.scale, matrix.minimum)
    )
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
        if _alike(matrix.form) != _alike(self._form) or matrix.shape != self._shape:
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


def _alike(form: PackedForm) -> PackedForm:
    return replace(form, has_minimum=False)

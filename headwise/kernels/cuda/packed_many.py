"""Products of some dozens of rows with packed matrices on a GPU: the host half of `packed_many.cu`, which says how.

What a product takes, by this model (H200: memory 4.0 TB/s as copies reach it, second-level cache 5.5 TB/s, 132
multiprocessors at 1.76 GHz), is the largest of

- codes and factors, from memory, once;
- codes and x, from the second-level cache: ``width / 128`` times x, ``rows / tokens`` times the codes;
- tensor cores: 5.8 clocks for an instruction of 2,048 products, of each of the four of a multiprocessor; half as many
  again where there are minima.

A weight of 14,336 x 4,096 in int8 times 64 rows: 15, 21 and 11 us. `packed.cu` took 59 us for it, which is what 352 MB
take by way of that cache: it has x read by every 32 rows of the weight. Unmeasured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.kernels.cuda.launch import Array, Kernel, TritonLauncher, addresses_of
from headwise.kernels.cuda.packed import (
    FEW_ROWS,
    CodesTile,
    PackedForm,
    PackedMatrix,
    defines_of,
    group_steps,
    multiplies_codes,
    product_step,
)
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90

SOURCE, KERNEL = "packed_many.cu", "multiply_packed_many"
MANY_ROWS = 192
"""Rows up to which codes are multiplied: with more, floats made of them once are, by the model above."""

TOKENS = (32, 64)
"""Of a tile of out: the fewest that hold all rows, or the most."""

_WARPS, _WARP, _ROWS, _EACH_WARP, _DEPTH_WARPS, _CHUNK, _NUMBER_BYTES = 8, 32, 128, 32, 2, 64, 2
_VECTOR = 16
_MOST_STAGES, _LEAST_STAGES = 5, 2
_LEAST_WORK = 4
"""Stages of a tile that a block has, at least: what begins and ends a part costs about one."""

_MOST_TILES = 1 << 14
"""Of out, in one product."""

_OF_GROUP = 1 << 40
"""Over the steps of a group: a step's number times that, over `_OF_GROUP`, is its group, without a division."""

_STATIC_BYTES = 10 * 1024
"""Of `Shared` and a flag, which are not among those that a launch asks for."""


@dataclass(frozen=True)
class _Staged:
    """A kernel, and how it is launched: TOKENS of `packed.cuh`, and stages that shared memory has room for."""

    kernel: Kernel
    tokens: int
    stages: int


def programs_of(form: PackedForm) -> Iterator[tuple[str, Defines]]:
    """The CUDA C++ files of such weights, with their macros."""
    if multiplies_codes(form):
        for tokens in TOKENS:
            yield SOURCE, many_defines(form, tokens)


def many_defines(form: PackedForm, tokens: int) -> Defines:
    """The macros of `packed_many.cu`."""
    return {
        **defines_of(form, CodesTile(tokens, _EACH_WARP // 16, 1, _WARPS)),
        "WHOLE_ROWS": int(_has_whole_rows(form)), "STAGE_BYTES": stage_bytes(form, tokens),
    }  # fmt: skip


def stage_bytes(form: PackedForm, tokens: int) -> int:
    """What `Stage` takes: half of it is codes of `_ROWS`, the numbers of ``tokens`` in their columns, and factors."""
    halves = 2 if form.bits == 4 else 1
    factors = 0 if _has_whole_rows(form) else halves * _CHUNK // product_step(form)
    scales = 4 * _ROWS * max(1, factors)
    minima = 4 * _ROWS * factors if form.has_minimum else 4
    part = _ROWS * _CHUNK + halves * tokens * _CHUNK * _NUMBER_BYTES + scales + minima
    return _DEPTH_WARPS * (-(-part // _VECTOR) * _VECTOR)


def most_stages(form: PackedForm, tokens: int, sm: int) -> int:
    """Stages that a multiprocessor of compute capability ``sm`` has room for, 5 at most."""
    room = SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90) - _STATIC_BYTES
    return min(_MOST_STAGES, room // stage_bytes(form, tokens))


def _has_whole_rows(form: PackedForm) -> bool:
    return form.group == 0 and not form.has_minimum


class CudaPackedMany:
    """Products of device arrays with packed matrices, on the current stream, one after the other; launches depend on
    shapes alone. `CudaPacked` has those of fewer rows.

    empty: ``empty(shape, dtype)`` gives an uninitialised array on the device
    tokens: see `TOKENS`; least_rows, most_rows: that products are taken of
    """

    def __init__(
        self,
        launcher: TritonLauncher,
        programs: Programs,
        empty: Callable[[tuple[int, ...], Any], Array],
        tokens: tuple[int, ...] = TOKENS,
        least_rows: int = FEW_ROWS + 1,
        most_rows: int = MANY_ROWS,
    ) -> None:
        self._launcher, self._programs, self._empty = launcher, programs, empty
        self._tokens, self._least_rows, self._most_rows = tokens, least_rows, most_rows
        self._kernels: dict[PackedForm, tuple[_Staged, ...]] = {}
        self._arrived: Array | None = None

    def prepare(self, form: PackedForm) -> None:
        """Compile or load all that products with such matrices need, so that they only enqueue."""
        if form in self._kernels or not multiplies_codes(form):
            return
        if self._arrived is None:
            self._arrived = self._empty((_MOST_TILES,), np.uint32)
            self._arrived[:] = 0
        self._kernels[form] = tuple(self._staged(form))

    def _staged(self, form: PackedForm) -> Iterator[_Staged]:
        for tokens in self._tokens:
            stages = most_stages(form, tokens, self._launcher.sm)
            if stages >= _LEAST_STAGES:
                program = self._programs(SOURCE, many_defines(form, tokens))
                kernel = program.kernel(KERNEL, _WARPS * _WARP, stages * stage_bytes(form, tokens))
                yield _Staged(kernel, tokens, stages)

    def takes(self, matrix: PackedMatrix, rows: int) -> bool:
        """Whether `multiply` does, of a form that was prepared.

        With the smallest groups of 4 bits and minima, a card of 99 KiB has no room for two stages.
        """
        if not self._least_rows <= rows <= self._most_rows or not self._kernels.get(matrix.form):
            return False
        return _tiles(matrix.shape[0], rows, self._tokens[0]) <= _MOST_TILES

    def multiply(self, x: Array, matrix: PackedMatrix) -> Array:
        """``x [rows, depth] @ matrix.T``, if it `takes` so many rows, whose elements lie side by side, and that begin
        at multiples of 16 bytes."""
        (width, depth), form, rows = matrix.shape, matrix.form, x.shape[0]
        staged = self._kernels[form]
        how = next((each for each in staged if each.tokens >= rows), staged[-1])
        tiles = _tiles(width, rows, how.tokens)
        stages = -(-depth * form.bits // (8 * _DEPTH_WARPS * _CHUNK))
        blocks = max(1, min(self._launcher.sms, tiles * stages // _LEAST_WORK))
        out = self._empty((rows, width), x.dtype)
        has_parts = tiles % blocks != 0
        partial = self._empty((blocks, 2, how.tokens, _ROWS), np.float32) if has_parts else None
        how.kernel(
            (blocks, 1, 1),
            (
                *addresses_of(x, matrix.codes, matrix.scale, matrix.minimum, out, partial, self._arrived), x.strides[0],
                -(-_OF_GROUP // group_steps(form, depth)), rows, width, depth, how.stages,
            ),
        )  # fmt: skip
        return out


def _tiles(width: int, rows: int, tokens: int) -> int:
    return -(-width // _ROWS) * -(-rows // tokens)

"""Weights of 4 and 8 bits on a GPU: the host half of `packed_jit.py`.

Few rows are multiplied with the codes as they lie in memory, since then reading them is what takes time. For many rows
the weight is made floats first, into memory that is given back at once, and cuBLAS multiplies: that costs two more
passes over the weight, which the product of so many rows outweighs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.code_bytes import GPU_SCALES
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, addresses_of

MODULE = "packed_jit"
FEW_ROWS = 64
"""Rows up to which codes are multiplied: with more, tensor cores set the pace."""

_COLUMNS = 64
_LEAST_STEP, MOST_STEP = 16, 128
"""Bytes of a row's codes that a program takes at a time."""
_MOST_SPLITS = 8
_ADDED = 1024
TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
MIDDLE = 8
"""What is added to a code of 4 bits, from -8 to 7, in memory."""


@dataclass(frozen=True)
class _Tile:
    """``rows`` at most, ``step`` bytes of codes at a time, at most."""

    rows: int
    step: int
    warps: int


_TILES = (_Tile(16, MOST_STEP, 4), _Tile(FEW_ROWS, 32, 8))
"""With larger steps or fewer warps, 64 rows have no room in registers."""


@dataclass(frozen=True)
class PackedForm:
    """What the machine code of a product depends on besides the card.

    dtype: of activations; bits: of a code; group: neighbours with a scale in common, 0: a whole row
    step:  bytes taken at a time
    is_float: codes are float8_e4m3fn, else integers
    """

    dtype: str
    bits: int
    group: int
    step: int
    has_minimum: bool
    is_float: bool = False


@dataclass(frozen=True)
class PackedMatrix:
    """A weight ``[width, depth]`` on the device; of a layer's experts, an axis of them comes first in every array.

    codes:   uint8 ``[width, depth / 2]``, two plus 8 to a byte, or int8 or float8_e4m3fn (uint8) ``[width, depth]``
    scale:   float32 ``[depth / group, width]``
    minimum: of the same shape; None: 0 everywhere
    """

    form: PackedForm
    shape: tuple[int, int]
    codes: Array
    scale: Array
    minimum: Array | None


class Grouped(Protocol):
    """A matrix ``scale * codes + minimum`` on the host; see `headwise.runtime.ops.quantised.GroupQuantised`.

    codes: uint8 or int8 ``[width, depth]``; scale, minimum: ``[width, depth / group]``
    """

    @property
    def codes(self) -> NDArray[Any]: ...

    @property
    def scale(self) -> NDArray[np.float32]: ...

    @property
    def minimum(self) -> NDArray[np.float32] | None: ...

    @property
    def bits(self) -> int: ...

    @property
    def is_float(self) -> bool: ...


def pack(matrix: Grouped, dtype: str, send: Callable[[NDArray[Any]], Array]) -> PackedMatrix:
    """``matrix`` on the device, for products with ``dtype``.

    Codes of 4 bits take 8 where halves of a row are no multiple of 16 in whole groups.

    send: brings an array to the device

    Raises:
        ConfigError: a group is no multiple of 16.
    """
    codes, scale, minimum = matrix.codes, matrix.scale, matrix.minimum
    width, depth = codes.shape
    group = depth // scale.shape[1]
    bits = bits_taken(matrix.bits, depth, group)
    check_groups(depth, group, bits)
    if codes.dtype == np.uint8 and not matrix.is_float:
        offset = 1 << (matrix.bits - 1) if bits == matrix.bits else 0
        codes = (codes.astype(np.int16) - offset).astype(np.int8)
        if offset:
            moved = np.float32(offset) * scale
            minimum = moved if minimum is None else minimum + moved
    if bits == 4:
        codes = (codes + np.int8(MIDDLE)).view(np.uint8)
        codes = codes[:, : depth // 2] | codes[:, depth // 2 :] << 4
    return PackedMatrix(
        form_of(dtype, bits, group, minimum is not None, depth, matrix.is_float),
        (width, depth),
        send(np.ascontiguousarray(codes)),
        send(np.ascontiguousarray(scale.T, GPU_SCALES)),
        None if minimum is None else send(np.ascontiguousarray(minimum.T, GPU_SCALES)),
    )


def bits_taken(bits: int, depth: int, group: int) -> int:
    """Of a code in memory: 4 only where halves of a row are a multiple of 16 in whole groups."""
    return 4 if bits == 4 and depth % 2 == 0 and gcd(group, depth // 2) % _LEAST_STEP == 0 else 8


def check_groups(depth: int, group: int, bits: int) -> None:
    """Raise ConfigError if rows of ``depth`` in such groups are not computed from."""
    if gcd(group, depth * bits // 8) % _LEAST_STEP:
        raise ConfigError(
            f"weights of {depth} columns in groups of {group} are not computed from on a GPU, which takes groups of a "
            f"multiple of {_LEAST_STEP}: choose weights_dtype auto"
        )


def form_of(
    dtype: str, bits: int, group: int, has_minimum: bool, depth: int = 2 * MOST_STEP, is_float: bool = False
) -> PackedForm:
    """The form of weights with rows of ``depth``; group 0: a whole row."""
    step = gcd(group or depth, depth * bits // 8, MOST_STEP)  # a power of two
    return PackedForm(dtype, bits, 0 if group == depth else group, step, has_minimum, is_float)


def variants_of(form: PackedForm) -> tuple[Variant, ...]:
    """All Triton kernels of such weights."""
    products = (_product(form, tile, is_split) for tile in _TILES for is_split in (False, True))
    return (*products, _sum(form.dtype), _expansion(form))


class CudaPacked:
    """Products of device arrays with packed matrices, on the current stream; launches depend on shapes alone.

    empty: ``empty(shape, dtype)`` gives an uninitialised array on the device
    """

    def __init__(self, launcher: TritonLauncher, empty: Callable[[tuple[int, ...], Any], Array]) -> None:
        self._launcher, self._empty = launcher, empty

    def prepare(self, form: PackedForm) -> None:
        """Compile or load what products with such matrices need, so that they only enqueue."""
        for variant in variants_of(form):
            self._launcher.prepare(variant)

    def multiply(self, x: Array, matrix: PackedMatrix) -> Array:
        """``x [rows, depth] @ matrix.T``, of 1 to `FEW_ROWS` rows whose elements lie side by side."""
        (width, depth), form, rows = matrix.shape, matrix.form, x.shape[0]
        tile = next(each for each in _TILES if each.rows >= rows)
        columns, steps = -(-width // _COLUMNS), depth * form.bits // 8 // min(form.step, tile.step)
        splits = max(1, min(_MOST_SPLITS, steps // 2, 2 * self._launcher.sms // columns))
        out = self._empty((rows, width), x.dtype)
        partial = self._empty((splits, rows, width), np.float32) if splits > 1 else None
        self._launcher.launch(
            _product(form, tile, splits > 1),
            (columns, splits, 1),
            (
                *addresses_of(x, matrix.codes, matrix.scale, matrix.minimum, out, partial),
                rows, width, depth, x.strides[0] // x.dtype.itemsize,
                splits,
            ),
        )  # fmt: skip
        if partial is not None:
            count = rows * width
            self._launcher.launch(
                _sum(form.dtype),
                (-(-count // _ADDED), 1, 1),
                (*addresses_of(partial, out), count, splits),
            )
        return out

    def expand(self, matrix: PackedMatrix, dtype: np.dtype[Any]) -> Array:
        """The matrix as floats ``[width, depth]``."""
        (width, depth), form = matrix.shape, matrix.form
        out = self._empty((width, depth), dtype)
        self._launcher.launch(
            _expansion(form),
            (depth * form.bits // 8 // form.step, -(-width // _COLUMNS), 1),
            (*addresses_of(matrix.codes, matrix.scale, matrix.minimum, out), width, depth),
        )
        return out


@lru_cache
def _product(form: PackedForm, tile: _Tile, is_split: bool) -> Variant:
    return _variant(
        "multiply_packed",
        form,
        ("x:x", "codes", "scale:*fp32", "minimum:*fp32", "out:x", "partial:*fp32",
         "rows:i32", "width:i32", "depth:i32", "x_stride:i32", "splits:i32"),
        (("BLOCK_M", tile.rows), ("BLOCK_N", _COLUMNS), *constants_of(form, tile.step), ("SPLIT", is_split)),
        tile.warps,
        stages=4,
    )  # fmt: skip


@lru_cache
def _expansion(form: PackedForm) -> Variant:
    pointers = ("codes", "scale:*fp32", "minimum:*fp32", "out:x", "width:i32", "depth:i32")
    return _variant("expand_packed", form, pointers, (("BLOCK_N", _COLUMNS), *constants_of(form)))


@lru_cache
def _sum(dtype: str) -> Variant:
    form = PackedForm(dtype, 8, 0, 0, False)
    return _variant("add_splits", form, ("partial:*fp32", "out:x", "count:i32", "splits:i32"), (("BLOCK", _ADDED),))


def constants_of(form: PackedForm, most: int = MOST_STEP) -> tuple[tuple[str, Any], ...]:
    """Those of any kernel that reads such weights, at most ``most`` bytes of a row at a time."""
    return (
        ("BLOCK_K", min(form.step, most)), ("GROUP", form.group), ("BITS", form.bits), ("FLOATS", form.is_float),
        ("MINIMA", form.has_minimum),
    )  # fmt: skip


def code_type(form: PackedForm) -> str:
    """Triton's, of a pointer to codes."""
    return "*u8" if form.bits == 4 or form.is_float else "*i8"


def typed(parameters: tuple[str, ...], types: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The signature of ``name:type`` each, where a type may stand for one of ``types``."""
    pairs = [parameter.partition(":")[::2] for parameter in parameters]
    return tuple((name, types.get(type_, type_)) for name, type_ in pairs)


def _variant(
    kernel: str,
    form: PackedForm,
    parameters: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    warps: int = 4,
    stages: int = 1,
) -> Variant:
    signature = typed(parameters, {"x": TYPES[form.dtype], "": code_type(form)})
    multiples = tuple(name for name, type_ in signature if type_.startswith("*") or name in ("depth", "x_stride"))
    return Variant(kernel, signature, constants, multiples, num_warps=warps, num_stages=stages, module=MODULE)

"""Weights of 4 and 8 bits on a GPU, and few rows times those of 16: the host half of `packed.cu` and `packed_jit.py`.

Few rows are multiplied with the codes as they lie in memory, since then reading them is what takes time, and some
dozens of rows by `packed_many`. For more the weight is made floats first, into memory that is given back at once, and
cuBLAS multiplies: that costs two more passes over the weight, which the product of so many rows outweighs. So it is
with float32's, which are there to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.code_bytes import GPU_SCALES
from headwise.kernels.cuda.elementwise import NUMBERS, is_dense
from headwise.kernels.cuda.launch import Array, Kernel, TritonLauncher, Variant, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs

MODULE, SOURCE, KERNEL = "packed_jit", "packed.cu", "multiply_packed"
FEW_ROWS = 16
"""Rows up to which codes are multiplied here."""

PLAIN, PLAIN_ROWS = 16, 16
"""Bits of what is no code, but numbers of the dtype of x; rows up to which such weights are multiplied here."""

_COLUMNS = 64
_LEAST_STEP, MOST_STEP = 16, 128
"""Bytes of a row's codes that a program takes at a time."""
TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
MIDDLE = 8
"""What is added to a code of 4 bits, from -8 to 7, in memory."""

_WARP, _TILE_ROWS, _PRODUCT_STEP = 32, 16, 64
_WARPS = (4, 8, 16)
"""Of a block."""


@dataclass(frozen=True)
class CodesTile:
    """What a block has: the macros TOKENS, TILES, AHEAD and MOST_WARPS of `packed.cuh`.

    warps:        that a multiprocessor is to have, at least: the blocks of a narrow weight have more of them
    least_blocks: of which a multiprocessor has room at once; the macro LEAST_BLOCKS of `packed.cu`
    """

    tokens: int
    tiles: int
    ahead: int
    most_warps: int = 16
    warps: int = 13
    least_blocks: int = 1


Tiles = dict[int, dict[int, CodesTile]]
PRODUCT_TILES: Tiles = {
    8: {8: CodesTile(8, 1, 2, warps=24), FEW_ROWS: CodesTile(16, 2, 2)},
    PLAIN: {8: CodesTile(8, 1, 4, least_blocks=2), PLAIN_ROWS: CodesTile(16, 1, 2, least_blocks=2)},
    4: {8: CodesTile(8, 2, 1), FEW_ROWS: CodesTile(16, 1, 2)},
}
"""By bits of a code, then by rows of x at most: those that took an H200 least time; of `PLAIN` unmeasured."""

_FROM_100: Tiles = {
    **PRODUCT_TILES,
    PLAIN: {most: replace(tile, least_blocks=1) for most, tile in PRODUCT_TILES[PLAIN].items()},
    4: PRODUCT_TILES[4] | {FEW_ROWS: CodesTile(16, 1, 2, most_warps=8)},
}
"""Of cards whose compiler takes a few registers more for the same, and spills."""


@dataclass(frozen=True)
class PackedForm:
    """What the machine code of a product depends on besides the card.

    dtype: of activations; bits: of a code, or `PLAIN`; group: neighbours with a scale in common, 0: a whole row
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
    `PLAIN` ones have numbers for codes, and no scales.

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


def plain(weight: Array, dtype: str) -> PackedMatrix | None:
    """``weight [width, depth]`` of ``dtype``, as it lies on the device, for products of up to `PLAIN_ROWS` rows; None
    where its rows are not read by whole vectors."""
    width, depth = weight.shape
    step = _PRODUCT_STEP // weight.itemsize
    if weight.itemsize * 8 != PLAIN or not is_dense(weight, (width, depth), weight.dtype) or depth % step:
        return None
    return PackedMatrix(plain_form(dtype), (width, depth), weight, None, None)


@cache
def plain_form(dtype: str) -> PackedForm:
    """Of weights that are numbers of ``dtype``, of 16 bits."""
    return PackedForm(dtype, PLAIN, 0, _PRODUCT_STEP, False)


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
    return () if form.bits == PLAIN else (_expansion(form),)


def product_tiles(sm: int) -> Tiles:
    """`PRODUCT_TILES` of a card of compute capability ``sm``."""
    return _FROM_100 if sm >= 100 else PRODUCT_TILES


def programs_of(form: PackedForm, sm: int) -> Iterator[tuple[str, Defines]]:
    """The CUDA C++ files of such weights, with their macros: one for each of their `product_tiles`."""
    if multiplies_codes(form):
        for tile in product_tiles(sm)[form.bits].values():
            yield SOURCE, defines_of(form, tile)


def multiplies_codes(form: PackedForm) -> bool:
    """Whether `CudaPacked.multiply` takes such weights."""
    return form.dtype != "float32"


def defines_of(form: PackedForm, tile: CodesTile) -> Defines:
    """The macros of `packed.cuh`."""
    return {
        "NUMBER": NUMBERS[form.dtype], "BITS": form.bits, "FLOATS": int(form.is_float),
        "MINIMA": int(form.has_minimum), "STEP": product_step(form),
        "TOKENS": tile.tokens, "TILES": tile.tiles, "AHEAD": tile.ahead, "MOST_WARPS": tile.most_warps,
        "LEAST_BLOCKS": tile.least_blocks,
    }  # fmt: skip


def product_step(form: PackedForm) -> int:
    """Bytes of a row's codes that products take at a time."""
    return min(form.step, _PRODUCT_STEP)


def group_steps(form: PackedForm, depth: int) -> int:
    """Steps of a group's columns; of a row in 4 bits, each is in one half."""
    return (form.group or depth) * (2 if form.bits == PLAIN else 1) // product_step(form)


class CudaPacked:
    """Products of device arrays with packed matrices, on the current stream; launches depend on shapes alone.

    empty: ``empty(shape, dtype)`` gives an uninitialised array on the device
    tiles: in place of the card's `product_tiles`
    """

    def __init__(
        self,
        launcher: TritonLauncher,
        programs: Programs,
        empty: Callable[[tuple[int, ...], Any], Array],
        tiles: Tiles | None = None,
    ) -> None:
        self._launcher, self._programs, self._empty, self._tiles = launcher, programs, empty, tiles
        self._kernels: dict[PackedForm, dict[tuple[CodesTile, int], Kernel]] = {}

    def prepare(self, form: PackedForm) -> None:
        """Compile or load all that products with such matrices need, so that they only enqueue."""
        for variant in variants_of(form):
            self._launcher.prepare(variant)
        if form in self._kernels or not multiplies_codes(form):
            return
        made = {tile: self._programs(SOURCE, defines_of(form, tile)) for tile in self._tiles_of(form).values()}
        self._kernels[form] = {
            (tile, warps): program.kernel(KERNEL, warps * _WARP)
            for tile, program in made.items()
            for warps in _WARPS
            if warps <= tile.most_warps
        }

    def multiply(self, x: Array, matrix: PackedMatrix) -> Array:
        """``x [rows, depth] @ matrix.T``, of 1 to `FEW_ROWS` rows, `PLAIN_ROWS` of a `PLAIN` matrix, whose elements lie
        side by side, and that begin at multiples of 16 bytes; of a form that `multiplies_codes` and was prepared."""
        (width, depth), form, rows = matrix.shape, matrix.form, x.shape[0]
        tile = next(tile for most, tile in self._tiles_of(form).items() if most >= rows)
        blocks = -(-rows // tile.tokens), -(-width // (_TILE_ROWS * tile.tiles))
        out = self._empty((rows, width), x.dtype)
        self._kernels[form][tile, self._warps(tile, blocks[0] * blocks[1])](
            (*blocks, 1),
            (
                *addresses_of(x, matrix.codes, matrix.scale, matrix.minimum, out), x.strides[0],
                rows, width, depth, group_steps(form, depth),
            ),
        )  # fmt: skip
        return out

    def _tiles_of(self, form: PackedForm) -> dict[int, CodesTile]:
        return (self._tiles or product_tiles(self._launcher.sm))[form.bits]

    def _warps(self, tile: CodesTile, blocks: int) -> int:
        """Of each block, so that every multiprocessor has as many as it should."""
        wanted = tile.warps * self._launcher.sms
        return next(warps for warps in _WARPS if blocks * warps >= wanted or warps == tile.most_warps)

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
def _expansion(form: PackedForm) -> Variant:
    parameters = ("codes", "scale:*fp32", "minimum:*fp32", "out:x", "width:i32", "depth:i32")
    signature = typed(parameters, {"x": TYPES[form.dtype], "": code_type(form)})
    multiples = tuple(name for name, type_ in signature if type_.startswith("*") or name == "depth")
    constants = (("BLOCK_N", _COLUMNS), *constants_of(form))
    return Variant("expand_packed", signature, constants, multiples, num_warps=4, num_stages=1, module=MODULE)


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

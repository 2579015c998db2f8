"""The quantised types of GGUF files as `GroupQuantised`: codes and scales apart, without loss.

A block of GGUF is the bytes of 32 or 256 neighbouring numbers of a row. Blocks of the K types (``Q4_K`` and the like)
have 256 numbers in 8 or 16 groups. A group's scale is an integer of 6 or 8 bits times the block's float16 scale.
A block of ``MXFP4`` has 32 floats of 4 bits that share a power of two. In shapes, ``B`` is the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.quantised import GroupQuantised

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]
_Parts = tuple[NDArray[Any], _Floats, _Floats | None]
"""Codes, scales ``[B, groups]``, and minima of that shape, None if the type has none. Codes are uint8 or int8
``[B, block]``, or that in three axes."""

_FOUR = np.uint8(4)
_HALVES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)
_MXFP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what the 16 codes of an MXFP4 number stand for (OCP Microscaling Formats, version 1.0): integers."""
_MXFP4_BIAS = 128
"""Of its exponents, and 1 because the integers are twice the numbers."""


@dataclass(frozen=True)
class BlockFormat:
    """How the blocks of one type become a `GroupQuantised`.

    bits, group: as in `GroupQuantised`
    signed:      whether the codes are int8; else they are uint8
    has_minimum: whether groups have a minimum
    take_apart:  ``uint8 [B, bytes of a block]`` -> codes, scales and minima
    numbers:     all codes that there are, at most 16, where they need more than 4 bits
    """

    bits: int
    group: int
    signed: bool
    has_minimum: bool
    take_apart: Callable[[_Bytes], _Parts]
    numbers: tuple[int, ...] = ()


def take_apart(raw: _Bytes, kind: str, shape: tuple[int, int]) -> GroupQuantised:
    """A matrix from its blocks.

    raw:   the blocks' bytes, row by row
    kind:  their type, one of `FORMATS`
    shape: rows and columns; columns are a multiple of the type's block
    """
    form, (rows, columns) = FORMATS[kind], shape
    size = _BLOCK_SIZES[kind]
    codes, scale, minimum = form.take_apart(raw.reshape(rows * columns // size, -1))
    groups = (rows, columns // form.group)
    return GroupQuantised(
        codes.reshape(shape),
        scale.reshape(groups),
        None if minimum is None else minimum.reshape(groups),
        form.group,
        form.bits,
    )


def _halfs(blocks: _Bytes, start: int) -> _Floats:
    """The float16 at byte ``start`` of each block, as float32 ``[B, 1]``."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """Codes of 4 bits, ``[B, 2 n]``, from bytes ``[B, n]``: all low halves, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """The fifth bits of 32 codes, ``[B, 32]`` of 0 or 16, from bytes ``[B, 4]``."""
    return np.unpackbits(packed, axis=1, bitorder="little") << _FOUR


def _centred(codes: _Bytes, zero: int) -> NDArray[np.int8]:
    """Signed codes, from unsigned ones in which ``zero`` stands for 0."""
    return codes.view(np.int8) - np.int8(zero)


def _q8_0(blocks: _Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8), _halfs(blocks, 0), None


def _q4_0(blocks: _Bytes) -> _Parts:
    return _centred(_nibbles(blocks[:, 2:]), 8), _halfs(blocks, 0), None


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halfs(blocks, 0), _halfs(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Parts:
    return _centred(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), 16), _halfs(blocks, 0), None


def _q5_1(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _halfs(blocks, 0), _halfs(blocks, 2)


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Scales and minima of 8 groups, ``[B, 8]`` each, from 16 numbers of 6 bits in the 12 bytes from byte 4 on.

    Of groups 0 to 3, a number is the low 6 bits of a byte of its own. Of groups 4 to 7, its low 4 bits are half of one
    of the last four bytes, and its high 2 bits the top of the byte of the group four before.
    """
    low, high, shared = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 0x3F, (shared & 0x0F) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([high & 0x3F, (shared >> 4) | (high >> 6) << 4], axis=1)
    return _halfs(blocks, 0) * scales, -(_halfs(blocks, 2) * minima)


def _k_nibbles(packed: _Bytes) -> _Bytes:
    """Codes of 4 bits in 8 groups, ``[B, 8, 32]``, from bytes ``[B, 128]``.

    Each 32 bytes hold two groups: one in the low halves, the next in the high ones.
    """
    pairs = packed.reshape(len(packed), 4, 1, 32) >> _HALVES[:, None]
    return (pairs & np.uint8(0x0F)).reshape(len(packed), 8, 32)


def _q4_k(blocks: _Bytes) -> _Parts:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: _Bytes) -> _Parts:
    fifths = (blocks[:, None, 16:48] >> _BITS[:, None]) & np.uint8(1)  # bit g of byte i belongs to number i of group g
    return _k_nibbles(blocks[:, 48:]) | fifths << _FOUR, *_k_scales(blocks)


def _q6_k(blocks: _Bytes) -> _Parts:
    """Two halves of 128 codes of 6 bits. Bytes 0 to 127 have the low 4 bits: 64 bytes a half, two codes each. Bytes 128
    to 191 have the high 2 bits: 32 bytes a half, four codes each."""
    count = len(blocks)
    low = (blocks[:, :128].reshape(count, 2, 1, 64) >> _HALVES[:, None]) & np.uint8(0x0F)
    high = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> _PAIRS[:, None]) & np.uint8(0x03)
    scales = _halfs(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _centred(low.reshape(high.shape) | high << _FOUR, 32), scales, None


def _mxfp4(blocks: _Bytes) -> _Parts:
    """An exponent, then 4 bits of each number. An exponent of 255 would be no number; here it is a large one."""
    codes = np.array(_MXFP4_NUMBERS, np.int8)[_nibbles(blocks[:, 1:])]
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - _MXFP4_BIAS).astype(np.float32)
    return codes, scales, None


FORMATS: Mapping[str, BlockFormat] = {
    "Q8_0": BlockFormat(8, 32, True, False, _q8_0),
    "Q4_0": BlockFormat(4, 32, True, False, _q4_0),
    "Q4_1": BlockFormat(4, 32, False, True, _q4_1),
    "Q5_0": BlockFormat(5, 32, True, False, _q5_0),
    "Q5_1": BlockFormat(5, 32, False, True, _q5_1),
    "Q4_K": BlockFormat(4, 32, False, True, _q4_k),
    "Q5_K": BlockFormat(5, 32, False, True, _q5_k),
    "Q6_K": BlockFormat(6, 16, True, False, _q6_k),
    "MXFP4": BlockFormat(5, 32, True, False, _mxfp4, _MXFP4_NUMBERS),
}
"""The quantised types that are kept and computed from without conversion, by their names in GGUF."""

_BLOCK_SIZES = {kind: 256 if kind.endswith("_K") else 32 for kind in FORMATS}

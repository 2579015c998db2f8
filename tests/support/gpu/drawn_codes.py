"""Random weights of few bits, packed as a GPU has them, rows to multiply with them, and what comes of that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.packed import PackedMatrix, pack
from headwise.runtime.ops.quantised import GroupQuantised

CODES = {
    "int4": (np.int8, -8, 8, 4),
    "uint4": (np.uint8, 0, 16, 4),
    "int8": (np.int8, -127, 128, 8),
    "uint8": (np.uint8, 0, 256, 8),
    "fp8": (np.uint8, 0, 256, 8),
}


def draw(kind: str, width: int, depth: int, group: int, has_minimum: bool = False) -> GroupQuantised:
    rng = np.random.default_rng(width + depth)
    dtype, low, high, bits = CODES[kind]
    scale = rng.uniform(0.5, 2, (width, depth // group)).astype(np.float32) / high
    minimum = rng.standard_normal(scale.shape).astype(np.float32) if has_minimum else None
    codes, is_float = rng.integers(low, high, (width, depth)).astype(dtype), kind == "fp8"
    if is_float:
        codes[codes & 127 == 127] = 0  # which are no numbers
    return GroupQuantised(codes, scale, minimum, group, bits, is_float)


def every_code(kind: str) -> GroupQuantised:
    """``[16, 256]``, of which each row has every code there is, but those that are no numbers, as it is."""
    matrix = draw(kind, 16, 256, 256)
    codes = np.arange(256) if matrix.bits == 8 else np.arange(256) % 16 - 8
    if matrix.is_float:
        codes[codes & 127 == 127] = 0
    codes = np.tile(codes.astype(matrix.codes.dtype), (16, 1))
    return replace(matrix, codes=codes, scale=np.ones((16, 1), np.float32))


def packed(matrix: GroupQuantised, dtype: str = "float32") -> PackedMatrix:
    return pack(matrix, dtype, lambda array: array)


def rows_of(count: int, depth: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, depth), np.float32).astype(numpy_dtype(dtype))


def check_close(found: np.ndarray, x: np.ndarray, matrix: GroupQuantised) -> None:
    """That ``found`` is the product, of ``x``'s dtype."""
    assert found.dtype == x.dtype
    expected = x.astype(np.float32) @ matrix.dequantised().T
    close = {"float16": 1e-3, "bfloat16": 8e-3}[x.dtype.name] * np.abs(expected).max()
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=close)

"""What few rows of a product with codes prefetch: no result would tell if they did not."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numba import types

from headwise.kernels.cpu import matmul_jit
from headwise.kernels.cpu.codes_vectors import in_vectors
from headwise.kernels.cpu.matmul_kinds import INTEGERS, PANEL, Codes, Int8
from headwise.kernels.cpu.matmul_tiles import (
    FEW_ROWS,
    FEW_VECTORS,
    LINE,
    TILE_ROWS,
    VECTORS_ALONE,
    grouped_tile,
    integer_tile,
)

KINDS = Int8(native=False), *(Codes(bits, native=False) for bits in (4, 5, 6))
"""Those whose numbers become floats, as `in_vectors` takes them."""


def prefetches(call: Any, signature: tuple[Any, ...]) -> int:
    """In the code of ``call``, compiled for these types of arguments."""
    compiled = numba.njit(call)
    compiled.compile(signature)
    (code,) = compiled.inspect_llvm().values()
    return int(code.count("call void @llvm.prefetch"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_one_row_in_vectors_prefetches_codes_scales_and_minima(kind: Any) -> None:
    run = in_vectors(kind, 1, VECTORS_ALONE)

    def call(a, b, c, d, e, f, g, h, i, j, k, m, n):
        run(a, b, c, d, e, f, g, h, i, j, k, m, n)

    assert prefetches(call, (types.intp,) * 13) >= kind.turn_bytes // LINE + 2 * (PANEL * 2 // LINE)


@pytest.mark.parametrize("rows", sorted({1, TILE_ROWS[0]}))
def test_a_tile_of_few_rows_prefetches_and_one_of_many_does_not(rows: int) -> None:
    kind, vectors = matmul_jit._integers[0], VECTORS_ALONE if rows == 1 else FEW_VECTORS
    run = (integer_tile if INTEGERS else grouped_tile)(kind, rows, vectors)

    def call(x, w, half, sums, tile, n):
        run(x, n, n, w, n, n, half, half, n, sums, n, n, n, n, n, n, n, tile, n, n)

    floats, bytes_, halves = (numba.from_dtype(np.dtype(name))[::1] for name in ("float32", "uint8", "uint16"))
    found = prefetches(call, (floats, bytes_, halves, floats, floats, types.intp))
    assert (found > 0) == (rows <= FEW_ROWS)

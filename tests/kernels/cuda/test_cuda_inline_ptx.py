"""What the PTX that kernels have inline makes of numbers: every code there is, by its NumPy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.inline_ptx import run_inline
from headwise.kernels.e4m3 import E4M3
from headwise.kernels.nibbles import GROUP, pack, unpack

pytest.importorskip("triton")

from headwise.kernels.cuda import cached_jit, codes_jit

FLOAT16 = np.dtype(np.float16)


def test_numbers_of_four_bits_are_a_32nd_of_a_step_off_at_most_and_always_finite() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4096, GROUP)) * 2.0 ** rng.integers(-8, 15, (4096, 1))
    rows += rows.max(axis=-1, keepdims=True) * rng.integers(-3, 4, (4096, 1))
    rows[0], rows[1, ::2] = 0.0, 1e9
    rows[1, 1::2] = -1e9
    codes, groups = pack(rows.astype(np.float32))
    unit = np.float16(cached_jit.UNIT.value)
    scale, minimum = groups[:, 0, 0, None], groups[:, 0, 1, None]
    addend = minimum * unit - scale * np.float16(4)
    inputs = np.broadcast_arrays(codes, scale, addend)
    made = np.concatenate(run_inline(cached_jit.INT4.value, inputs, [FLOAT16] * 2, pack=4), axis=-1)
    found, exact = made.astype(np.float32) / unit, unpack(codes, groups)
    assert np.isfinite(found).all()
    rounding = 2.0**-11 * (np.abs(minimum.astype(np.float32)) + np.abs(exact)) + 2.0**-19
    assert (np.abs(found - exact) <= scale.astype(np.float32) / 32 + rounding).all()


def test_words_have_the_numbers_that_their_codes_have_alone() -> None:
    rng = np.random.default_rng(0)
    codes, scale, addend = rng.integers(0, 256, (64, 16), np.uint8), *(rng.random((2, 64, 1)) + 0.5).astype(FLOAT16)
    inputs = np.broadcast_arrays(codes, scale, addend)
    low, high = run_inline(cached_jit.INT4.value, inputs, [FLOAT16] * 2, pack=4)
    words = np.broadcast_arrays(codes.view(np.int16), scale, addend)
    found = run_inline(cached_jit.INT4_WORDS.value, words, [FLOAT16] * 4, pack=2)
    for quarter, expected in zip(found, (low[:, ::2], low[:, 1::2], high[:, ::2], high[:, 1::2]), strict=True):
        np.testing.assert_array_equal(quarter, expected)


@pytest.mark.parametrize(("text", "dtype"), [(cached_jit.INT8, "int8"), (cached_jit.E4M3, "float8_e4m3fn")])
def test_every_number_of_eight_bits_is_exact_in_float16(text: Any, dtype: str) -> None:
    stored = np.arange(256, dtype=np.uint8)
    (found,) = run_inline(text.value, [stored], [FLOAT16], pack=4)
    np.testing.assert_array_equal(found, stored.view(numpy_dtype(dtype)).astype(np.float16))


@pytest.mark.parametrize(("text", "dtype"), [(cached_jit.INT8_PAIRS, "int8"), (cached_jit.E4M3_PAIRS, "float8_e4m3fn")])
def test_every_pair_of_numbers_of_eight_bits_is_split(text: Any, dtype: str) -> None:
    pairs = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    first, second = run_inline(text.value, [pairs], [FLOAT16] * 2, pack=2)
    stored = pairs.view(numpy_dtype(dtype)).astype(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(np.stack([first, second], axis=-1), stored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code_of_a_weight_is_exact(dtype: str) -> None:
    kind, text = numpy_dtype(dtype), {"bfloat16": "BF16", "float16": "F16"}[dtype]
    stored, halves = np.arange(256, dtype=np.uint8), np.dtype(np.uint16)

    def made(name: str, count: int = 1) -> list[np.ndarray]:
        found = run_inline(getattr(codes_jit, name).value, [stored], [halves] * count, pack=4)
        return [numbers.view(kind).astype(np.float32) for numbers in found]

    (integers,) = made("INT8_BF16" if dtype == "bfloat16" else "INT8")
    np.testing.assert_array_equal(integers, stored.view(np.int8).astype(np.float32))
    low, high = made(f"NIBBLES_{text}", 2)
    np.testing.assert_array_equal(low, (stored & 15) - 8.0)
    np.testing.assert_array_equal(high, (stored >> 4) - 8.0)
    (floats,) = made(f"E4M3_{text}")
    known = stored & 127 != 127
    np.testing.assert_array_equal(floats[known], E4M3[known])
    assert np.signbit(floats[128])


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(ValueError, match=r"'popc.b32' is not known: only and.b32"):
        run_inline("{ popc.b32 $0, $1; }", [np.zeros(4, np.uint8)], [np.dtype(np.uint8)], pack=4)

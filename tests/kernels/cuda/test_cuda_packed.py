"""Weights of 4 and 8 bits on a GPU: products in Triton's interpreter, in poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.gpu.machine_code import TARGETS, variant_code

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.packed import CudaPacked, PackedForm, PackedMatrix, pack, variants_of
from headwise.kernels.cuda.tiles import SHARED_BYTES_FROM_90
from headwise.runtime.ops.quantised import GroupQuantised

CODES = {
    "int4": (np.int8, -8, 8, 4),
    "uint4": (np.uint8, 0, 16, 4),
    "int8": (np.int8, -127, 128, 8),
    "uint8": (np.uint8, 0, 256, 8),
    "fp8": (np.uint8, 0, 256, 8),
}


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def draw(kind: str, width: int, depth: int, group: int, has_minimum: bool = False) -> GroupQuantised:
    rng = np.random.default_rng(width + depth)
    dtype, low, high, bits = CODES[kind]
    scale = rng.uniform(0.5, 2, (width, depth // group)).astype(np.float32) / high
    minimum = rng.standard_normal(scale.shape).astype(np.float32) if has_minimum else None
    codes, is_float = rng.integers(low, high, (width, depth)).astype(dtype), kind == "fp8"
    if is_float:
        codes[codes & 127 == 127] = 0  # which are no numbers
    return GroupQuantised(codes, scale, minimum, group, bits, is_float)


def packed(matrix: GroupQuantised, dtype: str = "float32") -> PackedMatrix:
    return pack(matrix, dtype, lambda array: array)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("group", "has_minimum"), [(32, False), (64, True), (192, False)])
def test_codes_are_multiplied_and_expanded_as_they_are_read(kind: str, group: int, has_minimum: bool) -> None:
    matrix = draw(kind, 83, 192, group, has_minimum)
    mine, kernels = packed(matrix), CudaPacked(InterpreterLauncher(), poisoned)
    assert mine.form.bits == (8 if matrix.bits == 8 else 4)
    expected = matrix.dequantised()
    np.testing.assert_allclose(kernels.expand(mine, np.dtype(np.float32)), expected, rtol=1e-5, atol=1e-5)
    x = np.random.default_rng(1).standard_normal((3, 192), np.float32)
    np.testing.assert_allclose(kernels.multiply(x, mine), x @ expected.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("sms", [1, 40])
def test_any_few_rows_lying_apart_in_one_pass_or_in_splits_of_the_depth(rows: int, sms: int) -> None:
    matrix = draw("uint4", 70, 1024, 64)
    kernels = CudaPacked(InterpreterLauncher(sms=sms), poisoned)
    x = np.full((rows, 1040), np.nan, np.float32)[:, :1024]
    x[:] = np.random.default_rng(rows).standard_normal(x.shape)
    found = kernels.multiply(x, packed(matrix))
    np.testing.assert_allclose(found, x @ matrix.dequantised().T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_sums_are_in_float32_whatever_the_dtype(kind: str, dtype: str) -> None:
    matrix = draw(kind, 64, 512, 128)
    x = np.random.default_rng(2).standard_normal((5, 512), np.float32).astype(numpy_dtype(dtype))
    found = CudaPacked(InterpreterLauncher(), poisoned).multiply(x, packed(matrix, dtype))
    assert found.dtype == x.dtype
    expected = (x.astype(np.float32) @ matrix.dequantised().T).astype(x.dtype)
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.01)


def test_codes_of_4_bits_take_8_where_halves_of_a_row_share_no_whole_steps() -> None:
    matrix = draw("uint4", 16, 144, 48)
    mine = packed(matrix)
    assert mine.form == PackedForm("float32", 8, 48, 16, has_minimum=False)
    x = np.random.default_rng(3).standard_normal((2, 144), np.float32)
    found = CudaPacked(InterpreterLauncher(), poisoned).multiply(x, mine)
    np.testing.assert_allclose(found, x @ matrix.dequantised().T, rtol=1e-4, atol=1e-4)


def test_groups_that_no_program_can_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"24 columns in groups of 8 .* a multiple of 16: choose weights_dtype auto"):
        packed(draw("int8", 4, 24, 8))


AWQ = PackedForm("bfloat16", 4, 128, 128, has_minimum=True)
FP8 = PackedForm("bfloat16", 8, 128, 128, has_minimum=False, is_float=True)


def every_variant() -> Iterator[Any]:
    """As ``(sm, variant)``: each takes seconds to compile."""
    for sm in TARGETS:
        for at, variant in enumerate((*variants_of(AWQ), *variants_of(FP8))):
            marks = () if sm == 90 and at == 0 else pytest.mark.soak
            yield pytest.param(sm, variant, id=f"sm{sm}-{variant.kernel}-{at}", marks=marks)


@pytest.mark.parametrize(("sm", "variant"), list(every_variant()))
def test_machine_code_reads_16_bytes_at_a_time_and_spills_nothing(sm: int, variant: Variant) -> None:
    compiled = variant_code(variant, Target(sm, 12))
    assert compiled.spilled_bytes == 0
    if variant.kernel == "multiply_packed":
        assert compiled.ptx.count("cp.async.cg.shared.global") >= 4, "loads overlap products"
        assert compiled.shared_bytes <= SHARED_BYTES_FROM_90

"""Weights of 4 and 8 bits on a GPU: products in the shim, expansion in Triton's interpreter, in poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.drawn_codes import CODES, check_close, draw, every_code, packed, rows_of
from support.gpu.machine_code import TARGETS, machine_code, spilled, variant_code

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import OVERLAPS_FROM, Variant
from headwise.kernels.cuda.packed import (
    SOURCE,
    CudaPacked,
    PackedForm,
    multiplies_codes,
    plain,
    plain_form,
    programs_of,
    variants_of,
)
from headwise.kernels.cuda.programs import Defines
from headwise.runtime.ops.quantised import GroupQuantised


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def in_memory(sms: int = 132) -> CudaPacked:
    return CudaPacked(InterpreterLauncher(sms=sms), ShimPrograms(), poisoned)


def product(x: np.ndarray, matrix: GroupQuantised, sms: int = 132) -> np.ndarray:
    kernels, mine = in_memory(sms), packed(matrix, x.dtype.name)
    kernels.prepare(mine.form)
    return kernels.multiply(x, mine)


def check_product(x: np.ndarray, matrix: GroupQuantised, sms: int = 132) -> None:
    check_close(product(x, matrix, sms), x, matrix)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("group", "has_minimum"), [(32, False), (64, True), (192, False)])
def test_codes_are_expanded_as_they_are_read(kind: str, group: int, has_minimum: bool) -> None:
    matrix = draw(kind, 83, 192, group, has_minimum)
    mine = packed(matrix)
    assert mine.form.bits == (8 if matrix.bits == 8 else 4)
    found = in_memory().expand(mine, np.dtype(np.float32))
    np.testing.assert_allclose(found, matrix.dequantised(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("group", "has_minimum"), [(32, False), (64, True), (192, False), (48, True)])
def test_codes_are_multiplied_as_they_lie(kind: str, group: int, has_minimum: bool) -> None:
    """In steps of 64, 32 and 16 bytes. Groups of a half begin anywhere in it."""
    check_product(rows_of(3, 192, "bfloat16"), draw(kind, 83, 192, group, has_minimum))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_and_so_they_are_with_float16(kind: str) -> None:
    check_product(rows_of(3, 192, "float16"), draw(kind, 83, 192, 64))


@pytest.mark.parametrize(("rows", "kind"), [(1, "uint4"), (8, "int8"), (9, "int8"), (16, "uint4")])
@pytest.mark.parametrize("sms", [1, 40])
def test_any_few_rows_lying_apart_by_few_warps_and_by_many(rows: int, kind: str, sms: int) -> None:
    x = np.full((rows, 1040), np.nan, numpy_dtype("bfloat16"))[:, :1024]
    x[:] = rows_of(rows, 1024, "bfloat16")
    check_product(x, draw(kind, 70, 1024, 64), sms)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "depth"), [(1, 32), (3, 160), (8, 1056), (9, 2048), (16, 96)])
@pytest.mark.parametrize("sms", [1, 132])
def test_numbers_are_multiplied_as_they_lie(dtype: str, rows: int, depth: int, sms: int) -> None:
    """By few warps and by many, in fewer steps than these, and in more than are on their way at once."""
    x, weight = rows_of(rows, depth, dtype), rows_of(83, depth, dtype)
    check_plain(x, weight, sms)


def check_plain(x: np.ndarray, weight: np.ndarray, sms: int = 132) -> None:
    kernels, matrix = in_memory(sms), plain(weight, x.dtype.name)
    assert matrix is not None
    kernels.prepare(matrix.form)
    found, expected = kernels.multiply(x, matrix), x.astype(np.float32) @ weight.astype(np.float32).T
    close = {"float16": 1e-3, "bfloat16": 8e-3}[x.dtype.name] * np.abs(expected).max()
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=close)


def test_numbers_that_are_not_read_by_whole_vectors_are_left_to_others() -> None:
    weight = rows_of(6, 64, "float16")
    assert plain(weight, "float16") is not None
    assert plain(weight[:, :48], "float16") is None, "rows lie apart"
    assert plain(np.ascontiguousarray(weight[:, :48]), "float16") is None, "no whole steps"
    assert plain(weight.astype(np.float32), "float32") is None
    assert plain(np.zeros(6 * 64 + 1, np.float16)[1:].reshape(6, 64), "float16") is None, "not on a vector"


@pytest.mark.parametrize("kind", ["int8", "fp8", "uint4"])
def test_no_row_depends_on_those_beside_it(kind: str) -> None:
    matrix, x = draw(kind, 48, 256, 64), rows_of(8, 256, "bfloat16")
    together = product(x, matrix)
    np.testing.assert_array_equal(together[5], product(x[5:6], matrix)[0])
    x[:5], x[6:] = np.nan, np.inf
    np.testing.assert_array_equal(together[5], product(x, matrix)[5])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_every_code_is_exactly_its_number(kind: str, dtype: str) -> None:
    """Each is multiplied with 1 once, and all others with 0."""
    matrix = every_code(kind)
    ones = np.eye(256, dtype=np.float32).astype(numpy_dtype(dtype))
    found = np.concatenate([product(ones[at : at + 8], matrix) for at in range(0, 256, 8)])
    np.testing.assert_array_equal(found[:, 0], matrix.dequantised()[0])


def test_float32_is_not_multiplied_with_codes() -> None:
    assert multiplies_codes(AWQ)
    assert not multiplies_codes(replace(AWQ, dtype="float32"))
    assert not list(programs_of(replace(AWQ, dtype="float32"), 90))


def test_codes_of_4_bits_take_8_where_halves_of_a_row_share_no_whole_steps() -> None:
    matrix = draw("uint4", 16, 144, 48)
    mine = packed(matrix)
    assert mine.form == PackedForm("float32", 8, 48, 16, has_minimum=False)
    check_product(rows_of(2, 144, "bfloat16"), matrix)


def test_groups_that_no_program_can_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"24 columns in groups of 8 .* a multiple of 16: choose weights_dtype auto"):
        packed(draw("int8", 4, 24, 8))


AWQ = PackedForm("bfloat16", 4, 128, 128, has_minimum=True)
FP8 = PackedForm("bfloat16", 8, 128, 128, has_minimum=False, is_float=True)
PLAIN = plain_form("bfloat16")


def every_variant() -> Iterator[Any]:
    """As ``(sm, variant)``: each takes seconds to compile."""
    for sm in TARGETS:
        for at, variant in enumerate((*variants_of(AWQ), *variants_of(FP8))):
            marks = () if sm == 90 and at == 0 else pytest.mark.soak
            yield pytest.param(sm, variant, id=f"sm{sm}-{variant.kernel}-{at}", marks=marks)


@pytest.mark.parametrize(("sm", "variant"), list(every_variant()))
def test_machine_code_of_the_expansion_spills_nothing(sm: int, variant: Variant) -> None:
    assert variant_code(variant, Target(sm, 12)).spilled_bytes == 0


def every_program() -> Iterator[Any]:
    for sm in TARGETS:
        for form in (AWQ, PLAIN, FP8, replace(FP8, is_float=False), replace(AWQ, has_minimum=False)):
            for at, (_, defines) in enumerate(programs_of(form, sm)):
                marks = () if sm == 90 and form in (AWQ, PLAIN) else pytest.mark.soak
                yield pytest.param(
                    sm, defines, id=f"sm{sm}-{form.bits}-{form.is_float}-{form.has_minimum}-{at}", marks=marks
                )


@pytest.mark.parametrize(("sm", "defines"), list(every_program()))
def test_machine_code_of_products_uses_tensor_cores_and_spills_nothing(sm: int, defines: Defines) -> None:
    compiled = machine_code(SOURCE, defines, sm)
    assert spilled(compiled) == []
    assert compiled.ptx.count("mma.sync") >= 4
    assert compiled.ptx.count("ld.global.nc.L1::no_allocate.L2::128B.v4") >= 4
    assert ("griddepcontrol.wait" in compiled.ptx) == (sm >= OVERLAPS_FROM)

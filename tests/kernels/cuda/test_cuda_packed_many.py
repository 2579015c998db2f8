"""Products of some dozens of rows with weights of few bits on a GPU: executed by `cuda_shim`, compiled for cards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.drawn_codes import CODES, check_close, draw, every_code, packed, rows_of
from support.gpu.machine_code import TARGETS, machine_code, spilled

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import OVERLAPS_FROM
from headwise.kernels.cuda.packed import FEW_ROWS, PackedForm, form_of
from headwise.kernels.cuda.packed_many import (
    MANY_ROWS,
    SOURCE,
    CudaPackedMany,
    most_stages,
    programs_of,
)
from headwise.kernels.cuda.programs import Defines
from headwise.runtime.ops.quantised import GroupQuantised

CARDS = (80, 86, 87, 89, 90, 100, 103, 120)


class Memory:
    """A device's, of which all is poisoned that was not written; what was handed out last is kept."""

    def __init__(self) -> None:
        self.taken: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        is_whole = np.issubdtype(dtype, np.integer)
        self.taken.append(np.full(shape, 77 if is_whole else np.nan, dtype))
        return self.taken[-1]


def prepared(
    matrix: GroupQuantised, dtype: str, sms: int, backwards: bool = False, sm: int = 90
) -> tuple[CudaPackedMany, Any, Memory]:
    shim, memory, mine = ShimPrograms(), Memory(), packed(matrix, dtype)
    shim.backwards = backwards
    kernels = CudaPackedMany(InterpreterLauncher(sm=sm, sms=sms), shim, memory.empty)
    kernels.prepare(mine.form)
    return kernels, mine, memory


def product(x: np.ndarray, matrix: GroupQuantised, sms: int = 132, backwards: bool = False, sm: int = 90) -> np.ndarray:
    kernels, mine, memory = prepared(matrix, x.dtype.name, sms, backwards, sm)
    assert kernels.takes(mine, len(x))
    found = kernels.multiply(x, mine)
    arrived = memory.taken[0]
    assert arrived.dtype == np.uint32
    assert not arrived.any(), "the next product would wait for who has come"
    return found


@pytest.mark.parametrize(
    ("kind", "group", "has_minimum", "sms"),
    covering(list(CODES), [(32, False), (64, True), (0, False), (0, True), (16, True)], [1, 5]),
)
def test_codes_are_multiplied_as_they_lie(kind: str, group: int, has_minimum: bool, sms: int) -> None:
    """Of groups that steps of 64, 32 and 16 bytes lie in; by one block, and by some that share tiles of out."""
    x, matrix = rows_of(37, 1152, "bfloat16"), draw(kind, 203, 1152, group or 1152, has_minimum)
    check_close(product(x, matrix, sms), x, matrix)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_and_so_they_are_with_float16(kind: str) -> None:
    x, matrix = rows_of(20, 256, "float16"), draw(kind, 83, 256, 64)
    check_close(product(x, matrix), x, matrix)


@pytest.mark.parametrize(
    ("rows", "kind", "depth", "sms"),
    covering([FEW_ROWS + 1, 32, 33, 64, 65, MANY_ROWS], [("uint4", 288), ("int8", 144), ("int8", 2048)], [3, 132]),
)
def test_any_rows_lying_apart(rows: int, kind: str, depth: int, sms: int) -> None:
    """Of depths that are no whole stages, too."""
    x = np.full((rows, depth + 16), np.nan, numpy_dtype("bfloat16"))[:, :depth]
    x[:] = rows_of(rows, depth, "bfloat16")
    matrix = draw(kind, 130, depth, 48 if depth % 48 == 0 else 64, has_minimum=kind == "uint4")
    check_close(product(x, matrix, sms), x, matrix)


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(blocks, marks=() if blocks in (1, 2, 3, 4, 5, 7, 9, 11, 16) else pytest.mark.soak)
        for blocks in range(1, 17)
    ],
)
def test_parts_of_tiles_become_the_same_sums_whoever_comes_last(blocks: int) -> None:
    """Of 3 tiles with 16 stages each: a block has whole ones, parts of two, or of one that many share."""
    x, matrix = rows_of(20, 2048, "bfloat16"), draw("int8", 300, 2048, 128)
    found = product(x, matrix, blocks)
    check_close(found, x, matrix)
    np.testing.assert_array_equal(found, product(x, matrix, blocks, backwards=True))


def test_a_product_leaves_nothing_to_the_next_one() -> None:
    matrix = draw("int8", 300, 2048, 128)
    kernels, mine, _ = prepared(matrix, "bfloat16", 7)
    for rows in (20, 70, 20):
        x = rows_of(rows, 2048, "bfloat16")
        check_close(kernels.multiply(x, mine), x, matrix)


@pytest.mark.parametrize("kind", ["int8", "fp8", "uint4"])
def test_no_row_depends_on_those_beside_it(kind: str) -> None:
    matrix, x = draw(kind, 48, 256, 64), rows_of(20, 256, "bfloat16")
    together = product(x, matrix)
    x[:5], x[6:] = np.nan, np.inf
    np.testing.assert_array_equal(together[5], product(x, matrix)[5])


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_every_code_is_exactly_its_number(kind: str) -> None:
    """Each is multiplied with 1 once, and all others with 0."""
    matrix = every_code(kind)
    ones = np.eye(256, dtype=np.float32).astype(numpy_dtype("bfloat16"))
    found = np.concatenate([product(ones[at : at + 64], matrix) for at in range(0, 256, 64)])
    np.testing.assert_array_equal(found[:, 0], matrix.dequantised()[0])


def test_which_products_are_left_to_others() -> None:
    kernels, mine, _ = prepared(draw("int8", 48, 256, 64), "bfloat16", 132)
    assert [kernels.takes(mine, rows) for rows in (FEW_ROWS, FEW_ROWS + 1, MANY_ROWS, MANY_ROWS + 1)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not kernels.takes(replace(mine, shape=(10_000_000, 256)), 20), "more tiles than are counted"
    assert not kernels.takes(replace(mine, form=replace(mine.form, dtype="float32")), 20)
    assert not list(programs_of(replace(mine.form, dtype="float32")))


def every_form() -> Iterator[PackedForm]:
    for bits, has_minimum, is_float in (
        (4, True, False),
        (4, False, False),
        (8, False, False),
        (8, False, True),
        (8, True, False),
    ):
        for group in (0, 16, 32, 64, 128):
            yield form_of("bfloat16", bits, group or 4096, has_minimum, 4096, is_float)


@pytest.mark.parametrize("sm", CARDS)
def test_stages_of_every_form_have_room_on_every_card(sm: int) -> None:
    has_little = sm in (86, 89, 120)
    for form in every_form():
        is_largest = form.bits == 4 and form.group == 16 and form.has_minimum
        assert most_stages(form, 32, sm) >= 2 or (is_largest and has_little), form
        assert most_stages(form, 64, sm) >= 2 or has_little, form


def test_what_no_two_stages_of_have_room_is_left_to_others() -> None:
    kernels, mine, _ = prepared(draw("uint4", 48, 256, 16, has_minimum=True), "bfloat16", 132, sm=89)
    assert not kernels.takes(mine, 20)


def test_a_card_with_little_shared_memory_takes_fewer_rows_at_a_time() -> None:
    x, matrix = rows_of(64, 512, "bfloat16"), draw("uint4", 130, 512, 128, has_minimum=True)
    assert most_stages(packed(matrix, "bfloat16").form, 64, 89) < 2
    check_close(product(x, matrix, sms=4, sm=89), x, matrix)


def every_program() -> Iterator[Any]:
    for sm in TARGETS:
        for form in every_form():
            for _, defines in programs_of(form):
                marks = (
                    () if (sm, form.group, form.has_minimum) in ((90, 128, True), (90, 0, False)) else pytest.mark.soak
                )
                name = f"sm{sm}-{form.bits}-{form.is_float}-{form.has_minimum}-{form.group}-{defines['TOKENS']}"
                yield pytest.param(sm, defines, id=name, marks=marks)


@pytest.mark.parametrize(("sm", "defines"), list(every_program()))
def test_machine_code_spills_nothing(sm: int, defines: Defines) -> None:
    compiled = machine_code(SOURCE, defines, sm)
    assert spilled(compiled) == []
    assert compiled.ptx.count("mma.sync") >= int(defines["TOKENS"]) // 8 * 2 * int(defines["STEP"]) // 16
    assert "cp.async.cg.shared.global.L2::128B" in compiled.ptx
    assert ("griddepcontrol.wait" in compiled.ptx) == (sm >= OVERLAPS_FROM)

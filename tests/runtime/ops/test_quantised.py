"""Quantised matrices: parts of them, several as one, and int8 out of float32."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.errors import ConfigError
from headwise.runtime.ops.quantised import CodeForm, GroupQuantised, common_form, quantise_int8
from headwise.runtime.ops.select import make_ops


def random_matrix(
    rows: int = 6, columns: int = 128, *, signed: bool = False, bits: int = 4, group: int = 32, minimum: bool = True
) -> GroupQuantised:
    draw = np.random.default_rng(rows + columns + bits + group)
    half = 1 << (bits - 1)
    codes = (
        draw.integers(-half, half, (rows, columns)) if signed else draw.integers(0, min(2 * half, 32), (rows, columns))
    )
    scale, low = draw.standard_normal((2, rows, columns // group), dtype=np.float32)
    return GroupQuantised(codes.astype(np.int8 if signed else np.uint8), scale, low if minimum else None, group, bits)


FORMS = [
    {"signed": False, "bits": 4, "minimum": True},
    {"signed": True, "bits": 4, "minimum": False},
    {"signed": True, "bits": 8, "minimum": False, "group": 16},
    {"signed": False, "bits": 8, "minimum": True},
    {"signed": False, "bits": 5, "minimum": True},
    {"signed": True, "bits": 5, "minimum": False},
    {"signed": True, "bits": 6, "minimum": False, "group": 16},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_number_is_its_code_times_its_groups_scale_and_its_groups_minimum(form: dict) -> None:
    matrix = random_matrix(**form)
    values = matrix.dequantised()
    assert values.dtype == np.float32
    for row, column in ((0, 0), (3, 31), (3, 32), (5, 127)):
        group = column // matrix.group
        low = 0.0 if matrix.minimum is None else matrix.minimum[row, group]
        assert values[row, column] == np.float32(matrix.codes[row, column] * matrix.scale[row, group]) + low


@pytest.mark.parametrize("form", FORMS)
def test_parts_are_those_of_the_matrix_and_share_its_memory(form: dict) -> None:
    matrix = random_matrix(**form)
    rows, columns = matrix.rows(2, 5), matrix.columns(32, 96)
    np.testing.assert_array_equal(rows.dequantised(), matrix.dequantised()[2:5])
    np.testing.assert_array_equal(columns.dequantised(), matrix.dequantised()[:, 32:96])
    assert all(np.shares_memory(part.codes, matrix.codes) for part in (rows, columns))


def test_columns_within_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="columns 16 to 64 are no multiples of a group of 32"):
        random_matrix().columns(16, 64)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("axis", [0, 1])
def test_matrices_of_any_forms_become_one_of_the_same_numbers(first: dict, second: dict, axis: int) -> None:
    parts = [random_matrix(**first), random_matrix(**second)]
    joined = GroupQuantised.concatenate(parts, axis)
    np.testing.assert_array_equal(joined.dequantised(), np.concatenate([part.dequantised() for part in parts], axis))
    assert first != second or joined.form == parts[0].form, "what has one form keeps it"


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        (("uint8", 4, 32, True), ("int8", 6, 16, False), ("int8", 6, 16, True)),  # Q4_K and Q6_K
        (("uint8", 5, 32, True), ("int8", 6, 16, False), ("int8", 6, 16, True)),
        (("uint8", 5, 32, True), ("int8", 5, 32, False), ("int8", 6, 32, True)),
        (("uint8", 4, 32, True), ("int8", 5, 32, False), ("int8", 5, 32, True)),
        (("uint8", 4, 32, True), ("int8", 4, 32, False), ("int8", 5, 32, True)),  # Q4_1 and Q4_0
        (("uint8", 4, 32, True), ("uint8", 5, 32, True), ("uint8", 5, 32, True)),
        (("uint8", 4, 32, True), ("int8", 8, 32, False), ("int8", 8, 32, True)),
        (("uint8", 6, 32, True), ("int8", 4, 32, False), ("int8", 8, 32, True)),
    ],
)
def test_matrices_of_two_forms_take_the_fewest_bits_that_hold_both(first: tuple, second: tuple, taken: tuple) -> None:
    forms = [CodeForm(*first), CodeForm(*second)]
    assert common_form(forms) == common_form(forms[::-1]) == taken


def test_codes_that_int8_does_not_hold_are_not_mixed_with_others() -> None:
    wide = GroupQuantised(np.full((6, 128), 200, np.uint8), np.ones((6, 4), np.float32), None, 32, 8)
    with pytest.raises(ValueError, match=r"cannot be one of form .*int8"):
        GroupQuantised.concatenate([wide, random_matrix(signed=True, minimum=False)], 0)


@pytest.mark.parametrize(
    ("scale", "group", "bits"), [((6, 3), 32, 4), ((5, 4), 32, 4), ((6, 2), 48, 4), ((6, 4), 32, 7)]
)
def test_scales_that_do_not_fit_the_codes_are_refused(scale: tuple[int, int], group: int, bits: int) -> None:
    with pytest.raises(ValueError, match="do not go with scales"):
        GroupQuantised(np.zeros((6, 128), np.uint8), np.ones(scale, np.float32), None, group, bits)


def test_int8_is_within_half_a_step_of_each_weight() -> None:
    weight = np.random.default_rng(0).standard_normal((70, 32 * 1024), dtype=np.float32)  # more than one row block
    matrix = quantise_int8(weight)
    assert matrix.form == ("int8", 8, 32, False)
    step = np.abs(weight.reshape(-1, 32)).max(axis=1) / 127
    error = np.abs(matrix.dequantised() - weight).reshape(-1, 32).max(axis=1)
    assert (error <= step * 0.5001).all()
    assert (np.abs(matrix.codes.reshape(-1, 32).astype(int)).max(axis=1) == 127).all()


def test_int8_of_nothing_and_next_to_nothing_is_nothing_and_finite() -> None:
    weight = np.zeros((3, 64), np.float32)
    weight[1] = 1e-45  # the smallest there is
    weight[2, 32:] = 3e38
    values = quantise_int8(weight).dequantised()
    np.testing.assert_allclose(values, weight, rtol=1e-6, atol=1e-40)


def test_a_ranks_columns_quantise_as_they_do_in_the_whole() -> None:
    weight = np.random.default_rng(1).standard_normal((5, 128), dtype=np.float32)
    whole, part = quantise_int8(weight).columns(64, 128), quantise_int8(weight[:, 64:])
    np.testing.assert_array_equal(whole.codes, part.codes)
    np.testing.assert_array_equal(whole.scale, part.scale)


def test_rows_that_are_no_whole_groups_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"int8 has a scale for each 32 .* rows of 48: choose weights_dtype bfloat16"):
        quantise_int8(np.zeros((2, 48), np.float32))


@pytest.mark.parametrize(("group", "bits"), [(8, 4), (24, 8), (40, 5)])
def test_groups_that_cpu_kernels_would_cut_are_expanded(group: int, bits: int) -> None:
    weight = random_matrix(70, 6 * group, signed=True, bits=bits, group=group)
    ops = make_ops("numba", dtype="float32", weights_dtype="int4")
    x = np.random.default_rng(0).standard_normal((5, 6 * group), dtype=np.float32)
    packed = ops.linear_weight(weight)
    assert packed.dtype == "bfloat16"
    expected = x.astype(np.float64) @ weight.dequantised().T.astype(np.float64)
    np.testing.assert_allclose(ops.linear(x, packed), expected, atol=0.01 * np.abs(expected).max())

"""Products with packed weights are those of the values that are stored, and each row's is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.other_cpus import OTHER_CPUS, assert_passes
from support.packed_weights import FORMS, RandomWeight, random_weight
from support.thread_pools import NoCoreForOthers

from headwise.kernels.code_bytes import bits_in_memory, code_bytes
from headwise.kernels.cpu import matmul as module
from headwise.kernels.cpu.matmul import (
    PackedWeight,
    matmul,
    pack_bias,
    pack_float,
    pack_quantised,
    panels_of,
    repacked,
    take_rows,
    unactivated_linear,
)
from headwise.kernels.cpu.simd import ISA

SHAPES = [(1, 64, 64), (7, 40, 96), (13, 200, 160), (97, 66, 288), (400, 130, 64)]
"""Rows, outputs, inputs."""


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_product(found: np.ndarray, x: np.ndarray, weight: RandomWeight) -> None:
    expected, error = weight.product(x)
    assert found.dtype == np.float32
    np.testing.assert_array_less(np.abs(found - expected), error)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_stored_values(form: str, rows: int, outputs: int, inputs: int) -> None:
    weight, x = random_weight(form, outputs, inputs), normal(rows, inputs)
    assert_product(matmul(x, weight.packed, 2), x, weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", [1, 3, 17, 31, 33, 577])
def test_floats_have_any_number_of_inputs(dtype: str, inputs: int) -> None:
    weight, x = random_weight(dtype, 70, inputs), normal(5, inputs)
    assert_product(matmul(x, weight.packed, 1), x, weight)


def test_what_is_deeper_than_the_cache_is_multiplied_in_parts(form: str) -> None:
    weight, x = random_weight(form, 64, 8192 + 96), normal(97, 8192 + 96)
    whole = matmul(x, weight.packed, 2)
    assert_product(whole, x, weight)
    for rows in (1, 5, 7, 9, 10, 23):  # whose last tile has rows of the one before
        np.testing.assert_array_equal(matmul(x[:rows], weight.packed, 1), whole[:rows])


def test_a_bias_is_added(form: str) -> None:
    weight, x, bias = random_weight(form, 100, 64), normal(9, 64), normal(100, seed=2)
    found = matmul(x, weight.packed, 2, pack_bias(bias))
    expected, error = weight.product(x)
    np.testing.assert_array_less(np.abs(found - (expected + bias)), error + 1e-6 * np.abs(bias))


def silu(gate: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate))


def gelu_tanh(gate: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("activation", [silu, gelu_tanh], ids=lambda function: function.__name__)
@pytest.mark.parametrize("half", [32, 40, 75])
def test_a_gated_weight_multiplies_its_activated_half_with_the_other(form: str, activation, half: int) -> None:
    weight, x, bias = random_weight(form, 2 * half, 64, gated=True), normal(9, 64), normal(2 * half, seed=2)
    found = matmul(x, weight.packed, 2, pack_bias(bias, gated=True), activation.__name__)
    expected, error = weight.product(x)
    gate, up = np.split(expected + bias, 2, axis=1)
    of_gate, of_up = np.split(error + 1e-6 * np.abs(bias), 2, axis=1)
    with np.errstate(over="ignore"):
        activated = activation(gate)
    # Neither activation is steeper than 1.2.
    error = 1.2 * of_gate * np.abs(up) + np.abs(activated) * of_up + 1e-5 * np.abs(activated * up) + 1e-6
    np.testing.assert_array_less(np.abs(found - activated * up), error)


@pytest.mark.parametrize("outputs", [64, 40, 150])
def test_what_is_no_gated_weight_has_its_positive_outputs_squared(form: str, outputs: int) -> None:
    weight, x, bias = random_weight(form, outputs, 64), normal(9, 64), normal(outputs, seed=2)
    found = matmul(x, weight.packed, 2, pack_bias(bias), "relu2")
    expected, error = weight.product(x)
    kept, error = np.maximum(expected + bias, 0), error + 1e-6 * np.abs(bias)
    np.testing.assert_array_less(np.abs(found - kept**2), 2 * error * kept + error**2 + 1e-6 * kept**2 + 1e-30)
    np.testing.assert_array_equal(unactivated_linear(x, weight.packed, 2), matmul(x, weight.packed, 2))
    assert np.isnan(matmul(np.full((1, 64), np.nan, np.float32), weight.packed, 1, activation="relu2")).all()


def test_an_activation_that_does_not_fit_the_weight_is_refused(form: str) -> None:
    plain, gated = (random_weight(form, 128, 64, is_gated).packed for is_gated in (False, True))
    for weight, activation in ((plain, "silu"), (gated, "relu2"), (gated, None)):
        with pytest.raises(ValueError, match=rf"activation {activation!r} is not of a weight .* gated={weight.gated}"):
            matmul(normal(2, 64), weight, 1, activation=activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_from_zero_are_shut_or_open(activation: str) -> None:
    gates = np.array([[-1e30], [-3e4], [-200.0], [0.0], [200.0], [3e4], [1e12]], np.float32)
    weight = pack_float(np.array([[1.0], [0.0]], np.float32), "float32", gated=True)
    found = matmul(gates, weight, 1, pack_bias(np.array([0.0, 2.0], np.float32), gated=True), activation)
    np.testing.assert_allclose(found, 2 * np.maximum(gates, 0), rtol=1e-6, atol=1e-5)


def test_a_rows_result_is_the_same_alone_and_among_others(form: str) -> None:
    weight, x = random_weight(form, 200, 320).packed, normal(97, 320)
    whole = matmul(x, weight, 1)
    for rows in range(1, 14):
        np.testing.assert_array_equal(matmul(x[:rows], weight, 1), whole[:rows])
    for row in (0, 50, 96):
        np.testing.assert_array_equal(matmul(x[row : row + 1], weight, 1), whole[row : row + 1])


@pytest.mark.parametrize("rows", [1, 6, 97, 400])
def test_a_result_does_not_depend_on_the_number_of_threads(
    form: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREAD_FLOPS", 1)  # a second thread is woken for anything
    weight, x = random_weight(form, 520, 320).packed, normal(rows, 320)
    alone = matmul(x, weight, 1)
    for _ in range(5):
        np.testing.assert_array_equal(matmul(x, weight, 2), alone)


@pytest.mark.parametrize("rows", [1, 97, 400])
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_what_threads_without_a_core_would_have_taken_is_computed_by_the_others(
    rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = random_weight("bfloat16", 520, 320).packed, normal(rows, 320)
    alone = matmul(x, weight, 1)
    monkeypatch.setattr(module, "THREAD_FLOPS", 1)
    monkeypatch.setattr(module, "pool_of_this_process", NoCoreForOthers)
    np.testing.assert_array_equal(matmul(x, weight, threads), alone)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, np.uint32(0x7F800001).view(np.float32)])
def test_what_is_not_finite_stays_so_and_in_its_row(form: str, number: np.float32) -> None:
    weight, x = random_weight(form, 130, 96), normal(9, 96)
    x[5] = np.abs(x[5])
    before, after = matmul(x, weight.packed, 2), x.copy()
    after[5, 40] = number
    found = matmul(after, weight.packed, 2)
    others = np.arange(9) != 5
    np.testing.assert_array_equal(found[others], before[others])
    with np.errstate(invalid="ignore"):
        expected = after[5].astype(np.float64) @ weight.values.T
    assert not np.isfinite(found[5][~np.isfinite(expected)]).any()
    if np.isinf(number) and "minima" not in form:  # of which there are infinite sums of both signs
        np.testing.assert_array_equal(found[5], expected)


def test_rows_of_a_packed_weight_are_the_stored_values(form: str) -> None:
    weight, ids = random_weight(form, 150, 96), np.array([149, 0, 64, 63, 0], np.int32)
    np.testing.assert_allclose(take_rows(weight.packed, ids), weight.values[ids], rtol=1e-6, atol=1e-6)
    assert take_rows(weight.packed, ids[:0]).shape == (0, 96)


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 150), (64, 128), (128, 130)])
def test_panels_are_products_with_some_of_the_outputs(form: str, start: int, stop: int) -> None:
    weight, x = random_weight(form, 150, 96).packed, normal(3, 96)
    part = panels_of(weight, start, stop)
    assert part is not None
    assert np.shares_memory(part.packed, weight.packed)
    np.testing.assert_array_equal(matmul(x, part, 1), matmul(x, weight, 1)[:, start:stop])
    ids = np.arange(stop - start, dtype=np.int32)
    np.testing.assert_array_equal(take_rows(part, ids), take_rows(weight, ids + np.int32(start)))


def test_outputs_that_do_not_begin_a_panel_cannot_be_had_without_a_copy(form: str) -> None:
    assert panels_of(random_weight(form, 150, 96).packed, 32, 96) is None
    assert panels_of(random_weight(form, 128, 96, gated=True).packed, 64, 128) is None


def test_a_result_is_written_where_it_is_wanted() -> None:
    weight, x = random_weight("int8", 70, 64).packed, normal(3, 64)
    out = np.full((3, 70), np.nan, np.float32)
    assert matmul(x, weight, 1, out=out) is out
    np.testing.assert_array_equal(out, matmul(x, weight, 1))


def test_rows_that_are_not_contiguous_are_taken_as_they_look() -> None:
    weight, wide = random_weight("bfloat16", 70, 64).packed, normal(3, 128)
    np.testing.assert_array_equal(matmul(wide[:, ::2], weight, 1), matmul(wide[:, ::2].copy(), weight, 1))


def test_no_rows_give_no_rows(form: str) -> None:
    assert matmul(np.empty((0, 64), np.float32), random_weight(form, 70, 64).packed, 2).shape == (0, 70)


def test_arrays_that_do_not_fit_are_refused(form: str) -> None:
    weight: PackedWeight = random_weight(form, 70, 64).packed
    for x in (normal(3, 96), normal(3, 63), normal(3, 64).astype(np.float64), normal(3, 64).astype(np.float16)):
        with pytest.raises(ValueError, match="the weight takes float32 rows of 64"):
            matmul(x, weight, 1)
    outs = np.empty((3, 64)), np.empty((2, 70)), np.empty((3, 70)), np.empty((70, 3), np.float32).T
    for out in outs:
        with pytest.raises(ValueError, match=r"must be contiguous float32 \(3, 70\)"):
            matmul(normal(3, 64), weight, 1, out=out)


def test_packed_weights_have_the_bytes_that_their_dtype_promises() -> None:
    def bits(form: str) -> float:
        return random_weight(form, 128, 1024).packed.nbytes * 8 / (128 * 1024)

    sizes = [bits(form) for form in FORMS]
    assert sizes == [32, 16, 8.5, 9, 9, 4.5, 5, 5, 5.5, 6, 7, 7]
    codes = [
        *((bits, *rest) for bits in (8, 4) for rest in ((32, False), (16, False), (32, True))),
        (5, 32, False), (5, 32, True), (6, 16, False), (6, 32, True),
    ]  # fmt: skip
    assert sizes[2:] == [8 * code_bytes(bits, group, minimum, on_gpu=False) for bits, group, minimum in codes]


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("group", [16, 32, 48])
def test_codes_of_fewer_bits_give_the_bits_that_a_byte_for_each_gives(bits: int, signed: bool, group: int) -> None:
    draw, low = np.random.default_rng(bits), -(1 << bits - 1) if signed else 0
    codes = draw.integers(low, low + (1 << bits), (130, 6 * group)).astype(np.int8 if signed else np.uint8)
    scale = draw.standard_normal((130, 6), dtype=np.float32)
    narrow, wide = (pack_quantised(codes, scale, None if signed else -scale, each) for each in (bits, 8))
    taken = bits_in_memory(bits, group, on_gpu=False)
    assert narrow.packed.nbytes * 8 == wide.packed.nbytes * taken
    for rows in (1, 2, 4, 6, 97):
        x = normal(rows, 6 * group)
        np.testing.assert_array_equal(matmul(x, narrow, 2), matmul(x, wide, 2))
    ids = np.arange(130, dtype=np.int32)
    np.testing.assert_array_equal(take_rows(narrow, ids), take_rows(wide, ids))


@pytest.mark.parametrize("group", [2, 8, 24, 40])
def test_groups_that_kernels_would_cut_are_refused(group: int) -> None:
    codes, scale = np.zeros((64, 2 * group), np.int8), np.ones((64, 2), np.float32)
    with pytest.raises(ValueError, match=rf"a scale for each {group} inputs, which are no multiple of 16"):
        pack_quantised(codes, scale, None, 8)


# --- other CPUs ---------------------------------------------------------------------------------------------------

SOME = "stored_values or any_number or alone_and_among or gated_weight or not_finite or fewer_bits"


@pytest.mark.soak
@pytest.mark.skipif(not ISA.avx512f, reason="all tests run so on this CPU, which has no AVX-512")
def test_products_compiled_for_other_cpus_without_avx_512_are_right() -> None:
    assert_passes(__file__, "without AVX-512", SOME)


@pytest.mark.soak
@pytest.mark.parametrize("cpu", OTHER_CPUS)
def test_products_compiled_for_other_cpus_pass_all_tests(cpu: str) -> None:
    assert_passes(__file__, cpu)


# ---- packed arrays that are kept ----


def fields_of(weight: PackedWeight) -> dict[str, Any]:
    names = ("dtype", "outputs", "inputs", "gated", "depth", "offset", "packed", "scales", "minima")
    fields = {name: getattr(weight, name) for name in names}
    return {name: value for name, value in fields.items() if not (isinstance(value, np.ndarray) and not value.size)}


@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_over_the_arrays_of_another_is_the_same(form: str, gated: bool) -> None:
    weight = random_weight(form, 140, 96, gated).packed
    again, x = repacked(**fields_of(weight)), normal(5, 96)
    activation = "silu" if gated else None
    np.testing.assert_array_equal(
        matmul(x, again, 1, activation=activation), matmul(x, weight, 1, activation=activation)
    )
    ids = np.arange(140, dtype=np.int32)
    np.testing.assert_array_equal(take_rows(again, ids), take_rows(weight, ids))


def test_arrays_that_compiled_code_would_misread_are_refused(form: str) -> None:
    fields = fields_of(random_weight(form, 140, 96).packed)
    packed = fields["packed"]
    wrong: list[dict[str, Any]] = [
        {"outputs": 200},
        {"outputs": 60},
        {"inputs": 130},
        {"depth": 128},
        {"depth": 64},
        {"packed": packed[:1]},
        {"packed": packed.astype(np.float64)},
        {"packed": np.frombuffer(bytes(8) + packed.tobytes(), np.uint8)[8:].view(packed.dtype).reshape(packed.shape)},
        {"dtype": "float32" if form != "float32" else "bfloat16"},
        {"scales": np.zeros((3, 5, 64), np.float16)},
        {"minima": np.zeros((3, 7, 64), np.float16)},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="is not packed as"):
            repacked(**{**fields, **change})

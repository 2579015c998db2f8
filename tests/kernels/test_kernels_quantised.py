"""Keys and values kept in fewer bits: dtypes by name, layouts with scales, and what the reference makes of them."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from support.attention_scene import Case, Scene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.gqa import QUANTISED, gqa_layout, head_dim_of, kv_views, quantise, scale_views
from headwise.kernels.nibbles import GROUP, pack, unpack
from headwise.kernels.reference import ReferenceKernels

DTYPES = ("float16", "bfloat16", "int8", "float8_e4m3fn")


def test_dtypes_are_found_by_name() -> None:
    assert numpy_dtype("float16") == np.float16
    assert [numpy_dtype(name).itemsize for name in DTYPES] == [2, 2, 1, 1]
    assert [numpy_dtype(name).name for name in DTYPES] == list(DTYPES)


def test_unknown_dtype_and_missing_package_are_config_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'float7'.*bfloat16, float8_e4m3fn"):
        numpy_dtype("float7")
    numpy_dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match=r"'bfloat16' needs ml_dtypes.*pip install ml_dtypes"):
        numpy_dtype("bfloat16")


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_layouts_have_a_scale_per_member_and_token(dtype: str) -> None:
    layout = gqa_layout(16, 3, 64, dtype)
    assert [role.name for role in layout.roles] == ["key", "value", "key_scale", "value_scale"]
    assert layout.slot_bytes == 2 * 16 * 64 + 2 * 16 * 4
    assert head_dim_of(layout) == 64
    keys, _ = scale_views(np.zeros(2 * layout.block_bytes, np.uint8), layout)
    assert keys.shape == (2, 3, 16)
    without = replace(layout, roles=layout.roles[:2])
    with pytest.raises(ConfigError, match="not one of grouped-query attention"):
        kv_views(np.zeros(layout.block_bytes, np.uint8), without)
    with pytest.raises(ConfigError, match="float16 has no scales"):
        scale_views(np.zeros(4096, np.uint8), gqa_layout(16, 1, 64, "float16"))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_largest_element_of_a_row_becomes_the_largest_that_is_stored(dtype: str) -> None:
    rows = np.array([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0], [1e-30, 0.0, 2e-30]], np.float32)
    stored, scale = quantise(rows, dtype)
    np.testing.assert_allclose(scale, [2.0 / QUANTISED[dtype], 1.0, 2e-30 / QUANTISED[dtype]], rtol=1e-6)
    assert stored.astype(np.float32)[0, 1] == -QUANTISED[dtype]
    assert (stored.astype(np.float32)[1] == 0).all()
    np.testing.assert_allclose(stored.astype(np.float32) * scale[:, None], rows, rtol=0.01, atol=0)


def test_four_bits_have_a_scale_and_a_minimum_per_group() -> None:
    layout = gqa_layout(16, 3, 128, "int4")
    assert layout.slot_bytes == 2 * 16 * (128 // 2 + 128 // GROUP * 4)
    codes, scales = (
        pair[1] for pair in (views(np.zeros(layout.block_bytes, np.uint8), layout) for views in (kv_views, scale_views))
    )
    assert (codes.shape, scales.shape) == ((1, 3, 16, 64), (1, 3, 16, 4, 2))
    with pytest.raises(
        ConfigError, match="int4 takes heads of a multiple of 32 elements, not of 80: choose kv_dtype int8"
    ):
        gqa_layout(16, 3, 80, "int4")


def test_elements_in_four_bits_are_at_most_half_a_step_off_wherever_their_group_lies() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 3, 4, GROUP)) * 2.0 ** rng.integers(-10, 10, (50, 3, 4, 1))
    rows += rows.max(axis=-1, keepdims=True) * rng.integers(-3, 4, (50, 3, 4, 1))
    rows[0], rows[1, :, :, 0], rows[2] = 0.0, 1e9, 0.3  # and ranges that are none, or more than float16 holds
    codes, scales = pack(rows.reshape(50, 3, 4 * GROUP).astype(np.float32))
    assert (codes.dtype, codes.shape, scales.shape) == (np.uint8, (50, 3, 2 * GROUP), (50, 3, 4, 2))
    read, kept = unpack(codes, scales).reshape(rows.shape), np.clip(rows, -65504.0, 65504.0)
    low, high = kept.min(axis=-1, keepdims=True), kept.max(axis=-1, keepdims=True)
    rounding = 2.0**-11 * (high - low + np.abs(low)) + 2.0**-20  # of scales and minima to float16
    assert (np.abs(read - kept) <= (high - low) / 30 + 2 * rounding).all()
    assert (read[0] == 0).all()
    assert unpack(*pack(np.empty((0, 2, GROUP), np.float32))).shape == (0, 2, GROUP), "of nothing nothing"


def test_integers_are_rounded_half_to_even() -> None:
    stored, scale = quantise(np.array([[127.0, 0.5, 1.5, 2.5, -2.5]], np.float32), "int8")
    assert scale == 1.0
    assert stored.tolist() == [[127, 0, 2, 2, -2]]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2), ("float8_e4m3fn", 1.5e-1), ("int4", 4e-1)],
)
def test_reference_reads_back_what_it_wrote_as_exactly_as_the_dtype_allows(dtype: str, tolerance: float) -> None:
    scene = Scene(Case((9, 20), (9, 20), ((0, 0), (7, 2)), share=2, head_dim=64))
    right = scene.expected()
    key, value = (np.concatenate([kv[role] for kv in scene.kv]) for role in (0, 1))
    scene.layout = gqa_layout(4, scene.slots, scene.case.head_dim, dtype)
    blocks = int(scene.batch.block_tables.clip(max=99).max()) + 1
    scene.arena = np.full(blocks * scene.layout.block_bytes, 0xFF, np.uint8)
    # Columns behind a sequence's last block hold ids of no block.
    ReferenceKernels().write_kv(key, value, scene.arena, scene.layout, scene.batch, scene.heads)
    np.testing.assert_allclose(scene.attend(ReferenceKernels()), right, rtol=0, atol=tolerance)

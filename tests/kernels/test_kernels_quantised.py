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


def test_integers_are_rounded_half_to_even() -> None:
    stored, scale = quantise(np.array([[127.0, 0.5, 1.5, 2.5, -2.5]], np.float32), "int8")
    assert scale == 1.0
    assert stored.tolist() == [[127, 0, 2, 2, -2]]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2), ("float8_e4m3fn", 1e-1)]
)
def test_reference_reads_back_what_it_wrote_as_exactly_as_the_dtype_allows(dtype: str, tolerance: float) -> None:
    scene = Scene(Case((9, 20), (9, 20), ((0, 0), (7, 2)), share=2))
    right = scene.expected()
    key, value = (np.concatenate([kv[role] for kv in scene.kv]) for role in (0, 1))
    scene.layout = gqa_layout(4, scene.slots, 16, dtype)
    blocks = int(scene.batch.block_tables.clip(max=99).max()) + 1
    scene.arena = np.full(blocks * scene.layout.block_bytes, 0xFF, np.uint8)
    # Columns behind a sequence's last block hold ids of no block.
    ReferenceKernels().write_kv(key, value, scene.arena, scene.layout, scene.batch, scene.heads)
    np.testing.assert_allclose(scene.attend(ReferenceKernels()), right, rtol=0, atol=tolerance)

"""Latents in int8: how exactly they are kept, and what that makes of attention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.latent_scene import LatentCase, LatentScene

from headwise.kernels.mla import latent_layout, latent_scale_view, latent_view
from headwise.kernels.mla_quantised import dequantise_latents, quantise_latents, stretch_queries
from headwise.kernels.select import make_latent_kernels

RANK, ROTATED = 32, 8


@given(st.integers(0, 2**16), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_every_number_is_kept_to_half_a_unit_of_its_row(seed: int, plain: float, rotated: float) -> None:
    latents = np.random.default_rng(seed).standard_normal((5, RANK + ROTATED)).astype(np.float32)
    latents[:, :RANK] *= np.float32(plain)
    latents[:, RANK:] *= np.float32(rotated)
    stored, scale = quantise_latents(latents, ROTATED)
    assert stored.shape == (5, RANK + 2 * ROTATED)
    error = np.abs(dequantise_latents(stored, scale, ROTATED, np.float64) - latents)
    assert (error <= scale[:, None] * 0.5001).all()
    absmax = [np.abs(part).max(axis=1) for part in (latents[:, :RANK], latents[:, RANK:])]
    np.testing.assert_allclose(scale, np.maximum(absmax[0], absmax[1] / 16) / 127, rtol=1e-6)


def test_rows_of_zeros_and_of_no_numbers() -> None:
    rows = np.zeros((3, RANK + ROTATED), np.float32)
    rows[1, 3], rows[2, RANK] = np.nan, np.inf
    stored, scale = quantise_latents(rows, ROTATED)
    assert scale[0] == 1
    assert not stored[0].any()
    with np.errstate(invalid="ignore"):
        read = dequantise_latents(stored, scale, ROTATED)
    assert not read[0].any()
    assert np.isnan(read[1:]).any(axis=1).all()


def test_products_of_stored_rows_are_those_of_latents() -> None:
    draw = np.random.default_rng(0)
    latents, query = (draw.standard_normal((4, RANK + ROTATED)).astype(np.float32) for _ in range(2))
    stored, scale = quantise_latents(latents, ROTATED)
    expected = query @ dequantise_latents(stored, scale, ROTATED).T
    found = stretch_queries(query, ROTATED) @ stored.T.astype(np.float32) * scale
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_token_takes_a_byte_a_number_two_if_rotated_and_a_scale() -> None:
    layout = latent_layout(64, 1, 576, "int8", rotated=64)
    assert layout.slot_bytes == 64 * (512 + 2 * 64 + 4)
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    assert latent_view(arena, layout).shape == (2, 1, 64, 640)
    assert latent_scale_view(arena, layout).shape == (2, 1, 64)


@pytest.mark.parametrize("name", ["reference", "numba"])
@pytest.mark.parametrize("rotated_size", [0.1, 1.0, 10.0])
def test_attention_is_that_of_a_float32_cache_to_two_percent(name: str, rotated_size: float) -> None:
    """Decodes and chunks of the published geometry, whose scores spread as a model's do."""
    kernels = make_latent_kernels(name, threads=2)
    sizes = {"heads": 4, "rank": 512, "plain": 128, "rotated": 64, "value_dim": 128, "block_size": 64}
    case = LatentCase((1, 20, 60), (300, 90, 60), dtype="int8", rotated_size=rotated_size, **sizes)
    scene, exact = LatentScene(case), LatentScene(LatentCase(**{**vars(case), "dtype": "float32"}))
    for each in (scene, exact):
        each.scale /= 512**0.5 * max(1, rotated_size)
        each.write(kernels)
    right = exact.expected()
    assert np.abs(scene.attend(kernels) - right).max() < 0.02 * np.abs(right).max()


def test_all_kernels_store_the_same_bytes() -> None:
    arenas = []
    for name in ("reference", "numba"):
        scene = LatentScene(LatentCase((1, 50), (90, 80), dtype="int8"))
        scene.batch.block_tables[:, 1:3] = -1
        scene.write(make_latent_kernels(name, threads=2))
        arenas.append(scene.arena)
    np.testing.assert_array_equal(*arenas)

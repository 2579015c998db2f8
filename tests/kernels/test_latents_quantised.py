"""Latents in int8 and E4M3: how exactly they are kept, and what that makes of attention."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.latent_scene import LatentCase, LatentScene, kept_in

from headwise.kernels.e4m3 import E4M3, to_e4m3
from headwise.kernels.mla import latent_layout, latent_scale_view, latent_view
from headwise.kernels.mla_nibbles import pack_latents, stored_twice, unpack_latents
from headwise.kernels.mla_quantised import compressed_of, dequantise_latents, quantise_latents, stretch_queries
from headwise.kernels.nibbles import GROUP, unpack
from headwise.kernels.select import make_latent_kernels

RANK, ROTATED = 32, 8
DTYPES = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])


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


@given(st.integers(0, 2**16), st.floats(1e-2, 1e3), st.floats(1e-2, 1e3))
def test_in_e4m3_rotated_numbers_keep_the_digits_of_bfloat16_and_others_four(
    seed: int, plain: float, rotated: float
) -> None:
    latents = np.random.default_rng(seed).standard_normal((5, RANK + ROTATED)).astype(np.float32)
    latents[:, :RANK] *= np.float32(plain)
    latents[:, RANK:] *= np.float32(rotated)
    stored, scale = quantise_latents(latents, ROTATED, "float8_e4m3fn")
    assert (stored.dtype, stored.shape) == (np.uint8, (5, RANK + 2 * ROTATED))
    error = np.abs(dequantise_latents(stored, scale, ROTATED, np.float64) - latents)
    unit = scale[:, None] * 2.0**-10  # half of the smallest number's
    assert (error[:, :RANK] <= np.maximum(np.abs(latents[:, :RANK]) * 2.0**-4, unit) * 1.001).all()
    assert (error[:, RANK:] <= np.maximum(np.abs(latents[:, RANK:]) * 2.0**-8, unit / 16) * 1.001).all()


def test_every_code_of_e4m3_and_what_lies_between_two_is_rounded_as_ml_dtypes_does() -> None:
    numbers = np.sort(E4M3[~np.isnan(E4M3)])
    between = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, np.linspace(-448, 448, 9999), [1e-9, 0]])
    between = np.concatenate([between, np.nextafter(between, np.float32(0))]).astype(np.float32)
    np.testing.assert_array_equal(E4M3[to_e4m3(between)], between.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    beyond = np.array([500, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(E4M3[to_e4m3(beyond)], np.array([448, -448, np.nan], np.float32))


@DTYPES
def test_rows_of_zeros_and_of_no_numbers(dtype: str) -> None:
    rows = np.zeros((3, RANK + ROTATED), np.float32)
    rows[1, 3], rows[2, RANK] = np.nan, np.inf
    stored, scale = quantise_latents(rows, ROTATED, dtype)
    assert scale[0] == 1
    assert not stored[0].any()
    with np.errstate(invalid="ignore"):
        read = dequantise_latents(stored, scale, ROTATED)
    assert not read[0].any()
    assert np.isnan(read[1:]).any(axis=1).all()


@DTYPES
def test_products_of_stored_rows_are_those_of_latents(dtype: str) -> None:
    draw = np.random.default_rng(0)
    latents, query = (draw.standard_normal((4, RANK + ROTATED)).astype(np.float32) for _ in range(2))
    stored, scale = quantise_latents(latents, ROTATED, dtype)
    expected = query @ dequantise_latents(stored, scale, ROTATED).T
    numbers = E4M3[stored] if stored.dtype == np.uint8 else stored.astype(np.float32)
    found = stretch_queries(query, ROTATED, dtype) @ numbers.T * scale
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@DTYPES
def test_a_token_takes_a_byte_a_number_two_if_rotated_and_a_scale(dtype: str) -> None:
    layout = latent_layout(64, 1, 576, dtype, rotated=64)
    assert layout.slot_bytes == 64 * (512 + 2 * 64 + 4)
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    assert latent_view(arena, layout).shape == (2, 1, 64, 640)
    assert latent_scale_view(arena, layout).shape == (2, 1, 64)


@given(st.integers(0, 2**16), st.sampled_from([(32, 32), (48, 16), (64, 8), (96, 40)]), st.floats(1e-2, 1e2))
def test_in_four_bits_every_number_is_kept_to_half_a_step_of_its_group_and_rotated_ones_to_a_32nd(
    seed: int, sizes: tuple[int, int], rotated_size: float
) -> None:
    rank, rotated = sizes if sum(sizes) % GROUP == 0 else (sizes[0] + GROUP - sum(sizes) % GROUP, sizes[1])
    latents = np.random.default_rng(seed).standard_normal((5, rank + rotated)).astype(np.float32)
    latents[:, rank:] *= np.float32(rotated_size)
    codes, scales = pack_latents(latents, stored_twice(rotated))
    stored = rank + rotated + stored_twice(rotated)
    assert (codes.shape, scales.shape) == ((5, stored // 2), (5, stored // GROUP, 2))
    error = np.abs(unpack_latents(codes, scales, stored_twice(rotated), np.float64) - latents)
    groups = latents.reshape(5, -1, GROUP)
    steps = np.repeat((groups.max(axis=-1) - groups.min(axis=-1)) / 15, GROUP, axis=-1)
    rounding = 2.0**-10 * np.repeat(np.abs(groups).max(axis=-1), GROUP, axis=-1)  # of scales and minima to float16
    assert (error <= steps / 2 + 2 * rounding).all()
    assert (error[:, rank:] <= steps[:, rank:] / 30 + rounding[:, rank:] / 4).all()


@pytest.mark.parametrize(("rank", "rotated"), [(64, 32), (48, 16)])
def test_products_and_sums_of_rows_in_four_bits_are_those_of_latents(rank: int, rotated: int) -> None:
    draw = np.random.default_rng(0)
    latents, query = (draw.standard_normal((4, rank + rotated)).astype(np.float32) for _ in range(2))
    packed = pack_latents(latents, stored_twice(rotated))
    read, rows = unpack_latents(*packed, stored_twice(rotated)), unpack(*packed)
    np.testing.assert_allclose(stretch_queries(query, rotated, "int4") @ rows.T, query @ read.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        compressed_of(query[:, :4] @ rows, rotated, "int4"), query[:, :4] @ read[:, :rank], atol=1e-4
    )


ALL_DTYPES = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int4"])


@ALL_DTYPES
@pytest.mark.parametrize("name", ["reference", "numba"])
@pytest.mark.parametrize("rotated_size", [0.1, 1.0, 10.0])
def test_attention_is_that_of_a_float32_cache_to_a_few_percent(name: str, rotated_size: float, dtype: str) -> None:
    """Decodes and chunks of the published geometry, whose scores spread as a model's do."""
    kernels = make_latent_kernels(name, threads=2)
    sizes = {"heads": 4, "rank": 512, "plain": 128, "rotated": 64, "value_dim": 128, "block_size": 64}
    case = LatentCase((1, 20, 60), (300, 90, 60), dtype=dtype, rotated_size=rotated_size, **sizes)
    scene, exact = LatentScene(case), LatentScene(LatentCase(**{**vars(case), "dtype": "float32"}))
    for each in (scene, exact):
        each.scale /= 512**0.5 * max(1, rotated_size)
        each.write(kernels)
    right = exact.expected()
    most = {"int8": 0.02, "float8_e4m3fn": 0.04, "int4": 0.1}[dtype]
    assert np.abs(scene.attend(kernels) - right).max() < most * np.abs(right).max()


def test_a_token_in_four_bits_takes_half_a_byte_a_number_and_a_scale_and_a_minimum_a_group() -> None:
    layout = latent_layout(64, 1, 576, "int4", rotated=64)
    assert layout.slot_bytes == 64 * ((512 + 2 * 64) // 2 + 20 * 4)
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    assert latent_view(arena, layout).shape == (2, 1, 64, 320)
    assert latent_scale_view(arena, layout).shape == (2, 1, 64, 20, 2)


@ALL_DTYPES
def test_all_kernels_store_the_same_bytes(dtype: str) -> None:
    arenas = []
    for name in ("reference", "numba"):
        scene = LatentScene(kept_in(dtype, LatentCase((1, 50), (90, 80))))
        scene.batch.block_tables[:, 1:3] = -1
        scene.write(make_latent_kernels(name, threads=2))
        arenas.append(scene.arena)
    np.testing.assert_array_equal(*arenas)

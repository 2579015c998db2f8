"""Latents in int8 or E4M3: the compressed part in one byte a number, the rotated part in two.

Rotated keys are not normed, and of other magnitudes than what is compressed; with one byte for each, and one scale for
both, the larger part would take the precision of the smaller. A token's stored row is therefore

    compressed / s      rank bytes
    coarse              rotated bytes: rotated / (16 s), rounded
    fine                rotated bytes: what is left of rotated / s, rounded, -8 to 8

and ``16 * coarse + fine`` is ``rotated / s`` to half a unit, up to 16 times what the compressed part may hold. It is
one row of integers with one scale ``s``, so scores are one product, with queries ``[compressed | 16 rotated |
rotated]``: kernels that know int8 keys read latents, too.

In E4M3, ``coarse`` is rotated / s and ``fine`` 16 times what is left of it: together they have about the digits of
bfloat16, and queries are ``[compressed | rotated | rotated / 16]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels import mla_nibbles
from headwise.kernels.e4m3 import E4M3, LARGEST, to_e4m3
from headwise.kernels.nibbles import INT4

COARSE = 16
"""Fine units in a coarse one."""

INT8, FLOAT8 = "int8", "float8_e4m3fn"

_LARGEST = np.float32(127.0)


def quantise_latents(
    latents: NDArray[Any], rotated: int, dtype: str = INT8
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """``latents [..., width]``, of which the last ``rotated`` are rotated, as stored: ``[..., width + rotated]``, int8
    or the bits of E4M3, and their scales ``[...]``.

    Symmetric, per token, rounded half to even. A scale is 1 where all is zero; the row of a NaN has the scale NaN.
    """
    exact = latents.astype(np.float32)
    return _to_float8(exact, rotated) if dtype == FLOAT8 else _to_int8(exact, rotated)


def quantise_keys(keys: NDArray[Any], dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """``keys [..., dim]`` of an indexer as stored, int8 or the bits of E4M3, and their scales ``[...]``: the same of
    rows of which nothing is kept in two bytes."""
    return quantise_latents(keys, 0, dtype)


def dequantise_keys(stored: NDArray[Any], scale: NDArray[np.float32], dtype: Any = np.float32) -> NDArray[Any]:
    """The reverse of `quantise_keys`, but for what was rounded: ``[..., dim]`` of ``dtype``."""
    return dequantise_latents(stored, scale, 0, dtype)


def _to_float8(exact: NDArray[np.float32], rotated: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    largest = _absmax(exact)
    scale = np.where(largest == 0, np.float32(1.0), largest / LARGEST).astype(np.float32)
    with np.errstate(invalid="ignore"):
        rows = exact / scale[..., None]
        bits = to_e4m3(rows)
        last = rows.shape[-1] - rotated
        fine = to_e4m3(np.float32(COARSE) * (rows[..., last:] - E4M3[bits[..., last:]]))
    return np.concatenate([bits, fine], axis=-1), scale


def _to_int8(exact: NDArray[np.float32], rotated: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    plain, turned = np.split(exact, [exact.shape[-1] - rotated], axis=-1)
    largest = np.maximum(_absmax(plain), _absmax(turned) / np.float32(COARSE))
    scale = np.where(largest == 0, np.float32(1.0), largest / _LARGEST).astype(np.float32)
    with np.errstate(invalid="ignore"):
        plain, turned = np.rint(plain / scale[..., None]), np.rint(turned / scale[..., None])
        coarse = np.rint(turned / np.float32(COARSE))
        return np.concatenate([plain, coarse, turned - COARSE * coarse], axis=-1).astype(np.int8), scale


def dequantise_latents(
    stored: NDArray[Any], scale: NDArray[np.float32], rotated: int, dtype: Any = np.float32
) -> NDArray[Any]:
    """The reverse of `quantise_latents`, but for what was rounded: ``[..., width]`` of ``dtype``."""
    is_float8 = stored.dtype == np.uint8
    rows = (E4M3[stored] if is_float8 else stored).astype(dtype)
    last = rows.shape[-1] - rotated
    coarse, fine = _units(is_float8)
    rows[..., last - rotated : last] *= coarse
    rows[..., last - rotated : last] += fine * rows[..., last:]
    latents: NDArray[Any] = rows[..., :last] * scale[..., None].astype(dtype)
    return latents


def stretch_queries(query: NDArray[np.float32], rotated: int, dtype: str = INT8) -> NDArray[np.float32]:
    """Queries of latents ``[..., width]`` as their products with stored rows take them: ``[..., stored width]``."""
    if dtype == INT4:
        return mla_nibbles.stretch_queries(query, rotated)
    coarse, fine = map(np.float32, _units(dtype == FLOAT8))
    turned = query[..., -rotated:]
    return np.concatenate([query[..., :-rotated], coarse * turned, fine * turned], axis=-1)


def compressed_of(mixed: NDArray[np.float32], rotated: int, dtype: str) -> NDArray[np.float32]:
    """The compressed part ``[..., rank]`` of weighted sums of stored rows, which may be changed."""
    if dtype == INT4:
        return mla_nibbles.compressed_of(mixed, rotated)
    return mixed[..., : mixed.shape[-1] - 2 * rotated]


def _units(is_float8: bool) -> tuple[float, float]:
    """What the coarse and the fine part of a rotated number count."""
    return (1.0, 1 / COARSE) if is_float8 else (float(COARSE), 1.0)


def _absmax(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    largest: NDArray[np.float32] = np.abs(rows).max(axis=-1, initial=0)
    return largest

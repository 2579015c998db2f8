"""Latents in int8: the compressed part in one byte a number, the rotated part in two.

Rotated keys are not normed, and of other magnitudes than what is compressed; with one byte for each, and one scale for
both, the larger part would take the precision of the smaller. A token's stored row is therefore

    compressed / s      rank bytes
    coarse              rotated bytes: rotated / (16 s), rounded
    fine                rotated bytes: what is left of rotated / s, rounded, -8 to 8

and ``16 * coarse + fine`` is ``rotated / s`` to half a unit, up to 16 times what the compressed part may hold. It is
one row of integers with one scale ``s``, so scores are one product, with queries ``[compressed | 16 rotated |
rotated]``: kernels that know int8 keys read latents, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

COARSE = 16
"""Fine units in a coarse one."""

_LARGEST = np.float32(127.0)


def quantise_latents(latents: NDArray[Any], rotated: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """``latents [..., width]``, of which the last ``rotated`` are rotated, as stored: ``[..., width + rotated]``, and
    their scales ``[...]``.

    Symmetric, per token, rounded half to even. A scale is 1 where all is zero; the row of a NaN has the scale NaN.
    """
    exact = latents.astype(np.float32)
    plain, turned = np.split(exact, [exact.shape[-1] - rotated], axis=-1)
    largest = np.maximum(_absmax(plain), _absmax(turned) / np.float32(COARSE))
    scale = np.where(largest == 0, np.float32(1.0), largest / _LARGEST).astype(np.float32)
    with np.errstate(invalid="ignore"):
        plain, turned = np.rint(plain / scale[..., None]), np.rint(turned / scale[..., None])
        coarse = np.rint(turned / np.float32(COARSE))
        return np.concatenate([plain, coarse, turned - COARSE * coarse], axis=-1).astype(np.int8), scale


def dequantise_latents(
    stored: NDArray[np.int8], scale: NDArray[np.float32], rotated: int, dtype: Any = np.float32
) -> NDArray[Any]:
    """The reverse of `quantise_latents`, but for what was rounded: ``[..., width]`` of ``dtype``."""
    rows = stored.astype(dtype)
    last = rows.shape[-1] - rotated
    rows[..., last - rotated : last] *= COARSE
    rows[..., last - rotated : last] += rows[..., last:]
    latents: NDArray[Any] = rows[..., :last] * scale[..., None].astype(dtype)
    return latents


def stretch_queries(query: NDArray[np.float32], rotated: int) -> NDArray[np.float32]:
    """Queries of latents ``[..., width]`` as their products with stored rows take them: ``[..., width + rotated]``."""
    return np.concatenate([query[..., :-rotated], COARSE * query[..., -rotated:], query[..., -rotated:]], axis=-1)


def _absmax(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    largest: NDArray[np.float32] = np.abs(rows).max(axis=-1, initial=0)
    return largest

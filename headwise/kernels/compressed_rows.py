"""Rows of attention to a window and entries as blocks keep them: as numbers, or in int8 or E4M3 with a scale each.

Of a row of ``size`` numbers the first ``turning`` of each half are rotated, with each other. These tell positions
apart, and take two bytes where others take one, as of latents: see `headwise.kernels.mla_quantised`, whose ``coarse``
and ``fine`` are here

    codes       size bytes, in the order of the numbers; of those that are rotated ``coarse``
    fine        2 * turning bytes: of the rotated ones of the first half, then of the second

with one scale. DeepSeek keeps the others in E4M3 and the rotated ones in bfloat16, as many bytes. Several layers' rows
may lie side by side as one, with a scale each. `headwise.kernels.compressed_base` says what rows are for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.compressed_base import Kept
from headwise.kernels.mla import (
    LATENT,
    LATENT_DTYPES,
    LATENT_SCALE,
    QUANTISED_LATENTS,
    Index,
    has_scales,
    latent_scale_view,
    latent_view,
)
from headwise.kernels.mla_quantised import FLOAT8, INT8, dequantise_latents, quantise_latents
from headwise.kernels.reference import blocks_of, sequences_of

QUANTISED = (INT8, FLOAT8)
"""In which rows may be kept with scales."""


def row_roles(size: int, dtype: str, turning: int = 0, beside: int = 1) -> tuple[Role, ...]:
    """What a block keeps of rows of ``beside`` layers.

    Raises:
        ConfigError: they are not kept in this dtype.
    """
    if dtype in QUANTISED:
        codes = Role(LATENT, (beside * (size + 2 * turning),), dtype)
        return codes, Role(LATENT_SCALE, (beside,), "float32")
    if dtype not in LATENT_DTYPES or dtype in QUANTISED_LATENTS:
        raise ConfigError(
            f"kv_dtype {dtype} cannot hold what compressed attention keeps: choose kv_dtype {FLOAT8}, {INT8}, bfloat16 "
            "or float32"
        )
    return (Role(LATENT, (beside * size,), dtype),)


def stored_numbers(layout: BlockLayout, size: int) -> int:
    """Of a layer's row of ``size`` numbers as it is stored."""
    return layout.roles[0].shape[0] // layout.roles[1].shape[0] if has_scales(layout) else size


def stored_part(layout: BlockLayout, size: int, begin: int) -> slice:
    """Where, in stored rows of layers side by side, those of the layer are that would begin with number ``begin``."""
    each = stored_numbers(layout, size)
    first = begin // size * each if has_scales(layout) else begin
    return slice(first, first + each)


def store_rows(arena: NDArray[np.uint8], layout: BlockLayout, at: Index, rows: NDArray[Any], begin: int = 0) -> None:
    """Store ``rows [n, size]`` at these places; begin: see `stored_part`."""
    size = rows.shape[-1]
    part, view = stored_part(layout, size, begin), latent_view(arena, layout)
    if has_scales(layout):
        turning = (part.stop - part.start - size) // 2
        view[(*at, part)], latent_scale_view(arena, layout)[(*at, begin // size)] = quantised(
            rows, turning, layout.roles[0].dtype
        )
        return
    view[(*at, part)] = to_bits(rows) if view.dtype == np.uint16 else rows


def load_rows(
    arena: NDArray[np.uint8], layout: BlockLayout, at: Index, size: int, begin: int = 0, dtype: Any = np.float32
) -> NDArray[Any]:
    """Rows at these places, ``[*places, size]`` of ``dtype``, float32 or wider."""
    stored = latent_view(arena, layout)[at][..., stored_part(layout, size, begin)]
    if has_scales(layout):
        return dequantised(stored, latent_scale_view(arena, layout)[at][..., begin // size], size, dtype)
    return (to_float32(stored) if stored.dtype == np.uint16 else stored).astype(dtype, copy=False)


def write_rows(rows: NDArray[Any], arena: NDArray[np.uint8], kept: Kept, batch: AttentionBatch) -> None:
    """See `PlainCompressedKernels.write_rows`."""
    size = kept.layout.block_size
    for sequence, some, positions in sequences_of(batch):
        blocks = blocks_of(batch, sequence, kept.heads.group[0], positions, size)
        mapped = blocks >= 0
        at = blocks[mapped], kept.heads.slot[0], positions[mapped] % size
        store_rows(arena, kept.layout, at, rows[some][mapped])


def quantised(rows: NDArray[Any], turning: int, dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """``rows [..., size]`` as stored, ``[..., size + 2 * turning]``, and their scales ``[...]``."""
    size = rows.shape[-1]
    order = _rotated_last(size, turning)
    latents, scales = quantise_latents(rows[..., order], 2 * turning, dtype)
    stored = latents.copy()
    stored[..., order] = latents[..., :size]
    return stored, scales


def dequantised(stored: NDArray[Any], scales: NDArray[np.float32], size: int, dtype: Any = np.float32) -> NDArray[Any]:
    """The reverse of `quantised`, but for what was rounded: ``[..., size]`` of ``dtype``."""
    turning = (stored.shape[-1] - size) // 2
    order = _rotated_last(size, turning)
    latents = np.concatenate([stored[..., order], stored[..., size:]], axis=-1)
    rows = np.empty((*stored.shape[:-1], size), dtype)
    rows[..., order] = dequantise_latents(latents, scales, 2 * turning, dtype)
    return rows


@cache
def _rotated_last(size: int, turning: int) -> NDArray[np.int64]:
    """Numbers of a row in the order of latents: those that are rotated behind all others."""
    first, second = np.split(np.arange(size), 2)
    return np.concatenate([first[turning:], second[turning:], first[:turning], second[:turning]])

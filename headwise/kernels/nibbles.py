"""Keys and values in four bits: codes of 0 to 15, in groups of 32 that have a scale and a minimum each.

What is read is ``minimum + code * scale``. A minimum pays: elements of keys lie to one side of zero.
Byte ``i`` of a group's 16 holds the codes of its elements ``i``, in the low half, and ``i + 16``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

INT4 = "int4"
GROUP = 32
"""Elements of a head that share a scale and a minimum."""

SCALE_DTYPE = "float16"
_LARGEST_CODE = 15
_LARGEST_FLOAT16 = 65504.0


def pack(rows: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """``rows [..., head_dim]`` as codes ``[..., head_dim / 2]``, and scales and minima ``[..., head_dim / 32, 2]``.

    A group's range is dealt to 16 codes; elements are rounded half to even, by the scale and the minimum as they are
    stored, in float32. What float16 does not hold is clipped.
    """
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP, GROUP).astype(np.float32)
    groups = np.clip(groups, -_LARGEST_FLOAT16, _LARGEST_FLOAT16)
    minimum = (groups.min(axis=-1) + np.float32(0)).astype(np.float16)  # of both zeros the one without a sign
    scale = ((groups.max(axis=-1) - minimum.astype(np.float32)) / _LARGEST_CODE).astype(np.float16)
    above = groups - minimum.astype(np.float32)[..., None]
    steps = np.divide(above, scale.astype(np.float32)[..., None], out=np.zeros_like(above), where=scale[..., None] > 0)
    codes = np.clip(np.rint(steps), 0, _LARGEST_CODE).astype(np.uint8)
    low, high = codes[..., : GROUP // 2], codes[..., GROUP // 2 :]
    packed = (low | high << 4).reshape(*rows.shape[:-1], rows.shape[-1] // 2)
    return packed, np.stack([np.where(scale > 0, scale, np.float16(0)), minimum], axis=-1)


def unpack(packed: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """What `pack` made of rows, read: ``[..., head_dim]``."""
    halves = packed.reshape(*packed.shape[:-1], packed.shape[-1] * 2 // GROUP, GROUP // 2)
    codes = np.concatenate([halves & 0xF, halves >> 4], axis=-1).astype(np.float32)
    scale, minimum = scales[..., 0, None].astype(np.float32), scales[..., 1, None].astype(np.float32)
    rows: NDArray[np.float32] = (minimum + codes * scale).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    return rows

"""Random numbers on a device: drawn on the host, for the device's library may have no generator of a dtype."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.gqa import QUANTISED, head_dim_of, kv_dtype_of, kv_views, quantise, scale_views
from headwise.kernels.nibbles import INT4, pack

if TYPE_CHECKING:
    from gpu.rig import Rig

Array = Any

RANDOM_BYTES = 32 << 20
QUANTISED_BLOCKS = 32


def fill(rig: Rig, array: Array, dtype: str = "bfloat16", salt: int = 0) -> Array:
    """Fill flat uint8 ``array`` with normally distributed numbers of ``dtype``; ``salt`` makes others.

    A larger one than `RANDOM_BYTES` gets pieces of these, each from another place: no two blocks are alike.
    """
    drawn = _drawn(min(RANDOM_BYTES, array.nbytes), dtype, rig.seed, salt)
    pool = rig.upload(drawn)
    if array.nbytes <= RANDOM_BYTES:
        rig.copy(array, pool)
    else:
        piece, rng = RANDOM_BYTES // 2, np.random.default_rng((rig.seed, salt))
        for at in range(0, array.nbytes, piece):
            part, start = array[at : at + piece], int(rng.integers(piece // 256)) * 256
            rig.copy(part, pool[start : start + part.nbytes])
    rig.synchronize()  # before the pool is freed
    return array


def fill_blocks(rig: Rig, arena: Array, layout: BlockLayout) -> Array:
    """Fill an arena with keys and values of normally distributed numbers; quantised ones are drawn for a few blocks."""
    dtype, blocks = kv_dtype_of(layout), arena.nbytes // layout.block_bytes
    if dtype not in (*QUANTISED, INT4):
        return fill(rig, arena, dtype)
    drawn, rng = np.zeros(min(blocks, QUANTISED_BLOCKS) * layout.block_bytes, np.uint8), np.random.default_rng(rig.seed)
    for stored, scales in zip(kv_views(drawn, layout), scale_views(drawn, layout), strict=True):
        rows = rng.standard_normal((*stored.shape[:-1], head_dim_of(layout)), dtype=np.float32)
        stored[:], scales[:] = pack(rows) if dtype == INT4 else quantise(rows, dtype)
    pool = rig.upload(drawn)
    for at in range(0, arena.nbytes, pool.nbytes):
        part = arena[at : at + pool.nbytes]
        rig.copy(part, pool[: part.nbytes])
    rig.synchronize()  # before the pool is freed
    return arena


@lru_cache(maxsize=4)
def _drawn(num_bytes: int, dtype: str, seed: int, salt: int) -> NDArray[np.uint8]:
    numbers = np.random.default_rng((seed, salt)).standard_normal(
        num_bytes // numpy_dtype(dtype).itemsize, dtype=np.float32
    )
    return numbers.astype(numpy_dtype(dtype)).view(np.uint8)


def random(rig: Rig, shape: tuple[int, ...], dtype: str, salt: int = 0) -> Array:
    """Normally distributed numbers on the device."""
    count = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
    return fill(rig, rig.empty(count), dtype, salt).view(numpy_dtype(dtype)).reshape(shape)

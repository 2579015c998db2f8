"""Random numbers on a device: drawn on the host, for the device's library may have no generator of a dtype."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype

if TYPE_CHECKING:
    from gpu.rig import Rig

Array = Any

RANDOM_BYTES = 32 << 20


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

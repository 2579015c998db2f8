"""Steps of any size as steps of few sizes, for which CUDA graphs are recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def padded(array: NDArray[np.int32], length: int, value: int = 0) -> NDArray[np.int32]:
    """``array [n, ...]`` with ``value`` behind it, ``[length, ...]``."""
    whole = np.zeros((length, *array.shape[1:]), np.int32)
    whole[: len(array)] = array
    if value:
        whole[len(array) :] = value
    return whole


def all_sizes(size_of: Callable[[int], int], most: int) -> list[int]:
    """Every size that ``size_of`` pads sizes from 1 to ``most`` to, ascending."""
    sizes = [size_of(1)]
    while sizes[-1] < most:
        sizes.append(size_of(sizes[-1] + 1))
    return sizes

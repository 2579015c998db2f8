"""Philox 4x32-10, a counter-based random generator: the draw is a function of key and counter, with no state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox_4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator itself: ``counter [n, 4]`` and ``key [n, 2]`` of 32-bit words to ``[n, 4]`` random ones."""
    c0, c1, c2, c3 = (counter[:, word] for word in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _32) ^ c1 ^ k0, second & _LOW, (first >> _32) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), each 53 bits, independent of whatever else is drawn."""
    seeds, positions = seeds.astype(np.uint64), positions.astype(np.uint64)
    zeros = np.zeros_like(positions)
    counter = np.stack([positions & _LOW, positions >> _32, zeros, zeros], axis=1)
    words = philox_4x32(counter, np.stack([seeds & _LOW, seeds >> _32], axis=1))
    bits = (words[:, 0] << np.uint64(21)) ^ (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53

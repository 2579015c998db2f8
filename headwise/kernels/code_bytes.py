"""What a number takes in memory that is kept as a code: of weights as the kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np

CPU_SCALES: Any = np.float16
"""Scales and minima of groups, as `headwise.kernels.cpu.matmul` keeps them."""

GPU_SCALES: Any = np.float32
"""As `headwise.kernels.cuda.packed` does."""


def bits_in_memory(bits: int, group: int, on_gpu: bool) -> int:
    """What a code of 4, 5, 6 or 8 bits takes, with so many neighbours in a group. On a GPU 8, if it is not 4. On a CPU
    32 codes of 5 bits lie together: if groups cut these apart, they take 6.
    """
    if on_gpu:
        return 4 if bits == 4 else 8
    return 6 if bits == 5 and group % 32 else bits


def code_bytes(bits: int, group: int, has_minimum: bool, on_gpu: bool) -> float:
    """Bytes of a number of ``bits`` bits with its share of a scale, and perhaps a minimum, that ``group`` neighbours
    have in common; 0: all of a row, so that the share is next to nothing.
    """
    scale = np.dtype(GPU_SCALES if on_gpu else CPU_SCALES).itemsize
    return bits_in_memory(bits, group, on_gpu) / 8 + (scale * (1 + has_minimum) / group if group else 0.0)

"""What a number takes in memory that is kept as a code: of weights as the kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np

CPU_SCALES: Any = np.float16
"""Scales and minima of groups, as `headwise.kernels.cpu.matmul` keeps them."""

GPU_SCALES: Any = np.float32
"""As `headwise.kernels.cuda.packed` does."""


def code_bytes(bits: int, group: int, has_minimum: bool, on_gpu: bool) -> float:
    """Bytes of a number of ``bits`` bits with its share of a scale, and perhaps a minimum, that ``group`` neighbours
    have in common; 0: all of a row, so that the share is next to nothing.
    """
    scale = np.dtype(GPU_SCALES if on_gpu else CPU_SCALES).itemsize
    return bits / 8 + (scale * (1 + has_minimum) / group if group else 0.0)

"""What kernels of a GPU are made of, whichever they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwise.kernels.cuda.launch import Array, TritonLauncher
from headwise.kernels.cuda.programs import Programs


@dataclass(frozen=True)
class GpuParts:
    """What kernels are made of on a device.

    launcher, programs: run Triton's kernels, and make those of CUDA C++
    allocate: ``allocate(nbytes)`` gives memory as a flat uint8 array
    empty:    ``empty(shape, dtype)`` gives an uninitialised array
    multiply_heads: ``multiply_heads(x, weights, out)`` enqueues ``out [T, H, N] = x [T, H, K] @ weights [H, K, N]``
    tma:      see `Tuning.tma`
    """

    launcher: TritonLauncher
    programs: Programs
    allocate: Callable[[int], Array]
    empty: Callable[[tuple[int, ...], Any], Array]
    multiply_heads: Callable[[Array, Array, Array], None]
    tma: bool = False

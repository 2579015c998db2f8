"""The number of threads of NumPy's BLAS, which it otherwise reads from the environment when NumPy is imported."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np


def set_numpy_threads(threads: int) -> bool:
    """Let NumPy's matrix products use ``threads`` threads; False if this NumPy has no OpenBLAS of its own.

    Idle OpenBLAS threads spin: with more of them than free cores, a product takes many times as long as on one thread.
    """
    openblas = bundled_openblas()
    if openblas is None:
        return False
    openblas.scipy_openblas_set_num_threads64_(threads)
    return True


@cache
def bundled_openblas() -> ctypes.CDLL | None:
    """The library inside NumPy's wheel. It is loaded already: this only finds it."""
    for path in Path(np.__file__).parent.parent.glob("numpy.libs/libscipy_openblas*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "scipy_openblas_set_num_threads64_"):
            return library
    return None

"""The dtypes that cached data may have, by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headwise.errors import ConfigError

BEYOND_NUMPY = {"bfloat16": 2, "float8_e4m3fn": 1}
"""Names that NumPy does not know by itself, and their bytes; ml_dtypes brings them, as it does to CuPy."""

PACKED = {"int4": 2}
"""Names of dtypes whose elements share a byte, and how many do."""


def packed_bytes(name: str, count: int) -> int:
    """Bytes of ``count`` elements side by side.

    Raises:
        ConfigError: there is no such dtype.
    """
    return -(-count // PACKED[name]) if name in PACKED else count * dtype_bytes(name)


def dtype_bytes(name: str) -> int:
    """Bytes of an element, also where ml_dtypes is not installed: a CPU keeps bfloat16 as its bits.

    Raises:
        ConfigError: there is no such dtype.
    """
    return BEYOND_NUMPY.get(name) or numpy_dtype(name).itemsize


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype called ``name``: one of NumPy's, or one of `BEYOND_NUMPY`.

    Raises:
        ConfigError: there is no such dtype, or ml_dtypes, which has it, is not installed.
    """
    try:
        if name in BEYOND_NUMPY:
            import ml_dtypes

            dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        else:
            dtype = np.dtype(name)
    except ImportError as error:
        raise ConfigError(
            f"dtype {name!r} needs ml_dtypes, which cannot be imported ({error}): `pip install ml_dtypes`"
        ) from error
    except TypeError as error:
        beyond = ", ".join(BEYOND_NUMPY)
        raise ConfigError(f"unknown dtype {name!r}: give one of NumPy's, or one of {beyond}") from error
    return dtype

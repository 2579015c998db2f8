"""The dtypes that cached data may have, by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headwise.errors import ConfigError

BEYOND_NUMPY = {"bfloat16": 2, "float8_e4m3fn": 1}
"""Names that NumPy does not know by itself, and their bytes; ml_dtypes brings them, as it does to CuPy."""


def itemsize(name: str) -> int:
    """Bytes of a number of the dtype called ``name``, whether ml_dtypes is installed or not.

    Raises:
        ConfigError: there is no such dtype.
    """
    return BEYOND_NUMPY[name] if name in BEYOND_NUMPY else numpy_dtype(name).itemsize


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

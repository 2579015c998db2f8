"""Chooses the framework behind `TensorOps`, once, at start."""

from __future__ import annotations

from importlib.util import find_spec

from headwise.errors import ConfigError
from headwise.runtime.ops.base import TensorOps


def make_ops(name: str) -> TensorOps:
    """The tensor operations called ``name``; ``auto`` is paddle where it is installed, else numpy.

    Threads are OpenMP's and OpenBLAS's own: ``OMP_NUM_THREADS`` of the process, which whoever starts it sets.

    Raises ConfigError if the framework is unknown or not installed.
    """
    if name == "auto":
        name = "paddle" if find_spec("paddle") is not None else "numpy"
    if name == "numpy":
        from headwise.runtime.ops.numpy_ops import NumpyOps

        return NumpyOps()
    if name == "paddle":
        try:
            from headwise.runtime.ops.paddle_ops import PaddleOps
        except ImportError as error:
            raise ConfigError(
                f"tensor_ops paddle needs paddlepaddle, which cannot be imported ({error}): "
                "`pip install paddlepaddle`, or use tensor_ops numpy"
            ) from None
        return PaddleOps()
    raise ConfigError(f"unknown tensor_ops {name!r}; choose auto, paddle or numpy")

"""Chooses the framework that implements `TensorOps`, once, at start."""

from __future__ import annotations

from headwise.errors import ConfigError
from headwise.kernels.cuda.launch import TritonLauncher
from headwise.kernels.cuda.programs import Programs
from headwise.runtime.ops.base import TensorOps


def resolve_ops_name(name: str, on_gpu: bool = False) -> str:
    """The name of the operations to use: for ``auto`` the fastest by `benchmarks/peers.py`, else ``name`` itself."""
    if name != "auto":
        return name
    return "cupy" if on_gpu else "numba"


def make_gpu_ops(
    name: str,
    dtype: str,
    programs: Programs,
    launcher: TritonLauncher,
    weights_dtype: str = "auto",
    own_products: bool = False,
) -> TensorOps:
    """The tensor operations on CuPy's current device.

    name:     paddle, for which `open_paddle` must have been called; any other is cupy
    dtype:    of weights and activations: float32, float16 or bfloat16
    programs, launcher: compile the kernels of cupy's, and run them; paddle has its own
    weights_dtype: of weights in memory, see `GpuOps`; paddle has those of ``dtype`` only
    own_products: see `GpuOps`; paddle has those of Paddle

    Raises:
        ConfigError: there are no kernels for ``dtype``.
    """
    if resolve_ops_name(name, on_gpu=True) == "paddle":
        from headwise.runtime.ops.paddle_gpu_ops import PaddleGpuOps

        return PaddleGpuOps(dtype)
    from headwise.runtime.ops.cupy_ops import CupyOps

    return CupyOps(dtype, programs, launcher, weights_dtype, own_products)


def make_ops(name: str, threads: int = 1, dtype: str = "float32", weights_dtype: str = "float32") -> TensorOps:
    """The tensor operations on a CPU.

    The number of threads holds for the whole process: the last call decides.

    name:          numba, numpy, paddle, or auto, which is numba
    dtype:         of activations; numpy and paddle take float32 only
    weights_dtype: of weights in memory, see `NumbaOps`; numpy and paddle take float32 only

    Raises:
        ConfigError: the name is unknown, its framework is not installed or cannot compute in these dtypes, or numba may
            not use so many cores.
    """
    exact = dtype == weights_dtype == "float32"
    name = resolve_ops_name(name)
    if name == "numba":
        from headwise.runtime.ops.numba_ops import NumbaOps

        _set_numpy_threads(1)  # little is left for NumPy to compute
        return NumbaOps(threads, weights_dtype)
    if not exact and name in ("numpy", "paddle"):
        raise ConfigError(
            f"tensor_ops {name} computes in float32 only, and dtype is {dtype}, weights_dtype {weights_dtype}: choose "
            "tensor_ops numba"
        )
    if name == "numpy":
        from headwise.runtime.ops.numpy_ops import NumpyOps

        _set_numpy_threads(threads)
        return NumpyOps()
    if name == "paddle":
        try:
            from headwise.runtime.ops.paddle_ops import PaddleOps
        except ImportError as error:
            raise ConfigError(
                f"tensor_ops paddle needs paddlepaddle, which cannot be imported ({error}): "
                "`pip install paddlepaddle`, or use tensor_ops numpy"
            ) from None
        _set_numpy_threads(1)  # Paddle has threads of its own: two pools would compete for the cores
        return PaddleOps(threads)
    raise ConfigError(f"unknown tensor_ops {name!r}; choose auto, numba, paddle or numpy")


def _set_numpy_threads(threads: int) -> None:
    """Let NumPy's matrix products use ``threads`` threads.

    Idle OpenBLAS threads spin: with more of them than free cores, a product takes many times as long as on one.
    """
    from threadpoolctl import ThreadpoolController  # not at the top: it sets an environment variable

    ThreadpoolController().select(internal_api="openblas").limit(limits=threads)

"""Which attention kernels and which block copy to run, chosen once at start."""

from __future__ import annotations

from headwise.errors import ConfigError
from headwise.kernels.base import AttentionKernels
from headwise.kernels.block_copy import BlockCopy, ReferenceBlockCopy
from headwise.kernels.reference import ReferenceKernels

KERNELS = ("auto", "numba", "reference")
"""For host memory; those of a GPU are `headwise.kernels.cuda.kernels.CudaKernels`."""


def resolve_kernels_name(name: str, on_gpu: bool = False) -> str:
    """What ``auto`` stands for: the fastest. Any other name is itself."""
    if name != "auto":
        return name
    return "cuda" if on_gpu else "numba"


def make_kernels(name: str, threads: int, kv_dtype: str = "float32") -> AttentionKernels:
    """The kernels called ``name``; ``auto`` takes the fastest for host memory (``numba``).

    ``threads`` bounds the CPU threads of a call; the reference uses those of NumPy's matrix product. Compiles the
    kernels for KV of ``kv_dtype`` where that was never done on this machine.

    Raises:
        ConfigError: no such kernels, their package is not installed, ``threads`` cannot be had, or there are
            none for ``kv_dtype``.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown kernels {name!r}; choose one of {', '.join(KERNELS)}")
    if name == "reference":
        return ReferenceKernels()
    try:
        from headwise.kernels.cpu.attention import NumbaKernels
    except ImportError as error:
        raise ConfigError(
            f"kernels {name!r} need numba, which cannot be imported ({error}): "
            "`pip install numba`, or choose kernels 'reference' (slow)"
        ) from error
    return NumbaKernels(threads, kv_dtype)


def make_block_copy(name: str, threads: int) -> BlockCopy:
    """The block copy that goes with the attention kernels called ``name`` (``auto``, ``numba`` or ``reference``).

    ``threads`` bounds the CPU threads of a call. Compiles where that was never done on this machine.

    Raises:
        ConfigError: no such kernels, or their package is not installed.
    """
    if name == "reference":
        return ReferenceBlockCopy()
    if name not in ("auto", "numba"):
        raise ConfigError(f"unknown block copy {name!r}; choose one of auto, numba, reference")
    try:
        from headwise.kernels.block_copy_cpu import NumbaBlockCopy
    except ImportError as error:
        raise ConfigError(
            f"block copy {name!r} needs numba, which cannot be imported ({error}): "
            "`pip install numba`, or choose 'reference' (slow)"
        ) from error
    return NumbaBlockCopy(threads)

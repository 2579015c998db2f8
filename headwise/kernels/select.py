"""Which attention kernels and which block copy to run, chosen once at start."""

from __future__ import annotations

from headwise.errors import ConfigError
from headwise.kernels.base import AttentionKernels
from headwise.kernels.block_copy import BlockCopy, ReferenceBlockCopy, RunCopy, reference_run_copy
from headwise.kernels.compressed_base import PlainCompressedKernels
from headwise.kernels.compressed_reference import ReferenceCompressedKernels
from headwise.kernels.delta_base import DeltaKernels, ProjectedDeltaKernels
from headwise.kernels.delta_reference import ReferenceDeltaKernels
from headwise.kernels.dsa_base import IndexedKernels
from headwise.kernels.dsa_reference import ReferenceIndexedKernels
from headwise.kernels.kda_base import KdaKernels
from headwise.kernels.kda_reference import ReferenceKdaKernels
from headwise.kernels.mla_base import LatentKernels
from headwise.kernels.mla_reference import ReferenceLatentKernels
from headwise.kernels.reference import ReferenceKernels
from headwise.kernels.ssm_base import SsmKernels
from headwise.kernels.ssm_reference import ReferenceSsmKernels

KERNELS = ("auto", "numba", "reference")
"""For host memory; those of a GPU are `headwise.kernels.cuda.kernels.CudaKernels`."""


def resolve_kernels_name(name: str, on_gpu: bool = False) -> str:
    """What ``auto`` stands for: the fastest. Any other name is itself."""
    if name != "auto":
        return name
    return "cuda" if on_gpu else "numba"


def instructions() -> str:
    """Those that compiled kernels use on this machine, for people."""
    try:
        from headwise.kernels.cpu.simd import INSTRUCTIONS
    except ImportError:
        return "no compiled kernels"
    return INSTRUCTIONS


def make_kernels(name: str, threads: int, kv_dtype: str | None = None) -> AttentionKernels:
    """The kernels called ``name``; ``auto`` takes the fastest for host memory (``numba``).

    ``threads`` bounds the CPU threads of a call; the reference uses those of NumPy's matrix product. Kernels for KV of
    ``kv_dtype`` are made ready, if one is given, else when they are first called; what this machine never compiled is
    compiled then.

    Raises:
        ConfigError: no such kernels, their package is not installed, ``threads`` cannot be had, or there are
            none for ``kv_dtype``.
    """
    if _is_reference(name):
        return ReferenceKernels()
    try:
        from headwise.kernels.cpu.attention import NumbaKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaKernels(threads, kv_dtype)


def make_latent_kernels(name: str, threads: int) -> LatentKernels:
    """Those of latent attention, as `make_kernels`; they raise the same."""
    if _is_reference(name):
        return ReferenceLatentKernels()
    try:
        from headwise.kernels.cpu.mla_attention import NumbaLatentKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaLatentKernels(threads)


def make_indexed_kernels(name: str, threads: int) -> IndexedKernels:
    """Those of latent attention with an indexer, as `make_kernels`; they raise the same."""
    if _is_reference(name):
        return ReferenceIndexedKernels()
    try:
        from headwise.kernels.cpu.dsa_attention import NumbaIndexedKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaIndexedKernels(threads)


def make_compressed_kernels(name: str, threads: int) -> PlainCompressedKernels:
    """Those of attention to a window and entries, as `make_kernels`; they raise the same."""
    if _is_reference(name):
        return ReferenceCompressedKernels()
    try:
        from headwise.kernels.cpu.compressed_attention import NumbaCompressedKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaCompressedKernels(threads)


def make_delta_kernels(name: str, threads: int) -> DeltaKernels | ProjectedDeltaKernels:
    """Those of gated delta-nets, as `make_kernels`; they raise the same."""
    if _is_reference(name):
        return ReferenceDeltaKernels()
    try:
        from headwise.kernels.cpu.delta_attention import NumbaDeltaKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaDeltaKernels(threads)


def make_kda_kernels(name: str, threads: int) -> KdaKernels:
    """Those of Kimi Delta Attention, as `make_kernels`; they raise the same."""
    if _is_reference(name):
        return ReferenceKdaKernels()
    try:
        from headwise.kernels.cpu.kda_attention import NumbaKdaKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaKdaKernels(threads)


def make_ssm_kernels(name: str, threads: int) -> SsmKernels:
    """Those of state space models, as `make_kernels`; they raise the same."""
    if _is_reference(name):
        return ReferenceSsmKernels()
    try:
        from headwise.kernels.cpu.ssm_attention import NumbaSsmKernels
    except ImportError as error:
        raise _without_numba(name, error) from error
    return NumbaSsmKernels(threads)


def _is_reference(name: str) -> bool:
    if name not in KERNELS:
        raise ConfigError(f"unknown kernels {name!r}; choose one of {', '.join(KERNELS)}")
    return name == "reference"


def _without_numba(name: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"kernels {name!r} need numba, which cannot be imported ({error}): "
        "`pip install numba`, or choose kernels 'reference' (slow)"
    )


def make_block_copy(name: str, threads: int) -> BlockCopy:
    """The block copy that goes with the attention kernels called ``name`` (``auto``, ``numba`` or ``reference``).

    ``threads`` bounds the CPU threads of a call. Compiles where that was never done on this machine.

    Raises:
        ConfigError: no such kernels, or their package is not installed.
    """
    if _is_reference_copy(name):
        return ReferenceBlockCopy()
    try:
        from headwise.kernels.block_copy_cpu import NumbaBlockCopy
    except ImportError as error:
        raise _copy_without_numba(name, error) from error
    return NumbaBlockCopy(threads)


def make_run_copy(name: str, threads: int) -> RunCopy:
    """The copy of runs of bytes that goes with `make_block_copy`; it raises the same."""
    if _is_reference_copy(name):
        return reference_run_copy
    try:
        from headwise.kernels.block_copy_cpu import NumbaRunCopy
    except ImportError as error:
        raise _copy_without_numba(name, error) from error
    return NumbaRunCopy(threads)


def _is_reference_copy(name: str) -> bool:
    if name not in KERNELS:
        raise ConfigError(f"unknown block copy {name!r}; choose one of {', '.join(KERNELS)}")
    return name == "reference"


def _copy_without_numba(name: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"block copy {name!r} needs numba, which cannot be imported ({error}): "
        "`pip install numba`, or choose 'reference' (slow)"
    )

"""The kernels of latent attention of a GPU on NumPy arrays: Triton's interpreter, the shim and cuBLAS on the host."""

from __future__ import annotations

from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import poisoned, poisoned_array
from support.gpu.host_cublas import HostCublas, aligned
from support.gpu.interpreted_attention import RecordingLauncher

from headwise.kernels.cuda.attention import Tuning
from headwise.kernels.cuda.cublas import Cublas
from headwise.kernels.cuda.dsa_kernels import CudaIndexedKernels
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.tiles import Tile

SMALL = Tuning(
    prefill=Tile(16, 16, 4, 2), decode=Tile(16, 16, 4, 2), split_programs=4, split_bytes=0, min_split_tokens=32
)
"""Tiles that short sequences fill several of."""


def gpu_parts(sms: int = 4) -> GpuParts:
    """Memory is poisoned: NaN in every float."""
    cublas = Cublas(aligned, HostCublas(), lambda: 0x5000)
    return GpuParts(
        RecordingLauncher(sms),
        ShimPrograms(),
        poisoned,
        poisoned_array,
        cublas.products_of_heads,
    )


def latent_kernels(tuning: Tuning = SMALL, sms: int = 4) -> CudaLatentKernels:
    kernels = CudaLatentKernels(gpu_parts(sms))
    kernels._latents.tuning = tuning
    kernels._latents.__post_init__()  # with memory for as many splits
    return kernels


def indexed_kernels(tuning: Tuning = SMALL, sms: int = 4, score_bytes: int = 1 << 16) -> CudaIndexedKernels:
    kernels = CudaIndexedKernels(gpu_parts(sms), threads=64, score_bytes=score_bytes)
    kernels._latents.tuning = tuning
    kernels._latents.__post_init__()  # with memory for as many splits
    return kernels

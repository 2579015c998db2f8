"""The shim that runs CUDA C++ on a CPU computes what a GPU would, and refuses what a GPU would get wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimProgram

SOURCE = """
extern "C" __global__ void reverse(int* data)
{
    __shared__ int held[64];
    held[threadIdx.x] = data[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    data[blockIdx.x * 64 + threadIdx.x] = held[63 - threadIdx.x];
}
extern "C" __global__ void sum(int* data)
{
    int value = data[threadIdx.x];
    for (int lanes = 4; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffff, value, lanes, 8);
    data[threadIdx.x] = __shfl_sync(0xffffffff, value, 1, 8);
}
extern "C" __global__ void round_to_f16(float* data) { data[threadIdx.x] = f16_to_f32(f32_to_f16(data[threadIdx.x])); }
extern "C" __global__ void leave(int* data) { if (threadIdx.x < 7) return; __syncthreads(); *data = 1; }
extern "C" __global__ void disagree(int* data)
{
    data[threadIdx.x] = threadIdx.x % 2 ? __shfl_xor_sync(0xffffffff, 1, 1) : __shfl_xor_sync(0xffffffff, 1, 2);
}
extern "C" __global__ void some(int* data) { *data = __shfl_sync(0xffff, *data, 0); }
extern "C" __global__ void misaligned(int* data)
{
    *reinterpret_cast<uint2*>(data) = *reinterpret_cast<uint2*>(data + 1);
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "kernels.cu"
    path.write_text(SOURCE)
    return path


def test_float16_is_that_of_numpy(source: Path) -> None:
    halves = np.arange(1 << 15, dtype=np.uint16).view(np.float16)  # all of one sign, to infinity and NaN
    data = np.zeros((3, 2, len(halves)), np.float32)
    data[0] = halves
    with np.errstate(all="ignore"):
        data[1], data[2] = np.nextafter(data[0], np.float32(0)), np.nextafter(data[0], np.float32(9e9))
        data[:, 1, 1:] = -(data[0, 0, 1:] + data[0, 0, :-1]) / 2
        data = data.ravel()
        expected = data.astype(np.float16).astype(np.float32)
    kernel = ShimProgram(source, {}, source.parent).kernel("round_to_f16", 1024)
    for part in data.reshape(-1, 1024):
        kernel((1, 1, 1), [np.uint64(part.ctypes.data)])
    np.testing.assert_array_equal(data, expected)


def launch(source: Path, name: str, data: np.ndarray, *, threads: int = 64, backwards: bool = False) -> None:
    kernel = ShimProgram(source, {}, source.parent, backwards).kernel(name, threads)
    kernel((len(data) // threads, 1, 1), [np.uint64(data.ctypes.data)])


@pytest.mark.parametrize("backwards", [False, True])
def test_threads_of_a_block_meet_at_barriers_and_share_memory(source: Path, backwards: bool) -> None:
    data = np.arange(192, dtype=np.int32)
    launch(source, "reverse", data, backwards=backwards)
    np.testing.assert_array_equal(data.reshape(3, 64), np.arange(192).reshape(3, 64)[:, ::-1])


@pytest.mark.parametrize("backwards", [False, True])
def test_lanes_of_a_warp_exchange_values(source: Path, backwards: bool) -> None:
    data = np.arange(64, dtype=np.int32)
    launch(source, "sum", data, backwards=backwards)
    np.testing.assert_array_equal(data, np.arange(64).reshape(-1, 8).sum(axis=1).repeat(8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leave", "not every thread reaches"),
        ("disagree", "not every thread reaches"),
        ("some", "a shuffle of part of a warp"),
        ("misaligned", "not aligned to its type"),
    ],
)
def test_what_a_gpu_would_get_wrong_is_refused(source: Path, name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        launch(source, name, np.zeros(64, np.int32))


def test_a_launch_with_wrong_arguments_is_refused(source: Path) -> None:
    program = ShimProgram(source, {}, source.parent)
    with pytest.raises(ValueError, match="expected 1 items"):
        program.kernel("reverse", 64)((1, 1, 1), [])
    for parameters, message in (("QQ", "another number of arguments"), ("i", "another width")):
        with pytest.raises(AssertionError, match=message):
            program.kernel("reverse", 64, parameters=parameters)((1, 1, 1), [0] * len(parameters))
    with pytest.raises(AssertionError, match="whole warps"):
        launch(source, "reverse", np.zeros(64, np.int32), threads=63)

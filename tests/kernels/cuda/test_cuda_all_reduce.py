"""Small sums over ranks in one launch: ranks are threads here, whose launches run side by side and wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import SERVED, accesses, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.all_reduce import (
    BLOCKS,
    SOURCE,
    CudaAllReduce,
    defines_of,
    memory_bytes,
    most_bytes,
)

EPS = 1e-5


class Ranks:
    """Each with its memory, and launches of its own thread."""

    def __init__(self, size: int, backwards: bool = False) -> None:
        self.size = size
        self.memories = [aligned_zeros(memory_bytes(size)) for _ in range(size)]
        self._threads = ThreadPoolExecutor(size)
        addresses = [memory.ctypes.data for memory in self.memories]
        self.kernels = []
        for rank in range(size):
            programs = ShimPrograms(apart=f"rank{rank}")
            programs.backwards = backwards
            self.kernels.append(CudaAllReduce(programs, rank, addresses))

    def each(self, work: Callable[[int, CudaAllReduce], Any]) -> list[Any]:
        return list(self._threads.map(work, range(self.size), self.kernels))


def aligned_zeros(num_bytes: int) -> np.ndarray:
    whole = np.zeros(num_bytes + 16, np.uint8)
    return whole[-whole.ctypes.data % 16 :][:num_bytes]


def numbers(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))
    return aligned_zeros(values.nbytes).view(values.dtype).reshape(shape) + values


def summed(parts: list[np.ndarray], *others: np.ndarray) -> np.ndarray:
    """In rank order, in float32, rounded once."""
    total = np.float32(0)
    for part in [*parts, *others]:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float32)
    return wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize(
    ("dtype", "backwards"), [("float32", False), ("float32", True), ("float16", False), ("bfloat16", False)]
)
def test_all_ranks_have_the_same_sums_in_rank_order_however_often(dtype: str, backwards: bool) -> None:
    ranks = Ranks(3, backwards)
    for turn, rows in enumerate((1, 5, BLOCKS + 2, 2, 1, 1)):  # more and fewer blocks than the step before
        parts = [numbers(10 * turn + rank, rows, 24, dtype=dtype) for rank in range(3)]
        given = [part.copy() for part in parts]
        ranks.each(lambda rank, kernel, parts=parts: kernel.all_reduce(parts[rank], parts[rank]))
        for part in parts:
            np.testing.assert_array_equal(part, summed(given))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2e-7), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_the_residual_stream_and_its_norm_come_with_the_sum(dtype: str, rounding: float, with_bias: bool) -> None:
    ranks, width = Ranks(2), 4 * 512 + 32  # two vectors a thread in float32, some of which have but one
    weight, bias = numbers(7, width), numbers(8, width, dtype=dtype) if with_bias else None
    for rows in (3, BLOCKS + 1):
        if not ranks.kernels[0].takes(np.empty((rows, width), numpy_dtype(dtype))):
            continue
        parts = [numbers(rank, rows, width, dtype=dtype) for rank in range(2)]
        streams = [numbers(5, rows, width, dtype=dtype) for _ in range(2)]
        outs = [np.full_like(part, np.nan) for part in parts]
        expected = summed(parts, *([] if bias is None else [bias]), streams[0])
        ranks.each(
            lambda rank, kernel, parts=parts, streams=streams, outs=outs: kernel.add_rms_norm(
                parts[rank], streams[rank], weight, EPS, streams[rank], outs[rank], bias
            )
        )
        np.testing.assert_array_equal(streams, [expected, expected])
        np.testing.assert_array_equal(outs[0], outs[1])
        np.testing.assert_allclose(outs[0].astype(np.float32), normed(expected, weight), rtol=rounding, atol=rounding)


def test_ranks_of_different_speed_stay_in_step() -> None:
    """One is two steps ahead of what another reads, were it not for the wait: what it read would be of a later step."""
    ranks, turns = Ranks(2), 60

    def run(rank: int, kernel: CudaAllReduce) -> list[float]:
        found, x = [], np.empty((2, 8), np.float32)
        for turn in range(turns):
            x[:] = (turn + 1) * 10**rank
            kernel.all_reduce(x, x)
            found.append(float(x[0, 0]))
            assert (x == x[0, 0]).all()
        return found

    assert ranks.each(run) == [[11.0 * (turn + 1) for turn in range(turns)]] * 2


def test_what_a_slower_rank_may_still_read_lies_untouched_for_a_step() -> None:
    ranks = Ranks(2)
    for turn in range(1, 5):
        parts = [np.full((1, 8), turn, np.float32) for _ in range(2)]
        ranks.each(lambda rank, kernel, parts=parts: kernel.all_reduce(parts[rank], parts[rank]))
        for memory in ranks.memories:
            even, odd = memory[: 2 * most_bytes(2)].view(np.float32).reshape(2, -1)[:, 0]
            assert (even, odd) == ((turn, turn - 1) if turn % 2 == 0 else (turn - 1, turn))


def test_eight_ranks_sum_too() -> None:
    ranks = Ranks(8)
    parts = [numbers(rank, 2, 16, dtype="bfloat16") for rank in range(8)]
    outs = [np.empty_like(part) for part in parts]
    ranks.each(lambda rank, kernel: kernel.all_reduce(parts[rank], outs[rank]))
    np.testing.assert_array_equal(outs, [summed(parts)] * 8)


def test_shapes_alone_say_what_is_small_enough() -> None:
    kernel = CudaAllReduce(ShimPrograms(), 0, [1, 2])
    half = numpy_dtype("bfloat16")
    most = most_bytes(2) // (4096 * 2)
    assert kernel.takes(np.empty((most, 4096), half))
    assert not kernel.takes(np.empty((most + 1, 4096), half))
    assert not kernel.takes(np.empty((1, 4097), half)), "rows of whole vectors"
    assert not kernel.takes(np.empty((1, 4 * 512 * 8 + 8), half)), "rows that a block can hold"
    assert not kernel.takes(np.empty((1, 8), np.int32))
    assert not kernel.takes(np.empty((0, 8), half))
    assert not kernel.takes(np.empty(8, half))
    assert kernel.takes(np.empty((2, 4096), half)[:, :8]), "gaps do not matter: other ranks may have none"
    assert most_bytes(8) < most_bytes(4)


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize(("ranks", "width"), [(2, 4096), (4, 8192), (8, 4096), (8, 16384)])
def test_other_ranks_are_read_in_whole_vectors_past_the_cache_and_nothing_spills(
    sm: int, ranks: int, width: int
) -> None:
    compiled = machine_code(SOURCE, defines_of(numpy_dtype("bfloat16"), ranks, width // 8), sm)
    assert spilled(compiled) == []
    assert accesses(compiled, "ld") == {"v4.u32", "u64", "nc.v4.f32"}  # rows; the step's number; the norm's weights
    assert accesses(compiled, "st") == {"v4.u32", "u64"}
    strong = re.findall(r"\b(ld|st)\.(acquire|release|relaxed)\.sys\.global\.(v4\.u32|u64)", compiled.ptx)
    held = -(-width // 8 // 512)
    assert strong == 2 * [
        ("st", "release", "u64"),
        ("ld", "acquire", "u64"),
        *[("ld", "relaxed", "v4.u32")] * ranks * held,
    ]

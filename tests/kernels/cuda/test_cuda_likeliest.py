"""The likeliest tokens in CUDA C++: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import TARGETS, accesses, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.likeliest import BLOCKS, MOST_PARTS, MOST_ROWS, SOURCE, CudaLikeliest, parts_of
from headwise.runtime.ops.numpy_ops import NumpyOps

DTYPES = ("float16", "bfloat16", "float32")
zeros = partial(np.zeros, dtype=np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 700),
    threads=st.sampled_from([32, 96]),
    part_tokens=st.sampled_from([10, 90, 1000]),
    backwards=st.booleans(),
)
def test_it_is_the_first_of_equals_or_the_first_nan(
    dtype: str, seed: int, vocab: int, threads: int, part_tokens: int, backwards: bool
) -> None:
    rng = np.random.default_rng(seed)
    wide = np.rint(rng.standard_normal((4, vocab + 4)) * 2).astype(numpy_dtype(dtype))
    wide[0] = 99  # beside the others
    scores = wide[:, 1 + seed % 4 :][:, :vocab]
    scores[0] = -np.inf
    scores[1, rng.random(vocab) < 0.1] = np.nan
    scores[2, rng.random(vocab) < 0.1] = -np.nan
    scores[3] = np.where(rng.random(vocab) < 0.5, -0.0, 0.0)
    shim = ShimPrograms()
    shim.backwards = backwards
    likeliest = CudaLikeliest(shim, scores.dtype, zeros, threads, part_tokens)
    expected, largest = NumpyOps(dtype).greedy(scores)
    for _ in range(2):  # the first one leaves its memory as the next one needs it
        tokens, best = np.full(4, -1, np.int32), np.zeros(4, np.float32)
        likeliest(scores, tokens, best)
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(best, largest)


def test_more_rows_than_a_launch_has() -> None:
    scores = np.zeros((MOST_ROWS + 3, 2), np.float32)
    scores[::2, 1] = 1
    tokens, best = np.full(len(scores), -1, np.int32), np.zeros(len(scores), np.float32)
    CudaLikeliest(ShimPrograms(), scores.dtype, zeros, threads=32)(scores, tokens, best)
    np.testing.assert_array_equal(tokens, scores[:, 1])
    np.testing.assert_array_equal(best, scores[:, 1])


def test_rows_are_cut_into_as_many_parts_as_fill_a_card() -> None:
    assert [parts_of((rows, 128_000), 4096) for rows in (1, 16, 64, 500, 600)] == [32, 32, 8, 1, 1]
    assert parts_of((1, 49_152), 4096) == 12
    assert parts_of((16, 1 << 19), 4096) == MOST_PARTS == BLOCKS // 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm", TARGETS)
def test_it_compiles_without_spills_to_wide_loads_for_four_blocks_of_16_warps(dtype: str, sm: int) -> None:
    compiled = machine_code(SOURCE, variant_of(numpy_dtype(dtype)), sm)
    assert spilled(compiled) == []
    assert {"v4.u32", "v4.f32"} & accesses(compiled, "ld")
    (registers,) = re.findall(r"Used (\d+) registers", compiled.log)
    assert int(registers) <= 32, "2048 threads share 65,536 registers"

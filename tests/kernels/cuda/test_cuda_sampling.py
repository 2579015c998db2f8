"""Drawing tokens in CUDA C++: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import TARGETS, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.sampling import MOST_TOKENS, SOURCE, CudaSampling, rows_of
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.sampler import Draws, filtered, sample, uniform

DTYPES = ("float16", "bfloat16", "float32")
examples = settings(max_examples=25, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def shim() -> ShimPrograms:
    return ShimPrograms()


def drawn(
    shim: ShimPrograms,
    scores: np.ndarray,
    params: list[SamplingParams],
    seeds: list[int],
    positions: list[int],
    threads: int = 64,
    cap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel draws, and the largest logits that it tells of."""
    rows = rows_of(
        np.array([p.temperature for p in params]),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
        np.array(seeds, np.uint64),
        np.array(positions, np.int64),
    )
    tokens, best = np.full(len(scores), -1, np.int32), np.zeros(len(scores), np.float32)
    sampling = CudaSampling(shim, scores.dtype, threads)
    assert sampling.takes(scores)
    sampling.draw(scores, rows, cap, tokens, best)
    return tokens, best


def is_a_close_call(logits: np.ndarray, params: SamplingParams, number: float, token: int) -> bool:
    """Whether rounding may decide for ``token``: a hair's breadth of any parameter gives it, too."""
    near = 1e-5
    for factor in (1 - near, 1 + near):
        changed = SamplingParams(
            temperature=params.temperature * factor,
            top_k=params.top_k,
            top_p=min(params.top_p * factor, 1.0),
            min_p=min(params.min_p * factor, 1.0),
        )
        candidates, weights = filtered(logits, changed)
        cumulative = np.cumsum(weights) / weights.sum()
        low, high = np.searchsorted(cumulative, [number - near, number + near], side="right")
        if token in candidates[low : high + 1]:
            return True
    return False


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 60, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(
    params=st.lists(params_strategy, min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 700),
    threads=st.sampled_from([64, 96, 256]),
    backwards=st.booleans(),
    ties=st.booleans(),
    cap=st.sampled_from([0.0, 0.0, 5.0]),
)
def test_tokens_are_those_of_the_sampler_on_the_host(
    shim: ShimPrograms, dtype: str, params: list, seed: int, vocab: int, threads: int, backwards: bool, ties: bool, cap
) -> None:
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((len(params), vocab + 3)) * 4
    wide = (np.rint(wide) if ties else wide).astype(numpy_dtype(dtype))
    wide[rng.random(wide.shape) < 0.1] = -np.inf
    wide[:, 0] = -0.0
    scores = wide[:, :vocab]  # with gaps between rows
    seeds = rng.integers(0, 2**63, len(params)).tolist()
    positions = rng.integers(0, 100_000, len(params)).tolist()
    shim.backwards = backwards
    tokens, best = drawn(shim, scores, params, seeds, positions, threads, cap)
    logits = scores.astype(np.float32)
    logits = np.float32(cap) * np.tanh(logits / np.float32(cap)) if cap else logits
    expected = sample(logits, Draws(params, np.array(seeds, np.uint64), np.array(positions, np.int64)))
    np.testing.assert_allclose(best, logits.max(axis=1), rtol=1e-6)
    for row in np.flatnonzero(tokens != expected):
        assert params[row].temperature > 0
        assert is_a_close_call(logits[row], params[row], uniform(seeds[row], positions[row]), int(tokens[row]))


def test_a_thousand_draws_follow_the_distribution(shim: ShimPrograms) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05, 0.0]) + 1e-300).astype(np.float32)
    count = 1000
    tokens, _ = drawn(shim, np.tile(logits, (count, 1)), [SamplingParams()] * count, [11] * count, list(range(count)))
    draws = Draws([SamplingParams()] * count, np.full(count, 11, np.uint64), np.arange(count))
    expected = sample(np.tile(logits, (count, 1)), draws)
    assert (tokens != expected).sum() <= 1
    assert np.bincount(tokens, minlength=5)[4] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_that_is_not_finite_is_told_and_others_draw(shim: ShimPrograms, dtype: str, bad: float) -> None:
    scores = np.zeros((3, 100), numpy_dtype(dtype))
    scores[1, 37] = bad
    scores[2, :] = -np.inf
    scores[0, 5] = 9
    tokens, best = drawn(shim, scores, [SamplingParams(temperature=1e-30)] * 3, [1, 2, 3], [4, 5, 6])
    assert tokens[0] == 5
    assert best[0] == 9
    np.testing.assert_array_equal(best[1:], [abs(bad), -np.inf])


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(seed=st.integers(0, 2**32), vocab=st.integers(1, 700), threads=st.sampled_from([64, 96, 256]))
def test_the_likeliest_token_is_the_first_of_equals_or_the_first_nan(
    shim: ShimPrograms, dtype: str, seed: int, vocab: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = np.rint(rng.standard_normal((4, vocab)) * 2).astype(numpy_dtype(dtype))
    scores[1, rng.random(vocab) < 0.1] = np.nan
    scores[2] = -np.inf
    scores[3] = np.where(rng.random(vocab) < 0.5, -0.0, 0.0)
    tokens, best = np.full(4, -1, np.int32), np.zeros(4, np.float32)
    CudaSampling(shim, scores.dtype, threads).likeliest(scores, tokens, best)
    expected, largest = NumpyOps(dtype).greedy(scores)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(best, largest)


def test_a_vocabulary_of_real_size_draws_as_on_the_host(shim: ShimPrograms) -> None:
    rng = np.random.default_rng(2)
    scores = (rng.standard_normal((4, 50_257)) * 3).astype(np.float32)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=50, top_p=0.95),
        SamplingParams(temperature=1.5, top_k=1000, min_p=0.001),
    ]
    tokens, _ = drawn(shim, scores, params, [1, 2, 3, 4], [10, 20, 30, 40], threads=1024)
    expected = sample(scores, Draws(params, np.arange(1, 5, dtype=np.uint64), np.arange(10, 50, 10)))
    assert tokens.tolist() == expected.tolist()


def test_what_does_not_fit_is_refused(shim: ShimPrograms) -> None:
    sampling = CudaSampling(shim, np.dtype(np.float32))
    assert sampling.takes(np.zeros((1, MOST_TOKENS), np.float32))
    assert not sampling.takes(np.zeros((1, MOST_TOKENS + 1), np.float32))
    assert not sampling.takes(np.zeros((8, 8), np.float16))
    assert not sampling.takes(np.zeros((8, 8), np.float32).T)
    with pytest.raises(ConfigError, match="float64"):
        CudaSampling(shim, np.dtype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm", TARGETS)
def test_it_compiles_without_spills_for_blocks_of_32_warps(dtype: str, sm: int) -> None:
    compiled = machine_code(SOURCE, variant_of(numpy_dtype(dtype)), sm)
    assert spilled(compiled) == []
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.log)]
    assert registers
    assert max(registers) <= 64, "1024 threads share 65,536 registers"

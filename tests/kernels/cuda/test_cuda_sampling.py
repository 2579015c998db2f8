"""Drawing tokens in CUDA C++: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import TARGETS, accesses, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.launch import Kernel
from headwise.kernels.cuda.programs import Defines
from headwise.kernels.cuda.sampling import (
    MOST_ROWS,
    MOST_TOKENS,
    SCRATCH_BYTES,
    SOURCE,
    CudaSampling,
    rows_of,
    thresholds_of,
)
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.sampler import Draws, filtered, sample, uniform

DTYPES = ("float16", "bfloat16", "float32")
SCRATCH = np.zeros(SCRATCH_BYTES // 8, np.uint64)
"""Of all draws here: each leaves it as the next one needs it."""

examples = settings(max_examples=12, suppress_health_check=list(HealthCheck))


class Launched:
    """`Programs` of kernels that only tell how they are launched."""

    def __init__(self) -> None:
        self._grids: list[tuple[int, int, int]] = []

    def __call__(self, source: str, defines: Defines) -> Launched:
        return self

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        return lambda grid, arguments: self._grids.append(grid)

    def grids(self) -> list[tuple[int, int, int]]:
        return self._grids


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
    part_tokens: int = 100,
    is_flat: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel draws, and the largest logits that it tells of. is_flat: at a temperature at which all tokens
    weigh the same."""
    rows = table_of(params, seeds, positions)
    if is_flat:
        rows["inverse_temperature"] = 1e-38
    tokens, best = np.full(len(scores), -1, np.int32), np.zeros(len(scores), np.float32)
    sampling = CudaSampling(shim, scores.dtype, SCRATCH, threads, part_tokens)
    assert sampling.takes(scores)
    sampling.draw(scores, rows, thresholds_of(rows), cap, tokens, best)
    return tokens, best


def table_of(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> np.ndarray:
    return rows_of(
        np.array([p.temperature for p in params]),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
        np.array(seeds, np.uint64),
        np.array(positions, np.int64),
    )


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
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0, 100.0]),
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
    threads=st.sampled_from([64, 96]),
    part_tokens=st.sampled_from([10, 90, 1000]),
    backwards=st.booleans(),
    spread=st.sampled_from([1e-3, 4.0, 4.0, 300.0]),
    ties=st.booleans(),
    masked=st.sampled_from([0.1, 0.1, 1.0]),
    cap=st.sampled_from([0.0, 0.0, 5.0]),
)
def test_tokens_are_those_of_the_sampler_on_the_host(
    shim: ShimPrograms, dtype: str, params: list, seed: int, vocab: int, threads: int, part_tokens: int,
    backwards: bool, spread: float, ties: bool, masked: float, cap: float,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    spread = min(spread, 4.0) if cap else spread  # where a cap makes logits alike, they are as tanh is rounded
    wide = rng.standard_normal((len(params), vocab + 3)) * spread
    wide = (np.rint(wide) if ties else wide).astype(numpy_dtype(dtype))
    wide[rng.random(wide.shape) < masked] = -np.inf
    scores = wide[:, seed % 4 : seed % 4 + vocab]  # at any place within 16 bytes, with others' scores around
    scores[:, -1] = -0.0
    seeds = rng.integers(0, 2**63, len(params)).tolist()
    positions = rng.integers(0, 100_000, len(params)).tolist()
    shim.backwards = backwards
    tokens, best = drawn(shim, scores, params, seeds, positions, threads, cap, part_tokens)
    logits = scores.astype(np.float32)
    logits = np.float32(cap) * np.tanh(logits / np.float32(cap)) if cap else logits
    expected = sample(logits, Draws(params, np.array(seeds, np.uint64), np.array(positions, np.int64)))
    np.testing.assert_allclose(best, logits.max(axis=1), rtol=1e-6)
    for row in np.flatnonzero(tokens != expected):
        assert params[row].temperature > 0
        assert is_a_close_call(logits[row], params[row], uniform(seeds[row], positions[row]), int(tokens[row]))


def test_draws_follow_the_distribution(shim: ShimPrograms) -> None:
    """More of them than a launch has rows."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05, 0.0]) + 1e-300).astype(np.float32)
    count = MOST_ROWS + 40
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
    params = [SamplingParams(temperature=1e-30, top_p=0.9)] * 3
    tokens, best = drawn(shim, scores, params, [1, 2, 3], [4, 5, 6], part_tokens=30)
    assert tokens[0] == 5
    assert best[0] == 9
    np.testing.assert_array_equal(best[1:], [abs(bad), -np.inf])


def test_thresholds_among_keys_of_every_size_are_found(shim: ShimPrograms) -> None:
    """Numbers from subnormal ones to a hundred; the smallest of them weigh the same, but have an order."""
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 0x42C80000, 400, dtype=np.uint32) | rng.integers(0, 2, 400, dtype=np.uint32) << 31
    wide, narrow = bits.view(np.float32), bits.view(np.float32) * np.float32(1e-40)
    params = [SamplingParams(temperature=100, top_k=k, top_p=p) for k, p in ((3, 1), (150, 1), (399, 1), (300, 0.4))]
    tokens, _ = drawn(shim, np.stack([wide] * 3 + [narrow] * 4), [*params[:3], *params], list(range(7)), [9] * 7)
    expected = sample(np.stack([wide] * 3), Draws(params[:3], np.arange(3, dtype=np.uint64), np.full(3, 9)))
    likeliest = np.argsort(-narrow, kind="stable")
    for seed, kept in ((3, 3), (4, 150), (5, 399), (6, 120)):
        expected = np.append(expected, np.sort(likeliest[:kept])[int(uniform(seed, 9) * kept)])
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("part_tokens", [100, 1000])
def test_thresholds_of_bfloat16_are_found_wherever_they_are(
    shim: ShimPrograms, part_tokens: int, backwards: bool
) -> None:
    """Keys that have bins of their own, and those that have not: near zero and far from it, of both signs."""
    inner, outer = np.arange(0x3C00, 0x4380, 9), (np.arange(0x10, 0x3C00, 11), np.arange(0x4380, 0x7000, 13))
    positive = np.concatenate([inner, *outer]).astype(np.uint16)
    windows = *range(0x1000, 0x7000, 0x1000), *range(0x0C00, 0x3C00, 0x1000)
    edges = np.array([0x3C00, 0x4380, 0x5380, *windows], np.uint16)
    edges = (edges + np.arange(-3, 3)[:, None].astype(np.uint16)).ravel()
    bits = np.unique(np.concatenate([positive, positive[::2] | 0x8000, edges, edges | 0x8000]))
    scores = np.random.default_rng(5).permutation(bits).view(numpy_dtype("bfloat16"))
    order = np.argsort(-scores.astype(np.float64))
    shim.backwards = backwards
    kept = [2, 33, *range(50, len(bits), 150), len(bits) - 1]
    for top_p in (1.0, 0.5):
        params = [SamplingParams(top_k=k, top_p=top_p) for k in kept]
        rows, seeds = np.stack([scores] * len(kept)), list(range(len(kept)))
        tokens, _ = drawn(shim, rows, params, seeds, [7] * len(kept), part_tokens=part_tokens, is_flat=True)
        among = [np.sort(order[: -(-k // (1 if top_p == 1.0 else 2))]) for k in kept]
        assert tokens.tolist() == [each[int(uniform(row, 7) * len(each))] for row, each in enumerate(among)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "value",
    [
        3.0,
        -(2.0**-12),
        0.0,
        *(pytest.param(value, marks=pytest.mark.soak) for value in (-3.0, 2.0**-12, 512.0, -512.0)),
    ],
)
def test_of_equals_at_the_threshold_the_first_are_kept(shim: ShimPrograms, dtype: str, value: float) -> None:
    """By top-k, by top-p, and by one behind the other; in bins of one key, and in others."""
    scores = np.full((16, 3000), -np.inf, numpy_dtype(dtype))
    above, tied, below = np.arange(7, 3000, 500), np.arange(3, 3000, 20), np.arange(14, 3000, 100)
    scores[:, tied] = value
    scores[:, above], scores[:, below] = abs(value) * 1.5 + 2.0**-13, -abs(value) * 1.5 - 2.0**-13
    count = len(above) + len(tied) + len(below)
    seeds = list(range(16))
    for top_k, top_p, kept in ((40, 1, 40), (0, 60.5 / count, 61), (40, 0.5, 20), (100, 0.305, 31), (7, 1, 7)):
        params = [SamplingParams(top_k=top_k, top_p=top_p)] * 16
        tokens, _ = drawn(shim, scores, params, seeds, seeds, part_tokens=400, is_flat=True)
        among = np.sort(np.concatenate([above, tied[: kept - len(above)]]))
        assert tokens.tolist() == [among[int(uniform(each, each) * kept)] for each in seeds]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_below_the_least_of_the_largest_is_not_missed(shim: ShimPrograms, dtype: str) -> None:
    """Up to as many tokens as halves of warps have chunks: 32 of 17 vectors or more, and the last one shorter."""
    vocab = 32 * (2 if dtype == "float32" else 1) * (16 * (4 if dtype == "float32" else 8))
    rng = np.random.default_rng(8)
    scores = (rng.standard_normal((6, vocab + 5)) * 3).astype(numpy_dtype(dtype))[:, 3:-2]
    scores[1, : vocab // 2] = -np.inf
    scores[2, 100:] = -np.inf
    params = [SamplingParams(temperature=0.8, top_k=k, top_p=p) for k, p in ((2, 1), (20, 1), (64, 0.9))] * 2
    seeds, positions = list(range(6)), [3] * 6
    expected = sample(scores.astype(np.float32), Draws(params, np.array(seeds, np.uint64), np.array(positions)))
    for part_tokens in (vocab, vocab // 7, vocab // 16):
        tokens, _ = drawn(shim, scores, params, seeds, positions, part_tokens=part_tokens)
        assert tokens.tolist() == expected.tolist()


def test_more_tokens_are_wanted_than_halves_of_warps_have_large_ones(shim: ShimPrograms) -> None:
    """One large in each half of the two warps' chunks, of 40 vectors."""
    scores = np.zeros((20, 640), numpy_dtype("bfloat16"))
    large = [0, 16 * 8, 320, 320 + 16 * 8]
    scores[:, large] = 1
    seeds = list(range(20))
    for top_k in (3, 4, 5, 8):
        params = [SamplingParams(top_k=top_k)] * 20
        tokens, _ = drawn(shim, scores, params, seeds, seeds, part_tokens=640, is_flat=True)
        among = np.sort([*large, *range(1, 9)][:top_k])
        assert tokens.tolist() == [among[int(uniform(each, each) * top_k)] for each in seeds]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vocabulary_of_real_size_draws_as_on_the_host_however_it_is_cut(shim: ShimPrograms, dtype: str) -> None:
    rng = np.random.default_rng(2)
    scores = (rng.standard_normal((4, 50_257)) * 3).astype(numpy_dtype(dtype))
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=50, top_p=0.95),
        SamplingParams(temperature=1.5, top_k=1000, min_p=0.001),
    ]
    expected = sample(scores.astype(np.float32), Draws(params, np.arange(1, 5, dtype=np.uint64), np.arange(10, 50, 10)))
    for threads, part_tokens in ((64, 60_000), (512, 8192)):
        tokens, _ = drawn(shim, scores, params, [1, 2, 3, 4], [10, 20, 30, 40], threads, part_tokens=part_tokens)
        assert tokens.tolist() == expected.tolist()


def test_what_is_launched_follows_from_shapes_and_from_how_much_is_searched_for() -> None:
    params = [
        SamplingParams(top_k=1, top_p=0.5), SamplingParams(temperature=0, top_k=9), SamplingParams(),
        SamplingParams(top_p=0.5), SamplingParams(top_k=9), SamplingParams(top_k=9, top_p=0.5),
    ]  # fmt: skip
    assert [thresholds_of(table_of([one], [0], [0])) for one in params] == [0, 0, 0, 1, 1, 2]
    launches = {"float16": (2, 5, 9), "bfloat16": (2, 3, 9), "float32": (2, 6, 9)}
    for dtype, expected in launches.items():
        launched = Launched()
        scores = np.zeros((200, 50_000), numpy_dtype(dtype))
        sampling = CudaSampling(launched, scores.dtype, SCRATCH)
        for thresholds, cap in ((0, 0.0), (1, 0.0), (2, 30.0)):
            sampling.draw(scores, np.zeros(1), thresholds, cap, np.zeros(200, np.int32), np.zeros(200, np.float32))
        grids = (2, 128, 1), (3, 72, 1)
        assert launched.grids() == [grid for times in expected for grid in grids for _ in range(times)]


def test_what_does_not_fit_is_refused(shim: ShimPrograms) -> None:
    sampling = CudaSampling(shim, np.dtype(np.float32), SCRATCH)
    assert sampling.takes(np.zeros((1, MOST_TOKENS), np.float32))
    assert not sampling.takes(np.zeros((1, MOST_TOKENS + 1), np.float32))
    assert not sampling.takes(np.zeros((8, 8), np.float16))
    assert not sampling.takes(np.zeros((8, 8), np.float32).T)
    with pytest.raises(ConfigError, match="float64"):
        CudaSampling(shim, np.dtype(np.float64), SCRATCH)


@pytest.mark.parametrize(
    ("sm", "dtype"),
    [(90, "bfloat16"), *(pytest.param(sm, dtype, marks=pytest.mark.soak) for sm in TARGETS for dtype in DTYPES)],
)
def test_it_compiles_without_spills_to_wide_loads_for_two_blocks_of_16_warps(sm: int, dtype: str) -> None:
    compiled = machine_code(SOURCE, variant_of(numpy_dtype(dtype)), sm)
    assert spilled(compiled) == []
    assert {"v4.u32", "v4.f32"} & accesses(compiled, "ld")
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.log)]
    assert len(registers) == 5
    assert max(registers) <= 64, "1024 threads share 65,536 registers"

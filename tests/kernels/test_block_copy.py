"""What all block copies promise; that of a GPU but for the driver: its kernel runs on the CPU, by `cuda_shim`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.block_copies import SOURCE_BLOCKS, TARGET_BLOCKS, copies, int32, some_bytes
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.host_driver import HostDriver

from headwise.errors import ConfigError
from headwise.kernels import block_copy_cpu
from headwise.kernels.block_copy import BlockCopy, ReferenceBlockCopy
from headwise.kernels.cuda.block_copy import CudaBlockCopy
from headwise.kernels.select import make_block_copy, make_run_copy


class OnTheHost:
    """The block copy of a GPU, which returns when its copies are done."""

    name = "cuda"

    def __init__(self, crossover_bytes: int = 300) -> None:
        self._driver = HostDriver()
        self._copy = CudaBlockCopy(self._driver, self._driver.enqueued(ShimPrograms()), crossover_bytes)

    def __call__(self, *arguments: Any) -> None:
        self._copy(*arguments)
        self._driver.finish()


@pytest.fixture(scope="module")
def compiled() -> BlockCopy:
    return make_block_copy("numba", threads=2)


@pytest.fixture(scope="module", params=["reference", "numba", "cuda"])
def copy(request: pytest.FixtureRequest, compiled: BlockCopy) -> BlockCopy:
    return {"reference": ReferenceBlockCopy, "numba": lambda: compiled, "cuda": OnTheHost}[request.param]()


@settings(max_examples=200)
@given(copies(), st.integers(0, 70), st.integers(0, 70), st.sampled_from([1, 100, 1 << 20]))
def test_numba_copies_what_the_reference_copies_and_nothing_else(
    compiled, what, source_offset, target_offset, share_bytes
):
    block_bytes, ranges, pairs = what
    source = some_bytes(SOURCE_BLOCKS * block_bytes, seed=1, offset=source_offset)
    target = some_bytes(TARGET_BLOCKS * block_bytes, seed=2, offset=target_offset)
    expected = target.copy()
    ReferenceBlockCopy()(source, expected, pairs, ranges, block_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy_cpu, "THREAD_BYTES", share_bytes)  # how much is worth a thread changes no byte
        compiled(source, target, pairs, ranges, block_bytes)
    assert np.array_equal(target, expected)


def test_the_groups_range_of_each_block_is_copied(copy):
    source, target = np.arange(12, dtype=np.uint8), np.full(8, 99, np.uint8)
    ranges = np.array([[0, 1], [2, 4]], dtype=np.int64)
    copy(source, target, int32((0, 2, 0), (1, 1, 0), (1, 0, 1)), ranges, 4)
    assert target.tolist() == [8, 99, 6, 7, 99, 99, 2, 3]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((0, 3, 0), r"source block 3 .* source in \[0, 3\)"),
        ((0, -1, 0), "source block -1"),
        ((0, 0, 2), r"target block 2 .* target in \[0, 2\)"),
        ((1, 0, 0), r"group 1: .* group in \[0, 1\)"),
    ],
)
def test_a_pair_that_leads_outside_is_refused_before_anything_is_written(copy, pair, message):
    target = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match=message):
        copy(np.ones(24, np.uint8), target, int32((0, 0, 0), pair), np.array([[0, 8]]), 8)
    assert not target.any()


@pytest.mark.parametrize("bounds", [(-1, 4), (5, 4), (0, 9)])
def test_a_range_that_leaves_the_block_is_refused(copy, bounds):
    with pytest.raises(ValueError, match=rf"byte range \[{bounds[0]}, {bounds[1]}\]"):
        copy(np.ones(8, np.uint8), np.zeros(8, np.uint8), int32((0, 0, 0)), np.array([bounds]), 8)


def test_two_threads_copy_at_once_each_their_own(compiled):
    blocks, block_bytes = 40, 50_000
    source, whole = some_bytes(blocks * block_bytes), np.array([[0, block_bytes]])
    targets = [np.zeros_like(source) for _ in range(2)]
    backwards = np.arange(blocks - 1, -1, -1)
    pairs = np.stack([backwards * 0, backwards, np.arange(blocks)], axis=1).astype(np.int32)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda target: compiled(source, target, pairs, whole, block_bytes), targets * 3))
    for target in targets:
        assert np.array_equal(target.reshape(blocks, -1), source.reshape(blocks, -1)[::-1])


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=9), st.integers(0, 70), st.integers(1, 99)
)
def test_runs_are_copied_as_the_reference_does_and_nothing_else(gaps, offset, share_bytes):
    """Runs that lie anywhere in the source, in any order, and apart in the target."""
    source, target = some_bytes(40_000, seed=1, offset=offset), some_bytes(60_000, seed=2)
    runs, to = [], 0
    for gap, count in gaps:
        runs.append(((gap * 7919) % (40_000 - count), to + gap, count))
        to += gap + count
    runs = np.array(runs[::-1], dtype=np.int64).reshape(-1, 3)
    expected = target.copy()
    make_run_copy("reference", 1)(source, expected, runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy_cpu, "THREAD_BYTES", share_bytes)
        make_run_copy("numba", 1)(source, target, runs)
        assert np.array_equal(target, expected)
        target[:] = 0
        two = make_run_copy("numba", 2)
        two(source, target, runs)
        two.close()
        reference = np.zeros_like(target)
        make_run_copy("reference", 1)(source, reference, runs)
        assert np.array_equal(target, reference)


@pytest.mark.parametrize("name", ["reference", "numba"])
@pytest.mark.parametrize(
    "run", [(0, 0, 9), (8, 0, 1), (0, 6, 3), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (1, 1, 2**63 - 1)]
)
def test_a_run_that_leads_outside_is_refused_before_anything_is_written(name, run):
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match=r"run 1 copies .* must lie within both"):
        make_run_copy(name, 1)(source, target, np.array([(0, 0, 1), run], dtype=np.int64))
    assert not target.any()


def test_an_unknown_name_and_no_threads_are_refused():
    with pytest.raises(ConfigError, match="'fast'; choose one of"):
        make_block_copy("fast", 1)
    with pytest.raises(ConfigError, match="threads=0"):
        make_block_copy("numba", 0)

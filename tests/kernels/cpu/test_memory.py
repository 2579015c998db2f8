"""Weights lie side by side and are freed together; an arena's pages are there before it is used."""

from __future__ import annotations

import gc
import resource
import weakref
from itertools import pairwise, product

import numpy as np
import pytest

from headwise.kernels.cpu.attention_jit import scratch_floats
from headwise.kernels.cpu.memory import CACHE_LINE, HUGE_PAGE, Slabs, from_a_line_on, present


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_arrays_lie_side_by_side_each_at_a_cache_line_and_none_over_another() -> None:
    slabs = Slabs(1 << 16)
    arrays = [slabs.empty((3, 7 * size), np.float16) for size in range(1, 60)]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, array in enumerate(arrays):
        assert address(array) % CACHE_LINE == 0
        assert (array == number).all()
    neighbours = [address(b) - address(a) - a.nbytes for a, b in pairwise(arrays)]
    assert sum(0 <= gap < CACHE_LINE for gap in neighbours) > 40


def test_what_is_larger_than_a_slab_gets_one_of_its_own_that_begins_a_huge_page() -> None:
    slabs = Slabs(1 << 16)
    small, large = slabs.empty((10,), np.uint8), slabs.empty((2 * HUGE_PAGE,), np.uint8)
    assert address(small) % HUGE_PAGE == address(large) % HUGE_PAGE == 0


def test_a_slab_is_freed_with_the_last_array_that_lies_in_it() -> None:
    slabs = Slabs(1 << 16)
    first, second = slabs.empty((100,), np.uint8), slabs.empty((100,), np.uint8)
    slab = weakref.ref(first.base)
    assert second.base is first.base
    del first
    gc.collect()
    assert slab() is not None
    del second
    gc.collect()
    assert slab() is None
    assert slabs.empty((100,), np.uint8).size == 100


def test_writing_to_an_arena_waits_for_no_page() -> None:
    arena = present(32 << 20)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    arena[...] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 16


@pytest.mark.parametrize(("count", "dtype"), [(1, np.float32), (1000, np.uint32), (77, np.int64)])
def test_room_that_is_loaded_by_whole_lines_begins_with_one(count: int, dtype: type) -> None:
    for _ in range(5):
        room = from_a_line_on(count, dtype)
        assert (room.shape, room.dtype) == ((count,), dtype)
        assert room.ctypes.data % CACHE_LINE == 0


@pytest.mark.parametrize("rows", [1, 3, 7, 192])
@pytest.mark.parametrize(("share", "dim"), [(1, 16), (3, 64), (7, 128), (16, 576)])
def test_each_thread_s_scratch_of_attention_is_whole_lines(rows: int, share: int, dim: int) -> None:
    for is_tiled, expands in product([False, True], repeat=2):
        assert scratch_floats(rows, is_tiled, share, dim, expands) * 4 % CACHE_LINE == 0

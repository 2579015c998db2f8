"""Which decodes read their first blocks together, over a cache that real sequences fill."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cached_sequences import BLOCK, WINDOW, manager, serve

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.joint_reads import JointReads, groups_of
from headwise.cache_controller.policy import FULL, STATE

TREE = [
    [*range(40), 1],
    [*range(80, 90), 2],
    [*range(12), *range(50, 80), 3],
    [*range(40), 4],
    [*range(12), *range(50, 80), 5],
    [*range(40), 6],
]
"""Three prompts have ten blocks in common, two as many, of which three are of the other three, too; one has none."""


def filled(prompts: list[list[int]], **options) -> tuple[CacheManager, np.ndarray, np.ndarray]:
    """(cache, rows, tokens) of prompts that are computed one after the other."""
    cache = manager(num_blocks=512, max_rows=16, max_blocks=32, **options)
    for row, prompt in enumerate(prompts):
        serve(cache, row, prompt)
    return cache, np.arange(len(prompts), dtype=np.int32), np.array([len(prompt) - 1 for prompt in prompts])


@pytest.mark.parametrize("policies", [(FULL,), (FULL, WINDOW), (FULL, FULL)])
def test_neighbours_share_what_spares_the_most(policies: tuple) -> None:
    cache, rows, tokens = filled(TREE, policies=policies)
    order, shared = JointReads(cache, BLOCK).arranged(rows, tokens)
    found = list(zip(order.tolist(), shared.tolist(), strict=True))
    assert found[-1] == (1, 0)
    groups = sorted(found[:3], key=lambda each: each[0]), sorted(found[3:5], key=lambda each: each[0])
    assert sorted([row for row, _ in group] for group in groups) in ([[0, 3], [2, 4, 5]], [[0, 3, 5], [2, 4]])
    assert sorted(shared.tolist()) == [0, 0, 0, 40, 40, 40]
    for at in np.flatnonzero(shared):
        own, before = cache.tables[order[at], 0], cache.tables[order[at - 1], 0]
        assert (own[: shared[at] // BLOCK] == before[: shared[at] // BLOCK]).all()


def test_less_than_is_worth_it_is_not_shared() -> None:
    cache, rows, tokens = filled(TREE)
    assert not JointReads(cache, 11 * BLOCK).arranged(rows, tokens)[1].any()
    assert JointReads(cache, 10 * BLOCK).arranged(rows, tokens)[1].any()


def test_rows_that_do_not_decode_stay_behind_the_others_in_their_order() -> None:
    cache, rows, tokens = filled(TREE)
    tokens[[0, 4]] = 0
    order, shared = JointReads(cache, BLOCK).arranged(rows, tokens)
    assert order[-3:].tolist() == [0, 1, 4]
    assert not shared[-3:].any()
    assert sorted(order.tolist()) == rows.tolist()


def test_without_heads_that_see_all_there_is_nothing_to_share() -> None:
    for policies in ((WINDOW,), (STATE,)):
        cache, rows, tokens = filled([[*range(40), 1], [*range(40), 2]], policies=policies)
        order, shared = JointReads(cache, BLOCK).arranged(rows, tokens)
        assert (order.tolist(), shared.tolist()) == ([0, 1], [0, 0])


def test_a_row_that_changes_hands_is_looked_at_anew() -> None:
    cache, rows, tokens = filled([[*range(40), 1], [*range(40), 2], [*range(80, 121)]])
    reads = JointReads(cache, BLOCK)
    assert reads.arranged(rows, tokens)[1].tolist() == [0, 40, 0]
    cache.release(1)
    reads.forget(1)
    serve(cache, 1, [*range(80, 120), 7])
    order, shared = reads.arranged(rows, tokens)
    assert (sorted(order[:2].tolist()), shared.tolist()) == ([1, 2], [0, 40, 0])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7).map(lambda common: [0, *common[1:]]))
def test_no_groups_spare_more(common: list[int]) -> None:
    def spared(cuts: tuple[int, ...]) -> int:
        ends = [*cuts, len(common)]
        begins = [0, *cuts]
        return sum(min(common[b + 1 : e], default=0) * (e - b - 1) for b, e in zip(begins, ends, strict=True))

    places = range(1, len(common))
    best = max(spared(cuts) for count in range(len(common)) for cuts in combinations(places, count))
    groups = groups_of(np.array(common, np.int64))
    assert [begin for begin, _ in groups] == [0, *(end for _, end in groups[:-1])]
    assert groups[-1][1] == len(common)
    assert spared(tuple(begin for begin, _ in groups[1:])) == best

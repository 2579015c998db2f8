"""Whose tokens steps take that are on their way through a pipeline together, and how many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.engine.step_budget import PARTS, chunk_of_stage, shares, wanted_of_stage

DECODES, PROMPT = True, False
sequences = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12)


def wanted_and_decoding(given: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([n for n, _ in given], np.int64), np.array([d for _, d in given], np.bool_)


@given(sequences, st.integers(0, 12))
def test_a_step_takes_of_those_that_decode_who_waited_longest_and_of_prompts_all(each, most) -> None:
    wanted, decoding = wanted_and_decoding(each)
    last_step = np.arange(len(each)) * 7 % 5
    taken = wanted_of_stage(wanted, decoding, last_step, most)
    assert taken[~decoding].tolist() == wanted[~decoding].tolist()
    willing = sorted(np.flatnonzero(decoding & (wanted > 0)).tolist(), key=lambda at: (last_step[at], at))
    assert np.flatnonzero(decoding & (taken > 0)).tolist() == sorted(willing[:most])
    assert taken[willing[:most]].tolist() == wanted[willing[:most]].tolist()


@pytest.mark.parametrize(
    ("most", "taken"), [(0, [0, 7, 0, 0, 0]), (1, [1, 7, 0, 0, 0]), (2, [1, 7, 0, 3, 0]), (9, [1, 7, 0, 3, 1])]
)
def test_who_has_nothing_to_decode_takes_nobody_s_place(most: int, taken: list[int]) -> None:
    wanted, decoding = np.array([1, 7, 0, 3, 1]), np.array([DECODES, PROMPT, DECODES, DECODES, DECODES])
    assert wanted_of_stage(wanted, decoding, np.zeros(5, np.int64), most).tolist() == taken


@given(sequences, st.integers(1, 4), st.integers(1, 64))
def test_steps_of_a_pipeline_share_all_that_decode_among_them(each, stages, budget) -> None:
    """As many steps as there are stages, of which each takes its share, leave nobody out whose tokens fit."""
    wanted, decoding = wanted_and_decoding(each)
    decoding = np.ones_like(decoding)
    most, seen = -(-len(wanted) // stages), np.zeros(len(wanted), np.int64)
    left = wanted.copy()
    for _ in range(stages):
        order, counts = shares(wanted_of_stage(left, decoding, np.zeros_like(left), most), decoding, 10_000)
        assert len(order) <= most
        seen[order] += counts
        left[order] = 0
    assert seen.tolist() == wanted.tolist()


@given(st.integers(0, 100_000), st.integers(2, 64), st.integers(1, 8192))
def test_chunks_are_between_half_of_the_most_and_that(left: int, stages: int, most: int) -> None:
    chunk = chunk_of_stage(left, stages, most)
    assert -(-most // 2) <= chunk <= most
    assert chunk == most or chunk * PARTS * stages >= left, "no more chunks than that, unless they would be too small"


@pytest.mark.parametrize(
    ("left", "stages", "most", "chunk"),
    [(100_000, 2, 256, 256), (1_600, 2, 256, 200), (1_601, 2, 256, 201), (40, 2, 256, 128), (1, 4, 1, 1), (9, 8, 3, 2)],
)
def test_chunks_are_so_many_for_each_stage(left: int, stages: int, most: int, chunk: int) -> None:
    assert chunk_of_stage(left, stages, most) == chunk

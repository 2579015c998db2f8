"""What requests of a file have in common, and to which engines they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.batch.lanes import Lanes
from headwise.runtime.batch.requests import beginning
from headwise.sharing_order import PIECE_BYTES, pieces_of, sharing_order

PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=30)


def pieces(path: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in path)


def pieces_of_body(body: dict[str, object]) -> bytes:
    return pieces_of(beginning(body))


def test_what_requests_have_in_common_is_what_their_prompts_begin_with() -> None:
    document = "word " * PIECE_BYTES
    first = pieces_of_body({"messages": [{"role": "user", "content": document + "Who?"}], "temperature": 0.0})
    second = pieces_of_body({"max_tokens": 5, "messages": [{"role": "user", "content": document + "When?"}]})

    assert first[:-16] == second[:-16]
    assert first != second
    assert len(first) >= 8 * 5


@pytest.mark.parametrize("field", [{"cache_salt": "mine"}, {"model": "adapter"}, {"tools": [{"type": "function"}]}])
def test_what_keeps_caches_apart_parts_requests_at_once(field: dict[str, object]) -> None:
    body = {"messages": [{"role": "user", "content": "word " * PIECE_BYTES}]}

    assert pieces_of_body(body)[:8] != pieces_of_body({**body, **field})[:8]


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], "\ud800", ["a", "b"], None, {"no": "prompt"}])
def test_any_prompt_has_pieces(prompt: object) -> None:
    assert len(pieces_of_body({"prompt": prompt})) % 8 == 0


@given(PATHS, st.integers(1, 5), st.data())
def test_every_request_is_taken_once_whichever_lanes_take(
    paths: list[list[int]], count: int, data: st.DataObject
) -> None:
    """Also where a lane ends before it is through, and another one comes later."""
    lanes = Lanes(*sharing_order([pieces(path) for path in paths]), count)
    taken = list[int]()
    while lanes.num_left:
        assert len(taken) + lanes.num_left == len(paths)
        place = lanes.take(data.draw(st.integers(0, count)))
        assert place is not None
        taken.append(place)

    assert sorted(taken) == list(range(len(paths)))
    assert lanes.take(0) is None


def test_lanes_part_where_neighbours_share_least() -> None:
    paths = [[1, 1]] * 5 + [[2, 2]] * 3
    lanes = Lanes(*sharing_order([pieces(path) for path in paths]), 2)

    assert [lanes.take(0) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [lanes.take(1) for _ in range(3)] == [5, 6, 7]


def test_a_lane_that_is_through_takes_a_part_of_the_longest() -> None:
    order = np.arange(12)
    lanes = Lanes(order, np.zeros(12, np.int64), 2)
    assert [lanes.take(1) for _ in range(6)] == [6, 7, 8, 9, 10, 11]

    assert lanes.take(1) == 3
    assert lanes.take(0) == 0

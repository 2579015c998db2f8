"""Positions of tokens, for models that give each three: those that transformers gives them, whatever steps are cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.runtime.engine.grids import Grids
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.sequence_table import SequenceTable
from headwise.runtime.engine.step_places import step_places
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

ITEMS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(-1, 6)), max_size=5)
"""Gaps before items, their rows and columns, and how much later they are than those that they go on with; of no
columns, such as have no grid."""


def placed(parts: list[tuple[int, int, int, int]]) -> tuple[ExtraKey, ...]:
    found: list[ExtraKey] = []
    at = 0
    for gap, rows, columns, later in parts:
        goes_on = bool(found and not gap and columns and found[-1].columns)
        found.append(ExtraKey(at + gap, at + gap + rows * max(columns, 1), "x", columns, later if goes_on else -1))
        at = found[-1].end
    return tuple(found)


def one_by_one(items: tuple[ExtraKey, ...], tokens: int) -> NDArray[np.int32]:
    """The definition: text counts on from the largest position before it, and an item stands there, unless it goes on
    with one."""
    grids = {each.start: each for each in items if each.columns}
    found: list[tuple[int, int, int]] = []
    at = origin = time = 0
    while len(found) < tokens:
        item = grids.get(len(found))
        if item is None:
            found.append((at, at, at))
            at += 1
            continue
        origin, time = (at, at) if item.later < 0 else (origin, time + item.later)
        for index in range(item.end - item.start):
            row, column = divmod(index, item.columns)
            found.append((time, origin + row, origin + column))
        at = max(map(max, found)) + 1
    return np.array(found[:tokens], np.int32)


def sequence(name: str, items: tuple[ExtraKey, ...], tokens: int) -> Sequence:
    request = GenerateRequest(name, np.ones(tokens, np.int32), SamplingParams(), extra_keys=items)
    return Sequence(request, b"", (0, 0), max_length=tokens + 8, arrived=0.0)


def test_an_image_stands_at_one_time_and_text_goes_on_behind_its_longer_side() -> None:
    places = Grids([ExtraKey(2, 8, "x", 3)]).places(0, 10).T
    assert places.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_a_video_s_parts_are_at_times_of_their_own_and_text_goes_on_behind_the_last_one() -> None:
    video = [ExtraKey(1, 5, "a", 2), ExtraKey(5, 9, "b", 2, 2), ExtraKey(9, 13, "c", 2, 0), ExtraKey(13, 17, "d", 2, 3)]
    assert Grids(video).places(0, 19).T.tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 6, 6, 6, 6, 7, 8],
        [0, *[1, 1, 2, 2] * 4, 7, 8],
        [0, *[1, 2, 1, 2] * 4, 7, 8],
    ]


@given(ITEMS, st.integers(0, 80), st.integers(0, 80))
def test_any_part_of_a_prompt_is_where_the_definition_has_it(parts, start: int, count: int) -> None:
    items = placed(parts)
    whole = one_by_one(items, start + count)
    grids = Grids(items)
    found = grids.places(start, start + count)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, whole[start:].reshape(-1, 3))
    length = max((each.end for each in items), default=0)
    assert grids.places(length, length + 1)[0].tolist() == [length - grids.saved] * 3


@given(st.lists(st.tuples(ITEMS, st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4))
def test_the_tokens_of_a_step_are_where_those_of_their_sequences_are(parts) -> None:
    table, rows = SequenceTable(8), []
    for number, (items, _, _) in enumerate(parts):
        rows.append(table.open(sequence(f"r{number}", placed(items), 120), 0, 8))
    starts, counts = (np.array(column, np.int64) for column in zip(*[each[1:] for each in parts], strict=True))
    found = step_places(table, np.array(rows, np.int32), starts, counts)
    expected = [one_by_one(placed(items), start + count)[start:] for items, start, count in parts]
    alike = [np.arange(start, start + count)[:, None].repeat(3, axis=1) for _, start, count in parts]
    if not len(found):
        expected_alike = [np.array_equal(each, other) for each, other in zip(expected, alike, strict=True)]
        assert all(expected_alike)
        return
    np.testing.assert_array_equal(found, np.concatenate(expected))


def test_steps_of_text_alone_say_nothing() -> None:
    table = SequenceTable(4)
    items = (ExtraKey(1, 3, "x"), ExtraKey(50, 60, "x", 5))
    row = table.open(sequence("r", items, 80), 0, 8)
    rows = np.array([row], np.int32)
    assert not step_places(table, rows, np.array([0]), np.array([50])).size
    assert step_places(table, rows, np.array([49]), np.array([2])).tolist() == [[49] * 3, [50] * 3]
    assert step_places(table, rows, np.array([60]), np.array([1])).tolist() == [[55] * 3]
    table.close(table.of(rows)[0])
    again = table.open(sequence("s", (), 80), 0, 8)
    assert again == row
    assert not step_places(table, rows, np.array([70]), np.array([1])).size

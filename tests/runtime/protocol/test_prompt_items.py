"""Items of a prompt: what is taken, what is refused, and with which words."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import InvalidRequestError
from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.protocol import prompt_items
from headwise.runtime.protocol.prompt_items import (
    MAX_EMBED_BYTES,
    EmbedsPlace,
    PromptEmbeds,
    PromptItem,
    RowDigest,
    check_embed_places,
    check_embeds,
    check_items,
    digest,
    embed_places,
    placed,
)

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_items_come_in_the_order_of_their_places_named_by_hash_bytes_or_embeddings() -> None:
    items = [PromptItem(6, 1, b"\x01\xff"), {"offset": 3, "length": 2, "embeds": ROWS}, PromptItem(0, 3, "cat")]
    found = placed(items, 7)
    assert found.extra_keys == (ExtraKey(0, 3, "cat"), ExtraKey(3, 5, digest(ROWS)), ExtraKey(6, 7, "01ff"))
    assert [(each.start, each.end) for each in found.embeds] == [(3, 5)]
    assert placed((), 7) == placed([], 0)


def test_what_the_caller_does_with_its_array_later_changes_nothing() -> None:
    rows = ROWS.copy()
    found = placed([PromptItem(0, 2, embeds=rows)], 2)
    rows[:] = 9
    np.testing.assert_array_equal(found.embeds[0].values, ROWS)


def test_embeddings_with_a_hash_are_known_by_that() -> None:
    assert placed([PromptItem(0, 2, "cat", ROWS)], 2).extra_keys == (ExtraKey(0, 2, "cat"),)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_embeddings_of_any_precision_become_float32(dtype: Any) -> None:
    (embeds,) = placed([PromptItem(0, 2, embeds=np.asfortranarray(ROWS.astype(dtype)))], 2).embeds
    assert embeds.values.dtype == np.float32
    np.testing.assert_array_equal(embeds.values, ROWS)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e39])
def test_what_is_not_finite_in_float32_is_refused_before_it_is_sent(number: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"the embeddings at \[0, 1\) are not all finite numbers"):
        placed([PromptItem(0, 1, "cat", np.array([[number, 0, 0]]))], 1)


def repeated(length: int, hidden: int) -> np.ndarray:
    """A view of one number in memory."""
    return np.broadcast_to(np.float32(1), (length, hidden))


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([PromptItem(0, 2, "a", repeated(2, 10**12))], r"have 8000000000000 bytes; at most"),
        ([PromptItem(0, 2**31 - 1, "a", repeated(2**31 - 1, 4096))], r"at \[0, 2147483647\) does not lie in"),
        ([PromptItem(0, 1, "a", repeated(1, 2**20))] * 1000, "have 37748736 bytes; at most"),
    ],
)
def test_views_of_any_size_are_refused_before_they_are_copied(
    items: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_items, "MAX_EMBED_BYTES", 32 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=says):
            placed(items, 7)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows", [repeated(2, 3), ROWS[::-1], ROWS.T[:2, ::-1], np.ones((4, 6))[::2, ::2]])
def test_views_with_strides_are_taken_by_their_numbers(rows: np.ndarray) -> None:
    (embeds,) = placed([PromptItem(0, 2, embeds=rows)], 2).embeds
    np.testing.assert_array_equal(embeds.values, rows)
    assert embeds.values.flags.c_contiguous
    assert embeds.values.base is None


def test_other_embeddings_have_another_digest() -> None:
    assert len({digest(ROWS), digest(ROWS + 1), digest(-ROWS), digest(ROWS[::-1])}) == 4


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ("cat", "items must be a list"),
        ([("cat",)], "an item must be a PromptItem, or a mapping"),
        ([{"offset": 0}], "an item must be a PromptItem, or a mapping"),
        ([{"offset": 0, "length": 1, "image": "x"}], "an item must be a PromptItem, or a mapping"),
        ([PromptItem(-1, 2, "a")], "an item's offset must be an integer from 0"),
        ([PromptItem(0, 0, "a")], "an item's length must be an integer from 1"),
        ([PromptItem(5, 3, "a")], r"the item at \[5, 8\) does not lie in the prompt's 7 tokens"),
        ([PromptItem(0, 3, "a"), PromptItem(2, 1, "b")], r"\[0, 3\) overlaps \[2, 3\)"),
        ([PromptItem(2, 1, "a"), PromptItem(2, 1, "a")], r"\[2, 3\) overlaps \[2, 3\)"),
        ([PromptItem(0, 1)], "an item without embeddings needs a hash"),
        ([PromptItem(0, 1, 7)], "an item without embeddings needs a hash"),
        ([PromptItem(0, 1, "a" * 129)], "an item's hash must have 1 to 128 characters"),
        ([PromptItem(0, 1, b"a" * 65)], "1 to 128 characters, 2 for a byte, got 65 bytes"),
        (
            [PromptItem(0, 1, "cat\ud800")],
            r"the hash of the item at \[0, 1\) is no valid Unicode: character 3 is half of .*, got 'cat\\ud800'",
        ),
        ([PromptItem(0, 1, "\udcff", ROWS[:1])], "is no valid Unicode: character 0"),
        ([PromptItem(0, 1, "a")] * 1025, "1025 items were given; at most 1024"),
        ([PromptItem(0, 3, embeds=ROWS)], r"an item of 3 tokens needs embeddings .*, got float32 \[2, 3\]"),
        ([PromptItem(0, 2, embeds=ROWS.astype(np.int32))], r"floating-point numbers, got int32 \[2, 3\]"),
        ([PromptItem(0, 2, embeds=[[1.0], [1.0, 2.0]])], "floating-point numbers, got list"),
        ([PromptItem(0, 2, embeds=ROWS[:, :0])], r"floating-point numbers, got float32 \[2, 0\]"),
        ([PromptItem(0, 2, embeds=ROWS.astype(np.complex64))], r"floating-point numbers, got complex64 \[2, 3\]"),
        ([PromptItem(0, 2, embeds=ROWS.astype(object))], r"floating-point numbers, got object \[2, 3\]"),
        ([PromptItem(0, 2, embeds="cat")], r"floating-point numbers, got <U3 \[\]"),
        ([PromptItem(1, 6, "cat", columns=4)], r"at \[1, 7\) has 6 tokens, which make no whole rows of 4 columns"),
        ([PromptItem(1, 6, "cat", columns=-1)], "an item's columns must be"),
        ([PromptItem(1, 6, "cat", columns=1.5)], "an item's columns must be"),
        ([PromptItem(1, 4, "cat", columns=2, later=-2)], "an item's later must be"),
        ([PromptItem(1, 4, "cat", columns=2, later=0)], r"at \[1, 5\) is to go on with the grid of one in front"),
        ([PromptItem(1, 2, "cat"), PromptItem(3, 2, "dog", columns=2, later=1)], "touches none that lies on a grid"),
        ([PromptItem(1, 2, "cat", columns=2), PromptItem(3, 2, "dog", later=1)], "or lies on none itself"),
        (
            [PromptItem(1, 2, "cat", columns=2), PromptItem(4, 2, "dog", columns=2, later=1)],
            r"at \[4, 6\) is to go on with the grid",
        ),
        (
            [PromptItem(1, 2, "cat", columns=2), PromptItem(3, 2, "dog", columns=2, later=2**24)],
            r"at \[3, 5\) is 16777216 positions later than the first one of its grid: positions are below 16777216",
        ),
        (
            [PromptItem(0, 2, embeds=repeated(2, MAX_EMBED_BYTES // 8 + 1))],
            rf"have {MAX_EMBED_BYTES + 8} bytes; at most {MAX_EMBED_BYTES}",
        ),
        ([PromptItem(0, 1, embeds=repeated(1, 2**20 + 1))], "have 1048577 numbers a token; at most 1048576"),
    ],
)
def test_what_is_no_item_of_a_prompt_of_seven_tokens_is_refused(items: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        placed(items, 7)


@pytest.mark.parametrize("prompt", [None, "text"])
def test_items_of_a_text_or_chat_are_refused(prompt: Any) -> None:
    check_items([], prompt)
    check_items([PromptItem(0, 1, "a")], [1, 2])
    with pytest.raises(InvalidRequestError, match="give their prompt as token ids"):
        check_items([PromptItem(0, 1, "a")], prompt)


NAN = np.array([[0, np.nan, 0]], np.float32)


@pytest.mark.parametrize(
    ("keys", "embeds", "says"),
    [
        (((0, 2, "a"),), [PromptEmbeds(0, ROWS[:, :2])], r"at \[0, 2\) have 2 numbers a token, the model 3"),
        (((0, 1, "a"),), [PromptEmbeds(0, NAN)], r"the embeddings at \[0, 1\) are not all finite"),
        (((0, 1, "a"),), [PromptEmbeds(0, np.array([[np.inf, 0, 0]], np.float32))], "are not all finite"),
        (((0, 2, "a"),), [PromptEmbeds(0, ROWS[0])], r"embeddings must be \[length, hidden\]"),
        (((0, 2, "a"),), [PromptEmbeds(0, ROWS)] * 2, "each of another item"),
        (((0, 2, "a"),), [PromptEmbeds(1, ROWS)], r"the embeddings at \[1, 3\) are of no item"),
        (((0, 2, digest(ROWS)),), [], "named by the digest of other embeddings"),
        (((0, 2, digest(ROWS)),), [PromptEmbeds(0, ROWS + 1)], "named by the digest of other embeddings"),
    ],
)
def test_an_engine_refuses_what_it_cannot_compute_with_and_false_names(keys: Any, embeds: Any, says: str) -> None:
    def check(keys: Any, embeds: Any) -> None:
        check_embed_places(keys, embed_places(embeds), 3)
        check_embeds(keys, embeds)

    named = (ExtraKey(0, 2, digest(ROWS)), ExtraKey(2, 4, "a"), ExtraKey(5, 6, "b"))
    check(named, [PromptEmbeds(0, ROWS), PromptEmbeds(2, ROWS)])
    with pytest.raises(InvalidRequestError, match=says):
        check([ExtraKey(*key) for key in keys], embeds)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([EmbedsPlace(0, 2, 2, False)], r"at \[0, 2\) have 2 numbers a token, the model 3"),
        ([EmbedsPlace(0, 2, -3, False)], "have -3 numbers a token"),
        ([EmbedsPlace(0, 2, 3, False)] * 2, "each of another item"),
        ([EmbedsPlace(0, 2, 3, False), EmbedsPlace(0, -2, 3, False)], r"at \[0, -2\) are of no item"),
        ([EmbedsPlace(0, 2**62, 3, True)], "at most 536870912 can be sent with one"),
        ([EmbedsPlace(0, 2, 3, False), EmbedsPlace(3, 1, 3, True)], r"at \[3, 4\) are of no item"),
        ([], "named by the digest of other embeddings"),
    ],
)
def test_embeddings_that_are_to_come_are_refused_by_what_they_are_like(places: Any, says: str) -> None:
    key = (ExtraKey(0, 2, digest(ROWS)),)
    check_embed_places(key, [EmbedsPlace(0, 2, 3, True)], 3)
    with pytest.raises(InvalidRequestError, match=says):
        check_embed_places(key, places, 3)


@given(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.data())
def test_a_digest_of_parts_is_that_of_the_whole(length: int, width: int, is_half: bool, data: st.DataObject) -> None:
    values = np.arange(length * width, dtype=np.float32).reshape(length, width)
    rows = to_bits(values) if is_half else values
    cuts = sorted(data.draw(st.sets(st.integers(1, length))))
    found = RowDigest(is_half)
    for first, last in pairwise([0, *cuts, length]):
        found.take(rows[first:last])
    assert found.digest == digest(rows)

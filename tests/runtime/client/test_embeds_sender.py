"""Embeddings on their way to an engine: all of them, in order, few at a time, of each request in turn."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.runtime.client.embeds_sender import EmbedsSender
from headwise.runtime.protocol import embed_parts
from headwise.runtime.protocol.embed_parts import MOST_UNDER_WAY, part_at, parts_of
from headwise.runtime.protocol.prompt_items import PromptEmbeds


@pytest.fixture(autouse=True, scope="module")
def parts_are_of_two_rows() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_parts, "PART_BYTES", 2 * 3 * 4)
        yield


def embeds(*lengths: int) -> tuple[PromptEmbeds, ...]:
    """Of items of so many tokens, each of three numbers."""
    starts = np.cumsum((0, *lengths)).tolist()
    return tuple(
        PromptEmbeds(start, np.full((length, 3), start, np.float32))
        for start, length in zip(starts, lengths, strict=False)
    )


def begin(sender: EmbedsSender, request_id: str, length: int) -> None:
    """All of them are wanted."""
    sender.begin(request_id, embeds(length))
    sender.wanted(request_id, 0)


@pytest.mark.parametrize(("start", "sent"), [(0, [0, 5, 6]), (5, [5, 6]), (6, [6]), (3, []), (8, [])])
def test_nothing_goes_before_it_is_wanted_and_then_from_that_item_on(
    start: int, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_parts, "PART_BYTES", 1)  # a row each
    sender = EmbedsSender()
    sender.begin("r", embeds(5, 1, 2))
    assert not list(sender.due())
    sender.wanted("other", start)
    sender.wanted("r", start)
    found = list[int]()
    while due := list(sender.due()):
        found += [part.start for part in due]
        for _ in due:
            sender.taken()
    assert list(dict.fromkeys(found)) == sent
    sender.wanted("r", 0)
    assert not list(sender.due())
    assert not sender._held


def test_parts_have_all_rows_in_their_order() -> None:
    given = embeds(5, 1, 2)
    parts = list(parts_of("r", given))
    assert [(each.start, each.first, len(each.values)) for each in parts] == [
        (0, 0, 2), (0, 2, 2), (0, 4, 2), (6, 0, 2),
    ]  # fmt: skip
    np.testing.assert_array_equal(
        np.concatenate([each.values for each in parts]), np.concatenate([each.values for each in given])
    )


def test_items_of_one_token_each_are_few_parts_and_others_of_another_kind_begin_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embed_parts, "PART_BYTES", 100 * 3 * 4)
    given = embeds(*[1] * 192)
    assert [(each.start, len(each.values)) for each in parts_of("r", given)] == [(0, 100), (100, 92)]
    halves = [*given[:2], PromptEmbeds(2, np.zeros((1, 3), np.uint16)), *given[3:5]]
    assert [(each.start, len(each.values)) for each in parts_of("r", halves)] == [(0, 2), (2, 1), (3, 2)]
    part = part_at("r", given, 150, 0)
    assert part is not None
    assert (part.start, len(part.values)) == (150, 42)
    assert part_at("r", given, 192, 0) is part_at("r", given, 3, 1) is None


def test_a_row_that_is_larger_than_a_part_is_one() -> None:
    wide = PromptEmbeds(0, np.zeros((2, 100), np.float32))
    assert [len(each.values) for each in parts_of("r", [wide])] == [1, 1]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=8), st.randoms(use_true_random=False))
def test_every_part_goes_once_few_at_a_time_and_nothing_of_what_has_ended(
    wanted: list[tuple[str, int]], random: Random
) -> None:
    sender, sent, under_way = EmbedsSender(), {}, 0
    ended: set[str] = set()
    for index, (name, length) in enumerate(wanted):
        request_id = f"{name}{index}"
        begin(sender, request_id, length)
        sent[request_id] = []
        if random.random() < 0.2:
            sender.end(request_id)
            ended.add(request_id)
    while due := list(sender.due()):
        for part in due:
            sent[part.request_id].append(part.first)
        under_way += len(due)
        assert under_way <= MOST_UNDER_WAY
        for _ in range(random.randint(1, under_way)):
            sender.taken()
            under_way -= 1
    for index, (name, length) in enumerate(wanted):
        request_id = f"{name}{index}"
        assert sent[request_id] == ([] if request_id in ended else list(range(0, length, 2)))


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    sender = EmbedsSender()
    begin(sender, "large", 100)
    sent = list(sender.due())
    begin(sender, "small", 4)
    for _ in range(4):
        sender.taken()
        sent += sender.due()
    assert [each.request_id for each in sent].count("small") == 2


def test_what_was_sent_of_a_request_that_ended_makes_room_when_it_is_taken() -> None:
    sender = EmbedsSender()
    begin(sender, "gone", 100)
    assert len(list(sender.due())) == MOST_UNDER_WAY
    sender.end("gone")
    begin(sender, "next", 4)
    assert not list(sender.due())
    sender.taken()
    sender.taken()
    assert [each.request_id for each in sender.due()] == ["next", "next"]

"""Embeddings that follow their request: it is whole once all are there, and what is none of them is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import InvalidRequestError
from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.engine.arriving_embeds import ArrivingEmbeds
from headwise.runtime.protocol import embed_parts
from headwise.runtime.protocol.embed_parts import parts_of
from headwise.runtime.protocol.messages import EmbedsPart, Submit
from headwise.runtime.protocol.prompt_items import EmbedsPlace, PromptEmbeds, digest, embed_places
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams
from headwise.transfer.shared_buffers import SharedBuffers

WIDTH = 3


def rows(start: int, length: int, is_half: bool = False) -> PromptEmbeds:
    values = (np.arange(length * WIDTH, dtype=np.float32) + start).reshape(length, WIDTH)
    return PromptEmbeds(start, to_bits(values) if is_half else values)


def submit(*embeds: PromptEmbeds, key: int = 7, name: str = "r", named: bool = True) -> Submit:
    """named: by their digests"""
    keys = tuple(ExtraKey(each.start, each.end, digest(each.values) if named else "cat") for each in embeds)
    tokens = np.zeros(max(each.end for each in embeds), np.int32)
    return Submit(key, GenerateRequest(name, tokens, SamplingParams(), extra_keys=keys), embed_places(embeds))


def part(each: PromptEmbeds, first: int, last: int, name: str = "r") -> EmbedsPart:
    return EmbedsPart(name, each.start, first, each.values[first:last])


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_a_request_is_whole_with_its_last_part(
    items: list[tuple[int, bool, int]], named: bool, data: st.DataObject
) -> None:
    given, at = [], 0
    for length, is_half, gap in items:
        given.append(rows(at + gap, length, is_half))
        at += gap + length
    order = data.draw(st.permutations(given))
    arriving, asked = ArrivingEmbeds(), submit(*order, named=named)
    arriving.begin(asked, 0.0)
    assert (arriving.request_ids, arriving.key_of("r")) == (["r"], 7)
    assert arriving.num_bytes == sum(each.values.nbytes for each in given)
    found: GenerateRequest | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_parts, "PART_BYTES", data.draw(st.integers(1, 12)) * 4 * WIDTH)
        for each in parts_of("r", order):  # within items, and over several
            assert found is None
            found = arriving.take(each, 0.0)
    assert found is not None
    assert (found.request_id, found.extra_keys) == ("r", asked.request.extra_keys)
    for mine, other in zip(found.embeds, order, strict=True):
        assert (mine.start, mine.values.dtype) == (other.start, other.values.dtype)
        np.testing.assert_array_equal(mine.values, other.values)
        assert not mine.values.flags.writeable
    assert (arriving.request_ids, arriving.num_bytes, arriving.key_of("r")) == ([], 0, 0)


FIRST, SECOND = rows(0, 4), rows(5, 2, is_half=True)
NAN = np.full((1, WIDTH), np.nan, np.float32)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (part(SECOND, 0, 1), r"from row 0 on of the item at 5 are not the next"),
        (
            part(FIRST, 0, 2),
            r"are not the next embeddings: those are float32 \[1 to 3, 3\] from row 1 on of the item at 0",
        ),
        (part(FIRST, 2, 3), "from row 2 on of the item at 0 are not the next"),
        (part(FIRST, 1, 1), r"float32 \[0, 3\]"),
        (EmbedsPart("r", 0, 1, np.zeros((4, WIDTH), np.float32)), r"float32 \[4, 3\]"),
        (EmbedsPart("r", 0, 1, np.zeros((1, 2), np.float32)), r"float32 \[1, 2\]"),
        (EmbedsPart("r", 0, 1, np.zeros((5, WIDTH), np.float32)), r"float32 \[5, 3\]"),  # what is behind is bfloat16
        (EmbedsPart("r", 0, 1, np.zeros(WIDTH, np.float32)), r"float32 \[3\]"),
        (EmbedsPart("r", 0, 1, np.zeros((1, WIDTH), np.uint16)), r"uint16 \[1, 3\]"),
        (EmbedsPart("r", 0, 1, NAN), "are not all finite numbers"),
    ],
)
def test_what_does_not_come_next_is_refused_by_name(wrong: EmbedsPart, says: str) -> None:
    arriving = ArrivingEmbeds()
    arriving.begin(submit(FIRST, SECOND), 0.0)
    arriving.take(part(FIRST, 0, 1), 0.0)
    with pytest.raises(InvalidRequestError, match=says):
        arriving.take(wrong, 0.0)
    assert arriving.take(part(FIRST, 1, 4), 0.0) is None
    assert arriving.take(part(SECOND, 0, 2), 0.0) is not None


def test_embeddings_that_an_item_is_not_named_by_are_refused() -> None:
    arriving = ArrivingEmbeds()
    arriving.begin(submit(FIRST), 0.0)
    with pytest.raises(InvalidRequestError, match=r"the item at \[0, 4\) is named by the digest of other embeddings"):
        arriving.take(EmbedsPart("r", 0, 0, FIRST.values + 1), 0.0)


def test_what_belongs_to_no_request_that_waits_is_thrown_away() -> None:
    arriving = ArrivingEmbeds()
    arriving.begin(submit(FIRST), 0.0)
    arriving.drop("r")
    arriving.drop("r")
    assert arriving.take(part(FIRST, 0, 4), 0.0) is None
    assert arriving.num_bytes == 0


def test_requests_of_which_nothing_comes_are_told() -> None:
    arriving = ArrivingEmbeds()
    for name, at in (("a", 0.0), ("b", 1.0)):
        arriving.begin(submit(FIRST, name=name), at)
    arriving.take(part(FIRST, 0, 1, "a"), 5.0)
    assert arriving.stalled_since(1.0) == []
    assert arriving.stalled_since(4.0) == ["b"]
    assert sorted(arriving.stalled_since(6.0)) == ["a", "b"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_memory_is_taken_for_what_comes_and_not_for_what_is_told(is_shared: bool) -> None:
    """Told are as many bytes as a prompt may have, or as are left of the engine's; none of their pages are touched."""
    told = Submit(1, submit(rows(0, 1)).request, (EmbedsPlace(0, 1 << 16, 1 << 10, False),))
    arriving = ArrivingEmbeds(SharedBuffers().allocate) if is_shared else ArrivingEmbeds()
    before = resident()
    arriving.begin(told, 0.0)
    assert arriving.num_bytes == 256 << 20
    assert resident() - before < 32 << 20


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

"""Tokens that the last stage of a pipeline gives the first one: there when a step needs them, and in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.ranks import links_of

from headwise.runtime.ops.stage_links import StageLostError
from headwise.runtime.protocol.batch import LAST_SAMPLED, BatchRequest
from headwise.runtime.worker.last_sampled import HostLastSampled
from headwise.runtime.worker.network_link import NetworkLink
from headwise.runtime.worker.returned_tokens import ReturnedTokens, give_back

ROWS, AHEAD = 4, 3


class Way:
    """What of a link is used here: what is sent lies there until it is received."""

    def __init__(self) -> None:
        self.lying: list[np.ndarray] = []

    def send(self, array: np.ndarray) -> None:
        self.lying.append(array.copy())

    def receive(self, shape: tuple[int, ...]) -> np.ndarray:
        if not self.lying:
            raise StageLostError("nothing was sent")
        array = self.lying.pop(0)
        assert array.shape == shape
        return array


def in_one_process() -> Any:
    return Way()


def step(rows: list[int], tokens: list[int], sample: list[bool]) -> BatchRequest:
    """A token of each row."""
    ones = np.ones(len(rows), np.int32)
    return BatchRequest(
        step_id=1,
        rows=np.array(rows, np.int32),
        starts=ones,
        query_lens=ones,
        token_ids=np.array(tokens, np.int32),
        sample=np.array(sample, np.bool_),
        table_updates=np.empty((0, 4), np.int32),
    )


@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=ROWS, max_size=ROWS), max_size=20))
def test_each_step_has_what_the_latest_one_of_its_row_sampled(steps: list[list[tuple[bool, bool]]]) -> None:
    """The last stage is as late as it may be: it computes a step when the first one needs its tokens, or when it is
    none of those on their way any more."""
    way, last = in_one_process(), HostLastSampled(ROWS)
    returned = ReturnedTokens(way, last, ROWS, AHEAD)
    said: dict[int, int] = {}
    sent: list[BatchRequest] = []
    done = 0
    for number, each in enumerate(steps):
        rows = [row for row, (takes, _) in enumerate(each) if takes]
        if not rows:
            continue
        unknown = [row in said for row in rows]
        batch = step(rows, [LAST_SAMPLED if is_so else 7 for is_so in unknown], [each[row][1] for row in rows])
        needed = [at for at, other in enumerate(sent) for row, is_so in zip(rows, unknown, strict=True)
                  if is_so and row in other.rows[other.sample]]  # fmt: skip
        for at in range(done, max([0, len(sent) - AHEAD, *(at + 1 for at in needed)])):
            sampled = sent[at].rows[sent[at].sample]
            give_back(way, (100 * at + sampled).astype(np.int32))
            done = at + 1
        returned.before(batch)
        expected = [said[row] if is_so else 7 for row, is_so in zip(rows, unknown, strict=True)]
        assert last.inputs(batch).tolist() == expected, number
        said |= {row: 100 * len(sent) + row for row in rows if each[row][1]}
        sent.append(batch)
    for at in range(done, len(sent)):
        give_back(way, (100 * at + sent[at].rows[sent[at].sample]).astype(np.int32))
    returned.settle()
    assert not way.lying, "nothing is left for a life after sleep"


def test_what_no_step_needs_is_taken_nevertheless_and_does_not_pile_up() -> None:
    way = in_one_process()
    returned = ReturnedTokens(way, HostLastSampled(ROWS), ROWS, AHEAD)
    for _ in range(20):
        returned.before(step([0, 1], [7, 8], [True, True]))
        give_back(way, np.array([1, 2], np.int32))
        assert len(way.lying) <= AHEAD + 1


@pytest.fixture
def links() -> list[NetworkLink]:
    return links_of(1, 3)


def test_tokens_go_from_the_last_stage_to_the_first_by_the_ring(links: list[NetworkLink]) -> None:
    first, _, third = links
    last = HostLastSampled(ROWS)
    returned = ReturnedTokens(first, last, ROWS, AHEAD)
    returned.before(step([2, 3], [7, 8], [True, True]))
    give_back(third, np.array([2**24 - 1, -1], np.int32))
    give_back(third, np.empty(0, np.int32))
    batch = step([3, 2], [LAST_SAMPLED] * 2, [True, True])
    returned.before(batch)
    assert last.inputs(batch).tolist() == [0, 2**24 - 1], "where there is none, some other"
    for link in links:
        link.close()

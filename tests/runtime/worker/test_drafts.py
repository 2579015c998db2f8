"""Which guesses are right, against going through them one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwise.kernels.base import FOLLOWS, GUESSED
from headwise.runtime.protocol.batch import NO_DRAFTS, BatchRequest
from headwise.runtime.worker.drafts import SampledRows, check_drafts, spread
from headwise.runtime.worker.last_sampled import NO_TOKEN

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans(), st.integers(0, 20)), min_size=1, max_size=5
)
"""Of each: known tokens in the step, drafts, whether it samples (else it has none), and where it starts."""


def batch_of(sequences: list[tuple[int, int, bool, int]], tokens: list[int]) -> BatchRequest:
    known, drafts, sample, starts = (np.array(column) for column in zip(*sequences, strict=True))
    drafts = np.where(sample, drafts, 0)
    return BatchRequest(
        step_id=1,
        rows=np.arange(len(known), dtype=np.int32),
        starts=starts.astype(np.int32),
        query_lens=(known + drafts).astype(np.int32),
        token_ids=np.array(tokens[: int((known + drafts).sum())], np.int32),
        sample=sample.astype(np.bool_),
        table_updates=np.empty((0, 4), np.int32),
        drafts=drafts.astype(np.int32) if drafts.any() else NO_DRAFTS,
    )


def test_drafts_share_what_their_sequences_group_does() -> None:
    batch = batch_of([(1, 2, True, 90), (1, 0, True, 80), (1, 1, True, 85), (1, 1, True, 3), (1, 0, True, 9)], [0] * 9)
    each = spread(replace(batch, shared=np.array([0, 64, 64, 0, 0], np.int32)))
    assert each.shared is not None
    assert each.shared.tolist() == [0, 64, 64, 64, 64, 64, 0, 0, 0]
    assert spread(batch).shared is None


@given(st.data(), SEQUENCES)
def test_a_draft_counts_as_long_as_all_before_it_are_what_was_sampled(
    data: st.DataObject, sequences: list[tuple[int, int, bool, int]]
) -> None:
    batch = batch_of(sequences, data.draw(st.lists(st.integers(0, 1), min_size=40, max_size=40)))
    rows = SampledRows.of(batch)
    places, positions = rows.places(batch).tolist(), rows.positions(batch).tolist()
    count = len(places)
    sampled = np.array(data.draw(st.lists(st.integers(NO_TOKEN, 1), min_size=count, max_size=count)), np.int32)
    tokens, accepted = list[int](), list[int]()
    at, first = 0, 0
    for index, (known, drafts, samples, start) in enumerate(sequences):
        drafts *= samples
        own = batch.token_ids[first : first + known + drafts].tolist()
        if samples:
            assert rows.sequences[at : at + drafts + 1].tolist() == [index] * (drafts + 1)
            assert places[at : at + drafts + 1] == list(range(first + known - 1, first + known + drafts))
            assert positions[at : at + drafts + 1] == list(range(start + known, start + known + drafts + 1))
            said = list[int]()
            for step in range(drafts + 1):
                said.append(int(sampled[at + step]))
                if step == drafts or said[-1] != own[known + step]:
                    break
            if said[-1] == NO_TOKEN and len(said) > 1:
                said.pop()
            tokens, accepted = [*tokens, said[-1]], [*accepted, len(said) - 1]
            at += drafts + 1
        first += known + drafts
    assert at == count
    if count:
        told, right = check_drafts(batch, rows, sampled)
        assert (told.tolist(), right.tolist()) == (tokens, accepted)


@given(SEQUENCES)
def test_what_follows_is_of_one_token_behind_the_one_before_it(sequences: list[tuple[int, int, bool, int]]) -> None:
    batch = batch_of(sequences, [1] * 40)
    each = spread(batch)
    assert int(each.query_lens.sum()) == batch.num_tokens
    if each.follows is None:
        assert not len(batch.drafts)
        return
    at = 0
    for row, start, count, drafts in zip(batch.rows, batch.starts, batch.query_lens, batch.drafts, strict=True):
        own = [1] * count if drafts else [count]
        part = slice(at, at + len(own))
        assert each.query_lens[part].tolist() == own
        assert each.rows[part].tolist() == [row] * len(own)
        assert each.starts[part].tolist() == list(range(start, start + len(own)))
        known = [0, *[FOLLOWS] * (count - drafts - 1)]
        assert each.follows[part].tolist() == ([*known, *[GUESSED] * drafts] if drafts else [0])
        at += len(own)


def test_without_drafts_each_sequence_that_samples_has_one_row() -> None:
    batch = batch_of([(3, 0, True, 5), (2, 0, False, 0), (1, 0, True, 9)], [1] * 6)
    rows = SampledRows.of(batch)
    assert not len(batch.drafts)
    assert (rows.sequences.tolist(), rows.places(batch).tolist(), rows.positions(batch).tolist()) == (
        [0, 2],
        [2, 5],
        [8, 10],
    )

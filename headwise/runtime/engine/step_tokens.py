"""The tokens that a step computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.protocol.batch import LAST_SAMPLED


def step_tokens(
    table: SequenceTable,
    rows: Index,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    drafts: NDArray[np.int64],
    speculator: Speculator | None,
) -> NDArray[np.int32]:
    """``counts`` tokens of each row from ``starts`` on, the last ``drafts`` of which are guesses of the speculator; one
    that is not known yet is the worker's last sample."""
    known = table.length[rows] - table.pending[rows]
    first = np.where(starts < known, table.last_token[rows], np.int32(LAST_SAMPLED))
    many = ((starts < known - 1) | (drafts > 0)).nonzero()[0]
    if not len(many):
        return first
    ends = np.cumsum(counts)
    token_ids = np.empty(int(ends[-1]), dtype=np.int32)
    token_ids[ends - counts] = first
    for index, sequence in zip(many.tolist(), table.of(rows[many]), strict=True):
        start, count, end, of_drafts = (int(column[index]) for column in (starts, counts, ends, drafts))
        known_end = end - of_drafts
        token_ids[end - count : known_end] = sequence.tokens(start, start + count - of_drafts)
        if of_drafts:
            assert speculator is not None, "drafts are its"
            token_ids[known_end:end] = speculator.guesses(sequence, of_drafts)
    return token_ids

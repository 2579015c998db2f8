"""What of the embeddings that came with requests a step computes with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.protocol.batch import StepEmbeds


def step_embeds(
    table: SequenceTable, rows: Index, starts: NDArray[np.int64], counts: NDArray[np.int64]
) -> StepEmbeds | None:
    """Of a step with ``counts [n]`` tokens of each row, from ``starts [n]`` on; None: it has no such tokens."""
    given = (starts < table.embeds_end[rows]).nonzero()[0]
    if not len(given):
        return None
    begins = np.cumsum(counts) - counts
    places, parts = [], []
    for index, sequence in zip(given.tolist(), table.of(rows[given]), strict=True):
        start, end, begin = int(starts[index]), int(starts[index] + counts[index]), int(begins[index])
        for each in sequence.request.embeds:
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                places.append(np.arange(first, last, dtype=np.int32) + np.int32(begin - start))
                parts.append(each.floats(first - each.start, last - each.start))
    return StepEmbeds(np.concatenate(places), np.concatenate(parts)) if places else None

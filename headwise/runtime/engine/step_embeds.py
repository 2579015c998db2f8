"""What of the embeddings that came with requests a step computes with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.protocol.batch import StepEmbeds
from headwise.runtime.protocol.prompt_items import as_float32
from headwise.runtime.protocol.shared_rows import NO_VALUES, located
from headwise.transfer.shared_buffers import SharedBuffers


def step_embeds(
    table: SequenceTable,
    rows: Index,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    buffers: SharedBuffers | None = None,
) -> StepEmbeds | None:
    """Of a step with ``counts [n]`` tokens of each row, from ``starts [n]`` on; None: it has no such tokens.

    buffers: which workers read; None: they read none
    """
    given = (starts < table.embeds_end[rows]).nonzero()[0]
    if not len(given):
        return None
    begins = np.cumsum(counts) - counts
    places: list[NDArray[np.int32]] = []
    parts: list[NDArray[Any]] = []
    for index, sequence in zip(given.tolist(), table.of(rows[given]), strict=True):
        start, end, begin = int(starts[index]), int(starts[index] + counts[index]), int(begins[index])
        for each in sequence.request.embeds:
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                places.append(np.arange(first, last, dtype=np.int32) + np.int32(begin - start))
                parts.append(each.values[first - each.start : last - each.start])
    if not places:
        return None
    shared = None if buffers is None else located(buffers, parts)
    if shared is not None:
        return StepEmbeds(np.concatenate(places), NO_VALUES, shared)
    if any(part.dtype != np.uint16 for part in parts):  # bits of bfloat16 stay that where all are
        return StepEmbeds(np.concatenate(places), np.concatenate([as_float32(part) for part in parts]))
    return StepEmbeds(np.concatenate(places), np.concatenate(parts))

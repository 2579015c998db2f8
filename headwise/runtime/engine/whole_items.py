"""Items whose tokens see one another in both directions (`ModelConfig.both_ways`).

Of such an item early tokens see later ones, so a step computes all of its tokens, or all that the cache lacks of it: no
chunk of a prompt ends inside one. A chunk may begin there, behind what the cache has: that was computed with all of it,
and is known by the hash of all of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InvalidRequestError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.protocol.batch import UP_TO_THEMSELVES
from headwise.runtime.protocol.request import GenerateRequest

Counts = NDArray[np.int64]


def check_whole_items(request: GenerateRequest, config: EngineConfig, token_parts: int) -> None:
    """Raise `InvalidRequestError` for items that no step can compute whole, or that a block's hash does not tell apart.

    token_parts: ranks that keep each token's members together
    """
    if request.extra_keys and token_parts > 1:
        raise InvalidRequestError(
            f"the tokens of this model's items see one another, which is not served with context_parallel_size "
            f"{config.context_parallel_size}: serve it without"
        )
    for start, end, *_ in request.extra_keys:
        length = end - start
        if length > config.prefill_chunk:
            raise InvalidRequestError(
                f"the item at [{start}, {end}) has {length} tokens that see one another, which one step computes "
                f"together: of a prompt it takes {config.prefill_chunk} with max_batched_tokens "
                f"{config.most_batched_tokens}; start with {config.batched_tokens_for(length)} or more"
            )
        own = request.prompt_token_ids[start:end]
        if (own != own[0]).any():  # a block has the tokens of its own part alone in its hash
            raise InvalidRequestError(
                f"the item at [{start}, {end}) has several different tokens: those of this model's items see one "
                "another, and must be the same placeholder"
            )


def ending_outside(table: SequenceTable, rows: Index, counts: Counts) -> Counts:
    """``counts`` of each row's next tokens, less those behind the beginning of an item that they would end inside; the
    same array where no row has one before it."""
    starts = table.scheduled[rows]
    some = (starts < table.items_end[rows]).nonzero()[0]
    if not len(some):
        return counts
    counts = counts.copy()
    for index, sequence in zip(some.tolist(), table.of(rows[some]), strict=True):
        stop = int(starts[index] + counts[index])
        for start, end, *_ in sequence.request.extra_keys:
            if start < stop < end:
                counts[index] = max(0, start - int(starts[index]))
    return counts


def step_sees(table: SequenceTable, rows: Index, starts: Counts, counts: Counts) -> NDArray[np.int32]:
    """See `BatchRequest.sees`, of a step with ``counts [n]`` tokens of each row, from ``starts [n]`` on."""
    some = (starts < table.items_end[rows]).nonzero()[0]
    sees: NDArray[np.int32] = UP_TO_THEMSELVES
    if not len(some):
        return sees
    begins = np.cumsum(counts) - counts
    for index, sequence in zip(some.tolist(), table.of(rows[some]), strict=True):
        first, stop, begin = int(starts[index]), int(starts[index] + counts[index]), int(begins[index])
        for start, end, *_ in sequence.request.extra_keys:
            own = range(max(first, start), min(stop, end))
            if len(own) > 1:  # the last one has none of it behind itself
                if not len(sees):
                    offsets = np.repeat(starts - begins, counts)
                    sees = (np.arange(len(offsets)) + offsets + 1).astype(np.int32)
                sees[begin + own.start - first : begin + own.stop - first] = end
    return sees

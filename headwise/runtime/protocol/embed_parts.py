"""A prompt's embeddings on their way to an engine: behind the request, in parts.

    client -> engine   Submit {request, embeds}      which there are, and what they are like
    engine -> client   EmbedsWanted {start}          from which item on they are wanted, if any are
    client -> engine   EmbedsPart ...                a few at a time
    engine -> client   EmbedsTaken                   for each

So no message of a client takes an engine long, nor keeps a sign of life waiting for long. Embeddings of items within a
prefix that the engine has cached are not sent. Should it lose that before the request can run, or when it has to be
computed again, the request ends with `EmbedsLackingError`, and the client submits it again, with all (``needs_all``).

Of a prompt that an engine has another one compute it is the other one that asks, for a part at a time: messages between
engines may be lost, doubled and out of order.

    reader -> owner    AskLease {prompt, embeds}     said again until it is answered
    owner  -> reader   LeaseWants {start, first}     which rows are next
    reader -> owner    LeaseEmbeds                   these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.messages import EmbedsPart
from headwise.runtime.protocol.prompt_items import PromptEmbeds

PART_BYTES = 4 << 20
"""Of a part, or one row."""
MOST_UNDER_WAY = 4
"""Parts that a client has sent to an engine, and that are not taken yet."""


def parts_of(request_id: str, embeds: Sequence[PromptEmbeds]) -> Iterator[EmbedsPart]:
    """All of a request's, in their order."""
    index = first = 0
    while index < len(embeds):
        part = _part(request_id, embeds, index, first)
        yield part
        first += len(part.values)
        while index < len(embeds) and first >= len(embeds[index].values):
            first -= len(embeds[index].values)
            index += 1


def part_at(request_id: str, embeds: Sequence[PromptEmbeds], start: int, first: int) -> EmbedsPart | None:
    """The one that begins with the row ``first`` of the item at ``start``; None: there is none."""
    index = next((index for index, each in enumerate(embeds) if each.start == start), None)
    if index is None or not 0 <= first < len(embeds[index].values):
        return None
    return _part(request_id, embeds, index, first)


def _part(request_id: str, embeds: Sequence[PromptEmbeds], index: int, first: int) -> EmbedsPart:
    """From a row of an item on: many small items are few parts."""
    own = embeds[index].values[first:]
    left, found = max(1, PART_BYTES // own[:1].nbytes), list[NDArray[Any]]()
    for rows in (own, *(each.values for each in embeds[index + 1 :])):
        if left <= 0 or rows.dtype != own.dtype or rows.shape[1] != own.shape[1]:
            break
        found.append(rows[:left])
        left -= len(rows)
    values = found[0] if len(found) == 1 else np.concatenate(found)
    return EmbedsPart(request_id, embeds[index].start, first, values)

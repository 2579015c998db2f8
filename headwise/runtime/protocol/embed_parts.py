"""A prompt's embeddings on their way to an engine: behind the request, in parts.

    client -> engine   Submit {request, embeds}      which there are, and what they are like
    client -> engine   EmbedsPart ...                a few at a time
    engine -> client   EmbedsTaken                   for each

So no message of a client takes an engine long, nor keeps a sign of life waiting for long.

Of a prompt that an engine has another one compute it is the other one that asks, for a part at a time: messages between
engines may be lost, doubled and out of order.

    reader -> owner    AskLease {prompt, embeds}     said again until it is answered
    owner  -> reader   LeaseWants {start, first}     which rows are next
    reader -> owner    LeaseEmbeds                   these
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwise.runtime.protocol.messages import EmbedsPart
from headwise.runtime.protocol.prompt_items import PromptEmbeds

PART_BYTES = 4 << 20
"""Of a part, or one row."""
MOST_UNDER_WAY = 4
"""Parts that a client has sent to an engine, and that are not taken yet."""


def parts_of(request_id: str, embeds: Sequence[PromptEmbeds]) -> Iterator[EmbedsPart]:
    """All of a request's, in their order."""
    for each in embeds:
        first = 0
        while first < len(each.values):
            part = _part(request_id, each, first)
            yield part
            first += len(part.values)


def part_at(request_id: str, embeds: Sequence[PromptEmbeds], start: int, first: int) -> EmbedsPart | None:
    """The one that begins with the row ``first`` of the item at ``start``; None: there is none."""
    own = next((each for each in embeds if each.start == start), None)
    return None if own is None or not 0 <= first < len(own.values) else _part(request_id, own, first)


def _part(request_id: str, embeds: PromptEmbeds, first: int) -> EmbedsPart:
    count = max(1, PART_BYTES // embeds.values[:1].nbytes)
    return EmbedsPart(request_id, embeds.start, first, embeds.values[first : first + count])

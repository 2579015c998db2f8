"""A prompt's embeddings on their way to an engine: behind the request, in parts.

    client -> engine   Submit {request, embeds}      which there are, and what they are like
    client -> engine   EmbedsPart ...                a few at a time
    engine -> client   EmbedsTaken                   for each

So no message of a client takes an engine long, nor keeps a sign of life waiting for long.
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
        step = max(1, PART_BYTES // each.values[:1].nbytes)
        for first in range(0, len(each.values), step):
            yield EmbedsPart(request_id, each.start, first, each.values[first : first + step])

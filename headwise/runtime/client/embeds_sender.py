"""Embeddings of a client's requests on their way to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwise.runtime.protocol.embed_parts import MOST_UNDER_WAY, parts_of
from headwise.runtime.protocol.messages import EmbedsPart
from headwise.runtime.protocol.prompt_items import PromptEmbeds


class EmbedsSender:
    """To one engine: few parts at a time, of each request in turn."""

    def __init__(self) -> None:
        self._held: dict[str, Sequence[PromptEmbeds]] = {}  # by request, until it is known which are wanted
        self._left: dict[str, Iterator[EmbedsPart]] = {}  # by request, the next one first
        self._under_way = 0

    def begin(self, request_id: str, embeds: Sequence[PromptEmbeds]) -> None:
        """They are to be sent, behind their request, as far as they are `wanted`."""
        if embeds:
            self._held[request_id] = embeds

    def wanted(self, request_id: str, start: int) -> None:
        """Those from the item at ``start`` on are."""
        embeds = self._held.pop(request_id, ())
        first = next((at for at, each in enumerate(embeds) if each.start == start), len(embeds))
        if first < len(embeds):
            self._left[request_id] = parts_of(request_id, embeds[first:])

    def end(self, request_id: str) -> None:
        """Whatever is left of a request's is not wanted any more."""
        self._held.pop(request_id, None)
        self._left.pop(request_id, None)

    def taken(self) -> None:
        """A part was."""
        self._under_way = max(0, self._under_way - 1)

    def due(self) -> Iterator[EmbedsPart]:
        """The parts to send now."""
        while self._left and self._under_way < MOST_UNDER_WAY:
            request_id = next(iter(self._left))
            parts = self._left.pop(request_id)
            part = next(parts, None)
            if part is not None:
                self._left[request_id] = parts
                self._under_way += 1
                yield part

"""Requests whose embeddings are on their way to an engine (`headwise.runtime.protocol.embed_parts`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.messages import EmbedsPart, Submit
from headwise.runtime.protocol.prompt_items import (
    EmbedsPlace,
    PromptEmbeds,
    RowDigest,
    check_finite,
    digests_of,
    named_by_others,
)
from headwise.runtime.protocol.request import GenerateRequest


@dataclass
class _Item:
    """An item's embeddings, of which the first ``rows`` have come. digest: of these, where it must be ``named``"""

    place: EmbedsPlace
    values: PromptEmbeds
    named: str | None
    digest: RowDigest
    rows: int = 0


@dataclass
class _Arriving:
    """A request. found: the embeddings that are whole; item: those that come now; heard: when some did"""

    submit: Submit
    heard: float
    item: _Item
    found: list[PromptEmbeds] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.submit.embeds)


class ArrivingEmbeds:
    """Parts are checked as they come, so that none takes long, and no request long once its last one is there."""

    def __init__(self) -> None:
        self._arriving: dict[str, _Arriving] = {}

    @property
    def num_bytes(self) -> int:
        """Of all embeddings of these requests, whether they have come or not."""
        return sum(each.num_bytes for each in self._arriving.values())

    @property
    def request_ids(self) -> list[str]:
        return list(self._arriving)

    def begin(self, submit: Submit, now: float) -> None:
        """Embeddings of a request follow, some at least; what they are like was checked."""
        self._arriving[submit.request.request_id] = _Arriving(submit, now, _item(submit, 0))

    def key_of(self, request_id: str) -> int:
        """Of the `Submit`; 0: nothing of such a request is on its way."""
        arriving = self._arriving.get(request_id)
        return 0 if arriving is None else arriving.submit.key

    def wanted(self, request_id: str) -> tuple[int, int] | None:
        """Where the item lies whose rows are next, and the first one of these; None: nothing of it is on its way."""
        arriving = self._arriving.get(request_id)
        return None if arriving is None else (arriving.item.place.start, arriving.item.rows)

    def take(self, part: EmbedsPart, now: float) -> GenerateRequest | None:
        """Take in a part; the request with all of its embeddings, if that was the last one.

        Raises:
            InvalidRequestError: it is not what comes next, or its numbers are none.
        """
        arriving = self._arriving.get(part.request_id)
        if arriving is None:
            return None
        item, rows = arriving.item, part.values
        _check_next(item, part)
        check_finite(rows, item.place.start, item.place.end)
        if item.named is not None:
            item.digest.take(rows)
        item.values.values[item.rows : item.rows + len(rows)] = rows
        item.rows, arriving.heard = item.rows + len(rows), now
        return self._whole(arriving) if item.rows == item.place.length else None

    def _whole(self, arriving: _Arriving) -> GenerateRequest | None:
        """An item's embeddings are all there: go on with the next one's, or return the request."""
        submit, item = arriving.submit, arriving.item
        if item.named not in (None, item.digest.digest):
            raise named_by_others(item.place.start, item.place.end)
        item.values.values.flags.writeable = False
        arriving.found.append(item.values)
        if len(arriving.found) < len(submit.embeds):
            arriving.item = _item(submit, len(arriving.found))
            return None
        del self._arriving[submit.request.request_id]
        return replace(submit.request, embeds=tuple(arriving.found))

    def drop(self, request_id: str) -> None:
        """Nothing more of a request is wanted."""
        self._arriving.pop(request_id, None)

    def stalled_since(self, moment: float) -> list[str]:
        """Requests of whose embeddings nothing has come since before ``moment``."""
        return [request_id for request_id, arriving in self._arriving.items() if arriving.heard < moment]


def _item(submit: Submit, index: int) -> _Item:
    place = submit.embeds[index]
    values = np.empty((place.length, place.width), np.uint16 if place.is_half else np.float32)
    named = digests_of(submit.request.extra_keys).get((place.start, place.end))
    return _Item(place, PromptEmbeds(place.start, values), named, RowDigest(place.is_half))


def _check_next(item: _Item, part: EmbedsPart) -> None:
    """Raise `InvalidRequestError` unless a part has the next rows of an item."""
    place, rows, own = item.place, part.values, item.values.values
    left = place.length - item.rows
    fits = rows.dtype == own.dtype and rows.ndim == 2 and rows.shape[1] == place.width and 0 < len(rows) <= left
    if not fits or (part.start, part.first) != (place.start, item.rows):
        raise InvalidRequestError(
            f"{rows.dtype} {list(rows.shape)} from row {part.first} on of the item at {part.start} are not the next "
            f"embeddings: those are {own.dtype} [1 to {left}, {place.width}] from row {item.rows} on of the item at "
            f"{place.start}"
        )

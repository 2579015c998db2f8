"""Requests whose embeddings are on their way to an engine (`headwise.runtime.protocol.embed_parts`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from headwise.runtime.protocol.shared_rows import places_in


@dataclass
class _Item:
    """An item's embeddings, of which the first ``rows`` have come. digest: of these, where it must be ``named``"""

    place: EmbedsPlace
    values: PromptEmbeds
    named: str | None
    digest: RowDigest
    rows: int = 0

    def take(self, rows: NDArray[Any]) -> int:
        """The next ones, and maybe others' behind them; how many are its own."""
        own = rows[: self.place.length - self.rows]
        if self.named is not None:
            self.digest.take(own)
        self.values.values[self.rows : self.rows + len(own)] = own
        self.rows += len(own)
        return len(own)


@dataclass
class _Arriving:
    """A request.

    lacks:   see `Sequence`
    heard:   when some came
    digests: see `digests_of`
    arrays:  for all that are to come
    item:    those that come now
    found:   those that are whole
    """

    submit: Submit
    lacks: int
    heard: float
    digests: dict[tuple[int, int], str]
    arrays: list[NDArray[Any]]
    item: _Item
    found: list[PromptEmbeds] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.submit.embeds)


def _private(num_bytes: int) -> NDArray[np.uint8]:
    return np.empty(num_bytes, np.uint8)


class ArrivingEmbeds:
    """Parts are checked as they come, so that none takes long, and no request long once its last one is there."""

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]] = _private) -> None:
        """allocate: memory for so many bytes of a request's embeddings"""
        self._allocate = allocate
        self._arriving: dict[str, _Arriving] = {}

    @property
    def num_bytes(self) -> int:
        """Of all embeddings of these requests, whether they have come or not."""
        return sum(each.num_bytes for each in self._arriving.values())

    @property
    def request_ids(self) -> list[str]:
        return list(self._arriving)

    def begin(self, submit: Submit, now: float, lacks: int = 0) -> None:
        """Embeddings of a request follow, some at least; what they are like was checked. lacks: see `Sequence`"""
        digests = digests_of(submit.request.extra_keys)
        arrays = places_in(self._allocate, [((each.length, each.width), each.is_half) for each in submit.embeds])
        item = _item(submit.embeds[0], arrays[0], digests)
        self._arriving[submit.request.request_id] = _Arriving(submit, lacks, now, digests, arrays, item)

    def key_of(self, request_id: str) -> int:
        """Of the `Submit`; 0: nothing of such a request is on its way."""
        arriving = self._arriving.get(request_id)
        return 0 if arriving is None else arriving.submit.key

    def lacks_of(self, request_id: str) -> int:
        """Of a request of which something is on its way."""
        arriving = self._arriving.get(request_id)
        return 0 if arriving is None else arriving.lacks

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
        rows, place = part.values, arriving.item.place
        _check_next(arriving, part)
        check_finite(rows, place.start, place.end)
        arriving.heard = now
        while len(rows):
            rows = rows[arriving.item.take(rows) :]
            if arriving.item.rows == arriving.item.place.length and self._has_all(arriving):
                del self._arriving[part.request_id]
                return replace(arriving.submit.request, embeds=tuple(arriving.found))
        return None

    def _has_all(self, arriving: _Arriving) -> bool:
        """An item's embeddings are all there: go on with the next one's, if there is one."""
        submit, item = arriving.submit, arriving.item
        if item.named not in (None, item.digest.digest):
            raise named_by_others(item.place.start, item.place.end)
        item.values.values.flags.writeable = False
        arriving.found.append(item.values)
        if len(arriving.found) == len(submit.embeds):
            return True
        number = len(arriving.found)
        arriving.item = _item(submit.embeds[number], arriving.arrays[number], arriving.digests)
        return False

    def drop(self, request_id: str) -> None:
        """Nothing more of a request is wanted."""
        self._arriving.pop(request_id, None)

    def stalled_since(self, moment: float) -> list[str]:
        """Requests of whose embeddings nothing has come since before ``moment``."""
        return [request_id for request_id, arriving in self._arriving.items() if arriving.heard < moment]


def _item(place: EmbedsPlace, values: NDArray[Any], digests: dict[tuple[int, int], str]) -> _Item:
    named = digests.get((place.start, place.end))
    return _Item(place, PromptEmbeds(place.start, values), named, RowDigest(place.is_half))


def _check_next(arriving: _Arriving, part: EmbedsPart) -> None:
    """Raise `InvalidRequestError` unless a part has the next rows, of items that are alike."""
    item, rows = arriving.item, part.values
    place, own = item.place, item.values.values
    behind = arriving.submit.embeds[len(arriving.found) + 1 :]
    alike = takewhile(lambda each: (each.width, each.is_half) == (place.width, place.is_half), behind)
    left = place.length - item.rows + sum(each.length for each in alike)
    fits = rows.dtype == own.dtype and rows.ndim == 2 and rows.shape[1] == place.width and 0 < len(rows) <= left
    if not fits or (part.start, part.first) != (place.start, item.rows):
        raise InvalidRequestError(
            f"{rows.dtype} {list(rows.shape)} from row {part.first} on of the item at {part.start} are not the next "
            f"embeddings: those are {own.dtype} [1 to {left}, {place.width}] from row {item.rows} on of the item at "
            f"{place.start}"
        )

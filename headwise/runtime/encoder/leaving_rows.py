"""What was made of images and videos, on its way to those who asked: in parts, each of which they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.encoder_messages import PART_BYTES, Encoded, EncodedRows, WantsRows
from headwise.runtime.protocol.images import EncodedImage

MAX_KEPT_BYTES = 1 << 30
"""Of embeddings that are not all sent; of a client half as many, or those of one image."""


@dataclass
class _Leaving:
    """asked: when its last part was asked for"""

    values: NDArray[Any]
    asked: float


class LeavingRows:
    """Used by the socket's thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, int], _Leaving] = {}

    @property
    def num_bytes(self) -> int:
        return sum(each.values.nbytes for each in self._kept.values())

    def _has_room(self, client: bytes, size: int) -> bool:
        own = sum(each.values.nbytes for (owner, _), each in self._kept.items() if owner == client)
        is_within = own + size <= MAX_KEPT_BYTES // 2 and self.num_bytes + size <= MAX_KEPT_BYTES
        return is_within or not self._kept

    def begin(self, client: bytes, key: int, made: EncodedImage, now: float) -> Encoded | None:
        """The message that says what was made, with the first rows; None: there is no room for the others."""
        first = _part(made.embeds, 0)
        if len(first) < len(made.embeds):
            if not self._has_room(client, made.embeds.nbytes):
                return None
            self._kept[client, key] = _Leaving(made.embeds, now)
        return Encoded(key, made.image, first)

    def rows(self, client: bytes, wants: WantsRows, now: float) -> EncodedRows | None:
        """Those that are wanted. None: nobody waits for them. Raises `InvalidRequestError` where there are none."""
        leaving = self._kept.get((client, wants.key))
        if leaving is None:
            return None
        if not 0 <= wants.first < len(leaving.values):
            raise InvalidRequestError(f"row {wants.first} was asked for, of {len(leaving.values)}")
        leaving.asked = now
        values = _part(leaving.values, wants.first)
        if wants.first + len(values) == len(leaving.values):
            del self._kept[client, wants.key]
        return EncodedRows(wants.key, wants.first, values)

    def drop(self, client: bytes, key: int | None = None) -> None:
        """Forget what is for a client, or one of its questions."""
        for which in [each for each in self._kept if each[0] == client and key in (None, each[1])]:
            del self._kept[which]

    def stalled_since(self, moment: float) -> list[tuple[bytes, int]]:
        """What was not asked for since then."""
        return [which for which, each in self._kept.items() if each.asked < moment]


def _part(values: NDArray[Any], first: int) -> NDArray[Any]:
    return values[first : first + max(1, PART_BYTES // values[:1].nbytes)]

"""Long messages travel as several short ones, their pieces.

libzmq takes 64 bytes for a frame, however short the frame is, and has no limit for the frames of a message that does
not end. So a listener allows few bytes of one message. What is longer than that is cut up here, and joined where its
memory can be counted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

PIECE_BYTES = 128 << 10
"""Longest message that is sent whole, and longest piece."""

_MARK = b"\xc1part"
"""First bytes of a piece. No MessagePack value, and so none of our messages, begins with 0xC1."""
_HEAD = struct.Struct(">5sII")
"""Of a piece: the mark, its index, and how many pieces the message has."""


class PieceError(ValueError):
    """A message in pieces is too long."""


def split(data: bytes, piece_bytes: int = PIECE_BYTES) -> list[bytes]:
    """The messages to send instead of ``data``, each of at most ``piece_bytes`` bytes; short data is sent as it is."""
    if len(data) <= piece_bytes:
        return [data]
    step = piece_bytes - _HEAD.size
    count = -(-len(data) // step)
    view = memoryview(data)
    return [_HEAD.pack(_MARK, i, count) + view[i * step : (i + 1) * step] for i in range(count)]


def is_piece(frame: bytes) -> bool:
    return frame.startswith(_MARK) and len(frame) > _HEAD.size


@dataclass
class _Unfinished:
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


class PieceJoiner:
    """Joins the pieces of each sender's message. Pieces of one sender come in order; some may be lost between.

    max_bytes: of a message
    num_bytes: held in unfinished messages
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unfinished: dict[bytes, _Unfinished] = {}
        self.num_bytes = 0

    def take(self, sender: bytes, piece: bytes) -> bytes | None:
        """The message, if this is its last piece. A message of which a piece is missing is dropped.

        Raises `PieceError` if it is too long, and forgets it.
        """
        _, index, count = _HEAD.unpack_from(piece)
        if index == 0:
            self.forget(sender)
        message = self._unfinished.setdefault(sender, _Unfinished())
        if len(message.pieces) != index:
            self.forget(sender)
            return None
        message.pieces.append(piece[_HEAD.size :])
        message.num_bytes += len(piece)
        self.num_bytes += len(piece)
        if message.num_bytes > self._max_bytes + (index + 1) * _HEAD.size:
            num_bytes = message.num_bytes
            self.forget(sender)
            raise PieceError(f"sent pieces of a message of more than {num_bytes} bytes; at most {self._max_bytes}")
        if index + 1 < count:
            return None
        self.forget(sender)
        return b"".join(message.pieces)

    def forget(self, sender: bytes) -> None:
        """Drop the sender's unfinished message."""
        message = self._unfinished.pop(sender, None)
        if message is not None:
            self.num_bytes -= message.num_bytes

    def largest(self) -> bytes:
        """Who has sent most of an unfinished message; there must be one."""
        return max(self._unfinished, key=lambda sender: self._unfinished[sender].num_bytes)

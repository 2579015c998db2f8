"""The store's messages as bytes: ``msgpack([version, kind, namespace, fields...])``, the fields in the order in which
`headwise.storage.index.messages` declares them.

Runs of hashes stay runs: a flush of any length is checked and decoded without a loop over its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from headwise.errors import HeadwiseError
from headwise.storage.index.messages import (
    HASH_BYTES,
    TIERS,
    Accepted,
    Emptied,
    Farewell,
    Flush,
    GetIndexStats,
    Gone,
    Heartbeat,
    IndexStats,
    Matches,
    Message,
    Outdated,
    Query,
    Rejected,
    Snapshot,
    SnapshotRequest,
)

VERSION = 4
MAX_NAME = 256
MAX_REASON = 1000
MAX_MESSAGE_BYTES = 256 << 20
"""Most bytes of a message, over all its frames."""
PIECE_BYTES = 1 << 20
"""A message with more bytes is sent in pieces of so many: see `headwise.sockets.pieces`."""
MAX_FRAMES = 256
"""Most messages that travel together, one per frame."""

_DIGESTS = 2 * len(TIERS)
_AT_DIGESTS = 3
"""Of a heartbeat's fields."""
_MAX_INTEGER = 2**63 - 1


class ProtocolError(HeadwiseError):
    """Bytes are not a message of the attention store's protocol.

    kind: what was wrong, to be counted by: ``malformed``, ``oversized``, ``version``, ``namespace`` or ``unexpected``
    """

    def __init__(self, message: str, kind: str = "malformed") -> None:
        super().__init__(message)
        self.kind = kind


def encode(message: Message, namespace: str = "") -> bytes:
    """The bytes of a message; `decode` gives an equal one back."""
    kind = type(message).__name__
    fields = list(vars(message).values())
    if isinstance(message, Heartbeat):
        fields[_AT_DIGESTS] = b"".join(digest.to_bytes(HASH_BYTES, "big") for digest in message.digests)
    data: bytes = msgpack.packb([VERSION, kind, namespace, *fields])
    return data


def decode(data: bytes, namespace: str = "") -> Message:
    """The message in ``data``; raises `ProtocolError` naming what is wrong with it."""
    try:
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"{len(data)} bytes are not msgpack: {error or type(error).__name__}") from None
    if not isinstance(message, list) or len(message) < 3 or not isinstance(message[1], str):
        raise ProtocolError("a message must be [version, kind, namespace, fields...]")
    version, kind, its_namespace, *body = message
    if version != VERSION:
        raise ProtocolError(f"message of protocol version {version!r:.40}; this side speaks {VERSION}", "version")
    if kind not in _FIELDS:
        raise ProtocolError(f"unknown message {kind!r:.80}; known are {', '.join(_FIELDS)}")
    if its_namespace != namespace and kind != "Rejected":  # a peer with a wrong namespace must learn of it
        raise ProtocolError(
            f"{kind} of namespace {its_namespace!r:.80}; this side serves {namespace!r:.80}: a peer must be of the "
            "same deployment, model and cache layout",
            "namespace",
        )
    build, checks = _FIELDS[kind]
    if len(body) != len(checks):
        raise ProtocolError(f"{kind} must have {len(checks)} fields, got {len(body)}")
    for index, check in enumerate(checks):
        body[index] = check(kind, body[index])
    if kind == "Flush":
        _check_flags(kind, body[5], body[7])
    return build(*body)


def _name(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise ProtocolError(f"{kind}: node must be a name of 1 to {MAX_NAME} characters")
    return value


def _volume(kind: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ProtocolError(f"{kind}: volume must be a name of at most {MAX_NAME} characters")
    return value


def _integer(low: int) -> Callable[[str, Any], int]:
    def check(kind: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= _MAX_INTEGER:
            raise ProtocolError(f"{kind}: a number must be an integer of at least {low}, got {value!r:.40}")
        return value

    return check


def _tier(kind: str, value: Any) -> str:
    if value not in TIERS:
        raise ProtocolError(f"{kind}: tier must be one of {', '.join(TIERS)}, got {value!r:.40}")
    return str(value)


def _flag(name: str) -> Callable[[str, Any], bool]:
    def check(kind: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ProtocolError(f"{kind}: {name} must be true or false, got {value!r:.40}")
        return value

    return check


def _hashes(kind: str, value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) % HASH_BYTES:
        raise ProtocolError(f"{kind}: block hashes must be a run of {HASH_BYTES}-byte hashes")
    return value


def _flags(kind: str, value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != value.count(0) + value.count(1):
        raise ProtocolError(f"{kind}: resumable must be bytes of 0 and 1")
    return value


def _check_flags(kind: str, hashes: bytes, flags: bytes) -> None:
    if flags and len(flags) * HASH_BYTES != len(hashes):
        raise ProtocolError(f"{kind}: resumable has {len(flags)} flags for {len(hashes) // HASH_BYTES} blocks")


def _by_tier(kind: str, value: Any) -> dict[str, tuple[bytes, bytes]]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind}: tiers must be a mapping, not {type(value).__name__}")
    tiers = {}
    for tier, held in value.items():
        if not isinstance(held, list) or len(held) != 2:
            raise ProtocolError(f"{kind}: a tier must be [block_hashes, resumable]")
        tiers[_tier(kind, tier)] = _hashes(kind, held[0]), _flags(kind, held[1])
        _check_flags(kind, *tiers[tier])
    return tiers


def _digests(kind: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) != _DIGESTS * HASH_BYTES:
        raise ProtocolError(f"{kind}: digests must be {_DIGESTS} times {HASH_BYTES} bytes")
    return tuple(int.from_bytes(value[at : at + HASH_BYTES], "big") for at in range(0, len(value), HASH_BYTES))


def _depths(kind: str, value: Any) -> dict[str, tuple[int, int, int]]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind}: depths must be a mapping, not {type(value).__name__}")
    depths: dict[str, tuple[int, int, int]] = {}
    for node, blocks in value.items():
        if not isinstance(blocks, list) or len(blocks) != len(TIERS):
            raise ProtocolError(f"{kind}: depths must be {len(TIERS)} numbers of blocks")
        device, host, storage = (_natural(kind, count) for count in blocks)
        depths[_name(kind, node)] = device, host, storage
    return depths


def _plain(kind: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind}: stats must be a mapping, not {type(value).__name__}")
    return value


def _reason(kind: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{kind}: reason must be text, not {type(value).__name__}")
    return value[:MAX_REASON]


_natural, _seq = _integer(0), _integer(-1)

_FIELDS: dict[str, tuple[Callable[..., Message], tuple[Callable[[str, Any], Any], ...]]] = {
    "Flush": (Flush, (_name, _natural, _natural, _tier, _natural, _hashes, _flag("resident"), _flags)),
    "Snapshot": (Snapshot, (_name, _natural, _seq, _by_tier)),
    "Heartbeat": (Heartbeat, (_name, _natural, _seq, _digests, _volume)),
    "Gone": (Gone, (_name, _natural)),
    "Farewell": (Farewell, (_name, _natural)),
    "Emptied": (Emptied, (_name, _natural)),
    "SnapshotRequest": (SnapshotRequest, (_name,)),
    "Accepted": (Accepted, (_name, _natural)),
    "Outdated": (Outdated, (_name, _natural, _flag("is_replaced"))),
    "Query": (Query, (_natural, _hashes)),
    "Matches": (Matches, (_natural, _depths)),
    "GetIndexStats": (GetIndexStats, (_natural,)),
    "IndexStats": (IndexStats, (_natural, _plain)),
    "Rejected": (Rejected, (_reason,)),
}

"""The store's messages as bytes: ``msgpack([version, kind, fields...])``, hashes joined into one run of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgpack

from headwise.errors import HeadwiseError
from headwise.storage.base import HASH_BYTES, TIERS, Flush, Heartbeat, Message, Snapshot, SnapshotRequest

VERSION = 1
MAX_NODE_NAME = 256


class ProtocolError(HeadwiseError):
    """Bytes are not a message of the attention store's protocol."""


def encode(message: Message) -> bytes:
    """The bytes of a message; `decode` gives an equal one back."""
    if isinstance(message, Flush):
        hashes = b"".join(message.block_hashes)
        start = message.start_write_block_idx
        body = [message.node, message.epoch, message.seq, message.tier, start, hashes, message.resident]
    elif isinstance(message, Snapshot):
        tiers = {tier: b"".join(sorted(hashes)) for tier, hashes in message.tiers.items()}
        body = [message.node, message.epoch, message.seq, tiers]
    elif isinstance(message, Heartbeat):
        digests = {tier: digest.to_bytes(HASH_BYTES, "big") for tier, digest in message.digests.items()}
        body = [message.node, message.epoch, message.seq, digests]
    else:
        body = [message.node]
    data: bytes = msgpack.packb([VERSION, type(message).__name__, *body])
    return data


def decode(data: bytes) -> Message:
    """The message in ``data``; raises `ProtocolError` naming what is wrong with it."""
    try:
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are not msgpack: {error or type(error).__name__}") from None
    if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], str):
        raise ProtocolError("a message must be [version, kind, fields...]")
    version, kind, *body = message
    if version != VERSION:
        raise ProtocolError(f"message of protocol version {version!r:.40}; this side speaks {VERSION}")
    if kind not in _FIELDS:
        raise ProtocolError(f"unknown message {kind!r:.80}; known are {', '.join(_FIELDS)}")
    build, checks = _FIELDS[kind]
    if len(body) != len(checks):
        raise ProtocolError(f"{kind} must have {len(checks)} fields, got {len(body)}")
    return build(*(check(kind, value) for check, value in zip(checks, body, strict=True)))


def split_hashes(joined: bytes) -> Iterable[bytes]:
    """The hashes of one run of bytes, whose length is a multiple of `HASH_BYTES`."""
    return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


def _node(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NODE_NAME:
        raise ProtocolError(f"{kind}: node must be a name of 1 to {MAX_NODE_NAME} characters")
    return value


def _integer(low: int) -> Callable[[str, Any], int]:
    def check(kind: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ProtocolError(f"{kind}: a number must be an integer of at least {low}, got {value!r:.40}")
        return value

    return check


def _tier(kind: str, value: Any) -> str:
    if value not in TIERS:
        raise ProtocolError(f"{kind}: tier must be one of {', '.join(TIERS)}, got {value!r:.40}")
    return str(value)


def _flag(kind: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{kind}: resident must be true or false, got {value!r:.40}")
    return value


def _hashes(kind: str, value: Any) -> tuple[bytes, ...]:
    if not isinstance(value, bytes) or len(value) % HASH_BYTES:
        raise ProtocolError(f"{kind}: block hashes must be a run of {HASH_BYTES}-byte hashes")
    return tuple(split_hashes(value))


def _by_tier(kind: str, value: Any) -> dict[str, frozenset[bytes]]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind}: tiers must be a mapping, not {type(value).__name__}")
    return {_tier(kind, tier): frozenset(_hashes(kind, hashes)) for tier, hashes in value.items()}


def _digests(kind: str, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{kind}: digests must be a mapping, not {type(value).__name__}")
    digests = {}
    for tier, digest in value.items():
        if not isinstance(digest, bytes) or len(digest) != HASH_BYTES:
            raise ProtocolError(f"{kind}: a digest must be {HASH_BYTES} bytes")
        digests[_tier(kind, tier)] = int.from_bytes(digest, "big")
    return digests


_FIELDS: dict[str, tuple[Callable[..., Message], tuple[Callable[[str, Any], Any], ...]]] = {
    "Flush": (Flush, (_node, _integer(0), _integer(0), _tier, _integer(0), _hashes, _flag)),
    "Snapshot": (Snapshot, (_node, _integer(0), _integer(-1), _by_tier)),
    "Heartbeat": (Heartbeat, (_node, _integer(0), _integer(-1), _digests)),
    "SnapshotRequest": (SnapshotRequest, (_node,)),
}

"""The index's messages as bytes: they survive the wire, and whatever else comes raises one error that names why."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.index.truth import block

from headwise.storage.index.messages import (
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
from headwise.storage.index.wire import _FIELDS, VERSION, ProtocolError, decode, encode

RUN = block(1) + block(2)

MESSAGES: list[Message] = [
    Flush("n/1", 2**60, 3, "host", 5, RUN, False, b"\0\1"),
    Flush("n", 0, 0, "device", 0, b"", True),
    Snapshot("n", 1, -1, {}),
    Snapshot("n", 1, 7, {"device": (RUN, b"\1\0"), "storage": (b"", b"")}),
    Heartbeat("n", 1, 4, (2**127 + 1, 0, 0, 5, 0, 0)),
    Heartbeat("n", 1, 4, (2**127 + 1, 0, 0, 5, 0, 0), "volume"),
    Gone("n", 2),
    Farewell("n", 3),
    Emptied("n", 3),
    SnapshotRequest("n"),
    Accepted("n", 2**62),
    Outdated("n", 7, True),
    Query(7, RUN),
    Matches(7, {"n": (1, 2, 3)}),
    GetIndexStats(8),
    IndexStats(8, {"nodes": {"n": {"epoch": 1}}}),
    Rejected("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(encode(message, "model x"), "model x") == message


def test_every_kind_of_message_is_tested() -> None:
    assert {type(message).__name__ for message in MESSAGES} == set(_FIELDS)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Flush("", 1, 0, "device", 0, b"", True), "node must be a name"),
        (Flush("n" * 300, 1, 0, "device", 0, b"", True), "node must be a name"),
        (Flush("n", 1, -1, "device", 0, b"", True), "at least 0, got -1"),
        (Flush("n", 2**63, 1, "device", 0, b"", True), "must be an integer"),
        (Flush("n", True, 1, "device", 0, b"", True), "must be an integer"),
        (Flush("n", 1, 0, "disk", 0, b"", True), "tier must be one of device, host, storage, got 'disk'"),
        (Flush("n", 1, 0, "device", 0, b"short", True), "16-byte hashes"),
        (Flush("n", 1, 0, "device", 0, b"", 1), "resident must be true or false"),
        (Flush("n", 1, 0, "device", 0, RUN, True, b"\1"), "resumable has 1 flags for 2 blocks"),
        (Flush("n", 1, 0, "device", 0, RUN, True, b"\1\2"), "resumable must be bytes of 0 and 1"),
        (Snapshot("n", 1, 0, {"device": (RUN, b"\1")}), "resumable has 1 flags for 2 blocks"),
        (Snapshot("n", 1, 0, {"device": RUN}), "a tier must be"),
        (Heartbeat("n", 1, 0, (1,)), "digests must be 6 times 16 bytes"),
        (Heartbeat("n", 1, 0, (0,) * 6, "v" * 300), "volume must be a name of at most 256"),
        (Heartbeat("n", 1, 0, (0,) * 6, 7), "volume must be a name"),
        (Matches(1, {"n": (1, 2)}), "depths must be 3 numbers"),
    ],
)
def test_a_wrong_field_is_named(message: Message, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as raised:
        decode(encode(message))
    assert raised.value.kind == "malformed"


def test_another_version_and_another_namespace_are_told_apart_from_malformed_bytes() -> None:
    for data, namespace, kind in (
        (encode(SnapshotRequest("n"), "model x"), "model y", "namespace"),
        (msgpack.packb([VERSION - 1, "Flush", "n", 1]), "", "version"),
        (b"\xc1", "", "malformed"),
    ):
        with pytest.raises(ProtocolError) as raised:
            decode(data, namespace)
        assert raised.value.kind == kind


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary() | st.integers(0, 9), inner),
    max_leaves=20,
)


@given(st.binary(max_size=200))
def test_random_bytes_raise_one_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.sampled_from(sorted(_FIELDS)), st.lists(PLAIN, max_size=9))
def test_random_fields_are_a_message_or_raise_one_error(kind: str, fields: list[Any]) -> None:
    try:
        message = decode(msgpack.packb([VERSION, kind, "", *fields]))
    except ProtocolError:
        return
    assert type(message).__name__ == kind


@given(st.sampled_from(MESSAGES), st.integers(0, 400), st.binary(min_size=0, max_size=3), st.booleans())
def test_damaged_messages_are_a_message_or_raise_one_error(
    message: Message, at: int, bytes_put: bytes, is_cut: bool
) -> None:
    data = encode(message)
    at %= len(data)
    damaged = data[:at] if is_cut else data[:at] + bytes_put + data[at + 1 :]
    try:
        decoded = decode(damaged)
    except ProtocolError:
        return
    assert isinstance(decoded, Message)

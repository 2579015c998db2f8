"""The socket that all servers have, with peers that mean harm, or stand still."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from support.waiting import PATIENCE_S, eventually

from headwise.runtime.protocol.messages import MAX_MESSAGE_BYTES
from headwise.sockets import listener as listener_module
from headwise.sockets.listener import Listener
from headwise.sockets.pieces import PIECE_BYTES, split

MAX_BYTES = 1 << 20
MAX_GROWTH = 64 << 20
"""Of memory, by a message that does not end; frames of two bytes take 32 times as much as was sent of them."""
MORE, LAST, LONG = 1, 0, 2


class Stranger:
    """A peer that writes ZMTP 3.0 by hand: any frames in any order, and none that it does not want to send."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self.socket.sendall(bytes([4, len(ready)]) + ready)
        heard = b""
        while b"Identity" not in heard:  # the other side's READY
            heard += self.socket.recv(1000)

    def send(self, flags: int, data: bytes) -> None:
        self.send_raw(bytes([flags | LONG]) + struct.pack(">Q", len(data)) + data)

    def send_raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def is_cut_off(self) -> bool:
        """Whether the other side has ended the connection; it says nothing after its READY."""
        ready, _, _ = select.select([self.socket], [], [], 0)
        try:
            return bool(ready) and self.socket.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True


class Place:
    """A listener with peers; `turn` is what a server's thread does over and over."""

    def __init__(self, **options: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.now = 0.0
        limits = {"max_message_bytes": MAX_BYTES, **options}
        self.listener = Listener(self.context, "tcp://127.0.0.1:*", clock=lambda: self.now, **limits)
        self.received: list[list[bytes]] = []
        self.of: dict[bytes, int] = {}
        self.ended: list[bytes] = []

    def turn(self, most: int = 100) -> None:
        self.now += 1.0
        for identity, frames in self.listener.receive(most):
            self.received.append(frames)
            self.of[identity] = self.of.get(identity, 0) + 1
        self.ended += self.listener.ended()

    def peer(self) -> zmq.Socket[bytes]:
        peer = self.context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(self.listener.endpoint)
        return peer

    def has(self, condition: object) -> bool:
        self.turn()
        return bool(condition() if callable(condition) else condition)

    def until_closed(self, stranger: Stranger, frames: bytes, most: int) -> int:
        """Have it send these frames until it is cut off; how many bytes it got rid of. All are taken in each time."""
        sent = 0
        with suppress(OSError):
            while sent < most and not stranger.is_cut_off():
                stranger.send_raw(frames)
                sent += len(frames)
                eventually(lambda: self._is_taken_in(stranger))
        return sent

    def _is_taken_in(self, stranger: Stranger) -> bool:
        self.turn()
        return stranger.is_cut_off() or _unacknowledged(stranger.socket) == 0


def _unacknowledged(own: socket.socket) -> int:
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", info, 24)[0])  # tcpi_unacked


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.listener.close()
    place.context.destroy(linger=0)


def _frame(flags: int, size: int) -> bytes:
    return bytes([flags | LONG]) + struct.pack(">Q", size) + bytes(size)


@pytest.mark.parametrize(
    "frames", [_frame(MORE, 16 << 10), _frame(MORE, 120 << 10)], ids=["small frames", "frames of nearly the limit"]
)
def test_a_message_that_does_not_end_is_cut_off_at_the_length_of_a_piece(place: Place, frames: bytes) -> None:
    stranger, honest = Stranger(place.listener.endpoint), place.peer()
    sent = place.until_closed(stranger, frames, 64 * MAX_BYTES)
    assert sent <= 8 * PIECE_BYTES
    for piece in split(bytes(MAX_BYTES)):
        honest.send(piece)
    eventually(lambda: place.has(lambda: place.received == [[bytes(MAX_BYTES)]]))
    eventually(lambda: place.has(lambda: len(place.listener._connections) == 1))
    stranger.socket.close()


def test_endless_frames_without_content_take_little_memory(place: Place) -> None:
    place.listener.close()
    place.listener = Listener(
        place.context, "tcp://127.0.0.1:*", max_message_bytes=MAX_MESSAGE_BYTES, clock=lambda: place.now
    )
    stranger = Stranger(place.listener.endpoint)
    before = _resident_bytes()
    sent = place.until_closed(stranger, bytes([MORE, 0]) * (16 << 10), 64 * MAX_BYTES)
    assert sent < 64 * MAX_BYTES
    assert _resident_bytes() - before < MAX_GROWTH
    stranger.socket.close()


def test_whole_messages_of_endless_frames_end_the_connection(place: Place) -> None:
    stranger = Stranger(place.listener.endpoint)
    frames = bytes([MORE, 0]) * (30 << 10) + bytes([LAST, 0])
    assert place.until_closed(stranger, frames, 64 * MAX_BYTES) < 64 * MAX_BYTES
    eventually(lambda: place.has(lambda: len(place.ended) == 1))
    stranger.socket.close()


def test_whole_messages_of_endless_frames_from_many_peers_take_little_memory_while_nobody_reads(place: Place) -> None:
    strangers = [Stranger(place.listener.endpoint) for _ in range(16)]
    for stranger in strangers:
        stranger.send(LAST, b"hello")
    eventually(lambda: place.has(lambda: len(place.of) == len(strangers)))
    before = _resident_bytes()
    message = bytes([MORE, 0]) * (30 << 10) + bytes([LAST, 0])
    _send_until_nothing_is_taken(strangers, message * 32)
    assert _resident_bytes() - before < 2 * MAX_GROWTH
    # Several turns a look: it takes some for each of them, and from look to look there is more and more time.
    eventually(lambda: any(place.has(lambda: len(place.ended) == len(strangers)) for _ in range(50)))
    for stranger in strangers:
        stranger.socket.close()


def _send_until_nothing_is_taken(strangers: list[Stranger], messages: bytes, quiet_s: float = 0.5) -> None:
    """All send these whole messages over and over, until the other side has not taken any for ``quiet_s``."""
    rest = {stranger.socket: messages for stranger in strangers}
    for own in rest:
        own.setblocking(False)
    while ready := select.select([], list(rest), [], quiet_s)[1]:
        for own in ready:
            rest[own] = rest[own][own.send(rest[own]) :] or messages


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_long_message_is_received_whole_among_those_of_others(place: Place) -> None:
    long = place.peer()
    data = os.urandom(MAX_BYTES)
    others = [place.peer() for _ in split(data)]
    for piece, other in zip(split(data), others, strict=True):
        long.send(piece)
        other.send(b"short")
    eventually(lambda: place.has(lambda: [data] in place.received))
    eventually(lambda: place.has(lambda: place.received.count([b"short"]) == len(others)))


@pytest.mark.parametrize("size", [2 * MAX_BYTES, 64 * MAX_BYTES])
def test_a_message_in_pieces_that_is_too_long_ends_the_connection(place: Place, size: int) -> None:
    peer = place.peer()
    for piece in split(bytes(size)):
        peer.send(piece)
    eventually(lambda: place.has(lambda: place.ended))
    assert place.received == []


def test_pieces_of_messages_that_never_get_complete_are_bounded_together(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "MAX_JOINED_BYTES", 2 * MAX_BYTES)
    peers = [place.peer() for _ in range(8)]
    for peer in peers:
        for piece in split(bytes(MAX_BYTES))[:-1]:
            peer.send(piece)
    eventually(lambda: place.has(lambda: len(place.ended) >= 6))
    assert place.listener._joiner.num_bytes <= 2 * MAX_BYTES


def test_the_newest_connections_beyond_the_limit_are_closed_and_one_line_tells_of_them(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.listener._limit.most = 4
    old = [Stranger(place.listener.endpoint) for _ in range(4)]
    for stranger in old:
        stranger.send(LAST, b"hello")
    eventually(lambda: place.has(lambda: len(place.of) == 4))
    new = [socket.create_connection(old[0].socket.getpeername(), timeout=PATIENCE_S) for _ in range(20)]
    eventually(lambda: place.has(lambda: place.listener._limit._refused == 20))
    for refused in new:
        while refused.recv(1000):
            pass
    assert [record.message for record in caplog.records].count(
        f"{place.listener.endpoint} keeps 4 connections and has closed 1 newer ones"
    ) == 1
    assert len([record for record in caplog.records if "newer ones" in record.message]) <= 3
    for stranger in old:
        stranger.send(LAST, b"again")
    eventually(lambda: place.has(lambda: sorted(place.of.values()) == [2, 2, 2, 2]))
    for stranger in old:
        stranger.socket.close()


def test_many_that_stay_below_the_limit_are_cut_off_together(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNFINISHED_BYTES", 4 * PIECE_BYTES)
    strangers = [Stranger(place.listener.endpoint) for _ in range(8)]
    for stranger in strangers:
        stranger.send(MORE, bytes(PIECE_BYTES))
    eventually(lambda: place.has(lambda: 0 < len(place.listener._connections) <= 4))
    for stranger in strangers:
        stranger.socket.close()


def test_a_peer_that_sends_many_whole_messages_is_not_taken_for_one_that_never_ends(place: Place) -> None:
    peer = place.peer()
    for _ in range(32):
        peer.send(bytes(PIECE_BYTES))
    eventually(lambda: place.has(lambda: len(place.received) == 32))
    for _ in range(10):  # nothing comes, and nothing is unfinished
        place.turn()
    peer.send(b"last")
    eventually(lambda: place.has(lambda: place.received[-1] == [b"last"]))
    assert place.ended == []


def test_a_message_of_many_frames_is_given_so_far_and_its_rest_thrown_away(place: Place) -> None:
    peer, other = place.peer(), place.peer()
    peer.send_multipart([b"a"] * 10_000)
    eventually(lambda: place.has(lambda: place.received == [[b"a", b"a"]]))
    other.send(b"b")
    eventually(lambda: place.has(lambda: place.received[1:] == [[b"b"]]))
    eventually(lambda: place.has(lambda: len(place.ended) == 1))


def test_peers_are_taken_in_turn_however_much_one_of_them_sends(place: Place) -> None:
    loud, quiet = place.peer(), place.peer()
    quiet.send(b"hello")
    loud.send(b"hello")
    eventually(lambda: place.has(lambda: len(place.of) == 2))
    for _ in range(1000):
        loud.send(b"x")
    place.received.clear()
    quiet.send(b"y")

    def is_heard() -> bool:
        place.turn(most=4)
        return [b"y"] in place.received

    eventually(is_heard)
    assert len(place.received) < 1000


def test_a_peer_that_leaves_too_many_messages_unread_is_cut_off_and_notices(place: Place) -> None:
    place.listener.close()
    place = Place(send_queue=2)
    peer = place.context.socket(zmq.DEALER)
    peer.setsockopt(zmq.RCVHWM, 1)
    peer.setsockopt(zmq.RCVBUF, 4096)
    news = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.connect(place.listener.endpoint)
    peer.send(b"hello")
    eventually(lambda: place.has(lambda: place.of))
    (identity,) = place.of
    assert place.listener.is_connected(identity)
    assert not all(place.listener.send(identity, bytes(MAX_BYTES)) for _ in range(64))

    def has_noticed() -> bool:
        while peer.poll(0):
            peer.recv()  # a socket that is full does not look at its connection
        return bool(news.poll(0))

    eventually(has_noticed)
    eventually(lambda: place.has(lambda: place.ended == [identity]))
    assert not place.listener.is_connected(identity)
    assert not place.listener.send(identity, b"")
    peer.disable_monitor()
    place.listener.close()
    place.context.destroy(linger=0)


def test_a_peer_that_leaves_too_many_bytes_unread_is_cut_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNREAD_BYTES", 16 << 20)
    stranger = Stranger(place.listener.endpoint)
    stranger.send(LAST, b"hello")
    eventually(lambda: place.has(lambda: place.of))
    (identity,) = place.of
    for _ in range(64):
        assert place.listener.send(identity, bytes(MAX_BYTES))
    eventually(lambda: place.has(lambda: place.ended == [identity]))
    stranger.socket.close()


def test_a_peer_that_is_dropped_is_told_by_its_connection_and_may_come_again(place: Place) -> None:
    peer = place.peer()
    peer.send(b"first")
    eventually(lambda: place.has(lambda: place.of))
    (identity,) = place.of
    place.listener.drop(identity, "was asked to leave")
    eventually(lambda: place.has(lambda: place.ended == [identity]))
    peer.send(b"second")
    eventually(lambda: place.has(lambda: place.received == [[b"first"], [b"second"]]))

"""The socket that all servers have, with peers that mean harm, or stand still."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
import zmq
from support.waiting import PATIENCE_S, eventually

from headwise.sockets import listener as listener_module
from headwise.sockets.listener import Listener

MAX_BYTES = 1 << 20
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
        self.socket.sendall(bytes([flags | LONG]) + struct.pack(">Q", len(data)) + data)


class Place:
    """A listener with peers; `turn` is what a server's thread does over and over."""

    def __init__(self, **options: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.now = 0.0
        limits = {"max_message_bytes": MAX_BYTES, **options}
        self.listener = Listener(self.context, "tcp://127.0.0.1:*", clock=lambda: self.now, **limits)  # type: ignore[arg-type]
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
        peer.connect(self.listener.endpoint)
        return peer

    def has(self, condition: object) -> bool:
        self.turn()
        return bool(condition() if callable(condition) else condition)

    def until_closed(self, stranger: Stranger, flags: int, piece: bytes, most: int) -> int:
        """Have it send pieces until it is cut off; how many bytes it got rid of. Each is taken in before the next."""
        sent = 0
        try:
            while sent < most:
                stranger.send(flags, piece)
                sent += len(piece)
                eventually(lambda: self._is_taken_in(stranger))
        except OSError:
            return sent
        return sent

    def _is_taken_in(self, stranger: Stranger) -> bool:
        self.turn()
        return stranger.socket.fileno() < 0 or _unacknowledged(stranger.socket) == 0


def _unacknowledged(own: socket.socket) -> int:
    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", info, 24)[0])  # tcpi_unacked


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.listener.close()
    place.context.destroy(linger=0)


@pytest.mark.parametrize("piece", [bytes(64 << 10), bytes(900 << 10)], ids=["small parts", "parts of nearly the limit"])
def test_a_message_that_does_not_end_is_cut_off_at_the_length_of_a_message(place: Place, piece: bytes) -> None:
    stranger, honest = Stranger(place.listener.endpoint), place.peer()
    sent = place.until_closed(stranger, MORE, piece, 64 * MAX_BYTES)
    assert sent <= 16 * MAX_BYTES  # some of it no further than the kernel's buffers, which take what nobody reads
    honest.send(bytes(MAX_BYTES))
    eventually(lambda: place.has(lambda: place.received == [[bytes(MAX_BYTES)]]))
    eventually(lambda: place.has(lambda: len(place.listener._connections) == 1))
    stranger.socket.close()


def test_many_that_stay_below_the_limit_are_cut_off_together(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_UNFINISHED_BYTES", 2 * MAX_BYTES)
    strangers = [Stranger(place.listener.endpoint) for _ in range(8)]
    for stranger in strangers:
        stranger.send(MORE, bytes(MAX_BYTES // 2))
    eventually(lambda: place.has(lambda: 0 < len(place.listener._connections) <= 4))
    for stranger in strangers:
        stranger.socket.close()


def test_a_peer_that_sends_many_whole_messages_is_not_taken_for_one_that_never_ends(place: Place) -> None:
    peer = place.peer()
    for _ in range(32):
        peer.send(bytes(MAX_BYTES // 2))
    eventually(lambda: place.has(lambda: len(place.received) == 32))
    peer.send(b"last")
    eventually(lambda: place.has(lambda: place.received[-1] == [b"last"]))
    assert place.ended == []


def test_a_message_of_many_frames_is_given_so_far_and_its_rest_thrown_away_over_several_turns(place: Place) -> None:
    peer, other = place.peer(), place.peer()
    peer.send_multipart([b"a"] * 1000)
    eventually(lambda: place.has(lambda: place.received == [[b"a", b"a"]]))
    other.send(b"b")
    peer.send(b"c")
    eventually(lambda: place.has(lambda: sorted(place.received[1:]) == [[b"b"], [b"c"]]))


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

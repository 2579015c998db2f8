"""The bound socket of a server. Untrusted clients cannot fill its memory, and no answer is lost silently.

libzmq limits the size of a frame (MAXMSGSIZE) and the number of whole messages (RCVHWM, SNDHWM). It does not limit the
frames of one message that does not end, and it takes 64 bytes for a frame of two. So long messages come in pieces (see
`headwise.sockets.pieces`), and the bytes that a connection has received, as the kernel counts them, are compared with
what could be read of it. A connection that holds back more than one piece's worth is closed. So is the connection of a
peer that does not read its answers: it notices that the connection has ended, and asks again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket as sockets
import struct
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.sockets.connection_limit import ConnectionLimit
from headwise.sockets.curve import KEY_PROPERTY, OVERHEAD_BYTES, Authenticator, ServerKeys, secure_server
from headwise.sockets.pieces import PIECE_BYTES, PieceError, PieceJoiner, is_piece

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

Identity = bytes
"""The sender or receiver of a message: ZeroMQ's name for a connection."""

MAX_UNREAD_BYTES = 64 << 20
"""Most bytes that a peer may leave unread, besides one message of the largest size."""
MAX_UNFINISHED_BYTES = 8 << 20
"""Most bytes, as sent, of messages that have not ended yet, over all connections. They take up to 32 times as much."""
MAX_JOINED_BYTES = 256 << 20
"""Most bytes of pieces whose messages are not complete, over all connections."""
RECEIVE_QUEUE = 2
"""Whole messages of a connection that may wait to be read; then the peer has to wait.

Each may be of frames without content, which take 32 times as much memory as was sent, and is found out only when it is
read. A server reads more than 30,000 messages a second of one peer all the same.
"""

_SLACK_BYTES = 64 << 10
"""Tolerance: more than libzmq reads at once, and more than its handshakes and heartbeats add."""
_SKIP_FRAMES = 8192
"""Frames of a message with too many that are thrown away at once, in some milliseconds."""
_COUNT_INTERVAL_S = 0.05
_COUNT_SHARE = 20
"""Counting the bytes of all connections takes at most one part in so many of the time."""

_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120
"""Of tcpi_bytes_acked and tcpi_bytes_received in Linux' ``struct tcp_info``."""


@dataclass(eq=False)
class _Connection:
    """An accepted connection. Bytes are counted on the wire, since the connection was made.

    inode:      tells the descriptor's socket from a later one with the same number
    identity:   of the peer, once it has sent a message; nobody can choose one that ZeroMQ has given to another peer
    key:        the public one that the peer connected with; empty: in the clear
    begun:      bytes that libzmq had taken when a message was last read; while none can be read, later bytes are of one
                message that has not ended
    taken:      bytes that libzmq had taken from the kernel at the last count
    was_read:   whether a message of it has been read since the last check
    is_suspect: it exceeded the limit once, and a little; libzmq may just have been about to pass on the message's end
    sent:       bytes that were given to libzmq to be sent
    is_ending:  it was shut down, which libzmq has not noticed yet
    """

    fd: int
    inode: int
    identity: Identity = b""
    key: str = ""
    begun: int = 0
    taken: int = 0
    was_read: bool = False
    is_suspect: bool = False
    sent: int = 0
    is_ending: bool = False

    @property
    def unfinished(self) -> int:
        return self.taken - self.begun


class Listener:
    """A ROUTER socket, bound to ``endpoint`` (for port 0 or ``*``, a free one). Owned by one thread.

    max_message_bytes: most bytes of a message that comes in pieces; a larger one ends the connection
    max_frame_bytes:   most bytes of a frame; a larger one ends the connection
    max_frames:        most frames of a message; of a longer one, one frame more is returned and the rest is dropped
    send_queue:        messages that a peer may leave unread before its connection is closed; 0: any number
    max_unread_bytes:  bytes that it may leave unread, besides one message of the largest size; 0: `MAX_UNREAD_BYTES`
    max_joined_bytes:  most bytes of pieces whose messages are not complete, of all peers; 0: `MAX_JOINED_BYTES`
    keys:              only clients with these keys may connect, encrypted; None: all may
    users:             public keys of other clients that may, too, until there are others: see `allow`
    prepare:           sets further options of the socket before it is bound
    failed_handshakes: connections of peers that spoke another protocol, or lacked the keys

    Raises `zmq.ZMQError` if the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        max_message_bytes: int,
        max_frame_bytes: int = PIECE_BYTES,
        max_frames: int = 1,
        send_queue: int = 0,
        max_unread_bytes: int = 0,
        max_joined_bytes: int = 0,
        keys: ServerKeys | None = None,
        users: Iterable[str] = (),
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import zmq

        self.failed_handshakes = 0
        self._max_bytes = max_frame_bytes
        self._joiner = PieceJoiner(max_message_bytes)
        self._max_frames = max_frames
        self._max_unread, self._max_joined = max_unread_bytes, max_joined_bytes
        self._clock = clock
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._peers: dict[Identity, _Connection] = {}
        self._sender_key = ""
        self._ended: list[Identity] = []
        self._is_skipping = False
        self._count_at = clock()
        self._counted_at: float | None = None
        self._num_read = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + (OVERHEAD_BYTES if keys else 0))
        self.socket.setsockopt(zmq.SNDHWM, send_queue)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        prepare(self.socket)
        self._always = frozenset[str]() if keys is None else keys.clients
        self._authenticator = None if keys is None else Authenticator(context, self._always.union(users))
        if keys is not None:
            secure_server(self.socket, keys)
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failed |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._failed = int(failed)
        self.monitor = self.socket.get_monitor_socket(failed | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._limit = ConnectionLimit(self.endpoint, clock)

    def close(self) -> None:
        """Stop watching the socket, which is closed with its context."""
        if not self.socket.closed and not self.monitor.closed:
            self._take_events()
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.close()

    # ---- in ----

    def receive(self, most: int) -> Iterator[tuple[Identity, list[bytes]]]:
        """At most so many messages, of all peers in turn, each as its frames. Call it once per round of the server's
        loop. The iterator may be left early.
        """
        import zmq

        receive, no_wait = self.socket.recv, int(zmq.NOBLOCK)
        self._take_events()
        if self._num_read > 2 * len(self._connections):  # peers are read in turn
            self._close_offenders()
        self._count_bytes()
        for _ in range(_SKIP_FRAMES):
            if not self._is_skipping:
                break
            self._is_skipping = receive(no_wait, copy=False).more
        for _ in range(0 if self._is_skipping else most):
            try:
                identity = receive(no_wait)
            except zmq.Again:
                self._close_offenders()
                return
            # As `recv_multipart`, in half its time: asking a frame whether it is the last is faster than the socket.
            frame = receive(no_wait, copy=False)
            is_allowed = self._note_read(identity, frame)
            frames = [frame.bytes]
            while frame.more and len(frames) <= self._max_frames:
                frame = receive(no_wait, copy=False)
                frames.append(frame.bytes)
            if frame.more:  # the rest is thrown away, beginning with the next round
                self._is_skipping = True
                self.drop(identity, f"sent a message of more than {self._max_frames} frames")
            if not is_allowed:
                self.drop(identity, "has an API key that is none any more")
                if self._is_skipping:
                    return
                continue
            if len(frames) == 1 and is_piece(frames[0]):
                whole = self._join(identity, frames[0])
                if whole is None:
                    continue
                frames = [whole]
            yield identity, frames
            if self._is_skipping:
                return

    def allow(self, users: Iterable[str]) -> None:
        """Clients with these public keys may connect from now on, besides those that always may. Others' connections
        are closed when they send something. In the clear it changes nothing."""
        if self._authenticator is not None:
            self._authenticator.allowed = self._always.union(users)

    @property
    def sender_key(self) -> str:
        """The public key of who has sent the message that `receive` returned last; empty: it came in the clear."""
        return self._sender_key

    def _join(self, identity: Identity, piece: bytes) -> bytes | None:
        """The message that ends with this piece, if one does. A peer whose message is too long is dropped."""
        try:
            whole = self._joiner.take(identity, piece)
        except PieceError as error:
            self.drop(identity, str(error))
            return None
        most = self._max_joined or MAX_JOINED_BYTES
        while self._joiner.num_bytes > most:
            largest = self._joiner.largest()
            self._joiner.forget(largest)
            self.drop(largest, f"sent most of {most} bytes of messages that are not complete")
        return whole

    def _note_read(self, identity: Identity, frame: zmq.Frame) -> bool:
        """Whether its sender may be heard."""
        self._num_read += 1
        connection = self._peers.get(identity)
        if connection is None:
            connection = self._identify(identity, frame)
        if connection is not None:
            connection.was_read = True
        if self._authenticator is None:
            return True
        self._sender_key = _key_of(frame) if connection is None else connection.key
        return self._sender_key in self._authenticator.allowed

    def _identify(self, identity: Identity, frame: zmq.Frame) -> _Connection | None:
        """Find the connection over which a peer's first message came; None if it has ended by now."""
        import zmq

        self._take_events()
        try:
            connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        except (zmq.ZMQError, KeyError):  # within this process there are no descriptors
            return None
        if connection is None:
            return None
        if not connection.identity:
            connection.identity = identity
            connection.key = "" if self._authenticator is None else _key_of(frame)
            self._peers[identity] = connection
        return connection if connection.identity == identity else None

    # ---- out ----

    def send(self, identity: Identity, data: bytes) -> bool:
        """Send without waiting. False: the peer is gone, or has left too much unread. In that case its connection is
        closed, which tells the peer that its answer will not come.
        """
        return self._send(identity, [data], copy=True)

    def send_views(self, identity: Identity, frames: Sequence[bytes | memoryview]) -> bool:
        """As `send`, a message of several frames, of which the long ones are not copied: they must not be written to
        until they are sent, and stay in memory until then.
        """
        return self._send(identity, frames, copy=False)

    def _send(self, identity: Identity, frames: Sequence[bytes | memoryview], copy: bool) -> bool:
        import zmq

        try:
            self.socket.send_multipart((identity, *frames), zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            self.drop(identity, "does not read what it is sent")
            return False
        except zmq.ZMQError:
            return False
        connection = self._peers.get(identity)
        if connection is not None:
            connection.sent += sum(map(len, frames))
        return True

    def drop(self, identity: Identity, why: str) -> None:
        """Close a peer's connection; unknown ones are ignored."""
        connection = self._peers.get(identity)
        if connection is not None:
            self._close(connection, why)

    # ---- connections ----

    def peers(self) -> list[Identity]:
        """The peers that have sent a message and are still connected."""
        return list(self._peers)

    def is_connected(self, identity: Identity) -> bool:
        """Whether this peer's connection is still open."""
        return identity in self._peers

    def ended(self) -> list[Identity]:
        """The peers whose connections have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _take_events(self) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while int(self.monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            kind, fd = int(event["event"]), int(event["value"])
            if kind & self._failed:
                self.failed_handshakes += 1
                continue
            known = self._connections.pop(fd, None)
            if known is not None and known.identity:
                del self._peers[known.identity]
                self._joiner.forget(known.identity)
                self._ended.append(known.identity)
            if kind == zmq.EVENT_ACCEPTED:
                self._accept(fd)

    def _accept(self, fd: int) -> None:
        try:
            connection = _Connection(fd, os.fstat(fd).st_ino)
        except OSError:  # it is closed already
            return
        self._connections[fd] = connection
        if self._limit.refuses(len(self._connections)):
            _shut_down(connection)

    # ---- messages that do not end ----

    def _count_bytes(self) -> None:
        """If it is due, count the bytes that each connection has received. Whole messages among them are read next."""
        started = self._clock()
        if self._counted_at is not None or started < self._count_at:
            return
        for connection in list(self._connections.values()):
            counts = _counts(connection)
            if counts is None:
                continue
            acked, connection.taken = counts
            if connection.sent - acked > (self._max_unread or MAX_UNREAD_BYTES) + self._max_bytes:
                self._close(connection, f"left {connection.sent - acked} bytes unread that it was sent")
        self._counted_at = started
        self._num_read = 0
        self._count_at = started + max(_COUNT_INTERVAL_S, _COUNT_SHARE * (self._clock() - started))

    def _close_offenders(self) -> None:
        """Close connections whose unfinished message is too large.

        By now every message that was whole at the last count has been read, or at least one message of each connection
        that had one. So libzmq has taken only parts of one message from a connection of which nothing was read."""
        if self._counted_at is None:
            return
        self._counted_at = None
        unfinished: list[_Connection] = []
        for connection in self._connections.values():
            if connection.was_read:
                _, taken = _counts(connection) or (0, connection.taken)  # also what came and was read since the count
                connection.begun, connection.was_read, connection.is_suspect = taken, False, False
            elif connection.unfinished > _SLACK_BYTES:
                unfinished.append(connection)
        total = sum(connection.unfinished for connection in unfinished)
        for connection in sorted(unfinished, key=lambda each: each.unfinished, reverse=True):
            owes = connection.unfinished
            is_long = owes > self._max_bytes + _SLACK_BYTES
            if is_long and not connection.is_suspect and owes <= 2 * self._max_bytes + _SLACK_BYTES:
                connection.is_suspect = True
            elif is_long:
                self._close(connection, f"sent {owes} bytes of a message that does not end")
            elif total > max(MAX_UNFINISHED_BYTES, 2 * self._max_bytes):
                self._close(connection, f"sent {owes} bytes of a message, and all together {total} of such ones")
            else:
                return
            total -= owes

    def _close(self, connection: _Connection, why: str) -> None:
        peer = None if connection.is_ending else _shut_down(connection)
        if peer is not None:
            log.warning("a peer at %s %s: its connection is closed", peer, why)


def _key_of(frame: zmq.Frame) -> str:
    """The public key of who has sent a message."""
    return str(frame.get(KEY_PROPERTY))


def _shut_down(connection: _Connection) -> Any:
    """End a connection, which libzmq then closes. Returns the peer's address; None if there is no such connection."""
    with suppress(OSError), sockets.socket(fileno=os.dup(connection.fd)) as own:
        if os.fstat(own.fileno()).st_ino == connection.inode:
            peer, connection.is_ending = own.getpeername(), True
            own.shutdown(sockets.SHUT_RDWR)
            return peer
    return None


def _counts(connection: _Connection) -> tuple[int, int] | None:
    """Bytes that the peer has acknowledged, and bytes of it that libzmq has taken from the kernel; None if unknown."""
    if not hasattr(sockets, "TCP_INFO"):
        return None
    data, waiting = b"", bytearray(4)
    with suppress(OSError), sockets.socket(fileno=os.dup(connection.fd)) as own:
        data = own.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _COUNTS_AT + _COUNTS.size)
        fcntl.ioctl(own, termios.FIONREAD, waiting)
    if len(data) < _COUNTS_AT + _COUNTS.size:
        return None
    acked, received = _COUNTS.unpack_from(data, _COUNTS_AT)
    return int(acked), int(received) - int.from_bytes(waiting, "little", signed=True)

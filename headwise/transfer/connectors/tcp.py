"""Arenas read over TCP, by ZeroMQ: works between any two nodes that reach each other.

    reader  DEALER                        owner  ROUTER, on a thread of its own
            -> [key][number][(first byte, bytes), ...]
            <- [number], the bytes of all these runs

A reader asks for `ANSWER_BYTES` at a time and has at most `WINDOW` questions open, so that neither side ever holds more
than that of one reader. It numbers its questions over its whole life and closes the connection to an owner that is
late: nothing that comes late is taken for anything else. Bytes are sent from the arena itself, without a copy. What
they are by then is for leases to say, as with every connector.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import logging
import math
import re
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.kernels.block_copy import RunCopy, outside
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import OVERHEAD_BYTES, ClientKeys, ServerKeys, secure_client
from headwise.sockets.listener import Identity, Listener
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, check_runs, this_node, unpack
from headwise.transfer.connectors.names import TCP
from headwise.transfer.connectors.parts import parts_of

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

ANSWER_BYTES = 1 << 20
"""Most bytes that one question asks for."""
WINDOW = 8
"""Questions that a reader has open."""
MAX_RUNS = 2048
"""Most runs that one question asks for."""
MAX_OWNERS = 256
"""Connections that a reader keeps."""
GATHER_BYTES = 64 << 10
"""Runs shorter than that are copied into one piece before they are sent."""

_KEY_BYTES = 16
_HEAD = struct.Struct(f"<{_KEY_BYTES}sQ")
_NUMBER = struct.Struct("<Q")
_MAX_QUESTION_BYTES = _HEAD.size + MAX_RUNS * 16
_SLICE_S = 0.1
"""Longest wait before a thread looks whether it is to stop."""
_BURST = 64
_CONNECT_S = 3.0
_ENDPOINT = re.compile(r"tcp://[A-Za-z0-9_.:\[\]-]{1,260}:[0-9]{1,5}")


# ---- the owner's side ----


class TcpExport:
    """`Export` that answers on a thread of its own.

    arena:    ``uint8 [n]``
    endpoint: to bind: ``tcp://HOST:PORT``, or ``tcp://HOST:*`` for any free port
    keys:     only readers with these connect, encrypted; None: whoever has the address
    copy:     gathers short runs

    Raises `zmq.ZMQError` if it cannot listen there.
    """

    def __init__(
        self, arena: NDArray[np.uint8], identity: bytes, endpoint: str, keys: ServerKeys | None, copy: RunCopy
    ) -> None:
        self._arena, self._copy = arena, copy
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._context = open_context()
        try:
            self._listener = Listener(
                self._context,
                endpoint,
                max_message_bytes=_MAX_QUESTION_BYTES,
                max_frame_bytes=_MAX_QUESTION_BYTES,
                send_queue=4 * WINDOW,
                keys=keys,
            )
        except BaseException:
            close_context(self._context)
            raise
        location = msgpack.packb((self._listener.endpoint, self._key))
        self.address = ExportAddress(TCP, this_node(), location, identity, arena.size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="headwise-peer-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `Export.close`."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                poller.poll(math.ceil(_SLICE_S * 1000))
                for identity, frames in self._listener.receive(_BURST):
                    self._answer(identity, frames)
        except Exception:
            log.exception("no peer can read this worker's host cache over TCP any more")
        finally:
            self._listener.close()
            close_context(self._context)

    def _answer(self, reader: Identity, frames: list[bytes]) -> None:
        """Answer a question. Who asks what is not to be had loses the connection, and so learns of it."""
        question = frames[0] if len(frames) == 1 else b""
        if len(question) < _HEAD.size or (len(question) - _HEAD.size) % 16:
            self._listener.drop(reader, "asked for blocks in a way that is not understood")
            return
        key, number = _HEAD.unpack_from(question)
        runs = np.zeros(((len(question) - _HEAD.size) // 16, 3), dtype=np.int64)
        runs[:, ::2] = np.frombuffer(question, dtype=np.int64, offset=_HEAD.size).reshape(-1, 2)
        if not hmac.compare_digest(key, self._key):
            self._listener.drop(reader, "asked for blocks of another worker, or with a wrong key")
        elif outside(runs, self._arena.size, ANSWER_BYTES) is not None or int(runs[:, 2].sum()) > ANSWER_BYTES:
            self._listener.drop(reader, "asked for bytes that the host cache does not have")
        else:
            self._listener.send_views(reader, [_NUMBER.pack(number), *self._bytes_of(runs)])

    def _bytes_of(self, runs: Runs) -> list[memoryview]:
        if len(runs) * GATHER_BYTES <= int(runs[:, 2].sum()):
            return [self._arena[first : first + count].data for first, _, count in runs.tolist()]
        runs[1:, 1] = np.cumsum(runs[:-1, 2])
        gathered = np.empty(int(runs[:, 2].sum()), dtype=np.uint8)
        self._copy(self._arena, gathered, runs)
        return [gathered.data]


def open_export(
    arena: NDArray[np.uint8], identity: bytes, host: str, ports: Sequence[int], keys: ServerKeys | None, copy: RunCopy
) -> TcpExport:
    """A `TcpExport` at the first free one of ``ports``; without ports, at any free one.

    Raises `OSError` if none is, `zmq.ZMQError` if it cannot listen there.
    """
    import zmq

    for port in ports or ("*",):
        try:
            return TcpExport(arena, identity, f"tcp://{host}:{port}", keys, copy)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"none of the ports {min(ports)}-{max(ports)} is free: give more peer_ports")


# ---- the reader's side ----


class TcpReader:
    """`Reader` over TCP. keys: the deployment's, where its connections are encrypted"""

    def __init__(
        self, copy: RunCopy, keys: ClientKeys | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._copy, self._keys, self._clock = copy, keys, clock
        self._context = open_context()
        self._lock = threading.Lock()
        self._connections: dict[bytes, _Connection] = {}  # by location; while one is read from, its thread has it
        self._numbers = itertools.count(1)

    def reaches(self, address: ExportAddress) -> bool:
        """See `Reader.reaches`."""
        return True

    def read(self, address: ExportAddress, runs: Runs, arena: NDArray[np.uint8], timeout_s: float) -> None:
        """See `Reader.read`."""
        check_runs(runs, address.arena_bytes, arena.size)
        deadline = self._clock() + timeout_s
        connection = self._connections.pop(address.location, None) or _Connection(self._context, address, self._keys)
        try:
            self._read(connection, questions(runs), arena, deadline)
        except BaseException:
            connection.close()  # what is still to come goes nowhere
            raise
        self._keep(address.location, connection)

    def _keep(self, location: bytes, connection: _Connection) -> None:
        with self._lock:
            unused = [self._connections.pop(location, None)]
            self._connections[location] = connection
            while len(self._connections) > MAX_OWNERS:  # those that are gone are among the least recently used
                unused.append(self._connections.pop(next(iter(self._connections)), None))
        for each in unused:
            if each is not None:
                each.close()

    def _read(self, connection: _Connection, asked: Iterator[Runs], arena: NDArray[np.uint8], deadline: float) -> None:
        open_: deque[tuple[int, Runs]] = deque()
        while True:
            while len(open_) < WINDOW and (runs := next(asked, None)) is not None:
                number = next(self._numbers)
                connection.ask(number, runs)
                open_.append((number, runs))
            if not open_:
                return
            number, runs = open_.popleft()
            self._take(connection.answer(number, deadline, self._clock), runs, arena)

    def _take(self, frames: Sequence[memoryview], runs: Runs, arena: NDArray[np.uint8]) -> None:
        """Copy an answer to where it belongs."""
        if sum(len(frame) for frame in frames) != int(runs[:, 2].sum()):
            raise PeerLostError("it answers with another number of bytes than it was asked for")
        if len(frames) == 1:
            inside = np.column_stack([np.cumsum(runs[:, 2]) - runs[:, 2], runs[:, 1:]])
            self._copy(np.frombuffer(frames[0], dtype=np.uint8), arena, inside)
            return
        if [len(frame) for frame in frames] != runs[:, 2].tolist():
            raise PeerLostError("it answers with other runs than it was asked for")
        for frame, (_, to, count) in zip(frames, runs.tolist(), strict=True):
            self._copy(np.frombuffer(frame, dtype=np.uint8), arena, np.array([[0, to, count]]))

    def forget(self, address: ExportAddress) -> None:
        """See `Reader.forget`."""
        connection = self._connections.pop(address.location, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self._connections.clear()
        close_context(self._context)


def questions(runs: Runs) -> Iterator[Runs]:
    """``runs``, cut so that no part asks for more than one question may; in order."""
    return parts_of(runs, ANSWER_BYTES, MAX_RUNS)


class _Connection:
    """To one owner. It is opened once: a connection that is lost stays lost, and another one takes a new object."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: ExportAddress, keys: ClientKeys | None
    ) -> None:
        import zmq

        values = unpack(address.location, [str, bytes])
        if values is None or not _ENDPOINT.fullmatch(values[0]) or len(values[1]) != _KEY_BYTES:
            raise PeerLostError("the address has no endpoint to connect to")
        self._endpoint, self._key = values
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, ANSWER_BYTES + OVERHEAD_BYTES),
            (zmq.SNDHWM, 2 * WINDOW),
            (zmq.RCVHWM, 2 * WINDOW),
            (zmq.RECONNECT_IVL, -1),
            (zmq.CONNECT_TIMEOUT, math.ceil(_CONNECT_S * 1000)),
        ):
            self._socket.setsockopt(option, value)
        secure_client(self._socket, keys)
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        ends |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._ends = self._socket.get_monitor_socket(int(ends))
        self._socket.connect(self._endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._ends, zmq.POLLIN)

    def ask(self, number: int, runs: Runs) -> None:
        import zmq

        question = _HEAD.pack(self._key, number) + runs[:, ::2].tobytes()
        try:
            self._socket.send(question, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerLostError(f"{self._endpoint} takes no more questions: {error}") from None

    def answer(self, number: int, deadline: float, clock: Callable[[], float]) -> Sequence[memoryview]:
        """The bytes that the owner sent to this question; answers come in the order of the questions."""
        import zmq

        while True:
            with suppress(zmq.Again):
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if len(head.buffer) != _NUMBER.size or _NUMBER.unpack(head.buffer)[0] != number or not frames:
                    raise PeerLostError(f"{self._endpoint} answers what it was not asked")
                return [frame.buffer for frame in frames]
            left = deadline - clock()
            if left <= 0:
                raise PeerLostError(f"{self._endpoint} did not answer in time")
            ready: dict[Any, int] = dict(self._poller.poll(math.ceil(left * 1000)))
            if self._ends in ready and self._socket not in ready:
                raise PeerLostError(f"the connection to {self._endpoint} has ended, or could not be made")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._ends.close(linger=0)
        self._socket.close(linger=0)

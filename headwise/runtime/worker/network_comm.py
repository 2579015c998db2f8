"""Collectives between ranks on several nodes, by way of rank 0, over ZeroMQ.

    rank 0   ROUTER, bound            others   DEALER, connected, identity = rank
             <- round, part                    of each of them
             -> round, result                  to each, once all parts of the round have come

For what ranks tell each other as they start, and little beside steps: what is large goes by NCCL.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import EngineDiedError
from headwise.liveness_clock import LivenessClock
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import Authenticator, ClientKeys, ServerKeys, secure_client, secure_server
from headwise.sockets.waiting import within

MAX_PART_BYTES = 256 << 20
"""Most bytes of one message. Only this deployment's ranks reach the socket, where it is encrypted."""

_ROUND = struct.Struct("<q")
_Made = TypeVar("_Made")


class NetworkComm:
    """The `Communicator` of ranks on several nodes: rank 0 is made by `listen`, all others by `connect`.

    endpoint: where rank 0 listens

    Every collective raises `EngineDiedError` if a rank does not come within ``timeout_s``. Not thread-safe.
    """

    spans_nodes = True

    def __init__(self, endpoint: str, rank: int, size: int, timeout_s: float) -> None:
        import zmq

        if size < 2 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: there must be two ranks or more, and the rank one of them")
        self.endpoint, self.rank, self.size = endpoint, rank, size
        self._timeout_s = timeout_s
        self._clock = LivenessClock()
        self._context = open_context()
        self._socket = self._context.socket(zmq.DEALER if rank else zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PART_BYTES)
        self._authenticator: Authenticator | None = None
        self._round, self._until = 0, 0.0

    @classmethod
    def listen(cls, host: str, size: int, timeout_s: float, keys: ServerKeys | None) -> NetworkComm:
        """Rank 0's, at a free port of this address. keys: who may connect; None: whoever does, and in the clear"""
        import zmq

        comm = cls("", 0, size, timeout_s)
        if keys is not None:
            comm._authenticator = Authenticator(comm._context, keys.clients)
            secure_server(comm._socket, keys)
        comm._socket.bind(f"tcp://{host}:*")
        comm.endpoint = str(comm._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return comm

    @classmethod
    def connect(cls, endpoint: str, rank: int, size: int, timeout_s: float, keys: ClientKeys | None) -> NetworkComm:
        """That of another rank than 0, which need not listen yet."""
        import zmq

        comm = cls(endpoint, rank, size, timeout_s)
        comm._socket.setsockopt(zmq.IDENTITY, _identity(rank))
        secure_client(comm._socket, keys)
        comm._socket.connect(endpoint)
        return comm

    # ---- collectives ----

    def all_reduce(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The sum over ranks as a new array, summed in rank order so that every rank has the same bits."""
        mine = np.ascontiguousarray(x, dtype=np.float32)
        if self.rank:
            return np.frombuffer(self._ask(mine.tobytes()), np.float32).reshape(x.shape).copy()
        total = mine.copy()
        for part in self._parts():
            total += np.frombuffer(part, np.float32).reshape(x.shape)
        self._answer(total.tobytes())
        return total

    def gather(self, x: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Concatenate ``x`` of all ranks along the last axis on rank 0; columns may differ between ranks."""
        mine = np.ascontiguousarray(x, dtype=np.float32)
        if self.rank:
            self._ask(mine.tobytes())
            return None
        rows = x.shape[:-1]
        parts = [np.frombuffer(part, np.float32) for part in self._parts()]
        self._answer(b"")
        count = math.prod(rows)
        return np.concatenate([mine, *(part.reshape(*rows, part.size // max(1, count)) for part in parts)], axis=-1)

    def all_gather(self, x: NDArray[Any], ranks: range) -> NDArray[Any]:
        """``x`` of each of ``ranks`` as a new array, whatever its dtype: all of them come by way of rank 0."""
        mine = np.ascontiguousarray(x).tobytes()
        whole = self._ask(mine) if self.rank else b"".join((mine, *self._parts()))
        if self.rank == 0:
            self._answer(whole)
        return np.frombuffer(whole, x.dtype).reshape(self.size, *x.shape)[ranks.start : ranks.stop].copy()

    def exchange(self, x: NDArray[Any], ranks: range) -> NDArray[Any]:
        """What each of ``ranks`` had for this one, as a new array; ``x [len(ranks), ...]`` of any dtype."""
        return self.all_gather(x, ranks)[:, ranks.index(self.rank)]

    def broadcast(self, x: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Rank 0's ``x`` on every rank, as a new array; ``x`` of the other ranks is ignored."""
        if self.rank:
            return np.frombuffer(self._ask(b""), np.int32).reshape(shape).copy()
        if x is None or x.shape != shape:
            given = "nothing" if x is None else f"an array of shape {x.shape}"
            raise ValueError(f"rank 0 must broadcast an array of shape {shape}, got {given}")
        mine = np.array(x, dtype=np.int32)
        self._parts()
        self._answer(mine.tobytes())
        return mine

    def close(self) -> None:
        """Idempotent."""
        if self._authenticator is not None:
            self._authenticator.close()
        close_context(self._context)

    # ---- one round ----

    def _begin(self) -> None:
        self._round += 1
        self._until = self._clock() + self._timeout_s

    def _ask(self, part: bytes) -> bytes:
        """Send rank 0 this rank's part; what it answers."""
        import zmq

        self._begin()
        said = _ROUND.pack(self._round), part
        # Not at once: a rank that was refused has nobody to send to.
        self._within(zmq.POLLOUT, lambda: self._socket.send_multipart(said, zmq.NOBLOCK) or True, lambda: [0])
        frames = self._receive(lambda: [0])
        self._check_round(frames, 0)
        return frames[1]

    def _parts(self) -> list[bytes]:
        """Those of all other ranks, in rank order."""
        self._begin()
        found: dict[int, bytes] = {}
        ranks = {_identity(rank): rank for rank in range(1, self.size)}
        while len(found) < self.size - 1:
            identity, *frames = self._receive(lambda: sorted(set(ranks.values()) - set(found)))
            if identity in ranks:
                self._check_round(frames, ranks[identity])
                found[ranks[identity]] = frames[1]
        return [found[rank] for rank in sorted(found)]

    def _answer(self, result: bytes) -> None:
        for rank in range(1, self.size):
            self._socket.send_multipart((_identity(rank), _ROUND.pack(self._round), result))

    def _receive(self, missing: Callable[[], list[int]]) -> list[bytes]:
        import zmq

        return self._within(zmq.POLLIN, lambda: list(self._socket.recv_multipart(zmq.NOBLOCK)), missing)

    def _within(self, event: int, attempt: Callable[[], _Made], missing: Callable[[], list[int]]) -> _Made:
        made = within(self._socket, event, attempt, self._until, self._clock)
        if made is None:
            raise EngineDiedError(
                f"tensor-parallel ranks {missing()} did not come to a collective within {self._timeout_s:g} s"
            )
        return made

    def _check_round(self, frames: Sequence[bytes], rank: int) -> None:
        if len(frames) != 2 or frames[0] != _ROUND.pack(self._round):
            raise EngineDiedError(f"tensor-parallel rank {rank} is not in round {self._round} of the collectives")


def _identity(rank: int) -> bytes:
    return f"rank-{rank}".encode()

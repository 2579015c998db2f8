"""Collectives between processes of one machine through shared memory.

One segment holds a counter per rank, on a cache line of its own, and a buffer per rank, twice:

    | counters, 64 bytes a rank | buffers of even rounds | buffers of odd rounds |

In round n every rank copies its part into its buffer of n's parity, then sets its counter to n; it reads the others'
buffers once their counters have reached n. A rank that sets its counter to n + 1 has read all of round n, so whoever
has seen all counters at n + 1 may write to round n's buffers again: that is round n + 2, which uses the same parity.
Hence two sets of buffers are enough, with one wait a round.

Memory order: a counter must not be seen before the payload written ahead of it. x86-64 keeps the order of stores, and
of loads, of a processor; the streaming stores of a large copy are the exception, and the C library fences them before
the copy returns. On other CPUs (aarch64) a lock is taken and released twice on either side of the counter:
nothing before the first release is seen after it, nothing after the second acquire is seen before that, and aarch64
keeps a release and the acquire that follows it in order. (Once would not do: an acquire and a release let both sides in
between.) This rests on the architecture's rules; the tests run on x86-64.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DeploymentError, EngineDiedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.worker.futex import wait_while, wake

_LINE = 64
_LOOK_S = 0.2
"""So long a rank sleeps at most before it looks whether the others have been waited for long enough."""
_WORD = 2**32 - 1
_STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64")


class SharedMemoryComm:
    """The `Communicator` of ranks on one machine. Every rank makes one with the same ``name``, ``size``, ``max_bytes``.

    ``max_bytes`` is the size of one buffer, of which each rank has two; larger payloads go in pieces. The rank with
    ``create`` makes the segment and the others wait for it; its name is removed once all have come, and from then on
    nothing is left however the ranks end. (A creator killed while it waits for the others leaves the name, and a page.)
    Who waits sleeps until the rank that it waits for wakes it, see `futex`: where ranks outnumber cores, or others
    compute beside them, whoever spins keeps the core from that rank. Not thread-safe.

    Raises `EngineDiedError` if a rank does not come within ``timeout_s``, here and in every collective, and
    `DeploymentError` if there is no room for the segment.
    """

    spans_nodes = False

    def __init__(self, name: str, rank: int, size: int, max_bytes: int, timeout_s: float, create: bool) -> None:
        if size < 2 or not 0 <= rank < size or max_bytes < 1:
            raise ValueError(
                f"rank {rank} of {size} with buffers of {max_bytes} bytes: there must be two ranks or more, the rank "
                "one of them, and the buffers not empty"
            )
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._clock = LivenessClock()
        self._capacity = -(-max_bytes // _LINE) * _LINE
        length = size * _LINE + 2 * size * self._capacity
        path = _directory() / f"headwise-{name}"
        self._round = 0
        self._fence = threading.Lock()
        descriptor = _make(path, length) if create else _open_when_there(path, length, timeout_s)
        try:
            self._bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, length), np.uint8)
            # One int64 a line: `[size]`, strided.
            self._counters: NDArray[Any] = self._bytes[: size * _LINE].view(np.dtype("<i8"))[:: _LINE // 8]
            self._start = self._bytes.ctypes.data
            self._exchange(np.empty(0, np.uint8))
            _reserve(descriptor, length, path.parent)
        finally:
            os.close(descriptor)
            if create:
                path.unlink()

    # ---- collectives ----

    def all_reduce(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The sum over ranks as a new array, summed in rank order so that every rank has the same bits."""
        flat = np.ascontiguousarray(x).reshape(-1)
        total = np.empty_like(flat)
        for part in _pieces(len(flat), self._capacity // 4):
            views = self._exchange(flat[part])
            np.add(views[0], views[1], out=total[part])
            for view in views[2:]:
                total[part] += view
        return total.reshape(x.shape)

    def gather(self, x: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Concatenate ``x [rows, columns]`` along the last axis on rank 0; columns may differ between ranks."""
        widths = [int(view[0]) for view in self._exchange(np.array([x.shape[-1]], np.int64))]
        rows = x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
        whole = np.empty((len(rows), sum(widths)), np.float32) if self.rank == 0 else None
        starts = [sum(widths[:rank]) for rank in range(self.size)]
        for part, columns in self._tiles(len(rows), max(widths)):
            spans = [range(width)[columns] for width in widths]
            count = part.stop - part.start
            lengths = [4 * count * len(span) for span in spans]
            views = self._exchange(np.ascontiguousarray(rows[part, columns]).reshape(-1), lengths)
            if whole is not None:
                for start, span, view in zip(starts, spans, views, strict=True):
                    whole[part, start + span.start : start + span.stop] = view.reshape(count, -1)
        return None if whole is None else whole.reshape(*x.shape[:-1], sum(widths))

    def all_gather(self, x: NDArray[Any], ranks: range) -> NDArray[Any]:
        """``x`` of each of ``ranks`` as a new array, whatever its dtype."""
        flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        whole = np.empty((len(ranks), len(flat)), np.uint8)
        for part in _pieces(len(flat), self._capacity):
            views = self._exchange(flat[part])
            for index, rank in enumerate(ranks):
                whole[index, part] = views[rank]
        return whole.view(x.dtype).reshape(len(ranks), *x.shape)

    def exchange(self, x: NDArray[Any], ranks: range) -> NDArray[Any]:
        """What each of ``ranks`` had for this one, as a new array; ``x [len(ranks), ...]`` of any dtype."""
        flat = np.ascontiguousarray(x).reshape(len(ranks), -1).view(np.uint8)
        whole, mine = np.empty_like(flat), ranks.index(self.rank)
        for part in _pieces(flat.shape[1], self._capacity // len(ranks)):
            count = part.stop - part.start
            views = self._exchange(np.ascontiguousarray(flat[:, part]).reshape(-1))
            for index, rank in enumerate(ranks):
                whole[index, part] = views[rank][mine * count : (mine + 1) * count]
        return whole.view(x.dtype).reshape(x.shape)

    def _tiles(self, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
        """Cut ``[rows, columns]`` into parts that fit in a buffer: whole rows where they do."""
        most = self._capacity // 4
        for part in _pieces(rows, max(1, most // max(1, columns))):
            for span in _pieces(columns, most):
                yield part, span

    def broadcast(self, x: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Rank 0's ``x`` on every rank, as a new array; ``x`` of the other ranks is ignored."""
        if self.rank > 0:
            flat = np.empty(0, np.int32)
        elif x is None or x.shape != shape:
            given = "nothing" if x is None else f"an array of shape {x.shape}"
            raise ValueError(f"rank 0 must broadcast an array of shape {shape}, got {given}")
        else:
            flat = np.ascontiguousarray(x, dtype=np.int32).reshape(-1)
        result = np.empty(int(np.prod(shape)), np.int32)
        for part in _pieces(len(result), self._capacity // 4):
            lengths = [4 * (part.stop - part.start)] + [0] * (self.size - 1)
            result[part] = self._exchange(flat[part], lengths)[0]
        return result.reshape(shape)

    def close(self) -> None:
        """Release the segment: its memory goes with the last rank that has it mapped. Idempotent."""
        self._counters = self._bytes = np.empty(0, np.uint8)

    # ---- one round ----

    def _exchange(self, mine: NDArray[Any], lengths: list[int] | None = None) -> list[NDArray[Any]]:
        """Publish ``mine`` and return every rank's part of this round, valid until the next round but one.

        ``lengths`` are the bytes of each rank's part, where they are not all as long as ``mine``.
        """
        self._round += 1
        views = [
            self._buffer(rank)[: mine.nbytes if lengths is None else lengths[rank]].view(mine.dtype)
            for rank in range(self.size)
        ]
        if mine.size:
            views[self.rank][:] = mine
        self._order()
        self._counters[self.rank] = self._round
        wake(self._word(self.rank))
        self._wait()
        self._order()
        return views

    def _buffer(self, rank: int) -> NDArray[np.uint8]:
        start = self.size * _LINE + ((self._round % 2) * self.size + rank) * self._capacity
        return self._bytes[start : start + self._capacity]

    def _word(self, rank: int) -> int:
        """Where the lower half of a rank's counter is, by which it is waited for."""
        return self._start + rank * _LINE

    def _wait(self) -> None:
        deadline = 0.0
        for rank in range(self.size):
            while (seen := int(self._counters[rank])) < self._round:
                now = self._clock()
                deadline = deadline or now + self._timeout_s
                if now > deadline:
                    missing = [rank for rank in range(self.size) if self._counters[rank] < self._round]
                    raise EngineDiedError(
                        f"tensor-parallel ranks {missing} did not come to a collective within {self._timeout_s:g} s"
                    )
                wait_while(self._word(rank), seen & _WORD, min(self._timeout_s, _LOOK_S))

    def _order(self) -> None:
        if not _STORES_ARE_ORDERED:
            for _ in range(2):
                with self._fence:
                    pass


def _directory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _pieces(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def _make(path: Path, length: int) -> int:
    """A new segment, empty: memory comes as it is written to, or by `_reserve`."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, length)
    return descriptor


def _reserve(descriptor: int, length: int, directory: Path) -> None:
    """Get the memory of the whole segment: if there were no room later, a write would kill the process by SIGBUS.

    By every rank, so that all of them fail; only once all have come, so that a rank killed earlier leaves no memory.
    """
    try:
        os.posix_fallocate(descriptor, 0, length)
    except OSError as error:
        raise DeploymentError(
            f"no room for {length} bytes of buffers between tensor-parallel ranks in {directory} ({error.strerror}): "
            "make it larger (in Docker by --shm-size) or lower max_batched_tokens"
        ) from error


def _open_when_there(path: Path, length: int, timeout_s: float) -> int:
    """The segment that rank 0 makes, once it is there in full."""
    clock = LivenessClock()
    deadline = clock() + timeout_s
    while clock() < deadline:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            time.sleep(0.01)
            continue
        if os.fstat(descriptor).st_size >= length:
            return descriptor
        os.close(descriptor)
        time.sleep(0.01)
    raise EngineDiedError(f"tensor-parallel rank 0 did not make {path} within {timeout_s:g} s")

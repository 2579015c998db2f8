"""Reads by libraries that write to registered memory by themselves (NIXL, Mooncake), by way of staging memory.

    owner's arena  ==library==>  staging memory  --copy-->  our arena

Why not straight to the arena: neither library takes back a transfer that it has begun. After a timeout the bytes still
come, once an owner that stood still goes on, and by then the arena has other blocks there. So a piece of staging memory
is used again only when its transfer has ended. One part of a read is copied while the next one is on its way. Reads of
several owners take turns with the library, and wait at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import first_line
from headwise.kernels.block_copy import RunCopy
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, check_runs
from headwise.transfer.connectors.parts import parts_of

STAGING_BYTES = 8 << 20
"""Most bytes of one transfer."""
MAX_STAGINGS = 16
"""Pieces of staging memory that a reader has, with those whose transfers are late."""
UNDER_WAY = 2
"""Transfers of one read at a time."""

_SPINS = 20
_SLEEP_S = 50e-6


class Transfer(Protocol):
    def is_done(self) -> bool:
        """Whether all bytes are there. Raises `PeerLostError`, from then on, if they do not come."""


class Library(Protocol):
    """What a library does for a reader. Called by one thread at a time, and never waits for an owner.

    max_runs:       of one transfer
    ends_on_errors: a transfer that failed writes no more. If not, only `close` ends it
    """

    max_runs: int
    ends_on_errors: bool

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Have the library write to it. It is kept until after `close`."""

    def start(self, address: ExportAddress, runs: Runs, staging: NDArray[np.uint8]) -> Transfer:
        """Begin to read runs of the owner's arena to where they say in ``staging``.

        Raises `PeerLostError` if nothing has begun.
        """

    def forget(self, address: ExportAddress) -> None:
        """Let go of what is kept for an owner; transfers under way may still end. Unknown ones are ignored."""

    def close(self) -> None:
        """Then no transfer is under way, and no memory registered."""


@dataclass(eq=False)
class _Piece:
    """A piece of staging memory, and what is on its way to it. runs: from there to the arena"""

    staging: NDArray[np.uint8]
    transfer: Transfer
    runs: Runs


class StagedReader:
    """`Reader` by a library.

    make: the library, at first and when only a new one ends what is late

    Raises what ``make`` raises.
    """

    def __init__(
        self,
        transport: str,
        make: Callable[[], Library],
        copy: RunCopy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport, self._make, self._copy = transport, make, copy
        self._clock, self._sleep = clock, sleep
        self._library = make()
        self._free: list[NDArray[np.uint8]] = []
        self._late: list[_Piece] = []
        self._num_stagings = self._num_reads = 0
        self._lock = threading.Lock()  # of all that the library is asked, and of the stagings

    def reaches(self, address: ExportAddress) -> bool:
        """See `Reader.reaches`."""
        return address.transport == self._transport

    def read(self, address: ExportAddress, runs: Runs, arena: NDArray[np.uint8], timeout_s: float) -> None:
        """See `Reader.read`."""
        check_runs(runs, address.arena_bytes, arena.size)
        deadline = self._clock() + timeout_s
        with self._lock:
            self._take_back()
            self._num_reads += 1
        asked = parts_of(runs[runs[:, 2] > 0], STAGING_BYTES, self._library.max_runs)
        under_way: deque[_Piece] = deque()
        try:
            while True:
                while len(under_way) < UNDER_WAY and (part := next(asked, None)) is not None:
                    with self._lock:
                        under_way.append(self._start(address, part))
                if not under_way:
                    return
                piece = under_way[0]
                self._wait(piece.transfer, deadline)
                self._copy(piece.staging, arena, piece.runs)
                with self._lock:
                    self._free.append(under_way.popleft().staging)
        finally:
            with self._lock:
                self._late += under_way
                self._num_reads -= 1

    def _start(self, address: ExportAddress, part: Runs) -> _Piece:
        staging = self._staging()
        at = np.cumsum(part[:, 2]) - part[:, 2]
        try:
            transfer = self._library.start(address, np.column_stack([part[:, 0], at, part[:, 2]]), staging)
        except BaseException:
            self._free.append(staging)
            raise
        return _Piece(staging, transfer, np.column_stack([at, part[:, 1:]]))

    def _staging(self) -> NDArray[np.uint8]:
        if self._free:
            return self._free.pop()
        if self._num_stagings == MAX_STAGINGS:
            raise PeerLostError(f"{self._transport} has {len(self._late)} transfers that are late, and waits for them")
        staging = np.zeros(STAGING_BYTES, dtype=np.uint8)
        try:
            self._library.register(staging)
        except Exception as error:  # of kinds that only the library knows
            raise PeerLostError(f"{self._transport} cannot register memory: {first_line(error)}") from None
        self._num_stagings += 1
        return staging

    def _wait(self, transfer: Transfer, deadline: float) -> None:
        spins = 0
        while not self._is_done(transfer):
            if self._clock() >= deadline:
                raise PeerLostError("it did not answer in time")
            spins += 1
            self._sleep(0 if spins < _SPINS else _SLEEP_S)

    def _is_done(self, transfer: Transfer) -> bool:
        with self._lock:
            return transfer.is_done()

    def _take_back(self) -> None:
        """Free what late transfers have let go of."""
        failed = []
        for piece in list(self._late):
            try:
                if not piece.transfer.is_done():
                    continue
            except PeerLostError:
                if not self._library.ends_on_errors:
                    failed.append(piece)
                    continue
            self._late.remove(piece)
            self._free.append(piece.staging)
        has_failed = failed and len(failed) == len(self._late) and not self._num_reads
        if has_failed and self._num_stagings - len(failed) < UNDER_WAY:
            self._start_anew()

    def _start_anew(self) -> None:
        """End all transfers by closing the library: owners are connected to again when they are read."""
        self._library.close()
        self._late, self._free, self._num_stagings = [], [], 0
        self._library = self._make()

    def forget(self, address: ExportAddress) -> None:
        """See `Reader.forget`."""
        with self._lock:
            self._library.forget(address)

    def close(self) -> None:
        with self._lock:
            self._library.close()
            self._late, self._free = [], []

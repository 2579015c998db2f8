"""What a simulated worker copies with: streams that count steps, memory that is watched, and a storage in a dictionary.

A piece of a load or store begins when all before it are over, as on a CPU, and from then on cannot be called back; its
bytes are read and written when it ends. So a copy that outlives whoever waited for it hits what has its memory then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.block_copy import ReferenceBlockCopy
from headwise.storage.backends.base import Arena, BlockStorage, Hits, StorageNamespace, StorageStats
from headwise.transfer.base import ALL, Event, Work

Storage = dict[tuple[bytes, int], np.ndarray]

DEVICE_POISON, HOST_POISON = -7, -9
"""Found in memory that holds nothing."""


@dataclass
class Faults:
    """What goes wrong from now on.

    store_steps, storage_steps: how many steps a store takes, and a call of storage; None: it hangs
    late_loads: how many waits for a load end in vain before it goes on
    lose_*:     whether a copy fails, of loads and stores a batch, of storage a block
    """

    step: int = 0
    store_steps: int = 1
    storage_steps: int | None = 1
    late_loads: int = 0
    lose_load: Callable[[], bool] = lambda: False
    lose_store: Callable[[], bool] = lambda: False
    lose_put: Callable[[], bool] = lambda: False
    lose_fetch: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class Piece:
    """Work of a `SteppedStream`, and its `Event`."""

    stream: SteppedStream
    work: Work = lambda: None
    step: int = 0
    is_begun: bool = False
    done_at_last: bool = False
    error: Exception | None = None
    moves: list[Work] = field(default_factory=list)
    busy_s: float = 0.0

    @property
    def done(self) -> bool:
        self.stream.go_on()
        return self.done_at_last

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self.stream.reaches(self, for_ever=timeout_s is None):
            return False
        if self.error is not None:
            raise self.error
        return True


class SteppedStream:
    """`Stream` whose pieces end after so many steps of the worker as ``takes`` says; None: not for now.

    late: how many waits will end in vain; as long as there are any, nothing ends
    """

    lookahead = ALL
    waited_s = 0.0

    def __init__(self, faults: Faults, takes: Callable[[], int | None], copies: WatchedCopy | None = None) -> None:
        self._faults, self._takes, self._copies = faults, takes, copies
        self._pieces: deque[Piece] = deque()

    def make_event(self) -> Piece:
        return Piece(self)

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> Piece:
        piece = event or Piece(self)
        assert isinstance(piece, Piece)
        assert piece not in self._pieces, "the event is in use"
        piece.__init__(self, work, self._faults.step)
        self._pieces.append(piece)
        self._begin()
        return piece

    def wait_for(self, event: Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)

    def close(self) -> None:
        while self._pieces:
            self._end()

    @property
    def _is_late(self) -> bool:
        return self._copies is not None and self._copies.loads is self and self._faults.late_loads > 0

    def reaches(self, piece: Piece, for_ever: bool) -> bool:
        """Whether the piece is over once somebody has waited for it."""
        self.go_on(piece)
        if not piece.done_at_last and for_ever:
            while not piece.done_at_last:
                self._end()
        if not piece.done_at_last and self._is_late:
            assert self._copies is not None, "it is theirs"
            self._copies.has_lost = True
            self._faults.late_loads -= 1
        return piece.done_at_last

    def go_on(self, until: Piece | None = None) -> None:
        """End what is due, and nothing behind a piece that somebody waits for."""
        while self._pieces and not self._is_late and not (until is not None and until.done_at_last):
            takes = self._takes()
            if takes is None or self._pieces[0].step + takes > self._faults.step:
                return
            self._end()

    def _begin(self) -> None:
        """Copies begin at once. Calls of storage do all they do when they end: nobody looks at them meanwhile."""
        if self._pieces and not self._pieces[0].is_begun and self._copies is not None:
            self._start(self._pieces[0])

    def _start(self, piece: Piece) -> None:
        piece.is_begun = True
        if self._copies is not None:
            self._copies.enqueues_to = piece.moves, self
        try:
            piece.work()
        except Exception as error:
            piece.error = error

    def _end(self) -> None:
        piece = self._pieces.popleft()
        if not piece.is_begun:
            self._start(piece)
        for move in piece.moves:
            move()
        piece.done_at_last = True
        self._begin()


class WatchedCopy:
    """A `BlockCopy` that only enqueues, and notes what no copy may do.

    nonsense:   device blocks that a load was asked for and that nothing has come to since
    violations: what was done that must never be
    has_lost:   whether a load has failed, or was late: of some layers blocks may have come, of others not
    """

    name = "simulated"
    piece_bytes = 0

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.loads = SteppedStream(faults, lambda: 0, self)
        self.stores = SteppedStream(faults, lambda: faults.store_steps, self)
        self.enqueues_to: tuple[list[Work], SteppedStream] = ([], self.stores)
        self.nonsense: set[int] = set()
        self.violations: list[str] = []
        self.has_lost = False

    def __call__(
        self,
        source: NDArray[np.uint8] | None,
        target: NDArray[np.uint8] | None,
        pairs: NDArray[np.int32],
        ranges: NDArray[np.int64],
        block_bytes: int,
    ) -> None:
        moves, stream = self.enqueues_to
        is_load = stream is self.loads
        if source is None or target is None:
            self.violations.append("there is no device to copy from or to")
            return
        if self._faults.lose_load() if is_load else self._faults.lose_store():
            self.has_lost |= is_load
            raise OSError("lost")

        def move() -> None:
            if is_load:
                for host in pairs[:, 1].tolist():
                    if not holds(source, host, block_bytes):
                        self.violations.append(f"host block {host} holds nothing")
                self.nonsense.difference_update(pairs[:, 2].tolist())
            ReferenceBlockCopy()(source, target, pairs, ranges, block_bytes)

        moves.append(move)


def holds(arena: NDArray[np.uint8], block: int, block_bytes: int) -> bool:
    """Whether there is something in a block of an arena of tokens."""
    tokens = arena.reshape(-1, block_bytes)[block].view(np.int32)
    return bool((tokens >= 0).all())


class DictionaryStorage(BlockStorage):
    """A `BlockStorage` that keeps blocks in a dictionary, and loses what it is told to."""

    def __init__(self, blocks: Storage, block_bytes: int, faults: Faults, violations: list[str]) -> None:
        super().__init__(StorageNamespace("simulated", "simulated"), block_bytes)
        self._blocks, self._faults, self._violations = blocks, faults, violations

    def contains(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> Hits:
        return np.array([key in self._blocks for key in zip(hashes, groups.tolist(), strict=True)], dtype=np.bool_)

    def write(
        self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]
    ) -> Hits:
        hits = []
        for key, block in zip(zip(hashes, groups.tolist(), strict=True), blocks.tolist(), strict=True):
            hits.append(not self._faults.lose_put())
            if not hits[-1]:
                continue
            if not holds(arena, block, self.block_bytes):
                self._violations.append(f"host block {block} holds nothing to store")
            self._blocks.setdefault(key, arena.reshape(-1, self.block_bytes)[block].copy())
        return np.array(hits, dtype=np.bool_)

    def read(self, hashes: Sequence[bytes], groups: NDArray[np.int32], arena: Arena, blocks: NDArray[np.int32]) -> Hits:
        hits = []
        for key, block in zip(zip(hashes, groups.tolist(), strict=True), blocks.tolist(), strict=True):
            hits.append(key in self._blocks and not self._faults.lose_fetch())
            into = arena.reshape(-1, self.block_bytes)[block]
            if hits[-1]:
                into[:] = self._blocks[key]
            else:
                into.view(np.int32)[:] = HOST_POISON
        return np.array(hits, dtype=np.bool_)

    def delete(self, hashes: Sequence[bytes], groups: NDArray[np.int32]) -> None:
        for key in zip(hashes, groups.tolist(), strict=True):
            self._blocks.pop(key, None)

    def clear(self) -> None:
        self._blocks.clear()

    def stats(self) -> StorageStats:
        return StorageStats(len(self._blocks), len(self._blocks) * self.block_bytes, 0, 0, 0, 0, 0, 0)

    def register(self, arena: Arena) -> None:
        pass

    def close(self) -> None:
        pass

"""What other engines may read from this one: blocks of its host that are held for them until they are done with them.

    ask  -->  on the host: leased at once         on the device alone: stored first, leased when the copy is there
              not computed yet, and it will be: leased as it comes        nowhere: not leased
    end  -->  whether the blocks held what they were leased for, all the while: only then may the reader use them

A reader that can read the device gets what is there alone as it lies, as soon as it is settled. Device blocks are not
held for it: requests come first, and who needs a block takes it. The lease has not held then, as blocks' generations
tell; until somebody needs them, the last to go are those that were leased last.

A lease that nobody has given a sign of life of ends by itself. Its reader is told that it did not hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.eviction import Blocks
from headwise.cache_controller.memories import DEVICE, HOST
from headwise.cache_controller.radix_tree import NOWHERE, RadixTree
from headwise.cache_controller.settling import Settling

MAX_LEASED = 0.25
"""Share of the host's blocks that leases may hold. Held blocks cannot be evicted."""

MAX_LEASES = 256
"""Most leases at a time."""

MAX_REMEMBERED = 1024
"""Leases that have ended lately of which it is known whether they held: who did not hear it may ask again."""

LOOKED_AT = 64
"""Pending blocks of a growing lease that are taken out of their array at a time."""

_NO_PLACES: Blocks = np.empty((0, 2), dtype=np.int32)
NO_BLOCKS: Blocks = np.empty((0, 4), dtype=np.int32)
_NO_LOANS: NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)


@dataclass(eq=False)
class Lease:
    """Blocks of a path that are held for a reader.

    grant:   no other lease has had this number, also none of the same name
    hashes:  the path
    until:   when it ends by itself
    is_growing: blocks of the path are still being computed
    reads_device: its reader can
    blocks:  ``int32 [m, 4]`` (column of the path, group, block, its memory), in the order in which they were leased
    pending: ``int32 [k, 2]`` (column, group) that may be leased yet
    loans:   ``int64 [k, 2]`` (device block, its generation) of those on the device
    is_void: what it holds must not be used
    asked:   the pending ones that have been given to be stored
    told:    how many blocks there were, and whether these were all, when it last was said to have changed
    """

    name: bytes
    grant: int
    hashes: Sequence[bytes]
    until: float
    is_growing: bool
    pending: Blocks
    reads_device: bool = False
    blocks: Blocks = field(default_factory=lambda: NO_BLOCKS)
    loans: NDArray[np.int64] = field(default_factory=lambda: _NO_LOANS)
    is_void: bool = False
    asked: set[tuple[int, int]] = field(default_factory=set)
    told: tuple[int, bool] = (0, False)

    @property
    def is_all(self) -> bool:
        """Whether no more blocks will be leased."""
        return not self.is_growing and not len(self.pending)


@dataclass(frozen=True)
class LeaseStats:
    """Counts: of leases and the blocks they hold now; and since the start.

    given, refused:  leases
    expired:         leases whose reader fell silent
    leased_blocks:   blocks that were leased
    device_blocks:   those of them that were on the device
    """

    leases: int
    held_blocks: int
    given: int
    refused: int
    expired: int
    leased_blocks: int
    device_blocks: int


class Leases:
    """Owns the leases of one engine.

    pool:        the host's
    device:      the device's
    settling:    which blocks of the device are complete
    store:       copies device blocks to the host, once there is room
    is_queueing: whether some of what it was given waits for room
    """

    def __init__(
        self,
        tree: RadixTree,
        pool: BlockPool,
        device: BlockPool,
        settling: Settling,
        store: Callable[[Blocks], None],
        is_queueing: Callable[[], bool],
    ) -> None:
        self._tree, self._pool, self._device, self._settling = tree, pool, device, settling
        self._store, self._is_queueing = store, is_queueing
        self._leases: dict[bytes, Lease] = {}
        self._ended: OrderedDict[tuple[bytes, int], bool] = OrderedDict()
        self._most = max(1, int(MAX_LEASED * pool.num_blocks))
        self._holds: NDArray[np.int32] = np.zeros(pool.num_blocks, dtype=np.int32)  # leases, by block
        self._num_held = 0
        self._grants = self._given = self._refused = self._expired = self._leased = self._lent = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: bytes) -> bool:
        return name in self._leases

    def stats(self) -> LeaseStats:
        return LeaseStats(
            leases=len(self),
            held_blocks=self._num_held,
            given=self._given,
            refused=self._refused,
            expired=self._expired,
            leased_blocks=self._leased,
            device_blocks=self._lent,
        )

    @property
    def has_work(self) -> bool:
        """Whether `advance` may have something to do before it is time for a lease to end."""
        return any(len(lease.pending) for lease in self._leases.values())

    # ---- the life of a lease ----

    def ask(
        self,
        name: bytes,
        hashes: Sequence[bytes],
        wanted: NDArray[np.bool_],
        until: float,
        is_growing: bool = False,
        reads_device: bool = False,
    ) -> Lease | None:
        """Lease what there is of the blocks ``wanted [n, groups]`` of a path ``hashes [n]``; the lease, or that of this
        name which there is already. None: there are too many leases.

        is_growing:   more of the path is being computed, until `grown`
        reads_device: the reader can read the device's blocks
        """
        lease = self.find(name, until)
        if lease is not None:
            return lease
        if len(self) >= MAX_LEASES:
            self._refused += 1
            return None
        self._grants += 1
        self._given += 1
        places = np.argwhere(wanted).astype(np.int32)
        lease = Lease(name, self._grants, tuple(hashes), until, is_growing, places, reads_device)
        self._leases[name] = lease
        self._take_more(lease)
        lease.told = len(lease.blocks), lease.is_all
        return lease

    def find(self, name: bytes, until: float) -> Lease | None:
        """The lease of this name, if there is one: its reader has given a sign of life."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.until = max(lease.until, until)
        return lease

    def grown(self, name: bytes) -> None:
        """All has been computed that will be."""
        if name in self._leases:
            self._leases[name].is_growing = False

    def advance(self, now: float) -> list[tuple[Lease, int]]:
        """Lease what has come to be there, and end what has expired; the leases that have got more, or all, of what
        they will, and how many blocks they had before."""
        for lease in [lease for lease in self._leases.values() if lease.until <= now]:
            self._expired += 1
            self._let_go(lease)
        changed = []
        for lease in self._leases.values():
            if len(lease.pending):
                self._take_more(lease)
            if lease.told != (now_has := (len(lease.blocks), lease.is_all)):
                changed.append((lease, lease.told[0]))
                lease.told = now_has
        return changed

    def end(self, name: bytes, grant: int) -> bool:
        """Its reader has read what it wants; whether all blocks of the lease held what they should until now."""
        lease = self._leases.get(name)
        if lease is not None:
            self._ended[name, lease.grant] = not lease.is_void and self._has_kept(lease)
            self._let_go(lease)
            while len(self._ended) > MAX_REMEMBERED:
                self._ended.popitem(last=False)
        return self._ended.get((name, grant), False)

    def _has_kept(self, lease: Lease) -> bool:
        """Whether the device blocks of a lease have been the same all the while."""
        blocks, generations = lease.loans.T
        return bool((self._tree.device.generations(blocks) == generations).all())

    def forget(self, hashes: Iterable[bytes]) -> None:
        """What these token blocks hold must not be used: no lease holds that has any of them."""
        forgotten = set(hashes)
        for lease in self._leases.values():
            lease.is_void |= not forgotten.isdisjoint(lease.hashes)

    # ---- blocks ----

    def _take_more(self, lease: Lease) -> None:
        """Lease what has come to be there of what a lease waits for, and have stored what is on the device alone."""
        pending = self._known(lease)
        if not len(pending):
            return
        nodes = np.array([self._tree.nodes[lease.hashes[column]] for column in pending[:, 0].tolist()], dtype=np.int64)
        on_host = self._tree.host.blocks[nodes, pending[:, 1]]
        on_device = self._tree.device.blocks[nodes, pending[:, 1]]
        taken = self._hold(lease, pending[on_host != NOWHERE], on_host[on_host != NOWHERE])
        lent = self._lend(lease, pending, np.where(on_host == NOWHERE, on_device, NOWHERE))
        waits = (on_host == NOWHERE) & ~lent & ((on_device != NOWHERE) | lease.is_growing)
        later = lease.pending[len(pending) :]
        lease.pending = np.concatenate([pending[waits], later]) if taken else _NO_PLACES
        is_due = waits & (on_device != NOWHERE)
        if taken and lease.reads_device:
            self._settling.want(on_device[is_due])
        elif taken and is_due.any():
            self._have_stored(lease, pending[is_due], on_device[is_due])

    def _known(self, lease: Lease) -> Blocks:
        """The first of a lease's pending blocks, up to one whose token block is not known, if it may come to be; of a
        lease that does not grow, what is not known is no longer pending."""
        if lease.is_growing:
            return lease.pending[: self._count_known(lease)]
        is_known = [lease.hashes[column] in self._tree.nodes for column in lease.pending[:, 0].tolist()]
        lease.pending = lease.pending[np.array(is_known, dtype=np.bool_)]
        return lease.pending

    def _count_known(self, lease: Lease) -> int:
        """How many of a lease's pending blocks come before one whose token block is not known. A prompt's blocks come
        to be known in turn, over many steps: what is behind the first unknown one is not looked at."""
        nodes = self._tree.nodes
        for begin in range(0, len(lease.pending), LOOKED_AT):
            columns = lease.pending[begin : begin + LOOKED_AT, 0].tolist()
            for at, column in enumerate(columns, begin):
                if lease.hashes[column] not in nodes:
                    return at
        return len(lease.pending)

    def _hold(self, lease: Lease, places: Blocks, blocks: Blocks) -> bool:
        """Let a lease have host blocks; False if that is more than leases may hold: it gets no more than fits."""
        new = int(np.count_nonzero(self._holds[blocks] == 0))
        fits = self._num_held + new <= self._most
        if not fits:
            is_new = self._holds[blocks] == 0
            count = int(np.searchsorted(np.cumsum(is_new), self._most - self._num_held, side="right"))
            places, blocks = places[:count], blocks[:count]
            new = int(np.count_nonzero(is_new[:count]))
        self._pool.retain(blocks)
        self._holds[blocks] += 1
        self._num_held += new
        self._leased += len(blocks)
        _add(lease, places, blocks, HOST)
        return fits

    def _lend(self, lease: Lease, places: Blocks, blocks: Blocks) -> NDArray[np.bool_]:
        """Let a lease have those of the device ``blocks [n]`` that are settled, if its reader can read them; which."""
        lent = blocks != NOWHERE if lease.reads_device else np.zeros(len(blocks), dtype=np.bool_)
        lent[lent] = self._settling.are_settled(blocks[lent])
        if lent.any():
            places, blocks = places[lent], blocks[lent]
            self._device.touch(blocks[::-1].copy())  # the head of a path is of use without its tail
            self._leased += len(blocks)
            self._lent += len(blocks)
            loans = np.column_stack([blocks, self._tree.device.generations(blocks)])
            lease.loans = np.concatenate([lease.loans, loans])
            _add(lease, places, blocks, DEVICE)
        return lent

    def _have_stored(self, lease: Lease, places: Blocks, device_blocks: Blocks) -> None:
        """Have device blocks copied to the host, once; again if what waits there for room is not all of it any more."""
        of = [tuple(place) for place in places.tolist()]
        if self._is_queueing():
            device_blocks = device_blocks[[place not in lease.asked for place in of]]
        lease.asked.update(of)
        self._store(device_blocks)

    def _let_go(self, lease: Lease) -> None:
        del self._leases[lease.name]
        blocks = _on_host(lease)
        self._holds[blocks] -= 1
        self._num_held -= int(np.count_nonzero(self._holds[blocks] == 0))
        self._pool.release(blocks[::-1].copy())  # the head of a path is of use without its tail

    def held_host_blocks(self) -> set[int]:
        return set(np.flatnonzero(self._holds).tolist())

    def check_integrity(self) -> None:
        """Raise AssertionError unless the leases' blocks are held, as often as there are leases of them."""
        holds = np.zeros_like(self._holds)
        for lease in self._leases.values():
            np.add.at(holds, _on_host(lease), 1)
        assert (holds == self._holds).all(), "a leased block is miscounted"
        assert self._num_held == np.count_nonzero(holds) <= self._most, "more blocks are leased than may be"
        assert (self._pool.references >= holds).all(), "a lease lost its hold"


def _add(lease: Lease, places: Blocks, blocks: Blocks, memory: int) -> None:
    rows = np.column_stack([places, blocks, np.full(len(blocks), memory)])
    lease.blocks = np.concatenate([lease.blocks, rows]).astype(np.int32)


def _on_host(lease: Lease) -> Blocks:
    """The host blocks of a lease."""
    blocks: Blocks = lease.blocks[lease.blocks[:, 3] == HOST, 2]
    return blocks

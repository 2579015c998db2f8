"""The owner's side of leases: answers engines that want to read blocks of this one's host and device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.leases import MAX_LEASES, NO_BLOCKS, Lease, Leases
from headwise.errors import InvalidRequestError
from headwise.runtime.engine.peers.base import LeaseAsk, Peers
from headwise.runtime.protocol.lease_messages import AskLease, EndLease, Leased, LeaseEnded, RenewLease
from headwise.storage.index.messages import HASH_BYTES
from headwise.transfer.connectors.base import ways_to_devices
from headwise.transfer.connectors.names import OF_FAR_DEVICES

log = logging.getLogger(__name__)

LEASE_BYTES = 16
NO_GRANT = 0
"""Of an answer that leases nothing."""


class Lending:
    """exports:   where each rank is read; none: nothing is leased
    timeout_s:  of silence after which a lease ends
    num_groups: head groups of a block table
    max_blocks: columns of one
    stands_still: whether nothing is computed at a time, though something is to be
    """

    def __init__(
        self,
        leases: Leases,
        peers: Peers,
        exports: tuple[tuple[bytes, ...], ...],
        *,
        timeout_s: float,
        num_groups: int,
        max_blocks: int,
        stands_still: Callable[[float], bool],
    ) -> None:
        self._leases, self._peers, self._exports = leases, peers, exports
        self._ways = frozenset(ways_to_devices(exports))
        self._timeout_s = timeout_s
        self._num_groups, self._max_blocks = num_groups, max_blocks
        self._stands_still = stands_still
        self._readers: dict[bytes, tuple[bytes, int]] = {}  # by lease: who reads it, and the epoch that it said

    def stats(self) -> dict[str, int]:
        return asdict(self._leases.stats())

    def take(self, reader: bytes, message: LeaseAsk, now: float) -> None:
        """Do and answer what a reader asks for; its epoch is that of this cache.

        Raises:
            InvalidRequestError: the message makes no sense here.
        """
        if len(message.lease) != LEASE_BYTES:
            raise InvalidRequestError(f"a lease's name must have {LEASE_BYTES} bytes, got {len(message.lease)}")
        if isinstance(message, AskLease):
            self._ask(reader, message, now)
        elif isinstance(message, RenewLease):
            self.renew(reader, message.lease, message.epoch, message.heard, now)
        elif isinstance(message, EndLease):
            self._end(reader, message)

    def _ask(self, reader: bytes, message: AskLease, now: float) -> None:
        hashes = [message.hashes[at : at + HASH_BYTES] for at in range(0, len(message.hashes), HASH_BYTES)]
        if len(set(hashes)) < len(hashes):
            raise InvalidRequestError("a lease is asked for a path with the same token block twice")
        self.lend(reader, message, hashes, now)

    def lend(
        self, reader: bytes, message: AskLease, path: Sequence[bytes], now: float, is_growing: bool = False
    ) -> None:
        """Lease what is wanted of a path, and what of it is yet to be computed; say so, or that nothing is leased."""
        lease = None
        if self._exports and self._is_of_this_cache(path, message.wanted):
            reads_device = not self._ways.isdisjoint(message.ways)
            until = now + self._timeout_s
            lease = self._leases.ask(message.lease, path, message.wanted, until, is_growing, reads_device)
        if lease is None:
            self.refuse(reader, message)
            return
        self._readers[message.lease] = reader, message.epoch
        self._tell(lease, 0)

    def _is_of_this_cache(self, path: Sequence[bytes], wanted: NDArray[np.bool_]) -> bool:
        fits = wanted.shape == (len(path), self._num_groups) and len(path) <= self._max_blocks
        if not fits:
            log.warning(
                "a lease of %d token blocks is asked for, at places %s: here are %d head groups and at most %d blocks",
                len(path), wanted.shape, self._num_groups, self._max_blocks,
            )  # fmt: skip
        return fits

    def slept(self) -> None:
        """The device's memory was freed, and another registration of it is told to nobody: far readers of devices are
        lent what is on the host from now on. Those of this node find the memory that comes next.
        """
        self._ways -= set(OF_FAR_DEVICES)

    def is_known(self, name: bytes) -> bool:
        """Whether there is such a lease."""
        return name in self._leases

    def renew(self, reader: bytes, name: bytes, epoch: int, heard: int, now: float) -> None:
        """A reader is there still: tell it what it has not heard of, or that there is no such lease.

        Without news an owner answers only while it computes what the lease is to have, and does not stand still: after
        ``timeout_s`` of silence the reader of a prompt computes.
        """
        lease = self._leases.find(name, now + self._timeout_s)
        if lease is None:
            self._peers.answer(reader, LeaseEnded(name, epoch, NO_GRANT, held=False))
            return
        self._readers[name] = reader, epoch
        is_news = lease.is_all or len(lease.blocks) > heard
        if is_news or (lease.is_growing and not self._stands_still(now)):
            self._tell(lease, heard)

    def computed(self, name: bytes) -> None:
        """What a lease was growing with has ended."""
        self._leases.grown(name)

    def refuse(self, reader: bytes, message: LeaseAsk) -> None:
        """Say that nothing is leased, and that what was does not hold."""
        name, epoch = message.lease, message.epoch
        if isinstance(message, AskLease):
            self._peers.answer(reader, Leased(name, epoch, NO_GRANT, 0, NO_BLOCKS, (), is_all=True))
        else:
            self._peers.answer(reader, LeaseEnded(name, epoch, NO_GRANT, held=False))

    def _end(self, reader: bytes, message: EndLease) -> None:
        held = self._leases.end(message.lease, message.grant)
        self._readers.pop(message.lease, None)
        self._peers.answer(reader, LeaseEnded(message.lease, message.epoch, message.grant, held))

    def advance(self, now: float) -> None:
        """Lease what has come to be there, and tell of it. To be called also while there is nothing to do."""
        for lease, told in self._leases.advance(now):
            self._tell(lease, told)
        if len(self._readers) > 2 * MAX_LEASES:
            self._readers = {name: reader for name, reader in self._readers.items() if name in self._leases}

    def _tell(self, lease: Lease, first: int) -> None:
        """Tell a reader of the blocks that it has not heard of."""
        reader, epoch = self._readers[lease.name]
        first = min(max(0, first), len(lease.blocks))
        self._peers.answer(
            reader, Leased(lease.name, epoch, lease.grant, first, lease.blocks[first:], self._exports, lease.is_all)
        )

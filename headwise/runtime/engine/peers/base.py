"""The contract between an engine's core and whatever carries its messages to other engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headwise.runtime.protocol.lease_messages import (
    AskLease,
    EndLease,
    Leased,
    LeaseEmbeds,
    LeaseEnded,
    LeaseWants,
    Offer,
    RenewLease,
    Taken,
)
from headwise.storage.index.messages import HASH_BYTES

LeaseAsk = AskLease | LeaseEmbeds | RenewLease | EndLease
Ask = LeaseAsk | Offer
LeaseAnswer = Leased | LeaseEnded | LeaseWants
Answer = LeaseAnswer | Taken


def hashes_of(path: bytes) -> list[bytes]:
    """The hashes of a path that was sent as one after the other; the last may be too short."""
    return [path[at : at + HASH_BYTES] for at in range(0, len(path), HASH_BYTES)]


@dataclass(frozen=True)
class Takers:
    """Who gets what only a leaving engine has.

    engine, epoch: the one that leaves, and the epoch of its cache
    evict: by engine that stays, token blocks of its host that may be evicted for it
    """

    engine: str
    epoch: int
    evict: Mapping[str, int]


class Peers(Protocol):
    """The other engines. Messages to and from them may be lost, late, doubled and out of order; nothing here waits."""

    def knows(self, engine: str, epoch: int) -> bool:
        """Whether there is an engine of this name whose cache is of this epoch, and not the one that asks."""

    def tp_size(self, engine: str) -> int:
        """The ranks of an engine that is known."""

    def epoch_of(self, engine: str) -> int | None:
        """The epoch of another engine's cache; None: there is no such engine, or it is the one that asks."""

    def send(self, engine: str, message: Ask) -> None:
        """Ask an engine that is known. The deployment's secret is put in."""

    def receive(self) -> list[LeaseAnswer]:
        """What others have answered of leases since the last call."""

    def taken(self) -> list[Taken]:
        """What they have answered of offers since the last call."""

    def answer(self, reader: bytes, message: Answer) -> None:
        """Answer who has asked."""

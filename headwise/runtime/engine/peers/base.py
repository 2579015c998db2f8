"""The contract between an engine's core and whatever carries its messages to other engines."""

from __future__ import annotations

from typing import Protocol

from headwise.runtime.protocol.messages import AskLease, EndLease, Leased, LeaseEnded, RenewLease

Ask = AskLease | RenewLease | EndLease
Answer = Leased | LeaseEnded


class Peers(Protocol):
    """The other engines. Messages to and from them may be lost, late, doubled and out of order; nothing here waits."""

    def knows(self, engine: str, epoch: int) -> bool:
        """Whether there is an engine of this name whose cache is of this epoch, and not the one that asks."""

    def tp_size(self, engine: str) -> int:
        """The ranks of an engine that is known."""

    def send(self, engine: str, message: Ask) -> None:
        """Ask an engine that is known. The deployment's secret is put in."""

    def receive(self) -> list[Answer]:
        """What others have answered since the last call."""

    def answer(self, reader: bytes, message: Answer) -> None:
        """Answer who has asked."""

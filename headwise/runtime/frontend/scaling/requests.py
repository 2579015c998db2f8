"""Clients' requests for a number of engines, until the owner of the engines has taken the last of them."""

from __future__ import annotations

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, OverloadedError
from headwise.runtime.frontend.scaling.exchange import Exchange, Wish

ANSWER_S = 15.0
"""Longest wait for the owner, which calls once a second."""
MAX_WAITING = 256

Asker = tuple[bytes, int]
"""A client's connection, and its number of the question."""


class ScaleRequests:
    """Those that are not answered yet. A number is absolute, so the last one counts, and its answer is that of all
    before it. Owned by the server's thread.

    instance: of the scheduler
    """

    def __init__(self, exchange: Exchange, instance: str) -> None:
        self._exchange = exchange
        self._instance = instance
        self._count = 0
        self._last = ""
        self._waiting: dict[Asker, float] = {}  # since when

    def add(self, asker: Asker, replicas: int | None, now: float) -> None:
        """A client asks. If it does so again with the same key, it only waits on. Raises `OverloadedError`."""
        if asker in self._waiting:
            return
        if len(self._waiting) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} clients wait for a number of engines already; try again later")
        self._count += 1
        self._last = f"{self._instance}-{self._count}"
        self._waiting[asker] = now
        self._exchange.wish(Wish(self._last, replicas))

    def forget(self, identities: frozenset[bytes]) -> None:
        """These clients are gone. What they asked for counts all the same."""
        self._waiting = {asker: since for asker, since in self._waiting.items() if asker[0] not in identities}

    def answers(self, now: float) -> list[tuple[Asker, str | HeadwiseError]]:
        """Who can be told by now what was decided, and that."""
        fleet = self._exchange.fleet
        if fleet is not None and fleet.wish == self._last:
            told: str | HeadwiseError = InvalidRequestError(fleet.refusal) if fleet.refusal else fleet.reason
            due = list(self._waiting)
        else:
            told = DeploymentError(
                f"the process that started the deployment has not taken the number for {ANSWER_S:g} s; try again later"
            )
            due = [asker for asker, since in self._waiting.items() if now - since > ANSWER_S]
        for asker in due:
            del self._waiting[asker]
        return [(asker, told) for asker in due]

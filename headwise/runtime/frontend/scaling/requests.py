"""Clients' requests for a number of engines, until the owner of the engines has taken the last of them."""

from __future__ import annotations

from dataclasses import replace

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, OverloadedError
from headwise.runtime.frontend.scaling.exchange import Exchange, Wish
from headwise.runtime.frontend.scaling.roles import Split

ANSWER_S = 15.0
"""Longest wait for the owner, which calls once a second."""
MAX_WAITING = 256

Asker = tuple[bytes, int]
"""A client's connection, and its number of the question."""


class ScaleRequests:
    """Those that are not answered yet. What is wished is absolute: each wish has all that was asked for before, of
    numbers the last one, so its answer is that of all before it. Owned by the server's thread.

    instance: of the scheduler
    """

    def __init__(self, exchange: Exchange, instance: str) -> None:
        self._exchange = exchange
        self._instance = instance
        self._count = 0
        self._last = Wish("", sets_number=False)
        self._waiting: dict[Asker, float] = {}  # since when

    def scale(self, asker: Asker, replicas: int | None, now: float, split: Split | None = None) -> None:
        """A client asks for a number, and maybe for a split. If it does so again with the same key, it only waits on.
        Raises `OverloadedError`."""
        if self._wait(asker, now):
            wish = replace(self._last, id=self._next_id(), replicas=replicas, sets_number=True)
            self._wish(wish if split is None else replace(wish, split=split, deal=wish.id))

    def roll(self, asker: Asker, now: float) -> None:
        """A client asks that all engines be replaced; otherwise as `scale`."""
        if self._wait(asker, now):
            name = self._next_id()
            self._wish(replace(self._last, id=name, roll=name))

    def _wait(self, asker: Asker, now: float) -> bool:
        """Whether the question is a new one."""
        if asker in self._waiting:
            return False
        if len(self._waiting) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} clients wait for a number of engines already; try again later")
        self._waiting[asker] = now
        return True

    def _next_id(self) -> str:
        self._count += 1
        return f"{self._instance}-{self._count}"

    def _wish(self, wish: Wish) -> None:
        self._last = wish
        self._exchange.wish(wish)

    def forget(self, identities: frozenset[bytes]) -> None:
        """These clients are gone. What they asked for counts all the same."""
        self._waiting = {asker: since for asker, since in self._waiting.items() if asker[0] not in identities}

    def answers(self, now: float) -> list[tuple[Asker, str | HeadwiseError]]:
        """Who can be told by now what was decided, and that."""
        fleet = self._exchange.fleet
        if fleet is not None and fleet.wish == self._last.id:
            told: str | HeadwiseError = InvalidRequestError(fleet.refusal) if fleet.refusal else fleet.reason
            due = list(self._waiting)
            self._last = replace(self._last, replicas=None, sets_number=False)  # a number is told of once
        else:
            told = DeploymentError(
                f"the process that started the deployment has not taken the number for {ANSWER_S:g} s; try again later"
            )
            due = [asker for asker, since in self._waiting.items() if now - since > ANSWER_S]
        for asker in due:
            del self._waiting[asker]
        return [(asker, told) for asker in due]

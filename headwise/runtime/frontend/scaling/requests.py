"""Clients' requests for a number of engines, until the owner of the engines has taken the last of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, OverloadedError
from headwise.runtime.frontend.scaling.exchange import Exchange, FleetState, Wish
from headwise.runtime.frontend.scaling.roles import Split
from headwise.runtime.protocol.weights import Weights

ANSWER_S = 15.0
"""Longest wait for the owner, which calls once a second."""
MAX_WAITING = 256

Asker = tuple[bytes, int]
"""A client's connection, and its number of the question."""


_Number = tuple[int | None, Split | None]
"""Of engines, as in a `Wish`, and how they are split."""


@dataclass(frozen=True)
class _Question:
    """What a client has asked for.

    since:  when
    number: of engines, and the split; None: that all be replaced
    """

    since: float
    number: _Number | None = None


class ScaleRequests:
    """Those that are not answered yet. What is wished is absolute: each wish has all that was asked for before, of
    numbers the last one. Who asks at the same time as others is told what comes of it: one roll does for all; of
    numbers the last one counts, and that is an error for who asked for another one. Owned by the server's thread.

    instance: of the scheduler
    """

    def __init__(self, exchange: Exchange, instance: str) -> None:
        self._exchange = exchange
        self._instance = instance
        self._count = 0
        self._last = Wish("", sets_number=False)
        self._waiting: dict[Asker, _Question] = {}
        self._number: _Number | None = None  # that was asked for last, and not told of yet

    def scale(self, asker: Asker, replicas: int | None, now: float, split: Split | None = None) -> None:
        """A client asks for a number, and maybe for a split. If it does so again with the same key, it only waits on.
        Raises `OverloadedError`."""
        if self._wait(asker, _Question(now, (replicas, split))):
            self._number = replicas, split
            wish = replace(self._last, id=self._next_id(), replicas=replicas, sets_number=True)
            self._wish(wish if split is None else replace(wish, split=split, deal=wish.id))

    def roll(self, asker: Asker, now: float) -> None:
        """A client asks that all engines be replaced; otherwise as `scale`."""
        if self._wait(asker, _Question(now)):
            name = self._next_id()
            self._wish(replace(self._last, id=name, roll=name))

    def want_weights(self, weights: Weights) -> None:
        """Engines are to be started with these. Nobody waits for an answer."""
        self._wish(replace(self._last, id=self._next_id(), weights=weights))

    @property
    def is_asking(self) -> bool:
        """Whether the owner has yet to take the last wish."""
        fleet = self._exchange.fleet
        return bool(self._last.id) and (fleet is None or fleet.wish != self._last.id)

    def _wait(self, asker: Asker, question: _Question) -> bool:
        """Whether the question is a new one."""
        if asker in self._waiting:
            return False
        if len(self._waiting) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} clients wait for a number of engines already; try again later")
        self._waiting[asker] = question
        return True

    def _next_id(self) -> str:
        self._count += 1
        return f"{self._instance}-{self._count}"

    def _wish(self, wish: Wish) -> None:
        self._last = wish
        self._exchange.wish(wish)

    def forget(self, identities: frozenset[bytes]) -> None:
        """These clients are gone. What they asked for counts all the same."""
        self._waiting = {asker: each for asker, each in self._waiting.items() if asker[0] not in identities}

    def answers(self, now: float) -> list[tuple[Asker, str | HeadwiseError]]:
        """Who can be told by now what was decided, and that."""
        fleet = self._exchange.fleet
        if fleet is not None and fleet.wish == self._last.id:
            told, self._waiting, self._number = self._told(fleet, self._number), {}, None
            self._last = replace(self._last, replicas=None, sets_number=False)  # a number is told of once
            return told
        late = DeploymentError(
            f"the process that started the deployment has not taken the number for {ANSWER_S:g} s; try again later"
        )
        due = [asker for asker, each in self._waiting.items() if now - each.since > ANSWER_S]
        for asker in due:
            del self._waiting[asker]
        return [(asker, late) for asker in due]

    def _told(self, fleet: FleetState, last: _Number | None) -> list[tuple[Asker, str | HeadwiseError]]:
        """What each of those who wait is told, now that the last wish was taken, and all before it.

        last: the number that counts, of those that were asked for; None: nobody asked for one
        """
        rolls = [each for each in self._waiting.values() if each.number is None]
        others = [each.number for each in self._waiting.values() if each.number not in (None, last)]

        def told(question: _Question) -> str | HeadwiseError:
            if question.number is None:
                return fleet.reason + ("; one roll for all who asked at the same time" if len(rolls) > 1 else "")
            if last is not None and question.number != last:
                what = f"that was refused: {fleet.refusal}" if fleet.refusal else f"the last one counts: {fleet.reason}"
                return DeploymentError(f"another client asked for {_in_words(last)} at the same time, and {what}")
            if fleet.refusal:
                return InvalidRequestError(fleet.refusal)
            if not others:
                return fleet.reason
            return (
                f"{fleet.reason}, in place of {_in_words(others[-1])}, which another client asked for at the same time"
            )

        return [(asker, told(each)) for asker, each in self._waiting.items()]


def _in_words(number: _Number | None) -> str:
    assert number is not None
    replicas, split = number
    apart = f" ({split.prefill} for prompts, {split.decode} to decode)" if split is not None else ""
    return f"{'as many engines as are needed' if replicas is None else f'{replicas} engines'}{apart}"

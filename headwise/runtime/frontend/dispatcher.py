"""Calls on their way to an engine: in order, each when its turn comes, by what the index knows of its prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwise.priority_queue import Order, PriorityQueue
from headwise.runtime.frontend.index_view import FIND_S, IndexView
from headwise.runtime.frontend.preprocessing_pool import Prepared
from headwise.runtime.frontend.routing import Matches, RoutedRequest, Router
from headwise.runtime.frontend.routing.base import TYPICAL_OUTPUT, Choice


@dataclass(eq=False)
class Call:
    """A client's question, until it is answered.

    order:    its place in the queue
    lost:     endpoint of the engine that lost the request; empty: it is new
    finds:    only who holds its prefix is asked
    ready_at: when it was prepared
    asked_at: when the index was asked, while its answer is awaited
    """

    identity: bytes
    key: int
    since: float
    order: Order
    session: str = ""
    lost: str = ""
    finds: bool = False
    prepared: Prepared | None = None
    ready_at: float = 0.0
    asked_at: float = 0.0
    is_over: bool = False


@dataclass(frozen=True)
class Placed:
    """A place at an engine is reserved for the call."""

    call: Call
    choice: Choice


@dataclass(frozen=True)
class Found:
    """What the index knows of the call's prefix; None: it did not answer."""

    call: Call
    matches: Matches | None


class Placement:
    """The index is asked when a call's turn comes, so that its answer is not old when it is used. A request is placed
    without an answer that is late; a call that only finds waits for it, and is asked again after a silence.

    Calls that are over are left out. No I/O but the index's.
    """

    def __init__(self, router: Router, index: IndexView, clock: Callable[[], float]) -> None:
        self._router, self._index, self._clock = router, index, clock
        self._queue: PriorityQueue[Call] = PriorityQueue()
        self._asking: dict[int, Call] = {}  # by the index's key, in the order in which they were asked
        self._finding: dict[int, Call] = {}  # likewise, what is only to be found
        self._to_find: list[Call] = []
        self._outcomes: list[Placed | Found] = []

    def __len__(self) -> int:
        """Calls that wait for an engine; those are not in it that the index is being asked for."""
        return len(self._queue)

    @property
    def is_asking(self) -> bool:
        """Whether the index is to answer."""
        return bool(self._asking or self._finding)

    def add(self, call: Call) -> None:
        """Take in a call that is prepared."""
        if call.finds:
            self._to_find.append(call)
        else:
            self._queue.push(call.order, call)

    def drop(self, call: Call) -> None:
        """The call is over."""
        self._queue.discard(call.order)

    def drain(self) -> list[Call]:
        """Give up those that wait."""
        return [self._queue.pop() for _ in range(len(self._queue))]

    def turn(self) -> list[Placed | Found]:
        """Take in what the index answered, and place those whose turn it is, as far as engines have room."""
        self._take_matches()
        self._serve_finds()
        self._serve_queue()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _ask(self, call: Call) -> bool:
        """Ask what the index knows of a call's path; False if no answer is to be waited for."""
        assert call.prepared is not None
        if not call.prepared.hashes:
            return False
        key = self._index.query(call.prepared.hashes)
        if key is None:
            return False
        (self._finding if call.finds else self._asking)[key] = call
        call.asked_at = self._clock()
        return True

    def _take_matches(self) -> None:
        answers, is_back = self._index.poll()
        for answer in answers:
            call = self._asking.pop(answer.key, None) or self._finding.pop(answer.key, None)
            if call is not None and not call.is_over:
                self._answer(call, answer.depths)
        if is_back:
            self._router.note("the index answers again")
            self._to_find += self._finding.values()  # it may have been started anew, and know of no question
            self._finding.clear()
        now = self._clock()
        while self._asking:
            key, call = next(iter(self._asking.items()))
            if not call.is_over and call.asked_at + self._index.timeout_s > now and not self._index.is_silent:
                return
            del self._asking[key]
            if not call.is_over:
                if self._index.late():
                    self._router.note(f"the index has not answered for {self._index.timeout_s:g} s: routed without it")
                self._answer(call, None)

    def _answer(self, call: Call, matches: Matches | None) -> None:
        if call.finds:
            self._outcomes.append(Found(call, matches))
        elif not self._place(call, matches):
            self._queue.push(call.order, call)

    def _serve_finds(self) -> None:
        """Ask what is only to be found, once the index answers; give up what has waited for too long."""
        for call in [*self._to_find, *self._finding.values()]:
            assert call.prepared is not None
            can_be_answered = call.prepared.hashes and self._index.is_there
            if not call.is_over and not (can_be_answered and self._clock() - call.ready_at <= FIND_S):
                call.is_over = True
                self._outcomes.append(Found(call, None))
        self._finding = {key: call for key, call in self._finding.items() if not call.is_over}
        self._to_find = [
            call for call in self._to_find if not call.is_over and (self._index.is_silent or not self._ask(call))
        ]

    def _serve_queue(self) -> None:
        if not self._queue or not self._router.num_engines:
            return
        room, passed_over = self._router.room(self._clock()) - len(self._asking), []
        uses_index = self._router.uses_index and self._router.num_engines > 1
        while room > 0 and self._queue:
            call = self._queue.pop()
            if call.lost and not self._router.can_take(call.lost, call.since, self._clock()):
                passed_over.append(call)  # all the room is at the engine that lost it
                continue
            room -= 1
            if not (uses_index and self._ask(call)) and not self._place(call, None):
                passed_over.append(call)
        for call in passed_over:
            self._queue.push(call.order, call)

    def _place(self, call: Call, matches: Matches | None) -> bool:
        """Reserve a place; False if no engine can take the request now."""
        assert call.prepared is not None
        request = call.prepared.request
        left = (request.sampling.max_tokens or TYPICAL_OUTPUT) - len(request.output_token_ids)
        routed = RoutedRequest(
            request.request_id,
            call.prepared.hashes,
            call.prepared.num_tokens,
            max(1, left),
            call.session,
            call.lost,
            call.since,
        )
        choice = self._router.select_and_reserve(routed, matches, self._clock())
        if choice is None:
            return False
        self._outcomes.append(Placed(call, choice))
        return True

"""Sends waiting calls to engines, by priority and by their turns, after asking the index who has their prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwise.priority_queue import Order, PriorityQueue
from headwise.prompt_turns import NONE_BESIDE, Beside, Present, PromptTurns, ShareOf, equal_shares
from headwise.runtime.frontend.index_view import LOOKUP_TIMEOUT_S, IndexView
from headwise.runtime.frontend.preprocessing_pool import PreparedRequest
from headwise.runtime.frontend.routing import Matches, RoutedRequest, Router
from headwise.runtime.frontend.routing.base import TYPICAL_OUTPUT, Choice

AHEAD_S, LOOKED_AT = 0.05, 16
"""How often it is looked whether of the next so many in the queue some go to engines that have no room."""


@dataclass(eq=False)
class PendingCall:
    """A client's request or prefix lookup that the scheduler has not answered yet.

    rank:        what is lower is served first: its priority, and whether it is new
    number:      who came first
    tenant, salt: of `GenerateRequest`
    num_bytes:   of its text
    lost:        endpoint of the engine that lost the request; empty: it is new
    is_lookup:   the client only asks who holds the prefix; no engine is chosen
    prepared_at: when it was tokenised and hashed
    asked_at:    when the index was asked for its prefix
    waits:       whether it is one of those that wait for an engine
    came:        `PromptTurns.now` when it was queued
    beside:      calls of its owner that waited then
    lacking:     of its tokens, those that no engine has, as far as that is known
    turn:        within its rank, see `PromptTurns`
    """

    identity: bytes
    key: int
    since: float
    rank: tuple[int, int]
    number: int
    tenant: str = ""
    salt: str = ""
    num_bytes: int = 0
    session: str = ""
    lost: str = ""
    is_lookup: bool = False
    prepared: PreparedRequest | None = None
    prepared_at: float = 0.0
    asked_at: float = 0.0
    waits: bool = False
    came: float = 0.0
    beside: Beside = NONE_BESIDE
    lacking: int = 0
    turn: float = 0.0
    is_told: bool = False
    is_over: bool = False

    @property
    def owner(self) -> str:
        """See `GenerateRequest`."""
        return self.tenant or self.salt

    @property
    def sender(self) -> str:
        """Who has sent it: a tenant, or a connection."""
        return self.tenant or self.identity.hex()

    @property
    def order(self) -> Order:
        """Its place in the queue."""
        return (*self.rank, self.turn, self.number)


@dataclass(frozen=True)
class Dispatched:
    """The call got an engine, and a place there is reserved."""

    call: PendingCall
    choice: Choice


@dataclass(frozen=True)
class LookedUp:
    """The lookup is over. matches: the index's answer; None: it did not answer."""

    call: PendingCall
    matches: Matches | None


class Dispatcher:
    """Keeps prepared calls in order until an engine has room for them.

    The index is asked only when it is a call's turn, so that the answer is fresh. If the answer is late, a request is
    dispatched without it. A lookup waits for it, and the index is asked again when it comes back after a silence.
    Calls that are over are skipped. Does no I/O except through the index.

    Where engines compute prompts by their turns, calls have them, too: what they lack is what no engine has of them. Of
    those that have to wait the index is asked for that, once; until it answers, they lack everything.
    """

    def __init__(
        self, router: Router, index: IndexView, clock: Callable[[], float], share_of: ShareOf = equal_shares
    ) -> None:
        self._router, self._index, self._clock = router, index, clock
        self._turns = PromptTurns(share_of) if router.options.fair_prompts else None
        self._present = Present()  # those that wait for an engine, the index being asked about them or not
        self._unknown: list[PendingCall] = []  # of which was not asked yet what they lack
        self._estimating: dict[int, PendingCall] = {}  # of which it was, by the index's key, oldest first
        self._queue: PriorityQueue[PendingCall] = PriorityQueue()
        self._asking: dict[int, PendingCall] = {}  # requests that the index is asked about, by its key, oldest first
        self._looking_up: dict[int, PendingCall] = {}  # lookups that the index is asked about
        self._to_look_up: list[PendingCall] = []
        self._outcomes: list[Dispatched | LookedUp] = []
        self._look_ahead_at = clock()

    def __len__(self) -> int:
        """Requests that wait for an engine, without those that the index is being asked about."""
        return len(self._queue)

    def held(self) -> tuple[int, int]:
        """Requests that wait for an engine, and the tokens of their prompts."""
        prepared = [call.prepared for call in self._queue.items() if call.prepared is not None]
        return len(prepared), sum(each.num_tokens for each in prepared)

    @property
    def is_asking(self) -> bool:
        """Whether an answer of the index is awaited."""
        return bool(self._asking or self._looking_up)

    def waiting(self) -> Iterator[PendingCall]:
        """The calls that no engine has taken yet."""
        return (call for call in self._queue.items() if not call.is_over)

    def add(self, call: PendingCall) -> None:
        """Queue a prepared call."""
        if call.is_lookup:
            self._to_look_up.append(call)
            return
        assert call.prepared is not None
        call.waits = True
        if self._turns is not None:
            call.came, call.beside = self._turns.now, self._present.beside(call.owner)
            self._unknown.append(call)
        self._push(call, call.prepared.num_tokens)

    def _push(self, call: PendingCall, lacking: int) -> None:
        """Queue a call that lacks so many tokens."""
        call.lacking = lacking
        if self._turns is not None:
            call.turn = self._turns.turn(call.came, lacking, call.beside, call.owner)
        self._present.add(call.owner, lacking)
        self._queue.push(call.order, call)

    def drop(self, call: PendingCall) -> None:
        """Remove a call that is over."""
        self._queue.discard(call.order)
        self._is_through(call)

    def clear(self) -> list[PendingCall]:
        """Remove the waiting requests and return them."""
        calls = [self._queue.pop() for _ in range(len(self._queue))]
        for call in calls:
            self._is_through(call)
        return calls

    def _is_through(self, call: PendingCall) -> None:
        """It does not wait for an engine any more."""
        if call.waits:
            call.waits = False
            self._present.remove(call.owner, call.lacking)

    def dispatch(self) -> list[Dispatched | LookedUp]:
        """Take in the index's answers, and dispatch as many calls as engines have room for. Call it in every loop."""
        self._take_matches()
        self._serve_lookups()
        self._serve_queue()
        self._ask_what_they_lack()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _ask(self, call: PendingCall) -> bool:
        """Ask the index about a call's prefix; False if there is no answer to wait for."""
        assert call.prepared is not None
        if not call.prepared.hashes:
            return False
        key = self._index.query(call.prepared.hashes)
        if key is None:
            return False
        (self._looking_up if call.is_lookup else self._asking)[key] = call
        call.asked_at = self._clock()
        return True

    def _take_matches(self) -> None:
        answers, is_back = self._index.poll()
        for answer in answers:
            if (waiting := self._estimating.pop(answer.key, None)) is not None:
                self._learn_what_it_lacks(waiting, answer.depths)
                continue
            call = self._asking.pop(answer.key, None) or self._looking_up.pop(answer.key, None)
            if call is not None and not call.is_over:
                self._resolve(call, answer.depths)
        if is_back:
            self._router.note("the index answers again")
            self._to_look_up += self._looking_up.values()  # it may have been restarted: ask again
            self._looking_up.clear()
        now = self._clock()
        while self._asking:
            key, call = next(iter(self._asking.items()))
            if not call.is_over and call.asked_at + self._index.timeout_s > now and not self._index.is_silent:
                return
            del self._asking[key]
            if not call.is_over:
                if self._index.note_late():
                    self._router.note(f"the index has not answered for {self._index.timeout_s:g} s: routed without it")
                self._resolve(call, None)

    def _resolve(self, call: PendingCall, matches: Matches | None) -> None:
        if call.is_lookup:
            self._outcomes.append(LookedUp(call, matches))
        elif not self._reserve(call, matches):
            self._queue.push(call.order, call)

    def _serve_lookups(self) -> None:
        """Ask the index about new lookups, once it answers, and give up lookups that waited for too long."""
        for call in [*self._to_look_up, *self._looking_up.values()]:
            assert call.prepared is not None
            can_be_answered = call.prepared.hashes and self._index.is_there
            if not call.is_over and not (can_be_answered and self._clock() - call.prepared_at <= LOOKUP_TIMEOUT_S):
                call.is_over = True
                self._outcomes.append(LookedUp(call, None))
        self._looking_up = {key: call for key, call in self._looking_up.items() if not call.is_over}
        self._to_look_up = [
            call for call in self._to_look_up if not call.is_over and (self._index.is_silent or not self._ask(call))
        ]

    def _serve_queue(self) -> None:
        if not self._queue or not self._router.num_engines:
            return
        now, passed_over = self._clock(), []
        room = self._router.room(now) - len(self._asking)
        while room > 0 and self._queue:
            call = self._queue.pop()
            if call.lost and not self._router.can_take(self._routed(call), now):
                passed_over.append(call)  # only the engine that lost it has room
                continue
            room -= 1
            if not self._send(call):
                passed_over.append(call)
        if self._queue and now >= self._look_ahead_at:
            self._look_ahead_at = now + AHEAD_S
            passed_over += self._send_ahead(now)
        for call in passed_over:
            self._queue.push(call.order, call)

    def _send_ahead(self, now: float) -> list[PendingCall]:
        """Engines have no room left: send those that these take all the same. Returns others that are before them: who
        has much waiting there may be first here."""
        passed_over = []
        for _ in range(min(LOOKED_AT, len(self._queue))):
            call = self._queue.pop()
            routed = self._routed(call)
            goes = self._router.places(routed, now) > len(self._asking)
            goes = goes and (not call.lost or self._router.can_take(routed, now))
            if not goes or not self._send(call):
                passed_over.append(call)
        return passed_over

    def _send(self, call: PendingCall) -> bool:
        """Ask the index about a call, or reserve a place for it where that knows nothing; False if there is none."""
        uses_index = self._router.uses_index and self._router.num_engines > 1
        return (uses_index and self._ask(call)) or self._reserve(call, None)

    def _ask_what_they_lack(self) -> None:
        """Ask the index of those that are new in the queue, for engines have no room for them now. An answer that comes
        too late to be of use is none."""
        since, calls, self._unknown = self._clock() - self._index.timeout_s, self._unknown, []
        for key in [key for key, call in self._estimating.items() if call.prepared_at < since]:
            del self._estimating[key]
        if not self._router.uses_index or not self._router.num_engines:
            return
        for call in calls:
            hashes = call.prepared.hashes if call.prepared is not None and call.waits and not call.asked_at else ()
            if hashes and (asked := self._index.query(hashes)) is not None:
                self._estimating[asked] = call

    def _learn_what_it_lacks(self, call: PendingCall, matches: Matches) -> None:
        """Give a call that waits the turn that it has by what the engine has of it that has most."""
        assert call.prepared is not None
        held = max((max(depths) for depths in matches.values()), default=0) * self._router.options.block_size
        if held and self._queue.discard(call.order):
            self._present.remove(call.owner, call.lacking)
            self._push(call, max(1, call.prepared.num_tokens - held))

    def _reserve(self, call: PendingCall, matches: Matches | None) -> bool:
        """Reserve a place at an engine for a request; False if no engine can take it now."""
        choice = self._router.select_and_reserve(self._routed(call), matches, self._clock())
        if choice is None:
            return False
        if self._turns is not None:
            self._turns.computed(call.lacking, self._present.parts((), self._turns.share_of))
        self._is_through(call)
        self._outcomes.append(Dispatched(call, choice))
        return True

    def _routed(self, call: PendingCall) -> RoutedRequest:
        assert call.prepared is not None
        request = call.prepared.request
        left = (request.sampling.max_tokens or TYPICAL_OUTPUT) - len(request.output_token_ids)
        return RoutedRequest(
            request.request_id,
            call.prepared.hashes,
            call.prepared.num_tokens,
            max(1, left),
            call.session,
            call.lost,
            call.since,
            call.rank[0],
            call.owner,
            call.lacking,
            1.0 if self._turns is None else self._turns.share_of(call.owner),
        )

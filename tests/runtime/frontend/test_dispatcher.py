"""The scheduler's queue, with a router and an index of its own: random calls, answers, engines and departures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwise.prompt_turns import Present
from headwise.runtime.frontend.dispatcher import Dispatcher, LookedUp, PendingCall
from headwise.runtime.frontend.index_view import LOOKUP_TIMEOUT_S, IndexView
from headwise.runtime.frontend.preprocessing_pool import PreparedRequest
from headwise.runtime.frontend.routing import Router, RouterOptions
from headwise.runtime.protocol.messages import EngineLoad, EngineStatus, WaitingPrompts
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams, as_token_ids, owner_digest
from headwise.storage.index.messages import IndexStats, Matches

BLOCK = 4
ENGINES = ("a", "b")


class Store:
    """Answers when it is told to."""

    socket = None

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.answers: list[Matches | IndexStats] = [IndexStats(0, {})]

    def query(self, key: int, block_hashes: Sequence[bytes]) -> bool:
        self.asked.append(key)
        return True

    def ask_stats(self, key: int) -> bool:
        return True

    def gone(self, node: str, epoch: int) -> None:
        raise AssertionError

    def poll(self) -> list[Matches | IndexStats]:
        answers, self.answers = self.answers, []
        return answers


class DispatcherMachine(RuleBasedStateMachine):
    """waiting: calls that are neither dispatched nor dropped, by number; open: lookups that have no answer yet"""

    @initialize(is_fair=st.booleans(), queue=st.integers(1, 3))
    def begin(self, is_fair: bool, queue: int) -> None:
        self.now = 1e6
        self.store = Store()
        self.router = Router(
            RouterOptions(block_size=BLOCK, engine_queue=queue, max_num_seqs=4, fair_prompts=is_fair),
            random.Random(0),
        )
        self.index = IndexView(self.store, 0.1)
        self.dispatcher = Dispatcher(self.router, self.index, lambda: self.now)
        self.waiting: dict[int, PendingCall] = {}
        self.open: dict[int, PendingCall] = {}
        self.sent: dict[str, list[str]] = {name: [] for name in ENGINES}  # since the last report
        self.waiting_at = dict.fromkeys(ENGINES, 0)
        self.number = 0

    def call(self, tokens: int, owner: str, **fields: Any) -> PendingCall:
        self.number += 1
        request = GenerateRequest(f"r{self.number}", as_token_ids([1] * tokens), SamplingParams(max_tokens=1))
        hashes = [bytes([block, self.number % 251]) for block in range(tokens // BLOCK)]
        rank = fields.pop("rank", (0, 1))
        call = PendingCall(b"", self.number, self.now, rank, self.number, salt=owner, **fields)
        call.prepared, call.prepared_at = PreparedRequest(request, hashes), self.now
        self.dispatcher.add(call)
        return call

    @rule(
        tokens=st.integers(1, 60),
        owner=st.sampled_from(["", "a", "b"]),
        rank=st.tuples(st.integers(-1, 1), st.sampled_from([0, 1, 1])),
        lost=st.sampled_from(["", "", "tcp://a"]),
    )
    def ask(self, tokens: int, owner: str, rank: tuple[int, int], lost: str) -> None:
        call = self.call(tokens, owner, rank=rank, lost=lost)
        self.waiting[call.number] = call

    @rule(tokens=st.integers(1, 60))
    def look_up(self, tokens: int) -> None:
        call = self.call(tokens, "", is_lookup=True)
        self.open[call.number] = call

    @precondition(lambda self: self.waiting or self.open)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted({*self.waiting, *self.open})))
        call = self.waiting.pop(number, None) or self.open.pop(number)
        call.is_over = True
        self.dispatcher.drop(call)

    @rule(
        name=st.sampled_from(ENGINES),
        waiting=st.integers(0, 3),
        prompts=st.none()
        | st.builds(WaitingPrompts, st.integers(-1, 1), st.floats(0, 100), st.just(((owner_digest("a"), 2, 30),))),
    )
    def report(self, name: str, waiting: int, prompts: WaitingPrompts | None = None) -> None:
        times = {"prefill_token_s": 0.01, "host_token_s": 0.001, "storage_token_s": 0.001}
        load = EngineLoad(waiting=waiting, **times, prompts=prompts)
        self.waiting_at[name] = waiting
        received, self.sent[name] = tuple(self.sent[name]), []
        self.router.update(EngineStatus("", name, f"tcp://{name}", 0, {}, 1, load, received), self.now)

    @precondition(lambda self: self.store.asked)
    @rule(data=st.data(), depths=st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 15)))
    def answer(self, data: st.DataObject, depths: dict[str, int]) -> None:
        key = data.draw(st.sampled_from(self.store.asked))
        self.store.asked.remove(key)
        self.store.answers.append(Matches(key, {name: (depth, depth, depth) for name, depth in depths.items()}))

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.2]))
    def go_on(self, seconds: float) -> None:
        self.now += seconds
        for outcome in self.dispatcher.dispatch():
            call = outcome.call
            if isinstance(outcome, LookedUp):
                assert self.open.pop(call.number) is call
                continue
            assert self.waiting.pop(call.number) is call, "each once, and none that was given up"
            name = outcome.choice.engine
            self.sent[name].append(f"r{call.number}")
            beyond = self.waiting_at[name] + len(self.sent[name]) - self.router.options.engine_queue
            assert beyond <= 1, "of so short a queue one place is for who goes before what waits"
            self.dispatcher.drop(call)

    @invariant()
    def what_waits_is_what_was_asked_and_is_not_through(self) -> None:
        present = Present().with_more((call.owner, call.lacking) for call in self.waiting.values())
        assert self.dispatcher._present.tenants == present.tenants
        asked = [call for call in self.dispatcher._asking.values() if not call.is_over]
        assert len(self.dispatcher) + len(asked) == len(self.waiting)
        assert len({call.order for call in self.waiting.values()}) == len(self.waiting)
        for call in self.waiting.values():
            assert call.prepared is not None
            assert 1 <= call.lacking <= call.prepared.num_tokens
            assert self.router.options.fair_prompts or not call.turn

    def teardown(self) -> None:
        """With room at the engines all is answered, and nothing is kept of it."""
        if not hasattr(self, "dispatcher"):
            return
        for _ in range(self.number + 8):
            for name in ENGINES:
                self.report(name, 0)
            self.go_on(0.2)
        self.now += LOOKUP_TIMEOUT_S + 1
        for name in ENGINES:
            self.report(name, 0)
        self.go_on(0.2)
        assert not self.waiting
        assert not self.open
        assert self.dispatcher._present.tenants == {}
        assert not self.dispatcher._estimating
        assert not self.dispatcher._unknown


TestDispatcher = DispatcherMachine.TestCase
